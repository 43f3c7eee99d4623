"""append_to_cache, PagedCache and merge."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashtile
from flashtile.reference.attention import attention_plain
from tests.cached.draw import pool


def given(place: torch.device, size: int = 3) -> tuple[torch.Tensor, ...]:
    """Pools of NaN, a table, lengths 0, 4, 5."""
    pools = [pool(12, size, 2, n, torch.float32, "padded").to(place) for n in (16, 24)]
    table = torch.tensor([[3, 1, 9, -1], [2, 0, 5, 7], [4, 6, 8, 10]], dtype=torch.int32, device=place)
    return *pools, table, torch.tensor([0, 4, 5], dtype=torch.int32, device=place)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_are_written_where_the_table_says_and_nowhere_else(backend: str, place: torch.device, packed: bool) -> None:
    k_cache, v_cache, table, used = given(place)
    cu = torch.tensor([0, 1, 1, 4], dtype=torch.int32, device=place) if packed else None
    shape = (5,) if packed else (3, 2)
    k, v = torch.randn(*shape, 2, 16, device=place), torch.randn(*shape, 2, 24, device=place)
    rows = [(0, 0, (0,)), (2, 5, (1,)), (2, 6, (2,)), (2, 7, (3,))]
    if not packed:
        rows = [(i, int(used[i]) + j, (i, j)) for i in range(3) for j in range(2)]
    version = k_cache._version
    flashtile.append_to_cache(k, v, k_cache, v_cache, table, seqused_k=used, cu_seqlens=cu, backend=backend)
    assert k_cache._version > version
    for item, row, source in rows:
        for cache, new in ((k_cache, k), (v_cache, v)):
            assert torch.equal(cache[int(table[item, row // 3]), row % 3], new[source])
    assert k_cache[..., 0, 0].isfinite().sum() == len(rows) == v_cache[..., 0, 0].isfinite().sum()


def test_slots_say_where_tokens_go_and_minus_one_is_skipped(backend: str, place: torch.device) -> None:
    k_cache, v_cache, *_ = given(place)
    k, v = torch.randn(4, 2, 16, device=place), torch.randn(4, 2, 24, device=place)
    slots = torch.tensor([35, -1, 0, 7], device=place)
    flashtile.append_to_cache(k, v, k_cache, v_cache, slots=slots, backend=backend)
    for i, (page, row) in {0: (11, 2), 2: (0, 0), 3: (2, 1)}.items():
        assert torch.equal(k_cache[page, row], k[i])
        assert torch.equal(v_cache[page, row], v[i])
    assert k_cache[..., 0, 0].isfinite().sum() == 3


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_append_and_rotary_within_the_call(backend: str, place: torch.device, packed: bool, interleaved: bool) -> None:
    """One call is rotary, append and attention one after another; against keys rotated by themselves."""
    k_cache, v_cache, table, used = given(place)
    k_cache.copy_(torch.randn(k_cache.shape))
    v_cache.copy_(torch.randn(v_cache.shape))
    angle = torch.rand(12, 6, device=place)
    cos, sin = angle.cos(), angle.sin()
    shape = (3, 2)
    q, k, v = (torch.randn(*shape, h, n, device=place) for h, n in ((4, 16), (2, 16), (2, 24)))
    position = used[:, None] + torch.arange(2, device=place)
    turned = flashtile.ops.rotary(q, k, cos, sin, interleaved=interleaved, positions=position)
    before = flashtile.PagedCache(k_cache.clone(), v_cache.clone(), table.clamp(min=0), used)
    cache = before.append(turned[1], v, backend=backend)
    options = flashtile.Options(backend=backend)
    want = cache.attention(turned[0], causal=True, options=options)
    if packed:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    cu = torch.tensor([0, 2, 4, 6], dtype=torch.int32, device=place) if packed else None
    got = flashtile.attention_cached(
        q, k_cache, v_cache, table, seqused_k=used, cu_seqlens_q=cu, append=(k, v), rotary=(cos, sin, interleaved), causal=True,
        options=options,
    )  # fmt: skip
    torch.testing.assert_close(got.view(want.shape), want)
    torch.testing.assert_close(k_cache, cache.k)
    dense = cache.dense()
    assert torch.equal(cache.seqused, used + 2)
    direct = flashtile.attention(turned[0], *dense, seqused_k=cache.seqused, causal=True, options=options)
    torch.testing.assert_close(want, direct)


@pytest.mark.parametrize("packed", [False, True], ids=["items", "packed"])
def test_rows_of_lengths_are_nowhere_on_meta(packed: bool) -> None:
    table, used = torch.empty(2, 3, dtype=torch.int32, device="meta"), torch.empty(2, dtype=torch.int32, device="meta")
    pools = [torch.empty(6, 8, 2, 16, device="meta") for _ in "kv"]
    shape: tuple[int, ...] = (5,) if packed else (2, 1)
    starts = torch.empty(3, dtype=torch.int32, device="meta") if packed else None
    k, v = (torch.empty((*shape, 2, 16), device="meta") for _ in "kv")
    assert flashtile.append_to_cache(k, v, *pools, page_table=table, seqused_k=used, cu_seqlens=starts, q=k, backend="cpu") is k
    q = torch.empty((*shape, 4, 16), device="meta")
    options = flashtile.Options(backend="cpu")  # which an interpreter would stand in for
    out = flashtile.attention_cached(
        q, *pools, page_table=table, seqused_k=used, cu_seqlens_q=starts, append=(k, v), causal=True, options=options
    )
    assert (out.shape, out.device.type) == (q.shape, "meta")


def test_bad_appends_are_named() -> None:
    k_cache, v_cache, table, used = given(torch.device("cpu"))
    k, v = torch.randn(3, 2, 2, 16), torch.randn(3, 2, 2, 24)
    append = flashtile.append_to_cache
    with pytest.raises(flashtile.InvalidProblem, match="needs row 12 of an item"):
        append(k, v, k_cache, v_cache, table.clamp(min=0), seqused_k=used + 7)
    with pytest.raises(flashtile.InvalidProblem, match="seqused_k and slots"):
        append(k, v, k_cache, v_cache, table)
    with pytest.raises(flashtile.InvalidProblem, match=r"v has \(heads, head_dim\) \(2, 8\)"):
        append(k, v[..., :8], k_cache, v_cache, table, seqused_k=used)
    with pytest.raises(flashtile.InvalidProblem, match=r"k_cache is .*float32 and k is .*float16"):
        append(k.half(), v.half(), k_cache, v_cache, table, seqused_k=used)
    with pytest.raises(flashtile.InvalidProblem, match=r"slots is torch\.int64"):
        append(k, v, k_cache, v_cache, slots=torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(flashtile.NotSupported, match="no_grad"):
        append(k.requires_grad_(), v, k_cache, v_cache, table, seqused_k=used)
    assert k_cache.isnan().all()


@pytest.mark.parametrize("varlen", [False, True])
def test_merged_states_are_one_call_with_its_gradients(varlen: bool) -> None:
    q, k, v = (torch.randn(2, n, 3, 8, dtype=torch.float64, requires_grad=True) for n in (5, 9, 9))
    out, lse = attention_plain(q, k, v)
    parts = [attention_plain(q, k[:, a:b], v[:, a:b]) for a, b in ((0, 4), (4, 4), (4, 9))]
    got = flashtile.merge([o for o, _ in parts], [one for _, one in parts])
    if varlen:
        got = flashtile.merge([o[0] for o, _ in parts], [one[0] for _, one in parts])
        out, lse = out[0], lse[0]
    torch.testing.assert_close(got[0], out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[1].double(), lse, rtol=1e-6, atol=1e-6)
    weights = torch.randn_like(out), torch.randn_like(lse)
    want = torch.autograd.grad((out, lse), (q, k, v), weights)
    made = torch.autograd.grad(got, (q, k, v), (weights[0], weights[1].float()))
    for one, other in zip(made, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_merging_nothing_is_nothing() -> None:
    out, lse = torch.full((1, 2, 1, 4), torch.nan), torch.full((1, 1, 2), -torch.inf)
    out.requires_grad_()
    lse.requires_grad_()
    merged, sums = flashtile.merge((out, out), (lse, lse))
    assert (merged == 0).all()
    assert (sums == -torch.inf).all()
    assert all((g == 0).all() for g in torch.autograd.grad(merged.sum(), (out, lse)))
    bad: list[tuple[Any, Any, str]] = [
        ((out,), (lse.transpose(1, 2),), r"lses\[0\] has shape \(1, 2, 1\)"),
        (None, (lse,), "outs is a NoneType"),
        ((out, out.int()), (lse, lse), r"outs\[1\] is torch\.int32"),
        ((out, out), (lse, lse.int()), r"lses\[1\] is torch\.int32"),
        ((out, out.to("meta")), (lse, lse), r"outs\[1\] is on meta"),
    ]
    for outs, lses, says in bad:
        with pytest.raises(flashtile.InvalidProblem, match=says):
            flashtile.merge(outs, lses)
