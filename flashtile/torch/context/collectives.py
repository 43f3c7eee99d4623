"""What ranks exchange, with gradients. Sums over ranks are float32 and in the ranks' order, so that their bits repeat."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from flashtile.torch.context.context import Context
from flashtile.torch.context.layout import Fetched, runs
from flashtile.torch.context.shards import gather_into, gathered, order
from flashtile.torch.routes.derivatives import first_derivatives

WHAT = "attention over ranks"


def wider(dtype: torch.dtype) -> torch.dtype:
    """In which dtype parts are summed: float32, of float64 its own."""
    return torch.promote_types(dtype, torch.float32)


OfKeys = tuple[slice, torch.Tensor, torch.Tensor]  # some of the keys that are here, and a call's dk and dv of these


class Gathering:
    """All ranks' tensors (batch, seqlen / ranks, ...) on their way here; `whole` is what they will be when they have `arrived`.

    Both buffers live until then: the transport works beside the current stream.
    """

    def __init__(self, tensor: torch.Tensor, context: Context):
        self.context, self.sent = context, tensor.detach().contiguous()
        self.parts = self.sent.new_empty((context.ranks, *tensor.shape))
        joined = self.parts.transpose(0, 1)
        self.lies = context.layout == "contiguous" and joined.is_contiguous()
        self.whole = joined.flatten(1, 2) if self.lies else self.sent.new_empty(joined.flatten(1, 2).shape)
        self.work = gather_into(self.parts.flatten(0, 1), self.sent, context, begin=True)

    def arrived(self) -> torch.Tensor:
        """The whole, in its own order: what the current stream does from here on waits for it."""
        self.work.wait()
        whole = self.whole
        if not self.lies:
            for (rank, rows), run in _places(self.context, whole.shape[1]):
                whole[:, run] = self.parts[rank, :, rows]
        del self.sent, self.parts, self.whole
        return whole


class Fetching:
    """The same of those keys that this rank fetches, which lie side by side. wanted: what each rank fetches."""

    def __init__(self, tensor: torch.Tensor, context: Context, wanted: tuple[Fetched, ...]):
        self.tensor, self.context = tensor, context
        self.taken, self.put = _routes(tensor.shape[1] * context.ranks, context, wanted)
        self.whole = tensor.new_empty((tensor.shape[0], sum(_counts(self.put)), *tensor.shape[2:]))

    def arrived(self) -> torch.Tensor:
        whole = self.whole
        for at, part in _moved(self.tensor, self.taken, self.put, self.context):
            whole[:, at] = part
        del self.tensor, self.whole
        return whole


class Returning:
    """dk and dv of groups of heads on their way to the ranks that hold the keys, whose sums are float32.

    wanted: what each rank fetched of a halo; None where all have all keys. tokens: how many each rank holds.
    """

    def __init__(self, context: Context, wanted: tuple[Fetched, ...] | None, tokens: int):
        self.context, self.wanted, self.tokens = context, wanted, tokens
        self.by_group = dict[int, tuple[torch.Tensor, torch.Tensor | None, Any]]()

    def begin(self, group: int, parts: list[OfKeys]) -> None:
        """Send what this rank's calls give of other ranks' keys, each of which may be of several calls."""
        c, (dk, dv) = self.context, parts[0][1:]
        shape = dk.shape[0], self.tokens, dk.shape[2], dk.shape[3] + dv.shape[3]
        seqlen = self.tokens * c.ranks
        if self.wanted is not None:
            taken, put = _routes(seqlen, c, self.wanted)
            sums = dk.new_empty((shape[0], sum(_counts(put)), *shape[2:]))
            _sum_into(sums, 0, parts)
            mine = sums.new_zeros(shape)
            for own, part in _moved(sums, put, taken, c):
                mine[:, own] += part
            self.by_group[group] = mine, None, None
            return
        mine, sent = dk.new_empty(shape), dk.new_empty((c.ranks - 1, *shape))
        for (rank, here), run in _places(c, seqlen):
            place = mine if rank == c.rank else sent[rank - (rank > c.rank)]
            _sum_into(place[:, here], run.start, parts)
        received, rows = torch.empty_like(sent), [shape[0] * (rank != c.rank) for rank in range(c.ranks)]
        work = dist.all_to_all_single(received.flatten(0, 1), sent.flatten(0, 1), rows, rows, group=c.group, async_op=True)
        self.by_group[group] = mine, received, (work, sent)

    def arrived(self, group: int, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Write the sums of all ranks' parts there: of the others' in their order, and this one's."""
        mine, received, on_its_way = self.by_group.pop(group)
        if received is not None:
            on_its_way[0].wait()
            received = received[0] if len(received) == 1 else received.sum(0)
        widths = [dk.shape[3], dv.shape[3]]
        for i, grad in enumerate((dk, dv)):
            own = mine.split(widths, -1)[i]
            if received is None:
                grad.copy_(own)
            else:
                torch.add(own, received.split(widths, -1)[i], out=grad)


def _sum_into(place: torch.Tensor, first: int, parts: list[OfKeys]) -> None:
    """dk beside dv of keys from the first on: the sum of what each part has of its own."""
    end, widths = first + place.shape[1], [t.shape[3] for t in parts[0][1:]]
    cuts = {first, end, *(min(max(at, first), end) for keys, *_ in parts for at in (keys.start, keys.stop))}
    for start, stop in pairwise(sorted(cuts)):
        there = [
            [grad[:, start - keys.start : stop - keys.start] for grad in grads]
            for keys, *grads in parts
            if keys.start <= start and stop <= keys.stop
        ]
        for to, *some in zip(place[:, start - first : stop - first].split(widths, -1), *there, strict=True):
            if len(some) < 2:
                to.copy_(some[0] if some else to.new_zeros(()))
                continue
            torch.add(some[0], some[1], out=to)
            for more in some[2:]:
                to += more


