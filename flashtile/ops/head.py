"""linear_cross_entropy: the loss of a language model's head, without its logits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from flashtile.errors import InvalidProblem, NotSupported
from flashtile.kernels.ops.cross_entropy_problem import check_reduction
from flashtile.ops.head_passes import Asked, Given, Head, scaled
from flashtile.problem.op import FLOATS
from flashtile.torch.execute.plain import is_traced, is_wrapped, transforms
from flashtile.torch.ops.call import NAMES
from flashtile.torch.ops.run import autocast, check_tensors, rows
from flashtile.torch.routes.derivatives import (
    NOTHING,
    first_derivatives,
    is_dual_level,
    is_mapped,
    record_at_level,
    refuse_tangents,
    second_derivative,
)
from flashtile.torch.routes.library import LIBRARY, NAMESPACE, define
from flashtile.torch.routes.mapped import one_by_one
from flashtile.torch.routes.operator import below_autograd


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    class_weight: torch.Tensor | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    logits_bytes: int | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Cross-entropy of the logits x weight^T + bias with labels, float32, in bounded memory for the logits.

    x: (..., hidden), weight: (classes, hidden), bias: (classes,), one dtype of fp16, bf16 and fp32; labels: (...).
    class_weight, reduction, softcap and the other options are those of `cross_entropy`, where class_weight is called weight.
    backend: "triton", "cpu", or None for the first that runs on the tensors' device; NotSupported says why one does not.

    Some classes at a time: a first pass makes lse, a second one the gradients, of which that of weight is summed over all
    rows at once, in float32, and rounded once. Logits that stay in memory between the passes are not computed again: in that
    of weight's gradient nearly half of them where there are twice as many rows as hidden, nearly all where there are no more;
    and in `logits_bytes` (at least 256 classes of all rows), which come on top of the gradients and of dx in float32. 8192
    rows of 4096 hidden and 128,256 classes in 16 bits: 3.5 products by the default of 64 MiB, 3 from 1056 MiB on.
    The gradients of a reduced loss are made by the forward and serve one backward. Those of reduction "none", which gives
    (...), and within torch.func's transforms, wait for the losses' own: 4 products.

    Returns a scalar, or (...) with reduction "none". Raises InvalidProblem for a request without meaning, NotSupported for
    tangents (`torch.autograd.forward_ad`).
    """
    named = {"x": x, "weight": weight, "bias": bias, "labels": labels, "class_weight": class_weight}
    there = {name: tensor for name, tensor in named.items() if tensor is not None or name in ("x", "weight", "labels")}
    check_tensors(there)
    if NAMES.get(x.dtype) not in FLOATS:
        raise InvalidProblem(f"x is {x.dtype}; it must be {' or '.join(FLOATS)}.")
    x, weight, bias = autocast(x, weight, bias)
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1] or weight.dtype != x.dtype or not weight.numel():
        raise InvalidProblem(
            f"weight is {weight.dtype} {tuple(weight.shape)}; it must be (classes, hidden) for x, {x.dtype} {tuple(x.shape)}."
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype):
        raise InvalidProblem(
            f"bias is {bias.dtype} {tuple(bias.shape)}; it must be (classes,) for weight, {x.dtype} {tuple(weight.shape)}."
        )
    if labels.shape != x.shape[:-1]:
        raise InvalidProblem(f"labels have shape {tuple(labels.shape)}; it must be that of x {tuple(x.shape)} but the last.")
    check_reduction(reduction)
    if logits_bytes is not None and (isinstance(logits_bytes, bool) or not isinstance(logits_bytes, int) or logits_bytes < 0):
        raise InvalidProblem(f"logits_bytes is {logits_bytes!r}; it must be an int, at least 0.")
    numbers = (
        _number("label_smoothing", label_smoothing), _number("z_loss", z_loss), _number("logit_scale", logit_scale),
        None if softcap is None else _number("softcap", softcap),
    )  # fmt: skip
    asked = Asked(reduction, *numbers, ignore_index, logits_bytes, backend or "")
    given = Given(
        rows(x), weight, bias, labels.reshape(-1).contiguous(), None if class_weight is None else class_weight.contiguous()
    )
    if not is_traced(*there.values()):
        if is_dual_level():
            refuse_tangents("linear_cross_entropy", backend or "torch", zip(Given._fields, given, strict=True))
        wanted = given.wanted()
        if not any(wanted):
            return Head(given, asked).run([False] * 3)[0].view(labels.shape if reduction == "none" else ())
        if reduction != "none" and not any(t is not None and is_wrapped(t) for t in given):
            return _Differentiable.apply(*given, asked, wanted)[0]  # pyright: ignore[reportIndexIssue]
    loss = HEAD(*given, *asked, [False] * 3)[0]
    return loss.view(labels.shape) if reduction == "none" else loss


