"""Loads and stores of (rows, columns) tiles under any strides."""

from __future__ import annotations

from flashtile.triton_glue.language import jit, tl


@jit
def head_offset(batch, head, strides):
    """Elements from a tensor's start to (batch, 0, head, 0); strides are (batch, seqlen, heads, head_dim)."""
    return batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[2]


@jit
def column_offset(head, strides):
    """Elements from (batch, row, 0, 0) to (batch, row, head, 0)."""
    return head.to(tl.int64) * strides[2]


@jit
def row_offset(row, strides):
    return tl.cast(row, tl.int64) * strides[1]


@jit
def tile_offsets(strides, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Offsets of a tile's elements from its first one; 64-bit, so that any stride is safe."""
    row = tl.arange(0, ROWS).to(tl.int64)
    column = tl.arange(0, COLUMNS).to(tl.int64)
    return row[:, None] * strides[1] + column[None, :] * strides[3]


@jit
def inside(first, end, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr):
    """Which elements of a tile exist: rows first <= r < end (if MASKED), columns below WIDTH."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    keep = column < WIDTH
    if MASKED:
        rows = (row >= first) & (row < end)
        keep = rows if WIDTH == COLUMNS else rows & keep
    return keep


@jit
def load_tile(ptr, strides, first, end, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr):
    """The tile at `ptr`, zero outside rows first <= r < end (if MASKED) and beyond WIDTH columns."""
    at = ptr + tile_offsets(strides, ROWS, COLUMNS)
    if MASKED or WIDTH != COLUMNS:
        return tl.load(at, mask=inside(first, end, WIDTH, ROWS, COLUMNS, MASKED), other=0.0)
    return tl.load(at)


@jit
def hold(x, COLUMNS: tl.constexpr):
    """x, multiplied by the unit matrix: exactly x, but laid out as an accumulator.

    Triton leaves the left operand of a Hopper product in registers where it came from a product, and reads it from
    shared memory anew for every instruction where it came from a load.
    """
    index = tl.arange(0, COLUMNS)
    unit = (index[:, None] == index[None, :]).to(tl.float32).to(x.dtype)  # the interpreter casts no bool to bfloat16
    return tl.dot(x, unit).to(x.dtype)


@jit
def store_tile(ptr, strides, value, end, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write rows r < end and columns below WIDTH of a tile, in the tensor's own type."""
    at = ptr + tile_offsets(strides, ROWS, COLUMNS)
    tl.store(at, value.to(ptr.dtype.element_ty), mask=inside(0, end, WIDTH, ROWS, COLUMNS, True))
