"""Tangents of forward-mode differentiation: right or refused, and never dropped."""

from __future__ import annotations

import re

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


@pytest.mark.parametrize("wanted", [False, True], ids=["constant", "differentiated"])
@pytest.mark.parametrize(("case", "name"), INPUTS, ids=lambda value: value if isinstance(value, str) else value.problem.op)
def test_operators_refuse(case: Case, name: str, wanted: bool) -> None:
    """Which are what a compiled graph has: the formulas that know tangents stand in front of them."""
    with forward_ad.dual_level():
        given = duals(case, name, wanted=wanted)
        with FlopCounterMode(display=False), pytest.raises(NotSupported, match=f"(?s){REFUSED}"):
            COMPANION(list(given.values()), *write(case.problem.op, given, case.problem.options(), "cpu"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", FULLEST, ids=lambda case: case.problem.op)
def test_gradients_with_tangents_are_right_or_refused(case: Case, backend: str, device: torch.device) -> None:
    made = case.tensors(torch.device("cpu") if backend == "cpu" else device)
    given = {n: made[n].requires_grad_(n in case.wanted) for n, _ in case.problem.given}
    wide = {n: t.detach().double().cpu() if t.is_floating_point() else t.detach().cpu() for n, t in given.items()}
    wide = {n: t.requires_grad_(n in case.wanted) for n, t in wide.items()}
    output, truth = (
        run(case.problem.op, given, case.problem.options(), backend)[0],
        case.reference(wide)[case.problem.public()[0]],
    )
    names = [n for n in given if n in case.wanted]
    with forward_ad.dual_level():
        ones = torch.randn_like(output), torch.randn_like(output)
        weight = forward_ad.make_dual(*ones)
        exact = forward_ad.make_dual(*(t.double().cpu() for t in ones))
        expected = torch.autograd.grad(truth, [wide[n] for n in names], exact, allow_unused=True)
        refused, found = "", ()
        try:
            found = torch.autograd.grad(output, [given[n] for n in names], weight, allow_unused=True)
        except NotSupported as error:
            refused = str(error)
        if refused:
            assert re.search(REFUSED, refused, re.DOTALL)
            return
        for one, other in zip(found, expected, strict=True):
            tangents = [None if g is None else forward_ad.unpack_dual(g).tangent for g in (one, other)]
            if tangents[1] is None or not tangents[1].any():
                continue
            assert tangents[0] is not None
            most = 64 * torch.finfo(output.dtype).eps * max(float(tangents[1].abs().max()), 1.0)
            assert (tangents[0].double().cpu() - tangents[1]).abs().max() <= most


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
    call = lambda x: ops.linear_cross_entropy(x, weight, torch.arange(4))  # noqa: E731
    call(x)  # a known layout, too
    with pytest.raises(NotSupported, match=r"(?s)forward-mode differentiation of .* by x:.*use reverse mode"):
        torch.func.jvp(call, (x,), (x,))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_tangents_of_a_gradient_are_refused(reduction: str) -> None:
    """jvp of grad: the tensors that arrive are wrapped, and what is wrapped has the tangent."""
    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    call = lambda x, w: ops.linear_cross_entropy(x, w, torch.arange(4), reduction=reduction).sum()  # noqa: E731
    for place in (0, 1):
        with pytest.raises(NotSupported, match=f"(?s){REFUSED}"):
            torch.func.jvp(torch.func.grad(call, place), (x, weight), (x, weight))
    along = lambda w: torch.func.grad(call)(x, w)  # noqa: E731
    with pytest.raises(NotSupported, match=r"(?s)forward-mode differentiation of .* by weight:.*use reverse mode"):
        torch.func.jvp(along, (weight,), (weight,))
