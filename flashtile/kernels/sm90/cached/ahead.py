"""What a block reads first is brought to the L2 cache while the kernel in front of it ends. Nothing depends on it.

That kernel may be about to change lengths, pages or keys. So they are read past the L1 cache, which would keep what was there
before; what they say is where to look, and everything is read again once that kernel is done.
"""

from flashtile.kernels.sm90.cached.seat import STRIP, places, seat_of
from flashtile.triton_glue.gluon import gl, gluon, prefetch

KEYS = gl.constexpr(256)  # of a block, that are brought


@gluon.jit
def bring_ahead(inputs, q_strides, table, lengths, sizes, T: gl.constexpr):
    """Queries, and the first keys and values. inputs = (queries, keys, their strides, values, their strides)."""
    seat = seat_of(gl.program_id(0), lengths, sizes, T, True)
    bring_keys(inputs[1], inputs[2], table, seat, sizes, T.copied_k, T.copied_columns_k, T)
    bring_keys(inputs[3], inputs[4], table, seat, sizes, T.copied_v, T.copied_columns_v, T)
    LAYOUT: gl.constexpr = lines_layout(T.parts_k)
    row, head, exists = places(seat, sizes, gl.SliceLayout(1, LAYOUT), T)
    at = seat.item.to(gl.int64) * q_strides[0] + row.to(gl.int64) * q_strides[1] + head.to(gl.int64) * q_strides[2]
    column = gl.arange(0, T.parts_k, gl.SliceLayout(0, LAYOUT)).to(gl.int64) * STRIP
    prefetch(inputs[0] + (at[:, None] + column[None, :] * q_strides[3]), exists[:, None] & (column >= 0)[None, :])


@gluon.jit
def bring_keys(ptr, strides, table, seat, sizes, LINES: gl.constexpr, COLUMNS: gl.constexpr, T: gl.constexpr):
    """Of a block's first KEYS keys LINES lines of COLUMNS numbers each."""
    LAYOUT: gl.constexpr = lines_layout(LINES)
    key = seat.first + gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT))
    seen = (key >= seat.seen_from) & (key < gl.minimum(seat.end, seat.seen_to))
    page, row = seat.item, seat.row + key
    if T.table:
        at = seat.item.to(gl.int64) * table[1][0] + (key // T.page).to(gl.int64) * table[1][1]
        page = gl.minimum(gl.maximum(gl.load(table[0] + at, mask=seen, other=0, cache_modifier=".cg"), 0), sizes[8] - 1)
        row = key % T.page
    at = page.to(gl.int64) * strides[0] + row.to(gl.int64) * strides[1] + seat.head.to(gl.int64) * strides[2]
    column = gl.arange(0, LINES, gl.SliceLayout(0, LAYOUT)).to(gl.int64) * COLUMNS
    prefetch(ptr + (at[:, None] + column[None, :] * strides[3]), seen[:, None] & (column >= 0)[None, :])


@gluon.constexpr_function
def lines_layout(lines: int):
    """Lanes next to each other have a row's lines."""
    return gl.BlockedLayout([1, 1], [32 // lines, lines], [4, 1], [1, 0])
