"""Calls of plain tensors: prepared once for each layout of their arguments, and recorded where a gradient is wanted."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from flashtile.memory import Memory
from flashtile.problem.mask import Joined
from flashtile.problem.number import plain, plain_pair
from flashtile.torch.call.arguments import Arguments
from flashtile.torch.call.describe import (
    capture,
    exactly,
    layout_of,
    make_problem,
    origin_kind,
    rows_of,
    seed_key,
    wants_grad,
)
from flashtile.torch.call.dropout import draw_seed
from flashtile.torch.call.inputs import modifiers
from flashtile.torch.call.lengths import Given
from flashtile.torch.call.masks import call_mask, mask_of_call
from flashtile.torch.execute.prepared import PreparedCall, Tensors, alignment
from flashtile.torch.execute.replay import addresses_of
from flashtile.torch.routes.derivatives import each_gradient, is_dual_level, is_mapped
from flashtile.torch.routes.functional import Prepared, gradients

_CALLS = Memory[Any, PreparedCall](8192, "calls")  # by layouts


def prepare(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *some: Any, given: Given | None = None, **named: Any
) -> tuple[PreparedCall, tuple[torch.Tensor, ...]]:
    """`prepare_call` of arguments by name."""
    return prepare_call(q, k, v, Arguments(*some, **named), given)


def prepare_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: tuple[Any, ...], given: Given | None = None
) -> tuple[PreparedCall, tuple[torch.Tensor, ...]]:
    """The prepared call of these arguments, and the tensors besides q, k, v: captured ones and lengths.

    arguments: `Arguments`, or the same as a tuple, which takes a quarter of the time to make. Everything is validated at first
    sight of a layout.
    """
    causal, window, mask, score, scale, sink, dropout, return_lse, options, stored = arguments
    captured: tuple[torch.Tensor, ...] = ()
    if given is not None:
        mask = mask_of_call(mask, q, k, True)
    plain_mask, masking = mask, None
    try:
        if isinstance(mask, Joined):
            masking = call_mask(causal, window, mask, *rows_of(q, given))
            plain_mask = masking.key
        key: Any = (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
            q.device, k.device, v.device,
            alignment(addresses_of((q, k, v))) if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 and q.is_cuda else 0,
            causal, type(causal), plain_mask, scale, type(scale), options, return_lse, type(return_lse),
            q.is_neg() or k.is_neg() or v.is_neg(),
        )  # fmt: skip
        if window is not None:
            key += exactly(window)
        listed = isinstance(score, (tuple, list))
        if not listed or score:
            captured, score_key = capture(score if listed else modifiers(score), *rows_of(q, given))
            key += (score_key,)
        if sink is not None:
            captured += (sink,)
            key += ("sink", sink.shape, layout_of(sink), sink.dtype, sink.device, wants_grad(sink), sink.is_neg())
        if stored is not None:
            captured += stored.tensors
            key += ("stored", stored.kind, *((t.shape, layout_of(t), t.dtype, t.device, t.is_neg()) for t in stored.tensors))
        if dropout is not None:
            seed = dropout.seed is None or seed_key(dropout.seed)
            key += ("dropout", dropout.p, type(dropout), seed, origin_kind(dropout))
        if given is not None:
            key += given.key()
        call = _CALLS.get(key)
    except (AttributeError, TypeError, RuntimeError):  # not dense tensors, or not hashable: let validation say what is wrong
        key, call = None, None
    if call is None:
        arguments = Arguments(*arguments)
        given_ones = causal, window, scale, return_lse
        numbers = plain(causal), plain_pair(window), plain(scale), plain(return_lse)
        if any(a is not b for a, b in zip(numbers, given_ones, strict=True)):  # a tensor is another key as it changes
            plain_ones = dict(zip(("causal", "window", "scale", "return_lse"), numbers, strict=True))
            return prepare_call(q, k, v, arguments._replace(**plain_ones), given)
        problem, options = make_problem(q, k, v, arguments._replace(mask=mask), given)
        score = modifiers(score)
        captured, _ = capture(score, *rows_of(q, given))
        captured += () if sink is None else (sink,)
        captured += () if stored is None else stored.tensors
        if any(isinstance(number, torch.Tensor) for modifier in score for number in modifier.scalars()):
            key = None
        call = PreparedCall(problem, options, q.device)
        if key is not None:
            _CALLS[key] = call
    if dropout is not None and call.problem.dropout is not None:
        captured += (draw_seed(dropout, call.device),)
    if isinstance(mask, Joined):
        captured += (masking or call_mask(causal, window, mask, *rows_of(q, given))).flat
    if given is not None:
        captured += tuple(given.tensors[name] for name in call.problem.lengths.tensors)
        if q.device.type == "cpu":
            given.check_values({"q": call.problem.span_q, "k": call.problem.span_k})
    return call, captured


def attend(call: PreparedCall, others: tuple[torch.Tensor, ...], *packs: torch.Tensor, parts: Tensors | None = None) -> Any:
    """out, or (out, lse) where the problem returns it, of a prepared call, differentiable where a gradient is wanted.

    packs: q, k, v as `call.packing` has them; parts: the views of them, where the caller has them.
    """
    if torch.is_grad_enabled() and True in [t.requires_grad for t in (*packs, *others)]:
        call.require_backward()
        return _apply(call, parts, *map(_alive, packs), *map(_alive, others))
    made = call.hosted(*packs) if call.hosted else None
    out, lse, *_ = made or call.forward(packs, others, parts, call.problem.returns_lse)
    return (out, lse) if call.problem.returns_lse else out


class _EagerAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: PreparedCall, parts: Tensors | None, *given: torch.Tensor) -> Any:
        kept = call.hosted(*given) if call.hosted else None
        if kept is None:
            count = len(call.packing.packs)
            kept = call.forward(given[:count], given[count:], parts, needs=ctx.needs_input_grad[2:])
        ctx.save_for_backward(*given, *kept)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return (kept[0], kept[1]) if call.problem.returns_lse else kept[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        call: PreparedCall = ctx.call
        needs = ctx.needs_input_grad[2:]
        hosted = call.hosted_backward.get(needs)
        dout, dlse = (*grads, None)[:2]
        saved, mapped = ctx.saved_tensors, is_mapped(grads)
        if hosted and dout is not None and dlse is None and not (mapped or torch.is_grad_enabled() or is_dual_level()):
            function, places = hosted
            made = function(*saved, dout)
            if made is not None:
                return None, None, *(made if places is None else [None if i is None else made[i] for i in places])
        if mapped:
            each = partial(each_gradient, call.problem, call.plan.backend)
            return None, None, *each(lambda dout, dlse: call.gradients(saved, dout, dlse, needs), (dout, dlse))
        if not (torch.is_grad_enabled() or is_dual_level()):
            return None, None, *call.gradients(saved, dout, dlse, needs)
        if dout is None and dlse is None:
            return None, None, *(None for _ in needs)
        count, end = len(call.packing.packs), len(saved) - len(call.kept)
        made = gradients(Prepared(call, needs), (dout, dlse), saved[end:], saved[:count], saved[count:end])
        return None, None, *made


# What `Function.apply` comes to outside of torch.func's transforms: calls within them have gone to the operator.
_apply: Any = super(torch.autograd.Function, _EagerAttention).apply  # pyright: ignore[reportAttributeAccessIssue]
_alive: Any = torch._C._functorch.unwrap_if_dead  # pyright: ignore[reportAttributeAccessIssue] (of what outlived a transform)