def _number(name: str, value: Any) -> float:
    if isinstance(value, (bool, str)):
        raise InvalidProblem(f"{name} is {value!r}; it must be a number.")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InvalidProblem(f"{name} is {value!r}; it must be a number.") from None


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        *given, asked, wanted = inputs
        head = Head(Given(*given), asked)
        loss, _, *ctx.gradients = head.run(wanted)
        ctx.wanted, ctx.call = wanted, head.shard(head.x.new_empty(len(head.x), head.width), 0, True)
        hidden = NOTHING.detach()  # for `first_derivatives`: it leads to x, weight and bias
        ctx.save_for_backward(hidden)
        return loss, hidden

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if is_dual_level():
            refuse_tangents("linear_cross_entropy", "torch", [("its gradient", grads[0])])
        if is_mapped(grads):
            reason = "the gradients were made by the forward and are handed out once"
            raise NotSupported("a batch of gradients of linear_cross_entropy", {"torch": [reason]})
        if ctx.gradients is None:
            reason = "the gradients were made by the forward and have been handed out"
            raise NotSupported("a second backward of linear_cross_entropy", {"torch": [reason]})
        made, ctx.gradients = ctx.gradients, None
        with torch.no_grad():
            given = tuple(scaled(g, grads[0]) if n else None for g, n in zip(made, ctx.wanted, strict=True))
        made = first_derivatives(ctx.call.problem, ctx.call.plan.backend, given, ctx.saved_tensors, grads)
        return *made, *(None,) * 4


# -- what torch.compile and torch.func see, and calls whose gradients wait --------------------------------------------------


def run_head(*given: Any) -> tuple[torch.Tensor, ...]:
    """`Head.run`, as an operator."""
    *call, made = given
    return Head(Given(*call[:5]), Asked(*call[5:])).run(made)


