"""Applying a chain of score modifiers, forward and in reverse.

`SCORE` is a constexpr JitTuple with one (forward, backward, captured) per modifier; captured has one entry per
captured tensor: (contribution, index) where its gradient is wanted, None where not.
"""

from __future__ import annotations

from flashtile._triton import JitTuple, constexpr, jit, tl
from flashtile.spec.score import Position, ScoreSpec

LOG2E = constexpr(1.4426950408889634)


def chain(score: tuple[ScoreSpec, ...]) -> JitTuple:
    """The constexpr of a problem's modifiers."""
    return JitTuple(
        JitTuple(
            (
                spec.kind.forward,
                spec.kind.backward,
                JitTuple(
                    JitTuple((c.contribution, c.index)) if t.grad else None
                    for c, t in zip(spec.kind.captured, spec.tensors, strict=True)
                ),
            )
        )
        for spec in score
    )


@jit
def locate(batch, head, row, key, sizes):
    """The Position of a tile, its indices clamped into the tensors so that a modifier may load by them."""
    row = tl.minimum(row, sizes[1] - 1)
    return Position(batch, head, row, row + sizes[2] - sizes[1], tl.minimum(key, sizes[2] - 1))


@jit
def to_log2(scale, T: tl.constexpr):
    """The factor from `logits` to base-2 logits. A plain problem's scale becomes part of the exponent's multiply-add."""
    if T.prescale:
        return LOG2E
    return scale * LOG2E


@jit
def logits(raw, at, scale, score_args, T: tl.constexpr, SCORE: tl.constexpr):
    """The product q k^T turned into modified scores (left unscaled where `to_log2` scales)."""
    if T.prescale:
        score = raw * scale
        for i in tl.static_range(len(SCORE)):
            score = SCORE[i][0](score, at, score_args[i])
        return score
    return raw


@jit
def probabilities(raw, dp, lse_log2, delta, at, keep, scale, score_args, grad_args, totals,
                  MASKED: tl.constexpr, T: tl.constexpr, SCORE: tl.constexpr):  # fmt: skip
    """(p, ds, totals) of a tile: probabilities, gradient of the scaled product, sums for captured tensors.

    dp is the gradient of p; lse_log2 and delta broadcast along the keys; keep says which scores exist.
    """
    if T.prescale:
        scores = (raw * scale,)
        for i in tl.static_range(len(SCORE)):
            scores = scores + (SCORE[i][0](scores[i], at, score_args[i]),)
        p = tl.exp2(scores[len(SCORE)] * LOG2E - lse_log2)
    else:
        p = tl.exp2(raw * (scale * LOG2E) - lse_log2)
    if MASKED:
        p = tl.where(keep, p, 0.0)
    ds = p * (dp - delta)
    for r in tl.static_range(len(SCORE)):
        score = scores[len(SCORE) - 1 - r]
        if T.slots > 0:
            totals = capture(
                totals, ds, score, at, keep, score_args[len(SCORE) - 1 - r], grad_args[len(SCORE) - 1 - r],
                SCORE[len(SCORE) - 1 - r][2], T,
            )  # fmt: skip
        ds = SCORE[len(SCORE) - 1 - r][1](ds, score, scores[len(SCORE) - r], at, score_args[len(SCORE) - 1 - r])
        if MASKED:
            ds = tl.where(keep, ds, 0.0)
    return p, ds, totals


@jit
def capture(totals, grad, score, at, keep, score_args, grad_args, CAPTURED: tl.constexpr, T: tl.constexpr):
    """Add what a tile sends to one modifier's captured tensors: per-head sums to `totals`, the rest to memory.

    An entry of grad_args is (slot, pointer): the place in `totals`, and where sums or elements are to be stored.
    """
    for j in tl.static_range(len(CAPTURED)):
        if CAPTURED[j] is not None:
            share = tl.where(keep, CAPTURED[j][0](grad, score, at, score_args), 0.0)
            if CAPTURED[j][1] is None:
                totals += tl.where(tl.arange(0, T.slots) == grad_args[j][0], tl.sum(share), 0.0)
            else:
                element = tl.broadcast_to(CAPTURED[j][1](at, score_args), share.shape)
                tl.atomic_add(grad_args[j][1] + element, share, mask=keep, sem="relaxed")
    return totals


@jit
def store_totals(totals, at, grad_args, T: tl.constexpr, SCORE: tl.constexpr):
    """Write the per-head sums of this program to element `at` of their buffers."""
    for i in tl.static_range(len(SCORE)):
        for j in tl.static_range(len(SCORE[i][2])):
            if SCORE[i][2][j] is not None:
                if SCORE[i][2][j][1] is None:
                    total = tl.sum(tl.where(tl.arange(0, T.slots) == grad_args[i][j][0], totals, 0.0))
                    tl.store(grad_args[i][j][1] + at, total)
