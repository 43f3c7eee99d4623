"""Local calls of `attention` whose gradients of keys and values, and whose partial results, are good enough to be summed."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.torch.context.collectives import WHAT
from flashtile.torch.routes.derivatives import first_derivatives
from flashtile.torch.routes.local import attention


def widens(q: torch.Tensor) -> bool:
    """Whether what is summed over calls is computed in float32.

    On the CPU, whose 16-bit backward computes in float32 anyway. A GPU's kernels round each part to 16 bits once.
    """
    return q.device.type == "cpu"


def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_lse: bool, **arguments: Any) -> Any:
    """`attention`, with k and v that are float32 whatever q is, and so their gradients; they hold values of q's dtype."""
    if k.dtype is q.dtype:
        return attention(q, k, v, return_lse=return_lse, **arguments)
    if not (widens(q) and torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)):
        return attention(q, k.to(q.dtype), v.to(q.dtype), return_lse=return_lse, **arguments)
    made = attention(q, k.detach().to(q.dtype), v.detach().to(q.dtype), return_lse=return_lse, **arguments)
    out, lse = made if return_lse else (made, None)
    out, lse = _WideKeys.apply(out, lse, q, k, v, arguments)
    return (out, lse) if return_lse else out


class _WideKeys(torch.autograd.Function):
    """out and lse as they are; dk and dv of a float32 call with the same arguments."""

    @staticmethod
    def forward(ctx: Any, out: Any, lse: Any, q: Any, k: Any, v: Any, arguments: dict[str, Any]) -> Any:
        ctx.save_for_backward(q, k, v)
        ctx.arguments = arguments
        ctx.set_materialize_grads(False)
        return out.view_as(out), None if lse is None else lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dout, dlse = grads
        q, *keys = ctx.saved_tensors
        leaves = [t.detach().requires_grad_(need) for t, need in zip(keys, ctx.needs_input_grad[3:5], strict=True)]
        with torch.enable_grad():
            out, lse = attention(q.float(), *leaves, return_lse=True, **ctx.arguments)
        made = [(t, g.to(t.dtype)) for t, g in ((out, dout), (lse, dlse)) if g is not None]
        asked = [t for t in leaves if t.requires_grad]
        found = iter(torch.autograd.grad([t for t, _ in made], asked, [g for _, g in made]) if made else [None] * len(asked))
        keys = tuple(next(found) if t.requires_grad else None for t in leaves)
        return dout, dlse, None, *first_derivatives(WHAT, "torch", keys, ctx.saved_tensors, grads), None
