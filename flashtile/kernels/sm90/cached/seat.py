"""What a block over a cache computes, and where its results go: common to Hopper's kernels over caches."""

from typing import NamedTuple

from flashtile.kernels.device.decoding import alike
from flashtile.kernels.device.grid import Sizes
from flashtile.kernels.device.mask import tiles_seen, visible
from flashtile.kernels.device.softmax import add_sink, finish, scored
from flashtile.kernels.sm90.device.layouts import column_layout, row_layout
from flashtile.triton_glue.gluon import gl, gluon, lane, least_of_lanes, most_of_lanes

STRIP = gl.constexpr(64)  # columns that one box of the copy engine has: 128 bytes, a swizzle
LANES = gl.constexpr(32)  # of a warp
LIFT_LOG2 = gl.constexpr(15.0)  # of probabilities that are multiplied in fp16 beside bf16: 2^-29 has all its bits
DROP = gl.constexpr(2.0**-15)  # takes it back

# Group and batch come in a tuple: where they are 1, or multiples of 16, kernels are compiled for that.
UNSPECIALIZED = ["seqlen_q", "heads_kv", "capacity", "shares", "left", "right"]


class CachedSizes(NamedTuple):
    """Of a launch."""

    seqlen_q: gl.tensor
    heads_kv: gl.tensor
    capacity: gl.tensor  # rows that an item may have
    shares: gl.tensor  # of the keys that a tile of queries may see, a block each
    left: gl.tensor  # of the band, 0 where it has no bound
    right: gl.tensor
    group: gl.tensor  # query heads that share one of keys
    batch: gl.tensor


class CachedSeat(NamedTuple):
    """What a block computes: whose queries, from which on, and which keys of how many."""

    item: gl.tensor
    token: gl.tensor  # the first query
    head: gl.tensor  # of keys
    chunk: gl.tensor  # which of the tiles that a group of heads takes
    queries: gl.tensor  # of the item
    keys: gl.tensor  # of the item
    row: gl.tensor  # of a contiguous cache, where the first key is
    first: gl.tensor  # keys from first to end are this block's, a multiple of T.block_k
    end: gl.tensor
    whole_from: gl.tensor  # tiles from here to whole_to are seen whole
    whole_to: gl.tensor
    seen_from: gl.tensor  # the first key that some query sees
    seen_to: gl.tensor
    whole: gl.tensor  # whether these are all keys of the item, in place of a share of them, and the result is written


@gluon.jit
def seat_of(number, lengths, sizes, T: gl.constexpr):
    """The CachedSeat of a block; lengths = (rows that are used, the first key's row or None), of items."""
    TOKENS: gl.constexpr = T.rows // T.heads
    SPAN: gl.constexpr = T.split * T.parts
    item, token, share = whose(number, sizes, T)
    whole = gl.to_tensor(False)
    if T.whole > 0:
        alone = all_alike(lengths, sizes, T)
        own_item, own_token, there = whose_alone(number, sizes, T)
        item, token = gl.where(alone, own_item, item), gl.where(alone, own_token, token)
        whole, share = alone & there, gl.where(alone, sizes.shares, share)  # a share that no key has
    head = number % (sizes.heads_kv * T.chunks)
    row, keys = keys_of(item, lengths, sizes.capacity)
    lo, full_lo, full_hi, hi, ends = tiles_seen(
        token, sizes.seqlen_q, keys, sizes.left, sizes.right, T.mask.left, T.mask.right, TOKENS, T.block_k, T
    )
    first, end = lo, hi
    if T.split > 0 and not T.direct:
        if T.mask.left:  # shares are counted from the first that a query sees: there are no blocks for others
            share += lo // SPAN
        first, end = gl.maximum(lo, share * SPAN), gl.minimum(hi, (share + 1) * SPAN)
        if T.whole > 0:
            first, end = gl.where(whole, lo, first), gl.where(whole, hi, end)
    return CachedSeat(
        item, token, head // T.chunks, head % T.chunks, sizes.seqlen_q, keys, row, first, end, full_lo, full_hi,
        ends[0], ends[1], whole,
    )  # fmt: skip


@gluon.jit
def whose(number, sizes, T: gl.constexpr):
    """(item, first query, share of the keys) of a block: what of its seat does not depend on lengths."""
    TOKENS: gl.constexpr = T.rows // T.heads
    rest = number // (sizes.heads_kv * T.chunks)
    tiles = (sizes.seqlen_q + TOKENS - 1) // TOKENS
    tile = rest // sizes.shares
    return tile // tiles, tile % tiles * TOKENS, rest % sizes.shares


