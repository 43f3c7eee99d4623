"""Attention as functions that PyTorch differentiates in every way, twice too, and the operators under torch.func.

Functions call each other's passes: `_FunctionalAttention`, its gradients `_Backward`, its tangents `_Tangent`, and `_Dual`,
which has out and its tangent of one pass. What a second derivative needs is `_Second`, which ends the chain: a third one is
refused by name. Each takes what runs it, `Asked` (the operators, with what they are asked) or `Prepared` (an eager call); the
two have the same methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad

from flashtile.errors import NotSupported
from flashtile.torch.execute.directed import second_derivatives, tangents
from flashtile.torch.execute.eagerly import eagerly
from flashtile.torch.execute.plain import transforms
from flashtile.torch.execute.prepared import PreparedCall
from flashtile.torch.routes.derivatives import is_dual_level, is_mapped
from flashtile.torch.routes.library import LIBRARY, NAMESPACE
from flashtile.torch.routes.operator import ATTENTION, BACKWARD, SECOND, TANGENT, Maybe, below_autograd, spread
from flashtile.torch.routes.request import read

Tensors = Sequence[Maybe]  # q, k, v and others; None where k and v are parts of q


class Asked:
    """What the operators are asked besides tensors: one value to those who take arguments apart.

    duals: the tensors as they came, where forward mode is by itself: their tangents are there while its level is.
    """

    duals: Tensors = ()

    def __init__(self, wanted: int, text: str, *numbers: Any):
        self.wanted, self.numbers = wanted, (text, *numbers)

    def wanting(self, wanted: int) -> Asked:
        """The same, with gradients of other tensors: bit i says whether the i-th has one."""
        return Asked(wanted, *self.numbers)

    def forward(self, given: Tensors) -> tuple[torch.Tensor, ...]:
        q, k, v, *others = given
        with _below():
            return ATTENTION(q, k, v, others, self.wanted, *self.numbers)

    def backward(self, arriving: Tensors, kept: Tensors, given: Tensors) -> list[torch.Tensor]:
        q, k, v, *others = given
        with _below():
            return BACKWARD(*arriving, q, k, v, others, *kept, self.wanted, *self.numbers)

    def tangent(self, given: Tensors, moved: Tensors) -> tuple[torch.Tensor, ...]:
        q, k, v, *others = given
        with _below():
            return TANGENT(q, k, v, others, _there(given, moved), self.wanted, *self.numbers)

    def second(self, arriving: Tensors, given: Tensors, moved: Tensors, along: bool) -> list[torch.Tensor]:
        q, k, v, *others = given
        with _below():
            return SECOND(*arriving, q, k, v, others, _there(given, moved), along, self.wanted, *self.numbers)


class Prepared:
    """The same of an eager call. needs: which of its tensors have a gradient."""

    def __init__(self, call: PreparedCall, needs: Sequence[bool]):
        self.call, self.needs = call, tuple(needs)
        self.wanted = sum(bool(need) << i for i, need in enumerate(self.needs))

    def wanting(self, wanted: int) -> Prepared:
        return Prepared(self.call, [bool(wanted >> i & 1) for i in range(len(self.needs))])

    def split(self, tensors: Tensors) -> tuple[Any, list[Any]]:
        """(packs, others)."""
        count = len(self.call.packing.packs)
        return tuple(tensors[:count]), list(tensors[3:])

    def backward(self, arriving: Tensors, kept: Tensors, given: Tensors) -> list[torch.Tensor]:
        packs, others = self.split(given)
        with torch.no_grad():
            saved, (dout, dlse) = (*packs, *others, *(t for t in kept if t is not None)), arriving
            found = self.call.gradients(saved, dout, dlse, self.needs)
        return self.wished(found, (*packs, *others))

    def tangent(self, given: Tensors, moved: Tensors) -> tuple[torch.Tensor, ...]:
        packs, others = self.split(given)
        with torch.no_grad():
            return tangents(self.call, packs, others, [t for some in self.split(moved) for t in some])

    def second(self, arriving: Tensors, given: Tensors, moved: Tensors, along: bool) -> list[torch.Tensor]:
        packs, others = self.split(given)
        direction = [t for some in self.split(moved) for t in some]
        named: dict[str, Maybe] = dict(zip(("dout", "dlse", "tdout", "tdlse"), arriving, strict=True))
        with torch.no_grad():
            found = second_derivatives(self.call, packs, others, direction, named, self.needs, along)
        count = len(self.needs)
        return [*self.wished(found[:count], (*packs, *others)), *(t for t in found[count:] if t is not None)]

    def wished(self, found: Sequence[Maybe], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those that are needed; the gradient of what nothing depends on is zero."""
        pairs = zip(found, inputs, self.needs, strict=True)
        return [torch.zeros_like(t) if g is None else g for g, t, need in pairs if need]


