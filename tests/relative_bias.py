"""A score modifier that the library does not know: one object in this file, and nothing else changed.

Relative position bias as in T5 (arXiv 1910.10683, section 2.1): a learnable table (heads, buckets), added to the score by
the bucket of key position - query position. Near distances have buckets of their own, far ones share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashtile import Captured, Position, Score
from flashtile.triton_glue.language import jit, tl

BUCKETS = 16  # 8 for keys at or before the query, 8 for keys after it; each 0, 1, 2, 3, 4-7, 8-15, 16-31, 32 and more


@jit
def bucket_of(at):
    distance = tl.abs(at.k - at.q)
    near = tl.minimum(distance, 4)
    far = (distance >= 8).to(tl.int32) + (distance >= 16).to(tl.int32) + (distance >= 32).to(tl.int32)
    return near + far + tl.where(at.k > at.q, 8, 0)


@jit
def t5_forward(score, at, args):
    strides = args[1]
    return score + tl.load(args[0] + at.head * strides[0] + bucket_of(at) * strides[1]).to(tl.float32)


@jit
def t5_backward(grad, score, out, at, args):
    return grad


@jit
def t5_contribution(grad, score, at, args):
    return grad


@jit
def t5_element(at, args):
    return at.head * 16 + bucket_of(at)


@dataclass(frozen=True, eq=False)
class RelativeBias(Score):
    """Score modifier score + table[head, bucket(key - query)]."""

    table: torch.Tensor

    name = "t5_bias"
    forward = t5_forward
    backward = t5_backward
    captured = (Captured(t5_contribution, index=t5_element),)

    def tensors(self, batch: int, heads_q: int) -> tuple[torch.Tensor, ...]:
        return (self.table,)

    @staticmethod
    def apply(score: Any, at: Position, scalars: tuple[float, ...], tensors: tuple[Any, ...]) -> Any:
        distance = (at.k - at.q).abs()
        far = sum((distance >= edge).long() for edge in (8, 16, 32))
        bucket = distance.clamp(max=4) + far + 8 * (at.k > at.q)
        return score + tensors[0].to(score.dtype)[at.head, bucket]
