"""A tile of scores in the registers of a warpgroup: where it lies, what modifiers and mask make of it, its rows' maxima."""

from flashtile.kernels.device.mask import holds
from flashtile.kernels.device.score import bent, logits
from flashtile.kernels.sm90.device.halves import join_halves, split_halves
from flashtile.kernels.sm90.device.layouts import matrix_layout, memory_layout, pair_layout, row_layout
from flashtile.kernels.sm90.device.mask_words import columns_below, lane_bits, numbers_of, of_lanes, of_tile, whole
from flashtile.problem.score import Position
from flashtile.triton_glue.gluon import fence_async_shared, gl, gluon, ones, raised, rebased, select_bits, stay
from flashtile.triton_glue.language import tl

MINUS_INFINITY = gl.constexpr("0fFF800000")


@gluon.jit
def fetch(tile, at, size, score_args, MASKED: gl.constexpr, T: gl.constexpr, SCORE: gl.constexpr):
    """What the modifier T.modifiers.early loads of a tile, under way; () if there is none, or it is T.modifiers.brought.

    A product or two later `spread` takes it.
    It lies in registers as in memory, eight neighbours in a thread, and is loaded so unless the tile reaches beyond the keys,
    as that of a band's or a list's queries that see nothing may.
    """
    if T.modifiers.early < 0 or T.modifiers.brought:
        return ()
    elif MASKED and (T.mask.pads_keys or T.mask.left or T.mask.blocks_q > 0):
        if (tile + 1) * T.block_k > size.seqlen_k:
            fetched = fetch_tile(tile, at, size, score_args, True, T, SCORE)
        else:
            fetched = fetch_tile(tile, at, size, score_args, False, T, SCORE)
        return fetched
    else:
        return fetch_tile(tile, at, size, score_args, False, T, SCORE)


