"""Which queries a block of the backward visits, and which blocks have visited them before."""

from typing import Any, NamedTuple

from flashtile.kernels.device.blocks import block_counts, block_list, block_start, long_lists, longest
from flashtile.kernels.device.grid import Sizes, padded_rows, seat
from flashtile.kernels.device.mask import key_range
from flashtile.kernels.device.varlen import Item, abreast, first_padded, slab, tile_of
from flashtile.kernels.sm90.backward.split_tiles import divide, gives_to, takes_of
from flashtile.kernels.sm90.device.ticket import read_word, write_words
from flashtile.triton_glue.gluon import afresh, aggregate, gl, gluon, uniform
from flashtile.triton_glue.language import constexpr

WORDS = constexpr(16)  # numbers that `tell_tile` tells


class Work(NamedTuple):
    """What all blocks share."""

    tiles: gl.tensor  # of keys, of all heads; where items differ in length, as many as there could be
    sizes: Sizes
    band: tuple[gl.tensor, gl.tensor]
    region: tuple  # schedule, queries of a head in padded buffers, tiles of a head that the schedule has; or Nones
    mask_args: tuple  # of the predicates
    lists: tuple  # the mask's block lists by key block and by query block: counts, indices, order, each with its strides


@aggregate
class Visits:
    """The queries that a key tile visits, for one query head of the group after another.

    Where T.mask.blocks_q lists name them, lo, full_hi and tiles say nothing, and as many steps as lie before full_lo need the
    mask; shift is then how many steps others take first.
    """

    lo: (
        gl.tensor
    )  # the first step's, the last of all where T.sways and it is their turn; the first of all where T.schedule.rotates
    stride: gl.tensor  # from step to step
    shift: gl.tensor  # how far behind lo the first step's are, where T.schedule.rotates: those before them come last
    full_lo: gl.tensor
    full_hi: gl.tensor
    tiles: gl.tensor  # of one query head
    begin: gl.tensor  # steps are counted over all key tiles of a block
    end: gl.tensor
    job: gl.tensor  # of `helping`: positive of who gives what it sums, negative of who takes that, else 0

    @gluon.constexpr_function
    def __init__(self, lo, stride, shift, full_lo, full_hi, tiles, begin, end, job):
        self.lo = lo
        self.stride = stride
        self.shift = shift
        self.full_lo = full_lo
        self.full_hi = full_hi
        self.tiles = tiles
        self.begin = begin
        self.end = end
        self.job = job


