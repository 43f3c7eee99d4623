"""The protocol of score modifiers: one object per feature, forward and backward together.

A modifier changes the scaled score s[i, j] before the mask and the softmax. It is a class with

* `forward(score, at, args)`: a `@jit` function that returns the modified tile;
* `backward(grad, score, out, at, args)`: a `@jit` function that returns the gradient with respect to `score`,
  given the gradient with respect to `out = forward(score)`;
* `apply(score, at, scalars, tensors)`: the same formula in differentiable PyTorch (CPU backend, reference), a static method;
* `captured`: for each captured tensor a `Captured`, which says how its gradient is formed.

Kernels of second derivatives (`create_graph=True`) ask a modifier without `add` for

* `second(grad, score, out, at, args)`: a `@jit` function that returns grad times the second derivative with respect to `score`.

and those of tangents one with `add` whose captured tensors have tangents, to say that what it adds is `linear` in them.

A kernel's scores are float32, or float64 in small fp32 problems (`score.dtype`). `at` is a `Position`; `args` is
`(*scalars, tensor 0, its strides, tensor 1, its strides, ...)`, where the stride of an axis of size 1 is 0.

A modifier that says more of itself costs 16-bit kernels less, because its factors join the exponent's multiply-add: one that
adds something independent of the score has `add(score, at, args, unit)`, a `@jit` function that returns score + unit * what
it adds; one that bends the score by a rising curve has `curve`, a `Curve`. Problems whose modifiers are such, a curve at the
end if at all, are computed by these; all others, and fp32, by `forward` and `backward`. One with `add` may also say
`by_distance`: what it adds depends on batch, head and differences of positions alone, so that a vector per head holds all of
it; on the CPU such problems cost hardly more than plain ones. What is loaded for every score is best
added by `tl.fma`: of a plain sum Triton makes the product's accumulator, which has to be there before the product begins.
One with `add`, one captured tensor and no scalars may also say `load(at, args)`, which returns what the tensor holds for a
tile, as it is, and `join(score, loaded, unit)`, which adds it: Hopper's forward then loads a tile ahead, and its backward has
the bulk copy engine bring what `load` would return.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from flashtile.errors import InvalidProblem
from flashtile.problem.dtype import SIZES_BYTES, DType
from flashtile.problem.registry import Registry


class Position(NamedTuple):
    """Where a tile of scores lies. `row`, `q`, `k` broadcast against the tile, in either orientation."""

    batch: Any
    head: Any
    row: Any  # index of the query, 0 .. seqlen_q - 1
    q: Any  # its aligned position: row + seqlen_k - seqlen_q
    k: Any  # index of the key
    ahead: Any = None  # k - q in float32; kernels only


@dataclass(frozen=True)
class Curve:
    """A modifier that makes width * function(score / width) of a score, function rising everywhere. All are `@jit` functions.

    `width(args)`: a positive scalar. `derivative(y)`: function's derivative where its value is y. `approximate`: as
    `function`, on NVIDIA's GPUs, to 2^-11, which rounding scores to 16 bits costs too: used where the caller does not see lse.
    `largest(scalars)`: in Python, of a function from -1 to 1 its width; scores between known bounds need no maximum.
    """

    function: Callable[..., Any]
    derivative: Callable[..., Any]
    width: Callable[..., Any]
    approximate: Callable[..., Any] | None = None
    largest: Callable[[tuple[float, ...]], float] | None = None


@dataclass(frozen=True)
class Captured:
    """How the gradient of one captured tensor is formed.

    `contribution(grad, score, at, args)`: `@jit` function, the gradient that each score sends to the tensor.
    `index(at, args)`: `@jit` function, the flat element (of the contiguous tensor) that receives it, added atomically.
    Without `index` the tensor must be (batch, heads_q): contributions are summed per head in a fixed order. With `broadcast`
    it has four axes that broadcast to (batch, heads_q, seqlen_q, seqlen_k): its element at a score's position
    receives what the score sends, summed in a fixed order. Kernels get None for its stride along an axis of size 1.
    `identity`: `contribution` returns `grad`, as where the tensor is added.
    `exact`: without a gradient the tensor may also hold float64, integers or booleans, and is read as it is.
    """

    contribution: Callable[..., Any]
    index: Callable[..., Any] | None = None
    broadcast: bool = False
    identity: bool = False
    exact: bool = False

    def __post_init__(self) -> None:
        if self.broadcast and self.index is not None:
            raise TypeError("a captured tensor has an index or is broadcast, not both.")


def is_tensor(value: Any) -> bool:
    """Whether it is PyTorch's, or JAX's (also one that is traced); NumPy's lie where no kernel reads them."""
    return hasattr(value, "shape") and (hasattr(value, "stride") or hasattr(value, "aval"))


SCORES: Registry[Score] = Registry("score modifier", "features.scores")


