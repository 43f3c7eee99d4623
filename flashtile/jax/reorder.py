"""A compiled kernel with its parameters in another order.

jaxlib's launcher gives each parameter the next buffer, operands before results, and knows no buffer twice among the operands.
A kernel that takes a buffer it adds to by descriptor and by pointer, with inputs behind it, fits no such order. PTX names its
parameters, so their order is that of a list in its text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashtile.plan.call import Descriptor
from flashtile.plan.device import Device
from flashtile.triton_glue.compile import assemble

ENTRY = re.compile(r"(\.entry\s+\w+\s*\(\s*)(.*?)(\s*\))", re.DOTALL)


def reordered(ptx: str, runtime: Sequence[tuple[Any, str]], places: Sequence[int]) -> str:
    """The text with the kernel's runtime arguments in the order `places`; what Triton appends (scratch) stays at the end."""
    found = ENTRY.search(ptx)
    assert found is not None, "the PTX text has no entry"
    lines = [line.strip().rstrip(",") for line in found.group(2).splitlines() if line.strip()]
    groups, at = [], 0
    for arg, _ in runtime:  # a descriptor is a map, a shape and strides
        size = 1 + 2 * len(arg.axes) if isinstance(arg, Descriptor) else 1
        groups.append(lines[at : at + size])
        at += size
    ordered = [line for place in places for line in groups[place]] + lines[at:]
    assert sorted(ordered) == sorted(lines)
    return ptx[: found.start(2)] + ",\n\t".join(ordered) + ptx[found.end(2) :]


def machine_code(kernel: Any, ptx: str, device: Device, contracts: bool) -> bytes:
    """What Triton's assembler makes of a PTX text that is `kernel`'s but for the order, with Triton's options.

    It is kept on disk beside what Triton compiles, under the text and the kernel's hash (which says assembler and options).
    """
    from triton.runtime.cache import get_cache_manager

    cache = get_cache_manager(hashlib.sha256(f"{kernel.hash}\n{ptx}".encode()).hexdigest())
    name = f"{kernel.metadata.name}.cubin"
    kept = cache.get_file(name)
    if kept is not None:
        return Path(kept).read_bytes()
    code, log = assemble(ptx, device, "-lineinfo", *([] if contracts else ["--fmad=false"]))
    if code is None:
        raise RuntimeError(f"ptxas refused a kernel for {device.target}:\n{log}")
    cache.put(code, name, binary=True)
    return code
