"""Which query tiles a block computes, and which key tiles these visit."""

from typing import Any, NamedTuple

from flashtile.kernels.device.blocks import block_counts, block_list, block_start, longest
from flashtile.kernels.device.mask import key_range
from flashtile.kernels.device.varlen import RECORD, Item, scheduled, slab
from flashtile.kernels.sm90.device.ticket import read_word, spread, take, write_words
from flashtile.triton_glue.gluon import gl, gluon


class Size(NamedTuple):
    """Runtime integers: the problem's, or an item's; left and right bound the band."""

    items: gl.tensor  # of the batch, or 1 where a schedule lists the tiles of all items
    tiles: gl.tensor  # of queries, for one head of them
    heads: gl.tensor
    group: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    left: gl.tensor
    right: gl.tensor
    swizzle: gl.tensor  # heads that go together


class Listed(NamedTuple):
    """The blocks that a query tile visits, where the mask has lists of them."""

    partial: gl.tensor  # how many are visible in part: they come first
    visited: gl.tensor


class Job(NamedTuple):
    """A query tile of a block: its head, its first query, and the item that it belongs to."""

    item: Item
    slab: gl.tensor  # the item's place in the tensors' first axis
    head: gl.tensor
    row: gl.tensor
    blocks: Listed  # of nothing where there are no lists


class ForwardWalk(NamedTuple):
    """Key tiles of a query tile, in tiles: [first, low) and [high, end) need the mask, [low, high) do not; end > first."""

    first: gl.tensor
    low: gl.tensor
    high: gl.tensor
    end: gl.tensor


class ForwardScene(NamedTuple):
    """What all steps of a walk share: the block's memory, the warpgroup's queries, and what the kernel was given."""

    mem: Any  # ForwardMemory, or that of a pass whose blocks are the forward's
    at: Job
    size: Size  # the item's
    scale: Any
    score_args: Any
    mask_args: Any
    seed: Any  # of dropout
    wild: Any  # as `retry.careful` has it; elsewhere nobody reads it


@gluon.jit
def rank(turn, size, T: gl.constexpr):
    """A block's place in the order of a turn.

    Under a causal mask, and with lists, tiles get shorter and shorter. Turns then go to and fro over the blocks, so that who
    got a longer tile gets a shorter one next; with lists only where all heads go together, for groups of heads go to and fro
    themselves (`longest_first`).
    """
    block = gl.program_id(0)
    if T.schedule.zigzag:
        back = (turn & 1) == 1
        if T.mask.blocks_q > 0:
            back = back & (size.swizzle >= size.items * size.heads)
        block = gl.where(back, gl.num_programs(0) - 1 - block, block)
    return block