class Score:
    """Base of all score modifiers; a subclass with a `name` registers itself for `parse`."""

    name: ClassVar[str] = ""
    captured: ClassVar[tuple[Captured, ...]] = ()
    forward: ClassVar[Callable[..., Any]]
    backward: ClassVar[Callable[..., Any]]
    add: ClassVar[Callable[..., Any] | None] = None
    load: ClassVar[Callable[..., Any] | None] = None
    join: ClassVar[Callable[..., Any] | None] = None
    linear: ClassVar[bool] = False
    second: ClassVar[Callable[..., Any] | None] = None
    curve: ClassVar[Curve | None] = None
    by_distance: ClassVar[bool] = False
    why: ClassVar[str] = ""  # behind the refusal of one without `forward` and `backward`: the reason

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        SCORES.add(cls)

    @staticmethod
    def check(scalars: tuple[float, ...]) -> None:
        """Raise InvalidProblem for scalars without meaning. Asked of every modifier, also of one that was spelled."""

    def scalars(self) -> tuple[float, ...]:
        """Runtime scalars; changing one never recompiles."""
        return ()

    def tensors(self, batch: int, heads_q: int) -> tuple[Any, ...]:
        """Captured tensors as the kernel indexes them (expanded views are fine, autograd reduces them)."""
        return ()

    @staticmethod
    def apply(score: Any, at: Position, scalars: tuple[float, ...], tensors: tuple[Any, ...]) -> Any:
        """The modified scores, in the shape of `score`, by differentiable PyTorch; out of place.

        `score` is a tile: some batch entries, query heads, queries and keys. `at` holds their indices as tensors that
        broadcast against it; whole captured tensors arrive and are indexed by `at`, as in `tensors[0][at.batch, at.head]`.
        """
        raise NotImplementedError("a score modifier must define `apply` to run on the CPU or in the reference.")

    @classmethod
    def apply_(cls, score: Any, at: Position, scalars: tuple[float, ...], tensors: tuple[Any, ...]) -> None:
        """`apply` written over `score`, where no gradient is asked for. To be defined where that costs less memory and time.

        The indices that `at` holds are consecutive.
        """
        score.copy_(cls.apply(score, at, scalars, tensors))

    @staticmethod
    def apply_jax(score: Any, at: Position, scalars: tuple[float, ...], tensors: tuple[Any, ...]) -> Any:
        """The same by differentiable JAX. Score and tensors are float32, or all float64.

        A tensor that is `broadcast` arrives as what applies to the tile.
        """
        raise NotImplementedError("a score modifier must define `apply_jax` to run in plain JAX.")


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether each size is 1 or that beside it. By ==: torch.compile answers `in` without what its symbols stand for."""
    return len(shape) == len(to) and all(n == 1 or n == size for n, size in zip(shape, to, strict=True))


def expanded(tensor: Any, *shape: int) -> Any:
    """A PyTorch tensor or a JAX array, broadcast to a shape."""
    return tensor.expand(*shape) if hasattr(tensor, "expand") else tensor.__array_namespace__().broadcast_to(tensor, shape)


def not_empty(ids: Any) -> Any:
    """A tensor or array of a number for each token; of no tokens, a zero for each item, for kernels read one."""
    return ids if ids.shape[-1] else ids.sum(-1, keepdims=True)


@dataclass(frozen=True)
class TensorSpec:
    """A captured tensor, as data."""

    shape: tuple[int, ...]
    dtype: str
    grad: bool = False

    def __post_init__(self) -> None:
        if any(n < 0 for n in self.shape):
            raise InvalidProblem(f"a captured tensor has shape {self.shape}; its sizes must not be negative.")
        if self.grad or self.dtype not in SIZES_BYTES:
            self.check_real()

    def check_real(self) -> None:
        """Raise InvalidProblem unless it holds what q, k and v may hold."""
        if self.dtype not in (known := [d.value for d in DType]):
            raise InvalidProblem(f"a captured tensor's dtype is {self.dtype!r}; it must be one of {', '.join(known)}.")

    def spell(self) -> str:
        return "x".join(map(str, self.shape)) + ":" + self.dtype + (":grad" if self.grad else "")

    @staticmethod
    def parse(text: str) -> TensorSpec:
        shape, dtype, *grad = text.split(":")
        if grad not in ([], ["grad"]):
            raise InvalidProblem(f"a captured tensor is spelled {text!r}; it must be 'shape:dtype' or 'shape:dtype:grad'.")
        return TensorSpec(tuple(int(n) for n in shape.split("x")) if shape else (), dtype, bool(grad))


@dataclass(frozen=True)
class ScoreSpec:
    """A modifier without its tensors: what a problem and a plan hold."""

    kind: type[Score]
    scalars: tuple[float, ...] = ()
    tensors: tuple[TensorSpec, ...] = ()

    def __post_init__(self) -> None:
        for number in self.scalars:
            if not math.isfinite(number):
                raise InvalidProblem(f"{self.kind.__name__} has the parameter {number}; it must be finite.")
        if self.scalars and self.kind.scalars is Score.scalars:
            raise InvalidProblem(f"{self.kind.__name__} has the parameters {self.scalars}; its class declares none.")
        self.kind.check(self.scalars)
        if len(self.tensors) != len(self.kind.captured):
            raise InvalidProblem(
                f"{self.kind.__name__} captures {len(self.tensors)} tensors; its class declares {len(self.kind.captured)}."
            )
        for captured, tensor in zip(self.kind.captured, self.tensors, strict=True):
            if not captured.exact:
                tensor.check_real()

    @property
    def wants_grad(self) -> bool:
        return any(t.grad for t in self.tensors)

    def spell(self) -> str:
        parts = [repr(float(n)) for n in self.scalars] + [t.spell() for t in self.tensors]
        return f"{self.kind.name}({';'.join(parts)})"

    @staticmethod
    def parse(text: str) -> ScoreSpec:
        kind, numbers, tensors = SCORES.read(text)
        return ScoreSpec(kind, tuple(float(n) for n in numbers), tuple(TensorSpec.parse(t) for t in tensors))
