"""Bias: strides, types, -inf, and how its gradient is summed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import flashtile
from flashtile import AttentionProblem, Band, Bias, Options, Prefix, Softcap, dispatch
from flashtile.plan.device import named
from flashtile.problem.options import Variant
from flashtile.reference.attention import attention_reference


def inputs(place: torch.device, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    shapes = ((2, 20, 4, 16), (2, 36, 2, 16), (2, 36, 2, 16))
    return [torch.randn(shape, device=place, dtype=dtype, requires_grad=True) for shape in shapes]


def gradients(given: list[torch.Tensor], bias: torch.Tensor, leaf: torch.Tensor, options: Options) -> list[torch.Tensor]:
    out = flashtile.attention(*given, score=(Bias(bias),), causal=True, options=options)
    return [out, *torch.autograd.grad(out.square().sum(), (*given, leaf))]


@pytest.mark.parametrize("shape", [(2, 4, 20, 36), (4, 20, 1), (1, 1, 1, 36), (36,), ()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_problems_with_a_bias_of_either_type(
    backend: str, place: torch.device, variant: Variant, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    given, options = inputs(place, dtype), Options(backend=backend, backward=variant)
    for kind in (dtype, torch.float32):
        bias = torch.randn(shape, device=place, dtype=kind, requires_grad=True)
        mine = gradients(given, bias, bias, options)
        exact = [t.detach().double().requires_grad_() for t in (*given, bias)]
        out, _ = attention_reference(*exact[:3], score=(Bias(exact[3]),), causal=True)
        truth = [out, *torch.autograd.grad(out.square().sum(), exact)]
        assert mine[4].dtype is kind
        assert mine[4].shape == shape
        tolerance = 0.02 if dtype is torch.float16 else 0.15
        for got, wanted in zip(mine, truth, strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)


def test_any_strides(backend: str, place: torch.device) -> None:
    given, options = inputs(place), Options(backend=backend)
    dense = torch.randn(2, 4, 20, 36, device=place)
    results = []
    for leaf, view in (
        (dense.clone(), lambda t: t),
        (dense.permute(3, 1, 0, 2).contiguous(), lambda t: t.permute(2, 1, 3, 0)),
        (torch.stack([dense, dense.roll(1)], -1), lambda t: t[..., 0]),
    ):
        leaf = leaf.requires_grad_()
        *made, grad = gradients(given, view(leaf), leaf, options)
        results.append([*made, view(grad)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_an_expanded_bias_is_read_as_it_is(backend: str, place: torch.device) -> None:
    given, options = inputs(place), Options(backend=backend)
    plane = torch.randn(20, 36, device=place, requires_grad=True)
    small = gradients(given, plane, plane, options)
    wide = gradients(given, plane.expand(2, 4, 20, 36), plane, options)
    for a, b in zip(small, wide, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_minus_infinity_hides_a_key(backend: str, place: torch.device, variant: Variant) -> None:
    given = inputs(place)
    hidden = torch.zeros(20, 36, device=place)
    hidden[:, 7:19] = -math.inf
    hidden[5] = -math.inf  # a row that sees nothing
    hidden.requires_grad_()
    options = Options(backend=backend, backward=variant)
    out, lse = flashtile.attention(*given, score=(Bias(hidden),), return_lse=True, options=options)
    assert (out[:, 5] == 0).all()
    assert (lse[:, :, 5] == -math.inf).all()
    grads = torch.autograd.grad(out.square().sum(), (*given, hidden))
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][:, 5] == 0).all()
    assert (grads[1][:, 7:19] == 0).all()
    assert (grads[3][:, 7:19] == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("named", ["band", "predicate"])
def test_what_a_mask_hides_reaches_no_gradient_through_a_curve(
    backend: str, place: torch.device, variant: Variant, named: str, bad: float
) -> None:
    given, clean = inputs(place), torch.randn(2, 4, 20, 36, device=place)
    mask: Any = Band(right=0) if named == "band" else Prefix(torch.full((2,), 30, dtype=torch.int32, device=place))
    index = torch.arange(36, device=place)
    hidden = index > torch.arange(16, 36, device=place)[:, None] if named == "band" else index >= 30
    options = Options(backend=backend, backward=variant)

    def results(bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = flashtile.attention(*given, mask=mask, score=(Bias(bias), Softcap(5.0)), options=options)
        return torch.autograd.grad(out.square().sum(), (*given, bias))

    dirty = clean.masked_fill(hidden, bad)
    for got, exact in zip(results(dirty.requires_grad_()), results(clean.requires_grad_()), strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(20, 36), (4, 1, 36), (2, 1, 20, 1), ()], ids=str)
def test_its_gradient_repeats_bitwise(backend: str, place: torch.device, variant: Variant, shape: tuple[int, ...]) -> None:
    given, bias = inputs(place), torch.randn(shape, device=place, requires_grad=True)
    options = Options(backend=backend, backward=variant)
    first = gradients(given, bias, bias, options)[4]
    for _ in range(20 if place.type == "cuda" else 2):
        assert torch.equal(gradients(given, bias, bias, options)[4], first)


def test_of_an_expanded_bias_that_wants_no_gradient_one_element_is_read(backend: str, place: torch.device) -> None:
    given, options = inputs(place), Options(backend=backend)
    one = torch.randn(1, 1, 20, 36, device=place)
    wide = one.expand(2, 4, 20, 36)
    assert Bias(wide).tensors(2, 4)[0].shape == one.shape
    assert Bias(wide).tensors(3, 5)[0].shape == wide.shape  # whose size is wrong: to be refused
    outs = [flashtile.attention(*given, score=(Bias(bias),), options=options) for bias in (one, wide, wide.contiguous())]
    assert torch.equal(outs[0], outs[1])
    torch.testing.assert_close(outs[1], outs[2])
    leaf = wide.detach().requires_grad_()
    made = gradients(given, leaf, leaf, options)[4]
    assert made.shape == wide.shape
    assert (made[1, 3] != 0).any()


@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 8, 8), (2, 0, 8), (2, 8, 0)])
@pytest.mark.parametrize("axes", [(1, 1, 1, 1), (0, 0, 0, 0), (1, 0, 0, 1), (1, 0, 1, 0)], ids=str)
def test_empty_problems(
    backend: str, place: torch.device, batch: int, seqlen_q: int, seqlen_k: int, axes: tuple[int, ...]
) -> None:
    q = torch.randn(batch, seqlen_q, 2, 16, device=place)
    k = torch.randn(batch, seqlen_k, 2, 16, device=place)
    sizes = (batch, 2, seqlen_q, seqlen_k)
    shape = [1 if one else size for one, size in zip(axes, sizes, strict=True)]
    bias = torch.randn(shape, device=place, requires_grad=True)
    for _ in range(2):  # the second call knows the first one's launches
        out = flashtile.attention(q, k, k, score=(Bias(bias),), options=Options(backend=backend))
        assert (out == 0).all()
        (grad,) = torch.autograd.grad(out.sum(), bias)
        assert (grad == 0).all()


@pytest.mark.parametrize("shape", ["1x8x1x1024", "2x1x1024x1", "1x1x1x1"])
def test_nothing_of_the_size_of_all_scores_is_made(shape: str) -> None:
    pytest.importorskip("triton")
    problem = AttentionProblem.parse(f"attention(q=2x1024x8x64,kv=1024x8x64,fp16,score=bias({shape}:fp32:grad))")
    plan = dispatch.plan_backward(problem, named("sm80"), backend="triton")
    assert plan.scratch_bytes < 2 * 1024 * 8 * 4 * 8
