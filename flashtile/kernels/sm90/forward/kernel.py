"""Forward kernel for Hopper: warps take roles, tiles arrive by TMA, products run on the warpgroup matrix unit.

A block computes a tile of queries of one head. One role loads; each consumer warpgroup owns 64 queries and walks the keys
from the last visible one back, so that masked tiles come first. It multiplies the queries with key tile n and the
probabilities of tile n + 1 with its values in one go, then turns scores into probabilities while the matrix unit works
for another warpgroup (FlashAttention-3, arXiv 2407.08608, section 3). docs/lab/hopper-forward.md says what was tried.
"""

from typing import NamedTuple

from flashtile.kernels.device.dropout import load_seed
from flashtile.kernels.device.exponential import LOG2E
from flashtile.kernels.device.score import bent, unit
from flashtile.kernels.device.stream import await_stream, let_next
from flashtile.kernels.sm90.device.barriers import pass_turn, take_turn
from flashtile.kernels.sm90.device.blank import blank_hidden, blank_unseen
from flashtile.kernels.sm90.device.channel import Channel, make_channel
from flashtile.kernels.sm90.device.dropout import as_weights, draw_tile, spread_words, unpacked, words_of
from flashtile.kernels.sm90.device.halves import (
    LOWER,
    UPPER,
    WHOLE,
    begins_in_upper_half,
    ends_in_lower_half,
    followed_by_zeros,
    keys_of,
    part_of,
)
from flashtile.kernels.sm90.device.layouts import row_layout
from flashtile.kernels.sm90.device.locks import writes_done
from flashtile.kernels.sm90.device.scores import (
    across,
    exponentials,
    fetch,
    first_of_lanes,
    lane_sums,
    lanes_of,
    level,
    lifted,
    lowest,
    measured,
    shape_scores,
    starts,
)
from flashtile.kernels.sm90.device.ticket import Tickets, make_tickets, make_words
from flashtile.kernels.sm90.forward.epilogue import finish, load_sink, tell
from flashtile.kernels.sm90.forward.fp8 import LIFT_LOG2, add_stored, multiply_stored, plain, scores_scale, stored_weights
from flashtile.kernels.sm90.forward.mma import add_parts, empty, multiply_parts, scaled, settle
from flashtile.kernels.sm90.forward.producer import load
from flashtile.kernels.sm90.forward.retry import (
    NONE,
    Again,
    careful,
    forget,
    make_again,
    meet,
    remember,
    remembered,
    tell_first,
)
from flashtile.kernels.sm90.forward.tile_scheduler import (
    ForwardScene,
    Job,
    job_at,
    measure,
    place_at,
    place_count,
    sized,
    tile_at,
    told,
    told_job,
    visit,
    walk,
    within,
)
from flashtile.triton_glue.gluon import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    role_barrier,
    row_products,
    settled,
    store_wait,
    uniform,
    warpgroup_mma_wait,
)
from flashtile.triton_glue.language import PLAIN_INTEGERS


@aggregate
class ForwardMemory:
    """Shared memory of a block: tiles, and the channels through which they arrive. out has no channel.

    Tiles are [places x parts, 1, 1, rows, columns], in the order of `parts`.
    """

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor
    bias: gl.shared_memory_descriptor  # of one key tile, for each warpgroup, where T.modifiers.brought
    job: gl.shared_memory_descriptor  # what the loader tells of a tile with lists
    tickets: Tickets  # and where T.items.ragged
    again: Again  # where T.softmax.watches
    queries: Channel
    keys: Channel
    values: Channel
    biases: Channel

    @gluon.constexpr_function
    def __init__(self, q, k, v, out, bias, job, tickets, again, queries, keys, values, biases):
        self.q, self.k, self.v, self.out, self.bias = q, k, v, out, bias
        self.job, self.tickets, self.again = job, tickets, again
        self.queries, self.keys, self.values, self.biases = queries, keys, values, biases


