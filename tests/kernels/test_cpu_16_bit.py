"""The CPU backend on fp16 and bf16: torch's own kernel where lse is not asked for, narrow or float32 products in tiles."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import flashtile
from flashtile import Alibi, Band, Bias, Softcap
from flashtile.features.scores.relative import Relative
from flashtile.kernels.cpu import masked, scored
from flashtile.problem.dtype import DType
from flashtile.problem.score import ScoreSpec
from flashtile.reference.attention import attention_plain, attention_reference
from tests.cases import CASES, DTYPES, Case
from tests.judge import evaluate, expected, judge, run
from tests.kernels.cpu_calls import OPTIONS, PLACE, inputs, notes, problem


def test_notes_of_16_bits(narrow: bool) -> None:
    flash, otherwise = (
        "cpu: delegates to torch's flash attention in bf16",
        ", and tiles where scores may be above 65536 or not finite",
    )
    native, mended = flash + otherwise, f"{flash}, lse mended{otherwise}"
    with_mask = f"{flash} with an additive mask"
    widened = "cpu: delegates to torch's flash attention, bf16 widened to fp32"
    twice = widened.replace("bf16", "both passes, bf16") + ", and tiles for items where scores are large"
    tiles = "cpu: tiled online softmax, tile 64x64, products with probabilities in bf16"
    p = problem(dtype=DType.BF16)
    assert notes(p) == (native, tiles if narrow else twice)
    assert notes(replace(p, returns_lse=True)) == ((mended, tiles) if narrow else (widened, twice))
    windowed = "cpu: tiled online softmax, tile 512x512" + narrow * ", products with probabilities in bf16"
    p = problem(2048, 2048, mask=Band(9, 9), dtype=DType.BF16)
    assert notes(p) == (with_mask + otherwise, windowed)
    assert notes(replace(p, returns_lse=True)) == (f"{with_mask}, lse mended{otherwise}" if narrow else windowed, windowed)
    p = replace(p, score=(ScoreSpec(Softcap, (30.0,)),))
    assert notes(p) == (f"{flash} with a mask of scores{otherwise}" if narrow else windowed, windowed)
    assert notes(replace(p, returns_lse=True)) == (windowed, windowed)


NARROW = [case for case in CASES if case.backward != "fused" and case.dtype != "fp32"]


@pytest.mark.usefixtures("small_tiles", "narrow")
@pytest.mark.parametrize("case", NARROW, ids=lambda case: case.name)
def test_case_of_16_bits(case: Case) -> None:
    tensors = case.tensors(PLACE)
    truth, plain = expected(case, tensors)
    judge(case, run("cpu", case, tensors), truth, plain)
    case = replace(case, upstream="out")

    def without_lse(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return case.function(*args, **kwargs), truth["lse"].float()

    judge(case, evaluate(without_lse, case, tensors, options=case.options("cpu")), *expected(case, tensors))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
def test_16_bit_delegation_gives_torch_s_own_bits(causal: bool, dtype: str) -> None:
    q, k, v = (t.transpose(1, 2) for t in inputs(2, 90, 90, dtype=DTYPES[dtype])[:3])
    sdpa: Any = torch.nn.functional.scaled_dot_product_attention
    theirs = sdpa(q, k, v, is_causal=causal, enable_gqa=True)
    ours = flashtile.attention(*(t.transpose(1, 2) for t in (q, k, v)), causal=causal, options=OPTIONS)
    assert torch.equal(ours.transpose(1, 2), theirs)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("far", [0.25, 6.1, 20.0, 300.0])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_lse_is_mended_where_torch_s_exponential_is_worst(dtype: str, far: float) -> None:
    """All keys but one have one score: whatever the exponential is off by there, so is the sum."""
    q, k, v, _ = inputs(1, 8, 600, 2, 2, dtype=DTYPES[dtype])
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0], k[:, 5, :, 0] = 1.0, far
    ways: list[dict[str, Any]] = [{}, {"causal": True}, {"window": (500, 40)}, {"score": [Alibi(torch.tensor([0.0, 0.01]))]}]
    for how in ways:
        _, lse = flashtile.attention(q, k, v, scale=1.0, return_lse=True, options=OPTIONS, **how)
        _, exact = attention_reference(q.double(), k.double(), v.double(), scale=1.0, **how)
        assert ((lse - exact).abs() <= 1e-6 * exact.abs().clamp(min=1.0)).all(), how


@pytest.mark.usefixtures("small_tiles", "narrow")
@pytest.mark.parametrize("how", [{}, {"window": (20, 9)}, {"window": (None, 5)}, {"window": (30, None)}], ids=str)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_strips(how: dict[str, Any], dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there are more queries than keys, and the reverse, and of several items and slopes each."""
    for name in ("ROWS", "ROWS_OF_WINDOW"):
        monkeypatch.setattr(masked, name, 16)
    for name in ("SCORES", "SCORES_OF_FULL", "LEAST_ROWS"):
        monkeypatch.setattr(scored, name, 16)
    for seqlen_q, seqlen_k in ((90, 90), (70, 90), (90, 70), (1, 90)):
        for score in ([], [Alibi(torch.rand(2, 4))], [Relative(torch.rand(4))], [Softcap(3.0)]):
            q, k, v, _ = inputs(2, seqlen_q, seqlen_k, dtype=DTYPES[dtype])
            made = flashtile.attention(q, k, v, score=score, options=OPTIONS, **how)
            exact, _ = attention_reference(q.double(), k.double(), v.double(), score=score, **how)
            plain, _ = attention_plain(q, k, v, score=score, **how)
            floor = 2 * torch.finfo(q.dtype).eps * exact.abs().max()
            assert (made - exact).abs().max() <= torch.maximum(1.5 * (plain - exact).abs().max(), floor)


