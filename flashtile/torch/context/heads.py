"""Attention whose ranks exchange heads for positions: all in one node of autograd, group by group of heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashtile.torch.context.collectives import WHAT, ToHeads, ToTokens, wider
from flashtile.torch.context.context import Context, head_groups
from flashtile.torch.context.wanted import Wanted
from flashtile.torch.routes.derivatives import first_derivatives
from flashtile.torch.routes.local import prepared


def attend_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context, want: Wanted, return_lse: bool, lengths: dict[str, Any]
) -> tuple[torch.Tensor, Any]:
    """(out, lse or None): each rank attends its heads of the whole, of which each rank has as many of k as of others.

    All groups' heads are under way before the first is attended, and a group's results while the next is computed.
    lengths: what a local call is told of the whole's.
    """
    groups, share = head_groups("ulysses", q, k, context), q.shape[2] // context.ranks
    size = share // groups
    given = [t.detach() for t in (q, k, v)]
    coming = [[ToHeads(some, context, group, groups) for some in _alike(given)] for group in range(groups)]
    here = want.of_heads(context, slice(context.rank * share, (context.rank + 1) * share))
    calls: list[Any] = []
    others: list[torch.Tensor] = []
    wants = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    for group, heads in enumerate(coming):
        arguments = here.of_group(slice(group * size, (group + 1) * size), share).arguments()
        whole = [t for exchange in heads for t in exchange.whole]  # whose numbers nobody reads yet
        call, some = prepared(*whole, return_lse=return_lse, **arguments, **lengths)
        if wants:
            call.require_backward()
        calls.append((call, slice(len(others), len(others) + len(some))))
        others += some
    return _Heads.apply(calls, coming, context, return_lse, q, k, v, *others)  # pyright: ignore[reportReturnType]


class _Heads(torch.autograd.Function):
    """Prepared calls of heads that are coming; differentiable once."""

    @staticmethod
    def forward(
        ctx: Any, calls: list[Any], coming: list[list[ToHeads]], context: Context, return_lse: bool, q: Any, k: Any, v: Any,
        *others: torch.Tensor,
    ) -> Any:  # fmt: skip
        groups, saved, leaving = len(calls), list[torch.Tensor](), list[list[ToTokens]]()
        wholes = [q.new_empty((*q.shape[:3], v.shape[3]))]
        if return_lse:
            wholes.append(q.new_empty((*q.shape[:3], 1), dtype=wider(q.dtype)))
        ctx.counts = list[int]()
        for group, (call, at) in enumerate(calls):
            whole = [t for exchange in coming[group] for t in exchange.arrived()]
            made = call.forward(tuple(whole), others[at])
            results = [made[0], made[1].transpose(1, 2)[..., None]] if return_lse else made[:1]
            leaving.append([ToTokens([t], context, group, groups) for t in results])
            saved += [*whole, *others[at], *made]
            ctx.counts.append(3 + len(others[at]) + len(made))
            if group:
                _there(leaving, [[to] for to in wholes])
        _there(leaving, [[to] for to in wholes])
        out = wholes[0]
        ctx.calls, ctx.context, ctx.shapes = calls, context, [(t.shape, t.dtype) for t in (q, k, v)]
        ctx.save_for_backward(out, *saved)
        ctx.set_materialize_grads(False)
        return out, wholes[1][..., 0].transpose(1, 2).contiguous() if return_lse else None

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        saved, calls, context = ctx.saved_tensors, ctx.calls, ctx.context
        wanted, of_others, groups = ctx.needs_input_grad[4:7], ctx.needs_input_grad[7:], len(ctx.calls)
        dout, dlse = grads
        rest, of_other, leaving = iter(saved[1:]), list[torch.Tensor | None](), list[list[ToTokens]]()
        with torch.no_grad():
            given = [dout] if dlse is None else [dout, dlse.transpose(1, 2)[..., None]]
            begin = lambda group: [t if t is None else ToHeads([t], context, group, groups) for t in given]  # noqa: E731
            coming = begin(0)
            made = list[torch.Tensor | None]()
            for group, (call, at) in enumerate(calls):
                there = [next(rest) for _ in range(ctx.counts[group])]
                after = begin(group + 1) if group + 1 < groups else []  # under way while this one is computed
                above, *of_lse = [None if t is None else t.arrived()[0] for t in coming]
                coming = after
                down_lse = next((t[..., 0].transpose(1, 2) for t in of_lse if t is not None), None)
                found = call.gradients(there, above, down_lse, (*wanted, *of_others[at]))
                del above, of_lse, down_lse, there
                leaving.append([ToTokens(some, context, group, groups) for some in _alike(found[:3])])
                of_other += found[3:]
                del found
                if group or groups == 1:  # as late as the first is wanted
                    made = made or [
                        torch.empty(shape, dtype=dtype, device=saved[0].device) if wish else None
                        for wish, (shape, dtype) in zip(wanted, ctx.shapes, strict=True)
                    ]
                if group:
                    _there(leaving, _alike(made))
            _there(leaving, _alike(made))
        return None, None, None, None, *first_derivatives(WHAT, "torch", (*made, *of_other), saved, grads)


def _there(leaving: list[list[ToTokens]], places: list[list[torch.Tensor]]) -> None:
    """Write what left first where it belongs."""
    for exchange, to in zip(leaving.pop(0), places, strict=True):
        exchange.arrived(to)


def _alike(tensors: Sequence[torch.Tensor | None]) -> list[list[torch.Tensor]]:
    """Those of q, k and v that are there, together where they have as many tokens: each list is one exchange."""
    found = [t for t in tensors if t is not None]
    return [some for length in dict.fromkeys(t.shape[1] for t in found) if (some := [t for t in found if t.shape[1] == length])]
