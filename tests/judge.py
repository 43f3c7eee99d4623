"""Running a case and judging its numbers by the accuracy rule; benchmarks/accuracy.py judges by it too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from flashtile.reference.attention import attention_plain, attention_reference
from tests.cases import DTYPES, Case, Tensors

FACTOR = 1.5  # of the error that plain PyTorch makes in the same dtype
FLOOR_ULP = 2.0  # of a tensor's largest element: below that, errors are luck
LSE_TOLERANCE = 1e-5


def evaluate(function: Callable[..., Any], case: Case, tensors: Tensors, **extra: Any) -> Tensors:
    """out, lse and the gradient of every leaf, by name ("dq", "dscore.0", ...)."""
    leaves = {name: t.detach() for name, t in tensors.items() if name not in ("dout", "dlse")}
    for name, leaf in leaves.items():
        leaf.requires_grad_(wants_gradient(case, name))
    inputs = (leaves["q"], leaves["k"], leaves["v"])
    place = leaves["q"].device
    out, lse = function(*inputs, **{**case.given(leaves), **case.masks(place), **case.lengths(place), **extra})
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


def wants_gradient(case: Case, name: str) -> bool:
    """Whether a case asks for the gradient of this one of its tensors."""
    fixed = {False: (), True: ("score", "sink"), "score": ("score",)}[case.fixed_slopes]
    return not name.startswith(("dout", "dlse", *fixed, *(("sink",) if case.fixed_sink else ())))


def run(backend: str, case: Case, tensors: Tensors) -> Tensors:
    return evaluate(case.function, case, tensors, return_lse=True, options=case.options(backend))


@lru_cache(maxsize=4)
def run_clean(backend: str, case: Case, place: torch.device) -> Tensors:
    """`run` of the case's own tensors, once for tests beside one another that each put something else into them."""
    return run(backend, case, case.tensors(place))


def run_without_lse(backend: str, case: Case, tensors: Tensors) -> Tensors:
    """As `run`, of a call that returns out alone, for a case whose `upstream` is "out": what nobody sees may be rougher."""

    def alone(*inputs: torch.Tensor, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return case.function(*inputs, **how), inputs[0].new_empty(0)

    made = evaluate(alone, case, tensors, options=case.options(backend))
    return {name: tensor for name, tensor in made.items() if name != "lse"}


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
    found = list(breaches(case, result, truth, plain))
    assert not found, f"{case}:\n" + "\n".join(found)


@dataclass(frozen=True)
class Error:
    """How far a tensor is off: largest and mean absolute error, plain PyTorch's, and the floor of what is judged."""

    largest: float
    plain_largest: float
    mean: float
    plain_mean: float
    floor: float

    @property
    def allowed(self) -> float:
        return max(FACTOR * self.plain_largest, self.floor)

    @property
    def ratio(self) -> float:
        """Of the largest error to plain PyTorch's, or to what the floor forgives; at most FACTOR where the rule is kept."""
        return self.largest / (self.allowed / FACTOR) if self.allowed else 1.0 if self.largest == 0 else math.inf

    @property
    def mean_ratio(self) -> float:
        return self.mean / self.plain_mean if self.plain_mean else 1.0 if self.mean == 0 else math.inf


def measure(name: str, case: Case, got: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> Error:
    """The Error of a tensor; empty ones have none."""
    if not exact.numel():
        return Error(0.0, 0.0, 0.0, 0.0, 0.0)
    mine, other = (got.double() - exact).abs(), (plain.double() - exact).abs()
    ulp = 2.0**-10 if case.precision == "tf32" and case.dtype == "fp32" else torch.finfo(DTYPES[case.dtype]).eps
    floor = FLOOR_ULP * ulp * exact.abs().max().item()
    return Error(mine.max().item(), other.max().item(), mine.mean().item(), other.mean().item(), floor)


def measure_lse(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest relative error of lse (absolute below 1); infinite where -inf is in the wrong rows."""
    empty = exact == -torch.inf
    if not torch.equal(got == -torch.inf, empty):
        return math.inf
    error = (got.double() - exact)[~empty].abs() / exact[~empty].abs().clamp(min=1.0)
    return error.max().item() if error.numel() else 0.0


def breaches(case: Case, result: Tensors, truth: Tensors, plain: Tensors) -> Iterator[str]:
    """What breaks the accuracy rule, a sentence for each tensor."""
    for name, exact in truth.items():
        got = result[name]
        dtype = torch.float32 if name == "lse" else plain[name].dtype
        if got.shape != exact.shape:
            yield f"{name} has shape {tuple(got.shape)}, not {tuple(exact.shape)}"
        elif got.dtype != dtype:
            yield f"{name} is {got.dtype}, not {dtype}"
        elif name == "lse":
            if not measure_lse(got, exact) <= LSE_TOLERANCE:
                yield f"lse is off by {measure_lse(got, exact):.3g}, relatively (inf: -inf is in the wrong rows)"
        elif not exact.isfinite().all():
            yield f"the reference's {name} is not finite"
        elif not got.isfinite().all():
            yield f"{name} is not finite at {(~got.isfinite()).nonzero()[:4].tolist()}"
        else:
            error = measure(name, case, got, exact, plain[name])
            if error.largest > error.allowed:
                yield (
                    f"{name} is off by {error.largest:.3g}; plain PyTorch by {error.plain_largest:.3g}, "
                    f"allowed {error.allowed:.3g}"
                )