class ForwardRows(NamedTuple):
    """State of a warpgroup's 64 queries."""

    acc: gl.tensor  # tuple of accumulators: of all columns of v or, of three parts, of the first two and of the last
    weights: (
        gl.tensor
    )  # probabilities of the last key tile, whose values are yet to be added; `packed` where T.modifiers.dropout
    top: gl.tensor  # maximum score, in units of `unit`; of the first key tile, or more, where T.softmax.bounded
    # or, a number for each of the four lanes that hold a row, what exponents are measured from, where T.softmax.watches
    total: gl.tensor  # sums of probabilities, one for each of the four lanes that hold a row
    fetched: gl.tensor  # what a modifier loads of the next key tile
    ahead: gl.tensor  # of that, where T.softmax.draws_ahead: `words_of` it
    decay: gl.tensor  # where T.stored.fp8: what the accumulators are to be multiplied by, when the weights' values are added
    depth: gl.tensor  # where T.finds_entropy: as `total`, of p times its exponent


@gluon.jit
def consume(out_desc, targets, mem, whole, rest, GROUP: gl.constexpr, T: gl.constexpr, SCORE: gl.constexpr, MASK: gl.constexpr):
    """Role: attention of the GROUP-th 64 queries of every tile."""
    if GROUP == T.groups - 1:
        pass_turn(GROUP, T)
    region = rest[2]
    rest = rest[0], rest[1], region, load_seed(rest[1], T)
    turn, use, places = gl.to_tensor(0), gl.to_tensor(0), place_count(whole)
    place = mem.tickets.read(turn, 4) if T.items.ragged else place_at(turn, whole, T)
    place = gl.where(place < places, place, NONE)
    if not T.items.ragged and T.mask.blocks_q == 0:
        job = job_at(place, whole, region, T)
    if T.tells_far:
        tell(0, gl.arange(0, T.rows, row_layout(T.block_k)) >= 0, targets, GROUP, T)
    if T.softmax.watches:
        forget(mem.again, GROUP, T)
    while place != NONE:  # negative: it is computed again
        if T.items.ragged:
            job = told_job(mem.tickets, turn - (place >> 31), T)
        elif T.mask.blocks_q > 0:
            mem.queries.wait(turn * T.groups + GROUP)
            job = told(mem.job, whole)
        use, job, ran = attend(use, turn, job, out_desc, targets, mem, whole, rest, GROUP, T, SCORE, MASK)
        turn = turn + 1
        before, following = place, places
        if not T.softmax.watches or place >= 0:
            following = mem.tickets.read(turn, 4) if T.items.ragged else place_at(turn, whole, T)
        place = gl.where(following < places, following, NONE)
        if T.softmax.watches:
            remember(mem.again, before, ran, GROUP, T)
            if place == NONE:
                tell_first(mem.again, turn, before, GROUP, T)
                if T.items.ragged and before >= 0:
                    mem.tickets.finish(turn)
                place = meet(mem.again, turn, 4, T)
                if place != NONE:
                    writes_done(0)  # what was stored of a tile must not come after what will be
                if not T.items.ragged and T.mask.blocks_q == 0:
                    job = job_at(place & NONE, whole, region, T)
    let_next()
    if T.pipeline.staged:
        store_wait(0)


