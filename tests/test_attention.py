"""Every backend x every case: forward, lse and all gradients against float64, or a refusal with its reason."""

from __future__ import annotations

import pytest
import torch

import flashtile
from flashtile import dispatch
from flashtile.torch.attention import make_problem
from flashtile.torch.run import device_of
from tests.backends import PORTABLE
from tests.cases import CASES, Case
from tests.judge import expected, judge, run


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", [backend.name for backend in dispatch.BACKENDS])
def test_case(backend: str, place: torch.device, case: Case) -> None:
    tensors = case.tensors(place)
    for name, tensor in tensors.items():  # as `run` has them
        tensor.requires_grad_(name not in ("dout", "dlse") and not (case.fixed_slopes and name.startswith("score")))
    arguments, options = case.given(tensors), case.options(backend)
    inputs = [tensors[name] for name in "qkv"]
    problem, _ = make_problem(*inputs, **arguments, options=options)
    asked, device = dispatch.backend_named(backend), device_of(place)
    reasons = asked.unsupported(problem, device) or asked.unsupported(problem, device, case.backward)  # in the order of use
    if not reasons:
        judge(case, run(backend, case, tensors), *expected(case, tensors))
        return
    assert case.backward in PORTABLE.get(backend, (case.backward,)), reasons
    with pytest.raises(flashtile.NotSupported) as refusal:
        flashtile.attention(*(tensor.detach().requires_grad_() for tensor in inputs), **arguments, options=options)
    assert refusal.value.reasons == {backend: tuple(reasons)}
    assert all(reason in str(refusal.value) for reason in reasons)
