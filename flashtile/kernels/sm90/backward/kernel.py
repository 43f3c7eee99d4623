"""Backward on Hopper: dk and dv of a key tile in registers, dq added to a float32 sum in the registers' own order."""

from flashtile.kernels.device.dropout import load_seed
from flashtile.kernels.device.grid import Sizes
from flashtile.kernels.device.stream import await_stream, let_next
from flashtile.kernels.sm90.backward.dq_convert import convert
from flashtile.kernels.sm90.backward.dq_reduce import add_dq, add_shares, report_dq
from flashtile.kernels.sm90.backward.ds_store import store_scores
from flashtile.kernels.sm90.backward.epilogue import scaled, store_keys
from flashtile.kernels.sm90.backward.memory import make_memory
from flashtile.kernels.sm90.backward.producer import BackwardDescriptors, load
from flashtile.kernels.sm90.backward.scores import (
    add_rest,
    added,
    blank_hidden_keys,
    blank_keys,
    differentiate,
    modified,
    spared,
    starts,
    weigh,
)
from flashtile.kernels.sm90.backward.split_tiles import add_given, give
from flashtile.kernels.sm90.backward.tile_scheduler import BackwardScene, Work, again, asks, find, meeting, plain
from flashtile.kernels.sm90.device.dropout import draw, kept, packed, steady, unpacked
from flashtile.kernels.sm90.device.layouts import matrix_layout, operand_layout
from flashtile.triton_glue.gluon import (
    fence_async_shared,
    gl,
    gluon,
    settled,
    store_wait,
    uniform,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashtile.triton_glue.language import PLAIN_INTEGERS


@gluon.jit
def meet(level_rows, step, scene, W: gl.constexpr, T: gl.constexpr, SCORE: gl.constexpr):
    """(query head, first query, first key, what the scores start from) of a step, once its queries have arrived."""
    memory, place = scene.memory, scene.place
    memory.to.queries.wait(step)
    head, start = meeting(memory, step, place, 4, T)
    first_key = place.column + W * 64
    raw = starts(level_rows, T.block_q, T.modifiers.folds_level)
    if T.adds_first:
        raw = added(raw, step, head, start, first_key, scene, W, T, SCORE)
    return head, start, first_key, raw


@gluon.jit
def step_keys(dk, dv, step, scene, W: gl.constexpr, FIRST: gl.constexpr, ASKS: gl.constexpr, T: gl.constexpr,
              SCORE: gl.constexpr, MASK: gl.constexpr):  # fmt: skip
    """Add one query tile to dk and, where T.outputs.dv, dv of 64 keys (scores transposed: keys x queries), and the share of dq
    of the step before to the sum.

    Unless ASKS it needs no mask. No step before: FIRST. Where T.douts_first dP, which needs no queries, and dk, after which the
    next ones may come, precede their neighbours.
    """
    LAGS: gl.constexpr = T.outputs.dq and not FIRST  # pyright: ignore[reportAssignmentType]
    # elsewhere ptxas makes all of a step's predicates at once, and keeps them as bits
    BY_PREDICATES: gl.constexpr = T.pipeline.joined or T.outputs.parted  # pyright: ignore[reportAssignmentType]
    BLOCK_Q: gl.constexpr = T.block_q
    COLUMNS: gl.constexpr = T.columns
    COLUMNS_V: gl.constexpr = T.columns_v
    SCORES: gl.constexpr = matrix_layout(BLOCK_Q)
    memory, sum_ptrs, place, sizes, work, _, _, seed = scene
    dtype: gl.constexpr = memory.q.dtype
    own = uniform(gl.to_tensor(W))  # in every step: the operands' descriptors, found before the loop, would spill
    if T.modifiers.dropout:  # in a register that a warp's lanes share: words are drawn while all others are taken
        step = uniform(step)
    queries, douts = memory.to.queries.at(step), memory.to.douts.at(step)
    if T.pipeline.stages == 1:
        queries, douts = uniform(queries), uniform(douts)
    k = memory.k.index(own).reshape([64, COLUMNS])
    v = memory.v.index(own).reshape([64, COLUMNS_V])
    q = memory.q.index(queries).reshape([BLOCK_Q, COLUMNS])
    dout = memory.dout.index(douts).reshape([BLOCK_Q, COLUMNS_V])
    level_rows = memory.rows.index(2 * memory.to.queries.at(step)).reshape([BLOCK_Q])
    delta_rows = memory.rows.index(2 * memory.to.queries.at(step) + 1).reshape([BLOCK_Q])

    if T.douts_first:
        memory.to.douts.wait(step)
        dp_token = multiply_rows(v, dout, starts(delta_rows, BLOCK_Q, T.modifiers.folds), False, T.cut_v)
    head, start, first_key, raw = meet(level_rows, step, scene, W, T, SCORE)
    dp = starts(delta_rows, BLOCK_Q, T.modifiers.folds)
    raw_token = multiply_rows(k, q, raw, T.modifiers.folds_level or T.adds_first, T.cut)
    drawn = ()
    if T.modifiers.dropout:  # before a wait, whose loop ends in a jump: ptxas moves nothing across it to where nothing hides it
        drawn = draw(seed, place.batch * sizes.heads + head, first_key, start, BLOCK_Q, True)
    if not T.douts_first:
        if not T.pipeline.joined:
            memory.to.douts.wait(step)
        dp_token = multiply_rows(v, dout, dp, T.modifiers.folds, T.cut_v)
    if T.reports:
        if step - 1 > place.visits.begin:
            report_dq(sum_ptrs, memory, step - 2, W, place, sizes, T)
    level = 0.0
    delta = 0.0
    masked = asks(memory, step, place, start, ASKS, T)
    if T.douts_first:
        dp = warpgroup_mma_wait(2 if T.cut else 1, deps=[dp_token])
        memory.to.douts.release(step)
        raw = warpgroup_mma_wait(0, deps=[raw_token])
    else:
        raw = warpgroup_mma_wait(2 if T.cut_v else 1, deps=[raw_token])
    if not T.modifiers.folds_level:
        level = level_rows.load(gl.SliceLayout(0, SCORES))[None, :]
    if T.modifiers.prescale:
        delta = delta_rows.load(gl.SliceLayout(0, SCORES))[None, :]
        if not T.douts_first:
            dp = warpgroup_mma_wait(0, deps=[dp_token])
        dp = through_dropout(dp, drawn, seed, BY_PREDICATES, T)
        p, ds = modified(raw, dp, (level, delta, 1.0), head, start, first_key, masked, scene, T, SCORE, MASK)
        if T.outputs.dv:
            weights = weighed(p, drawn, seed, dtype, T)
            dv_token = multiply_pieces(weights, dout, dv, COLUMNS_V, T.pieces_v)
    else:
        if T.modifiers.late:
            raw = add_rest(raw, head, start, first_key, scene, T, SCORE)
        p, slope = weigh(raw, level, step, 0, first_key, masked, scene, T, SCORE, MASK)
        if T.outputs.dv:
            weights = weighed(p, drawn, seed, dtype, T)
            dv_token = multiply_pieces(weights, dout, dv, COLUMNS_V, T.pieces_v)
        if T.modifiers.spares and T.mask.any and not T.modifiers.curved:
            if masked:  # before the wait: what follows it is not cut in two
                slope = spared(slope, slope)
        if not T.douts_first:
            dp = warpgroup_mma_wait((2 if T.pieces_v else 1) if T.outputs.dv else 0, deps=[dp_token])
        dp = through_dropout(dp, drawn, seed, BY_PREDICATES, T)
        if not T.modifiers.folds:
            delta = delta_rows.load(gl.SliceLayout(0, SCORES))[None, :]
        ds = differentiate(slope, dp, delta, start, first_key, masked, sizes, work.band, T)
    if not (T.outputs.dv or T.douts_first or T.pipeline.joined):
        memory.to.douts.release(step)

    ds = ds.to(dtype)
    if T.outputs.dq:
        memory.to.scores.claim(step)
        if FIRST:
            store_wait(0)  # the gradients of the tile before, which went from there
        ds_of(memory, 2 * W + step % 2, T).store(ds)
    fence_async_shared()  # the next queries' rows overwrite what was read, too
    if T.outputs.dq:
        memory.to.scores.hand_over(step)
    if T.douts_first:
        dk = multiply_dk(ds, q, dk, memory, 2 * W + step % 2, T)
    if LAGS:
        memory.to.scores.wait(step - 1)
        dq_token = multiply_dq(memory, step - 1, W, T)
    if T.douts_first:
        dk = settle_pieces(warpgroup_mma_wait(2 if LAGS else 0, deps=dk), T.cut)
        memory.to.queries.release(step)
    else:
        dk = multiply_dk(ds, q, dk, memory, 2 * W + step % 2, T)
    PENDING: gl.constexpr = 0 if T.douts_first else 2 if T.cut else 1  # pyright: ignore[reportAssignmentType]
    if T.outputs.dv:
        if LAGS and T.pieces_v:
            wide, rest, dq = warpgroup_mma_wait(PENDING, deps=[dv_token[0], dv_token[1], dq_token])
            dv = (wide, rest)
        elif LAGS:
            wide, dq = warpgroup_mma_wait(PENDING, deps=[dv_token[0], dq_token])
            dv = (wide,)
        else:
            dv = settle_pieces(warpgroup_mma_wait(PENDING, deps=dv_token), T.pieces_v)
        if not T.pipeline.joined:
            memory.to.douts.release(step)
    elif LAGS:
        dq = warpgroup_mma_wait(PENDING, deps=[dq_token])
    if LAGS:
        if not T.pipeline.joined:
            memory.to.scores.release(step - 1)
        add_dq(dq, memory, sum_ptrs, step - 1, place, sizes, work, W, T)
        if T.pipeline.joined:  # a word behind another one takes one barrier less
            memory.to.scores.release(step - 1)
    if not T.douts_first:
        dk = settle_pieces(warpgroup_mma_wait(0, deps=dk), T.cut)
        memory.to.queries.release(step)
    return dk, dv


@gluon.jit
def ds_of(memory, place, T: gl.constexpr):
    """A consumer's ds of a step, keys x queries."""
    if T.outputs.ds:
        return memory.ds.index(place).reshape([T.block_q, 64]).permute((1, 0))
    else:
        return memory.ds.index(place)


@gluon.jit
def weighed(p, drawn, seed, DTYPE: gl.constexpr, T: gl.constexpr):
    """Probabilities in 16 bits, as they weigh the values."""
    if T.modifiers.dropout:
        return unpacked(packed(p, drawn, seed, DTYPE), DTYPE)
    else:
        return p.to(DTYPE)


@gluon.jit
def through_dropout(dp, drawn, seed, BY_PREDICATES: gl.constexpr, T: gl.constexpr):
    """The gradient of probabilities, given that of what weighed the values."""
    if T.modifiers.dropout:
        return kept(dp, drawn, seed, BY_PREDICATES) * seed.factor
    else:
        return dp


@gluon.jit
def multiply_rows(a, b, start, ADDS: gl.constexpr, CUT: gl.constexpr):
    """Begin products of rows with rows, from `start` if ADDS; where CUT two, one after the other, without the last quarter."""
    if CUT:
        WIDE: gl.constexpr = a.shape[1] // 2
        rest: gl.constexpr = a.shape[1] // 4
        half = warpgroup_mma(a.slice(0, WIDE, 1), b.slice(0, WIDE, 1).permute((1, 0)), start, use_acc=ADDS, is_async=True)
        return warpgroup_mma(a.slice(WIDE, rest, 1), b.slice(WIDE, rest, 1).permute((1, 0)), half, is_async=True)
    else:
        return warpgroup_mma(a, b.permute((1, 0)), start, use_acc=ADDS, is_async=True)


@gluon.jit
def empty(COLUMNS: gl.constexpr, CUT: gl.constexpr):
    """dk or dv of 64 keys before their first step, in as many pieces as `multiply_pieces` adds to."""
    WIDE: gl.constexpr = COLUMNS // 2 if CUT else COLUMNS  # pyright: ignore[reportAssignmentType]
    rest: gl.constexpr = COLUMNS // 4  # pyright: ignore[reportAssignmentType]
    sums = (gl.zeros([64, WIDE], gl.float32, matrix_layout(WIDE)),)  # pyright: ignore[reportCallIssue]
    if CUT:
        sums = (sums[0], gl.zeros([64, rest], gl.float32, matrix_layout(rest)))  # pyright: ignore[reportCallIssue]
    return sums


@gluon.jit
def multiply_dk(ds, q, dk, memory, place, T: gl.constexpr):
    """Begin to add to the pieces of dk.

    ds comes from registers or, where a wide head's dk and dq leave none, from its place in shared memory.
    """
    if T.outputs.dq and T.pipeline.stages == 1:
        left = ds_of(memory, place, T)
        return add_pieces(left, left, q, dk, T.columns, T.cut)
    else:
        return multiply_pieces(ds, q, dk, T.columns, T.cut)


@gluon.jit
def multiply_pieces(left, right, sums, COLUMNS: gl.constexpr, CUT: gl.constexpr):
    """`add_pieces` of what lies in registers."""
    WIDE: gl.constexpr = COLUMNS // 2 if CUT else COLUMNS  # pyright: ignore[reportAssignmentType]
    rest: gl.constexpr = COLUMNS // 4  # pyright: ignore[reportAssignmentType]
    wide = gl.convert_layout(left, operand_layout(WIDE))
    if CUT:
        return add_pieces(wide, gl.convert_layout(left, operand_layout(rest)), right, sums, COLUMNS, CUT)
    else:
        return add_pieces(wide, wide, right, sums, COLUMNS, CUT)


@gluon.jit
def add_pieces(left, left_of_rest, right, sums, COLUMNS: gl.constexpr, CUT: gl.constexpr):
    """Begin to add products with rows to sums: all columns, or where CUT half of them and the next quarter."""
    WIDE: gl.constexpr = COLUMNS // 2  # pyright: ignore[reportAssignmentType]
    rest: gl.constexpr = COLUMNS // 4  # pyright: ignore[reportAssignmentType]
    if CUT:
        return (
            warpgroup_mma(left, right.slice(0, WIDE, 1), sums[0], is_async=True),
            warpgroup_mma(left_of_rest, right.slice(WIDE, rest, 1), sums[1], is_async=True),
        )
    else:
        return (warpgroup_mma(left, right, sums[0], is_async=True),)


@gluon.jit
def settle_pieces(sums, CUT: gl.constexpr):
    """The pieces of a sum, of which a wait for one does not make a tuple."""
    if CUT:
        return sums
    else:
        return (sums,)


@gluon.jit
def multiply_dq(memory, step, W: gl.constexpr, T: gl.constexpr):
    """Begin a consumer's part of dq, from both consumers' ds, which have come: half its columns or queries, from all keys."""
    COLUMNS_DQ: gl.constexpr = T.columns_dq // 2 if T.cut and W == 1 else T.columns_dq
    dq = gl.zeros([64, COLUMNS_DQ], gl.float32, matrix_layout(COLUMNS_DQ))  # pyright: ignore[reportCallIssue]
    for i in gl.static_range(2):
        share = ds_of(memory, 2 * i + step % 2, T)
        keys = memory.k.index(uniform(gl.to_tensor(i)) if T.outputs.parted else i).reshape([64, T.columns])
        if T.block_q == 64:
            keys = keys.slice(W * T.columns_dq, COLUMNS_DQ, 1)
        else:
            share = share.slice(W * 64, 64, 1)
        dq = warpgroup_mma(share.permute((1, 0)), keys, dq, use_acc=(i > 0), is_async=True)
    return dq


@gluon.jit
def step_dv(dv, weights, step, scene, W: gl.constexpr, LAGS: gl.constexpr, ASKS: gl.constexpr, T: gl.constexpr,
            SCORE: gl.constexpr, MASK: gl.constexpr):  # fmt: skip
    """`step_keys` of a pass with dv alone, less its last product: (dv, what that takes of `gain`).

    Where it LAGS dv gains what the step before left, under the product of this one's scores.

    Before queries are let go of there is a fence, for the next ones' rows overwrite what was read. It stands under the product
    unless modifiers follow this, items differ in length, or predicates narrow the mask: among what these load and compute ptxas
    then leaves out waits (`audit/hazards.py`).
    """
    FOLLOWED: gl.constexpr = T.modifiers.prescale or T.modifiers.curved or T.modifiers.late  # pyright: ignore[reportAssignmentType]
    RESTS: gl.constexpr = not (FOLLOWED or T.items.ragged or T.mask.predicate)  # pyright: ignore[reportAssignmentType]
    BLOCK_Q: gl.constexpr = T.block_q
    SCORES: gl.constexpr = matrix_layout(BLOCK_Q)
    memory, place, sizes, seed = scene.memory, scene.place, scene.sizes, scene.seed
    k = memory.k.index(uniform(gl.to_tensor(W))).reshape([64, T.columns])
    q = memory.q.index(memory.to.queries.at(step)).reshape([BLOCK_Q, T.columns])
    level_rows = memory.rows.index(2 * memory.to.queries.at(step)).reshape([BLOCK_Q])

    head, start, first_key, raw = meet(level_rows, step, scene, W, T, SCORE)
    raw_token = multiply_rows(k, q, raw, T.adds_first, T.cut)
    if LAGS:
        dv_token = multiply_dv(weights, dv, memory, step - 1, T)
    drawn = ()
    if T.modifiers.dropout:
        drawn = draw(seed, place.batch * sizes.heads + head, first_key, start, BLOCK_Q, True)
    masked = asks(memory, step, place, start, ASKS, T)
    level = 0.0
    if not T.modifiers.folds_level:
        level = level_rows.load(gl.SliceLayout(0, SCORES))[None, :]
    if RESTS:
        fence_async_shared()
    raw = warpgroup_mma_wait(1 if LAGS else 0, deps=[raw_token])
    if RESTS:
        memory.to.queries.release(step)
    if T.modifiers.prescale:
        p, _ = modified(raw, raw, (level, 0.0, 1.0), head, start, first_key, masked, scene, T, SCORE, MASK)
    else:
        if T.modifiers.late:
            raw = add_rest(raw, head, start, first_key, scene, T, SCORE)
        p, _ = weigh(raw, level, step, 0, first_key, masked, scene, T, SCORE, MASK)
    if LAGS:
        dv = warpgroup_mma_wait(0, deps=[dv_token])
        memory.to.douts.release(step - 1)
    weights = gl.convert_layout(weighed(p, drawn, seed, memory.q.dtype, T), operand_layout(T.columns_v))
    if not RESTS:
        fence_async_shared()
        memory.to.queries.release(step)
    return dv, weights


@gluon.jit
def multiply_dv(weights, dv, memory, step, T: gl.constexpr):
    """Begin to add to dv what a step's probabilities weigh."""
    dout = memory.dout.index(memory.to.douts.at(step)).reshape([T.block_q, T.columns_v])
    memory.to.douts.wait(step)
    return warpgroup_mma(weights, dout, dv, is_async=True)


@gluon.jit
def gain(dv, weights, memory, step, T: gl.constexpr):
    """dv with what a step's probabilities weigh."""
    dv = warpgroup_mma_wait(0, deps=[multiply_dv(weights, dv, memory, step, T)])
    memory.to.douts.release(step)
    return dv


@gluon.jit
def gather_dv(dv, begin, scene, W: gl.constexpr, T: gl.constexpr, SCORE: gl.constexpr, MASK: gl.constexpr):
    """dv of a tile: a step's share is added under the next one's product of scores."""
    memory, place = scene.memory, scene.place
    if place.visits.end > begin:
        dv, weights = step_dv(dv, (), begin, scene, W, False, True, T, SCORE, MASK)
        low, high = plain(place, scene.sizes, memory, scene.work, begin + 1, T)
        for step in range(begin + 1, low):
            dv, weights = step_dv(dv, weights, step, scene, W, True, True, T, SCORE, MASK)
        if T.splits:
            for step in range(low, high):
                dv, weights = step_dv(dv, weights, step, scene, W, True, False, T, SCORE, MASK)
        dv = gain(dv, weights, memory, place.visits.end - 1, T)
    return dv


@gluon.jit
def consume(dk_desc, dv_desc, grads, memory, work, scale, score_args, W: gl.constexpr, T: gl.constexpr,
            SCORE: gl.constexpr, MASK: gl.constexpr):  # fmt: skip
    """A warpgroup: dk and dv of 64 keys, or one of both."""
    # whether keys are let go of before dq's last share goes; beside dropout that would spill
    EARLY: gl.constexpr = T.outputs.sums_dq and not T.modifiers.dropout  # pyright: ignore[reportAssignmentType]
    sums = grads[0]
    seed = load_seed(score_args, T)
    if T.modifiers.dropout:
        seed = steady(seed)
    turn, begin = gl.to_tensor(0), gl.to_tensor(0)
    ticket = memory.to.tickets.read(turn, 4)
    while ticket < work.tiles:
        place, sizes = find(memory.to.tickets, turn, ticket, begin, work, 4, T)
        if T.begins_early and (
            T.modifiers.curved or not T.outputs.sums_dq
        ):  # of the others the loader waits for all; curves are faster for it
            await_stream(not T.outputs.sums_dq)
        dk, dv = empty(T.columns, T.cut), empty(T.columns_v, T.pieces_v)
        memory.to.keys.wait(turn)
        if T.mask.blanks and (T.outputs.sums_dq or T.mask.right):
            blank_keys(memory, place, sizes, work.band, W, T)
        if T.mask.predicate and T.outputs.sums_dq:
            blank_hidden_keys(memory, place, sizes, work, W, T, MASK)
        scene = BackwardScene(memory, sums, place, sizes, work, scale, score_args, seed)
        if not T.outputs.dk:
            dv = (gather_dv(dv[0], begin, scene, W, T, SCORE, MASK),)
        elif not T.outputs.sums_dq:
            low, high = plain(place, sizes, memory, work, begin, T)
            for step in range(begin, low):
                dk, dv = step_keys(dk, dv, step, scene, W, True, True, T, SCORE, MASK)
            if T.splits:
                for step in range(low, high):
                    dk, dv = step_keys(dk, dv, step, scene, W, True, False, T, SCORE, MASK)
        elif place.visits.end > begin:
            dk, dv = step_keys(dk, dv, begin, scene, W, True, True, T, SCORE, MASK)
            low, high = plain(place, sizes, memory, work, begin + 1, T)
            for step in range(begin + 1, low):
                dk, dv = step_keys(dk, dv, step, scene, W, False, True, T, SCORE, MASK)
            if T.splits:
                for step in range(low, high):
                    dk, dv = step_keys(dk, dv, step, scene, W, False, False, T, SCORE, MASK)
            memory.to.scores.wait(place.visits.end - 1)
            dq = warpgroup_mma_wait(0, deps=[multiply_dq(memory, place.visits.end - 1, W, T)])
            memory.to.scores.release(place.visits.end - 1)
            if EARLY:  # the next ones come while this tile's gradients go
                memory.to.keys.release(turn)
            if T.reports:
                if place.visits.end - 1 > begin:
                    report_dq(sums, memory, place.visits.end - 2, W, place, sizes, T)
            add_dq(dq, memory, sums, place.visits.end - 1, place, sizes, work, W, T)
            if T.reports:
                report_dq(sums, memory, place.visits.end - 1, W, place, sizes, T)
        elif EARLY:
            memory.to.keys.release(turn)
        if not EARLY:
            memory.to.keys.release(turn)
        begin = place.visits.end
        place, sizes = again(place, sizes, memory, work, 4, T)
        if T.modifiers.dropout:
            dv = scaled(dv, seed.factor, T.pieces_v)
        if T.schedule.pieces > 1:
            job = place.visits.job
            if job > 0:
                give(dk, dv, sums, job, W, T)
            else:
                if job < 0:
                    dk, dv = add_given(dk, dv, sums, job, W, T)
                there, _ = again(place, sizes, memory, work, 4, T)  # nothing of it is held while others' sums are added
                store_keys(dk_desc, dv_desc, grads, memory, scaled(dk, scale, T.cut), dv, there, W, T)
        else:
            store_keys(dk_desc, dv_desc, grads, memory, scaled(dk, scale, T.cut), dv, place, W, T)
        memory.to.tickets.finish(turn)
        turn = turn + 1
        ticket = memory.to.tickets.read(turn, 4)
    if T.outputs.sums_dq:
        let_next()
    store_wait(0)


@gluon.jit(do_not_specialize=PLAIN_INTEGERS)
def attention_backward(q_desc, k_desc, v_desc, dout_desc, dk_desc, dv_desc, rows_desc, sum_desc, bias_desc, ds_desc, left,
                       right, rest, T: gl.constexpr, SCORE: gl.constexpr, MASK: gl.constexpr):  # fmt: skip
    """Blocks take tiles of keys: dk, dv over all query heads of their key/value head, and a share of dq.

    rest = (grads, region, scale, arguments of modifiers, arguments of predicates, block lists); grads = ((sum for dq, counts
    of tickets, locks if T.locked, as `rows.attention_rows` left them, room for what `give` gives if T.schedule.pieces > 1),
    (dk, its strides), (dv, its strides)), the latter two where T.items.varlen. A pass for dv alone is given the sum if another
    adds to it, and clears it; unless T.outputs.dq there is none. region, and what the mask has, as in `visit.Work`. bias_desc:
    the tensor of the modifier T.modifiers.early, or None; ds_desc: where T.outputs.ds, its gradient.
    """
    grads, region, scale = settled(rest[0]), settled(rest[1]), rest[2]
    mask_args, lists = settled(rest[4]), settled(rest[5])
    heads, seqlen_q, seqlen_k = q_desc.shape[1], q_desc.shape[2], k_desc.shape[2]
    if T.items.ragged:
        tiles = region[2] * (heads // T.group)
    elif T.mask.blocks_q > 0:
        tiles = gl.cdiv(seqlen_k, T.mask.blocks_k) * (T.mask.blocks_k // T.block_k) * k_desc.shape[0] * k_desc.shape[1]
    else:
        tiles = gl.cdiv(seqlen_k, T.block_k) * k_desc.shape[0] * k_desc.shape[1]
        if T.shares > 1:
            tiles = tiles * T.shares
    if T.schedule.helps:  # as many first jobs, and second ones
        tiles = 2 * tiles
    work = Work(gl.to_tensor(tiles), Sizes(seqlen_q, seqlen_k, heads, heads), (left, right), region, mask_args, lists)
    counter_ptr = grads[0][1] if T.outputs.dk else grads[0][1] + 1
    descs = BackwardDescriptors(q_desc, k_desc, v_desc, dout_desc, rows_desc, sum_desc, bias_desc, ds_desc)
    memory = make_memory(descs, T)
    fence_async_shared()
    if not T.begins_early:
        await_stream(not T.outputs.sums_dq)
    if not T.outputs.copies_dq:
        gl.warp_specialize([
            (consume, (dk_desc, dv_desc, grads, memory, work, scale, settled(rest[3]), 0, T, SCORE, MASK)),
            (consume, (dk_desc, dv_desc, grads, memory, work, scale, settled(rest[3]), 1, T, SCORE, MASK)),
            (load, (descs, grads[0][0], counter_ptr, memory, work, T)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (dk_desc, dv_desc, grads, memory, work, scale, settled(rest[3]), 0, T, SCORE, MASK)),
            (consume, (dk_desc, dv_desc, grads, memory, work, scale, settled(rest[3]), 1, T, SCORE, MASK)),
            (load, (descs, grads[0][0], counter_ptr, memory, work, T)),
            (add_shares, (sum_desc, grads[0], memory, work, 0, T)),
            (add_shares, (sum_desc, grads[0], memory, work, 1, T)),
            (convert, (sum_desc, grads[0], grads[3], q_desc.shape[0], memory, work, T)) if T.pipeline.converts
            else (store_scores, (ds_desc, grads[0][1], memory, work, T)),
        ][: 2 + T.helpers], [4, 1, 1, 1, 1][: 1 + T.helpers], [240, 24, 24, 24, 24][: 1 + T.helpers])  # fmt: skip