@gluon.jit
def attend(use, turn, job, out_desc, targets, mem, whole, rest, GROUP: gl.constexpr, T: gl.constexpr, SCORE: gl.constexpr,
           MASK: gl.constexpr):  # fmt: skip
    """Attention of the GROUP-th 64 queries of a Job; rest as the kernel has it, and behind it dropout's seed.

    (key tiles used, the next turn's Job where that is found here, which rows are to be computed again, carefully).
    """
    scale, score_args, region, seed = rest
    wild = careful(mem.again, GROUP, T)
    use, at, size, seen, first, indices = enter(use, job, mem, whole, region, GROUP, T)
    if T.stored.scales:
        scale = scores_scale(scale, region, at, size.group, T)
    scene = ForwardScene(mem, at, size, scale, score_args, region[2], seed, wild)
    tile = tile_at(indices, seen, seen.end - 1, size, T)
    following = tile_at(indices, seen, gl.maximum(seen.end - 2, seen.first), size, T)
    fetched = fetch(tile, at, size, score_args, T.mask.masked, T, SCORE)
    if T.mask.blocks_q == 0:
        mem.queries.wait(turn * T.groups + GROUP)
    if T.schedule.halves:
        if ends_in_lower_half(at, seen, size, T):
            rows = begin(fetched, use, tile, following, scene, GROUP, LOWER, T, SCORE, MASK)
        else:
            rows = begin(fetched, use, tile, following, scene, GROUP, WHOLE, T, SCORE, MASK)
    else:
        rows = begin(fetched, use, tile, following, scene, GROUP, WHOLE, T, SCORE, MASK)
    use += 1
    low = seen.first
    if not T.schedule.once:
        rows, use, low = walked(rows, use, seen, indices, scene, GROUP, T, SCORE, MASK)
    sink = load_sink(targets, at, T)  # hidden under the last product
    if T.schedule.halves and T.mask.left and not T.schedule.once:
        if low > seen.first:
            half = step(rows, use, seen.first, seen.first, scene, GROUP, T.mask.below, UPPER, T, SCORE, MASK)
            use += 1
            done, job = conclude(half, job, mem, use - 1, seen.first, size, whole, turn, region, UPPER, T)
        else:
            done, job = conclude(rows, job, mem, use - 1, seen.first, size, whole, turn, region, WHOLE, T)
    else:
        done, job = conclude(rows, job, mem, use - 1, seen.first, size, whole, turn, region, WHOLE, T)
    use = leave(use, seen, first, mem, GROUP, T)
    ran = finish(done, sink, out_desc, targets, whole, region, scene, GROUP, T, SCORE)
    if not T.pipeline.staged:
        store_wait(0)
        mem.queries.release(turn * T.groups + GROUP)
    return use, job, ran


@gluon.jit
def walked(rows, use, seen, indices, scene, GROUP: gl.constexpr, T: gl.constexpr, SCORE: gl.constexpr, MASK: gl.constexpr):
    """(ForwardRows, key tiles used, the last of them) behind a walk's tiles from the second on, all but one seen by half."""
    size = scene.size
    low = seen.first
    if T.mask.masks_first:
        for n in range(seen.end - 1 - seen.high):
            tile = tile_at(indices, seen, seen.end - 2 - n, size, T)
            following = tile_at(indices, seen, gl.maximum(seen.end - 3 - n, seen.first), size, T)
            rows = step(rows, use, tile, following, scene, GROUP, T.mask.above, WHOLE, T, SCORE, MASK)
            use += 1
    for n in range(seen.high - seen.low):
        tile = tile_at(indices, seen, seen.high - 1 - n, size, T)
        following = tile_at(indices, seen, gl.maximum(seen.high - 2 - n, seen.first), size, T)
        rows = step(rows, use, tile, following, scene, GROUP, False, WHOLE, T, SCORE, MASK)
        use += 1
    if T.mask.left:
        if T.schedule.halves:
            low += begins_in_upper_half(scene.at, seen, size, T).to(gl.int32)
        for n in range(seen.low - low):
            tile, following = seen.low - 1 - n, gl.maximum(seen.low - 2 - n, seen.first)
            rows = step(rows, use, tile, following, scene, GROUP, T.mask.below, WHOLE, T, SCORE, MASK)
            use += 1
    return rows, use, low


