"""Causal order counted from the first key: what libraries mean that align positions top-left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashtile._triton import jit, tl  # noqa: F401  Triton's interpreter wants tl beside every jit function
from flashtile.spec.predicate import Predicate
from flashtile.spec.score import Position


@jit
def top_left_visible(at, args):
    return at.k <= at.row


@dataclass(frozen=True)
class TopLeft(Predicate):
    """Query i sees the keys up to i, whatever the lengths: `Band(right=0)` counted from the first key, not from the last.

    For items of different lengths; where seqlen_q and seqlen_k are known, `Band(right=seqlen_q - seqlen_k)` is the same.
    """

    name = "top_left"
    visible = top_left_visible

    @staticmethod
    def apply(at: Position, scalars: tuple[int, ...], tensors: tuple[Any, ...]) -> Any:
        return at.k <= at.row
