"""Attention as functions that PyTorch differentiates in every way, twice too, and the operators with their rules for autograd.

Functions call each other's passes: `_FunctionalAttention`, its gradients `_Backward`, its tangents `_Tangent`, and `_Dual`,
which has out and its tangent of one pass. What a second derivative needs is `_Second`, which ends the chain: a third one is
refused by name. Each takes what runs it: `Asked` (the operators, with what they are asked), `Prepared` (an eager call) or
`Recorded` (an operator by its own kernel for autograd, as in a compiled graph); they have the same methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from flashtile.errors import NotSupported
from flashtile.torch.execute.directed import second_derivatives, tangents
from flashtile.torch.execute.eagerly import eagerly
from flashtile.torch.execute.plain import transforms
from flashtile.torch.execute.prepared import PreparedCall
from flashtile.torch.routes.derivatives import (
    A_GRAPH_HAS_ITS_OWN,
    apart,
    is_dual_level,
    is_jvp,
    is_mapped,
    joined,
    record_at_level,
)
from flashtile.torch.routes.library import define
from flashtile.torch.routes.operator import (
    ASKED,
    GIVEN,
    Maybe,
    below_autograd,
    fake_backward,
    fake_forward,
    fake_second,
    fake_tangent,
    residual_shape,
    run_backward,
    run_forward,
    run_second,
    run_tangent,
    spread,
)
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
        return type(self)(wanted, *self.numbers)

    def apply(self, function: type[torch.autograd.Function], *given: Any) -> Any:
        """The function of this, and of tensors."""
        return function.apply(self, *given)

    def below(self) -> Any:
        """Where operators run: below autograd, which a Function stands for; or at the next of torch.func's levels."""
        return nullcontext() if transforms() else below_autograd()

    def forward(self, given: Tensors) -> tuple[torch.Tensor, ...]:
        q, k, v, *others = given
        with self.below():
            return ATTENTION(q, k, v, others, self.wanted, *self.numbers)

    def backward(self, arriving: Tensors, kept: Tensors, given: Tensors) -> list[torch.Tensor]:
        q, k, v, *others = given
        with self.below():
            return BACKWARD(*arriving, q, k, v, others, *kept, self.wanted, *self.numbers)

    def tangent(self, given: Tensors, moved: Tensors) -> tuple[torch.Tensor, ...]:
        q, k, v, *others = given
        with self.below():
            return TANGENT(q, k, v, others, _there(given, moved), self.wanted, *self.numbers)

    def second(self, arriving: Tensors, given: Tensors, moved: Tensors, along: bool) -> list[torch.Tensor]:
        q, k, v, *others = given
        with self.below():
            return SECOND(*arriving, q, k, v, others, _there(given, moved), along, self.wanted, *self.numbers)


class Prepared:
    """The same of an eager call. needs: which of its tensors have a gradient."""

    def __init__(self, call: PreparedCall, needs: Sequence[bool]):
        self.call, self.needs = call, tuple(needs)
        self.wanted = sum(bool(need) << i for i, need in enumerate(self.needs))

    def apply(self, function: type[torch.autograd.Function], *given: Any) -> Any:
        return function.apply(self, *given)

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


class Recorded(Asked):
    """The same within an operator, whose kernel for autograd records it at one of torch.func's levels.

    It knows what wants a gradient at its own level; a derivative of gradients may be by a tensor that has none of them.
    """

    def apply(self, function: Any, *given: Any) -> Any:
        """What the function computes, by operators, which record it themselves."""
        return function.forward(_Here(self.wanted, *self.numbers), *given)

    def below(self) -> Any:
        return below_autograd()


class _Here(Asked):
    """Operators that are called as they are: their own kernels for autograd come next."""

    def below(self) -> Any:
        return nullcontext()


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
    if is_jvp() if transforms() else is_dual_level():
        primals, moved = apart(given)
        if any(tangent is not None for tangent in moved):
            if not transforms() and is_mapped(moved):
                reason = "vectorize maps in torch's old way; use torch.func.jacfwd, or torch.func.vmap of torch.func.jvp"
                raise _refuse("a batch of tangents", runs, reason)
            runs.duals = () if transforms() else given
            made: Any = _Dual.apply(runs, *primals, *moved)
            out, lse, tout, tlse = made
            return joined(out, tout), joined(lse, tlse), None
    return runs.apply(_FunctionalAttention, *given)


