"""Sums of what many programs leave behind, in a fixed order."""

from __future__ import annotations

from flashtile.kernels.device.varlen import RECORD
from flashtile.triton_glue.language import jit, tl


@jit(do_not_specialize=["count", "heads"])
def sum_partials(source_ptr, schedule_ptr, target_ptr, count, heads, BLOCK: tl.constexpr):
    """target[i] = the sum of source[i, :count], in a fixed order, for i over items and heads.

    With a schedule source is (heads, count), a number for each record, and those of the item are summed.
    """
    row = tl.program_id(0).to(tl.int64)
    source = source_ptr + row * count
    if schedule_ptr is not None:
        source = source_ptr + row % heads * count
    total = tl.zeros([BLOCK], source_ptr.dtype.element_ty)
    for start in tl.range(0, count, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mine = column < count
        if schedule_ptr is not None:
            mine = mine & (tl.load(schedule_ptr + column * RECORD + 1, mask=mine, other=-1) == row // heads)
        total += tl.load(source + column, mask=mine, other=0.0)
    tl.store(target_ptr + row, tl.sum(total).to(target_ptr.dtype.element_ty))
