"""What cancels in a row of the CPU backend's 16-bit problems: gradients of scores, and of a single key's; scores that do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashtile
from flashtile import Alibi, Band, Dilated, Dropout, Softcap
from flashtile.reference.attention import attention_reference
from tests.cases import DTYPES
from tests.kernels.cpu_calls import OPTIONS, inputs

KEYS = (24, 700)  # of one tile, and of two
WAYS: dict[str, dict[str, Any]] = {
    "full": {}, "causal": {"causal": True}, "window": {"window": (90, 3)},
    "softcap": {"causal": True, "score": (Softcap(5.0),)},
    "predicate": {"mask": Band(None, 0) & Dilated(3)},
    "alibi": {"causal": True, "score": (Alibi(torch.tensor([0.01, 0.1])),)},
}  # fmt: skip


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU that multiplies nothing faster than float32."""
    monkeypatch.setattr("flashtile.kernels.cpu.products.multiplies", lambda _: False)


def attention(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    return flashtile.attention(q, k, v, options=OPTIONS, **options)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("keys", KEYS, ids="{} keys".format)
@pytest.mark.parametrize("way", ["full", "causal", "window", "predicate", "alibi"])
def test_the_gradients_of_a_row_s_scores_add_up_to_nothing(way: str, keys: int, dtype: str) -> None:
    """|sum of ds| <= 2^-12 sum |ds|: the first channel of k is 1 and that of q 0, so that of dq is scale * sum of ds."""
    q, k, v, dout = inputs(1, keys, keys, 2, 1, dtype=DTYPES[dtype])
    q[..., 0], k[..., 0] = 0.0, 1.0
    v += 4.0  # out is far from 0, and so is its rounding
    q.requires_grad_()
    (dq,) = torch.autograd.grad(attention(q, k, v, WAYS[way]), q, dout)
    sums = dq[..., 0].double().abs() * q.shape[3] ** 0.5  # (1, rows, heads)
    assert (sums <= 2.0**-12 * sizes(q, k, v, dout, WAYS[way]) + 1e-6).all()


def sizes(q: Any, k: Any, v: Any, dout: Any, options: dict[str, Any]) -> torch.Tensor:
    """sum over keys of |ds|, (1, rows, heads), of float64: a bias of each score has that gradient."""
    q, k, v, dout = (t.detach().double() for t in (q, k, v, dout))
    bias = q.new_zeros((1, q.shape[2], q.shape[1], k.shape[1]), requires_grad=True)
    score = (*options.get("score", ()), flashtile.Bias(bias))
    out = attention_reference(q, k, v, **{**options, "score": score})[0]
    (ds,) = torch.autograd.grad(out, bias, dout)
    return ds.abs().sum(3).transpose(1, 2)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("keys", KEYS, ids="{} keys".format)
@pytest.mark.parametrize("way", ["causal", "softcap", "predicate", "alibi", "alone", "dropout"])
@pytest.mark.parametrize("flowing", ["out", "both"])
def test_a_row_of_one_key_has_no_gradient_by_its_score(
    flowing: str, way: str, keys: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dq 0 and nothing in dk, exactly, whatever multiplies; beside an lse gradient, that part."""
    more = {"alone": {"window": (0, 0)}, "dropout": {"causal": True, "dropout": Dropout(0.3, 5)}}
    options = {**WAYS, **more}[way]
    for fast in (False, True):
        monkeypatch.setattr("flashtile.kernels.cpu.products.multiplies", lambda _: fast)  # noqa: B023
        flashtile.cache_clear()
        q, k, v, dout = inputs(1, keys, keys, 2, 1, dtype=DTYPES[dtype])
        dout[:, 1:] = 0.0  # of row 0 alone, which sees key 0
        leaves = [t.requires_grad_() for t in (q, k, v)]
        if flowing == "out":
            dq, dk, _ = torch.autograd.grad(attention(q, k, v, options), leaves, dout)
            assert not dq[:, 0].any()
            assert not dk.any()
            continue
        out, lse = flashtile.attention(*leaves, options=OPTIONS, return_lse=True, **options)
        dlse = torch.zeros_like(lse)
        dlse[..., 0] = 0.5
        both = torch.autograd.grad((out, lse), leaves, (dout, dlse), retain_graph=True)
        alone = torch.autograd.grad((out, lse), leaves, (torch.zeros_like(dout), dlse))
        assert both[0].any()
        assert torch.equal(both[0], alone[0])
        assert torch.equal(both[1], alone[1])


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("keys", [40, 300], ids="{} keys".format)
@pytest.mark.parametrize("score", [(), (Softcap(1000.0),)], ids=["delegated", "tiles"])
def test_lse_where_the_largest_score_cancels(score: Any, keys: int) -> None:
    """The products of q and k are of 1000 and add up to less than 1: float32 would lose more than lse's 1e-5."""
    torch.manual_seed(keys)
    half = 400.0 * torch.randn(1, keys, 2, 80)
    q = torch.cat([half, torch.ones(1, keys, 2, 1), half], 3).half()
    k = torch.cat([torch.ones(1, keys, 2, 80), 0.3 * torch.rand(1, keys, 2, 1), -torch.ones(1, keys, 2, 80)], 3).half()
    v = torch.randn(1, keys, 2, 161).half()
    _, lse = flashtile.attention(q, k, v, causal=True, scale=1.0, score=score, options=OPTIONS, return_lse=True)
    exact = attention_reference(q.double(), k.double(), v.double(), causal=True, scale=1.0, score=score)[1]
    few = slice(0, 128)  # rows of no more keys
    error = (lse - exact)[..., few].abs() / exact[..., few].abs().clamp(min=1.0)
    assert error.max() <= 1e-5


@pytest.mark.parametrize(("upstream", "most"), [("both", 0.5), ("out", 1.0)])
def test_the_gradient_of_a_bias_of_queries_is_no_rounding_of_delta(upstream: str, most: float) -> None:
    """float32, keys in two tiles: a row's gradients add up to what arrives at lse. most: of plain PyTorch's error."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(4, rows, 1, 64) for rows in (300, 700, 700, 300))
    bias, dlse = torch.randn(4, 1, 300, 1), torch.randn(4, 1, 300) * (upstream == "both")

    def gradient(call: Any, dtype: torch.dtype) -> torch.Tensor:
        *operands, leaf, arriving, at_lse = (t.to(dtype) for t in (q, k, v, bias, dout, dlse))
        out, lse = call(*operands, flashtile.Bias(leaf.requires_grad_()))
        flowing = {"out": arriving, "lse": at_lse} if upstream == "both" else {"out": arriving}
        (found,) = torch.autograd.grad([out, lse][: len(flowing)], leaf, list(flowing.values()))
        return found.double()

    def ours(*given: Any) -> Any:
        *operands, score = given
        return flashtile.attention(*operands, score=(score,), return_lse=True, options=OPTIONS)

    def by_definition(q: Any, k: Any, v: Any, score: Any) -> Any:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scores = q @ k.mT / 8.0 + score.bias
        return (scores.softmax(3) @ v).transpose(1, 2), scores.logsumexp(3)

    exact = gradient(by_definition, torch.float64)
    error, plain = ((gradient(call, torch.float32) - exact).norm() for call in (ours, by_definition))
    assert error <= most * plain
