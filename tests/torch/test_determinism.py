"""Bitwise repeatable where that is promised, and an error where it cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import flashtile
from flashtile import Alibi, Options
from flashtile.problem.options import Variant
from flashtile.torch.execute import bound as executor
from tests.cases import Case
from tests.judge import run
from tests.test_imports import fresh

CASE = Case("determinism", seqlen_q=36, seqlen_k=40, causal=True, heads_q=4, score=("alibi",))


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, bool]]]:
    """(variant, deterministic) of every plan that ran."""
    seen: list[tuple[str, bool]] = []
    original = executor.Bound.run

    def run_and_note(self: executor.Bound, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        seen.append((self.plan.variant, self.plan.problem.deterministic))
        return original(self, tensors)

    monkeypatch.setattr(executor.Bound, "run", run_and_note)
    flashtile.cache_clear()  # what ran before is replayed without it
    return seen


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_deterministic_repeats_bitwise(backend: str, place: torch.device, dtype: str) -> None:
    case = replace(CASE, deterministic=True, dtype=dtype)
    tensors = case.tensors(place)
    first = run(backend, case, tensors)
    for _ in range(50 if place.type == "cuda" else 2):
        again = run(backend, case, tensors)
        assert all(torch.equal(again[name], tensor) for name, tensor in first.items())


@pytest.mark.parametrize("asked", ["auto", "split"])
def test_deterministic_runs_no_fused_backward(
    backend: str, place: torch.device, plans: list[tuple[str, bool]], asked: Variant
) -> None:
    case = replace(CASE, deterministic=True, backward=asked)
    run(backend, case, case.tensors(place))
    assert len(plans) == 2
    assert plans[1][0] != "fused"
    assert plans[1][1]


@pytest.mark.usefixtures("strict_determinism")
def test_torch_asks_for_determinism(backend: str, place: torch.device, plans: list[tuple[str, bool]]) -> None:
    tensors = CASE.tensors(place)
    run(backend, CASE, tensors)
    assert plans[1][0] != "fused"
    assert plans[1][1]
    run(backend, replace(CASE, deterministic=False), tensors)
    assert not plans[3][1], "an explicit False wins over torch's wish"


def test_torch_asks_for_determinism_after_the_forward(
    backend: str, place: torch.device, plans: list[tuple[str, bool]], request: pytest.FixtureRequest
) -> None:
    q = CASE.tensors(place)["q"].requires_grad_()
    out = flashtile.attention(q, q, q, options=Options(backend=backend))
    request.getfixturevalue("strict_determinism")
    out.sum().backward()
    assert plans[1][1]


def test_fused_and_deterministic_is_refused_by_each_backend_s_own_reason(device: torch.device) -> None:
    options = Options(backward="fused", deterministic=True)
    q = CASE.tensors(device)["q"]
    reasons = {"cpu": "the CPU has one backward, 'split'", "triton": "adds dq atomically and is not deterministic; use 'split'"}
    with pytest.raises(flashtile.NotSupported) as refusal:
        flashtile.attention(q, q, q, options=options)
    for name, reason in reasons.items():
        assert any(reason in line for line in refusal.value.reasons[name])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_fused_and_deterministic_is_planned_on_hopper(head_dim: int) -> None:
    """In a process of its own, where kernels are not interpreted."""
    pytest.importorskip("triton")
    fresh(f"""
from flashtile import AttentionProblem, NotSupported, dispatch
from flashtile.plan.device import named
problem = AttentionProblem.parse("attention(q=2x4096x8x{head_dim},kv=4096x8x{head_dim},bf16,band=:0,deterministic)")
plan = dispatch.plan_backward(problem, named("sm90"), variant="fused")
assert (plan.backend, plan.variant) == ("hopper", "fused"), plan
try:
    dispatch.plan_backward(problem, named("sm80"), variant="fused")
except NotSupported as refusal:
    assert "not deterministic" in refusal.reasons["triton"][0]
else:
    raise SystemExit("sm80 adds dq atomically")
""")


@pytest.mark.usefixtures("strict_determinism")
def test_fused_is_refused_where_torch_asks_for_determinism(device: torch.device, plans: list[tuple[str, bool]]) -> None:
    """Before the forward runs; without a gradient to come there is nothing to refuse."""
    options = Options(backend="triton", backward="fused")
    q = CASE.tensors(device)["q"]
    flashtile.attention(q, q, q, options=options)
    assert len(plans) == 1
    q.requires_grad_()
    with pytest.raises(flashtile.NotSupported, match="not deterministic"):
        flashtile.attention(q, q, q, options=options)
    assert len(plans) == 1
    flashtile.attention(q, q, q, options=Options(backend="triton", backward="fused", deterministic=False)).sum().backward()
    assert plans[-1] == ("fused", False)


def test_fused_is_refused_once_torch_asks_for_determinism(device: torch.device, request: pytest.FixtureRequest) -> None:
    """Though the same call was allowed before."""
    q = CASE.tensors(device)["q"].requires_grad_()
    options = Options(backend="triton", backward="fused")
    flashtile.attention(q, q, q, options=options)
    request.getfixturevalue("strict_determinism")
    with pytest.raises(flashtile.NotSupported, match="not deterministic"):
        flashtile.attention(q, q, q, options=options)


def test_the_forward_always_repeats_bitwise(backend: str, place: torch.device) -> None:
    tensors = CASE.tensors(place)
    given = [tensors[name] for name in "qkv"]
    outs = [
        flashtile.attention(*given, causal=True, score=[Alibi(tensors["score.0"])], options=Options(backend=backend))
        for _ in range(2)
    ]
    assert torch.equal(*outs)