class ToHeads:
    """Tensors (batch, seqlen / ranks, heads, d) whose heads go to the ranks, a group of each rank's at a time, on their way; of
    `whole` each is what it will be when it has `arrived`: (batch, seqlen, heads of a rank and group, d), in its own order.
    """

    def __init__(self, tensors: list[torch.Tensor], context: Context, group: int, groups: int):
        parts = [t.unflatten(2, (context.ranks, groups, -1))[:, :, :, group].permute(2, 0, 1, 3, 4) for t in tensors]
        widths = [part.shape[3] * part.shape[4] for part in parts]
        self.context, self.sent = context, tensors[0].new_empty((*parts[0].shape[:3], sum(widths)))
        for to, part in zip(self.sent.split(widths, -1), parts, strict=True):
            to.unflatten(-1, part.shape[3:]).copy_(part)
        self.received, self.work = _begin_exchange(self.sent, context)
        joined = self.received.transpose(0, 1)
        self.lies = context.layout == "contiguous" and joined.is_contiguous()
        self.rows = joined.flatten(1, 2) if self.lies else self.sent.new_empty(joined.flatten(1, 2).shape)
        self.whole = [
            whole.unflatten(-1, part.shape[3:]) for whole, part in zip(self.rows.split(widths, -1), parts, strict=True)
        ]

    def arrived(self) -> list[torch.Tensor]:
        self.work.wait()
        if not self.lies:
            for (rank, rows), run in _places(self.context, self.rows.shape[1]):
                self.rows[:, run] = self.received[rank, :, rows]
        whole = self.whole
        del self.sent, self.received, self.rows, self.whole
        return whole


class ToTokens:
    """The way back: this rank's heads of the whole sequence, on their way to the ranks that hold its tokens."""

    def __init__(self, tensors: list[torch.Tensor], context: Context, group: int, groups: int):
        self.context, self.group, self.groups, self.dtype = context, group, groups, tensors[0].dtype
        batch, seqlen = tensors[0].shape[:2]
        self.shapes = [t.shape[2:] for t in tensors]
        widths = [heads * d for heads, d in self.shapes]
        self.sent = tensors[0].new_empty((context.ranks, batch, seqlen // context.ranks, sum(widths)))
        for (rank, rows), run in _places(context, seqlen):
            for to, t in zip(self.sent[rank, :, rows].split(widths, -1), tensors, strict=True):
                to.unflatten(-1, t.shape[2:]).copy_(t[:, run])
        self.received, self.work = _begin_exchange(self.sent, context)

    def arrived(self, tensors: list[torch.Tensor]) -> None:
        """Write them to their heads of tensors (batch, seqlen / ranks, heads, d)."""
        self.work.wait()
        for tensor, part, shape in zip(
            tensors, self.received.split([heads * d for heads, d in self.shapes], -1), self.shapes, strict=True
        ):
            to = tensor.unflatten(2, (self.context.ranks, self.groups, -1))[:, :, :, self.group]
            to.copy_(part.unflatten(-1, shape).permute(1, 2, 0, 3, 4))
        del self.sent, self.received


def _begin_exchange(sent: torch.Tensor, context: Context) -> tuple[torch.Tensor, Any]:
    """What comes of all ranks, when the work is done: of (ranks, ...) each rank gets its own."""
    received = torch.empty_like(sent)
    return received, dist.all_to_all_single(received.flatten(0, 1), sent.flatten(0, 1), group=context.group, async_op=True)


def _places(context: Context, seqlen: int) -> list[tuple[tuple[int, slice], slice]]:
    """Of every run of every rank: ((rank, which of its tokens), which of the whole's)."""
    found: list[tuple[tuple[int, slice], slice]] = []
    for rank in range(context.ranks):
        row = 0
        for run in runs(context.layout, seqlen, context.ranks, rank):
            found.append(((rank, slice(row, row + run.count)), run.keys))
            row += run.count
    return found


class Gather(torch.autograd.Function):
    """The whole sequence of (batch, seqlen / ranks, ...), in its own order, and a float32 tensor of its shape that takes no
    memory and stands for it in autograd: so gradients are summed in float32, on this rank and over ranks.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, context: Context, wanted: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.context, ctx.dtype = context, tensor.dtype
        ctx.set_materialize_grads(False)
        whole = gathered(tensor.detach(), context, 1)
        ctx.mark_non_differentiable(whole)
        return whole, whole.new_zeros((), dtype=wider(whole.dtype)).expand(whole.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad, context = grads[1], ctx.context
        at = order(grad.shape[1], context.layout, context.ranks, grad.device)
        parts = grad if at is None else grad.index_select(1, at)
        sent = parts.unflatten(1, (context.ranks, -1)).transpose(0, 1).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received.flatten(0, 1), sent.flatten(0, 1), group=context.group)
        return *first_derivatives(WHAT, "torch", (received.sum(0).to(ctx.dtype),), grads), None, None


class Fetch(torch.autograd.Function):
    """The same of those keys that this rank fetches, which lie side by side. wanted: what each rank fetches."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, context: Context, wanted: tuple[Fetched, ...]) -> Any:
        fetching = Fetching(tensor.detach(), context, wanted)
        ctx.dtype, ctx.shape, ctx.context, ctx.routes = tensor.dtype, tensor.shape, context, (fetching.taken, fetching.put)
        ctx.set_materialize_grads(False)
        some = fetching.arrived()
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
