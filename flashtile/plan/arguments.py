"""Arguments that kernels of every GPU backend take, made from the problem."""

from __future__ import annotations

from typing import Any

from flashtile.plan.call import Pointer, Strides
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.dropout import threshold


def integers(p: AttentionProblem) -> dict[str, int]:
    """The plain integer arguments by name: sizes of the tensors, heads, the band's bounds (0 where there is none)."""
    return {
        "seqlen_q": p.span_q, "seqlen_k": p.span_k, "heads": p.heads_q, "group": p.group,
        "left": p.band.left or 0, "right": p.band.right or 0,
    }  # fmt: skip


def mask_args(p: AttentionProblem) -> tuple[Any, ...]:
    """Per predicate its scalars, then pointer and strides of each tensor."""
    chained: list[tuple[Any, ...]] = []
    for i, leaf in enumerate(p.leaves):
        tensors: list[Any] = []
        for j in range(len(leaf.tensors)):
            tensors += [Pointer(f"mask.{i}.{j}"), Strides(f"mask.{i}.{j}")]
        chained.append((*leaf.scalars, *tensors))
    return tuple(chained)


def moved_args(p: AttentionProblem, moved: frozenset[str]) -> tuple[Any, ...]:
    """As `score_args`, of modifiers whose captured tensors have tangents, with these in the tensors' place; else empty."""
    chained: list[tuple[Any, ...]] = []
    for i, spec in enumerate(p.score):
        tensors: list[Any] = []
        for j, captured in enumerate(spec.kind.captured):
            name = f"tscore.{i}.{j}"
            if name[1:] in moved:
                tensors += [Pointer(name), Strides(name, captured.broadcast)]
        chained.append((*spec.scalars, *tensors) if tensors else ())
    return tuple(chained) if any(chained) else ()


def score_args(p: AttentionProblem) -> tuple[Any, ...]:
    """Per modifier its scalars, then pointer and strides of each captured tensor; after the modifiers those of dropout.

    Those are the seed's pointer, p less 1/2 in units of 2^-32, and 1 / (1 - p); where the problem has an origin, whose words
    follow the seed's, a 1, by which kernels know it.
    """
    chained: list[tuple[Any, ...]] = []
    for i, spec in enumerate(p.score):
        tensors: list[Any] = []
        for j, captured in enumerate(spec.kind.captured):
            tensors += [Pointer(f"score.{i}.{j}"), Strides(f"score.{i}.{j}", captured.broadcast)]
        chained.append((*spec.scalars, *tensors))
    if p.dropout is not None:
        asked = (Pointer("seed"), threshold(p.dropout) - 2**31, 1.0 / (1.0 - p.dropout))
        chained.append(asked if p.origin is None else (*asked, 1))
    return tuple(chained)
