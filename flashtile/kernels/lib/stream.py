"""Launches that begin before the kernel in front of them is done."""

from __future__ import annotations

from flashtile._triton import INTERPRETED, constexpr, jit, tl

ON_GPU = constexpr(not INTERPRETED)


@jit
def await_stream():
    """Wait until all kernels before this one are done, and let the next one be brought to the multiprocessors.

    For a `KernelCall` that begins `early`, before it reads or writes memory. Elsewhere it does nothing. From sm90 on.
    """
    if ON_GPU:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
