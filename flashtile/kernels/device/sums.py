"""Sums of what many programs leave behind, in a fixed order."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.kernels.device.memory import head_offset, tile_offsets
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


@dataclass(frozen=True)
class HeadSums:
    """Compile-time part of `sum_heads`: heads that are summed, and numbers of a row of each in every pair of tensors."""

    group: int
    widths: tuple[int, ...]

    @property
    def columns(self) -> int:
        return 1 << (max(self.widths) - 1).bit_length()

    @property
    def rows(self) -> int:
        """Of a tile."""
        return max(2048 // self.columns, 1)


@jit
def sum_group(source_ptr, target_ptr, strides, tile, head, slab, span, heads, WIDTH: tl.constexpr, T: tl.constexpr):
    """The sum of a group's heads for a tile of rows."""
    ROWS: tl.constexpr = T.rows
    COLUMNS: tl.constexpr = T.columns
    GROUP: tl.constexpr = T.group
    row, column = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    mine = (row < span)[:, None] & (column < WIDTH)[None, :]
    line = (slab.to(tl.int64) * span + row)[:, None] * heads + head
    source = source_ptr + line * (GROUP * WIDTH) + column[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in tl.static_range(GROUP):
        total += tl.load(source + i * WIDTH, mask=mine, other=0.0)
    target = target_ptr + head_offset(slab, head, strides) + (tile * ROWS).to(tl.int64) * strides[1]
    tl.store(target + tile_offsets(strides, ROWS, COLUMNS), total.to(target_ptr.dtype.element_ty), mask=mine)


@jit(do_not_specialize=["span", "heads"])
def sum_heads(source_ptrs, target_ptrs, strides, span, heads, T: tl.constexpr):
    """target[:, :, head] = the sum in float32 of T.group of source's heads, which lie densely; of one or two pairs."""
    tiles = tl.cdiv(span, T.rows)
    number = tl.program_id(0)
    tile, head, slab = number % tiles, number // tiles % heads, number // tiles // heads
    sum_group(source_ptrs[0], target_ptrs[0], strides[0], tile, head, slab, span, heads, T.widths[0], T)
    if len(source_ptrs) > 1:
        sum_group(source_ptrs[1], target_ptrs[1], strides[1], tile, head, slab, span, heads, T.widths[1], T)
