"""What ranks exchange, with gradients. Sums over ranks are float32 and in the ranks' order, so that their bits repeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from flashtile.memory import remembered
from flashtile.torch.context.context import Context
from flashtile.torch.context.layout import Fetched, Stages, runs
from flashtile.torch.context.shards import gathered, order
from flashtile.torch.routes.derivatives import first_derivatives

WHAT = "attention over ranks"


def wider(dtype: torch.dtype) -> torch.dtype:
    """In which dtype parts are summed: float32, of float64 its own."""
    return torch.promote_types(dtype, torch.float32)


OfKeys = tuple[slice, torch.Tensor, torch.Tensor]  # some of the keys that are here, and a call's dk and dv of these
KeysHere = tuple[torch.Tensor, torch.Tensor]  # k and v
Region = tuple[slice, list[list[torch.Tensor]]]  # rows, and all parts' dk and dv of them


class Transfer:
    """Tensors on their way between ranks: what goes to whom, and where that lands which comes from whom, when it has `arrived`.

    What two ranks send each other they name in the same order. What is contiguous is copied nowhere on its way.
    """

    def __init__(self, sent: list[tuple[torch.Tensor, int]], landing: list[tuple[torch.Tensor, int]], context: Context):
        group = context.group
        self.sent = [(t.contiguous(), rank) for t, rank in sent if t.numel()]
        self.landing = [(t, t.new_empty(t.shape) if not t.is_contiguous() else t, rank) for t, rank in landing if t.numel()]
        operations = [dist.P2POp(dist.isend, t, dist.get_global_rank(group, rank), group) for t, rank in self.sent]
        operations += [dist.P2POp(dist.irecv, t, dist.get_global_rank(group, rank), group) for _, t, rank in self.landing]
        self.works = dist.batch_isend_irecv(operations) if operations else []

    def arrived(self) -> None:
        """What the current stream does from here on waits for it."""
        for work in self.works:
            work.wait()
        for place, landed, _ in self.landing:
            if landed is not place:
                place.copy_(landed)
        del self.works, self.sent, self.landing


class Gathering:
    """All ranks' k and v (batch, seqlen / ranks, heads, d) on their way here, to each run of queries those that the runs before
    do not see. `whole` is what they will be, in their own order; what no run sees is left as it is.
    """

    def __init__(self, k: torch.Tensor, v: torch.Tensor, context: Context, stages: Stages):
        given = k.detach().contiguous(), v.detach().contiguous()
        self.whole: KeysHere = tuple(t.new_empty((t.shape[0], t.shape[1] * context.ranks, *t.shape[2:])) for t in given)  # pyright: ignore[reportAttributeAccessIssue]
        mine, others = context.rank, [rank for rank in range(context.ranks) if rank != context.rank]
        self.transfers: list[Transfer | None] = []
        for stage in range(len(stages.ends[mine])):
            sent = [(t[:, rows], to) for to in others for rows, _ in stages.news(stage, to, mine) for t in given]
            landing = [(t[:, at], by) for by in others for _, at in stages.news(stage, mine, by) for t in self.whole]
            self.transfers.append(Transfer(sent, landing, context))
        for stage in range(len(self.transfers)):
            for rows, at in stages.news(stage, mine, mine):
                for to, t in zip(self.whole, given, strict=True):
                    to[:, at] = t[:, rows]

    def arrived(self, stage: int) -> KeysHere:
        """The whole, of which the keys are there that the runs up to this one see."""
        for earlier in range(stage + 1):
            transfer, self.transfers[earlier] = self.transfers[earlier], None
            if transfer is not None:
                transfer.arrived()
        return self.whole


class Fetching:
    """The same of those keys that this rank fetches of a halo, which lie side by side. Its own are copied there by itself.

    wanted: what each rank fetches.
    """

    def __init__(self, k: torch.Tensor, v: torch.Tensor, context: Context, wanted: tuple[Fetched, ...]):
        given, mine = (k.detach(), v.detach()), context.rank
        taken, put = _routes(k.shape[1] * context.ranks, context, wanted)
        self.whole: KeysHere = tuple(t.new_empty((t.shape[0], sum(_counts(put)), *t.shape[2:])) for t in given)  # pyright: ignore[reportAttributeAccessIssue]
        others = [rank for rank in range(context.ranks) if rank != mine]
        sent = [(t[:, rows], to) for to in others for rows in taken[to] for t in given]
        landing = [(t[:, at], by) for by in others for at in put[by] for t in self.whole]
        self.transfer: Transfer | None = Transfer(sent, landing, context)
        for rows, at in zip(taken[mine], put[mine], strict=True):
            for to, t in zip(self.whole, given, strict=True):
                to[:, at] = t[:, rows]

    def arrived(self, stage: int = 0) -> KeysHere:
        transfer, self.transfer = self.transfer, None
        if transfer is not None:
            transfer.arrived()
        return self.whole


class Returning:
    """dk and dv, float32, of groups of heads on their way to the ranks that hold the keys (`Stages.returned`). tokens: how many
    keys each rank holds.
    """

    def __init__(self, context: Context, stages: Stages, tokens: int):
        self.context, self.stages, self.tokens = context, stages, tokens
        self.made = dict[int, dict[int, list[torch.Tensor]]]()  # by group and call, of the keys that its queries see
        self.sums = dict[int, list[OfKeys]]()  # of keys that this rank holds, which are done
        self.under_way = dict[int, tuple[Transfer, list[OfKeys]]]()  # with this rank's own part of the same keys

    def begin(self, group: int, stage: int, part: OfKeys) -> None:
        """Add a call's, and send those of other ranks' keys whose turn it is."""
        mine, seen = self.context.rank, self.stages.ends[self.context.rank][stage]
        keys, *grads = part
        if keys != slice(0, seen):  # a caller who knows that the other keys get nothing
            all_keys = [t.new_zeros((t.shape[0], seen, *t.shape[2:])) for t in grads]
            for to, t in zip(all_keys, grads, strict=True):
                to[:, keys] = t
            grads = all_keys
        made = self.made.setdefault(group, {})
        for total, later in zip(grads, made.get(stage + 1, ()), strict=False):
            total += later[:, :seen]
        made[stage] = grads
        sent: list[tuple[torch.Tensor, int]] = []
        landing: list[tuple[torch.Tensor, int]] = []
        sums: list[OfKeys] = []
        for rank in range(self.context.ranks):
            if rank != mine:
                sent += [(t[:, at], rank) for of, _, at in self.stages.returned(stage, mine, rank) for t in made[of]]
            for of, rows, at in self.stages.returned(stage, rank, mine):
                if rank == mine:
                    dk, dv = (t[:, at] for t in made[of])
                else:
                    dk, dv = (t.new_empty((t.shape[0], rows.stop - rows.start, *t.shape[2:])) for t in grads)
                    landing += [(dk, rank), (dv, rank)]
                sums.append((rows, dk, dv))
        if not stage:
            del self.made[group]
        transfer = Transfer(sent, landing, self.context)
        if group in self.under_way:  # of the call before
            self.sums[group] = _summed(self._landed(group))
        self.under_way[group] = transfer, sums

    def _landed(self, group: int) -> list[OfKeys]:
        """All parts that are here, and have not been added up, when the last transfer has arrived."""
        transfer, sums = self.under_way.pop(group)
        transfer.arrived()
        return [*self.sums.pop(group, ()), *sums]

    def arrived(self, group: int, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Write the sums there, in the ranks' order."""
        _write_sums(dk, dv, self._landed(group))


