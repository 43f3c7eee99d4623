"""What ranks exchange, with gradients. Sums over ranks are float32 and in the ranks' order, so that their bits repeat."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from flashtile.torch.context.context import Context
from flashtile.torch.context.shards import gather_into, order
from flashtile.torch.routes.derivatives import first_derivatives

WHAT = "attention over ranks"


class Gather(torch.autograd.Function):
    """The whole sequence of (batch, seqlen / ranks, ...), in its own order, and a float32 tensor of its shape that takes no
    memory and stands for it in autograd: so gradients are summed in float32, on this rank and over ranks.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.context, ctx.dtype = context, tensor.dtype
        ctx.set_materialize_grads(False)
        parts = tensor.new_empty((context.ranks, *tensor.shape))
        gather_into(parts.flatten(0, 1), tensor.contiguous(), context)
        whole = parts.transpose(0, 1).flatten(1, 2)
        at = order(whole.shape[1], context.layout, context.ranks, tensor.device)
        whole = whole if at is None else torch.empty_like(whole).index_copy_(1, at, whole)
        ctx.mark_non_differentiable(whole)
        return whole, whole.new_zeros((), dtype=torch.float32).expand(whole.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad, context = grads[1], ctx.context
        at = order(grad.shape[1], context.layout, context.ranks, grad.device)
        parts = grad if at is None else grad.index_select(1, at)
        sent = parts.unflatten(1, (context.ranks, -1)).transpose(0, 1).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received.flatten(0, 1), sent.flatten(0, 1), group=context.group)
        return *first_derivatives(WHAT, "torch", (received.sum(0).to(ctx.dtype),), grads), None


class Exchange(torch.autograd.Function):
    """A tensor whose axis `split` is dealt out to the ranks, and `join` put together of theirs. Its gradient goes back so.

    wire: the dtype in which it travels there; gradients travel in its own.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, context: Context, split: int, join: int, wire: torch.dtype | None = None
    ) -> torch.Tensor:
        ctx.how = context, join, split
        return exchanged(tensor.to(wire or tensor.dtype), context, split, join).to(tensor.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return *first_derivatives(WHAT, "torch", (exchanged(grads[0], *ctx.how),), grads), None, None, None, None


def exchanged(tensor: torch.Tensor, context: Context, split: int, join: int) -> torch.Tensor:
    """The same without a gradient."""
    sent = torch.stack(tensor.chunk(context.ranks, split))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received.flatten(0, 1), sent.flatten(0, 1), group=context.group)
    return torch.cat(list(received), join)


def ordered(tensor: torch.Tensor, context: Context, dim: int) -> torch.Tensor:
    """What ranks' shards make when joined, in the sequence's own order."""
    at = order(tensor.shape[dim], context.layout, context.ranks, tensor.device)
    return tensor if at is None else tensor.index_select(dim, at.argsort())


def dealt(tensor: torch.Tensor, context: Context, dim: int) -> torch.Tensor:
    """The way back."""
    at = order(tensor.shape[dim], context.layout, context.ranks, tensor.device)
    return tensor if at is None else tensor.index_select(dim, at)


class Passing:
    """A tensor on its way to the next rank, and that of the rank before on its way here."""

    def __init__(self, tensor: torch.Tensor, context: Context):
        group, ranks, rank = context.group, context.ranks, context.rank
        after, before = (dist.get_global_rank(group, (rank + by) % ranks) for by in (1, -1))
        self.sent, self.received = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
        self.works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, self.sent, after, group), dist.P2POp(dist.irecv, self.received, before, group),
        ])  # fmt: skip

    def arrived(self) -> torch.Tensor:
        """The other's, when it is here."""
        for work in self.works:
            work.wait()
        return self.received
