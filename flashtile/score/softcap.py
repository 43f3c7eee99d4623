"""Softcap: cap * tanh(score / cap), as in Gemma 2 (arXiv 2408.00118, section 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashtile._triton import jit, tl
from flashtile.errors import InvalidProblem
from flashtile.spec.score import Position, Score


@jit
def softcap_forward(score, at, args):
    cap = args[0]
    return cap * (2.0 * tl.sigmoid(2.0 / cap * score) - 1.0)  # tanh by the hardware's exponential


@jit
def softcap_backward(grad, score, out, at, args):
    ratio = out / args[0]
    return grad * (1.0 - ratio * ratio)


@dataclass(frozen=True)
class Softcap(Score):
    """Score modifier cap * tanh(score / cap); `cap` is a positive number."""

    cap: float

    name = "softcap"
    forward = softcap_forward
    backward = softcap_backward

    def __post_init__(self) -> None:
        if isinstance(self.cap, bool) or not isinstance(self.cap, (int, float)) or not 0 < self.cap < float("inf"):
            raise InvalidProblem(f"softcap is {self.cap!r}; it must be a positive finite number.")

    def scalars(self) -> tuple[float, ...]:
        return (float(self.cap),)

    def apply(self, score: Any, at: Position, tensors: tuple[Any, ...]) -> Any:
        return self.cap * (score / self.cap).tanh()