@gluon.jit
def conclude(rows, job, mem, use, tile, size, whole, turn, region, HALF: gl.constexpr, T: gl.constexpr):
    """(the ForwardRows, all values added; the next turn's Job where that is found here) behind a walk's last tile."""
    if T.mask.unseen and T.mask.left and not T.mask.asks:
        blank_unseen(mem.v, mem.values, use, tile, size, T.columns_v, T.parts_v, T)
    if T.stored.fp8:
        acc = add_stored(rows, mem, use, T)
    else:
        acc = add_values(rows, mem, use, HALF, T)
    if T.mask.blocks_q == 0 and not T.items.ragged:
        job = job_at(place_at(turn + 1, whole, T), whole, region, T)  # divisions and loads, here hidden under the product
    if (
        T.modifiers.sink
    ):  # long over, but it ends in a jump: in front of the product ptxas would wait for what `load_sink` loads
        mem.values.wait(use)
    if not T.stored.fp8:
        acc = settle(acc, mem.values, use, T.pieces)
    return ForwardRows(acc, (), rows.top, rows.total, (), (), (), rows.depth), job


@gluon.jit
def enter(use, job, mem, whole, region, GROUP: gl.constexpr, T: gl.constexpr):
    """(use, Job, Size, ForwardWalk, first, indices) of the GROUP-th 64 queries of a Job, past the key tiles before their walk.

    first: where the block's walk ends, of which theirs may be a part; indices as `visit` has them.
    """
    at = Job(job.item, job.slab, job.head, job.row + GROUP * T.rows, job.blocks)
    size = sized(whole, at.item)
    loaded, indices = visit(job, size, region, T)
    seen = loaded
    if T.schedule.skips:
        seen = within(walk(at.row, T.rows, size, T), loaded.end)
        for _ in range(loaded.end - seen.end):
            skip(mem, use, GROUP, T)
            use += 1
    return use, at, size, seen, loaded.first, indices


@gluon.jit
def leave(use, seen, first, mem, GROUP: gl.constexpr, T: gl.constexpr):
    """use, past the key tiles behind a walk."""
    if T.schedule.skips and T.mask.left:
        for _ in range(seen.first - first):
            skip(mem, use, GROUP, T)
            use += 1
    return use


@gluon.jit
def skip(mem, use, GROUP: gl.constexpr, T: gl.constexpr):
    """Let go of a key tile that these queries do not see, unlike others of the block."""
    mem.keys.wait(use)
    take_turn(GROUP, T)
    pass_turn(GROUP, T)
    mem.keys.release(use)
    if T.modifiers.brought:
        mem.biases.wait(use * T.groups + GROUP)
        mem.biases.release(use * T.groups + GROUP)
    mem.values.wait(use)
    mem.values.release(use)