@pytest.mark.parametrize("slope", [1e4, math.nan, math.inf])
def test_slopes_beyond_what_is_delegated(slope: float) -> None:
    """The rows that a slope spoils are those of plain torch."""
    q, k, v, _ = inputs(1, 50, 50, dtype=torch.bfloat16)
    slopes = torch.tensor([0.5, slope, 0.25, 0.125])
    out = flashtile.attention(q, k, v, score=[Alibi(slopes)], causal=True, options=OPTIONS)
    plain, _ = attention_plain(q.float(), k.float(), v.float(), score=[Alibi(slopes)], causal=True)
    assert torch.equal(out.isfinite(), plain.isfinite())


@pytest.mark.usefixtures("small_tiles", "narrow")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e9, -1e9])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_biases_beyond_what_is_delegated(dtype: str, bad: float) -> None:
    """In one score, and in a whole row: what plain torch makes of it, and 0 in a row that sees nothing."""
    q, k, v, _ = inputs(1, 50, 50, dtype=DTYPES[dtype])
    for row in (False, True):
        bias = torch.randn(50, 50)
        bias[20, ... if row else 7] = bad
        out = flashtile.attention(q, k, v, score=[Bias(bias)], options=OPTIONS)
        exact, _ = attention_plain(q.float(), k.float(), v.float(), score=[Bias(bias)])
        if bad == -math.inf:
            exact = exact.nan_to_num(0.0)  # a row that sees nothing
        assert torch.equal(out.isfinite(), exact.isfinite())
        seen = torch.where(exact.isfinite(), exact, 0.0)
        assert (torch.where(out.isfinite(), out, 0.0) - seen).abs().max() <= 8 * torch.finfo(q.dtype).eps * seen.abs().max()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("how", [{}, {"causal": True}, {"window": (40, 40)}], ids=str)
def test_what_is_visible_propagates_in_16_bits_too(how: dict[str, Any], dtype: str, bad: float) -> None:
    """torch's 16-bit kernel makes numbers of it."""
    for index, name in enumerate("qkv"):
        given = inputs(1, 50, 50, dtype=DTYPES[dtype])[:3]
        given[index][0, 20, 0, 3] = bad
        out = ~flashtile.attention(*given, options=OPTIONS, **how).isfinite()
        # plain torch in float32: in 16 bits a NaN gets into the next row of a product too (`products.NARROW_LENGTH`)
        plain = ~attention_plain(*(t.float() for t in given), **how)[0].isfinite()
        assert plain.any()
        assert out[0, 20:].any(-1).ge(plain[0, 20:].any(-1)).all(), name
        assert not out[:, :, 2:].any(), "the heads of the other group"


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_large_scores_in_16_bits(dtype: str) -> None:
    """Forward and backward must agree on them to the last bit: exp(score - lse) is 1 or 0."""
    q, k, v, dout = inputs(1, 200, 200, dtype=DTYPES[dtype])
    leaves = [t.detach().requires_grad_() for t in (q * 1000, k * 1000, v)]
    for t in torch.autograd.grad(flashtile.attention(*leaves, options=OPTIONS), leaves, dout):
        assert t.isfinite().all()
