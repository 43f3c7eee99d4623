"""Padding with holes: the tokens that count are moved together before a call, and what was made of them back after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashtile.errors import InvalidProblem, NotSupported
from flashtile.problem.mask import Joined
from flashtile.problem.score import Score
from flashtile.torch.execute.plain import is_distributed


@dataclass(frozen=True)
class Order:
    """Where tokens stand once those that count come first; both int64 (batch, seqlen)."""

    token: torch.Tensor  # which token each place has
    place: torch.Tensor  # which place each token has

    @staticmethod
    def of(keep: torch.Tensor) -> Order:
        token = keep.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
        return Order(token, token.argsort(dim=1))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x (batch, seqlen, ...) with the tokens that count first."""
        return _move(x, self.token, self.place)  # pyright: ignore[reportReturnType]

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `gather`."""
        return _move(x, self.place, self.token)  # pyright: ignore[reportReturnType]


def _move(x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> Any:
    """x's tokens by a permutation. A compiler traces no Function with tangents; there is none to be had in its graphs."""
    return (_Move if torch.compiler.is_compiling() else _Dual).apply(x, index, inverse)


class _Move(torch.autograd.Function):
    """x.gather along axis 1 by a permutation: its gradient is gathered too, where autograd's own would add in any order."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        return x.gather(1, index.reshape(*index.shape, *(1,) * (x.dim() - 2)).expand(x.shape))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        index, inverse = ctx.saved_tensors
        return _move(grads[0], inverse, index), None, None


class _Dual(_Move):
    """The same with tangents."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> Any:
        return _move(tangents[0], *ctx.saved_tensors)


@dataclass(frozen=True)
class Holes:
    """What `attention` does about masks among seqused_q and seqused_k: `close` before the call, `open` after it."""

    keep_q: torch.Tensor | None
    keep_k: torch.Tensor | None
    queries: Order | None  # of keep_q

    def close(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v with the tokens that count first."""
        if self.queries is not None:
            q = self.queries.gather(q)
        if self.keep_k is not None:
            keys = Order.of(self.keep_k)
            k, v = keys.gather(k), keys.gather(v)
        return q, k, v

    def open(self, out: torch.Tensor, lse: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """out and lse with every query at its own place."""
        if self.queries is None:
            return out, lse
        return self.queries.scatter(out), None if lse is None else self.queries.scatter(lse.transpose(1, 2)).transpose(1, 2)

    def notes(self) -> tuple[str, ...]:
        """What `explain` says of it."""
        told = (("q is", self.keep_q), ("k and v are", self.keep_k))
        return tuple(f"{what} copied first: the tokens that count are moved together" for what, k in told if k is not None)


def is_mask(seqused: Any) -> bool:
    return isinstance(seqused, torch.Tensor) and seqused.dtype is torch.bool


def holes(tensors: Sequence[Any], seqused_q: Any, seqused_k: Any, mask: Any, score: Any) -> Holes | None:
    """The holes of a call of q, k, v. None where nothing is a mask, or where q, k, v are wrong and validation will say so.

    Raises InvalidProblem for a mask of another shape or device, and for what has elements by token, which would not move;
    NotSupported for DTensors.
    """
    given = {"q": seqused_q, "k": seqused_k}
    if not any(map(is_mask, given.values())) or not all(isinstance(t, torch.Tensor) and t.dim() == 4 for t in tensors):
        return None
    if is_distributed(*tensors, *given.values()):
        reason = "seqused is a mask with holes, whose tokens would move; keys are to be hidden by the mask KeyPadding(keep)"
        raise NotSupported("attention of DTensors", {"torch": [reason]})
    for (side, keep), tensor in zip(given.items(), tensors, strict=False):
        if not is_mask(keep):
            continue
        name, size = f"seqused_{side}", tuple(tensor.shape[:2])
        if tuple(keep.shape) != size:
            raise InvalidProblem(f"{name} is a mask of shape {tuple(keep.shape)}; it must be (batch, seqlen_{side}) = {size}.")
        if keep.device != tensor.device:
            raise InvalidProblem(f"{name} is on {keep.device} and {side} is on {tensor.device}; they must be on one device.")
        rest = "goes by the tokens' own places; keys are to be hidden there, by the mask KeyPadding(keep)."
        if isinstance(mask, Joined):
            raise InvalidProblem(f"{name} is a mask with holes, and mask {rest}")
        for modifier in score if isinstance(score, (tuple, list)) else (score,):
            if isinstance(modifier, Score) and _by_token(modifier, tensors[0]):
                raise InvalidProblem(f"{name} is a mask with holes, and {modifier.name} {rest}")
    keep_q, keep_k = (keep if is_mask(keep) else None for keep in given.values())
    return Holes(keep_q, keep_k, None if keep_q is None else Order.of(keep_q))


def counts(seqused: Any) -> Any:
    """How many tokens of each item a mask keeps, int32 (batch,); anything else as it is."""
    return seqused.sum(1, dtype=torch.int32) if is_mask(seqused) else seqused


def _by_token(modifier: Score, q: torch.Tensor) -> bool:
    """Whether a modifier captures a tensor with an element for every query or key."""
    tensors = modifier.tensors(q.shape[0], q.shape[2])
    return any(c.broadcast and tuple(t.shape[2:]) != (1, 1) for c, t in zip(modifier.captured, tensors, strict=True))
