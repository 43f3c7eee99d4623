"""Every companion case on every backend, against the float64 reference."""

from __future__ import annotations

import pytest
import torch

from flashtile.kernels.ops.catalogue import BACKENDS, OPS
from flashtile.problem.op import Companion
from tests.companions.cases import CASES, Case
from tests.companions.judge import judge, result


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_and_gradients(case: Case, backend: str, place: torch.device) -> None:
    tensors = case.tensors(place)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    judge(case, result(case, tensors, backend), tensors)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, before[name]), f"{name} was written to"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_spellings_are_canonical(case: Case) -> None:
    problem = Companion.parse(case.spelling)
    assert Companion.parse(problem.spell()) == problem
    assert problem.bytes("forward") > 0 or any(0 in d.shape for _, d in problem.given)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_forward_without_gradients_is_the_same(op: str, backend: str, place: torch.device) -> None:
    """Nothing is kept then, which must not change a bit of what the caller gets."""
    case = max((c for c in CASES if c.problem.op == op), key=lambda c: len(c.problem.given))
    tensors = case.tensors(place)
    free = Case(case.spelling, case.layout, fixed=case.wanted)
    from flashtile.torch.ops.run import run

    names = [name for name, _ in case.problem.given]
    given = {name: tensors[name] for name in names}
    with torch.no_grad():
        made = run(op, given, case.problem.options(), backend)
    kept = result(case, tensors, backend)
    assert not free.wanted
    for name, tensor in zip(case.problem.public(), made, strict=True):
        assert torch.equal(tensor, kept[name]), name
