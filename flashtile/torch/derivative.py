"""A gradient that says so when it is to be differentiated again."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.errors import NotSupported
from flashtile.plan.call import Problem


def first_derivatives(
    what: str | Problem, backend: str, given: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of `what`. Whoever differentiates them (create_graph) hears that it is not possible, and gets no zero."""
    if not torch.is_grad_enabled():
        return given
    made = [g for g in given if g is not None]
    refusing = iter(_FirstDerivative.apply(what, backend, *(g.requires_grad_() for g in made)) if made else ())
    return tuple(None if g is None else next(refusing) for g in given)


class _FirstDerivative(torch.autograd.Function):
    """The identity, with a refusal for a gradient."""

    @staticmethod
    def forward(ctx: Any, what: str | Problem, backend: str, *grads: torch.Tensor) -> Any:
        ctx.what, ctx.backend = what, backend
        return tuple(g.view_as(g) for g in grads)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        reason = "gradients of gradients are not implemented"
        what = ctx.what if isinstance(ctx.what, str) else ctx.what.spell()
        raise NotSupported(f"the second derivative of {what}", {ctx.backend: [reason]})
