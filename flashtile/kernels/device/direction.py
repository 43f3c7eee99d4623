"""Scores along a direction: their tangents through a chain of modifiers, and the gradients of both.

ALONG = for each modifier a pair: its `add` where its captured tensor has a tangent, else None; its `second`, or None where
that is zero. A modifier is elementwise, so that its `backward` of a tangent is the tangent of what it makes.
"""

from __future__ import annotations

from flashtile.kernels.device.exponential import LOG2E, exp
from flashtile.kernels.device.score import stages
from flashtile.problem.attention import AttentionProblem
from flashtile.triton_glue.language import JitTuple, constexpr, jit, tl

FIELDS = constexpr(8)  # numbers of a row that a second derivative wants, a power of two; `portable.tangent` says which
# What the keys of a row but its first may add up to, in units of that, to count as nothing; at float32's grade what rounding
# takes off.
LONE = constexpr(2.0**-22)


def along(p: AttentionProblem, moved: frozenset[str]) -> JitTuple:
    """ALONG of a problem."""
    pairs = [(spec.kind.add if moves_captured(i, moved) else None, spec.kind.second) for i, spec in enumerate(p.score)]
    return JitTuple(function for pair in pairs for function in pair)


def moves_captured(modifier: int, moved: frozenset[str]) -> bool:
    """Whether some tensor of this modifier has a tangent."""
    return any(name.startswith(f"score.{modifier}.") for name in moved)


def tangent_refusals(p: AttentionProblem, moved: frozenset[str]) -> list[str]:
    """Reasons against tangents of captured tensors."""
    return [
        f"{spec.kind.name}'s tensor has a tangent, and the modifier does not say that what it adds is `linear` in one tensor"
        for i, spec in enumerate(p.score)
        if moves_captured(i, moved) and not (spec.kind.linear and len(spec.tensors) == 1)
    ]


def second_refusals(p: AttentionProblem) -> list[str]:
    """Reasons against second derivatives of modifiers."""
    reasons = [
        f"score modifier {spec.kind.name} has no `second`, its second derivative for kernels"
        for spec in p.score
        if spec.kind.add is None and spec.kind.second is None
    ]
    for spec in p.score:
        if spec.wants_grad:
            reasons.append(f"second derivatives by {spec.kind.name}'s tensor are not implemented")
    return reasons


@jit
def slopes_of(traw, scores, at, scale, score_args, moved_args, SCORE: tl.constexpr, ALONG: tl.constexpr):
    """The tangents of `stages`, given that of the product q k^T."""
    slopes = (traw * scale,)
    for i in tl.static_range(len(SCORE) // 2):
        slope = SCORE[2 * i + 1](slopes[i], scores[i], scores[i + 1], at, score_args[i])
        if ALONG[2 * i] is not None:
            slope = ALONG[2 * i](slope, at, moved_args[i], 1.0)
        slopes = slopes + (slope,)  # noqa: RUF005 (Triton knows no unpacking)
    return slopes


@jit
def row_probability(score, row, scale, T: tl.constexpr):
    """Probabilities of modified scores, or unless T.modifiers.prescale of products; row = (level, norm, ...): a row's maximum
    and 1 / sum, or unless T.modifiers.prescale its lse in units of the base-2 exponential.
    """
    if T.modifiers.prescale:
        return exp(score - row[0], T) * row[1]
    else:
        return tl.exp2(score * (scale * LOG2E) - row[0])


@jit
def directed_probabilities(raw, traw, row, at, keep, scale, args, MASKED: tl.constexpr, T: tl.constexpr, SCORE: tl.constexpr,
                           ALONG: tl.constexpr):  # fmt: skip
    """(p, T - mu, and of all `stages` the scores and their tangents) of a tile; p's tangent is p (T - mu).

    raw, traw: the product q k^T and its tangent. row = (level, norm, mu, ...), as `row_probability` has it, but unless
    T.modifiers.prescale the norm is `scale`; args = (score_args, moved_args). Where T.may_be_lone a row that has one key alone,
    of which T is mu, has 1 as its norm, or without T.modifiers.prescale 0 as its norm and mu: what rounding makes of the
    difference counts as 0.
    """
    if T.modifiers.prescale:
        scores = stages(raw, at, scale, args[0], SCORE)
        slopes = slopes_of(traw, scores, at, scale, args[0], args[1], SCORE, ALONG)
        p = row_probability(scores[len(SCORE) // 2], row, scale, T)
        bend = slopes[len(SCORE) // 2] - row[2]
        if T.may_be_lone:
            bend = tl.where(row[1] == 1.0, 0.0, bend)
    else:
        scores, slopes = (raw,), (traw,)
        p = row_probability(raw, row, scale, T)
        bend = traw * (row[1] if T.may_be_lone else scale) - row[2]
    if MASKED:
        p, bend = tl.where(keep, p, 0.0), tl.where(keep, bend, 0.0)
    return p, bend, scores, slopes


@jit
def directed_gradients(directed, dp, tdp, row, at, keep, args, MASKED: tl.constexpr, T: tl.constexpr, SCORE: tl.constexpr,
                       ALONG: tl.constexpr):  # fmt: skip
    """(the gradient of the scaled product, its tangent) of a tile; `directed` is what `directed_probabilities` gave.

    dp, tdp: the gradient of p and its tangent, dropout applied; row = (..., delta, its tangent).
    """
    p, bend, scores, slopes = directed
    e = dp - row[3]
    ds, ds2 = p * e, p * (bend * e + (tdp - row[4]))
    if T.modifiers.prescale:
        for r in tl.static_range(1, len(SCORE) // 2 + 1):  # r modifiers before the end
            score, made = scores[len(SCORE) // 2 - r], scores[len(SCORE) // 2 - r + 1]
            own = args[0][len(SCORE) // 2 - r]
            ds2 = SCORE[len(SCORE) - 2 * r + 1](ds2, score, made, at, own)
            if ALONG[len(SCORE) - 2 * r + 1] is not None:
                ds2 += ALONG[len(SCORE) - 2 * r + 1](ds * slopes[len(SCORE) // 2 - r], score, made, at, own)
            ds = SCORE[len(SCORE) - 2 * r + 1](ds, score, made, at, own)
    if MASKED:  # dp, or a modifier's derivative, may be NaN where nothing is to be seen
        ds, ds2 = tl.where(keep, ds, 0.0), tl.where(keep, ds2, 0.0)
    return ds, ds2
