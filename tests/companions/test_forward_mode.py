"""Tangents of forward-mode differentiation: right or refused, and never dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from flashtile import NotSupported, ops
from flashtile.kernels.ops.catalogue import BACKENDS
from flashtile.torch.ops.operator import COMPANION, write
from flashtile.torch.ops.run import run
from tests.companions.cases import CASES, Case, Tensors
from tests.companions.test_operator import FULLEST

REFUSED = "forward-mode differentiation of .* not implemented"
INPUTS = [(case, name) for case in FULLEST for name, d in case.problem.given if d.dtype in ("fp32", "fp16", "bf16")]


def duals(case: Case, *names: str, wanted: bool = False, device: str = "cpu") -> Tensors:
    """The inputs, those that are named with tangents."""
    made = case.tensors(torch.device(device))
    made = {n: made[n].clone().requires_grad_(wanted and n in case.wanted) for n, _ in case.problem.given}
    return {n: forward_ad.make_dual(t, torch.randn_like(t)) if n in names else t for n, t in made.items()}


def floating(case: Case) -> list[str]:
    return [name for name, described in case.problem.given if described.dtype in ("fp32", "fp16", "bf16")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pytorchs_tangents_are_right(case: Case) -> None:
    """On a CPU without gradients the ops are plain PyTorch."""
    problem = case.problem
    for name in floating(case):
        with forward_ad.dual_level():
            given = duals(case, name)
            exact = case.reference({n: t.double() if t.is_floating_point() else t for n, t in given.items()})
            outputs = run(problem.op, given, problem.options(), "cpu")
            for output, got in zip(problem.public(), outputs, strict=True):
                if output in problem.constant():
                    continue
                expected, found = (forward_ad.unpack_dual(t).tangent for t in (exact[output], got))
                if expected is not None and expected.any():
                    assert found is not None, (name, output)
                    ulp = torch.finfo(min((got.dtype, given[name].dtype), key=lambda t: t.itemsize)).eps
                    most = 64 * ulp * max(expected.abs().max().item(), 1.0)
                    torch.testing.assert_close(found.double(), expected, rtol=0, atol=most, equal_nan=True)


@pytest.mark.parametrize(
    ("backend", "wanted"),
    [(backend, wanted) for backend in BACKENDS for wanted in (False, True) if wanted or backend != "cpu"],
    ids=lambda value: value if isinstance(value, str) else "differentiated" if value else "constant",
)
@pytest.mark.parametrize(("case", "name"), INPUTS, ids=lambda value: value if isinstance(value, str) else value.problem.op)
def test_kernels_and_gradients_refuse(case: Case, name: str, backend: str, wanted: bool, device: torch.device) -> None:
    with forward_ad.dual_level():
        given = duals(case, name, wanted=wanted, device="cpu" if backend == "cpu" else device.type)
        with pytest.raises(NotSupported, match=f"(?s){REFUSED}"):
            run(case.problem.op, given, case.problem.options(), backend)
        with FlopCounterMode(display=False), pytest.raises(NotSupported, match=f"(?s){REFUSED}"):
            COMPANION(list(given.values()), *write(case.problem.op, given, case.problem.options(), backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", FULLEST, ids=lambda case: case.problem.op)
def test_gradients_with_tangents_refuse(case: Case, backend: str, device: torch.device) -> None:
    made = case.tensors(torch.device("cpu") if backend == "cpu" else device)
    given = {n: made[n].requires_grad_(n in case.wanted) for n, _ in case.problem.given}
    output = run(case.problem.op, given, case.problem.options(), backend)[0]
    with forward_ad.dual_level():
        weight = forward_ad.make_dual(torch.ones_like(output), torch.ones_like(output))
        with pytest.raises(NotSupported, match=f"(?s){REFUSED}"):
            (output * weight).sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_without_tangents_run_beside_others(backend: str, device: torch.device) -> None:
    x = torch.randn(3, 8, device="cpu" if backend == "cpu" else device, requires_grad=True)
    expected = ops.rms_norm(x, backend=backend)
    with forward_ad.dual_level():
        out = ops.rms_norm(x, backend=backend)
        out.sum().backward()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("wanted", [False, True], ids=["constant", "differentiated"])
@pytest.mark.parametrize("place", [0, 1], ids=["x", "weight"])
def test_linear_cross_entropy_refuses(place: int, wanted: bool) -> None:
    given = [torch.randn(4, 8), torch.randn(16, 8)]
    labels = torch.arange(4)
    with forward_ad.dual_level():
        given = [t.requires_grad_(wanted) for t in given]
        given[place] = forward_ad.make_dual(given[place], torch.ones_like(given[place]))
        with pytest.raises(NotSupported, match=f"(?s){REFUSED}"):
            ops.linear_cross_entropy(*given, labels)
        with torch.no_grad(), pytest.raises(NotSupported, match=f"(?s){REFUSED}"):
            ops.linear_cross_entropy(*given, labels)


def test_linear_cross_entropy_refuses_a_gradient_with_a_tangent() -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(16, 8)
    loss = ops.linear_cross_entropy(x, weight, torch.arange(4))
    with forward_ad.dual_level():
        factor = forward_ad.make_dual(torch.tensor(2.0), torch.tensor(1.0))
        with pytest.raises(NotSupported, match=f"(?s){REFUSED}"):
            (loss * factor).backward()


def test_torch_funcs_tangents_are_refused_by_name() -> None:
    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    calls: list[Any] = [
        ops.rms_norm,
        lambda x: ops.linear_act(x, weight),
        lambda x: ops.linear_cross_entropy(x, weight, torch.arange(4)),
    ]
    for call in calls:
        call(x)  # a known layout, too
        with pytest.raises(NotSupported, match=r"(?s)forward-mode differentiation of .* by x:.*use reverse mode"):
            torch.func.jvp(call, (x,), (x,))