def _below() -> Any:
    """Operators are run below autograd, which a Function stands for; or at the next of torch.func's levels."""
    return nullcontext() if transforms() else below_autograd()


def _there(given: Tensors, moved: Tensors) -> list[Maybe]:
    """The tangents of those tensors that are there."""
    return [t for tensor, t in zip(given, moved, strict=True) if tensor is not None]


def requires_grad_below(tensor: torch.Tensor) -> bool:
    """Whether any of the tensors that the transforms have wrapped in one another requires a gradient."""
    inside: Any = torch._C
    inside = inside._functorch
    while inside.is_functorch_wrapped_tensor(tensor):
        tensor = inside.get_unwrapped(tensor)
        if tensor.requires_grad:
            return True
    return False


@eagerly  # where graphs have ended, torch.compile would trace what runs behind operators, too
def attend_transformed(q: torch.Tensor, k: Maybe, v: Maybe, others: list[torch.Tensor], *asked: Any) -> Any:
    """(out, lse, residual), as the operator gives them; of duals of the innermost level without residual."""
    runs, given = Asked(*asked), (q, k, v, *others)
    if makes_duals():
        duals = [(None, None) if t is None else forward_ad.unpack_dual(t) for t in given]
        if any(tangent is not None for _, tangent in duals):
            if not transforms() and is_mapped(tangent for _, tangent in duals):
                reason = "vectorize maps in torch's old way; use torch.func.jacfwd, or torch.func.vmap of torch.func.jvp"
                raise _refuse("a batch of tangents", runs, reason)
            runs.duals = () if transforms() else given
            made: Any = _Dual.apply(runs, *(t for t, _ in duals), *(t for _, t in duals))
            out, lse, tout, tlse = made
            return forward_ad.make_dual(out, tout), forward_ad.make_dual(lse, tlse), None
    return _FunctionalAttention.apply(runs, *given)


def makes_duals() -> bool:
    """Whether forward mode is what is innermost: of torch.func's transforms, or by itself."""
    if not transforms():
        return is_dual_level()
    inside: Any = torch._C
    return inside._functorch.peek_interpreter_stack().key() == inside._functorch.TransformType.Jvp


def gradients(runs: Any, arriving: Tensors, kept: Tensors, packs: Tensors, others: Tensors) -> Any:
    """The gradients of packs and others, None where not wanted, differentiable. kept: out, lse and what else there is."""
    out, lse, residual = (*kept, None)[:3]
    made = _Backward.apply(runs, *arriving, out, lse, residual, *spread(packs), *others)
    return _placed(runs, [*packs, *others], made)


def _placed(runs: Any, given: Tensors, made: Any) -> list[Maybe]:
    """Gradients in the places of the tensors that they belong to; the i-th of those that are there has the i-th bit."""
    found, index, placed = iter(made), 0, list[Maybe]()
    for tensor in given:
        placed.append(next(found) if tensor is not None and runs.wanted >> index & 1 else None)
        index += tensor is not None
    return placed


def _refuse(what: str, runs: Any, reason: str) -> NotSupported:
    backend = runs.call.plan.backend if isinstance(runs, Prepared) else "torch.func"
    return NotSupported(f"{what} of attention", {backend: [reason]})


