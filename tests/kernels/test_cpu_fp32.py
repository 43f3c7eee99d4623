"""How exact the CPU backend is in float32: long rows by the accuracy rule, and what it takes to keep it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import flashtile
from flashtile import Alibi
from flashtile.kernels.cpu import distance, peaked, products, tiled
from tests.cases import Case
from tests.judge import expected, judge, run
from tests.kernels.cpu_calls import OPTIONS, PLACE, inputs, step


def _long() -> Iterator[Case]:
    """Rows of thousands of keys, which take Triton's interpreter too long for `tests/cases.py`."""
    base = Case("long", seqlen_q=2048, seqlen_k=2048, heads_q=1, head_dim=64, upstream="out")
    for causal in (False, True):
        one = replace(base, causal=causal)
        name = "long-causal" if causal else "long"
        for dim in (16, 64, 128):
            yield replace(one, name=f"{name}-{dim}", head_dim=dim)
            yield replace(one, name=f"{name}-softcap-{dim}", head_dim=dim, score=("softcap30",))
            yield replace(one, name=f"{name}-alibi-{dim}", head_dim=dim, score=("alibi",), fixed_slopes=True)
        yield replace(one, name=f"{name}-lse", upstream="both")
        yield replace(one, name=f"{name}-softcap-lse", score=("softcap30",), upstream="both")
        yield replace(one, name=f"{name}-window", window=(256, None if causal else 256))
        yield replace(one, name=f"{name}-narrow-window", window=(16, None if causal else 16), head_dim=32)
        yield replace(one, name=f"{name}-large-scores", scale=1.0)
        yield replace(one, name=f"{name}-gqa", seqlen_q=1024, heads_q=2)
        yield replace(one, name=f"{name}-bias", score=("bias-keys",))
        yield replace(one, name=f"{name}-sink", sink="fp32", fixed_slopes=True)
        yield replace(one, name=f"{name}-head_dim_v", head_dim_v=40)
        yield replace(one, name=f"{name}-varlen", cu_q=(0, 600, 2048), cu_k=(0, 500, 2048))
        yield replace(one, name=f"{name}-padded", used_k=(2000,), used_q=(1990,))
        yield replace(one, name=f"{name}-document", mask="document", seqlen_q=1024, seqlen_k=1024)
    yield replace(base, name="long-4096", seqlen_q=512, seqlen_k=4096)


LONG: tuple[Case, ...] = tuple(_long())


@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_long_rows(case: Case) -> None:
    tensors = case.tensors(PLACE)
    judge(case, run("cpu", case, tensors), *expected(case, tensors))


@pytest.mark.parametrize("causal", [False, True])
def test_delegation_gives_torch_s_own_bits_in_most_rows(causal: bool) -> None:
    q, k, v, _ = inputs(2, 600, 600)
    q[1, 500, 2] *= 8.0  # a row that few keys decide
    given = [t.transpose(1, 2) for t in (q, k, v)]
    theirs = torch.nn.functional.scaled_dot_product_attention(
        given[0], given[1], given[2], is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
    out = flashtile.attention(q, k, v, causal=causal, options=OPTIONS)
    torch.testing.assert_close(out, theirs, rtol=1e-5, atol=1e-5)
    again = (out != theirs).any(3)
    assert again[1, 500, 2]
    assert again[:, peaked.FIRST_ROWS if causal else 0 :].sum(1).max() <= peaked.LEAST_ROWS


@pytest.mark.parametrize("causal", [False, True])
def test_the_gradients_of_large_scores(causal: bool) -> None:
    """An item's large scores cost other items nothing, not even a bit."""
    case = Case("large", 2, 600, 600, head_dim=32, causal=causal, upstream="out")
    tensors = case.tensors(PLACE)
    small = run("cpu", case, tensors)
    tensors["q"][1] *= 6.0
    result = run("cpu", case, tensors)
    judge(case, result, *expected(case, tensors))
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert torch.equal(result[name][0], small[name][0])


@pytest.mark.parametrize("head_dim", [16, 64, 100, 256])
def test_scores_are_more_exact_than_a_product_s(head_dim: int) -> None:
    """Of a query and keys near it, whose partial sums grow evenly."""
    k = torch.randn(1, 200, head_dim)
    q = k + 0.5 * torch.randn_like(k)
    exact = (q.double() @ k.double().mT).diagonal(dim1=1, dim2=2)
    errors = [
        (made.diagonal(dim1=1, dim2=2) - exact).square().mean().sqrt()
        for made in (products.Scratch(exact=True).product("scores", q, k.mT), torch.bmm(q, k.mT))
    ]
    assert errors[0] <= 0.7 * errors[1]


def test_sums_over_keys_are_more_exact_than_a_product_s() -> None:
    a, b = torch.rand(1, 64, 1000), torch.randn(1, 1000, 32)
    exact, made = a.double() @ b.double(), torch.zeros(1, 64, 32)
    products.Scratch(exact=True).add_product(made, a, b, 64)
    assert (made - exact).square().mean() <= 0.5 * (torch.bmm(a, b) - exact).square().mean()


def test_tiles_that_alibi_puts_out_of_reach_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    given, score = inputs(1, 1100, 1100), (Alibi(torch.tensor([0.5, 0.25, 0.5, 0.25])),)
    exponentials: list[int] = []
    exp = tiled._hidden_exp_

    def counted(*args: Any) -> torch.Tensor:
        exponentials[-1] += 1
        return exp(*args)

    monkeypatch.setattr(tiled, "_hidden_exp_", counted)
    results = []
    for leaves_out in (True, False):
        if not leaves_out:
            monkeypatch.setattr(distance.Reach, "misses", lambda *_: False)
        exponentials.append(0)
        results.append(step(*given, score=score))
    assert exponentials[0] < 0.8 * exponentials[1]
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["k", "v", "dout"])
def test_nan_is_seen_from_afar(name: str) -> None:
    """Where plain PyTorch multiplies it by a probability of 0."""
    given = inputs(1, 1100, 1100)
    given["qkv".index(name) if name in "qkv" else 3][0, 0] = math.nan
    out, _, dq, _, dv = step(*given, score=(Alibi(torch.full((4,), 0.5)),))
    if name == "dout":
        assert dv[0, -1].isnan().all()
    else:
        assert out[0, -1].isnan().any()
        assert dq[0, -1].isnan().any()


@pytest.mark.parametrize("case", [
    Case("slopes", 2, 300, 280, heads_q=4, head_dim=64, score=("alibi",)),
    Case("capped-slopes", 1, 300, 280, heads_q=2, head_dim=32, causal=True, score=("softcap30", "alibi")),
    Case("sink", 2, 119, 393, heads_q=2, head_dim=32, sink="fp32"),
], ids=lambda case: case.name)  # fmt: skip
def test_one_sum_per_head_is_rounded_once_in_small_problems(case: Case) -> None:
    tensors = case.tensors(PLACE)
    found, (exact, _) = run("cpu", case, tensors), expected(case, tensors)
    sums = [name for name in found if name.startswith(("dscore", "dsink"))]
    assert sums
    for name in sums:
        assert (found[name] - exact[name]).abs().max() <= 2.0**-23 * exact[name].abs().max(), name
