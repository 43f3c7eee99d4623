"""What ranks exchange, with gradients. Sums over ranks are float32 and in the ranks' order, so that their bits repeat."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from flashtile.torch.context.context import Context
from flashtile.torch.context.layout import Fetched, runs
from flashtile.torch.context.shards import gather_into, order
from flashtile.torch.routes.derivatives import first_derivatives

WHAT = "attention over ranks"


def wider(dtype: torch.dtype) -> torch.dtype:
    """In which dtype parts are summed: float32, of float64 its own."""
    return torch.promote_types(dtype, torch.float32)


class Gathering:
    """All ranks' tensors on their way here. Both buffers live until they are: the transport works beside the current stream."""

    def __init__(self, tensor: torch.Tensor, context: Context):
        self.sent = tensor.detach().contiguous()
        self.parts = self.sent.new_empty((context.ranks, *tensor.shape))
        self.work = gather_into(self.parts.flatten(0, 1), self.sent, context, begin=True)

    def arrived(self) -> torch.Tensor:
        """(ranks, ...): what the current stream does from here on waits for it."""
        self.work.wait()
        return self.parts


@dataclass
class Returning:
    """Gradients of groups of heads on their way to the ranks that hold the keys: what of each is sent, received and awaited."""

    by_group: dict[int, tuple[torch.Tensor, torch.Tensor, Any]] = field(default_factory=dict)

    def begin(self, group: int, sent: torch.Tensor, context: Context) -> None:
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received.flatten(0, 1), sent.flatten(0, 1), group=context.group, async_op=True)
        self.by_group[group] = sent, received, work

    def arrived(self, group: int) -> torch.Tensor:
        """The sum of all ranks' parts, in their order."""
        _, received, work = self.by_group.pop(group)
        work.wait()
        return received.sum(0)


class Grouped(torch.autograd.Function):
    """Groups of heads of (batch, seqlen, heads, d), each by itself. Their gradients are what is `returning` by then: `Gather`
    sends one as soon as it is there, while those of the groups before are computed.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, groups: int, returning: Returning) -> Any:
        ctx.returning, ctx.dtype = returning, tensor.dtype
        ctx.set_materialize_grads(False)
        return tuple(part.contiguous() for part in tensor.chunk(groups, 2))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        sums = torch.cat([ctx.returning.arrived(group) for group in range(len(grads))], 2)
        return *first_derivatives(WHAT, "torch", (sums.to(ctx.dtype),), grads), None, None


class Gather(torch.autograd.Function):
    """The whole sequence of (batch, seqlen / ranks, ...), in its own order, and a float32 tensor of its shape that takes no
    memory and stands for it in autograd: so gradients are summed in float32, on this rank and over ranks.

    coming: what is under way already. returning: whom the group's gradient is left to; what autograd gets is then a zero that
    stands for it.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, context: Context, coming: Gathering | None = None, returning: Returning | None = None,
        group: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        ctx.context, ctx.dtype, ctx.shape, ctx.returning, ctx.group = context, tensor.dtype, tensor.shape, returning, group
        ctx.set_materialize_grads(False)
        parts = (Gathering(tensor, context) if coming is None else coming).arrived()
        whole = parts.transpose(0, 1).flatten(1, 2)
        at = order(whole.shape[1], context.layout, context.ranks, tensor.device)
        whole = whole if at is None else torch.empty_like(whole).index_copy_(1, at, whole)
        ctx.mark_non_differentiable(whole)
        return whole, whole.new_zeros((), dtype=wider(whole.dtype)).expand(whole.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad, context = grads[1], ctx.context
        at = order(grad.shape[1], context.layout, context.ranks, grad.device)
        parts = grad if at is None else grad.index_select(1, at)
        sent = parts.unflatten(1, (context.ranks, -1)).transpose(0, 1).contiguous()
        returning = Returning() if ctx.returning is None else ctx.returning
        returning.begin(ctx.group, sent, context)
        if ctx.returning is None:
            found = returning.arrived(ctx.group).to(ctx.dtype)
        else:
            found = sent.new_zeros((), dtype=ctx.dtype).expand(ctx.shape)
        return *first_derivatives(WHAT, "torch", (found,), grads), None, None, None, None


class Fetch(torch.autograd.Function):
    """The same of those keys that this rank fetches, which lie side by side. wanted: what each rank fetches."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, context: Context, wanted: tuple[Fetched, ...]) -> Any:
        ctx.dtype, ctx.shape, ctx.context = tensor.dtype, tensor.shape, context
        ctx.set_materialize_grads(False)
        ctx.routes = taken, put = _routes(tensor.shape[1] * context.ranks, context, wanted)
        some = tensor.new_empty((tensor.shape[0], sum(_counts(put)), *tensor.shape[2:]))
        for at, part in _moved(tensor, taken, put, context):
            some[:, at] = part
        ctx.mark_non_differentiable(some)
        return some, some.new_zeros((), dtype=wider(some.dtype)).expand(some.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        taken, put = ctx.routes
        sums = grads[1].new_zeros(ctx.shape)
        for own, part in _moved(grads[1], put, taken, ctx.context):
            sums[:, own] += part
        return *first_derivatives(WHAT, "torch", (sums.to(ctx.dtype),), grads), None, None


Routes = list[list[slice]]  # by rank


def _routes(seqlen: int, context: Context, wanted: tuple[Fetched, ...]) -> tuple[Routes, Routes]:
    """Which of this rank's rows go to each rank, and where those of each rank lie among what arrives."""
    held = [runs(context.layout, seqlen, context.ranks, rank) for rank in range(context.ranks)]
    taken = [[rows for rows, _ in keys.shared(held[context.rank])] for keys in wanted]
    return taken, [[at for _, at in wanted[context.rank].shared(source)] for source in held]


def _counts(routes: Routes) -> list[int]:
    return [sum(rows.stop - rows.start for rows in of_rank) for of_rank in routes]


def _moved(tensor: torch.Tensor, taken: Routes, put: Routes, context: Context) -> list[tuple[slice, torch.Tensor]]:
    """What arrives where, as others take of theirs; rows are axis 1."""
    rows, places = tensor.transpose(0, 1), [at for of_rank in put for at in of_rank]
    sent = torch.cat([rows[:0], *(rows[part] for of_rank in taken for part in of_rank)])
    received = sent.new_empty((sum(_counts(put)), *rows.shape[1:]))
    dist.all_to_all_single(received, sent, _counts(put), _counts(taken), group=context.group)
    parts = received.split([at.stop - at.start for at in places])
    return [(at, part.transpose(0, 1)) for at, part in zip(places, parts, strict=True)]


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
