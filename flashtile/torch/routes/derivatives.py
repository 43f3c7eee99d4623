"""What says so where it is to be differentiated in a way that is not implemented: gradients again, or forward-mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from flashtile.errors import NotSupported
from flashtile.plan.call import Problem
from flashtile.torch.execute.inference_safe import lasting
from flashtile.torch.execute.plain import is_compiling, is_wrapped, transforms

# What torch.compile and dispatch modes see of a call.
AN_OPERATOR_HAS_NONE = (
    "an operator of torch.library has none: call outside of dispatch modes, and of torch.compile, without its fullgraph=True "
    "or under torch.compiler.set_stance('force_eager')"
)
A_GRAPH_HAS_ITS_OWN = "a compiled function has those of a torch.func.jvp that is called within it"
NOTHING = lasting(torch.empty)(0, device="cpu")  # whose views are cheaper to make than tensors


def first_derivatives(
    what: str | Problem, backend: str, given: tuple[torch.Tensor | None, ...], *sources: Sequence[torch.Tensor | None],
    remedy: str = "",
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """The gradients of `what`. Whoever differentiates them (create_graph) hears that it is not possible, and gets no zero.

    sources: what they were computed from, saved and arriving tensors: torch.autograd.grad visits no node that does not lead to
    what it was asked for. A Function that saves nothing which leads to some input that matters, as a norm's residual, gives
    out one tensor more, without elements and hidden from its caller, and saves that: it leads to all inputs.
    remedy: what the refusal says besides.
    """
    if not torch.is_grad_enabled():
        return given
    made = [g for g in given if g is not None]
    if not made:
        return given
    behind = [t for some in sources for t in some]
    refusing = iter(_FirstDerivative.apply((what, backend, remedy), len(made), *(g.requires_grad_() for g in made), *behind))
    return tuple(None if g is None else next(refusing) for g in given)


def record_at_level(function: type[torch.autograd.Function], *given: Any) -> Any:
    """`function.apply`, of the one level at which tensors have arrived within torch.func's transforms, where there are any.

    For Functions with a `ctx` in their forward, which torch.func does not take apart by itself.
    """
    if not transforms():
        return function.apply(*given)
    with enable_single_level_autograd_function():
        return super(torch.autograd.Function, function).apply(*given)  # pyright: ignore[reportAttributeAccessIssue]


class _FirstDerivative(torch.autograd.Function):
    """The first `count` tensors, with a refusal for a gradient.

    The others are there for their edges alone: torch.autograd.grad visits no node that leads to nothing it was asked for.
    """

    @staticmethod
    def forward(ctx: Any, refused: tuple[str | Problem, str, str], count: int, *tensors: Any) -> Any:
        ctx.refused = refused
        return tuple(g.view_as(g) for g in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        raise second_derivative(*ctx.refused)


def second_derivative(what: str | Problem, backend: str, remedy: str = "") -> NotSupported:
    """The refusal of it."""
    reason = "gradients of gradients are not implemented" + (f"; {remedy}" if remedy else "")
    return NotSupported(f"the second derivative of {what if isinstance(what, str) else what.spell()}", {backend: [reason]})


_holds: Any = torch._C._dispatch_tls_is_dispatch_key_included
_included: Any = torch._C._dispatch_tls_local_include_set  # tells the same slowly, and PyTorch 2.11's compiler does not fail
_VMAP_MODE: Any = torch._C._parse_dispatch_key("VmapMode")  # pyright: ignore[reportAttributeAccessIssue]


def is_mapped(grads: Iterable[torch.Tensor | None]) -> bool:
    """Whether these are gradients of a batch, without memory: within torch.func.vmap of torch.autograd.grad, or the like."""
    if transforms() and any(g is not None and is_wrapped(g) for g in grads):
        return True
    return _included().has(_VMAP_MODE) if is_compiling() else _holds(_VMAP_MODE)


def each_gradient(
    what: str | Problem, backend: str, differentiate: Callable[..., Sequence[torch.Tensor | None]],
    grads: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """What `differentiate` makes of arriving gradients of a batch, one after another."""
    reason = None
    if torch.is_grad_enabled():
        reason = "gradients of gradients are not implemented"
    elif not transforms():
        reason = "is_grads_batched and vectorize map in torch's old way; use torch.func.vmap of torch.autograd.grad"
    if reason is not None:
        raise NotSupported(f"a batch of gradients of {what if isinstance(what, str) else what.spell()}", {backend: [reason]})
    there = list[bool]()

    def found(*some: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        made = differentiate(*some)
        there[:] = [g is not None for g in made]
        return tuple(g for g in made if g is not None)

    made: Any = iter(_EachGradient.apply(found, *grads))  # pyright: ignore[reportArgumentType]
    return tuple(next(made) if given else None for given in there)


class _EachGradient(torch.autograd.Function):
    """A function of gradients, called once for each index of the mapped axes."""

    @staticmethod
    def forward(function: Any, *grads: torch.Tensor | None) -> Any:
        return function(*grads)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *given: Any) -> Any:
        (function, *grads), made = given, []
        for i in range(info.batch_size):
            some = [g if g is None or axis is None else g.select(axis, i) for g, axis in zip(grads, in_dims[1:], strict=True)]
            made.append(_EachGradient.apply(function, *some) if transforms() else function(*some))
        stacked = tuple(torch.stack(each) for each in zip(*made, strict=True))
        return stacked, (0,) * len(stacked)


def is_dual_level() -> bool:
    """Whether tensors may have tangents: within `forward_ad.dual_level`, and so within torch.func's jvp."""
    return forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]