@gluon.jit
def begin(fetched, use, tile, following, scene, GROUP: gl.constexpr, HALF: gl.constexpr, T: gl.constexpr, SCORE: gl.constexpr,
          MASK: gl.constexpr):  # fmt: skip
    """The state after the first key tile, or a HALF of it, without its values."""
    KEYS: gl.constexpr = keys_of(HALF, T.block_k)
    mem, at, size, scale, score_args, mask_args, seed, _ = scene
    score = starts(fetched, use, tile, scene, GROUP, T.mask.masked, KEYS, T, SCORE)
    fetched = fetch(following, at, size, score_args, T.mask.masked, T, SCORE)
    mem.keys.wait(use)
    take_turn(GROUP, T)
    score = multiply_keys(score, mem, use, GROUP, HALF, T)
    pass_turn(GROUP, T)
    score = warpgroup_mma_wait(0, deps=[score])
    mem.keys.release(use)
    if T.stored.fp8:
        score = plain(score)
    if T.mask.blocks_q > 0:
        if (at.blocks.partial > 0) | (at.blocks.visited == 0):  # the mask hides a tile of a list without blocks
            score = shape_scores(score, tile, at, size, scale, score_args, mask_args, T.mask.above, T, SCORE, MASK)
            blank_hidden(mem.v, mem.values, use, tile, at, size, mask_args, GROUP, T.columns_v, T.parts_v, T, MASK)
        else:
            score = shape_scores(score, tile, at, size, scale, score_args, mask_args, False, T, SCORE, MASK)
            score = bent(score, scale, score_args, T, SCORE)
        top = gl.max(score, 1)
    else:
        BOUNDS: gl.constexpr = T.mask.above if T.mask.masked else 0  # pyright: ignore[reportAssignmentType]
        score = shape_scores(score, part_of(tile, HALF), at, size, scale, score_args, mask_args, BOUNDS, T, SCORE, MASK)
        top = gl.max(score, 1)
        if not T.mask.masked:
            top = bent(top, scale, score_args, T, SCORE)
            score = bent(score, scale, score_args, T, SCORE)
    factor = unit(scale, score_args, T, SCORE) * LOG2E
    if T.softmax.bounded:
        top = gl.maximum(top, lowest(factor))
    shift = level(top * factor, T.mask.masked, T)
    if T.stored.fp8:
        shift = shift - LIFT_LOG2
    below = score * factor - shift[:, None]
    p = gl.exp2(below)
    total = lane_sums(p, T)
    depth = ()
    if T.finds_entropy:
        depth = depth_sums(p, below, T.mask.masked, T)
    drawn, ahead = (), ()
    if T.modifiers.dropout:
        drawn = draw_tile(tile, at, size, seed, T)
    if T.softmax.draws_ahead:
        ahead = words_of(following, at, size, seed, T)
    if HALF == LOWER:
        p = followed_by_zeros(p)
    weights = stored_weights(p, T) if T.stored.fp8 else as_weights(p, drawn, seed, mem.v.dtype, T)
    if T.mask.asks and T.mask.blocks_q == 0:
        blank_hidden(mem.v, mem.values, use, tile, at, size, mask_args, GROUP, T.columns_v, T.parts_v, T, MASK)
    elif T.mask.unseen and not T.mask.asks:
        blank_unseen(mem.v, mem.values, use, tile, size, T.columns_v, T.parts_v, T)
    top = gl.convert_layout(top, row_layout(T.block_k))
    decay = ()
    if T.softmax.watches:
        top = lanes_of(top * factor, T)
    elif T.stored.fp8:
        decay = gl.full([T.rows], 1.0, gl.float32, row_layout(T.block_k))
    return ForwardRows(empty(T.rows, T.columns_v, T.parts_v), weights, top, total, fetched, ahead, decay, depth)


