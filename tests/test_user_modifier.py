"""A score modifier that the library does not know, tests/relative_bias.py: its results and gradients on every backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import flashtile
from flashtile import Options
from flashtile.problem.dtype import DType
from flashtile.problem.options import Variant
from flashtile.problem.score import ScoreSpec, TensorSpec
from flashtile.reference.attention import attention_plain, attention_reference
from tests.backends import unrepeatable
from tests.cases import Case
from tests.judge import judge
from tests.relative_bias import BUCKETS, RelativeBias

pytest.importorskip("triton")

CASES = [
    Case("plain", batch=2, heads_q=4, heads_kv=2, seqlen_q=40, seqlen_k=40),
    Case("causal", seqlen_q=50, seqlen_k=70, causal=True),
    Case("fp16-window", seqlen_q=40, seqlen_k=36, window=(9, 20), dtype="fp16"),
    Case("empty-rows", seqlen_q=40, seqlen_k=20, causal=True),
    Case("fixed", fixed_slopes=True, deterministic=True),
]


def leaves(case: Case, place: torch.device, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    tensors = case.tensors(place)
    table = torch.linspace(-1, 2, case.heads_q * BUCKETS, device=place).view(case.heads_q, BUCKETS)
    made = [*(tensors[name] for name in "qkv"), table]
    made = [t.detach().to(dtype or t.dtype).clone() for t in made]
    return [t.requires_grad_(not (case.fixed_slopes and t is made[3])) for t in made]


def evaluate(function: Any, case: Case, given: list[torch.Tensor], **extra: Any) -> dict[str, torch.Tensor]:
    tensors = case.tensors(given[0].device)
    out, lse = function(*given[:3], score=(RelativeBias(given[3]),), **case.arguments, **extra)
    wanted = [t for t in given if t.requires_grad]
    grads = torch.autograd.grad([out, lse], wanted, [tensors["dout"].to(out.dtype), tensors["dlse"].to(lse.dtype)])
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv", "dscore"), grads, strict=False))}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_table_of_relative_positions(backend: str, place: torch.device, variant: Variant, case: Case) -> None:
    case = replace(case, backward=variant)
    if case.deterministic and unrepeatable(backend, place, variant):
        with pytest.raises(flashtile.NotSupported, match="the fused backward adds dq atomically"):
            evaluate(flashtile.attention, case, leaves(case, place), return_lse=True, options=case.options(backend))
        return
    result = evaluate(flashtile.attention, case, leaves(case, place), return_lse=True, options=case.options(backend))
    truth = evaluate(attention_reference, case, leaves(case, place, torch.float64))
    plain = evaluate(attention_plain, case, leaves(case, place))
    judge(case, result, truth, plain)


def test_together_with_the_library_s_own(backend: str, place: torch.device) -> None:
    case = Case("chain", seqlen_q=24, seqlen_k=36, causal=True)
    results = []
    for function, dtype, extra in (
        (flashtile.attention, None, {"return_lse": True, "options": Options(backend=backend)}),
        (attention_reference, torch.float64, {}),
    ):
        q, k, v, table = leaves(case, place, dtype)
        slopes = torch.tensor([0.5, 0.1], device=place).to(q.dtype).requires_grad_()
        chain = (flashtile.Softcap(3.0), RelativeBias(table), flashtile.Alibi(slopes))
        out, lse = function(q, k, v, causal=True, score=chain, **extra)
        results.append([out, lse, *torch.autograd.grad([out.sum() + lse.sum()], [q, k, v, table, slopes])])
    for got, exact in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-4)


def test_another_table_is_another_result(backend: str, place: torch.device) -> None:
    case = Case("table")
    q, k, v, table = (t.detach() for t in leaves(case, place))
    options = Options(backend=backend)
    outs = [flashtile.attention(q, k, v, score=(RelativeBias(t),), options=options) for t in (table, table * 2, table)]
    assert torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[0], outs[1])


def test_a_table_in_other_strides(backend: str, place: torch.device) -> None:
    case = replace(Case("strides"), deterministic=None)
    q, k, v, table = (t.detach() for t in leaves(case, place))
    turned = table.t().contiguous().t()
    options, grads = Options(backend=backend), []
    for captured in (table, turned):
        captured = captured.requires_grad_()
        flashtile.attention(q, k, v, score=(RelativeBias(captured),), options=options).square().sum().backward()
        grads.append(captured.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-5)


def test_gradients_added_atomically_are_refused_where_they_must_repeat(place: torch.device, backend: str) -> None:
    given = leaves(Case("atomic"), place)

    def gradient() -> torch.Tensor:
        options = Options(backend=backend, deterministic=True)
        out = flashtile.attention(*given[:3], score=(RelativeBias(given[3]),), options=options)
        return torch.autograd.grad(out.square().sum(), given[3])[0]

    if backend == "cpu":  # sums in a fixed order
        assert torch.equal(gradient(), gradient())
    else:
        with pytest.raises(flashtile.NotSupported, match="t5_bias's tensor is added atomically"):
            gradient()


def test_the_problem_is_spelled_with_it() -> None:
    spec = ScoreSpec(RelativeBias, (), (TensorSpec((2, 16), "fp32", True),))
    problem = flashtile.AttentionProblem(1, 8, 8, 2, 1, 16, 16, DType.FP16, score=(spec,))
    assert "score=t5_bias(2x16:fp32:grad)" in problem.spell()
    assert flashtile.AttentionProblem.parse(problem.spell()) == problem