def gradients(runs: Any, arriving: Tensors, kept: Tensors, packs: Tensors, others: Tensors) -> Any:
    """The gradients of packs and others, None where not wanted, differentiable. kept: out, lse and what else there is."""
    out, lse, residual = (*kept, None)[:3]
    made = runs.apply(_Backward, *arriving, out, lse, residual, *spread(packs), *others)
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
        made = ctx.runs.apply(_Backward, *arriving[:2], out, lse, residual, *given)
        return None, *_placed(ctx.runs, given, made)

    @staticmethod
    def jvp(ctx: Any, *moved: Maybe) -> Any:
        *given, out, lse, residual = ctx.saved_tensors
        tout, tlse = ctx.runs.apply(_Tangent, out, lse, residual, *given, *moved[1:])  # pyright: ignore[reportGeneralTypeIssues]
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
        along, needs = any(ctx.needs_input_grad[1:3]), ctx.needs_input_grad[6:]
        runs = ctx.runs.wanting(_bits(given, [need or None for need in needs])) if isinstance(ctx.runs, Recorded) else ctx.runs
        if any(needs):
            made: Any = runs.apply(_Second, along, dout, dlse, None, None, *given, *moved)
            found, (tout, tlse) = (made[:-2], made[-2:]) if along else (made, (None, None))
        elif along:
            try:
                tout, tlse = ctx.runs.apply(_Tangent, None, None, None, *given, *moved)  # pyright: ignore[reportGeneralTypeIssues]
            except NotSupported as error:  # it is no tangent that was asked for
                raise NotSupported("the second derivative of attention", error.reasons) from None
        arriving = None if dout is None else tout, None if dlse is None else tlse
        second = _placed(runs, given, found) if found else [None] * len(given)
        return None, *arriving, None, None, None, *second

    @staticmethod
    def jvp(ctx: Any, *moved: Maybe) -> Any:
        dout, dlse, *given = ctx.saved_tensors
        return ctx.runs.apply(_Second, False, dout, dlse, *moved[1:3], *given, *moved[6:])


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
        second = _placed(runs, given, runs.apply(_Second, False, *grads, None, None, *given, *moved))
        linear = runs.wanting(_bits(given, moved))
        first = _placed(linear, given, linear.apply(_Backward, *grads, out, lse, residual, *given))
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
        ctx.save_for_forward(*inputs[1:], *output[:2])  # for torch.func, whose vmap takes both for one list

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
                kept = runs.apply(_FunctionalAttention, *given)
            return _placed(runs, given, runs.apply(_Backward, *arriving, *kept, *at))

        if all(g is None for g in along):
            return None, *first(runs, arriving, runs.duals or given), *(None for _ in moved)
        second = _placed(runs, given, runs.apply(_Second, False, *along, *arriving, *given, *moved))
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


# -- operators ------------------------------------------------------------------------------------------------------------


def wanting(wanted: int, text: str, packs: Tensors, others: list[torch.Tensor]) -> int:
    """Of which tensors there are gradients to be: of those that ask for one at this level, too.

    Within torch.func's transforms, where torch.compile traces them, a call does not know which of its tensors want a gradient.
    """
    for i, tensor in enumerate((*(t for t in packs if t is not None), *others[: read(text).captured])):
        wanted |= int(tensor.requires_grad) << i
    return wanted


def _record(q: torch.Tensor, k: Maybe, v: Maybe, others: list[torch.Tensor], wanted: int, text: str, *numbers: Any) -> Any:
    runs = Recorded(wanting(wanted, text, (q, k, v), others), text, *numbers)
    return record_at_level(_FunctionalAttention, runs, q, k, v, *others)


