"""Runs ops that are not attention: one way for all of them, eager, differentiated and under torch.compile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.autograd import forward_ad

from flashtile.errors import InvalidProblem, NotSupported
from flashtile.kernels.ops.catalogue import OPS
from flashtile.torch.call.stored import check_resolved
from flashtile.torch.execute.bound import check_device
from flashtile.torch.execute.plain import autocasts, is_distributed, is_traced, is_wrapped
from flashtile.torch.ops import formula
from flashtile.torch.ops.call import (
    AS_IT_IS,
    NAMES,
    Call,
    Maybe,
    arrive,
    make_problem,
    recall,
    remember,
    wanted_of,
)
from flashtile.torch.ops.operator import COMPANION, write
from flashtile.torch.routes.derivatives import (
    NOTHING,
    each_gradient,
    first_derivatives,
    is_dual_level,
    is_mapped,
    refuse_tangents,
)

Given = Mapping[str, Maybe]


def run(
    op: str, given: Given, options: dict[str, Any], backend: str | None = None, called: Mapping[str, str] = AS_IT_IS
) -> tuple[torch.Tensor, ...]:
    """What the op's forward gives its caller, differentiable in what its kind calls differentiable.

    given: the op's tensors in the order of its kind's, None for those that are not there.
    called: the caller's names of tensors and options, where they are not the op's, which errors say.
    """
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    if formula.goes_beyond():
        made = _by_formula(op, tensors, options, called)
        if made is not None:
            return made
    if is_traced(*tensors.values()):
        check_tensors(tensors, called)
        if any(t.dtype not in NAMES for t in tensors.values()):
            make_problem(op, tensors, options, called)  # which says what is wrong, before the operator
        return tuple(COMPANION(list(tensors.values()), *write(op, tensors, options, backend, called)))
    call = prepare(op, tensors, options, backend, called)
    if call.wanted:
        made = _apply(call, *tensors.values())
        return made[:-1] if call.hides else made
    made = call.forward(tensors)
    for source in call.overwritten.values():  # launches tell nobody what they write
        torch.autograd.graph.increment_version(tensors[source])
    return tuple([made[name] for name in call.public])


def _by_formula(
    op: str, tensors: dict[str, torch.Tensor], options: dict[str, Any], called: Mapping[str, str]
) -> tuple[torch.Tensor, ...] | None:
    """What `run` returns, of tensors that may have tangents; None where none has, or where there is no formula."""
    if not any(is_wrapped(t) or forward_ad.unpack_dual(t).tangent is not None for t in tensors.values()):
        return None
    check_tensors(tensors, called)
    return formula.forward(OPS[op], make_problem(op, tensors, options, called), tensors)


def check_tensor(name: str, tensor: Any) -> None:
    """Raise InvalidProblem unless this is a dense tensor, of which views can be made; `run` checks the rest."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidProblem(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor.")
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise InvalidProblem(f"{name} has layout {tensor.layout}; it must be a strided, dense tensor.")