@gluon.jit
def step(rows, use, tile, following, scene, GROUP: gl.constexpr, MASKED: gl.constexpr, HALF: gl.constexpr, T: gl.constexpr,
         SCORE: gl.constexpr, MASK: gl.constexpr):  # fmt: skip
    """The state after a further key tile, or a HALF of it; the values of the one before are added meanwhile.

    Where T.softmax.watches nothing stands between scores and exponentials, neither a maximum nor the wait for that product,
    and of rescaling a jump is left where no score has grown far. Otherwise the wait stands behind the row maximum: rescaling,
    summing and packing then hide under the exponentials. What modifiers add is where the product starts from; a curve is
    evaluated while the values are being added. Where T.schedule.apart the values are added before the keys are multiplied:
    scores need no registers while probabilities have theirs, so that three warpgroups fit, and while one waits the others
    multiply.
    """
    KEYS: gl.constexpr = keys_of(HALF, T.block_k)
    mem, at, size, scale, score_args, mask_args, seed, wild = scene
    score = starts(rows.fetched, use, tile, scene, GROUP, MASKED, KEYS, T, SCORE)
    fetched = fetch(following, at, size, score_args, MASKED, T, SCORE)
    if T.stored.fp8:
        acc = add_stored(rows, mem, use - 1, T)
    elif T.schedule.apart:
        acc = settle(add_values(rows, mem, use - 1, WHOLE, T), mem.values, use - 1, T.pieces)
    mem.keys.wait(use)
    take_turn(GROUP, T)
    score = multiply_keys(score, mem, use, GROUP, HALF, T)
    if not T.schedule.apart:
        acc = add_values(rows, mem, use - 1, WHOLE, T)
    pass_turn(GROUP, T)
    drawn, ahead = (), ()
    if T.modifiers.dropout and not T.softmax.draws_ahead:
        drawn = draw_tile(tile, at, size, seed, T)
        # Long over, but it ends in a jump, across which ptxas does not move the words to where nothing hides them.
        mem.keys.wait(use)
    elif T.pipeline.singly:  # between two waits for a channel a role meets: here, where the product is waited for anyway
        role_barrier()
    wild = remembered(mem.again, GROUP, T) if T.softmax.votes else wild
    score = warpgroup_mma_wait(0 if T.schedule.apart else T.pieces, deps=[score])
    mem.keys.release(use)
    if T.stored.fp8:
        score = plain(score)
    decay = ()
    score = shape_scores(score, part_of(tile, HALF), at, size, scale, score_args, mask_args, MASKED, T, SCORE, MASK)
    factor = unit(scale, score_args, T, SCORE) * LOG2E
    depth = ()
    if T.softmax.bounded:  # nothing is rescaled: curve and exponentials wait neither for a maximum nor for the values' product
        top = rows.top
        if not MASKED:
            score = bent(score, scale, score_args, T, SCORE)
        p = exponentials(score * factor - gl.convert_layout(top * factor, row_layout(KEYS))[:, None], MASKED, T)
        total = rows.total + lane_sums(p, T)
        weights = as_weights(p, drawn, seed, mem.v.dtype, T)
        if not T.schedule.apart:
            acc = settle(acc, mem.values, use - 1, T.pieces)
    elif T.softmax.watches:
        base = lifted(score, rows.top, factor, wild, MASKED, T)
        if T.softmax.draws_ahead:
            drawn = spread_words(rows.ahead, T.block_k, False)
            ahead = words_of(uniform(following), at, size, seed, T)
        below = score * factor - across(level(base, MASKED, T), KEYS)
        p = exponentials(below, MASKED, T)
        if T.finds_entropy:
            depth = depth_sums(p, below, MASKED, T)
        p, top, sums = measured(p, base, lane_sums(p, T), T)
        decay = gl.exp2(rows.top - level(top, MASKED, T))
        total = rows.total * decay + sums
        if T.finds_entropy:
            rise, jump = level(rows.top, MASKED, T) - level(top, MASKED, T), level(base, MASKED, T) - level(top, MASKED, T)
            depth = (rows.depth + rows.total * rise) * decay + (depth * gl.exp2(jump) + sums * jump)
        if (
            T.modifiers.dropout and not T.schedule.apart
        ):  # packed in front of the wait it is more than ptxas can order: each product would wait
            acc = settle(acc, mem.values, use - 1, T.pieces)
            weights = as_weights(p, drawn, seed, mem.v.dtype, T)
        else:
            weights = as_weights(p, drawn, seed, mem.v.dtype, T)
            if not T.schedule.apart:
                acc = settle(acc, mem.values, use - 1, T.pieces)
        acc = scaled(acc, decay, T)
    else:
        top = gl.convert_layout(gl.max(score, 1), row_layout(T.block_k))
        if not MASKED:  # the curve rises: it is evaluated while the maximum is being found
            top = bent(top, scale, score_args, T, SCORE)
            score = bent(score, scale, score_args, T, SCORE)
        top = gl.maximum(rows.top, top)
        shift = level(top * factor, MASKED, T)
        decay = gl.exp2(rows.top * factor - shift)
        if T.modifiers.curved and not T.schedule.apart:
            mem.values.wait(use - 1)  # long over: but it ends in a jump, across which ptxas does not move the curve
        if not T.schedule.apart:
            acc = settle(acc, mem.values, use - 1, T.pieces)
        if T.finds_entropy:
            rise = level(rows.top * factor, MASKED, T) - shift
        if T.stored.fp8:
            shift = shift - LIFT_LOG2
        below = score * factor - gl.convert_layout(shift, row_layout(KEYS))[:, None]
        p = exponentials(below, MASKED, T)
        LANES: gl.constexpr = gl.SliceLayout(1, rows.total.type.layout)  # pyright: ignore[reportAssignmentType]
        decays = gl.convert_layout(decay, LANES)[:, None]
        total = rows.total * decays + lane_sums(p, T)
        if T.finds_entropy:
            rise = gl.convert_layout(rise, LANES)[:, None]
            depth = (rows.depth + rows.total * rise) * decays + depth_sums(p, below, MASKED, T)
        if T.stored.fp8:
            weights = stored_weights(p, T)
        else:
            acc, weights = scaled(acc, decay, T), as_weights(p, drawn, seed, mem.v.dtype, T)
    if MASKED and T.mask.asks:
        blank_hidden(mem.v, mem.values, use, tile, at, size, mask_args, GROUP, T.columns_v, T.parts_v, T, MASK)
    return ForwardRows(acc, weights, top, total, fetched, ahead, decay if T.stored.fp8 else (), depth)


