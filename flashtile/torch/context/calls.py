"""Local calls of `attention` whose gradients of keys and values are float32, to be summed over calls and ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flashtile.torch.context.collectives import WHAT, wider
from flashtile.torch.execute.plain import is_traced
from flashtile.torch.routes.derivatives import first_derivatives
from flashtile.torch.routes.local import attention, prepared


@dataclass(frozen=True)
class Keys:
    """Keys and values (batch, seqlen, heads, d) without a gradient, and float32 tensors of their shapes that stand for them in
    autograd: their gradients are those of k and v, and nobody reads what they hold.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_sums: torch.Tensor
    v_sums: torch.Tensor

    def each(self, part: Callable[[torch.Tensor], torch.Tensor]) -> Keys:
        return Keys(part(self.k), part(self.v), part(self.k_sums), part(self.v_sums))


def widens(q: torch.Tensor) -> bool:
    """Whether parts of 16-bit calls are computed in float32: on the CPU, whose backward does that anyway, and whose forward
    rounds probabilities of some shapes to 16 bits, so of a part where it does not of the whole.
    """
    return q.device.type == "cpu" and q.dtype.itemsize == 2


def call(q: torch.Tensor, keys: Keys, return_lse: bool, **arguments: Any) -> Any:
    """`attention` of these keys."""
    if widens(q):
        keys = Keys(keys.k.float(), keys.v.float(), keys.k_sums, keys.v_sums)
        made = call(q.float(), keys, return_lse, **arguments)
        return (made[0].to(q.dtype), made[1]) if return_lse else made.to(q.dtype)
    if not (torch.is_grad_enabled() and (keys.k_sums.requires_grad or keys.v_sums.requires_grad)):
        return attention(q, keys.k, keys.v, return_lse=return_lse, **arguments)
    if is_traced(q, keys.k, keys.v):  # by an operator, whose dk and dv have the dtype of k and v
        k, v = _StoodFor.apply(keys.k, keys.v, keys.k_sums, keys.v_sums)  # pyright: ignore[reportGeneralTypeIssues]
        return attention(q, k, v, return_lse=return_lse, **arguments)
    made, others = prepared(q, keys.k, keys.v, return_lse=return_lse, **arguments)
    made.require_backward()
    return _WideKeys.apply(made, q, keys.k, keys.v, keys.k_sums, keys.v_sums, *others)


class _StoodFor(torch.autograd.Function):
    """k and v, whose gradients are those of what stands for them."""

    @staticmethod
    def forward(ctx: Any, k: torch.Tensor, v: torch.Tensor, *sums: torch.Tensor) -> Any:
        return k.view_as(k), v.view_as(v)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, *(g.to(wider(g.dtype)) for g in grads)


class _WideKeys(torch.autograd.Function):
    """A prepared call, differentiable once."""

    @staticmethod
    def forward(ctx: Any, call: Any, q: Any, k: Any, v: Any, k_sums: Any, v_sums: Any, *others: torch.Tensor) -> Any:
        kept = call.forward((q, k, v), others)
        ctx.save_for_backward(k_sums, v_sums, q, k, v, *others, *kept)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return (kept[0], kept[1]) if call.problem.returns_lse else kept[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        saved, (q, _, _, *sums_and_others) = ctx.saved_tensors, ctx.needs_input_grad[1:]
        dout, dlse = (*grads, None)[:2]
        with torch.no_grad():
            dq, *made = ctx.call.gradients(saved[2:], dout, dlse, (q, *sums_and_others), wide_keys=True)
        found = dq, None, None, *made
        return None, *first_derivatives(WHAT, "torch", found, saved, grads)