def run_backward(dloss: torch.Tensor, lse: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    """`Head.pull`, as an operator."""
    *call, wanted = given
    return Head(Given(*call[:5]), Asked(*call[5:])).pull(lse, dloss, wanted)


def fake_head(*given: Any) -> tuple[torch.Tensor, ...]:
    *call, made = given
    x, reduction = call[0], call[5]
    loss = x.new_empty(x.shape[:1] if reduction == "none" else (), dtype=torch.float32)
    return loss, x.new_empty(x.shape[:1], dtype=torch.float32), *_fakes(Given(*call[:5]), made)


def fake_backward(dloss: torch.Tensor, lse: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    return _fakes(Given(*given[:5]), given[-1])


def _fakes(given: Given, wanted: list[bool]) -> tuple[torch.Tensor, ...]:
    shapes = (given.x.shape, given.weight.shape, given.weight.shape[:1])
    return tuple(given.x.new_empty(shape if wants else 0) for shape, wants in zip(shapes, wanted, strict=True))


class _Recorded(torch.autograd.Function):
    """The operator, whose outputs hold its gradients, or with its gradients by the other one, which makes logits again."""

    @staticmethod
    def forward(ctx: Any, made: list[bool], wanted: list[bool], *call: Any) -> tuple[torch.Tensor, ...]:
        with below_autograd():
            loss, lse, *grads = HEAD(*call, made)
        hidden = loss.new_empty(0)
        ctx.given, ctx.asked, ctx.wanted = [t is not None for t in call[:5]], call[5:], wanted
        ctx.waits = not any(made)
        ctx.save_for_backward(*((lse, *(t for t in call[:5] if t is not None)) if ctx.waits else (*grads, hidden)))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(lse, *grads)
        return loss, lse, *grads, hidden

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dloss, saved = grads[0], ctx.saved_tensors
        rest = (None,) * (2 + len(ctx.asked))
        if dloss is None:
            return None, None, None, None, None, *rest
        if is_dual_level():
            refuse_tangents("linear_cross_entropy", "autograd", [("its gradient", dloss)])
        if ctx.waits:
            lse, *there = saved
            found = iter(there)
            given = [next(found) if is_there else None for is_there in ctx.given]
            made = BACKWARD(dloss, lse, *given, *ctx.asked, ctx.wanted)
            return None, None, *(g if wanted else None for g, wanted in zip(made, ctx.wanted, strict=True)), *rest
        made = tuple(g * dloss if wanted else None for g, wanted in zip(saved, ctx.wanted, strict=False))
        return None, None, *first_derivatives("linear_cross_entropy", "autograd", made, saved, grads), *rest


def record(*given: Any) -> tuple[torch.Tensor, ...]:
    """The operator's outputs, the loss differentiable.

    A reduced loss brings its gradients, but not within torch.func's transforms: there each level is to see what they are made
    of, and a vmap of the backward its own gradients of the loss.
    """
    *call, made = given
    wanted = Given(*call[:5]).wanted()
    if not any(wanted):
        with below_autograd():
            return HEAD(*given)
    made = [False] * 3 if call[5] == "none" or transforms() else wanted
    return record_at_level(_Recorded, made, wanted, *call)[:5]


class _Gradients(torch.autograd.Function):
    """The operator of gradients, with a refusal for theirs. Its inputs are there for their edges too."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[torch.Tensor, ...]:
        with below_autograd():
            return BACKWARD(*given)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise second_derivative("linear_cross_entropy", "autograd")


def record_gradients(*given: Any) -> tuple[torch.Tensor, ...]:
    """The gradients, for whoever differentiates them: no zero but a refusal."""
    return record_at_level(_Gradients, *given)


def tell(*given: Any) -> tuple[str, Iterable[tuple[str, Any]]]:
    return "linear_cross_entropy", zip(Given._fields, given, strict=False)


ASKED = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor labels, Tensor? class_weight, str reduction, float smoothing, float z_loss, "
    "float logit_scale, float? softcap, SymInt ignore_index, SymInt? logits_bytes, str backend"
)
HEAD = define(
    f"linear_cross_entropy({ASKED}, bool[] made) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", run_head, fake_head, record, tell
)
BACKWARD = define(
    f"linear_cross_entropy_backward(Tensor dloss, Tensor lse, {ASKED}, bool[] wanted) -> (Tensor, Tensor, Tensor)",
    run_backward, fake_backward, record_gradients,
)  # fmt: skip


def _map_head(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    made = one_by_one(HEAD, info.batch_size, in_dims, args)
    return tuple(made), (0,) * len(made)


def _map_backward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    made = one_by_one(BACKWARD, info.batch_size, in_dims, args)
    return tuple(made), (0,) * len(made)


torch.library.register_vmap(f"{NAMESPACE}::linear_cross_entropy", _map_head, lib=LIBRARY)
torch.library.register_vmap(f"{NAMESPACE}::linear_cross_entropy_backward", _map_backward, lib=LIBRARY)


@register_flop_formula(HEAD.overloadpacket, get_raw=True)
def head_flops(x: torch.Tensor, weight: torch.Tensor, *rest: Any, **_: Any) -> int:
    """FLOPs of the logits and of the gradients that are made, without what is computed again."""
    return 2 * x.shape[0] * x.shape[1] * weight.shape[0] * (1 + sum(rest[-1][:2]))


@register_flop_formula(BACKWARD.overloadpacket, get_raw=True)
def backward_flops(dloss: Any, lse: Any, x: torch.Tensor, weight: torch.Tensor, *rest: Any, **_: Any) -> int:
    """FLOPs of the gradients, without what is computed again."""
    return 2 * x.shape[0] * x.shape[1] * weight.shape[0] * sum(rest[-1][:2])
