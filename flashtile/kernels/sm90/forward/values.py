"""Values of 8 bits turned along the keys, as the matrix unit takes them, before a forward multiplies them. Plain Triton."""

from __future__ import annotations

from flashtile.kernels.device.grid import ROWS
from flashtile.kernels.device.memory import head_offset
from flashtile.kernels.device.varlen import Item, scheduled, slab
from flashtile.triton_glue.language import PLAIN_INTEGERS, jit, tl


@jit
def turned_key(place):
    """Which key stands at a place: of sixteen, the one that a thread has in the accumulator where the operand wants this place.

    Of the bits 3 2 1 0 of a key these are 3 = 1, 2 = 3, 1 = 2, 0 = 0 of its place.
    """
    return (place & ~14) | ((place & 2) << 2) | ((place & 12) >> 1)


@jit(do_not_specialize=PLAIN_INTEGERS)
def attention_values(v_ptr, turned_ptr, strides, seqlen_q, seqlen_k, heads, left, right, region, T: tl.constexpr):
    """turned[slab, head, column, place] = v[slab, key, head, column], zero for keys that no query sees.

    A program turns ROWS keys of a part of the columns. Keys stand in groups of sixteen, in each as `turned_key` has them.
    v: bytes with strides of (slabs, seqlen_k, heads, head_dim_v); turned: (slabs, heads, head_dim_v, padded), dense, with whole
    tiles of ROWS keys for every item.
    region = (schedule of tiles of keys where T.items.ragged, padded).
    """
    COLUMNS: tl.constexpr = T.columns_v
    part, number = tl.program_id(0) % T.parts_v, tl.program_id(0) // T.parts_v
    if T.items.ragged:
        tile, head, item, _ = scheduled(number, region[0], heads, 1, ROWS, True, False)
    else:
        tiles = tl.cdiv(seqlen_k, ROWS)
        tile, batch_head = number % tiles, number // tiles
        batch, head = batch_head // heads, batch_head % heads
        item = Item(batch, batch * 0, seqlen_q, seqlen_q, batch * 0, seqlen_k, seqlen_k)
    first, end, start = 0, item.k, item.first_k
    if T.mask.left:
        first = item.k - item.q - left
    if T.mask.right:
        end = tl.minimum(item.k, item.k + right)
    if T.items.varlen:
        start = (item.first_k // ROWS + item.batch) * ROWS
    place = tile * ROWS + tl.arange(0, ROWS)
    key, column = turned_key(place), part * COLUMNS + tl.arange(0, COLUMNS)
    exists = column < T.head_dim_v
    batch = slab(item, T)
    at = v_ptr + head_offset(batch, head, strides) + (item.first_k + key).to(tl.int64)[:, None] * strides[1]
    seen = ((key >= first) & (key < end))[:, None] & exists[None, :]
    value = tl.load(at + column.to(tl.int64)[None, :] * strides[3], mask=seen, other=0)
    line = (batch * heads + head).to(tl.int64) * T.head_dim_v + column
    to = turned_ptr + line[:, None] * region[1] + (start + place)[None, :]
    there = exists[:, None] & (place < tl.cdiv(item.span_k, ROWS) * ROWS)[None, :]
    tl.store(to, tl.permute(value, (1, 0)), mask=there)
