"""Scores of the backward: what is hidden, probabilities, the gradient of a product, and tiles of which parts may hold NaN."""

from flashtile.kernels.device.exponential import LOG2E
from flashtile.kernels.device.mask import holds, seen, visible
from flashtile.kernels.device.score import bent, locate, probabilities, unit
from flashtile.kernels.sm90.backward.tile_scheduler import again, meeting, seeing
from flashtile.kernels.sm90.device.blank import blank_rows
from flashtile.kernels.sm90.device.layouts import matrix_layout
from flashtile.kernels.sm90.device.mask_words import columns_below, lane_bits, numbers_of, of_lanes, of_tile, whole
from flashtile.kernels.sm90.device.scores import widened
from flashtile.triton_glue.gluon import fence_async_shared, gl, gluon, ones, select_bits, stay

NEGATIVE_ZERO = gl.constexpr("0f80000000")
WHOLE = gl.constexpr(1 - 2.0**-14)  # from here on a probability is the row's only one, as well as a float32 lse tells


@gluon.jit
def blank_keys(memory, place, sizes, band, W: gl.constexpr, T: gl.constexpr):
    """Zero the keys that no query sees, before all of them are summed over for dq.

    Where the band ends before a query's own key, the queries behind the last one, which a tile has, too, would see them and
    their values. What is NaN there stays so times their p = 0.
    """
    first, end = seeing(sizes.k, sizes.q, band[1], band[0], T.mask.right, T.mask.left)
    first_key = place.column + W * 64
    if (first_key < first) | (first_key + 64 > end):
        blank_rows(memory.k.index(W).reshape([64, T.columns]), first - first_key, end - first_key)
        if T.outputs.dk and T.mask.right:
            blank_rows(memory.v.index(W).reshape([64, T.columns_v]), first - first_key, end - first_key)
        fence_async_shared()


@gluon.jit
def blank_hidden_keys(memory, place, sizes, work, W: gl.constexpr, T: gl.constexpr, MASK: gl.constexpr):
    """Zero the keys that a predicate hides from all queries, if any key is not finite: only then the mask is asked."""
    COLUMNS: gl.constexpr = T.columns
    STRIP: gl.constexpr = 16  # pyright: ignore[reportAssignmentType]
    INFINITE: gl.constexpr = 0x7F80 if memory.k.dtype == gl.bfloat16 else 0x7C00  # pyright: ignore[reportAssignmentType]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])  # pyright: ignore[reportAssignmentType]
    SCORES: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])  # pyright: ignore[reportAssignmentType]
    k = memory.k.index(W).reshape([64, COLUMNS])
    first_key = place.column + W * 64
    none = place.visits.begin if T.mask.blocks_q > 0 else 0
    if place.visits.full_lo > none:
        largest = gl.zeros([STRIP, COLUMNS], gl.int16, LAYOUT)  # pyright: ignore[reportCallIssue]
        for strip in gl.static_range(0, 64, STRIP):
            largest = gl.maximum(largest, k.slice(strip, STRIP).load(LAYOUT).to(gl.int16, bitcast=True) & 0x7FFF)
        if gl.max(gl.max(largest, 1), 0) >= INFINITE:
            some = gl.zeros([64], gl.int32, gl.SliceLayout(1, SCORES))  # pyright: ignore[reportCallIssue]
            for member in range(T.group):
                head = place.head_kv * T.group + member
                steps, asked, listed = place.visited(head, work, T)
                for nth in range(steps):
                    start, _ = place.visit(nth, asked, listed, T)
                    for query in range(0, T.block_q, STRIP):
                        keep = sees(head, start + query, first_key, place, sizes, work, SCORES, [64, STRIP], T, MASK)
                        some = gl.maximum(some, gl.max(keep.to(gl.int32), 1))
            wanted = gl.convert_layout(some, gl.SliceLayout(1, LAYOUT))[:, None] > 0
            k.store(gl.where(wanted, k.load(LAYOUT), 0.0))
        fence_async_shared()


@gluon.jit
def sees(head, first_query, first_key, place, sizes, work, LAYOUT: gl.constexpr, SHAPE: gl.constexpr, T: gl.constexpr,
         MASK: gl.constexpr):  # fmt: skip
    """Which keys are seen by which queries: a tile, keys x queries."""
    head, first_query, first_key = stay(head), stay(first_query), stay(first_key)
    query, key = indices(first_query, first_key, LAYOUT, SHAPE)
    at = locate(stay(place.batch), head, query, key, sizes)
    return seen(at, query, key, sizes, (work.band[0], work.band[1], work.mask_args), True, T, MASK)


