"""flash-attention 2's functions, forward and backward, against its documented formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from flashtile import InvalidProblem, NotSupported
from flashtile.compat import flash_attn as fa
from flashtile.compat import flash_attn_passes as passes
from tests.compat.formula import attend, visible

LENGTHS = ((9, 14), (6, 3), (0, 5), (4, 4))  # of queries and keys, item by item; the second has queries that see nothing
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"softmax_scale": 0.4},
    "window": {"window_size": (3, 2)},
    "window-tensor": {"window_size": torch.tensor([4, 1])},
    "window-left": {"window_size": (2, -1), "causal": True},
    "window-right": {"window_size": (-1, 1)},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": (4,), "causal": True},
    "alibi-batch": {"alibi_slopes": (2, 4)},
    "deterministic": {"deterministic": True},
}


def close(mine: Any, theirs: Any) -> None:
    torch.testing.assert_close(mine, theirs.to(mine), rtol=2e-4, atol=2e-5)


def agree(packs: list[torch.Tensor], out: torch.Tensor, true: torch.Tensor) -> None:
    """out and the gradients of packs are the formula's."""
    close(out, true)
    dout = torch.randn_like(out)
    for mine, theirs in zip(
        torch.autograd.grad(out, packs, dout), torch.autograd.grad(true, packs, dout.double()), strict=True
    ):
        close(mine, theirs)


def draw(*shapes: tuple[int, ...], place: torch.device) -> list[torch.Tensor]:
    return [torch.randn(shape).to(place).requires_grad_() for shape in shapes]


def given(case: str, place: torch.device, batch: int) -> tuple[dict[str, Any], dict[str, Any], tuple[int, int]]:
    """(flash-attention's arguments, the formula's, the window on both sides)."""
    how = dict(CASES[case])
    if "alibi_slopes" in how:
        shape = how["alibi_slopes"]
        how["alibi_slopes"] = torch.rand(shape if len(shape) == 1 else (batch, shape[1])).to(place)
    left, right = (int(n) for n in how.get("window_size", (-1, -1)))
    right = 0 if how.get("causal") else right
    rules = {"scale": how.get("softmax_scale"), "softcap": how.get("softcap", 0.0), "slopes": how.get("alibi_slopes")}
    return how, rules, (left, right)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", ["apart", "kv", "qkv"])
def test_dense(through: str, place: torch.device, case: str, form: str) -> None:
    how, rules, window = given(case, place, 2)
    if form == "qkv":
        packs = draw((2, 12, 3, 4, 16), place=place)
        parts, call = packs[0].unbind(2), fa.flash_attn_qkvpacked_func
    elif form == "kv":
        packs = draw((2, 9, 4, 16), (2, 14, 2, 2, 16), place=place)
        parts, call = (packs[0], *packs[1].unbind(2)), fa.flash_attn_kvpacked_func
    else:
        packs = draw((2, 14, 4, 16), (2, 9, 1, 16), (2, 9, 1, 16), place=place)  # the first rows may see nothing
        parts, call = tuple(packs), fa.flash_attn_func
    out, lse, signs = call(*packs, return_attn_probs=True, **how)
    true, true_lse, _ = attend(*parts, visible(parts[0].shape[1], parts[1].shape[1], *window), **rules)
    agree(packs, out, true)
    close(lse, true_lse)
    assert lse.dtype == torch.float32
    assert signs.numel() == 0
    close(call(*packs, **how), true)