@gluon.jit
def depth_sums(p, below, MASKED: gl.constexpr, T: gl.constexpr):
    """As `lane_sums`, of probabilities times their exponents; 0 where there is none."""
    KEYS: gl.constexpr = p.shape[1]
    if MASKED or T.may_start_empty:
        below = gl.maximum(below, -1024.0)  # of which 2 to the power is 0, as to that of minus infinity
    return first_of_lanes(row_products(p, below, KEYS), T)


@gluon.jit
def multiply_keys(score, mem, use, GROUP: gl.constexpr, HALF: gl.constexpr, T: gl.constexpr):
    """Queries times a key tile, or a HALF of it, under way, onto `score` if modifiers add."""
    if T.stored.fp8:
        return multiply_stored(mem.q.index(GROUP), mem.k.index(mem.keys.at(use)), T.rows, T.block_k, T.columns)
    else:
        keys = mem.k, mem.keys.at(use)
        return multiply_parts(score, (mem.q, GROUP), keys, T.modifiers.adds > 0, T.rows, T.block_k, T.columns, T.parts, HALF)


@gluon.jit
def add_values(rows, mem, use, HALF: gl.constexpr, T: gl.constexpr):
    """The accumulators plus probabilities times a value tile, or a HALF of it, under way."""
    mem.values.wait(use)
    weights = rows.weights
    if T.modifiers.dropout:
        weights = unpacked(weights, mem.v.dtype)
    return add_parts(rows.acc, weights, mem.v, mem.values.at(use), T.block_k, T.columns_v, T.parts_v, HALF)