@aggregate
class BackwardWalk:
    """A key tile and the query tiles that see it."""

    told: gl.tensor  # in which turn, where T.tells
    tile: gl.tensor
    column: gl.tensor
    batch: gl.tensor
    slab: gl.tensor  # the item's place in the tensors' first axis
    first_q: gl.tensor  # its first query and key in their second
    first_k: gl.tensor
    span_k: gl.tensor  # keys that belong to it
    first_row: gl.tensor  # its first query in buffers that pad every item, and how many a head has there
    padded: gl.tensor
    head_kv: gl.tensor
    visits: Visits

    @gluon.constexpr_function
    def __init__(self, told, tile, column, batch, slab, first_q, first_k, span_k, first_row, padded, head_kv, visits):
        self.told = told
        self.tile = tile
        self.column = column
        self.batch = batch
        self.slab = slab
        self.first_q = first_q
        self.first_k = first_k
        self.span_k = span_k
        self.first_row = first_row
        self.padded = padded
        self.head_kv = head_kv
        self.visits = visits

    @gluon.jit
    def at(self, step, T: gl.constexpr):
        """(query head, first query) of a step, unless T.tells."""
        return self.head_kv, self.rotated(self.visits.lo + (step - self.visits.begin) * self.visits.stride, T)

    @gluon.jit
    def rotated(self, start, T: gl.constexpr):
        """The first query of a step, given that without T.schedule.rotates."""
        if T.schedule.rotates:
            start += self.visits.shift
            length = self.visits.tiles * T.block_q
            return start - gl.where(start >= self.visits.lo + length, length, 0)
        else:
            return start

    @gluon.jit
    def masked(self, start):
        """Whether the mask must be asked for the queries from `start` on: false only where all is visible."""
        return (start < self.visits.full_lo) | (start >= self.visits.full_hi)

    @gluon.jit
    def visited(self, head, work, T: gl.constexpr):
        """Of a query head: (steps; where lists name them, in how many of these the mask must be asked, and the list)."""
        if T.mask.blocks_q > 0:
            PER: gl.constexpr = T.mask.blocks_q // T.block_q
            indices, partial, whole = block_list(afresh(work.lists[0]), self.batch, head, self.column // T.mask.blocks_k)
            return whole * PER, partial * PER, indices
        else:
            return self.visits.tiles, 0, 0

    @gluon.jit
    def visit(self, i, asked, listed, T: gl.constexpr):
        """(first query, whether the mask must be asked) of the i-th step of a query head."""
        if T.mask.blocks_q > 0:
            return block_start(listed, i, T.mask.blocks_q, T.block_q), i < asked
        else:
            start = self.rotated(self.visits.lo + i * T.block_q, T)
            return start, self.masked(start)

    @gluon.jit
    def turn(self, head, start, sizes, work, WARPS: gl.constexpr, T: gl.constexpr):
        """How many key tiles add to the query tile at `start` before this one. Blocks only wait for earlier ones.

        Under a right bound the last tile comes first: each begins at its own diagonal, one tile behind the next, so that
        nobody waits. Without, all begin with the first query that they see, and run one behind the other. With lists the tiles
        of the blocks before this one count that the query block's list names, asked by a role of WARPS warps.
        """
        shift, band = sizes.k - sizes.q, work.band
        if T.mask.blocks_q > 0:
            LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])  # pyright: ignore[reportAssignmentType]
            PER: gl.constexpr = T.mask.blocks_k // T.block_k
            indices, _, visited = block_list(work.lists[1], self.batch, head, start // T.mask.blocks_q)
            before = self.tile * 0
            for first in range(0, visited, 32):
                place = first + gl.arange(0, 32, LAYOUT)
                other = gl.load(indices + place, mask=place < visited, other=2147483647)
                before += gl.sum((other < self.tile // PER).to(gl.int32), 0)
            return before * PER + self.tile % PER
        elif T.mask.right:
            end = gl.cdiv(gl.maximum(start + T.block_q + shift + band[1], 0), T.block_k)
            tiles = gl.cdiv(sizes.k, T.block_k)
            end = gl.where(start + T.block_q > sizes.q, tiles, gl.minimum(end, tiles))
            return end - 1 - self.tile
        elif T.mask.left:
            return self.tile - gl.maximum(start + shift - band[0], 0) // T.block_k
        else:
            return self.tile


class BackwardScene(NamedTuple):
    """What all steps of a consumer's tile share: the block's memory, the tile, and what the kernel was given."""

    memory: Any  # BackwardMemory
    sum_ptrs: Any  # as the kernel has grads[0]
    place: BackwardWalk
    sizes: Sizes  # the item's
    work: Work
    scale: Any
    score_args: Any
    seed: Any  # of dropout


class Ranks(NamedTuple):
    """How tickets of tiles with lists go, from the longest list to the shortest."""

    tiles: gl.tensor  # of a head, of whole blocks, for their order counts them
    heads: gl.tensor
    long: gl.tensor  # how many of a head's tiles are far longer than the mean
    divided: gl.tensor  # how many of these are taken in pieces
    tickets: gl.tensor  # of all


@gluon.jit
def find_ranks(work, T: gl.constexpr):
    """The Ranks of all tickets, asked once.

    What is `uniform` here decides how much ptxas spills in consumers' loops of documents (128 columns: 5 accesses, or 33).
    """
    PER: gl.constexpr = T.mask.blocks_k // T.block_k
    tiles = gl.cdiv(work.sizes.k, T.mask.blocks_k) * PER
    heads = work.tiles // tiles
    long, alike = long_lists(work.lists[0], tiles // PER)
    long = uniform(long * PER)
    divided = gl.to_tensor(0)
    if T.divided > 0:  # only where the longest takes more than a block's share of all
        divided = gl.where(alike * heads < gl.num_programs(0), gl.minimum(long, T.divided // heads), 0)
        divided = uniform(divided)
    return Ranks(tiles, heads, long, divided, work.tiles + divided * heads * (T.schedule.pieces - 1))


@gluon.jit
def longest_first(ticket, heads_kv, ranks, work, T: gl.constexpr):
    """(tile, head of keys, Item, piece, job) of a ticket, by the length of their lists.

    First the long lists of all heads, because what takes longest must not be begun last; then the others, T.schedule.swizzle
    heads together. Where long ones are taken in pieces, these go with the others of their heads, before them.
    """
    PER: gl.constexpr = T.mask.blocks_k // T.block_k
    whole, lists, heads = work.sizes, work.lists[0], ranks.heads
    piece, job = ticket * 0, ticket * 0
    if ranks.divided > 0:
        rank, batch_head = seat(ticket, ranks.tiles + ranks.divided * (T.schedule.pieces - 1), heads, T.schedule.swizzle, False)
        if rank < ranks.divided * T.schedule.pieces:
            piece = T.schedule.pieces - 1 - rank % T.schedule.pieces
            rank = rank // T.schedule.pieces
            number = rank * heads + batch_head
            job = gl.where(piece > 0, gives_to(number, piece, T), takes_of(number))
        else:
            rank -= ranks.divided * (T.schedule.pieces - 1)
    elif ticket < ranks.long * heads:
        rank, batch_head = ticket // heads, ticket % heads
    else:
        rank, batch_head = seat(ticket - ranks.long * heads, ranks.tiles - ranks.long, heads, T.schedule.swizzle, False)
        rank += ranks.long
    batch, head_kv = batch_head // heads_kv, batch_head % heads_kv
    tile = longest(lists, batch, head_kv * T.group, rank // PER) * PER + rank % PER
    return tile, head_kv, Item(batch, batch * 0, whole.q, whole.q, batch * 0, whole.k, whole.k), piece, job


@gluon.jit
def entry_tile(ticket, per_head, tiles, T: gl.constexpr):
    """(number, batch entry) of a ticket where two entries have `tiles` each.

    A group of heads of the first, the next group of the first, that group of the second, and so on: what a tile of the second
    is added to was begun a group before.
    """
    group = per_head * abreast(per_head, T)
    pair = (ticket + group) // (2 * group)
    begun = gl.minimum(group * pair, tiles)
    ends = gl.minimum(begun + group, tiles)
    place = ticket - gl.maximum(2 * group * pair - group, 0)
    second = place >= ends - begun
    return gl.where(second, ticket - ends, begun + place), second.to(gl.int32)


@gluon.jit
def flag_of(counter_ptr, place, sizes, T: gl.constexpr):
    """Where it is reported that a first entry's tile is stored, behind the counts of tickets."""
    return counter_ptr + T.counts + place.head_kv * gl.cdiv(sizes.k, T.block_k) + place.tile


@gluon.jit
def walk(ticket, begin, ranks, work, T: gl.constexpr):
    """(the BackwardWalk of whoever holds the ticket and has taken `begin` steps before, the Sizes of its item).

    ranks: with lists, unless T.schedule.deterministic, Ranks.
    """
    whole, band, region = work.sizes, work.band, work.region
    BLOCK_Q: gl.constexpr = T.block_q
    BLOCK_K: gl.constexpr = T.block_k
    heads_kv = whole.heads // T.group
    span = whole.k
    if T.mask.blocks_q > 0:  # whole blocks, for their order counts them
        span = gl.cdiv(whole.k, T.mask.blocks_k) * T.mask.blocks_k
    job, before, left, piece = 0, 0, 0, 0
    if T.mask.blocks_q > 0 and not T.schedule.deterministic:
        tile, head_kv, item, piece, job = longest_first(ticket, heads_kv, ranks, work, T)
    else:
        number, tiles = ticket, work.tiles
        if T.schedule.helps:
            tiles = work.tiles // 2
            number = ticket % tiles
        entry = 0
        if T.outputs.pairs_ds:
            tiles = work.tiles // 2
            number, entry = entry_tile(ticket, gl.cdiv(span, BLOCK_K), tiles, T)
        tile, head_kv, item, _ = tile_of(number, tiles, region[0], span, whole.q, whole.k, heads_kv, BLOCK_K, True, T)
        if T.outputs.pairs_ds:
            item = Item(entry, item.first_q, item.span_q, item.q, item.first_k, item.span_k, item.k)
    sizes = Sizes(item.q, item.k, whole.heads, whole.group)
    if T.schedule.helps:
        own, tiles, batch_head = ticket >= work.tiles // 2, gl.cdiv(span, BLOCK_K), item.batch * heads_kv + head_kv
        tile, job, before, left = divide(tile, own, tiles, batch_head, sizes, band, T)
    column, shift = tile * BLOCK_K, sizes.k - sizes.q
    first, last = column - shift, gl.minimum(column + BLOCK_K, sizes.k) - 1 - shift
    queries = sizes.q
    if T.items.ragged:
        queries = gl.where(column < sizes.k, sizes.q, 0)
    lo, full_lo, full_hi, hi = key_range(first, last, queries, band[1], band[0], T.mask.right, T.mask.left, BLOCK_Q)
    if T.mask.pads_keys:  # keys beyond the end: no tile of queries is free of masking
        if column + BLOCK_K > sizes.k:
            full_lo = hi
            full_hi = hi
    padded = padded_rows(whole.q)
    if T.items.varlen:
        padded = region[1]
    tiles = gl.cdiv(hi - lo, BLOCK_Q)
    steps = tiles * T.group
    if T.schedule.helps:
        lo, steps = lo + before * BLOCK_Q, left
    if T.mask.predicate:  # any tile may be visible in part
        full_lo = hi
        full_hi = hi
    if T.mask.blocks_q > 0:
        steps, asked = tiles * 0, tiles * 0
        for i in range(T.group):
            partial, visited = block_counts(afresh(work.lists[0]), item.batch, head_kv * T.group + i, column // T.mask.blocks_k)
            steps += visited * (T.mask.blocks_q // T.block_q)
            asked += partial * (T.mask.blocks_q // T.block_q)
        steps = gl.where(column < sizes.k, steps, 0)
        full_lo = begin + asked
        if T.divided > 0:
            before = steps * piece // T.schedule.pieces
            steps = gl.where(job == 0, steps, steps * (piece + 1) // T.schedule.pieces - before)
    stride = gl.to_tensor(BLOCK_Q)
    if T.sways:
        per_head = gl.cdiv(span, BLOCK_K)
        back = ticket // (per_head * abreast(per_head, T)) % 2 == 0
        stride = gl.where(back, -BLOCK_Q, BLOCK_Q)
        lo = gl.where(back, lo + (tiles - 1) * BLOCK_Q, lo)
    shift = tiles * 0
    if T.divided > 0:
        shift += before
    if T.schedule.rotates:
        shift = column % gl.maximum(tiles * BLOCK_Q, 1)
    visits = Visits(gl.to_tensor(lo), stride, shift, gl.to_tensor(full_lo), gl.to_tensor(full_hi), tiles, begin, begin + steps,
                    gl.to_tensor(job))  # fmt: skip
    place = BackwardWalk(gl.to_tensor(0), tile, column, item.batch, slab(item, T), item.first_q, item.first_k, item.span_k,
                 first_padded(item, T), gl.to_tensor(padded), head_kv, visits)  # fmt: skip
    return place, sizes


@gluon.jit
def tell_tile(tickets, turn, ticket, place, sizes, T: gl.constexpr):
    """Loader: tell the other roles the tile of a turn. To find it themselves they would need registers that they lack."""
    at = place.visits
    lo = at.job if T.divided > 0 else at.lo
    numbers = (
        ticket, place.tile, place.batch, place.head_kv, place.first_q, place.first_k, place.span_k, place.first_row,
        sizes.q, sizes.k, lo, at.full_lo, at.full_hi, at.tiles, at.begin, at.end,
    )  # fmt: skip
    tickets.publish(turn, numbers)


@gluon.jit
def told_tile(tickets, turn, work, WARPS: gl.constexpr, HELD: gl.constexpr, T: gl.constexpr):
    """What `tell_tile` told; if HELD, what a consumer's steps need lives in registers that a warp's lanes share."""
    tile, batch, end = tickets.number(turn, 1, WARPS), tickets.number(turn, 2, WARPS), tickets.number(turn, 15, WARPS)
    q, k = work.sizes.q, work.sizes.k
    if T.items.ragged:
        q, k = tickets.number(turn, 8, WARPS), tickets.number(turn, 9, WARPS)
    column = tile * T.block_k
    if HELD:
        column, end = uniform(column), uniform(end)
        if T.items.ragged:
            q, k = uniform(q), uniform(k)
    first_q, first_k, first_row, span_k = batch * 0, batch * 0, batch * 0, work.sizes.k
    padded, place = padded_rows(work.sizes.q), batch
    sizes = Sizes(q, k, work.sizes.heads, work.sizes.group)
    if T.items.varlen:
        first_q, first_k = tickets.number(turn, 4, WARPS), tickets.number(turn, 5, WARPS)
        span_k, first_row = tickets.number(turn, 6, WARPS), tickets.number(turn, 7, WARPS)
        padded, place = work.region[1], batch * 0
    lo, tiles, begin = tickets.number(turn, 10, WARPS), tickets.number(turn, 13, WARPS), tickets.number(turn, 14, WARPS)
    job = gl.to_tensor(0)
    if T.divided > 0:  # told in the place of lo, which says nothing of lists
        job = lo
    visits = Visits(
        lo,
        gl.to_tensor(T.block_q),
        tiles * 0,
        tickets.number(turn, 11, WARPS),
        tickets.number(turn, 12, WARPS),
        tiles,
        begin,
        end,
        job,
    )
    walk = BackwardWalk(turn, tile, column, batch, place, first_q, first_k, gl.to_tensor(span_k), first_row,
                        gl.to_tensor(padded), tickets.number(turn, 3, WARPS), visits)  # fmt: skip
    return walk, sizes


@gluon.jit
def find(tickets, turn, ticket, begin, work, WARPS: gl.constexpr, T: gl.constexpr):
    """`walk` for a role of WARPS warps that does not load."""
    if T.tells:
        return told_tile(tickets, turn, work, WARPS, WARPS == 4, T)
    else:
        return walk(ticket, begin, (), work, T)


@gluon.jit
def again(place, sizes, memory, work, WARPS: gl.constexpr, T: gl.constexpr):
    """The same tile and sizes, for a rare path: where T.tells they are read anew, and no register held them."""
    if T.tells:
        return told_tile(memory.to.tickets, place.told, work, WARPS, False, T)
    else:
        return place, sizes


@gluon.jit
def tell_step(memory, step, head, start, masked, T: gl.constexpr):
    """Loader: tell a step, once its queries' stage is free.

    What stands there is T.told_steps steps old. The consumers have let go of the one T.pipeline.stages before this one, hence
    had their shares of the one before that taken over, and whoever adds these is done with all earlier ones.
    """
    write_words(memory.steps, (step & (T.told_steps - 1)) * 3, (head, start, masked.to(gl.int32)), 1)


@gluon.jit
def meeting(memory, step, place, WARPS: gl.constexpr, T: gl.constexpr):
    """(query head, first query) of a step, once its queries have arrived."""
    if T.tells:
        at = (step & (T.told_steps - 1)) * 3
        return read_word(memory.steps, at, WARPS), read_word(memory.steps, at + 1, WARPS)
    else:
        return place.at(step, T)


@gluon.jit
def plain(place, sizes, memory, work, begin, T: gl.constexpr):
    """(first, end) of a tile's steps that need no mask, from `begin` on; all others come before, if T.splits."""
    first, end = place.visits.end, place.visits.end
    if T.splits:
        told, _ = again(place, sizes, memory, work, 4, T)
        end = told.visits.end
        first = told.visits.begin + gl.cdiv(told.visits.full_lo - told.visits.lo, T.block_q)
        first = gl.minimum(gl.maximum(first, begin), end)
    return first, end


@gluon.jit
def asks(memory, step, place, start, ASKS: gl.constexpr, T: gl.constexpr):
    """Whether a consumer must ask the mask in a step whose queries, from `start` on, have arrived; not unless it ASKS."""
    if not ASKS:
        return False
    elif T.tells:
        masked = read_word(memory.steps, (step & (T.told_steps - 1)) * 3 + 2, 4)
        if T.mask.predicate:  # kept as a number of the whole warp, for masks take all predicates
            masked = uniform(masked)
        return masked != 0
    else:
        return place.masked(start)


@gluon.jit
def seeing(size, other, before, after, BEFORE: gl.constexpr, AFTER: gl.constexpr):
    """(first, end) of an item's `size` queries that see any of its `other` keys, within `before` and `after` of theirs.

    With sizes and bounds swapped: the keys that any query sees.
    """
    first, end = size * 0, size
    if AFTER:
        first = gl.maximum(size - other - after, 0)
    if BEFORE:
        end = gl.minimum(size, size + before)
    return first, end
