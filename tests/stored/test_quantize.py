"""quantize: what it stores, what it leaves alone, and what its methods are for."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch

import flashtile
from flashtile import Options, quantize
from flashtile.kernels.portable.quantize import QuantizeProblem, plan_quantize
from flashtile.plan.call import KernelCall
from flashtile.plan.device import H100
from flashtile.reference.attention import attention_reference
from flashtile.torch.api.quantize import Quantized, quantised, quantised_by_kernel
from flashtile.torch.call.lengths import given_lengths
from flashtile.torch.call.rows import rows_of_items

FP8 = Options(precision="fp8")


def inputs(offset: float = 0.0, outliers: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 90, heads, 64, generator=generator) for heads in (4, 2, 2))
    k = k + offset * torch.randn(1, 1, 2, 64, generator=generator)
    if outliers:  # FlashAttention-3's: one number in a thousand is ten times as large
        for t in (q, k):
            t += 10.0 * torch.randn(t.shape, generator=generator) * (torch.rand(t.shape, generator=generator) < 0.001)
    return [t.bfloat16() for t in (q, k, v)]


def error(given: list[torch.Tensor], method: str) -> float:
    """What q and k stored by this method cost: of out, relative RMS."""
    z = quantize(*given, method=method)
    q, k = (t.double() * s[:, None, :, None] for t, s in ((z.q, z.q_scale), (z.k, z.k_scale)))
    exact, made = attention_reference(*given)[0], attention_reference(q, k, given[2])[0]
    return ((made - exact).norm() / exact.norm()).item()


def test_a_head_spans_the_range() -> None:
    z = quantize(*inputs())
    for stored in z.tensors:
        assert stored.dtype is torch.float8_e4m3fn
        assert (stored.float().abs().amax((1, 3)) == 448.0).all()
    assert z.q_scale.shape == (2, 4)
    assert z.k_scale.shape == z.v_scale.shape == (2, 2)
    assert z.shift is None


def test_methods_help_where_they_should() -> None:
    assert error(inputs(offset=20.0), "mean") < 0.3 * error(inputs(offset=20.0), "amax")
    assert error(inputs(outliers=True), "hadamard") < 0.97 * error(inputs(outliers=True), "amax")
    assert error(inputs(), "amax") < 4e-2


@pytest.mark.parametrize("method", ["mean", "hadamard", "mean+hadamard"])
@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_out_and_lse_of_the_original(method: str, varlen: bool) -> None:
    """lse with `shift` is that of the scores with k's mean in them."""
    function: Any = flashtile.attention
    given, lengths = inputs(offset=3.0), dict[str, Any]()
    if varlen:
        given = [t.flatten(0, 1) for t in given]
        starts = torch.tensor([0, 50, 50, 170], dtype=torch.int32)
        lengths, function = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}, flashtile.attention_varlen
    z = quantize(*given, method=method, **lengths)
    out, lse = function(*z.tensors, **z.scales, **lengths, causal=True, return_lse=True, options=FP8)
    exact, exact_lse = attention_reference(*given, causal=True, **lengths)
    rows = slice(0, 170) if varlen else slice(None)
    assert ((out - exact)[rows].norm() / exact[rows].norm()).item() < (5e-2 if "mean" in method else 9e-2)
    there = exact_lse.isfinite()
    assert (z.lse(lse)[there] - exact_lse[there]).abs().mean() < 0.1


def test_padding_decides_no_scale() -> None:
    q, k, v = inputs()
    used = torch.tensor([40, 90], dtype=torch.int32)
    clean = quantize(q, k, v, seqused_k=used, method="mean")
    k[0, 40:], v[0, 40:] = 1e4, float("nan")
    noisy = quantize(q, k, v, seqused_k=used, method="mean")
    for name in ("q_scale", "k_scale", "v_scale", "shift"):
        assert torch.equal(getattr(clean, name), getattr(noisy, name)), name
    assert torch.equal(clean.k[0, :40].view(torch.uint8), noisy.k[0, :40].view(torch.uint8))
    outs = [flashtile.attention(*z.tensors, **z.scales, seqused_k=used, options=FP8) for z in (clean, noisy)]
    assert torch.equal(*outs)


