"""Applying a chain of score modifiers, forward and in reverse.

Kernels get the functions as flat constexpr tuples (Triton 3.6 cannot index a tuple inside a tuple):
`SCORE` = (forward 0, backward 0, forward 1, backward 1, ...), and `CAPTURED` = a pair (contribution, index) for each
captured tensor, equally many per modifier, (None, None) where no gradient is wanted.
"""

from __future__ import annotations

from flashtile._triton import JitTuple, jit, tl
from flashtile.kernels.lib.exponential import LOG2E, exp
from flashtile.spec.score import Position, ScoreSpec


def chain(score: tuple[ScoreSpec, ...]) -> JitTuple:
    """SCORE of a problem's modifiers."""
    return JitTuple(function for spec in score for function in (spec.kind.forward, spec.kind.backward))


def captures(score: tuple[ScoreSpec, ...]) -> JitTuple:
    """CAPTURED of a problem's modifiers for the pass over queries; empty when it forms no captured tensor's gradient."""
    if not any(sums_in_queries(spec, j) for spec in score for j in range(len(spec.tensors))):
        return JitTuple()
    most = max(len(spec.tensors) for spec in score)
    flat = []
    for spec in score:
        pairs = [
            (captured.contribution, captured.index) if sums_in_queries(spec, j) else (None, None)
            for j, captured in enumerate(spec.kind.captured)
        ]
        flat += [function for pair in pairs + [(None, None)] * (most - len(pairs)) for function in pair]
    return JitTuple(flat)


def sums_in_queries(spec: ScoreSpec, tensor: int) -> bool:
    """Whether the pass over queries forms this captured tensor's gradient: where it is wanted, and not broadcast."""
    return spec.tensors[tensor].grad and not spec.kind.captured[tensor].broadcast


@jit
def locate(batch, head, row, key, sizes):
    """The Position of a tile, its indices clamped into the tensors so that a modifier may load by them."""
    row = tl.minimum(row, sizes.q - 1)
    return Position(batch, head, row, row + sizes.k - sizes.q, tl.minimum(key, sizes.k - 1))


