"""Attention with keys and values that are gathered: all in one node of autograd, so that nothing is copied that need not be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashtile.problem.mask import Band
from flashtile.torch.context.calls import Keys, call, widens
from flashtile.torch.context.collectives import WHAT, Fetch, Fetching, Gather, Gathering, Returning, ReturningHalo, wider
from flashtile.torch.context.context import Context, head_groups
from flashtile.torch.context.documents import Order
from flashtile.torch.context.known import Known
from flashtile.torch.context.layout import Fetched, Stages, fetched, stages
from flashtile.torch.context.wanted import Wanted
from flashtile.torch.execute.plain import is_traced, joined
from flashtile.torch.routes.derivatives import first_derivatives
from flashtile.torch.routes.local import prepared


@dataclass(frozen=True)
class Part:
    """A local call: which of this rank's queries, which of the keys that are here, and what else it is told.

    order: in which order it takes these keys, if not in theirs.
    """

    rows: slice
    keys: slice
    arguments: dict[str, Any]
    order: Order | None = None

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Its keys of (batch, seqlen, heads, d)."""
        keys = whole[:, self.keys]
        return keys if self.order is None else self.order.of(keys)

    def meant(self, whole: torch.Tensor) -> torch.Tensor:
        """What is laid as these, of a tensor whose numbers nobody reads yet."""
        keys = whole[:, self.keys]
        if widens(whole):
            return torch.empty(keys.shape, dtype=torch.float32)
        return keys if self.order is None else torch.empty_like(keys, memory_format=torch.contiguous_format)

    def back(self, grads: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Gradients of its keys, in their own order."""
        if self.order is None:
            return grads
        return [self.order.undone(t) for t in grads]


PartsOf = Callable[[Fetched, Wanted], list[Part]]


@dataclass(frozen=True)
class Placed:
    """A prepared call, its part, which of them it is in which group of heads, and its place among the other tensors."""

    call: Any
    part: Part
    group: int
    stage: int
    heads: slice
    others: slice

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This call's part of what all queries have, (batch, seqlen, heads, d)."""
        return tensor[:, self.part.rows, self.heads]

    def of_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same of (batch, heads, seqlen)."""
        return tensor[:, self.heads, self.part.rows]


@dataclass(frozen=True)
class Ways:
    """How keys come to a rank's calls, and how their gradients go back: of a halo, or group by group of heads.

    wanted: what each rank fetches of a halo. stages: which keys come when, where there is none. tokens: how many keys a rank
    has.
    """

    context: Context
    wanted: tuple[Fetched, ...]
    stages: Stages | None
    groups: int
    tokens: int

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, context: Context, band: Band, wanted: tuple[Fetched, ...]) -> Ways:
        if wanted[context.rank].halo:
            return cls(context, wanted, None, 1, k.shape[1])
        plan = stages(context.layout, (q.shape[1] * context.ranks, k.shape[1] * context.ranks), context.ranks, band)
        return cls(context, wanted, plan, head_groups("allgather", q, k, context), k.shape[1])

    def heads(self, group: int, of: int) -> slice:
        """Which of so many heads are a group's."""
        return slice(group * of // self.groups, (group + 1) * of // self.groups)

    def begin(self, k: torch.Tensor, v: torch.Tensor) -> list[Gathering] | list[Fetching]:
        """All groups' keys, on their way here."""
        if self.stages is None:
            return [Fetching(k, v, self.context, self.wanted)]
        there = [self.heads(group, k.shape[2]) for group in range(self.groups)]
        return [Gathering(k[:, :, heads], v[:, :, heads], self.context, self.stages) for heads in there]

    def back(self) -> Returning | ReturningHalo:
        """For a backward: nothing is on its way yet."""
        if self.stages is None:
            return ReturningHalo(self.context, self.wanted, self.tokens)
        return Returning(self.context, self.stages, self.tokens)


def attend_gathered(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context, want: Wanted, band: Band, parts_of: PartsOf,
    return_lse: bool, known: Known | None = None,
) -> tuple[torch.Tensor, Any]:  # fmt: skip
    """(out, lse or None) of calls whose rows, one after another, are all of q, with the keys that the band lets a rank see.

    A call waits for the keys that it sees, while those behind them are still coming. In the backward the last call comes first,
    and what it gives of other ranks' keys goes while the next is computed. Where it pays, the same group by group of heads.
    Every head's numbers are as in one call.
    parts_of: the calls, of what is here and of what is wanted of a group's heads. known: where they are kept for a call alike.
    """
    if known is not None and known.ready is not None:
        ways, placed = known.ready
        return _Gathered.apply(placed, ways.begin(k, v), ways, return_lse, q, k, v)  # pyright: ignore[reportReturnType]
    wanted = fetched(context.layout, (q.shape[1] * context.ranks, k.shape[1] * context.ranks), context.ranks, band)
    have = wanted[context.rank]
    if is_traced(q, k, v):
        whole, sums = (Fetch if have.halo else Gather).apply(joined([k, v]), context, wanted)  # pyright: ignore[reportGeneralTypeIssues]
        keys, parts = Keys(*_split(whole, k.shape[3]), *_split(sums, k.shape[3])), parts_of(have, want)
        made = [call(q[:, p.rows], keys.each(p.of), True, **p.arguments) for p in parts]
        return torch.cat([out for out, _ in made], 1), torch.cat([lse for _, lse in made], 2) if return_lse else None
    ways = Ways.of(q, k, context, band, wanted)
    coming = ways.begin(k, v)
    placed: list[Placed] = []
    others: list[torch.Tensor] = []
    wants = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    for group, keys in enumerate(coming):
        heads = ways.heads(group, q.shape[2])
        parts = parts_of(have, want if ways.groups == 1 else want.of_group(heads, q.shape[2]))
        for stage, part in enumerate(parts):
            given = _meant(q[:, part.rows, heads]), *map(part.meant, keys.whole)
            made, some = prepared(*given, return_lse=return_lse, **part.arguments)
            if wants:
                made.require_backward()
            placed.append(Placed(made, part, group, stage, heads, slice(len(others), len(others) + len(some))))
            others += some
    if known is not None and not others:
        known.ready = ways, placed
    return _Gathered.apply(placed, coming, ways, return_lse, q, k, v, *others)  # pyright: ignore[reportReturnType]


class _Gathered(torch.autograd.Function):
    """Prepared calls with keys that are coming; differentiable once."""

    @staticmethod
    def forward(
        ctx: Any, placed: list[Placed], coming: list[Any], ways: Ways, return_lse: bool, q: Any, k: Any, v: Any,
        *others: torch.Tensor,
    ) -> Any:  # fmt: skip
        out, lse = None, None
        if len(placed) > 1:
            out = q.new_empty((*q.shape[:3], v.shape[3]))
        if len(placed) > 1 and return_lse:
            lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=wider(q.dtype))
        kept: list[torch.Tensor] = []
        ctx.counts = list[int]()
        for p in placed:
            keys = [p.part.of(t) for t in coming[p.group].arrived(p.stage)]
            into = None if out is None else p.of(out)
            made = p.call.forward((_widened(p.of(q)), *map(_widened, keys)), others[p.others], into=into)
            if into is None:
                out, lse = made[0].to(q.dtype), made[1].clone() if return_lse else None
            else:
                _put(into, made[0])
                if lse is not None:
                    p.of_rows(lse).copy_(made[1])
            kept += *keys, *made[1:]  # of out the whole is kept
            ctx.counts.append(1 + len(made))
        ctx.placed, ctx.ways, ctx.count = placed, ways, len(coming)
        ctx.kinds = [(t.shape, t.dtype) for t in (k, v)]
        ctx.save_for_backward(q, out, *others, *kept)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        saved, (q_wanted, *kv_wanted), of_others = ctx.saved_tensors, ctx.needs_input_grad[4:7], ctx.needs_input_grad[7:]
        (q, out), others = saved[:2], saved[2 : 2 + len(of_others)]
        rest, (dout, dlse), keys_wanted = iter(saved[2 + len(of_others) :]), grads, any(kv_wanted)
        kept = [[next(rest) for _ in range(count)] for count in ctx.counts]
        returning = ctx.ways.back()
        of_other: list[torch.Tensor | None] = [None] * len(others)
        with torch.no_grad():
            dq = torch.empty_like(q) if q_wanted and len(kept) > 1 else None
            grads_of_keys = list[torch.Tensor]()

            def arrived(group: int) -> None:
                """Write a group's sums: what is theirs is made as late as that."""
                if not grads_of_keys:
                    grads_of_keys.extend(torch.empty(shape, dtype=dtype, device=q.device) for shape, dtype in ctx.kinds)
                returning.arrived(group, *(_of_group(t, group, ctx.count) for t in grads_of_keys))

            last = max(p.stage for p in ctx.placed)
            for p, (k, v, *some) in reversed(list(zip(ctx.placed, kept, strict=True))):
                there = *map(_widened, (p.of(q), k, v)), *others[p.others], _widened(p.of(out)), *some
                above = None if dout is None else _widened(p.of(dout)), None if dlse is None else p.of_rows(dlse)
                needs = q_wanted, keys_wanted, keys_wanted, *of_others[p.others]
                into = None if dq is None else p.of(dq)
                found, *of_keys = p.call.gradients(there, *above, needs, wide_keys=True, into=into)
                if into is not None:
                    _put(into, found)
                elif found is not None:  # of the only call
                    dq = found.to(q.dtype)
                of_other[p.others] = of_keys[2:]
                if keys_wanted:
                    returning.begin(p.group, p.stage, (p.part.keys, *p.part.back(of_keys[:2])))
                del k, v, there, above, found, of_keys
                if keys_wanted and p.stage == last and p.group + 1 < ctx.count:  # whose last sums came during this call
                    arrived(p.group + 1)
            if keys_wanted:
                arrived(0)
        of_keys = [t if wish else None for t, wish in zip(grads_of_keys, kv_wanted, strict=False)] or [None, None]
        made = dq, *of_keys, *of_other
        return None, None, None, None, *first_derivatives(WHAT, "torch", made, saved, grads)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """As a call takes it (`widens`)."""
    return tensor.float() if widens(tensor) else tensor


def _meant(tensor: torch.Tensor) -> torch.Tensor:
    """What is laid so, of a tensor whose numbers nobody reads yet."""
    return torch.empty(tensor.shape, dtype=torch.float32) if widens(tensor) else tensor


def _put(place: torch.Tensor, made: torch.Tensor) -> None:
    """Copy what has not been written there."""
    if made is not place:
        place.copy_(made)


def _of_group(tensor: Any, group: int, groups: int) -> torch.Tensor:
    """A group's heads of (batch, seqlen, heads, d)."""
    size = tensor.shape[2] // groups
    return tensor[:, :, group * size : (group + 1) * size]


def _split(whole: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What is of k, and what is of v."""
    return whole[..., :width], whole[..., width:]