def refuse_tangents(what: str | Problem, backend: str, given: Iterable[tuple[str, Any]], remedy: str = "") -> None:
    """Raise NotSupported where one of the named tensors has a tangent, which nothing but its memory would be read of.

    remedy: what the refusal says besides.
    """
    for name, tensor in given:
        if isinstance(tensor, torch.Tensor) and _has_tangent(tensor):
            raise _forward_mode(f"{what if isinstance(what, str) else what.spell()} by {name}", backend, remedy)


def is_jvp() -> bool:
    """Whether forward mode is the innermost of torch.func's transforms."""
    return transforms() and _functorch.peek_interpreter_stack().key() == _functorch.TransformType.Jvp


def apart(given: Iterable[Any]) -> tuple[list[Any], list[torch.Tensor | None]]:
    """(tensors without the tangents that they have at the innermost level, their tangents).

    Of level 0, the only one that PyTorch has: `forward_ad` does not know that a compiled graph has entered it.
    """
    pairs = [forward_ad.unpack_dual(t, level=0) if isinstance(t, torch.Tensor) else (t, None) for t in given]
    return [t for t, _ in pairs], [t for _, t in pairs]


def joined(tensor: torch.Tensor, tangent: torch.Tensor | None) -> torch.Tensor:
    """The tensor with a tangent, if there is one."""
    return tensor if tangent is None else forward_ad.make_dual(tensor, tangent, level=0)


def _has_tangent(tensor: torch.Tensor) -> bool:
    """Whether it has a tangent, or what a transform of torch.func wraps has one: jvp of grad."""
    while forward_ad.unpack_dual(tensor, level=0).tangent is None:
        if not _functorch.is_functorch_wrapped_tensor(tensor):
            return False
        tensor = _functorch.get_unwrapped(tensor)
    return True


class ReverseMode(torch.autograd.Function):
    """A Function that refuses tangents; torch.compile traces none that does."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _forward_mode("this call", "autograd")


def _forward_mode(what: str, backend: str, remedy: str = "") -> NotSupported:
    reason = "tangents are not implemented; use reverse mode, such as torch.autograd.grad or torch.func.vjp"
    reason += f"; {remedy}" if remedy else ""
    return NotSupported(f"forward-mode differentiation of {what}", {backend: [reason]})