@gluon.jit
def shown(head, first_query, first_key, place, sizes, work, COLUMNS: gl.constexpr, T: gl.constexpr, MASK: gl.constexpr):
    """`sees` as words for `select_bits`, half of the queries at a time, for registers are short.

    Queries that do not exist have p = 0 anyway.
    """
    HALF: gl.constexpr = COLUMNS // 2
    first_query = stay(first_query)
    low = asked(head, first_query, first_key, place, sizes, work, HALF, T, MASK)
    high = asked(head, stay(first_query + HALF), first_key, place, sizes, work, HALF, T, MASK)
    words = of_lanes(low | (high << (COLUMNS // 8)), COLUMNS)
    if T.mask.left or T.mask.right or T.mask.pads_keys:
        row, _, offset, _ = numbers_of(COLUMNS)
        aligned = first_key + row - (sizes.k - sizes.q) - first_query - offset
        if T.mask.right:
            words = words & of_tile(ones(columns_below(aligned - work.band[1]), False), COLUMNS)
        if T.mask.left:
            words = words & of_tile(ones(columns_below(aligned + work.band[0] + 1), True), COLUMNS)
        if T.mask.pads_keys:
            _, key = indices(first_query, first_key, matrix_layout(COLUMNS), [64, COLUMNS])
            words = gl.where(key < sizes.k, words, 0)
    return words


@gluon.jit
def asked(head, first_query, first_key, place, sizes, work, COLUMNS: gl.constexpr, T: gl.constexpr, MASK: gl.constexpr):
    """Which of COLUMNS queries see which keys by the predicates alone, as `lane_bits` has it."""
    query, key = indices(first_query, first_key, matrix_layout(COLUMNS), [64, COLUMNS])
    at = locate(stay(place.batch), head, query, key, sizes)
    return lane_bits(holds(at, work.mask_args, T, MASK), COLUMNS)


@gluon.jit
def hide(x, nothing, first_query, first_key, sizes, band, T: gl.constexpr):
    """x (keys x queries), `nothing` where `mask.visible` is false, at one comparison per score for each bound.

    Queries that do not exist have p = 0 anyway. A thread's columns are 8 j + k and an offset of its own, which joins the
    bounds: what is left to compare with are constants.
    """
    COLUMNS: gl.constexpr = x.shape[1]
    row, eight, offset, pair = numbers_of(COLUMNS)
    column, key = eight + pair, first_key + row
    aligned = stay(key - (sizes.k - sizes.q) - first_query)
    first = aligned * 0
    if T.mask.right:
        first = aligned - band[1]
    if T.mask.pads_keys:
        first = gl.where(key < sizes.k, first, 2147483647)
        if (
            T.tells and not T.mask.right
        ):  # nothing of it knows the step: all comparisons would be made before the loop, and kept
            first = stay(first)
    keep = column >= first - offset
    if T.mask.left:
        keep = keep & (column <= aligned + band[0] - offset)
    return whole(gl.where(keep, x.reshape([64, COLUMNS // 8, 4, 2]), nothing), COLUMNS)


@gluon.jit
def starts(rows, COLUMNS: gl.constexpr, FOLDS: gl.constexpr):
    """What a product of 64 rows starts from: zero or, where it FOLDS, a number for each column, which saves adding it.

    Made before the first product is begun: ptxas lets nobody write to an accumulator while another one is at work.
    """
    LAYOUT: gl.constexpr = matrix_layout(COLUMNS)
    zero = gl.zeros([64, COLUMNS], gl.float32, LAYOUT)  # pyright: ignore[reportCallIssue]
    if FOLDS:
        numbers, _ = gl.broadcast(rows.load(gl.SliceLayout(0, LAYOUT))[None, :], zero)
        return numbers
    else:
        return zero


@gluon.jit
def added(raw, step, head, first_query, first_key, scene, W: gl.constexpr, T: gl.constexpr, SCORE: gl.constexpr):
    """What a product starts from, plus what modifiers add. That of T.modifiers.early lies in shared memory, queries x keys."""
    memory = scene.memory
    if T.modifiers.early >= 0:
        memory.to.biases.wait(step)
        loaded = memory.bias.index(W).reshape([raw.shape[1], 64]).permute((1, 0)).load(matrix_layout(raw.shape[1]))
        fence_async_shared()
        memory.to.biases.release(step)
        raw = SCORE[T.modifiers.adds](raw, widened(loaded), 1.0 / scene.scale)
    if not T.modifiers.late:
        raw = add_rest(raw, head, first_query, first_key, scene, T, SCORE)
    return raw


@gluon.jit
def add_rest(raw, head, first_query, first_key, scene, T: gl.constexpr, SCORE: gl.constexpr):
    """raw plus what all modifiers but T.modifiers.early add."""
    ADDS: gl.constexpr = T.modifiers.adds
    query, key = indices(first_query, first_key, matrix_layout(raw.shape[1]), raw.shape)
    at = locate(scene.place.batch, head, query, key, scene.sizes)
    for i in gl.static_range(ADDS):
        if i != T.modifiers.early:
            raw = SCORE[i](raw, at, scene.score_args[i], 1.0 / scene.scale)
    return raw


@gluon.jit
def indices(first_query, first_key, LAYOUT: gl.constexpr, SHAPE: gl.constexpr):
    """Which queries and which keys a tile is of, keys x queries."""
    query = first_query + gl.arange(0, SHAPE[1], layout=gl.SliceLayout(0, LAYOUT))[None, :]
    key = first_key + gl.arange(0, SHAPE[0], layout=gl.SliceLayout(1, LAYOUT))[:, None]
    return query, key


@gluon.jit
def modified(raw, dp, row, head, first_query, first_key, masked, scene, T: gl.constexpr, SCORE: gl.constexpr,
             MASK: gl.constexpr):  # fmt: skip
    """(p, ds) of a tile (keys x queries) of a problem with modifiers; row as for `probabilities`."""
    sizes, work = scene.sizes, scene.work
    query, key = indices(first_query, first_key, matrix_layout(raw.shape[1]), raw.shape)
    at = locate(scene.place.batch, head, query, key, sizes)
    keep = visible(query, key, sizes, work.band, T)
    if T.mask.predicate:
        if masked:
            keep = keep & holds(at, work.mask_args, T, MASK)
    p, ds = probabilities(raw, dp, row, at, keep, scene.scale, scene.score_args, T.mask.any, T, SCORE)
    if T.modifiers.spares and T.mask.any:
        if masked:
            ds = spared(ds, p)
    return p, ds


@gluon.jit
def spared(ds, p):
    """ds, 0 for a key that has all the weight of a row: dp - delta is 0 there, but delta is of out as it was rounded.

    Without dropout out is that key's value, in 16 bits as it is, and nothing is rounded. All other keys of such a row together
    weigh less than 2^-14, which is less than what out is rounded by. Only a masked tile has such a key, unless a tensor that is
    added hides the others. It is asked where this stands: steps that need no mask would all select, too.
    """
    p = stay(p.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)
    return gl.where(p > WHOLE, 0.0, ds)


@gluon.jit
def weigh(raw, level, step, offset, first_key, masked, scene, T: gl.constexpr, SCORE: gl.constexpr, MASK: gl.constexpr):
    """(p, p times the derivative of a curve) of a step's products (keys x queries), of its queries from `offset` on.

    level as `rows.attention_rows` gives it. What a predicate hides gets -0.0, which neither is elsewhere, for curves rise: by
    that `differentiate` knows it.
    """
    memory, place, sizes, work = scene.memory, scene.place, scene.sizes, scene.work
    scale, score_args = scene.scale, scene.score_args
    score, factor = bent(raw, scale, score_args, T, SCORE), unit(scale, score_args, T, SCORE)
    EARLY: gl.constexpr = T.modifiers.curved and not T.mask.predicate  # pyright: ignore[reportAssignmentType]
    if T.mask.any and EARLY:  # before there are two to hide; the derivative there may be anything
        if masked:
            _, start = meeting(memory, step, place, 4, T)
            score = hide(score, float("-inf"), start + offset, first_key, sizes, work.band, T)
    if T.modifiers.folds_level:
        p = gl.exp2(score * (factor * LOG2E))
    else:
        p = gl.exp2(score * (factor * LOG2E) - level)
    slope = p * SCORE[T.modifiers.adds + 1](score) if T.modifiers.curved else p
    if T.mask.any and T.modifiers.spares and T.modifiers.curved:
        if masked:
            slope = spared(slope, p)
    if T.mask.any and not EARLY:
        if masked:
            head, start = meeting(memory, step, place, 4, T)
            if T.mask.predicate:
                COLUMNS: gl.constexpr = p.shape[1]
                place, sizes = again(place, sizes, memory, work, 4, T)
                words = shown(head, start + offset, first_key, place, sizes, work, COLUMNS, T, MASK)
                p = select_bits(p, words, 0, NEGATIVE_ZERO, COLUMNS)
                slope = select_bits(slope, words, 0, NEGATIVE_ZERO, COLUMNS) if T.modifiers.curved else p
            else:
                p = hide(p, 0.0, start + offset, first_key, sizes, work.band, T)
                slope = p
    return p, slope


@gluon.jit
def differentiate(slope, dp, delta, first_query, first_key, masked, sizes, band, T: gl.constexpr):
    """The gradient of the scaled product; `slope` as `weigh` has it."""
    if T.modifiers.folds:
        ds = slope * dp
    else:
        ds = slope * (dp - delta)
    if T.mask.any:
        if masked:  # dp may be NaN where nothing is to be seen
            if T.mask.predicate:
                ds = gl.where(stay(slope.to(gl.int32, bitcast=True)) < 0, 0.0, ds)
            else:
                ds = hide(ds, 0.0, first_query, first_key, sizes, band, T)
    return ds