class _FunctionalAttention(torch.autograd.Function):
    """(out, lse, residual)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(runs: Any, *given: Maybe) -> Any:
        return runs.forward(given)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.runs = inputs[0]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[1:], *output)
        ctx.save_for_forward(*inputs[1:], *output)

    @staticmethod
    def backward(ctx: Any, *arriving: Maybe) -> Any:
        *given, out, lse, residual = ctx.saved_tensors
        if arriving[0] is None and arriving[1] is None:
            return (None,) * (1 + len(given))
        made = _Backward.apply(ctx.runs, *arriving[:2], out, lse, residual, *given)
        return None, *_placed(ctx.runs, given, made)

    @staticmethod
    def jvp(ctx: Any, *moved: Maybe) -> Any:
        *given, out, lse, residual = ctx.saved_tensors
        tout, tlse = _Tangent.apply(ctx.runs, out, lse, residual, *given, *moved[1:])  # pyright: ignore[reportGeneralTypeIssues]
        return tout, tlse, torch.zeros_like(residual)  # within vmap no output may be without


class _Backward(torch.autograd.Function):
    """The gradients that are wanted, as a function of dout, dlse and the inputs; out and lse are functions of the latter."""

    generate_vmap_rule = True

    @staticmethod
    def forward(runs: Any, dout: Maybe, dlse: Maybe, out: Maybe, lse: Maybe, residual: Maybe, *given: Maybe) -> Any:
        return tuple(runs.backward((dout, dlse), (out, lse, residual), given))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.runs = inputs[0]
        ctx.set_materialize_grads(False)
        kept = *inputs[1:3], *inputs[6:]
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)

    @staticmethod
    def backward(ctx: Any, *grads: Maybe) -> Any:
        dout, dlse, *given = ctx.saved_tensors
        if all(g is None for g in grads):
            return (None,) * (6 + len(given))
        if isinstance(ctx.runs, Prepared) and is_mapped(grads):
            raise _refuse("a batch of second derivatives", ctx.runs, "take one after another, or torch.func.hessian")
        moved, found, tout, tlse = _placed(ctx.runs, given, grads), (), None, None
        along = any(ctx.needs_input_grad[1:3])
        if any(ctx.needs_input_grad[6:]):
            made: Any = _Second.apply(ctx.runs, along, dout, dlse, None, None, *given, *moved)
            found, (tout, tlse) = (made[:-2], made[-2:]) if along else (made, (None, None))
        elif along:
            try:
                tout, tlse = _Tangent.apply(ctx.runs, None, None, None, *given, *moved)  # pyright: ignore[reportGeneralTypeIssues]
            except NotSupported as error:  # it is no tangent that was asked for
                raise NotSupported("the second derivative of attention", error.reasons) from None
        arriving = None if dout is None else tout, None if dlse is None else tlse
        second = _placed(ctx.runs, given, found) if found else [None] * len(given)
        return None, *arriving, None, None, None, *second

    @staticmethod
    def jvp(ctx: Any, *moved: Maybe) -> Any:
        dout, dlse, *given = ctx.saved_tensors
        return _Second.apply(ctx.runs, False, dout, dlse, *moved[1:3], *given, *moved[6:])


class _Tangent(torch.autograd.Function):
    """The tangents of out and lse, as a function of the inputs and of their tangents."""

    generate_vmap_rule = True

    @staticmethod
    def forward(runs: Any, out: Maybe, lse: Maybe, residual: Maybe, *given: Maybe) -> Any:
        count = len(given) // 2
        return runs.tangent(given[:count], given[count:])[2:]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.runs = inputs[0]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])  # for torch.func, which takes them apart before `jvp` refuses

    @staticmethod
    def backward(ctx: Any, *grads: Maybe) -> Any:
        runs, (out, lse, residual, *rest) = ctx.runs, ctx.saved_tensors
        given, moved = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        if grads[0] is None and grads[1] is None:
            return (None,) * (4 + len(rest))
        if out is None:
            raise _refuse("the third derivative", runs, "derivatives of second derivatives are not implemented")
        second = _placed(runs, given, _Second.apply(runs, False, *grads, None, None, *given, *moved))
        linear = runs.wanting(_bits(given, moved))
        first = _placed(linear, given, _Backward.apply(linear, *grads, out, lse, residual, *given))
        return None, None, None, None, *second, *first

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _tangents_twice(ctx.runs)


def _bits(given: Tensors, moved: Tensors) -> int:
    """Which of the tensors that are there have a tangent."""
    bits, index = 0, 0
    for tensor, tangent in zip(given, moved, strict=True):
        bits |= (tangent is not None) << index
        index += tensor is not None
    return bits


def _tangents_twice(runs: Any) -> NotSupported:
    reason = "tangents of tangents are not implemented; use reverse mode over forward mode, or torch.func.hessian"
    return _refuse("forward-mode differentiation of forward-mode differentiation", runs, reason)


class _Dual(torch.autograd.Function):
    """(out, lse, their tangents) in one pass, as a function of the inputs and of their tangents."""

    generate_vmap_rule = True

    @staticmethod
    def forward(runs: Any, *given: Maybe) -> Any:
        count = len(given) // 2
        return runs.tangent(given[:count], given[count:])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.runs = inputs[0]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[1:], *output[:2])
        ctx.save_for_forward(*inputs[1:])  # for torch.func, which takes them apart before `jvp` refuses

    @staticmethod
    def backward(ctx: Any, *grads: Maybe) -> Any:
        runs, (*rest, out, lse) = ctx.runs, ctx.saved_tensors
        given, moved = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        arriving, along = grads[:2], grads[2:]
        if all(g is None for g in grads):
            return (None,) * (1 + len(rest))

        def first(runs: Any, arriving: Tensors, at: Tensors) -> list[Maybe]:
            kept = (out, lse, out.new_empty(0))
            if out.dtype is torch.float32:  # whose backward wants more of its forward
                kept = _FunctionalAttention.apply(runs, *given)
            return _placed(runs, given, _Backward.apply(runs, *arriving, *kept, *at))

        if all(g is None for g in along):
            return None, *first(runs, arriving, runs.duals or given), *(None for _ in moved)
        second = _placed(runs, given, _Second.apply(runs, False, *along, *arriving, *given, *moved))
        return None, *second, *first(runs.wanting(_bits(given, moved)), along, given)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _tangents_twice(ctx.runs)


class _Second(torch.autograd.Function):
    """How the gradients that are wanted change along a direction, and if `along` out and lse; the end of the chain."""

    generate_vmap_rule = True

    @staticmethod
    def forward(runs: Any, along: bool, dout: Maybe, dlse: Maybe, tdout: Maybe, tdlse: Maybe, *given: Maybe) -> Any:
        count = len(given) // 2
        return tuple(runs.second((dout, dlse, tdout, tdlse), given[:count], given[count:], along))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.runs = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Maybe) -> Any:
        raise _third(ctx.runs)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _third(ctx.runs)


def _third(runs: Any) -> NotSupported:
    reason = "derivatives of second derivatives are not implemented; for a product with a Hessian use "
    return _refuse("the third derivative", runs, reason + "torch.autograd.functional.vhp, or torch.func.jvp of torch.func.grad")


# -- vmap -----------------------------------------------------------------------------------------------------------------


def _folds(text: str, others: list[Any]) -> bool:
    """Whether mapped calls are one call of a larger batch."""
    return not read(text).varlen and not others


def _fold(tensor: Maybe, axis: int | None, count: int) -> Maybe:
    """(count, batch, ...) as (count * batch, ...)."""
    if tensor is None:
        return None
    tensor = tensor.expand(count, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
    return tensor.flatten(0, 1)


def _at(tensor: Maybe, axis: int | None, index: int) -> Maybe:
    return tensor if tensor is None or axis is None else tensor.select(axis, index)


def one_by_one(operator: Any, count: int, dims: tuple[Any, ...], args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The operator's outputs for each index of the mapped axes, stacked."""
    results = []
    for i in range(count):
        given = [
            [_at(t, d, i) for t, d in zip(arg, dim, strict=True)] if isinstance(dim, (list, tuple)) else _at(arg, dim, i)
            for arg, dim in zip(args, dims, strict=True)
        ]
        results.append(operator(*given))
    return [torch.stack(made) for made in zip(*results, strict=True)]


