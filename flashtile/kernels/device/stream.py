"""Launches that begin before the kernel in front of them is done."""

from __future__ import annotations

from flashtile.triton_glue.language import INTERPRETED, constexpr, jit, tl

ON_GPU = constexpr(not INTERPRETED)


@jit
def await_stream(SOON: tl.constexpr = True):
    """Wait until all kernels before this one are done, and let the next one be brought to the multiprocessors.

    For a `KernelCall` that begins `early`, before it reads or writes memory. Elsewhere it does nothing. From sm90 on. Not SOON:
    the next one is brought when all blocks have come to `let_next`, or have ended.
    """
    if ON_GPU:
        tl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        if SOON:
            let_next()


@jit
def let_next():
    """Let the next kernel be brought to the multiprocessors.

    Where its blocks are small, and this one's fill a multiprocessor each, all of them would come to the first few of these that
    are done, as many as have room there, if they were let too soon.
    """
    if ON_GPU:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
