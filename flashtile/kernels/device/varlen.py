"""Batches whose items differ in length: which tile of which item a program computes.

A schedule lists the tiles of all items, RECORD int32 numbers each. It is made on the device, so that the host never waits
for lengths: the grid has as many programs as there could be tiles, and those left over find a record of zeros, an item of
no rows. Items whose tiles take longest come first (Graham's rule: the last to finish is then a short one), each with all of
its tiles, so that the L2 cache holds what those under way read.
"""

from __future__ import annotations

from typing import NamedTuple

from flashtile.kernels.device.grid import ROWS, seat
from flashtile.plan.call import Buffer, KernelCall, Pointer
from flashtile.problem.attention import AttentionProblem
from flashtile.triton_glue.language import constexpr, jit, tl

RECORD = constexpr(8)  # tile, then the fields of Item


class Item(NamedTuple):
    """One sequence of a batch, and where it lies in the tensors."""

    batch: tl.tensor  # its index
    first_q: tl.tensor  # its first row in the tensors' second axis
    span_q: tl.tensor  # rows that belong to it
    q: tl.tensor  # rows that count
    first_k: tl.tensor
    span_k: tl.tensor
    k: tl.tensor


@jit
def bounds(index, cu_ptr, used_ptr, seqlen, batch, VARLEN: tl.constexpr):
    """(first, span, length) of the items `index`; item `batch` is what lies past the last one, and has length 0.

    Whatever the tensors hold, all of it lies inside the axis of `seqlen` elements.
    """
    here = index < batch
    if VARLEN:
        first = tl.load(cu_ptr + index, mask=index <= batch, other=seqlen)
        end = tl.load(cu_ptr + index + 1, mask=here, other=seqlen)
        first = tl.minimum(tl.maximum(first, 0), seqlen)
        span = tl.where(index <= batch, tl.maximum(tl.minimum(end, seqlen) - first, 0), 0)
    else:
        first = index * 0
        span = tl.where(here, seqlen, 0)
    length = tl.where(here, span, 0)
    if used_ptr is not None:
        length = tl.minimum(length, tl.maximum(tl.load(used_ptr + index, mask=here, other=0), 0))
    return first, span, length


@jit
def tiles_and_work(
    item, lengths_ptrs, seqlen_q, seqlen_k, batch, BLOCK: tl.constexpr, OVER_KEYS: tl.constexpr, VARLEN: tl.constexpr
):
    """(tiles, work of the longest of them) of the items `item`, in queries or keys that a tile visits."""
    _, span_q, q = bounds(item, lengths_ptrs[0], lengths_ptrs[2], seqlen_q, batch, VARLEN)
    _, span_k, k = bounds(item, lengths_ptrs[1], lengths_ptrs[3], seqlen_k, batch, VARLEN)
    if OVER_KEYS:
        return tl.cdiv(span_k, BLOCK), tl.where(k > 0, q, 0)
    else:
        return tl.cdiv(span_q, BLOCK), tl.where(q > 0, k, 0)