def check_tensors(tensors: Mapping[str, Any], called: Mapping[str, str] = AS_IT_IS) -> None:
    """Raise InvalidProblem unless these are dense tensors on the device of the first; their problem knows the dtypes.

    NotSupported for DTensors.
    """
    device = None
    for name, tensor in tensors.items():
        name = called.get(name, name)
        check_tensor(name, tensor)
        device = tensor.device if device is None else device
        if is_distributed(tensor):
            reason = "what shards make of each other is not known; give it to_local(), and DTensor.from_local what comes back"
            raise NotSupported(f"an op on {name}, a DTensor", {"torch": [reason]})
        check_resolved(name, tensor)
        check_device(name, tensor.device)
        if tensor.device != device:
            raise InvalidProblem(f"{name} is on {tensor.device} and others are on {device}; they must be on one device.")


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as (rows, last axis): a view where its strides allow one."""
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def autocast(*factors: Maybe) -> tuple[Any, ...]:
    """What is multiplied, in autocast's dtype where it is enabled: by the rule of torch's own linear."""
    kind = next(t.device.type for t in factors if t is not None)
    if not (autocasts() and torch.is_autocast_enabled(kind)):  # the latter knows not every device
        return factors
    dtype = torch.get_autocast_dtype(kind)
    casts = (t is not None and t.is_floating_point() and t.dtype is not torch.float64 for t in factors)
    return tuple(t.to(dtype) if t is not None and cast else t for t, cast in zip(factors, casts, strict=True))


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *inputs: torch.Tensor) -> Any:
        made = call.forward(dict(zip(call.names, inputs, strict=True)))
        hidden = (NOTHING.detach(),) if call.hides else ()
        ctx.save_for_backward(*[made[name] for name in call.kept], *hidden)
        ctx.call = call
        ctx.set_materialize_grads(False)
        if call.constant:
            ctx.mark_non_differentiable(*[made[name] for name in call.constant])
        if call.dirty:
            ctx.mark_dirty(*[made[name] for name in call.dirty])
        for name, source in call.overwritten.items():  # whoever kept that input for a backward of its own hears of it
            if name not in call.dirty:
                torch.autograd.graph.increment_version(made[source])
        return (*[made[name] for name in call.public], *hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Maybe) -> Any:
        call: Call = ctx.call
        if torch.is_grad_enabled() or is_dual_level():  # create_graph, or forward mode
            saved = dict(zip(call.kept, ctx.saved_tensors, strict=False))
            arriving = dict[str, torch.Tensor]()
            arrive(arriving, call.arrivals, grads, call.device)
            found = None if is_mapped(grads) else formula.gradients(call.op, call.problem, saved, arriving, call.wanted)
            if found is not None:
                return None, *(None if name is None else found[name] for name in call.gradients)
        if is_dual_level():
            refuse_tangents(call.problem, call.backend, zip(call.public, grads, strict=False))
        if is_mapped(grads):
            if call.consumes:
                reason = "a backward writes over what the forward kept; ask for eager_gradient=False and inplace=False"
                raise NotSupported(f"a batch of gradients of {call.problem.spell()}", {call.backend: [reason]})
            saved = ctx.saved_tensors

            def differentiate(*some: Maybe) -> list[Maybe]:
                tensors = dict(zip(call.kept, saved, strict=False))
                arrive(tensors, call.arrivals, some, call.device)
                call.backward(tensors)
                return [None if name is None else tensors[name] for name in call.gradients]

            return None, *each_gradient(call.problem, call.backend, differentiate, grads[: len(call.public)])
        if call.consumes:
            if getattr(ctx, "consumed", False):
                reason = "its backward wrote over what the forward had kept; ask for eager_gradient=False and inplace=False"
                raise NotSupported(f"a second backward of {call.problem.spell()}", {call.backend: [reason]})
            ctx.consumed = True
        saved = ctx.saved_tensors
        tensors = dict(zip(call.kept, saved, strict=False))  # what is hidden comes behind them
        arrive(tensors, call.arrivals, grads, call.device)
        if torch.is_grad_enabled():  # create_graph
            with torch.no_grad():
                call.backward(tensors)
        else:
            call.backward(tensors)
        for name in call.consumes:
            torch.autograd.graph.increment_version(tensors[name])
        given = tuple([None if name is None else tensors[name] for name in call.gradients])
        remedy = formula.remedy(call.op, call.problem, call.kept)
        return None, *first_derivatives(call.problem, call.backend, given, saved, grads, remedy=remedy)


# What `Function.apply` comes to outside of torch.func's transforms: calls within them have gone to the operator.
_apply: Any = super(torch.autograd.Function, _Differentiable).apply  # pyright: ignore[reportAttributeAccessIssue]
_alive: Any = torch._C._functorch.unwrap_if_dead  # pyright: ignore[reportAttributeAccessIssue] (of what outlived a transform)


def prepare(
    op: str, tensors: dict[str, torch.Tensor], options: dict[str, Any], backend: str | None,
    called: Mapping[str, str] = AS_IT_IS,
) -> Call:  # fmt: skip
    """The call of these arguments. Everything is validated at first sight of a layout. called: as in `run`.

    Of tensors that outlived torch.func's transforms what was in them takes their place in `tensors`. NotSupported for tensors
    of transforms that go on: `run` hands those to the operator.
    """
    differentiates = torch.is_grad_enabled()
    parts: list[Any] = [op, backend, *options, *options.values(), *map(type, options.values())]
    try:
        for name, t in tensors.items():
            parts += (
                name, t.shape, t.dtype, t.device, t.is_neg(), differentiates and t.requires_grad, t.stride(), t.data_ptr() & 15,
            )  # fmt: skip
    except (AttributeError, RuntimeError):
        check_tensors(tensors, called)  # which says what is wrong
        wrapped = [name for name, t in tensors.items() if is_wrapped(t)]
        for name in wrapped:
            tensors[name] = _alive(tensors[name])
            if is_wrapped(tensors[name]):
                reason = "this pass alone knows nothing of them; use the function that autograd differentiates"
                what = f"{op} of {called.get(name, name)} within torch.func's transforms"
                raise NotSupported(what, {"torch": [reason]}) from None
        if not wrapped:
            raise
        return prepare(op, tensors, options, backend, called)
    key: Any = tuple(parts)
    try:
        call = recall(key)
    except TypeError:  # an option is not hashable: let validation say what is wrong
        key, call = None, None
    if call is None:
        check_tensors(tensors, called)
        kind, problem = OPS[op].kind, make_problem(op, tensors, options, called)
        assert list(tensors) == [name for name in kind.tensors if name in tensors]
        wanted = frozenset(wanted_of(op, tensors, called))
        call = Call(problem, next(iter(tensors.values())).device, backend, wanted)
        if key is not None and not any(isinstance(v, torch.Tensor) for v in options.values()):  # whose numbers may change
            remember(key, call)
    if is_dual_level() and (call.wanted or call.backend != "cpu"):  # which computes in PyTorch, with tangents
        refuse_tangents(op, call.backend, ((called.get(name, name), t) for name, t in tensors.items()))
    return call