@gluon.jit
def whose_alone(number, sizes, T: gl.constexpr):
    """(item, first query, whether there is one) where a block has all keys of an item: the first blocks, and no others."""
    TOKENS: gl.constexpr = T.rows // T.heads
    tiles = (sizes.seqlen_q + TOKENS - 1) // TOKENS
    tile = number // (sizes.heads_kv * T.chunks)
    there = tile < tiles * sizes.batch
    return gl.where(there, tile // tiles, 0), gl.where(there, tile % tiles, 0) * TOKENS, there


@gluon.jit
def all_alike(lengths, sizes, T: gl.constexpr):
    """Whether items' keys are `alike`: a lane of a warp has each 32nd item."""
    CHUNKS: gl.constexpr = T.whole // LANES
    least, most = gl.to_tensor(sizes.capacity), gl.to_tensor(0)
    for chunk in gl.static_range(CHUNKS):  # whose loads are all under way
        _, keys = keys_of(gl.minimum(chunk * LANES + lane(), sizes.batch - 1), lengths, sizes.capacity)
        least, most = gl.minimum(least, keys), gl.maximum(most, keys)
    return alike(least_of_lanes(least), most_of_lanes(most))


@gluon.jit
def keys_of(item, lengths, capacity):
    """(row of the first key, how many there are) of an item."""
    row = gl.to_tensor(0)
    if lengths[1] is not None:
        row = gl.maximum(gl.load(lengths[1] + item), 0)
    return row, gl.maximum(gl.minimum(gl.load(lengths[0] + item), capacity) - row, 0)


@gluon.jit
def first_key(share, T: gl.constexpr):
    """The first key of a share, where there is no window on the left."""
    if T.split > 0 and not T.direct:
        return share * (T.split * T.parts)
    else:
        return share * 0


@gluon.jit
def places(seat, sizes, L: gl.constexpr, T: gl.constexpr):
    """(query, head, whether it exists) of the T.rows rows."""
    HEADS: gl.constexpr = T.heads
    ROWS: gl.constexpr = T.rows
    packed = gl.arange(0, ROWS, L)
    row, member = seat.token + packed // HEADS, seat.chunk * HEADS + packed % HEADS
    group = sizes.group
    return row, seat.head * group + gl.minimum(member, group - 1), (row < seat.queries) & (member < group)


@gluon.jit
def queries_of(ptr, strides, part, seat, sizes, T: gl.constexpr):
    """64 columns of the queries."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])  # pyright: ignore[reportAssignmentType]
    row, head, exists = places(seat, sizes, gl.SliceLayout(1, LAYOUT), T)
    at = seat.item.to(gl.int64) * strides[0] + row.to(gl.int64) * strides[1] + head.to(gl.int64) * strides[2]
    column = part * STRIP + gl.arange(0, STRIP, gl.SliceLayout(0, LAYOUT))
    inside = exists[:, None] & (column < T.head_dim)[None, :]
    return gl.load(ptr + (at[:, None] + column.to(gl.int64)[None, :] * strides[3]), mask=inside, other=0.0)


@gluon.jit
def scale_of(given, seat):
    """What all stored numbers of the item's head are to be multiplied by."""
    ptr, strides = given
    return gl.load(ptr + seat.item.to(gl.int64) * strides[0] + seat.head.to(gl.int64) * strides[1])


@gluon.jit
def lifted(level, T: gl.constexpr):
    """What is subtracted in the exponent: where T.lowers probabilities are 2^LIFT_LOG2 times as large."""
    if T.lowers:
        return level - LIFT_LOG2
    else:
        return level


@gluon.jit
def hidden(score, start, seat, sizes, T: gl.constexpr):
    """Scores of the key tile at `start`, -inf where a row does not see a key."""
    BLOCK_K: gl.constexpr = T.block_k
    row, _, _ = places(seat, sizes, row_layout(BLOCK_K), T)
    key = start + gl.arange(0, BLOCK_K, column_layout(BLOCK_K))
    keep = visible(row[:, None], key[None, :], Sizes(seat.queries, seat.keys, 0, 0), (sizes.left, sizes.right), T)
    return gl.where(keep, score, float("-inf"))


@gluon.jit
def store_part(rows, part_ptrs, part, seat, sizes, T: gl.constexpr, FIRST: gl.constexpr = 0):
    """(acc, top, total) of one part, for rows that exist, as `device/decoding.py` reads them; acc's columns are those of values
    from FIRST on.
    """
    COLUMNS: gl.constexpr = rows.acc.shape[1]
    L: gl.constexpr = rows.acc.type.layout
    row, head, exists = places(seat, sizes, gl.SliceLayout(1, L), T)
    place = part_place(part, row, head, seat, sizes)
    if FIRST == 0:
        gl.store(part_ptrs[1] + place, rows.top, mask=exists)
        gl.store(part_ptrs[2] + place, rows.total, mask=exists)
    value = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, L))
    at = place[:, None] * T.head_dim_v + value[None, :]
    gl.store(part_ptrs[0] + at, rows.acc, mask=exists[:, None] & (value < T.head_dim_v)[None, :])


@gluon.jit
def part_place(part, row, head, seat, sizes):
    """Where a part's rows are among (parts, tokens, heads)."""
    token = seat.item.to(gl.int64) * sizes.seqlen_q + row
    tokens = sizes.batch.to(gl.int64) * sizes.seqlen_q
    return (gl.to_tensor(part).to(gl.int64) * tokens + token) * (sizes.heads_kv * sizes.group) + head


@gluon.jit
def write(rows, out_ptrs, strides, seat, sizes, T: gl.constexpr, FIRST: gl.constexpr = 0):
    """out and lse of finished rows, by the operations of `device/decoding.py`; acc's columns are those of values from FIRST on.

    out_ptrs = (out, lse, sink or None).
    """
    COLUMNS: gl.constexpr = rows.acc.shape[1]
    L: gl.constexpr = rows.acc.type.layout
    row, head, exists = places(seat, sizes, gl.SliceLayout(1, L), T)
    rows = scored(rows, T)
    if T.modifiers.sink:
        rows = add_sink(rows, gl.load(out_ptrs[2] + head.to(gl.int64) * strides[2][0]).to(gl.float32), T)
    out, lse = finish(rows, T)
    if FIRST == 0:
        at = (seat.item.to(gl.int64) * (sizes.heads_kv * sizes.group) + head) * sizes.seqlen_q + row
        gl.store(out_ptrs[1] + at, lse, mask=exists)
    value = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, L))
    at = seat.item.to(gl.int64) * strides[1][0] + row.to(gl.int64) * strides[1][1] + head.to(gl.int64) * strides[1][2]
    at = at[:, None] + value.to(gl.int64)[None, :] * strides[1][3]
    gl.store(out_ptrs[0] + at, out.to(out_ptrs[0].dtype.element_ty), mask=exists[:, None] & (value < T.head_dim_v)[None, :])