def _map_attention(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    count = info.batch_size
    if not _folds(args[5], args[3]):
        made = one_by_one(ATTENTION, count, in_dims, args)
    else:
        packs = [_fold(t, d, count) for t, d in zip(args[:3], in_dims[:3], strict=True)]
        out, lse, residual = ATTENTION(*packs, *args[3:])
        residual = residual.unflatten(0, (count, -1)) if residual.numel() else residual.expand(count, 0)
        made = [out.unflatten(0, (count, -1)), lse.unflatten(0, (count, -1)), residual]
    return tuple(made), (0,) * 3


def _map_backward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    count = info.batch_size
    if not _folds(args[10], args[5]):
        made = one_by_one(BACKWARD, count, in_dims, args)
    else:
        folded = [_fold(t, d, count) for t, d in zip(args[:5], in_dims[:5], strict=True)]
        kept = [_fold(t, d, count) for t, d in zip(args[6:8], in_dims[6:8], strict=True)]
        residual = args[8].flatten() if args[8].numel() == 0 else _fold(args[8], in_dims[8], count)
        made = [g.unflatten(0, (count, -1)) for g in BACKWARD(*folded, args[5], *kept, residual, *args[9:])]
    return made, [0] * len(made)


torch.library.register_vmap(f"{NAMESPACE}::attention", _map_attention, lib=LIBRARY)
torch.library.register_vmap(f"{NAMESPACE}::attention_backward", _map_backward, lib=LIBRARY)


def map_one_by_one(operator: Any, name: str, outputs: int | None) -> None:
    """vmap runs the operator of that name for one index after another; `outputs`: how many, None for a list of them."""

    def mapped(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        made = one_by_one(operator, info.batch_size, in_dims, args)
        return (made, [0] * len(made)) if outputs is None else (tuple(made), (0,) * outputs)

    torch.library.register_vmap(f"{NAMESPACE}::{name}", mapped, lib=LIBRARY)


map_one_by_one(TANGENT, "attention_tangent", 4)
map_one_by_one(SECOND, "attention_second", None)
