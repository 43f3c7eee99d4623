"""Rows without keys, lengths of zero, logits at the ends of the range."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import flashtile
from flashtile import Band, Document, KeyPadding, Options, Tree
from flashtile.problem.mask import make_mask
from flashtile.problem.options import Variant
from flashtile.reference.attention import visible
from tests.cases import Case
from tests.judge import expected, judge, run

EMPTY_ROWS = (
    Case("causal", seqlen_q=56, seqlen_k=36, causal=True, heads_q=1),
    Case("causal-fp16", seqlen_q=56, seqlen_k=36, causal=True, dtype="fp16", heads_q=1),
    Case("far-below", seqlen_q=40, seqlen_k=50, mask=Band(right=-30), score=("alibi",)),
    Case("far-above", seqlen_q=40, seqlen_k=40, mask=Band(left=-20), score=("softcap",)),
    Case("window", seqlen_q=60, seqlen_k=20, window=(7, 0), score=("softcap", "alibi")),
    Case("nothing", mask=Band(left=-3, right=1), score=("alibi",)),
    Case("nothing-plain", mask=Band(right=-48)),
)


@pytest.mark.parametrize("arriving", [1.0, math.inf, math.nan], ids=["finite", "inf", "nan"])
@pytest.mark.parametrize("case", EMPTY_ROWS, ids=lambda case: case.name)
def test_rows_that_see_nothing(backend: str, place: torch.device, variant: Variant, case: Case, arriving: float) -> None:
    """out 0, lse -inf, gradients 0, even where lse's own gradient is not finite (d/dx log 0)."""
    case = replace(case, backward=variant)
    tensors = case.tensors(place)
    keep = visible(make_mask(case.causal, case.window, case.mask), case.seqlen_q, case.seqlen_k, place)
    empty, unseen = ~keep.any(1), ~keep.any(0)
    assert empty.any()
    tensors["dlse"][:, :, empty] = arriving
    result = run(backend, case, tensors)
    assert (result["out"][:, empty] == 0).all()
    assert (result["lse"][:, :, empty] == -math.inf).all()
    assert (result["dq"][:, empty] == 0).all()
    assert (result["dk"][:, unseen] == 0).all()
    assert (result["dv"][:, unseen] == 0).all()
    tensors["dlse"][:, :, empty] = 0.0
    judge(case, result, *expected(case, tensors))


