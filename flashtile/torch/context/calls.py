"""Local calls of `attention` whose gradients of keys and values are float32, to be summed over calls and ranks."""

from __future__ import annotations

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

    def part(self, keys: slice) -> Keys:
        return Keys(self.k[:, keys], self.v[:, keys], self.k_sums[:, keys], self.v_sums[:, keys])


@dataclass(frozen=True)
class Gathered:
    """Keys and values as they have arrived, without a gradient, and what stands for both in autograd, float32 (batch, seqlen,
    heads, head_dim + head_dim_v): its gradient is dk beside dv.
    """

    k: torch.Tensor
    v: torch.Tensor
    sums: torch.Tensor

    def part(self, keys: slice) -> Keys:
        k, v = self.k[:, keys], self.v[:, keys]
        return Keys(k, v, *self.sums[:, keys].split([k.shape[-1], v.shape[-1]], -1))


@dataclass(frozen=True)
class Part:
    """A local call: which of this rank's queries, which of the keys that are here, and what else it is told."""

    rows: slice
    keys: slice
    arguments: dict[str, Any]


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


def attend_parts(q: torch.Tensor, there: Gathered, parts: list[Part], return_lse: bool) -> tuple[torch.Tensor, Any]:
    """(out, lse or None) of calls whose rows, one after another, are all of q. Their dk and dv are added where they are made:
    slices in autograd would each be spread over all keys before.
    """
    if widens(q):
        out, lse = attend_parts(q.float(), Gathered(there.k.float(), there.v.float(), there.sums), parts, return_lse)
        return out.to(q.dtype), lse
    wanted = torch.is_grad_enabled() and there.sums.requires_grad
    if not wanted or is_traced(q, there.k, there.v):
        made = [call(q[:, p.rows], there.part(p.keys), return_lse, **p.arguments) for p in parts]
        if not return_lse:
            return (made[0] if len(made) == 1 else torch.cat(made, 1)), None
        return torch.cat([out for out, _ in made], 1), torch.cat([lse for _, lse in made], 2)
    calls: list[Any] = []
    others: list[torch.Tensor] = []
    for p in parts:
        made, some = prepared(q[:, p.rows], there.k[:, p.keys], there.v[:, p.keys], return_lse=return_lse, **p.arguments)
        made.require_backward()
        calls.append((made, p, slice(len(others), len(others) + len(some))))
        others += some
    out, lse = _Parts.apply(calls, q, there.k, there.v, there.sums, *others)  # pyright: ignore[reportGeneralTypeIssues]
    return out, lse if return_lse else None


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


class _Parts(torch.autograd.Function):
    """Prepared calls, each with its part and its place among the other tensors; differentiable once."""

    @staticmethod
    def forward(ctx: Any, calls: list[Any], q: Any, k: Any, v: Any, sums: Any, *others: torch.Tensor) -> Any:
        made = [call.forward((q[:, p.rows], k[:, p.keys], v[:, p.keys]), others[at]) for call, p, at in calls]
        out, lse = made[0][:2] if len(made) == 1 else (torch.cat([t[i] for t in made], axis) for i, axis in ((0, 1), (1, 2)))
        ctx.counts = [len(kept) - 1 for kept in made]  # but for out, of which the whole is kept
        ctx.save_for_backward(sums, out, q, k, v, *others, *(t for kept in made for t in kept[1:]))
        ctx.calls, ctx.end = calls, 5 + len(others)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        saved, (q_wanted, _, _, keys_wanted, *of_others) = ctx.saved_tensors, ctx.needs_input_grad[1:]
        _, out, q, k, v, *others = saved[: ctx.end]
        kept, found = iter(saved[ctx.end :]), []
        dout, dlse = grads
        with torch.no_grad():
            for (call, p, at), count in zip(ctx.calls, ctx.counts, strict=True):
                there = q[:, p.rows], k[:, p.keys], v[:, p.keys], *others[at], out[:, p.rows]
                above = (None if dout is None else dout[:, p.rows], None if dlse is None else dlse[..., p.rows])
                needs = q_wanted, keys_wanted, keys_wanted, *of_others[at]
                found.append(call.gradients((*there, *(next(kept) for _ in range(count))), *above, needs, wide_keys=True))
            dq = torch.cat([made[0] for made in found], 1) if q_wanted else None
            parts = [(p.keys, made[1:3]) for (_, p, _), made in zip(ctx.calls, found, strict=True)]
            dsums = _added(saved[0].shape, parts) if keys_wanted else None
        made = dq, None, None, dsums, *(grad for of_call in found for grad in of_call[3:])
        return None, *first_derivatives(WHAT, "torch", made, saved, grads)


def _added(shape: torch.Size, parts: list[tuple[slice, Any]]) -> torch.Tensor:
    """dk beside dv of all keys: the sum of what each part has of its own."""
    (first, (dk, dv)), *rest = sorted(parts, key=lambda part: part[0].start - part[0].stop)
    sums = dk.new_empty(shape)
    sums[:, : first.start], sums[:, first.stop :] = 0, 0
    for total, part in zip(sums[:, first].split([dk.shape[-1], dv.shape[-1]], -1), (dk, dv), strict=True):
        total.copy_(part)
    for keys, (dk, dv) in rest:
        there = sums[:, keys].split([dk.shape[-1], dv.shape[-1]], -1)
        there[0].add_(dk)
        there[1].add_(dv)
    return sums