@pytest.mark.parametrize("case", ["plain", "causal", "window", "softcap", "alibi-batch"])
@pytest.mark.parametrize("form", ["apart", "kv", "qkv"])
def test_varlen(through: str, place: torch.device, case: str, form: str) -> None:
    lengths = LENGTHS if form != "qkv" else tuple((n, n) for n, _ in LENGTHS)
    how, rules, window = given(case, place, len(lengths))
    ends = [torch.tensor([0, *n]).cumsum(0).to(place, torch.int32) for n in zip(*lengths, strict=True)]
    total_q, total_k = (int(e[-1]) for e in ends)
    most = [max(n) for n in zip(*lengths, strict=True)]
    call: Callable[..., Any]
    if form == "qkv":
        packs, call, sizes = draw((total_q, 3, 4, 16), place=place), fa.flash_attn_varlen_qkvpacked_func, (ends[0], most[0])
        parts = packs[0].unbind(1)
    elif form == "kv":
        packs, call = draw((total_q, 4, 16), (total_k, 2, 2, 16), place=place), fa.flash_attn_varlen_kvpacked_func
        parts, sizes = (packs[0], *packs[1].unbind(1)), (*ends, *most)
    else:
        packs, call = draw((total_q, 4, 16), *[(total_k, 2, 16)] * 2, place=place), fa.flash_attn_varlen_func
        parts, sizes = tuple(packs), (*ends, torch.tensor(most[0]), most[1])
    out, lse, _ = call(*packs, *sizes, return_attn_probs=True, **how)
    true, sums = [], []
    for i, ((a, b), (c, d)) in enumerate(zip(*([*pairwise(e)] for e in ends), strict=True)):
        of_item = rules | {"slopes": None if rules["slopes"] is None else rules["slopes"][i : i + 1]}
        seen = visible(int(b - a), int(d - c), *window)
        made, lse_of_item, _ = attend(parts[0][None, a:b], parts[1][None, c:d], parts[2][None, c:d], seen, **of_item)
        true.append(made[0])
        sums.append(lse_of_item[0])
    close(out, torch.cat(true))
    close(lse, torch.cat(sums, 1))
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(torch.cat(true), packs, dout.double())
    for mine, theirs in zip(torch.autograd.grad(out, packs, dout), wanted, strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("case", ["plain", "causal", "window", "softcap", "alibi-batch"])
def test_dropout_is_what_its_signs_say(through: str, place: torch.device, case: str) -> None:
    """S_dmask holds exp(score - largest), negative where dropped; the output and its gradients are of those kept."""
    how, rules, window = given(case, place, 2)
    packs = draw((2, 9, 4, 16), (2, 14, 2, 16), (2, 14, 2, 16), place=place)
    out, lse, signs = fa.flash_attn_func(*packs, 0.3, return_attn_probs=True, **how)
    assert signs.shape == (2, 4, 128, 128)
    assert 0.2 < (signs[:, :, :9, :14] < 0).float().mean() < 0.4 or window != (-1, -1)
    shown = signs[:, :, :9, :14]
    true, true_lse, made = attend(*packs, visible(9, 14, *window), dropped=shown < 0, p=0.3, **rules)
    agree(packs, out, true)
    close(lse, true_lse)
    close(shown.abs() / shown.abs().sum(-1, keepdim=True), made)


def test_dropout_varlen(through: str, place: torch.device) -> None:
    ends = torch.tensor([0, 9, 13], dtype=torch.int32, device=place)
    packs = draw((13, 2, 16), (13, 2, 16), (13, 2, 16), place=place)
    torch.manual_seed(5)
    out, _, signs = fa.flash_attn_varlen_func(*packs, ends, ends, 9, 9, 0.3, causal=True, return_attn_probs=True)
    for i, (a, b) in enumerate(((0, 9), (9, 13))):
        dropped = signs[i : i + 1, :, : b - a, : b - a] < 0
        assert dropped.any()
        true, *_ = attend(*(t[None, a:b] for t in packs), visible(b - a, b - a, -1, 0), dropped=dropped, p=0.3)
        close(out[a:b], true[0])
    torch.manual_seed(5)
    again = fa.flash_attn_varlen_func(*packs, ends, ends, 9, 9, 0.3, causal=True)
    assert torch.equal(out, again)


def passes_for(varlen: bool, place: torch.device) -> tuple[list[torch.Tensor], tuple[Any, ...], Any, Any]:
    shapes = [(13, 2, 16), (17, 2, 16), (17, 2, 16)] if varlen else [(2, 9, 4, 16), (2, 14, 2, 16), (2, 14, 2, 16)]
    tensors = [torch.randn(shape).to(place, torch.float16) for shape in shapes]
    if not varlen:
        return tensors, (), passes._flash_attn_forward, passes._flash_attn_backward
    ends = [torch.tensor(e, dtype=torch.int32, device=place) for e in ((0, 9, 13), (0, 9, 17))]
    return tensors, (*ends, 9, 9), passes._flash_attn_varlen_forward, passes._flash_attn_varlen_backward


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize(("p", "softcap", "window"), [(0.0, 0.0, (-1, -1)), (0.0, 3.0, (3, 0)), (0.3, 0.0, (-1, 0))])
def test_passes_are_the_function(
    through: str, place: torch.device, varlen: bool, p: float, softcap: float, window: tuple[int, int]
) -> None:
    """Forward and backward one by one give bit for bit what the function and its gradient give."""
    tensors, sizes, forward, backward = passes_for(varlen, place)
    how = (p, None, window[1] == 0, *window, softcap, None)
    torch.manual_seed(3)
    out, lse, signs, state = forward(*tensors, *sizes, *how, True)
    leaves = [t.clone().requires_grad_() for t in tensors]
    torch.manual_seed(3)
    call = fa.flash_attn_varlen_func if varlen else fa.flash_attn_func
    true, true_lse, true_signs = call(
        *leaves, *sizes, p, causal=window[1] == 0, window_size=window, softcap=softcap, return_attn_probs=True,
        deterministic=True,
    )  # fmt: skip
    assert not out.requires_grad
    assert torch.equal(out, true)
    assert torch.equal(lse, true_lse)
    assert torch.equal(signs, true_signs)
    assert state.shape == (2,)
    assert state.dtype == torch.int64
    dout = torch.randn(out.shape).to(out)
    grads = [torch.empty_like(t) for t in tensors]
    delta = backward(dout, *tensors, out, lse, *grads, *sizes, *how, True, state)
    for mine, theirs in zip(grads, torch.autograd.grad(true, leaves, dout), strict=True):
        assert torch.equal(mine, theirs)
    torch.testing.assert_close(delta, (dout.float() * out.float()).sum(-1).transpose(-1, -2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_backward_of_a_ring(through: str, place: torch.device, dtype: torch.dtype) -> None:
    """Keys in two halves, merged by lse: each half's backward with the whole's out and lse adds up to the whole gradient."""
    q, k, v = (torch.randn(1, 8, 2, 16).to(place, dtype) for _ in range(3))
    how = (0.0, None, False, -1, -1, 0.0, None)
    whole, lse, *_ = passes._flash_attn_forward(q, k, v, *how, False)
    parts = [passes._flash_attn_forward(q, k[:, s], v[:, s], *how, False) for s in (slice(0, 4), slice(4, 8))]
    sums = torch.stack([p[1] for p in parts])
    weight = (sums - lse).exp().transpose(2, 3)[..., None]
    torch.testing.assert_close((torch.stack([p[0] for p in parts]).float() * weight).sum(0), whole.float(), rtol=0, atol=2e-3)
    dout = torch.randn_like(whole)
    dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
    passes._flash_attn_backward(dout, q, k, v, whole, lse, dq, dk, dv, *how, False)
    turned = lse.transpose(1, 2).contiguous().transpose(1, 2)  # as rings lay it out
    sum_q = torch.zeros_like(q, dtype=torch.float32)
    for s in (slice(0, 4), slice(4, 8)):
        one, two, three = torch.empty_like(q), torch.empty_like(k)[:, s], torch.empty_like(v)[:, s]
        passes._flash_attn_backward(dout, q, k[:, s], v[:, s], whole, turned, one, two, three, *how, False)
        sum_q += one
        torch.testing.assert_close(two, dk[:, s], rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(three, dv[:, s], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(sum_q.to(dtype), dq, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_slopes_of_the_backward_need_no_gradient(through: str, place: torch.device, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 8, 2, 16).to(place, dtype) for _ in range(3))
    slopes = torch.rand(2, device=place, requires_grad=True)
    how: Any = (0.0, None, True, -1, -1, 0.0, slopes)
    out, lse, *_ = passes._flash_attn_forward(q, k, v, *how, False)
    dv = torch.empty_like(v)
    passes._flash_attn_backward(torch.ones_like(out), q, k, v, out, lse, None, None, dv, *how, False)
    probabilities = attend(q, k, v, visible(8, 8, -1, 0), slopes=slopes)[2]
    torch.testing.assert_close(
        dv.double(), probabilities.sum(2)[..., None].transpose(1, 2).expand(dv.shape), rtol=2e-3, atol=2e-3
    )


def test_extension(place: torch.device) -> None:
    """`flash_attn_2_cuda`: arguments by place, gradients made where none are given, no generator."""
    gpu = passes.flash_attn_gpu
    q, k, v = (torch.randn(1, 5, 2, 16).to(place, torch.float16) for _ in range(3))
    tail = (0.0, 0.25, True, -1, -1, 0.0)
    into = torch.empty_like(q)
    out, lse, _, state = gpu.fwd(q, k, v, into, None, *tail, False, None)
    assert out is into
    made = passes._flash_attn_forward(q, k, v, *tail, None, False)
    assert torch.equal(out, made[0])
    dout = torch.randn_like(out)
    dq, dk, dv, delta = gpu.bwd(dout, q, k, v, out, lse, None, None, None, None, *tail, False, None, state)
    cu = torch.tensor([0, 5], dtype=torch.int32, device=place)
    flat = [t[0] for t in (q, k, v)]
    varlen = gpu.varlen_fwd(
        *flat, None, cu, cu, None, None, None, None, 5, 5, *tail[:2], False, *tail[2:], False, None, 0
    )  # fmt: skip
    torch.testing.assert_close(varlen[0], out[0], rtol=2e-3, atol=2e-3)
    gradients = gpu.varlen_bwd(
        dout[0], *flat, out[0], lse[0], None, None, None, cu, cu, None, 5, 5, *tail[:2], False, *tail[2:], False, None, None
    )  # fmt: skip
    for mine, theirs in zip(gradients, (dq, dk, dv, delta), strict=True):
        torch.testing.assert_close(mine, theirs[0], rtol=2e-3, atol=2e-3)
    with pytest.raises(RuntimeError, match="`generator` argument is no longer supported"):
        gpu.fwd(q, k, v, None, None, *tail, False, torch.empty(1))


def test_refusals(place: torch.device) -> None:
    q, k, v = (torch.randn(1, 5, 2, 16).to(place) for _ in range(3))
    cu = torch.tensor([0, 5], dtype=torch.int32, device=place)
    with pytest.raises(InvalidProblem, match=r"block_table has shape \(2,\)"):
        fa.flash_attn_varlen_func(q[0], k, v, cu, cu, 5, 5, block_table=cu)
    with pytest.raises(InvalidProblem, match="k is given and cache_seqlens is None"):
        fa.flash_attn_with_kvcache(q, k, v, k, v)
    with pytest.raises(InvalidProblem, match=r"window_size is 3; it must be a pair"):
        fa.flash_attn_func(q, k, v, window_size=3)
    with pytest.raises(InvalidProblem, match=r"softcap is -1\.0"):
        fa.flash_attn_func(q, k, v, softcap=-1.0)
    with pytest.raises(InvalidProblem, match=r"dropout p is 1\.0"):
        fa.flash_attn_func(q, k, v, 1.0)
    how: Any = (0.0, None, False, -1, -1)
    with pytest.raises(InvalidProblem, match=r"block_table has shape \(2,\)"):
        passes._flash_attn_varlen_forward(q[0], k, v, cu, cu, 5, 5, *how, block_table=cu)
    for name, value in (("leftpad_k", cu), ("num_splits", 4)):
        with pytest.raises(NotSupported, match=name):
            passes._flash_attn_varlen_forward(q[0], k[0], v[0], cu, cu, 5, 5, *how, **{name: value})
    with pytest.raises(NotSupported, match="S_dmask knows whole items alone"):
        passes._flash_attn_varlen_forward(q[0], k[0], v[0], cu, cu, 5, 5, 0.5, *how[1:], return_softmax=True, seqused_k=cu[1:])
    out, lse, *_ = passes._flash_attn_forward(q, k, v, *how, 0.0, None, False)
    with pytest.raises(InvalidProblem, match="rng_state is None; it must be what the forward returned"):
        passes._flash_attn_backward(q, q, k, v, out, lse, None, None, None, 0.3, *how[1:], 0.0, None, False)


def test_lse_of_blind_rows(place: torch.device) -> None:
    q, k = torch.randn(1, 5, 1, 16).to(place), torch.randn(1, 2, 1, 16).to(place)
    out, lse, _ = fa.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
    assert lse[0, 0, :3].tolist() == [math.inf] * 3
    assert not out[0, :3].any()
