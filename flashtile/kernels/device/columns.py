"""Sums over rows, of what programs have summed before."""

from __future__ import annotations

from math import ceil

from flashtile.plan.call import KernelCall, Pointer
from flashtile.triton_glue.language import jit, tl

ROWS, BLOCK, WARPS = 512, 16, 16  # the sums of 264 programs, two per SM of an H100, are on their way at once


def column_sums(partial: str, outputs: tuple[str, ...], programs: int, hidden: int) -> KernelCall:
    """Sums over the middle axis of partial (outputs, programs, hidden)."""
    args = (Pointer(partial), tuple(map(Pointer, outputs)), programs, hidden)
    constants = (("ROWS", ROWS), ("BLOCK", BLOCK))
    return KernelCall(sum_columns, (ceil(hidden / BLOCK), len(outputs), 1), args, constants, WARPS, 1)


@jit
def sum_columns(partial_ptr, outputs, programs, hidden, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """outputs[slot] = the sum of partial[slot] over programs, in a fixed order."""
    slot = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)
        at = (slot * programs + row)[:, None] * hidden + column[None, :]
        total += tl.load(partial_ptr + at, mask=(row < programs)[:, None] & (column < hidden)[None, :], other=0.0)
    summed = tl.sum(total, 0)
    for i in tl.static_range(len(outputs)):
        if slot == i:
            tl.store(outputs[i] + column, summed.to(outputs[i].dtype.element_ty), mask=column < hidden)