def _record_backward(
    dout: Maybe, dlse: Maybe, q: torch.Tensor, k: Maybe, v: Maybe, others: list[torch.Tensor],
    out: torch.Tensor, lse: torch.Tensor, residual: torch.Tensor, *asked: Any,
) -> list[torch.Tensor]:  # fmt: skip
    return list(record_at_level(_Backward, Recorded(*asked), dout, dlse, out, lse, residual, q, k, v, *others))


def _record_tangent(
    q: torch.Tensor, k: Maybe, v: Maybe, others: list[torch.Tensor], moved: list[Maybe], wanted: int, text: str, *numbers: Any
) -> Any:
    given = (q, k, v, *others)
    runs = Recorded(wanting(wanted, text, (q, k, v), others), text, *numbers)
    return record_at_level(_Dual, runs, *given, *_moved(given, moved))


def _record_second(
    dout: Maybe, dlse: Maybe, tdout: Maybe, tdlse: Maybe, q: torch.Tensor, k: Maybe, v: Maybe, others: list[torch.Tensor],
    moved: list[Maybe], along: bool, *asked: Any,
) -> list[torch.Tensor]:  # fmt: skip
    given = (q, k, v, *others)
    return list(record_at_level(_Second, Recorded(*asked), along, dout, dlse, tdout, tdlse, *given, *_moved(given, moved)))


def _moved(given: Tensors, there: list[Maybe]) -> list[Maybe]:
    """Tangents in the places of the tensors that they belong to."""
    tangents = iter(there)
    return [None if t is None else next(tangents) for t in given]


def _move(q: torch.Tensor, k: Maybe, v: Maybe, others: list[torch.Tensor], *asked: Any) -> Any:
    """The operator's outputs, with the tangents that its inputs bring."""
    given, moved = apart((q, k, v, *others))
    q, k, v, *others = given
    out, lse, tout, tlse = TANGENT(q, k, v, others, _there(given, moved), *asked)
    return joined(out, tout), joined(lse, tlse), out.new_zeros(residual_shape(lse.shape, out.dtype), dtype=torch.float32)


def _move_backward(
    dout: Maybe, dlse: Maybe, q: torch.Tensor, k: Maybe, v: Maybe, others: list[torch.Tensor],
    out: torch.Tensor, lse: torch.Tensor, residual: torch.Tensor, *asked: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """Gradients with their tangents. out and lse are functions of the inputs, whose tangents say theirs."""
    (dout, dlse, *given), (tdout, tdlse, *moved) = apart((dout, dlse, q, k, v, *others))
    (q, k, v, *others), (kept, _) = given, apart((out, lse, residual))
    if out.dtype is torch.float32:  # `_move` has no residual
        kept = ATTENTION(q, k, v, others, *asked)
    found = BACKWARD(dout, dlse, q, k, v, others, *kept, *asked)
    tangents = SECOND(dout, dlse, tdout, tdlse, q, k, v, others, _there(given, moved), False, *asked)
    return list(map(joined, found, tangents))


ATTENTION = define(
    f"attention({GIVEN}{ASKED}) -> (Tensor, Tensor, Tensor)", run_forward, fake_forward, _record, remedy=A_GRAPH_HAS_ITS_OWN,
    moved=_move,
)  # fmt: skip
BACKWARD = define(
    f"attention_backward(Tensor? dout, Tensor? dlse, {GIVEN}Tensor out, Tensor lse, Tensor residual, {ASKED}) -> Tensor[]",
    run_backward, fake_backward, _record_backward, remedy=A_GRAPH_HAS_ITS_OWN, moved=_move_backward,
)  # fmt: skip
TANGENT = define(
    f"attention_tangent({GIVEN}Tensor?[] moved, {ASKED}) -> (Tensor, Tensor, Tensor, Tensor)",
    run_tangent, fake_tangent, _record_tangent,
)  # fmt: skip
SECOND = define(
    f"attention_second(Tensor? dout, Tensor? dlse, Tensor? tdout, Tensor? tdlse, {GIVEN}Tensor?[] moved, bool tangents, "
    f"{ASKED}) -> Tensor[]",
    run_second, fake_second, _record_second,
)  # fmt: skip
