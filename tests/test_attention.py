"""Every backend x every case: forward, lse and all gradients against float64, or a refusal with its reason."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

import flashtile
from flashtile import AttentionProblem, Options, dispatch
from flashtile.torch.call.arguments import Arguments
from flashtile.torch.call.describe import make_problem
from flashtile.torch.call.holes import counts
from flashtile.torch.call.lengths import given_lengths
from flashtile.torch.execute.bound import device_of
from tests.backends import PORTABLE
from tests.cases import CASES, Case, Tensors
from tests.judge import expected, judge, run


def problem_of(case: Case, inputs: list[torch.Tensor], arguments: dict[str, Any], options: Options) -> AttentionProblem:
    """What a case asks for."""
    lengths = case.lengths(inputs[0].device)
    if case.cu_q is not None:
        inputs = [t[None] for t in inputs]
    given = given_lengths(**{name: counts(tensor) for name, tensor in lengths.items()})
    q, k, v = inputs
    return make_problem(q, k, v, Arguments(**arguments, options=options), given)[0]


@lru_cache(maxsize=1)
def expected_of(case: Case, place: torch.device) -> tuple[Tensors, Tensors]:
    """`expected`, once for all backends: their tests follow one another."""
    return expected(case, case.tensors(place))


PAIRS = [(backend.name, case) for case in CASES for backend in dispatch.BACKENDS]


@pytest.mark.parametrize(("backend", "case"), PAIRS, ids=[f"{backend}-{case.name}" for backend, case in PAIRS])
def test_case(backend: str, place: torch.device, case: Case) -> None:
    tensors = case.tensors(place)
    for name, tensor in tensors.items():  # as `run` has them
        tensor.requires_grad_(name not in ("dout", "dlse") and not (case.fixed_slopes and name.startswith("score")))
    arguments, options = {**case.given(tensors), **case.masks(place)}, case.options(backend)
    inputs = [tensors[name] for name in "qkv"]
    problem = problem_of(case, inputs, arguments, options)
    asked, device = dispatch.backend_named(backend), device_of(place)
    reasons = asked.unsupported(problem, device) or asked.unsupported(problem, device, case.backward)  # in the order of use
    if not reasons:
        assert backend not in case.refused
        judge(case, run(backend, case, tensors), *expected_of(case, place))
        return
    assert backend in case.refused or case.backward in PORTABLE.get(backend, (case.backward,)), reasons
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    with pytest.raises(flashtile.NotSupported) as refusal:
        case.function(*leaves, **arguments, **case.lengths(place), options=options)
    assert refusal.value.reasons == {backend: tuple(reasons)}
    assert all(reason in str(refusal.value) for reason in reasons)
