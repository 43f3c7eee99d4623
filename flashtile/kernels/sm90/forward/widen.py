"""Keys or values of 8 bits in 16, before a forward that multiplies those. Plain Triton."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.kernels.device.memory import head_offset, load_tile, store_tile
from flashtile.kernels.device.stored import scales_of_rows, widened
from flashtile.triton_glue.language import jit, tl


@dataclass(frozen=True)
class WidenTile:
    """Compile-time part: rows of a tile, its columns, those of a row; what is stored; whether each token has a scale."""

    rows: int
    columns: int
    head_dim: int
    stored: str
    token: bool


@jit(do_not_specialize=["span"])
def attention_widened(x_ptr, scale_ptr, wide_ptr, strides, span, heads, T: tl.constexpr):
    """wide = x, exactly, or where T.token times its scale, rounded once. A program does T.rows of a head.

    Strides of x and wide (slabs, span, heads, head_dim), and of the scale (slabs, span, heads) or None.
    """
    ROWS: tl.constexpr = T.rows
    COLUMNS: tl.constexpr = T.columns
    STORED: tl.constexpr = T.stored
    tiles = tl.cdiv(span, ROWS)
    number = tl.program_id(0)
    head, row, slab = number % heads, number // heads % tiles * ROWS, number // heads // tiles
    at = x_ptr + head_offset(slab, head, strides[0]) + row.to(tl.int64) * strides[0][1]
    x = load_tile(at, strides[0], 0, span - row, T.head_dim, ROWS, COLUMNS, True)
    if T.token:
        scale = scales_of_rows(scale_ptr, strides[2], slab, row, head, span - row, ROWS, 0)
        x = widened(x, tl.float32, STORED, True) * scale[:, None]
    else:
        x = widened(x, wide_ptr.dtype.element_ty, STORED, True)
    to = wide_ptr + head_offset(slab, head, strides[1]) + row.to(tl.int64) * strides[1][1]
    store_tile(to, strides[1], x, span - row, T.head_dim, ROWS, COLUMNS)