@gluon.jit
def measure(heads, group, seqlen_q, seqlen_k, left, right, swizzle, batch, region, T: gl.constexpr):
    """The Size of a problem; where T.items.ragged its schedule knows how many tiles there are."""
    if T.items.ragged:
        return Size(1, gl.load(region[0] + region[1] * RECORD), heads, group, seqlen_q, seqlen_k, left, right, swizzle)
    elif T.mask.blocks_q > 0:  # whole blocks, for their order counts them
        tiles = gl.cdiv(seqlen_q, T.mask.blocks_q) * (T.mask.blocks_q // T.block_q)
        return Size(batch, tiles, heads, group, seqlen_q, seqlen_k, left, right, swizzle)
    else:
        return Size(batch, gl.cdiv(seqlen_q, T.block_q), heads, group, seqlen_q, seqlen_k, left, right, swizzle)


@gluon.jit
def place_count(size):
    """Places in the order of all tiles."""
    return size.tiles * size.items * size.heads


@gluon.jit
def place_at(turn, size, T: gl.constexpr):
    """The place of a block's turn, unless T.items.ragged, where only the first is; from `place_count` on there is none."""
    return turn * gl.num_programs(0) + rank(turn, size, T)


@gluon.jit
def job_at(place, size, region, T: gl.constexpr):
    """The Job at a place in the order of all tiles; region = (schedule, its records) where T.items.ragged.

    `swizzle` heads go together, tile by tile: their keys and values stay in the L2 cache, while the long tiles of all of
    them come first.
    """
    if T.items.ragged:
        tile, head, item, _ = scheduled(place, region[0], size.heads, size.swizzle, T.block_q, False, T.schedule.last_first)
        return Job(item, slab(item, T), head, tile * T.block_q, Listed(0, 0))
    else:
        heads = size.items * size.heads
        span = size.tiles * size.swizzle
        first = place // span * size.swizzle
        together = gl.maximum(gl.minimum(heads - first, size.swizzle), 1)
        tile, head = place % span // together, first + place % span % together
        if T.mask.blocks_q > 0:
            tile, head = gl.minimum(tile, size.tiles - 1), gl.minimum(head, heads - 1)
            return longest_first(tile, head, place // span, size, region[3], T)
        else:
            if T.schedule.last_first:
                tile = size.tiles - 1 - tile
            batch, head = counted(head, size, T)
            item = Item(batch, 0, size.seqlen_q, size.seqlen_q, 0, size.seqlen_k, size.seqlen_k)
            return Job(item, batch, head, tile * T.block_q, Listed(0, 0))


@gluon.jit
def counted(batch_head, size, T: gl.constexpr):
    """(batch, head) of a number that counts both. Items read the same bias at the same time if T.items.together."""
    if T.items.together:
        return batch_head % size.items, batch_head // size.items
    else:
        return batch_head // size.heads, batch_head % size.heads


@gluon.jit
def longest_first(tile, batch_head, together, size, lists, T: gl.constexpr):
    """The Job that is the `tile`-th of a head by the length of its list, and the list.

    lists = (counts, their strides, indices, their strides, order, its strides). Every other group of heads that go together
    starts with the shortest, so that who got a longer tile gets a shorter one in the next; the last one ends with them.
    """
    PER: gl.constexpr = T.mask.blocks_q // T.block_q
    batch, head = counted(batch_head, size, T)
    groups = gl.cdiv(size.items * size.heads, size.swizzle)
    tile = gl.where(((groups - 1 - together) & 1) == 1, size.tiles - 1 - tile, tile)
    line = longest(lists, batch, head, tile // PER)
    partial, visited = block_counts(lists, batch, head, line)
    item = Item(batch, 0, size.seqlen_q, size.seqlen_q, 0, size.seqlen_k, size.seqlen_k)
    return Job(item, batch, head, (line * PER + tile % PER) * T.block_q, Listed(partial, visited))


@gluon.jit
def tell(words, at, T: gl.constexpr):
    """Loader: tell the consumers its Job, which takes three loads, one after another, to find.

    They read it when the queries arrive, and let go of the last keys after that: so it stands until the next one is told.
    """
    values = (at.item.batch, at.head, at.row, at.blocks.partial, at.blocks.visited)
    write_words(words, 0, values, T.pipeline.loader_warps, True)


@gluon.jit
def told(words, size):
    """Consumer: the Job that `tell` told."""
    batch, row = read_word(words, 0, 4), read_word(words, 2, 4)
    item = Item(batch, 0, size.seqlen_q, size.seqlen_q, 0, size.seqlen_k, size.seqlen_k)
    return Job(item, batch, read_word(words, 1, 4), row, Listed(read_word(words, 3, 4), read_word(words, 4, 4)))


@gluon.jit
def take_place(region):
    """Loader: a ticket for a further place, where T.items.ragged; `place_of` waits for it."""
    return take(region[0] + region[1] * RECORD + 1)


@gluon.jit
def place_of(ticket):
    """The place that a ticket stands for. Every block begins with the one of its own number, without."""
    return gl.num_programs(0) + spread(ticket)


@gluon.jit
def tell_job(tickets, turn, place, at):
    """Loader: tell a turn's Job where T.items.ragged, and its place, by which consumers see whether there is one."""
    values = (place, at.item.batch, at.head, at.row, at.item.first_q, at.item.span_q, at.item.q, at.item.k)
    tickets.publish(turn, values)


@gluon.jit
def told_job(tickets, turn, T: gl.constexpr):
    """Consumer: the Job that `tell_job` told, without where its keys lie."""
    tickets.channel.wait(turn)
    batch, q = tickets.number(turn, 1, 4), tickets.number(turn, 6, 4)
    if T.items.varlen:
        batch = gl.where(q > 0, batch, 0)  # no tensor has anything for what lies behind the last item
    item = Item(
        batch, tickets.number(turn, 4, 4), tickets.number(turn, 5, 4), q, batch * 0, batch * 0, tickets.number(turn, 7, 4)
    )
    job = Job(item, slab(item, T), tickets.number(turn, 2, 4), tickets.number(turn, 3, 4), Listed(0, 0))
    tickets.finish(turn)
    return job


@gluon.jit
def sized(size, item):
    """The Size of an item."""
    return Size(1, size.tiles, size.heads, size.group, item.q, item.k, size.left, size.right, size.swizzle)


@gluon.jit
def walk(row, ROWS: gl.constexpr, size, T: gl.constexpr):
    """The key tiles of ROWS queries from `row` on; one at least, so that the pipeline always has something to drain."""
    BLOCK_K: gl.constexpr = T.block_k
    shift = size.seqlen_k - size.seqlen_q
    last = gl.minimum(row + ROWS, size.seqlen_q) - 1
    lo, full_lo, full_hi, hi = key_range(
        row + shift, last + shift, size.seqlen_k, size.left, size.right, T.mask.left, T.mask.right, BLOCK_K
    )
    first = lo // BLOCK_K
    end = gl.maximum(gl.cdiv(gl.where(row < size.seqlen_q, hi, 0), BLOCK_K), first + 1)
    low = gl.minimum(gl.cdiv(full_lo, BLOCK_K), end - 1)
    high = full_hi // BLOCK_K
    if T.mask.right:  # every row that sees some key sees one of the tiles from `high` on
        high = gl.minimum(high, gl.maximum(row + shift + size.right, 0) // BLOCK_K)
    high = gl.minimum(gl.maximum(high, low), end - 1)
    if T.mask.predicate:  # any tile may be visible in part
        low = first
        high = first
    return ForwardWalk(first, low, high, end)


@gluon.jit
def visit(at, size, region, T: gl.constexpr):
    """(walk, indices of blocks) of a Job's queries; with lists the walk counts the tiles that they name, and its first one
    among those that need the mask.
    """
    if T.mask.blocks_q > 0:
        PER: gl.constexpr = T.mask.blocks_k // T.block_k
        end = gl.maximum(at.blocks.visited * PER, 1)
        indices, _, _ = block_list(region[3], at.item.batch, at.head, at.row // T.mask.blocks_q)
        return ForwardWalk(0, 0, end - gl.maximum(at.blocks.partial * PER, 1), end), indices
    else:
        return walk(at.row, T.block_q, size, T), 0


@gluon.jit
def tile_at(indices, seen, n, size, T: gl.constexpr):
    """The n-th key tile of a walk, which goes down: of a list, those visible in part come first."""
    if T.mask.blocks_q > 0:
        tile = block_start(indices, seen.end - 1 - n, T.mask.blocks_k, T.block_k) // T.block_k
        tiles = gl.cdiv(size.seqlen_k, T.mask.blocks_k) * (T.mask.blocks_k // T.block_k)
        return gl.maximum(gl.minimum(tile, tiles - 1), 0)  # an empty list may hold anything
    else:
        return n


@gluon.jit
def within(visits, end):
    """The same walk without the tiles from `end` on: queries that see nothing visit none that their block does not load."""
    return ForwardWalk(
        gl.minimum(visits.first, end - 1),
        gl.minimum(visits.low, end - 1),
        gl.minimum(visits.high, end - 1),
        gl.minimum(visits.end, end),
    )