class ReturningHalo:
    """The same where a rank fetched a halo, whose sums alone travel. wanted: what each fetched."""

    def __init__(self, context: Context, wanted: tuple[Fetched, ...], tokens: int):
        self.context = context
        self.taken, self.put = _routes(tokens * context.ranks, context, wanted)
        self.parts = list[OfKeys]()

    def begin(self, group: int, stage: int, part: OfKeys) -> None:
        self.parts.append(part)

    def arrived(self, group: int, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Write the sums there, those first to which other ranks add nothing."""
        mine, sent, landing = self.context.rank, list[tuple[torch.Tensor, int]](), list[tuple[torch.Tensor, int]]()
        own, came = list[OfKeys](), list[OfKeys]()
        for rank, (taken, put) in enumerate(zip(self.taken, self.put, strict=True)):
            if rank == mine:
                own += [part for rows, at in zip(taken, put, strict=True) for part in _within(self.parts, at, rows.start)]
                continue
            for at in put:
                sums = self._sums(at)
                _write_sums(sums[0], sums[1], _within(self.parts, at, 0))
                sent += [(t, rank) for t in sums]
            for rows in taken:
                sums = self._sums(rows)
                landing += [(t, rank) for t in sums]
                came.append((rows, sums[0], sums[1]))
        transfer = Transfer(sent, landing, self.context)
        _write_sums(dk, dv, own, came, transfer.arrived)

    def _sums(self, rows: slice) -> list[torch.Tensor]:
        """Where dk and dv of so many rows will be."""
        return [t.new_empty((t.shape[0], rows.stop - rows.start, *t.shape[2:])) for t in self.parts[0][1:]]


def _within(parts: list[OfKeys], at: slice, start: int) -> list[OfKeys]:
    """What parts have of the keys `at`, the first of which is `start` there."""
    found: list[OfKeys] = []
    for keys, *grads in parts:
        first, stop = max(keys.start, at.start), min(keys.stop, at.stop)
        if first < stop:
            dk, dv = (t[:, first - keys.start : stop - keys.start] for t in grads)
            found.append((slice(start + first - at.start, start + stop - at.start), dk, dv))
    return found


def _cut(parts: list[OfKeys]) -> list[Region]:
    """Of rows that have the same parts: which these are, and the parts' dk and dv of them, in their order."""
    edges = sorted({edge for rows, *_ in parts for edge in (rows.start, rows.stop)})
    return [
        (
            slice(start, stop),
            [
                [grad[:, start - rows.start : stop - rows.start] for grad in grads]
                for rows, *grads in parts
                if rows.start <= start and stop <= rows.stop
            ],
        )
        for start, stop in pairwise(edges)
    ]


def _summed(parts: list[OfKeys]) -> list[OfKeys]:
    """Parts that do not meet, of the same sums; which are written over the first ones."""
    found: list[OfKeys] = []
    for rows, there in _cut(parts):
        if not there:
            continue
        total, *others = there
        for other in others:
            for to, grad in zip(total, other, strict=True):
                to += grad
        found.append((rows, total[0], total[1]))
    return found


def _write_sums(
    dk: torch.Tensor,
    dv: torch.Tensor,
    parts: list[OfKeys],
    late: Sequence[OfKeys] = (),
    arrived: Callable[[], None] | None = None,
) -> None:
    """Write sums of parts, all of whose last addition is rounded to the dtype there; 0 where there is none.

    late: parts that are there when `arrived` has been called; what needs none of them is written before.
    """
    now, then = list[Region](), list[Region]()
    for region in _cut([*parts, *late, (slice(0, dk.shape[1]), dk, dv)]):
        waits = any(rows.start <= region[0].start < rows.stop for rows, *_ in late)
        (then if waits else now).append(region)
    _write_regions(now)
    if arrived is not None:
        arrived()
    _write_regions(then)


def _write_regions(regions: list[Region]) -> None:
    for _, there in regions:
        *terms, places = there
        for i, to in enumerate(places):
            some = [term[i] for term in terms]
            for more in some[1:-1]:
                some[0] += more
            if len(some) > 1:
                torch.add(some[0], some[-1], out=to)
            elif some:
                to.copy_(some[0])
            else:
                to.zero_()


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
        del self.sent, self.received, self.rows, self.whole, self.work  # which keeps what it sent
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
        del self.sent, self.received, self.work


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
        taken, put = ctx.routes = _routes(tensor.shape[1] * context.ranks, context, wanted)
        ctx.dtype, ctx.shape, ctx.context = tensor.dtype, tensor.shape, context
        ctx.set_materialize_grads(False)
        some = tensor.new_empty((tensor.shape[0], sum(_counts(put)), *tensor.shape[2:]))
        for at, part in _moved(tensor.detach(), taken, put, context):
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
    return _routes_of(seqlen, context.layout, context.rank, wanted)


@remembered(256, "ways of keys between ranks")
def _routes_of(seqlen: int, layout: str, mine: int, wanted: tuple[Fetched, ...]) -> tuple[Routes, Routes]:
    held = [runs(layout, seqlen, len(wanted), rank) for rank in range(len(wanted))]
    taken = [[rows for rows, _ in keys.shared(held[mine])] for keys in wanted]
    return taken, [[at for _, at in wanted[mine].shared(source)] for source in held]


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
        self.received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        after, before = ((context.rank + by) % context.ranks for by in (1, -1))
        self.transfer = Transfer([(tensor, after)], [(self.received, before)], context)

    def arrived(self) -> torch.Tensor:
        """The other's, when it is here."""
        self.transfer.arrived()
        return self.received
