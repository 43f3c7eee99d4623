"""Softcap: cap * tanh(score / cap), as in Gemma 2 (arXiv 2408.00118, section 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashtile.errors import InvalidProblem
from flashtile.problem.number import plain, told
from flashtile.problem.score import Curve, Position, Score
from flashtile.triton_glue.language import jit, tl


@jit
def tanh(x):
    """tanh to 8e-8, relative to the result below 0.6 (a fit to it there) and absolute above (by the exponential).

    Of float64 numbers to 2e-16, absolute.
    """
    if x.dtype == tl.float64:
        shrinks = tl.exp(-2.0 * tl.abs(x))
        above = (1.0 - shrinks) / (1.0 + shrinks)
        return tl.where(x < 0.0, -above, above)
    square = x * x
    fit = -0.3333333 + square * (0.13332924 + square * (-0.05387514 + square * (0.02111622 + square * -0.00627639)))
    size = tl.abs(x)
    decay = tl.exp2(size * -2.885390081777927)  # exp(-2 |x|)
    far = 1.0 - 2.0 * decay / (1.0 + decay)
    return tl.where(size < 0.6, x + x * square * fit, tl.where(x < 0.0, -far, far))


@jit
def tanh_approximate(x):
    """The hardware's tanh (sm75 and later), to 2^-11 of the result."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@jit
def tanh_derivative(y):
    return 1.0 - y * y


@jit
def softcap_width(args):
    return args[0]


@jit
def softcap_forward(score, at, args):
    return args[0] * tanh(score / args[0])


@jit
def softcap_backward(grad, score, out, at, args):
    ratio = out / args[0]
    return grad * (1.0 - ratio * ratio)


@jit
def softcap_second(grad, score, out, at, args):
    ratio = out / args[0]
    return grad * (-2.0 * ratio * (1.0 - ratio * ratio)) / args[0]


@dataclass(frozen=True)
class Softcap(Score):
    """Score modifier cap * tanh(score / cap); `cap` is a positive number."""

    cap: float

    name = "softcap"
    forward = softcap_forward
    backward = softcap_backward
    second = softcap_second
    curve = Curve(tanh, tanh_derivative, softcap_width, tanh_approximate, largest=lambda scalars: scalars[0])

    def __post_init__(self) -> None:
        object.__setattr__(self, "cap", plain(self.cap))
        Softcap.check((self.cap,))

    @staticmethod
    def check(scalars: tuple[float, ...]) -> None:
        """One positive number."""
        if len(scalars) != 1:
            raise InvalidProblem(f"softcap has {len(scalars)} parameters; it must have one, the cap.")
        (cap,) = scalars
        if isinstance(cap, bool) or not isinstance(cap, (int, float)) or not 0 < cap < float("inf"):
            raise InvalidProblem(f"softcap is {told(cap)}; it must be a positive finite number.")

    def scalars(self) -> tuple[float, ...]:
        return (float(self.cap),)

    @staticmethod
    def apply(score: Any, at: Position, scalars: tuple[float, ...], tensors: tuple[Any, ...]) -> Any:
        """The formula in PyTorch."""
        (cap,) = scalars
        return cap * (score / cap).tanh()

    @classmethod
    def apply_(cls, score: Any, at: Position, scalars: tuple[float, ...], tensors: tuple[Any, ...]) -> None:
        """The formula in PyTorch, in place."""
        (cap,) = scalars
        score.mul_(1.0 / cap).tanh_().mul_(cap)

    @staticmethod
    def apply_jax(score: Any, at: Position, scalars: tuple[float, ...], tensors: tuple[Any, ...]) -> Any:
        """The formula in JAX."""
        return scalars[0] * score.__array_namespace__().tanh(score / scalars[0])