@pytest.mark.parametrize("score", [(), ("softcap",), ("alibi",), ("alibi-per-batch", "softcap")], ids=str)
@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 16, 16), (2, 0, 16), (2, 16, 0), (2, 0, 0), (0, 0, 0)])
def test_lengths_of_zero(
    backend: str, place: torch.device, batch: int, seqlen_q: int, seqlen_k: int, variant: Variant, score: tuple[str, ...]
) -> None:
    for causal in (False, True):
        case = Case("zero", batch, seqlen_q, seqlen_k, backward=variant, score=score, causal=causal)
        tensors = case.tensors(place)
        result = run(backend, case, tensors)
        assert {name: t.shape for name, t in result.items() if name[0] == "d"} == {
            f"d{name}": t.shape for name, t in tensors.items() if name[0] != "d"
        }
        assert result["out"].shape == (batch, seqlen_q, 2, 16)
        assert (result.pop("lse") == -math.inf).all()
        assert all((t == 0).all() for t in result.values())


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 5), (5, 0)])
def test_masks_of_no_tokens(backend: str, place: torch.device, seqlen_q: int, seqlen_k: int) -> None:
    ids, others = (torch.zeros(2, n, dtype=torch.int32, device=place) for n in (seqlen_q, seqlen_k))
    masks = [Document(ids, others), Document(ids[0], others[0]), KeyPadding(others == 0), *([] if seqlen_q else [Tree(ids)])]
    for mask in masks:
        q, k = (torch.randn(2, n, 2, 16, device=place, requires_grad=True) for n in (seqlen_q, seqlen_k))
        out, lse = flashtile.attention(q, k, k, mask=mask, return_lse=True, options=Options(backend=backend))
        dq, dk = torch.autograd.grad(out.sum(), (q, k))
        assert (out.shape, lse.shape, dq.shape, dk.shape) == (q.shape, (2, 2, seqlen_q), q.shape, k.shape)
        assert (lse == -math.inf).all()
        assert all((t == 0).all() for t in (out, dq, dk))


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("logit", [-3e5, -88.8, 0.0, 88.8, 3e5])
def test_every_logit_is_the_same(backend: str, place: torch.device, logit: float, dtype: str, variant: Variant) -> None:
    """Then out is the mean of the values seen and lse is logit + log(count), however large the logit."""
    case = Case("same", seqlen_q=40, seqlen_k=70, causal=True, scale=1.0, dtype=dtype, backward=variant)
    tensors = case.tensors(place)
    tensors["q"].fill_(math.sqrt(abs(logit) / 16))
    tensors["k"].copy_(tensors["q"][:, :1, :1].expand_as(tensors["k"]) * math.copysign(1.0, logit))
    real = (tensors["q"].double()[0, 0, 0] @ tensors["k"].double()[0, 0, 0]).item()
    result = run(backend, case, tensors)

    count = torch.arange(31, 71, device=place)
    torch.testing.assert_close(result["lse"], (real + count.log()).float().expand_as(result["lse"]), rtol=1e-5, atol=1e-5)
    means = tensors["v"].double().cumsum(1)[:, 30:] / count[:, None, None]
    eps = torch.finfo(tensors["v"].dtype).eps
    # p = exp(s - lse) in the backward carries the rounding of a float32 lse
    drift = 2.0**-22 * abs(real) + 4 * eps
    torch.testing.assert_close(result["out"].double(), means.expand_as(result["out"]), rtol=4 * eps, atol=4 * eps)
    truth, _ = expected(case, tensors)
    for name, operand in (("dv", 1.0), ("dq", tensors["k"]), ("dk", tensors["q"])):
        largest = operand if isinstance(operand, float) else max(operand.abs().max().item(), 1.0)
        error = (result[name].double() - truth[name]).abs().max().item()
        assert error <= 8 * drift * largest * max(truth["dv"].abs().max().item(), 1.0), name


@pytest.mark.parametrize("seqlen", [1, 17, 31, 33, 63, 64, 65, 72, 96])
@pytest.mark.parametrize("causal", [False, True])
def test_tails_of_tiles_with_very_small_lse(
    backend: str, place: torch.device, variant: Variant, seqlen: int, causal: bool
) -> None:
    """Logits about -120: a padded key or query that scored 0 would give exp(0 + 120) = inf."""
    case = Case("tail", seqlen_q=seqlen, seqlen_k=seqlen, causal=causal, heads_q=1, backward=variant)
    tensors = case.tensors(place)
    tensors["q"][..., 0], tensors["k"][..., 0] = -24.0, 20.0
    tensors["dlse"].zero_()
    result, (truth, _) = run(backend, case, tensors), expected(case, tensors)
    assert truth["lse"].max() < -100
    for name, exact in truth.items():  # not by the accuracy rule: in dq the large element of every key cancels
        torch.testing.assert_close(result[name].double(), exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("seqlen_q", [1, 40])
def test_one_key(backend: str, place: torch.device, variant: Variant, seqlen_q: int) -> None:
    case = Case("one", seqlen_q=seqlen_q, seqlen_k=1, batch=2, heads_q=4, heads_kv=2, backward=variant)
    tensors = case.tensors(place)
    result, (truth, _) = run(backend, case, tensors), expected(case, tensors)
    torch.testing.assert_close(result["out"], tensors["v"].repeat_interleave(2, 2).expand_as(result["out"]))
    for name, exact in truth.items():
        torch.testing.assert_close(result[name].double(), exact, rtol=1e-5, atol=2e-5)
