"""PyTorch's own checks, in float64, of the formulas that ops run in forward mode and in second derivatives.

Ops take no float64, so their formulas are given it here, and compute in it what they would in float32.
"""

from __future__ import annotations

import pytest
import torch

from flashtile.kernels.ops import host
from flashtile.kernels.ops.catalogue import OPS
from flashtile.kernels.ops.norm_problem import Norm
from flashtile.torch.execute import bound
from flashtile.torch.ops import formula
from tests.companions.cases import CASES, Case

SMALL = [
    case
    for case in CASES
    if case.layout == "dense"
    and not case.fixed
    and not case.silent
    and not OPS[case.problem.op].over(case.problem)
    and sum(torch.Size(d.shape).numel() for _, d in case.problem.given) < 3_000
    and all(d.dtype not in ("fp16", "bf16") for _, d in [*case.problem.given, *case.problem.outputs().items()])
]
Values = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    for dtypes in (host.DTYPES, bound.TORCH_DTYPES):
        monkeypatch.setitem(dtypes, "fp32", torch.float64)


def test_every_op_is_checked() -> None:
    assert {case.problem.op for case in SMALL} == set(OPS)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_gradcheck(case: Case) -> None:
    problem, op = case.problem, OPS[case.problem.op]
    tensors = case.tensors(torch.device("cpu"))
    given = {name: tensors[name] for name, _ in problem.given}
    flows = [name for name in problem.public() if f"d{name}" in tensors]
    wanted = [name for name in given if name in case.wanted]
    leaves = tuple(given[name].detach().clone().requires_grad_() for name in wanted)
    arriving = tuple(tensors[f"d{name}"].detach().clone().requires_grad_() for name in flows)
    assert all(t.dtype is torch.float64 for t in (*leaves, *arriving))

    def forward(*some: torch.Tensor) -> Values:
        made = formula.made(op, problem, {**given, **dict(zip(wanted, some, strict=True))}, problem.public())
        return tuple(made[name] for name in flows)

    def backward(*some: torch.Tensor) -> Values | None:
        inputs = {**given, **dict(zip(wanted, some[: len(wanted)], strict=True))}
        every = {**inputs, **formula.made(op, problem, inputs, tuple(problem.outputs()))}
        kept = {name: every[name] for name in op.kept(problem, frozenset(wanted))}
        flowing = {f"d{name}": t for name, t in zip(flows, some[len(wanted) :], strict=True)}
        found = formula.gradients(op, problem, kept, flowing, frozenset(wanted))
        return None if found is None else tuple(found[f"d{name}"] for name in wanted)

    assert torch.autograd.gradcheck(forward, leaves, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(forward, leaves, arriving, fast_mode=True)
    found = backward(*leaves, *arriving)
    if found is None:  # a sum's parts, which nobody kept: refused by name
        assert isinstance(problem, Norm)
        assert problem.mixes
        return
    assert torch.autograd.gradcheck(backward, (*leaves, *arriving), fast_mode=True)
    expected = torch.autograd.grad(forward(*leaves), leaves, arriving)
    for one, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(one, truth, rtol=1e-9, atol=1e-11)