def test_zeros_and_nothing() -> None:
    q, k, v = (torch.zeros_like(t) for t in inputs())
    z = quantize(q, k, v)
    assert (z.q_scale == 1.0).all()
    assert not flashtile.attention(*z.tensors, **z.scales, options=FP8).any()
    none = quantize(q[:, :0], k[:, :0], v[:, :0], method="mean+hadamard")
    assert none.q.shape == (2, 0, 4, 64)
    assert quantize(q[:0], k[:0], v[:0], method="mean").k_scale.shape == (0, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("lengths", ["dense", "used", "varlen"])
def test_the_kernel_stores_what_the_formula_does(device: torch.device, dtype: torch.dtype, lengths: str) -> None:
    """Also beside NaN, infinity, heads of zeros, and items that share a tile."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 150, 3, 80, generator=generator) * torch.tensor([1e-3, 50.0, 0.0])[:, None]
    x[0, 5, 1, 3], x[1, 7, 0, 0] = float("nan"), float("inf")
    x, given = x.to(dtype), None
    if lengths == "used":
        given = given_lengths(seqused_k=torch.tensor([40, 150], dtype=torch.int32))
    elif lengths == "varlen":
        starts = torch.tensor([0, 70, 70, 290], dtype=torch.int32)
        given, x = given_lengths(cu_seqlens_q=starts, cu_seqlens_k=starts), x.flatten(0, 1)[None]
    items = 2 if given is None else given.batch(x)
    mean = torch.randn(items, 3, 80, generator=generator)
    for less in (None, mean):
        wanted, wanted_scale = quantised(x, given, "k", less)
        found, scale = quantised_by_kernel(x.to(device), _moved(given, device), "k", None if less is None else less.to(device))
        assert torch.equal(scale.cpu(), wanted_scale)
        counts = rows_of_items(x, given, "k")[1]
        both = [t.cpu().float() for t in (found, wanted)]
        both = both if counts is None else [t[counts] for t in both]
        assert torch.equal(both[0].isnan(), both[1].isnan())
        assert torch.equal(*(t.nan_to_num() for t in both))


def test_many_empty_items(device: torch.device) -> None:
    """More scales than tiles have programs: each is stored, and what lies behind the rows is not touched."""
    memory = torch.full((40, 1, 64), 7.0, dtype=torch.float16, device=device)
    starts = torch.tensor([0] * 200 + [3] * 99 + [10], dtype=torch.int32)
    given, x = given_lengths(cu_seqlens_q=starts, cu_seqlens_k=starts), memory[None, :10]
    memory[:10] = torch.randn(10, 1, 64, generator=torch.Generator().manual_seed(3)).half().to(device)
    wanted, scale = quantised(x.cpu(), given, "k")
    found, found_scale = quantised_by_kernel(x, _moved(given, device), "k", None)
    assert torch.equal(found_scale.cpu(), scale)
    assert torch.equal(found.cpu().float(), wanted.float())
    problem = QuantizeProblem(1, 10, 1, 64, "fp16", 299, named=True)
    assert {call.grid for call in plan_quantize(problem, H100).calls if isinstance(call, KernelCall)} == {(1, 1, 1)}


def _moved(given: Any, place: torch.device) -> Any:
    return None if given is None else given_lengths(**{name: t.to(place) for name, t in given.tensors.items()})


def test_what_is_stored_can_be_kept_in_a_file() -> None:
    z = quantize(*inputs(), method="mean")
    file = io.BytesIO()
    torch.save(z, file)
    file.seek(0)
    for made in (pickle.loads(pickle.dumps(z)), torch.load(file), copy.deepcopy(z)):
        assert isinstance(made, Quantized)
        for one, other in zip(made, z, strict=True):
            assert one.dtype is other.dtype
            assert torch.equal(one.float(), other.float())


def test_bad_requests_are_named() -> None:
    q, k, v = inputs()
    with pytest.raises(flashtile.InvalidProblem, match="method is 'max'; it must be one of amax, mean"):
        quantize(q, k, v, method="max")
    with pytest.raises(flashtile.InvalidProblem, match=r"k is torch\.float32; it must be float16 or bfloat16"):
        quantize(q, k.float(), v)
    with pytest.raises(flashtile.InvalidProblem, match="head_dim is 48 and method has 'hadamard'"):
        quantize(q[..., :48], k[..., :48], v, method="hadamard")