@jit(do_not_specialize=["seqlen_q", "seqlen_k", "batch", "count"])
def schedule_tiles(lengths_ptrs, schedule_ptr, seqlen_q, seqlen_k, batch, count, BLOCK: tl.constexpr, OVER_KEYS: tl.constexpr,
                   REVERSED: tl.constexpr, VARLEN: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """The schedule of `count` records for tiles of BLOCK queries, or keys if OVER_KEYS. One program per item, and one more.

    lengths_ptrs = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), None where absent. An item's tiles stand in order, or
    in reverse: the longest first. Program i finds their place by counting the tiles of items that take longer, or as long
    and come before it. Behind the records stand two numbers more: how many of them are tiles, and 0, where those who take
    them count.
    """
    item = tl.program_id(0)
    first_q, span_q, length_q = bounds(item, lengths_ptrs[0], lengths_ptrs[2], seqlen_q, batch, VARLEN)
    first_k, span_k, length_k = bounds(item, lengths_ptrs[1], lengths_ptrs[3], seqlen_k, batch, VARLEN)
    mine, work = tiles_and_work(item, lengths_ptrs, seqlen_q, seqlen_k, batch, BLOCK, OVER_KEYS, VARLEN)
    longer = item * 0
    for first in tl.range(0, batch + 1, CHUNK):
        other = first + tl.arange(0, CHUNK)
        tiles, longest = tiles_and_work(other, lengths_ptrs, seqlen_q, seqlen_k, batch, BLOCK, OVER_KEYS, VARLEN)
        longer += tl.sum(tl.where((longest > work) | (longest == work) & (other < item), tiles, 0))
    for start in tl.range(0, mine, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        at = longer + (mine - 1 - tile if REVERSED else tile)
        here = (tile < mine) & (at < count)
        record = schedule_ptr + at * RECORD
        tl.store(record, tile, mask=here)
        fields = (item, first_q, span_q, length_q, first_k, span_k, length_k)
        for i in tl.static_range(7):
            tl.store(record + (1 + i), tile * 0 + fields[i], mask=here)
    if item == batch:  # nothing takes less long, and all others come before it
        every = longer + mine
        tl.store(schedule_ptr + count * RECORD, tl.minimum(every, count))
        tl.store(schedule_ptr + count * RECORD + 1, item * 0)
        for start in tl.range(every * RECORD, count * RECORD, CHUNK):
            at = start + tl.arange(0, CHUNK)
            tl.store(schedule_ptr + at, at * 0, mask=at < count * RECORD)


@jit
def assign_tile(schedule_ptr, seqlen, seqlen_q, seqlen_k, heads, BLOCK: tl.constexpr, OVER_KEYS: tl.constexpr, T: tl.constexpr):
    """`tile_of` this program."""
    return tile_of(tl.program_id(0), tl.num_programs(0), schedule_ptr, seqlen, seqlen_q, seqlen_k, heads, BLOCK, OVER_KEYS, T)


@jit
def abreast(per_head, T: tl.constexpr):
    """Heads whose tiles go together, `per_head` each."""
    return tl.maximum(T.schedule.wave // per_head, T.schedule.swizzle)


@jit
def scheduled(number, schedule_ptr, heads, together, BLOCK: tl.constexpr, OVER_KEYS: tl.constexpr, REVERSED: tl.constexpr):
    """(tile, head, Item, place in the schedule) of a number below the schedule's tiles times `heads`; BLOCK, OVER_KEYS and
    REVERSED as the schedule has them.

    Items go one after another, all heads of each, `together` of them tile by tile: of a long one a few heads are under way at
    a time, whose keys the L2 cache holds, of short ones all, whose rows lie side by side in memory.
    """
    record = schedule_ptr + number // heads * RECORD
    tile = tl.load(record)
    item = Item(
        tl.load(record + 1), tl.load(record + 2), tl.load(record + 3), tl.load(record + 4),
        tl.load(record + 5), tl.load(record + 6), tl.load(record + 7),
    )  # fmt: skip
    tiles = tl.maximum(tl.cdiv(item.span_k if OVER_KEYS else item.span_q, BLOCK), 1)
    first = number // heads - (tiles - 1 - tile if REVERSED else tile)
    place, head = seat(number - first * heads, tiles, heads, together, False)
    return tiles - 1 - place if REVERSED else place, head, item, first + place


@jit
def tile_of(number, tiles, schedule_ptr, seqlen, seqlen_q, seqlen_k, heads,
            BLOCK: tl.constexpr, OVER_KEYS: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """(tile, head, Item, unit) of a number below `tiles`; tiles of BLOCK along an axis of `seqlen`, for each of `heads`.

    unit counts tiles: those of one head, and of one item where all are alike, stand together. T.items.together: the items'
    tiles of a head follow one another, for they read the same bias, which the L2 cache then reads from memory once.
    """
    if T.items.ragged:
        tile, head, item, slot = scheduled(
            number, schedule_ptr, heads, T.schedule.swizzle, BLOCK, OVER_KEYS, T.mask.right and not OVER_KEYS
        )
        return tile, head, item, head * (tiles // heads) + slot
    else:
        per_head = tl.cdiv(seqlen, BLOCK)
        tile, batch_head = seat(number, per_head, tiles // per_head, abreast(per_head, T), T.schedule.last_first)
        if T.items.together:
            batches = tiles // per_head // heads
            batch, head = batch_head % batches, batch_head // batches
            batch_head = batch * heads + head
        else:
            batch, head = batch_head // heads, batch_head % heads
        item = Item(batch, batch * 0, seqlen_q, seqlen_q, batch * 0, seqlen_k, seqlen_k)
        return tile, head, item, batch_head * per_head + tile


@jit
def slab(item, T: tl.constexpr):
    """The item's place in the tensors' first axis."""
    if T.items.varlen:
        return item.batch * 0
    else:
        return item.batch


@jit
def first_padded(item, T: tl.constexpr):
    """The first of the item's rows in a buffer that pads every item to whole tiles."""
    if T.items.varlen:
        return (item.first_q // ROWS + item.batch) * ROWS
    else:
        return item.first_q


def padded_total(seqlen: int, items: int, varlen: bool) -> int:
    """Rows of a buffer that `first_padded` indexes: `seqlen` of them, in `items` items and what lies past the last."""
    rows = ROWS if isinstance(ROWS, int) else int(ROWS.value)
    return (seqlen // rows + items + 1) * rows if varlen else -(-seqlen // rows) * rows


def most_tiles(seqlen: int, items: int, block: int, varlen: bool) -> int:
    """Tiles along an axis of `seqlen` tokens, whatever the items' lengths; each may leave one tile begun."""
    return seqlen // block + items + 1 if varlen else -(-seqlen // block) * items


class Schedules:
    """The schedules that the passes of a plan take their tiles from, each made once."""

    def __init__(self, p: AttentionProblem):
        self.problem, self.made = p, dict[tuple[bool, int], Pointer]()
        self.buffers: list[Buffer] = []
        self.calls: list[KernelCall] = []

    def of(self, block: int, over_keys: bool = False) -> Pointer | None:
        """The schedule of tiles of `block` queries, or keys; None where all items are alike."""
        p = self.problem
        if not p.lengths.ragged:
            return None
        key = over_keys, block
        if key not in self.made:
            count = most_tiles(p.span_k if over_keys else p.span_q, p.batch, block, p.lengths.varlen)
            record = RECORD if isinstance(RECORD, int) else int(RECORD.value)
            self.made[key] = Pointer(f"schedule.{len(self.made)}")
            self.buffers.append(Buffer(self.made[key].name, (count * record + 2,), "int32", "scratch"))
            names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
            lengths = tuple(Pointer(n) if n in p.lengths.tensors else None for n in names)
            constants = dict(
                BLOCK=block, OVER_KEYS=over_keys, REVERSED=p.band.right is not None and not over_keys,
                VARLEN=p.lengths.varlen, CHUNK=64,
            )  # fmt: skip
            args = (lengths, self.made[key], p.span_q, p.span_k, p.batch, count)
            self.calls.append(KernelCall(schedule_tiles, (p.batch + 1, 1, 1), args, tuple(constants.items()), 4, 1))
        return self.made[key]