@gluon.jit
def fetch_tile(tile, at, size, score_args, CLAMPED: gl.constexpr, T: gl.constexpr, SCORE: gl.constexpr):
    """As `fetch`: two neighbours in an int32, for on its own each half would take a register."""
    row, key = indices(tile, at, size, CLAMPED, T.block_k, memory_layout(T.block_k), T)
    place = Position(at.item.batch, at.head, row, row + (size.seqlen_k - size.seqlen_q), key)
    loaded = SCORE[T.modifiers.adds + 3 * T.modifiers.curved](place, score_args[T.modifiers.early]).to(gl.int16, bitcast=True)
    low, high = gl.split(loaded.reshape([loaded.shape[0], loaded.shape[1] // 2, 2]))
    return (high.to(gl.int32) << 16) | (low.to(gl.int32) & 0xFFFF)


@gluon.jit
def spread(fetched, DTYPE: gl.constexpr, T: gl.constexpr):
    """What `fetch` loaded, as scores lie."""
    BLOCK_K: gl.constexpr = T.block_k
    pairs = gl.convert_layout(fetched, pair_layout(BLOCK_K))
    low, high = pairs.to(gl.int16).to(DTYPE, bitcast=True), (pairs >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    loaded = gl.join(low, high).reshape([pairs.shape[0], BLOCK_K])
    return widened(gl.convert_layout(loaded, matrix_layout(BLOCK_K), assert_trivial=True))


@gluon.jit
def widened(x):
    """16 bits to float32; of bfloat16 said in integers, for a conversion takes another instruction for each upper half."""
    if x.dtype == gl.bfloat16:
        return (x.to(gl.int16, bitcast=True).to(gl.int32) << 16).to(gl.float32, bitcast=True)
    else:
        return x.to(gl.float32)


@gluon.jit
def indices(tile, at, size, CLAMPED: gl.constexpr, KEYS: gl.constexpr, L: gl.constexpr, T: gl.constexpr):
    """(row, key) of the scores of a tile of KEYS, clamped into the tensors so that a modifier may load by them."""
    ROWS: gl.constexpr = T.rows
    row = gl.minimum(at.row + gl.arange(0, ROWS, gl.SliceLayout(1, L)), gl.maximum(size.seqlen_q - 1, 0))
    key = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, L))
    if CLAMPED:
        key = gl.minimum(key, gl.maximum(size.seqlen_k - 1, 0))  # of no keys, too, a tile is visited
    return row[:, None], key[None, :]


@gluon.jit
def starts(fetched, use, tile, scene, GROUP: gl.constexpr, MASKED: gl.constexpr, KEYS: gl.constexpr, T: gl.constexpr,
           SCORE: gl.constexpr):  # fmt: skip
    """What the product with KEYS of a tile starts from: what modifiers add, which costs nothing between product and softmax.

    scene: a ForwardScene.
    """
    mem, score_args = scene.mem, scene.score_args
    ADDS: gl.constexpr = T.modifiers.adds
    BLOCK_K: gl.constexpr = T.block_k
    ROWS: gl.constexpr = T.rows
    score = gl.zeros([ROWS, KEYS], gl.float32, matrix_layout(KEYS))  # pyright: ignore[reportCallIssue]
    for i in gl.static_range(ADDS):
        if i == T.modifiers.early:
            if T.modifiers.brought:
                mem.biases.wait(use * T.groups + GROUP)
                loaded = widened(mem.bias.index(GROUP).reshape([ROWS, BLOCK_K]).load(matrix_layout(BLOCK_K)))
                fence_async_shared()
                mem.biases.release(use * T.groups + GROUP)
            else:
                loaded = spread(fetched, score_args[i][0].dtype.element_ty, T)
            score = SCORE[T.modifiers.adds + 3 * T.modifiers.curved + 1](score, loaded, T.regained / scene.scale)
        else:
            place = locate(tile, scene.at, scene.size, MASKED, T.block_k, T)
            score = SCORE[i](score, place, score_args[i], T.regained / scene.scale)
    return score


@gluon.jit
def locate(tile, at, size, MASKED: gl.constexpr, KEYS: gl.constexpr, T: gl.constexpr):
    """The Position of the scores of a tile of KEYS; `ahead` is one addition.

    A thread's columns are 8 j + k, constants, and an offset of its own, which joins the row's.
    """
    shift = size.seqlen_k - size.seqlen_q
    row, key = indices(tile, at, size, MASKED, KEYS, matrix_layout(KEYS), T)
    of_row, eight, offset, pair = numbers_of(KEYS)
    ahead = (tile * KEYS - (at.row + of_row) - shift + offset).to(gl.float32) + (eight + pair).to(gl.float32)
    ahead = whole(ahead, KEYS)
    return Position(at.item.batch, at.head, row, row + shift, key, ahead)


@gluon.jit
def shape_scores(score, tile, at, size, scale, score_args, mask_args,
                 MASKED: gl.constexpr, T: gl.constexpr, SCORE: gl.constexpr, MASK: gl.constexpr):  # fmt: skip
    """Scores, modified one by one if T.modifiers.prescale; if MASKED after the curve, and -inf where a query does not see a
    key.

    MASKED says which bounds the tile may meet, as T.mask.above and T.mask.below do. Tiles are counted in the width of `score`.
    """
    if T.modifiers.prescale:
        score = logits(score, locate(tile, at, size, MASKED, T.block_k, T), scale, score_args, T, SCORE)
    if MASKED:
        KEYS: gl.constexpr = score.shape[1]
        score = bent(score, scale, score_args, T, SCORE)
        words = shown(tile, at, size, MASKED, KEYS, T)
        if T.schedule.halves and MASKED < 3 and KEYS == T.block_k:
            score = hide_by_halves(score, words, tile, at, size, MASKED, T)
        else:
            if T.mask.predicate:
                words = words & asked(tile, at, size, mask_args, KEYS, T, MASK)
            score = select_bits(score, words, 0, MINUS_INFINITY, KEYS)
    return score


@gluon.jit
def asked(tile, at, size, mask_args, KEYS: gl.constexpr, T: gl.constexpr, MASK: gl.constexpr):
    """What predicates say of a tile's KEYS: words for `select_bits`. Where T.asks_narrow of 64 keys at a time."""
    AT_A_TIME: gl.constexpr = 64 if T.asks_narrow else KEYS  # pyright: ignore[reportAssignmentType]
    first = locate(KEYS // AT_A_TIME * tile, at, size, True, AT_A_TIME, T)
    lanes = lane_bits(holds(first, mask_args, T, MASK), AT_A_TIME)
    if KEYS > AT_A_TIME:
        upper = locate(2 * stay(tile) + 1, at, size, True, 64, T)
        lanes = lanes | (lane_bits(holds(upper, mask_args, T, MASK), 64) << 16)
    return of_lanes(lanes, KEYS)


@gluon.jit
def hide_by_halves(score, words, tile, at, size, BOUND: gl.constexpr, T: gl.constexpr):
    """-inf where a query does not see a key of a tile that may meet one BOUND: a half that all see whole is jumped over."""
    KEYS: gl.constexpr = T.block_k // 2
    low, high = split_halves(score)
    low_words, high_words = split_halves(words)
    position = at.row + size.seqlen_k - size.seqlen_q - tile * T.block_k
    if BOUND == 2:
        first = position + T.rows - 1 - size.left
        cut_low, cut_high = first > 0, first > KEYS
    else:
        last = size.seqlen_k - tile * T.block_k
        if T.mask.right:
            last = gl.minimum(last, position + size.right + 1)
        cut_low, cut_high = last < KEYS, last < 2 * KEYS
    if cut_low:
        low = select_bits(low, low_words, 0, MINUS_INFINITY, KEYS)
    if cut_high:
        high = select_bits(high, high_words, KEYS // 4, MINUS_INFINITY, KEYS)
    return gl.convert_layout(join_halves(low, high), score.type.layout, assert_trivial=True)


@gluon.jit
def shown(tile, at, size, BOUNDS: gl.constexpr, KEYS: gl.constexpr, T: gl.constexpr):
    """Which of a tile's KEYS a warpgroup's queries see within BOUNDS, as T.mask.above has them: words for `select_bits`."""
    row, _, offset, _ = numbers_of(KEYS)
    start = stay(tile) * KEYS
    position = at.row + row + (size.seqlen_k - size.seqlen_q) - start
    end = position * 0 + (size.seqlen_k - start)
    if T.mask.right:
        end = gl.minimum(position + size.right + 1, end)
    if T.mask.blocks_q > 0 and not T.mask.predicate:  # of a list without blocks one is visited
        end = gl.where(at.blocks.visited > 0, end, 0)
    if BOUNDS == 2:
        words = ones(columns_below(position - size.left - offset), False)
    else:
        words = ones(columns_below(end - offset), True)
        if BOUNDS == 3:
            words = words & ones(columns_below(position - size.left - offset), False)
    return of_tile(words, KEYS)


@gluon.jit
def sees(tile, at, size, mask_args, BOUNDS: gl.constexpr, KEYS: gl.constexpr, T: gl.constexpr, MASK: gl.constexpr):
    """`shown` score by score, and what predicates say."""
    words = shown(tile, at, size, BOUNDS, KEYS, T)
    column = gl.arange(0, KEYS, gl.SliceLayout(0, matrix_layout(KEYS)))[None, :]
    keep = (words & (1 << (column // 8 * 2 + column % 2))) != 0
    if T.mask.predicate:
        keep = keep & holds(locate(tile, at, size, True, KEYS, T), mask_args, T, MASK)
    return keep


@gluon.jit
def lane_sums(p, T: gl.constexpr):
    """Sums within each thread: a row's four lanes are added up only at the end."""
    ROWS: gl.constexpr = T.rows
    KEYS: gl.constexpr = p.shape[1]
    return as_lanes(gl.sum(gl.sum(p.reshape([ROWS, KEYS // 8, 4, 2]), 3), 1), T)


@gluon.jit
def as_lanes(x, T: gl.constexpr):
    """[64, 4], a number of each lane, in the layout that it has of a whole tile."""
    ROWS: gl.constexpr = T.rows
    BLOCK_K: gl.constexpr = T.block_k
    whole = gl.zeros([ROWS, BLOCK_K], gl.float32, matrix_layout(BLOCK_K))  # pyright: ignore[reportCallIssue]
    return gl.convert_layout(x, gl.sum(gl.sum(whole.reshape([ROWS, BLOCK_K // 8, 4, 2]), 3), 1).type.layout)


@gluon.jit
def level(top, MASKED: gl.constexpr, T: gl.constexpr):
    """The exponent to subtract; finite for a row that has seen nothing so far."""
    if MASKED or T.may_start_empty:
        top = gl.where(top == float("-inf"), 0.0, top)
    return top


@gluon.jit
def of_rows(x, T: gl.constexpr):
    """What each thread has (`again.of_threads`), for both of its rows."""
    ROWS: gl.constexpr = T.rows
    BLOCK_K: gl.constexpr = T.block_k
    rows = gl.zeros([ROWS], gl.int32, row_layout(BLOCK_K)).reshape([ROWS // 16, 2, 8])  # pyright: ignore[reportCallIssue]
    rows += gl.convert_layout(x, gl.SliceLayout(1, rows.type.layout), assert_trivial=True)[:, None, :]
    return gl.convert_layout(rows.reshape([ROWS]), row_layout(BLOCK_K), assert_trivial=True)


@gluon.jit
def lifted(score, top, factor, wild, MASKED: gl.constexpr, T: gl.constexpr):
    """What exponents of a tile are measured from: a number for each of the four lanes that hold a row, -inf if it saw nothing.

    That is `top`, what those of the tiles before were measured from, and nobody looks at the scores: `measured` tells from
    probabilities what has grown. But of a row whose top is -inf it is their maximum. And where that is more than 64 above the
    top it is, too, if the warp is careful; otherwise the whole tile of queries will be computed again, carefully (again.py).
    """
    KEYS: gl.constexpr = score.shape[1]
    L: gl.constexpr = score.type.layout
    factors = gl.full(score.shape, factor, gl.float32, L)
    asked = gl.convert_layout(of_rows(wild, T), row_layout(KEYS))[:, None].broadcast_to(score.shape)
    return first_of_lanes(
        raised(score, across(top, KEYS), factors, asked, MASKED or T.may_start_empty, T.softmax.votes, KEYS), T
    )


@gluon.jit
def measured(p, top, sums, T: gl.constexpr):
    """(p, top, sums) of probabilities p, measured from `top`, and their `lane_sums`.

    Of a row of which some lane has summed up more than 256 they are measured anew, from a power of two near its greatest: that
    is exact. But if that is above 2^64 the sum is infinite: p may be, too, and carefully there is no such row (`lifted`).
    """
    KEYS: gl.constexpr = p.shape[1]
    p, tops, all_sums = rebased(p, across(top, KEYS), across(sums, KEYS), KEYS)
    return p, first_of_lanes(tops, T), first_of_lanes(all_sums, T)


@gluon.jit
def across(lanes, COLUMNS: gl.constexpr):
    """A number for each of a row's four lanes, [64, 4], in all that they hold of [64, COLUMNS], in `matrix_layout`."""
    ROWS: gl.constexpr = lanes.shape[0]
    parts = gl.zeros([ROWS, COLUMNS], gl.float32, matrix_layout(COLUMNS)).reshape([ROWS, COLUMNS // 8, 4, 2])  # pyright: ignore[reportCallIssue]
    LANES: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, parts.type.layout))  # pyright: ignore[reportAssignmentType]
    parts += gl.convert_layout(lanes, LANES, assert_trivial=True)[:, None, :, None]
    return gl.convert_layout(parts.reshape([ROWS, COLUMNS]), matrix_layout(COLUMNS), assert_trivial=True)


@gluon.jit
def lanes_of(x, T: gl.constexpr):
    """A number of each row, in `row_layout`, for each of its four lanes."""
    ROWS: gl.constexpr = T.rows
    BLOCK_K: gl.constexpr = T.block_k
    wide = gl.zeros([ROWS, BLOCK_K], gl.float32, matrix_layout(BLOCK_K)) + x[:, None]  # pyright: ignore[reportCallIssue]
    return first_of_lanes(wide, T)


@gluon.jit
def first_of_lanes(x, T: gl.constexpr):
    """The first number that each lane holds of a row of x, as `lane_sums` has sums."""
    ROWS: gl.constexpr = T.rows
    KEYS: gl.constexpr = x.shape[1]
    return as_lanes(gl.reduce(gl.reduce(x.reshape([ROWS, KEYS // 8, 4, 2]), 3, first), 1, first), T)


@gluon.jit
def first(a, b):
    return a


@gluon.jit
def lowest(factor):
    """Where T.softmax.bounded: what scores of up to `factor` are measured from at least, in units of it: no exponent is above
    64.
    """
    return 1.0 - 64.0 / factor


@gluon.jit
def exponentials(x, MASKED: gl.constexpr, T: gl.constexpr):
    """2^x of a tile; of T.softmax.mixes one by a polynomial, for a curve and 2^x share one slow unit."""
    if T.softmax.mixes > 0:
        a, rest = shared_out(x)
        b, last = shared_out(rest)
        if T.softmax.mixes == 8:
            c, eighth = shared_out(last)
            made = together(gl.exp2(c), polynomial(eighth, MASKED or T.softmax.deep), last)
        else:
            made = polynomial(last, MASKED or T.softmax.deep)
        return together(gl.exp2(a), together(gl.exp2(b), made, rest), x)
    else:
        return gl.exp2(x)


@gluon.jit
def shared_out(x):
    """Every second eight columns, and the others, [64, eights, 8]; of columns or of such."""
    ROWS: gl.constexpr = x.shape[0]
    PAIRS: gl.constexpr = x.shape[1] // (16 if len(x.shape) == 2 else 2)
    return gl.split(x.reshape([ROWS, PAIRS, 2, 8]).permute([0, 1, 3, 2]))


@gluon.jit
def together(a, b, x):
    """What `shared_out` made of x, or something of the same shape, as that lies."""
    return gl.convert_layout(gl.join(a, b).permute([0, 1, 3, 2]).reshape(x.shape), x.type.layout, assert_trivial=True)


@gluon.jit
def polynomial(x, DEEP: gl.constexpr):
    """2^x to 7.5e-5, x >= -126 unless DEEP: probabilities are rounded to 4e-4 or worse. A fit on [-1/2, 1/2]; NaN stays NaN."""
    if DEEP:
        x = gl.maximum(x, -126.0, propagate_nan=tl.PropagateNan.ALL)
    whole = x + 12583039.0  # 1.5 * 2^23 + 127: the last of the sum's bits are the nearest integer, and an exponent's offset
    rest = x - (whole - 12583039.0)
    fit = 0.99992807 + rest * (0.69326099 + rest * (0.24261112 + rest * 0.05517166))
    power = whole.to(gl.int32, bitcast=True) << 23
    return fit * power.to(gl.float32, bitcast=True)
