"""Options(delta="exact"): what cancels in a row of 16 bits cancels, in large problems too, whatever the CPU multiplies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashtile
from flashtile import Band, Bias, Dropout, KeyPadding, NotSupported, Options, dispatch
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.options import Delta
from flashtile.reference.attention import attention_reference
from flashtile.torch.context.wanted import against, wanted
from tests.cases import DTYPES


@pytest.fixture(autouse=True)
def _large(nothing_small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No problem is small enough to be corrected anyway, and the CPU multiplies 16 bits faster than float32."""
    monkeypatch.setattr("flashtile.kernels.cpu.products.multiplies", lambda _: True)


def inputs(rows: int, keys: int, dtype: str, head_dim: int = 32, offset: float = 4.0) -> list[torch.Tensor]:
    """q, k, v, dout of one item and two heads; out is far from 0, and so is its rounding."""
    q, k, v, dout = (torch.randn(1, n, 2, head_dim) for n in (rows, keys, keys, rows))
    return [t.to(DTYPES[dtype]) for t in (q, k, v + offset, dout)]


def gradients(
    backend: str, variant: Any, delta: Delta, q: Any, k: Any, v: Any, dout: Any, more: Any = (), **options: Any
) -> tuple[torch.Tensor, ...]:
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    told = Options(backend=backend, backward=variant, delta=delta)
    out = flashtile.attention(*leaves, options=told, **options)
    return torch.autograd.grad(out, (*leaves, *more), dout)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_gradients_of_a_row_s_scores_add_up_to_nothing(
    causal: bool, dtype: str, backend: str, variant: str, place: torch.device
) -> None:
    """|sum of ds| <= 2^-12 sum |ds|, as a bias of queries alone is told: its gradient is that sum."""
    q, k, v, dout = (t.to(place) for t in inputs(48, 160, dtype))
    bias = torch.zeros(1, 2, 48, 1, device=place, requires_grad=True)
    every = torch.zeros(1, 2, 48, 160, dtype=torch.float64, device=place, requires_grad=True)
    wide = [t.double() for t in (q, k, v)]
    out = attention_reference(*wide, causal=causal, score=(Bias(every),))[0]
    (ds,) = torch.autograd.grad(out, every, dout.double())
    bar = 2.0**-12 * ds.abs().sum(3, keepdim=True) + 1e-6
    sums: dict[str, torch.Tensor] = {}
    deltas: tuple[Delta, ...] = ("exact", "rounded")
    for delta in deltas:
        sums[delta] = gradients(backend, variant, delta, q, k, v, dout, (bias,), causal=causal, score=(Bias(bias),))[3].abs()
    assert (sums["exact"] <= bar).all()
    assert backend == "cpu" or not (sums["rounded"] <= bar).all()  # the CPU forms the gradient of a bias in float32 anyway


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("way", ["causal", "alone", "padding"])
def test_a_row_of_one_key_has_no_gradient_by_its_score(
    way: str, dtype: str, backend: str, variant: str, place: torch.device
) -> None:
    """dq is 0, and so is what it adds to dk, exactly; its row alone has an upstream gradient."""
    q, k, v, dout = (t.to(place) for t in inputs(96, 96, dtype))
    keep = torch.zeros(1, 96, dtype=torch.bool, device=place)
    keep[:, 5] = True
    options = {"causal": {"causal": True}, "alone": {"window": (0, 0)}, "padding": {"mask": KeyPadding(keep)}}[way]
    if way == "causal":
        dout[:, 1:] = 0.0
    dq, dk, _ = gradients(backend, variant, "exact", q, k, v, dout, **options)
    assert not dq.any()
    assert not dk.any()


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_rows_of_few_keys_beside_others(dtype: str, backend: str, variant: str, place: torch.device) -> None:
    """Few keys decide a row, dp and delta are large and nearly alike: the error is that of softmax in 16 bits, or less."""
    q, k, v, dout = (t.to(place) for t in inputs(64, 64, dtype, offset=8.0))
    error, plain = {}, {}
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    out = attention_reference(*wide, mask=Band(2, 0))[0]
    truth = torch.autograd.grad(out, wide, dout.double())
    narrow = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    hidden = ~torch.ones(64, 64, dtype=torch.bool, device=place).tril().triu(-2)
    scores = (torch.einsum("bihd,bjhd->bhij", *narrow[:2]) * 32**-0.5).masked_fill(hidden, float("-inf"))
    formed = torch.einsum("bhij,bjhd->bihd", scores.softmax(3), narrow[2])
    for name, made, usual, true in zip(
        "qk",
        gradients(backend, variant, "exact", q, k, v, dout, mask=Band(2, 0)),
        torch.autograd.grad(formed, narrow, dout),
        truth,
        strict=False,
    ):
        error[name], plain[name] = (made.double() - true).abs().max(), (usual.double() - true).abs().max()
    assert error["q"] <= 1.5 * plain["q"], (error, plain)
    assert error["k"] <= 1.5 * plain["k"], (error, plain)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_an_item_of_one_key_beside_dropout(dtype: str, backend: str, variant: str, place: torch.device) -> None:
    """150 queries see one key, which they keep or drop: dk is the sum of what is 0 in each."""
    q, k, v, dout = (t.to(place) for t in inputs(150, 40, dtype))
    used = torch.tensor([1], dtype=torch.int32, device=place)
    _, dk, _ = gradients(backend, variant, "exact", q, k, v, dout, seqused_k=used, dropout=Dropout(0.3, 5))
    assert not dk.any()


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_key_channel_that_is_a_constant(dtype: str, backend: str, variant: str, place: torch.device) -> None:
    """dq of that channel is scale * the sum of ds, each of which was rounded to 16 bits: less than the rounding of a row."""
    q, k, v, dout = (t.to(place) for t in inputs(48, 160, dtype))
    k[..., 0] = 8.0
    dq, _, _ = gradients(backend, variant, "exact", q, k, v, dout)
    rounding = 2.0 ** (-9 if dtype == "bf16" else -12)
    assert dq[..., 0].abs().max() <= 2.0 * rounding * dq[..., 1:].abs().max() * 8.0


def test_the_option_is_part_of_the_problem() -> None:
    spelling = "attention(q=1x2048x8x64,kv=2048x8x64,bf16,exact_delta)"
    assert AttentionProblem.parse(spelling).spell() == spelling
    assert not AttentionProblem.parse(spelling.replace("bf16", "fp32")).exact_delta  # float32's grade has it by itself
    assert AttentionProblem.parse(spelling.replace("bf16", "fp32,tf32")).exact_delta
    with pytest.raises(flashtile.InvalidProblem, match=r"delta is 'none'; it must be one of rounded, exact\."):
        Options(delta="none")  # pyright: ignore[reportArgumentType]


def test_a_ring_refuses_it() -> None:
    want = wanted(True, None, None, (), None, None, Options(delta="exact"))
    assert [bool(against(want, method, 64)) for method in ("ring", "allgather", "ulysses")] == [True, False, False]


@pytest.mark.usefixtures("hopper_runs")
def test_hopper_leaves_its_backward_to_others() -> None:
    problem = "attention(q=2x4096x16x128,kv=4096x16x128,bf16,exact_delta)"
    said = flashtile.explain(problem, device="h100")
    assert (said.forward.backend, said.backward.backend) == ("hopper", "triton")
    with pytest.raises(NotSupported, match="delta is to be exact"):
        dispatch.plan_backward(AttentionProblem.parse(problem), said.device, backend="hopper")
