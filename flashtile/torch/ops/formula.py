"""Ops by their formulas in plain PyTorch, which it differentiates in every way: forward mode, and gradients of gradients.

Kernels give first derivatives. What goes beyond is rare, and as long as its tensors: these formulas hold a few of them more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from flashtile.plan.op import Op
from flashtile.problem.op import Companion, Described
from flashtile.torch.execute.bound import TORCH_DTYPES
from flashtile.torch.execute.plain import is_compiling, transforms
from flashtile.torch.routes.derivatives import is_dual_level

Tensors = Mapping[str, torch.Tensor]


def goes_beyond() -> bool:
    """Whether tensors may have tangents, or torch.func differentiates gradients."""
    if is_compiling():
        return False
    return is_dual_level() or is_nested()


def is_nested() -> bool:
    """Whether several of torch.func's transforms that are active take derivatives."""
    if not transforms():
        return False
    inside: Any = torch._C
    inside = inside._functorch
    kinds = inside.TransformType.Grad, inside.TransformType.Jvp
    return sum(level.key() in kinds for level in inside.get_interpreter_stack() or ()) > 1


def forward(op: Op, problem: Companion, tensors: Tensors) -> tuple[torch.Tensor, ...] | None:
    """What the op gives its caller; None where it writes over an input, which no formula here does."""
    if op.over(problem):
        return None
    return tuple(made(op, problem, tensors, problem.public()).values())


def made(op: Op, problem: Companion, tensors: Tensors, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The outputs of these names, in their dtypes."""
    with torch.autocast(next(iter(tensors.values())).device.type, enabled=False):
        found, described = op.host_forward(problem, dict(tensors), names), problem.outputs()
    return {name: found[name].to(TORCH_DTYPES[described[name].dtype]) for name in names}


def gradients(
    op: Op, problem: Companion, kept: Tensors, arriving: Tensors, wanted: frozenset[str]
) -> dict[str, torch.Tensor] | None:
    """The gradients `d<input>` of the wanted inputs, differentiable; None where what is kept does not say enough.

    kept: inputs and outputs by name. Of an output that the caller does not have nobody knows what it depends on: unread.
    """
    if op.over(problem):
        return None
    given, public = dict(problem.given), set(problem.public())
    known = {name: t for name, t in kept.items() if name in given or name in public}
    if set(kept) <= set(known) and not _reads_inputs(op, problem):
        names = tuple(f"d{name}" for name, _ in problem.given if name in wanted)
        found = op.host_backward(problem, {**known, **arriving}, names)
        return {f"d{name}": found[f"d{name}"].to(TORCH_DTYPES[given[name].dtype]) for name in wanted}
    if problem.op == "norm" and "h" in kept:
        return _of_sum(op, problem, known, arriving, wanted)
    lacking = [name for name, _ in problem.given if name not in known]
    if any(name not in problem.linear for name in lacking):
        return None
    like = next(iter(known.values()))
    return _again(lambda x: made(op, problem, x, problem.public()), {**known, **_blank(given, lacking, like)}, arriving, wanted)


def remedy(op: Op, problem: Companion, kept: tuple[str, ...]) -> str:
    """What gives the second derivative that `gradients` cannot."""
    if op.over(problem):
        return "here the forward makes the gradient or writes over its input; ask for eager_gradient=False and inplace=False"
    lacking = ", ".join(name for name, _ in problem.given if name not in kept and name not in problem.linear)
    return f"the forward kept no {lacking}; let all inputs require a gradient, or use torch.func, such as torch.func.hessian"


def _reads_inputs(op: Op, problem: Companion) -> bool:
    """Whether the backward's formula makes outputs that the forward kept again, and so wants the inputs."""
    return problem.op not in ("softmax", "rotary")


def _blank(given: Mapping[str, Described], names: list[str], like: torch.Tensor) -> dict[str, torch.Tensor]:
    """Zeros for inputs whose values no gradient depends on."""
    return {n: like.new_zeros(given[n].shape, dtype=TORCH_DTYPES[given[n].dtype]) for n in names}


def _again(
    function: Callable[[dict[str, torch.Tensor]], Tensors], given: Tensors, arriving: Tensors, wanted: frozenset[str]
) -> dict[str, torch.Tensor]:
    """The gradients of the wanted inputs of the function, which is computed again."""
    with torch.enable_grad():
        inputs = {n: t if t.requires_grad or n not in wanted else t.detach().requires_grad_() for n, t in given.items()}
        views = {n: t.view_as(t) if n in wanted else t for n, t in inputs.items()}
        outputs = function(views)
        pairs = [(outputs[n[1:]], g) for n, g in arriving.items() if n[1:] in outputs and outputs[n[1:]].requires_grad]
        names = [n for n in given if n in wanted]
        sources = [views[n] for n in names]
        some = torch.autograd.grad([t for t, _ in pairs], sources, [g for _, g in pairs], create_graph=True, allow_unused=True)
    return {f"d{n}": torch.zeros_like(t) if g is None else g for n, t, g in zip(names, sources, some, strict=True)}


def _of_sum(op: Op, problem: Any, known: Tensors, arriving: Tensors, wanted: frozenset[str]) -> dict[str, torch.Tensor] | None:
    """Of a norm of a sum h that its caller has, where x and residual are added as they are."""
    given = dict(problem.given)
    if "h" not in known or not set(given) <= {"x", "residual", "weight", "bias"} or problem.drops or problem.scale != 1.0:
        return None
    h = known["h"]
    alone = type(problem)(
        tuple((n, Described(d.shape, problem.stored) if n == "x" else d) for n, d in problem.given if n != "residual"),
        **{**problem.options(), "prenorm": False, "out_dtype": problem.outputs()["out"].dtype, "residual_dtype": None},
    )
    blank = _blank(given, [n for n in ("bias",) if n in given], h)
    inputs = {"x": h, **{n: t for n, t in known.items() if n == "weight"}, **blank}
    inputs = {n: inputs[n] for n, _ in alone.given}
    of_y = {n: g for n, g in arriving.items() if n == "dout"}
    found = _again(lambda x: made(op, alone, x, alone.public()), inputs, of_y, wanted - {"residual"} | {"x"})
    total = found["dx"] + arriving["dh"] if "dh" in arriving else found["dx"]
    found |= {f"d{n}": total.to(TORCH_DTYPES[given[n].dtype]) for n in ("x", "residual") if n in wanted}
    return {f"d{n}": found[f"d{n}"] for n in wanted}
