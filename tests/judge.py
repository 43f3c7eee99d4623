"""Running a case and judging its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

import flashtile
from flashtile.reference.attention import attention_plain, attention_reference
from tests.cases import DTYPES, Case, Tensors

FACTOR = 1.5  # of the error that plain PyTorch makes in the same dtype
FLOOR_ULP = 2.0  # of a tensor's largest element: below that, errors are luck
LSE_TOLERANCE = 1e-5


def evaluate(function: Callable[..., Any], case: Case, tensors: Tensors, **extra: Any) -> Tensors:
    """out, lse and the gradient of every leaf, by name ("dq", "dscore.0", ...)."""
    leaves = {name: t.detach() for name, t in tensors.items() if name not in ("dout", "dlse")}
    for name, leaf in leaves.items():
        leaf.requires_grad_(not (case.fixed_slopes and name.startswith("score")))
    inputs = (leaves["q"], leaves["k"], leaves["v"])
    out, lse = function(*inputs, score=case.modifiers(leaves), **case.arguments, **extra)
    flows = {"out": (out, tensors["dout"]), "lse": (lse, tensors["dlse"])}
    flowing = [flows[name] for name in ("out", "lse") if case.upstream in (name, "both")]
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    outputs, arriving = zip(*flowing, strict=True)
    given = torch.autograd.grad(outputs, list(wanted.values()), arriving, allow_unused=True)
    made = {"out": out.detach(), "lse": lse.detach()}
    for (name, leaf), grad in zip(wanted.items(), given, strict=True):
        # v does not influence lse: no path (None, from the references) and a path of zeros mean the same
        made[f"d{name}"] = torch.zeros_like(leaf) if grad is None else grad
    return made


def run(backend: str, case: Case, tensors: Tensors) -> Tensors:
    return evaluate(flashtile.attention, case, tensors, return_lse=True, options=case.options(backend))


def expected(case: Case, tensors: Tensors) -> tuple[Tensors, Tensors]:
    """(the truth in float64, what plain PyTorch makes of the same inputs in their own dtype)."""
    truth = evaluate(attention_reference, case, {name: t.double() for name, t in tensors.items()})
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = case.precision == "tf32"
    try:
        plain = evaluate(attention_plain, case, {**tensors, "dlse": tensors["dlse"].to(tensors["q"].dtype)})
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    return truth, plain


def judge(case: Case, result: Tensors, truth: Tensors, plain: Tensors) -> None:
    """Assert the accuracy rule for every tensor of a result; all breaches in one message."""
    assert result.keys() == truth.keys()
    breaches = list(_breaches(case, result, truth, plain))
    assert not breaches, f"{case}:\n" + "\n".join(breaches)


def _breaches(case: Case, result: Tensors, truth: Tensors, plain: Tensors) -> Iterable[str]:
    for name, exact in truth.items():
        got = result[name]
        if got.shape != exact.shape:
            yield f"{name} has shape {tuple(got.shape)}, not {tuple(exact.shape)}"
        elif got.dtype != plain[name].dtype and name != "lse":
            yield f"{name} is {got.dtype}, not {plain[name].dtype}"
        elif name == "lse":
            yield from _lse_breaches(got, exact)
        elif not exact.isfinite().all():
            yield f"the reference's {name} is not finite"
        elif not got.isfinite().all():
            yield f"{name} is not finite at {(~got.isfinite()).nonzero()[:4].tolist()}"
        else:
            error, plain_error = worst(got, exact), worst(plain[name], exact)
            allowed = max(FACTOR * plain_error, floor(name, case, exact, truth["lse"]))
            if error > allowed:
                yield f"{name} is off by {error:.3g}; plain PyTorch by {plain_error:.3g}, allowed {allowed:.3g}"


def _lse_breaches(got: torch.Tensor, exact: torch.Tensor) -> Iterable[str]:
    if got.dtype != torch.float32:
        yield f"lse is {got.dtype}, not torch.float32"
    empty = exact == -torch.inf
    if not torch.equal(got == -torch.inf, empty):
        yield "lse is -inf in the wrong rows"
        return
    error = (got.double() - exact)[~empty].abs() / exact[~empty].abs().clamp(min=1.0)
    if not (error <= LSE_TOLERANCE).all():
        yield f"lse is off by {error.max():.3g}, relatively"


def worst(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest absolute error; 0 for empty tensors."""
    return (got.double() - exact).abs().max().item() if exact.numel() else 0.0


def floor(name: str, case: Case, exact: torch.Tensor, lse: torch.Tensor) -> float:
    """FLOOR_ULP units in the last place of the tensor's largest element.

    lse is float32 by contract, and p = exp(s - lse) inherits its rounding: the unit is never finer than 2^-23 |lse|, with
    lse in base 2, where exponentials are taken. A captured tensor's gradient sums seqlen^2 terms of both signs, whose
    errors exceed those of the small sum.
    """
    ulp = 2.0**-10 if case.precision == "tf32" and case.dtype == "fp32" else torch.finfo(DTYPES[case.dtype]).eps
    finite = lse[lse.isfinite()].abs()
    ulp = max(ulp, (1.0 + (finite.max().item() / math.log(2.0) if finite.numel() else 0.0)) * 2.0**-23)
    terms = 4.0 if name.startswith("dscore") else 1.0
    return FLOOR_ULP * ulp * terms * exact.abs().max().item() if exact.numel() else 0.0