@jit
def logits(raw, at, scale, score_args, T: tl.constexpr, SCORE: tl.constexpr):
    """The product q k^T turned into modified scores; unscaled unless T.prescale."""
    if T.prescale:
        score = raw * scale
        for i in tl.static_range(len(SCORE) // 2):
            score = SCORE[2 * i](score, at, score_args[i])
        return score
    return raw


@jit
def stages(raw, at, scale, score_args, SCORE: tl.constexpr):
    """The scaled score and what each modifier made of it, as a tuple."""
    scores = (raw * scale,)
    for i in tl.static_range(len(SCORE) // 2):
        scores = scores + (SCORE[2 * i](scores[i], at, score_args[i]),)  # noqa: RUF005 (Triton knows no unpacking)
    return scores


@jit
def probabilities(raw, dp, row, at, keep, scale, score_args, MASKED: tl.constexpr, T: tl.constexpr, SCORE: tl.constexpr):
    """(p, ds) of a tile: probabilities, and the gradient of the scaled product.

    dp is the gradient of p; row = (level, delta, norm) broadcasts along the keys, p = norm * exp(score - level), with
    level in units of the base-2 exponential unless T.prescale; keep says which scores exist.
    """
    if T.prescale:
        scores = stages(raw, at, scale, score_args, SCORE)
        p = exp(scores[len(SCORE) // 2] - row[0], T)
        if T.exact:
            p = p * row[2]
    else:
        p = tl.exp2(raw * (scale * LOG2E) - row[0])
    if MASKED:
        p = tl.where(keep, p, 0.0)
    ds = p * (dp - row[1])
    for r in tl.static_range(1, len(SCORE) // 2 + 1):  # r modifiers before the end
        ds = SCORE[len(SCORE) - 2 * r + 1](
            ds, scores[len(SCORE) // 2 - r], scores[len(SCORE) // 2 - r + 1], at, score_args[len(SCORE) // 2 - r]
        )
    if MASKED:  # dp, or a modifier's derivative, may be NaN where nothing is to be seen
        ds = tl.where(keep, ds, 0.0)
    return p, ds


@jit
def capture(totals, raw, dp, row, at, keep, scale, score_args, grad_args,
            INDEXED: tl.constexpr, T: tl.constexpr, SCORE: tl.constexpr, CAPTURED: tl.constexpr):  # fmt: skip
    """Add what a tile sends to captured tensors: sums to `totals` (rows, slots) and, if INDEXED, elements to memory.

    grad_args[i][j] = (slot, pointer): the place in `totals`, and where sums or elements are stored.
    """
    scores = stages(raw, at, scale, score_args, SCORE)
    p = tl.where(keep, row[2] * exp(scores[len(SCORE) // 2] - row[0], T), 0.0)
    ds = p * (dp - row[1])
    for r in tl.static_range(1, len(SCORE) // 2 + 1):  # r modifiers before the end
        score = scores[len(SCORE) // 2 - r]
        for j in tl.static_range(len(CAPTURED) // len(SCORE)):
            if CAPTURED[(len(SCORE) // 2 - r) * (2 * len(CAPTURED) // len(SCORE)) + 2 * j] is not None:
                totals = capture_one(
                    totals, ds, score, at, keep, score_args[len(SCORE) // 2 - r], grad_args[len(SCORE) // 2 - r][j],
                    CAPTURED[(len(SCORE) // 2 - r) * (2 * len(CAPTURED) // len(SCORE)) + 2 * j],
                    CAPTURED[(len(SCORE) // 2 - r) * (2 * len(CAPTURED) // len(SCORE)) + 2 * j + 1], INDEXED, T,
                )  # fmt: skip
        ds = SCORE[len(SCORE) - 2 * r + 1](ds, score, scores[len(SCORE) // 2 - r + 1], at, score_args[len(SCORE) // 2 - r])
        ds = tl.where(keep, ds, 0.0)
    return totals


@jit
def capture_one(totals, grad, score, at, keep, score_args, target,
                CONTRIBUTION: tl.constexpr, INDEX: tl.constexpr, INDEXED: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """The totals after one captured tensor; without INDEX its contributions are summed, with it they go to memory."""
    SLOTS: tl.constexpr = T.slots
    share = tl.where(keep, CONTRIBUTION(grad, score, at, score_args), 0.0)
    if INDEX is None:
        totals += tl.where(tl.arange(0, SLOTS)[None, :] == target[0], tl.sum(share, 1)[:, None], 0.0)
    elif INDEXED:
        element = tl.broadcast_to(INDEX(at, score_args), share.shape)
        tl.atomic_add(target[1] + element, share, mask=keep, sem="relaxed")
    return totals


@jit
def contribution(raw, dp, row, at, keep, scale, score_args,
                 T: tl.constexpr, SCORE: tl.constexpr, CAPTURED: tl.constexpr):  # fmt: skip
    """What each score sends to a captured tensor; CAPTURED = (its contribution, its modifier's place in the chain)."""
    WHICH: tl.constexpr = CAPTURED[1]
    scores = stages(raw, at, scale, score_args, SCORE)
    p = tl.where(keep, row[2] * exp(scores[len(SCORE) // 2] - row[0], T), 0.0)
    ds = p * (dp - row[1])
    for r in tl.static_range(1, len(SCORE) // 2 - WHICH):  # r modifiers before the end
        ds = SCORE[len(SCORE) - 2 * r + 1](
            ds, scores[len(SCORE) // 2 - r], scores[len(SCORE) // 2 - r + 1], at, score_args[len(SCORE) // 2 - r]
        )
        ds = tl.where(keep, ds, 0.0)
    return tl.where(keep, CAPTURED[0](ds, scores[WHICH], at, score_args[WHICH]), 0.0)


@jit
def store_totals(totals, at, grad_args, T: tl.constexpr, SCORE: tl.constexpr, CAPTURED: tl.constexpr):
    """Write the per-head sums of this program to element `at` of their buffers."""
    SLOTS: tl.constexpr = T.slots
    for i in tl.static_range(len(SCORE) // 2):
        for j in tl.static_range(len(CAPTURED) // len(SCORE)):
            if CAPTURED[i * (2 * len(CAPTURED) // len(SCORE)) + 2 * j] is not None:
                if CAPTURED[i * (2 * len(CAPTURED) // len(SCORE)) + 2 * j + 1] is None:
                    total = tl.sum(tl.where(tl.arange(0, SLOTS) == grad_args[i][j][0], totals, 0.0))
                    tl.store(grad_args[i][j][1] + at, total)