@gluon.jit(do_not_specialize=[*PLAIN_INTEGERS, "swizzle"])
def attention_forward(q_desc, k_desc, v_desc, out_desc, bias_desc, targets, heads, group, left, right, swizzle, rest,
                      T: gl.constexpr, SCORE: gl.constexpr, MASK: gl.constexpr):  # fmt: skip
    """Descriptors of rank 4 over (batch, heads, seqlen, head_dim), blocks of T.rows or T.block_k rows and a part's columns.

    `swizzle` heads are computed together (see `work.job_at`); it depends on the sizes, so it is no part of T.
    targets = (lse, sink or None, out, strides of out and sink), and where T.statistics behind them each row's (peak, entropy),
    of which one may be None, or where T.tells_far a word for each warp of consumers in each block, which is not 0 where the lse
    of a row is beyond FAR or not finite; lse, and what rows have, are (batch, heads_q, seqlen_q), natural logarithm, float32,
    contiguous. bias_desc: the tensor of T.modifiers.early where it is T.modifiers.brought, or None. rest = (scale, arguments of
    modifiers, region); region = (the schedule, its records, where T.items.ragged; arguments of predicates; the mask's block
    lists, or None; where q, k or v are stored, the scales of each: a pointer, None if there is none, and its strides).

    Where T.stored.fp8 q, k and v are bytes, and v is what `values.py` makes of it, (slabs, heads_kv, head_dim_v, padded).
    """
    ROWS: gl.constexpr = T.rows
    BLOCK_K: gl.constexpr = T.block_k
    GROUPS: gl.constexpr = T.groups
    V_ROWS: gl.constexpr = T.columns_v if T.stored.fp8 else T.block_k
    V_COLUMNS: gl.constexpr = T.block_k if T.stored.fp8 else T.columns_v
    targets, scale, region = settled(targets), rest[0], settled(rest[2])
    seqlen_q, seqlen_k = q_desc.shape[2], k_desc.shape[2]
    q = gl.allocate_shared_memory(q_desc.dtype, [GROUPS * T.parts, 1, 1, ROWS, T.columns], q_desc.layout)
    k = gl.allocate_shared_memory(k_desc.dtype, [T.pipeline.stages * T.parts, 1, 1, BLOCK_K, T.columns], k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, [T.pipeline.stages * T.parts_v, 1, 1, V_ROWS, V_COLUMNS], v_desc.layout)
    out = q
    if T.pipeline.staged:
        out = gl.allocate_shared_memory(out_desc.dtype, [GROUPS * T.parts_v, 1, 1, ROWS, T.columns_v], out_desc.layout)
    job = q
    if T.mask.blocks_q > 0:
        job = make_words(5)
    keys, values = (
        make_channel(T.pipeline.stages, GROUPS, 1, T.pipeline.singly),
        make_channel(T.pipeline.stages, GROUPS, 1, T.pipeline.singly),
    )
    tickets = Tickets(q, keys, 1)
    if T.items.ragged:
        tickets = make_tickets(GROUPS, 8)
    again = Again(q, q)
    if T.softmax.watches:
        again = make_again(T)
    bias, biases = q, keys
    if T.modifiers.brought:
        bias = gl.allocate_shared_memory(bias_desc.dtype, [GROUPS, 1, 1, ROWS, BLOCK_K], bias_desc.layout)
        biases = make_channel(GROUPS, 1)
    queries = make_channel(GROUPS, 0 if T.pipeline.staged else 1)
    mem = ForwardMemory(q, k, v, out, bias, job, tickets, again, queries, keys, values, biases)
    fence_async_shared()
    await_stream(False)
    size = measure(heads, group, seqlen_q, seqlen_k, left, right, swizzle, q_desc.shape[0], region, T)
    if T.groups == 2 and T.pipeline.loader_warps == 4:
        gl.warp_specialize([
            (load, (q_desc, k_desc, v_desc, bias_desc, None, mem, size, region, T)),
            (consume, (out_desc, targets, mem, size, (scale, settled(rest[1]), region), 0, T, SCORE, MASK)),
            (consume, (out_desc, targets, mem, size, (scale, settled(rest[1]), region), 1, T, SCORE, MASK)),
        ], [4, 4], [T.pipeline.registers, T.pipeline.registers])  # fmt: skip
    elif T.groups == 2:
        gl.warp_specialize([
            (consume, (out_desc, targets, mem, size, (scale, settled(rest[1]), region), 0, T, SCORE, MASK)),
            (consume, (out_desc, targets, mem, size, (scale, settled(rest[1]), region), 1, T, SCORE, MASK)),
            (load, (q_desc, k_desc, v_desc, bias_desc, None, mem, size, region, T)),
        ], [4, 1], [T.pipeline.registers, T.pipeline.loader_registers])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (out_desc, targets, mem, size, (scale, settled(rest[1]), region), 0, T, SCORE, MASK)),
            (consume, (out_desc, targets, mem, size, (scale, settled(rest[1]), region), 1, T, SCORE, MASK)),
            (consume, (out_desc, targets, mem, size, (scale, settled(rest[1]), region), 2, T, SCORE, MASK)),
            (load, (q_desc, k_desc, v_desc, bias_desc, None, mem, size, region, T)),
        ], [4, 4, 1], [T.pipeline.registers, T.pipeline.registers, T.pipeline.loader_registers])  # fmt: skip
