"""flash-attention 3's and 4's functions against their documented formulas."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from flashtile import InvalidProblem, NotSupported
from flashtile.compat import flash_attn_3 as fa3
from flashtile.compat import flash_attn_4 as fa4
from tests.compat.formula import attend, visible
from tests.compat.test_flash_attn import agree, close, draw


@pytest.mark.parametrize("how", [{}, {"causal": True, "softcap": 3.0}, {"window_size": (3, -1), "softmax_scale": 0.3}], ids=str)
def test_version_3(through: str, place: torch.device, how: dict[str, Any]) -> None:
    packs = draw((2, 9, 4, 16), (2, 6, 2, 16), (2, 6, 2, 8), place=place)
    left, right = how.get("window_size", (-1, -1))
    right = 0 if how.get("causal") else right
    rules = {"softcap": how.get("softcap", 0.0), "scale": how.get("softmax_scale")}
    out, lse = fa3.flash_attn_func(*packs, return_attn_probs=True, deterministic=True, pack_gqa=True, num_splits=0, **how)
    true, true_lse, _ = attend(*packs, visible(9, 6, left, right), **rules)
    agree(packs, out, true)
    close(lse, true_lse.masked_fill(true_lse == torch.inf, -torch.inf))  # rows that see nothing
    close(fa3.flash_attn_func(*packs, **how), true)
    flat = [t.detach().flatten(0, 1).requires_grad_() for t in packs]
    cu = [torch.tensor([0, n, 2 * n], dtype=torch.int32, device=place) for n in (9, 6)]
    out, lse = fa3.flash_attn_varlen_func(*flat, *cu, 9, 6, return_attn_probs=True, **how)
    close(out.unflatten(0, (2, 9)), true)
    used = torch.tensor([6, 4], dtype=torch.int32, device=place)
    close(
        fa3.flash_attn_varlen_func(*flat, *cu, 9, 6, seqused_k=used, **how)[9:],
        attend(packs[0][1:], *(t[1:, :4] for t in packs[1:]), visible(9, 4, left, right), **rules)[0][0],
    )
    (qkv,) = draw((2, 7, 4 + 2 * 2, 16), place=place)
    true = attend(*qkv.split((4, 2, 2), 2), visible(7, 7, left, right), **rules)[0]
    agree([qkv], fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=4, **how), true)


@pytest.mark.parametrize("form", ["dense", "used", "varlen"])
def test_version_3_passes(through: str, place: torch.device, form: str) -> None:
    """Forward and backward one by one give what the function and its gradient give."""
    shapes = [(2, 9, 4, 16), (2, 7, 2, 16), (2, 7, 2, 16)]
    q, k, v = (torch.randn(s if form != "varlen" else (s[0] * s[1], *s[2:])).to(place, torch.float16) for s in shapes)
    used = torch.tensor([5, 9], dtype=torch.int32, device=place), torch.tensor([7, 0], dtype=torch.int32, device=place)
    cu = tuple(torch.tensor([0, n, 2 * n], dtype=torch.int32, device=place) for n in (9, 7))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    how: Any = dict(softmax_scale=0.3, softcap=4.0)
    lengths: dict[str, Any] = {}
    backward_lengths: dict[str, Any] = {}
    if form == "dense":
        true, true_lse = fa3.flash_attn_func(*leaves, window_size=(3, 0), return_attn_probs=True, deterministic=True, **how)
    else:
        lengths = dict(seqused_q=used[0], seqused_k=used[1])
        backward_lengths = dict(sequed_q=used[0], sequed_k=used[1])
        if form == "varlen":
            sizes = dict(cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], max_seqlen_q=9, max_seqlen_k=torch.tensor(7))
            lengths, backward_lengths = {**lengths, **sizes}, {**backward_lengths, **sizes}
            true, true_lse = fa3.flash_attn_varlen_func(
                *leaves, window_size=(3, 0), return_attn_probs=True, deterministic=True, **lengths, **how
            )
        else:
            true, true_lse = fa4_padded(leaves, used, how)
    into = torch.empty_like(q)
    window = dict(window_size_left=3, window_size_right=0)
    out, lse, *_ = fa3._flash_attn_forward(q, k, v, out_=into, **lengths, **window, **how)
    assert out is into
    assert torch.equal(out, true)
    assert torch.equal(lse, true_lse)
    dout = torch.randn_like(out)
    grads = [torch.empty_like(t) for t in (q, k, v)]
    delta = fa3._flash_attn_backward(
        dout, q, k, v, out, lse, dq=grads[0], dk=grads[1], dv=grads[2], deterministic=True, **backward_lengths, **window, **how
    )
    assert delta.shape == lse.shape
    for mine, theirs in zip(grads, torch.autograd.grad(true, leaves, dout), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-3)


def fa4_padded(leaves: list[torch.Tensor], used: Any, how: dict[str, Any]) -> Any:
    """Version 3 has no padded function of its own; 4 has."""
    return fa4.flash_attn_varlen_func(
        *leaves, seqused_q=used[0], seqused_k=used[1], window_size=(3, 0), return_lse=True, deterministic=True, **how
    )


def test_combine(place: torch.device) -> None:
    q, k, v = (torch.randn(1, 8, 2, 16).to(place) for _ in range(3))
    whole, lse = fa3.flash_attn_func(q, k, v, return_attn_probs=True)
    parts = [fa3.flash_attn_func(q, k[:, s], v[:, s], return_attn_probs=True) for s in (slice(0, 3), slice(3, 8), slice(0, 0))]
    outs, sums = torch.stack([p[0] for p in parts]), torch.stack([p[1].transpose(1, 2) for p in parts])
    out, merged = fa3.flash_attn_combine(outs, sums, out_dtype=torch.float16)
    close(out.float(), whole.half())
    close(merged, lse.transpose(1, 2))
    into = torch.empty_like(whole)
    assert fa3.flash_attn_combine(outs, sums, into)[0] is into
    close(into, whole)
    assert not fa3.flash_attn_combine(outs * torch.nan, sums - torch.inf)[0].any()  # nobody wrote parts without keys
    with pytest.raises(InvalidProblem, match=r"lse_partial has shape \(3, 1, 2, 8\); it must be \(3, 1, 8, 2\)"):
        fa3.flash_attn_combine(outs, sums.transpose(2, 3))


@pytest.mark.parametrize(
    ("causal", "window", "band"),
    [
        (False, (None, None), (-1, -1)),
        (True, (None, None), (-1, 0)),
        (True, (3, 5), (3, 0)),
        (False, (2, 1), (2, 1)),
        (False, (None, 2), (-1, 2)),
        (True, (-1, None), (-1, 0)),  # an empty window is none
        (False, (-3, 2), (-1, -1)),
    ],
)
def test_version_4(through: str, place: torch.device, causal: bool, window: Any, band: tuple[int, int]) -> None:
    packs = draw((2, 6, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16), place=place)
    out, lse = fa4.flash_attn_func(*packs, causal=causal, window_size=window, softcap=2.0, softmax_scale=0.5, return_lse=True)
    true, true_lse, _ = attend(*packs, visible(6, 9, *band), softcap=2.0, scale=0.5)
    agree(packs, out, true)
    close(lse, true_lse)
    out, none = fa4.flash_attn_varlen_func(
        *packs, causal=causal, window_size=window, softcap=2.0, softmax_scale=0.5, deterministic=True,
        seqused_k=torch.tensor([9, 9], dtype=torch.int32, device=place),
    )  # fmt: skip
    assert none is None
    close(out, true)
    cu = [torch.tensor([0, n, 2 * n], dtype=torch.int32, device=place) for n in (6, 9)]
    flat = [t.detach().flatten(0, 1) for t in packs]
    out, lse = fa4.flash_attn_varlen_func(
        *flat, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], max_seqlen_q=6, max_seqlen_k=9, causal=causal, window_size=window,
        softcap=2.0, softmax_scale=0.5, return_lse=True,
    )  # fmt: skip
    close(out.unflatten(0, (2, 6)), true)
    close(lse, true_lse.transpose(0, 1).flatten(1))


def test_window_of_negative_distance(place: torch.device) -> None:
    """A number, not "unbounded": keys from three behind to two behind the query."""
    q, k, v = draw((1, 6, 1, 16), (1, 6, 1, 16), (1, 6, 1, 16), place=place)
    row = torch.arange(6)
    seen = (row >= row[:, None] - 3) & (row <= row[:, None] - 2)
    close(fa4.flash_attn_func(q, k, v, window_size=(3, -2))[0], attend(q, k, v, seen)[0])


def test_sink(through: str, place: torch.device) -> None:
    packs = draw((1, 6, 2, 16), (1, 6, 2, 16), (1, 6, 2, 16), (2,), place=place)
    out, _ = fa4.flash_attn_func(*packs[:3], learnable_sink=packs[3])
    plain, lse, _ = attend(*packs[:3])
    share = (lse - torch.logaddexp(lse, packs[3].double()[None, :, None])).exp()
    agree(packs, out, plain * share.transpose(1, 2)[..., None])


def test_descales(place: torch.device) -> None:
    """q, k and v in e4m3, each head of keys with descales of its own, dense, packed and of items."""
    if place.type == "cpu" or torch.cuda.get_device_capability() >= (8, 9):
        q, k, v = (torch.randn(2, 9, heads, 16, device=place).to(torch.float8_e4m3fn) for heads in (4, 2, 2))
        scales = [torch.rand(2, 2, device=place) + 0.5 for _ in "qkv"]
        named = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
        of_heads = (scales[0].repeat_interleave(2, 1), *scales[1:])
        wide = [t.float() * s[:, None, :, None] for t, s in zip((q, k, v), of_heads, strict=True)]
        true, true_lse, _ = attend(*wide, visible(9, 9, -1, 0))
        out, lse = fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **named)
        assert out.dtype is torch.bfloat16
        assert (out - true).norm() / true.norm() < 2.8e-2
        assert (lse - true_lse).abs().max() < 2e-3
        packed = torch.cat([q.view(torch.uint8), k.view(torch.uint8), v.view(torch.uint8)], 2).view(torch.float8_e4m3fn)
        assert torch.equal(fa3.flash_attn_qkvpacked_func(packed, causal=True, num_heads_q=4, **named), out)
        cu = torch.tensor([0, 9, 18], dtype=torch.int32, device=place)
        flat = [t.flatten(0, 1) for t in (q, k, v)]
        items = fa3.flash_attn_varlen_func(*flat, cu, cu, 9, 9, causal=True, **named)
        assert (items.unflatten(0, (2, 9)) - true).norm() / true.norm() < 2.8e-2
        attend_e4m3 = partial(fa3.flash_attn_func, q.requires_grad_(), k, v, causal=True, **named)  # as its own tests do
        for run in (torch.compile(attend_e4m3, fullgraph=True, backend="aot_eager"), attend_e4m3):
            asked = run()
            assert torch.equal(asked, out)
            with pytest.raises(NotSupported, match=r"(?s)version 3's e4m3.*have none; give 16 bits with Options"):
                asked.float().sum().backward()
            assert torch.equal(asked.mul_(2), 2 * out)  # which may be written over
        with pytest.raises(InvalidProblem, match="v_descale has shape"):
            fa3.flash_attn_func(q, k, v, v_descale=torch.ones(3, device=place))
        with pytest.raises(InvalidProblem, match="q_descale has shape"):
            fa3.flash_attn_func(q, k, v, q_descale=torch.ones(2, 4, device=place))


def test_refusals(place: torch.device) -> None:
    q, k, v = (torch.randn(1, 5, 2, 16).to(place) for _ in range(3))
    cu = torch.tensor([0, 5], dtype=torch.int32, device=place)
    scale = torch.ones(1)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"qv": q}, "qv is given"), ({"sm_margin": 8}, "sm_margin is 8"),
    ]  # fmt: skip
    for arguments, reason in refused:
        with pytest.raises(NotSupported, match=reason):
            fa3.flash_attn_func(q, k, v, **arguments)
        with pytest.raises(NotSupported, match=reason):
            fa3.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 5, 5, **arguments)
    for name in ("k_new", "page_table", "leftpad_k", "rotary_cos", "scheduler_metadata"):
        with pytest.raises(NotSupported, match=f"{name} is given; flash_attn_with_kvcache"):
            fa3._flash_attn_forward(q, k, v, **{name: cu})
    for call in (lambda: fa3._flash_attn_forward(q, k, v, cu_seqlens_q=cu), lambda: fa3._flash_attn_backward(*[q] * 6, cu)):
        with pytest.raises(NotSupported, match="queries and keys must lie alike"):
            call()
    with pytest.raises(InvalidProblem, match="v_descale is given and q is"):
        fa3.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), v_descale=scale)
    with pytest.raises(InvalidProblem, match="q_descale is given and q is"):
        fa3.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 5, 5, q_descale=scale)
    with pytest.raises(InvalidProblem, match="k_descale is given and the cache is torch"):
        fa3.flash_attn_with_kvcache(q, k, v, k_descale=scale)
    for call in (fa3.flash_attn_func, fa3.flash_attn_with_kvcache):
        with pytest.raises(InvalidProblem, match="attention_chunk is -1; it must be an int from 0 on"):
            call(q, k, v, attention_chunk=-1)
    dense = ("qv", "gather_kv_indices", "score_mod", "score_mod_bwd", "mask_mod", "aux_tensors", "aux_scalars",
             "block_sparse_tensors", "block_sparse_tensors_bwd")  # fmt: skip
    for name in dense:
        with pytest.raises(NotSupported, match=f"{name} is given"):
            fa4.flash_attn_func(q, k, v, **{name: (q,)})  # pyright: ignore[reportArgumentType]
    for name in (*dense[:-1], "seqlen_k_per_split"):
        with pytest.raises(NotSupported, match=f"{name} is given"):
            fa4.flash_attn_varlen_func(q, k, v, **{name: (q,)})  # pyright: ignore[reportArgumentType]
    with pytest.raises(NotSupported, match="padded queries have padded keys"):
        fa4.flash_attn_varlen_func(q, k[0], v[0], cu_seqlens_k=cu)
    for name in ("cu_seqlens_k", "seqused_q"):
        with pytest.raises(NotSupported, match=f"{name} is given beside keys of a cache"):
            fa4.flash_attn_varlen_func(q[0], k, v, cu_seqlens_q=cu, page_table=cu[:1, None], **{name: cu})
    with pytest.raises(InvalidProblem, match="window_size is 3"):
        fa4.flash_attn_func(q, k, v, window_size=3)
    with pytest.raises(InvalidProblem, match="causal is None"):
        fa4.flash_attn_func(q, k, v, causal=None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("causal", [False, True])
def test_chunks_are_their_mask(causal: bool, place: torch.device) -> None:
    """attention_chunk of dense calls, of items and of a cache padded on the left; num_splits changes no bit of them."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 2, 16, generator=generator).to(place) for n in (7, 40, 40))

    def formula(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, size: int) -> torch.Tensor:
        position = torch.arange(queries.shape[0], device=place)[:, None] + keys.shape[0] - queries.shape[0]
        key = torch.arange(keys.shape[0], device=place)[None]
        keep = (torch.div(position, size, rounding_mode="floor") == key // size) & ((key <= position) | (not causal))
        scores = torch.einsum("qhd,khd->hqk", queries, keys).div(4.0).masked_fill(~keep, -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0.0), values)

    for size in (1, 6, 16, 100):
        how = dict(causal=causal, attention_chunk=size)
        want = torch.stack([formula(q[i], k[i], v[i], size) for i in range(2)])
        torch.testing.assert_close(fa3.flash_attn_func(q, k, v, **how), want, rtol=1e-5, atol=1e-5)
        assert torch.equal(fa3.flash_attn_func(q, k, v, **how, num_splits=3), fa3.flash_attn_func(q, k, v, **how))
        cu = [torch.tensor([0, n, 2 * n], dtype=torch.int32, device=place) for n in (7, 40)]
        made = fa3.flash_attn_varlen_func(*(t.flatten(0, 1) for t in (q, k, v)), *cu, 7, 40, **how, num_splits=4)
        torch.testing.assert_close(made.unflatten(0, (2, 7)), want, rtol=1e-5, atol=1e-5)
        used, left = (torch.tensor(n, dtype=torch.int32, device=place) for n in ([33, 19], [5, 0]))
        made = fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, cache_leftpad=left, **how)
        want = torch.stack([formula(q[i], k[i, a:b], v[i, a:b], size) for i, (a, b) in enumerate([(5, 33), (0, 19)])])
        torch.testing.assert_close(made, want, rtol=1e-5, atol=1e-5)


def test_metadata_is_asked_for_as_theirs_is() -> None:
    """By position: in decoding loops of version 3 cache_seqlens is the seventh; version 4 has other arguments, and a tuple."""
    lengths = torch.tensor([3, 4, 5, 6, 7], dtype=torch.int32)
    made = fa3.get_scheduler_metadata(5, 1, 64, 4, 2, 16, lengths, torch.bfloat16, headdim_v=16, causal=True)
    assert (made.dtype, made.shape) == (torch.int32, (8,))
    assert torch.equal(fa3.get_scheduler_metadata(5, 1, 64, 4, 2, 16, cache_seqlens=lengths), made)
    told = dict(
        max_seqlen_q=3, max_seqlen_k=20, nheads=4, nheads_kv=2, headdim=16, num_splits=1, causal=True, seqused_k=lengths
    )
    assert fa4.get_scheduler_metadata(**told).tile_count_semaphore is None
    assert fa4.get_scheduler_metadata(3, 20, 4, 2, 16, 3, headdim_v=16)._fields[0] == "num_m_blocks_ptr"
    q, k, v = (torch.randn(2, n, 2, 16) for n in (3, 20, 20))
    call = partial(fa4.flash_attn_varlen_func, q, k, v, seqused_k=lengths[:2], causal=True)
    assert torch.equal(call(scheduler_metadata=fa4.get_scheduler_metadata(**told))[0], call()[0])


def test_version_4_reads_pages_and_padded_keys(place: torch.device) -> None:
    """page_table beside padded and packed queries, and padded keys beside packed queries; gradients of queries."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 16, generator=generator).to(place) for n, h in ((3, 4), (20, 2), (20, 2)))
    used = torch.tensor([20, 9], dtype=torch.int32, device=place)
    want, sums = fa4.flash_attn_varlen_func(q, k, v, seqused_k=used, causal=True, window_size=(11, None), return_lse=True)
    assert sums is not None
    table = torch.randperm(8, generator=generator)[:8].view(2, 4).int().to(place)
    pools = [t.new_full((8, 5, 2, 16), torch.nan) for t in (k, v)]
    for pool, dense in zip(pools, (k, v), strict=True):
        pool[table.flatten().long()] = dense.reshape(8, 5, 2, 16)
    flat, cu = q.flatten(0, 1), torch.tensor([0, 3, 6], dtype=torch.int32, device=place)
    how: dict[str, Any] = dict(causal=True, window_size=(11, None), seqused_k=used, return_lse=True)
    for split in (None, 128):
        out, lse = fa4.flash_attn_varlen_func(q, *pools, page_table=table, **how, seqlen_k_per_split=split, num_splits=2)
        torch.testing.assert_close((out, lse), (want, sums), rtol=1e-5, atol=1e-5)
    for keys, named in ((pools, {"page_table": table}), ((k, v), {})):
        out, lse = fa4.flash_attn_varlen_func(flat, *keys, cu_seqlens_q=cu, **named, **how)
        torch.testing.assert_close(
            (out.unflatten(0, (2, 3)), lse), (want, sums.transpose(0, 1).flatten(1)), rtol=1e-5, atol=1e-5
        )
    whole, _ = fa4.flash_attn_varlen_func(flat, *pools, cu_seqlens_q=cu, page_table=table)
    torch.testing.assert_close(whole.unflatten(0, (2, 3)), fa4.flash_attn_func(q, k, v)[0], rtol=1e-5, atol=1e-5)
    asks = q.clone().requires_grad_()
    fa4.flash_attn_varlen_func(asks, *pools, page_table=table, seqused_k=used)[0].sum().backward()
    assert asks.grad is not None
    with pytest.raises(InvalidProblem, match="seqlen_k_per_split is 100; it must be"):
        fa4.flash_attn_varlen_func(q, *pools, page_table=table, seqlen_k_per_split=100)
    with pytest.raises(InvalidProblem, match=r"page_table is torch\.int64"):
        fa4.flash_attn_varlen_func(q, *pools, page_table=table.long())
    with pytest.raises(InvalidProblem, match="page_table has shape"):
        fa4.flash_attn_varlen_func(q, *pools, page_table=table[0])
    with pytest.raises(InvalidProblem, match="k has shape"):
        fa4.flash_attn_varlen_func(q, k[0, 0, 0], v, page_table=table)


def test_e4m3_is_rotated() -> None:
    """New keys and queries of e4m3 beside tables of e4m3: as version 3 has it."""
    kind, generator = torch.float8_e4m3fn, torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 2, 16, generator=generator).to(kind) for n in (2, 2, 2))
    caches = [torch.randn(2, 12, 2, 16, generator=generator).to(kind) for _ in "kv"]
    cos, sin = (f(torch.rand(12, 8, generator=generator) * 6).to(kind) for f in (torch.cos, torch.sin))
    wide = [t.float() for t in caches]
    how: dict[str, Any] = dict(cache_seqlens=torch.tensor([9, 5], dtype=torch.int32), causal=True, rotary_interleaved=False)
    out = fa3.flash_attn_with_kvcache(q, *caches, k, v, rotary_cos=cos, rotary_sin=sin, **how)
    floats = [t.float() for t in (k, v, cos, sin)]
    want = fa3.flash_attn_with_kvcache(q.float(), *wide, *floats[:2], rotary_cos=floats[2], rotary_sin=floats[3], **how)
    torch.testing.assert_close(out.float(), want, rtol=5e-2, atol=5e-2)
    for cache, exact in zip(caches, wide, strict=True):
        torch.testing.assert_close(cache.float(), exact.to(kind).float(), rtol=0.13, atol=2e-3)


def test_a_cache_in_e4m3_beside_queries_of_both_kinds() -> None:
    """Descales are (batch, heads_kv); new rows of e4m3 are stored as they are, others over their descale."""
    kind, generator = torch.float8_e4m3fn, torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 16, generator=generator) for n, h in ((1, 4), (12, 2), (12, 2)))
    caches, lengths = [t.to(kind) for t in (k, v)], torch.tensor([9, 5], dtype=torch.int32)
    scales = [torch.rand(2, 2, generator=generator) + 0.5 for _ in "qkv"]
    wide = [t.float() * s[:, None, :, None] for t, s in zip(caches, scales[1:], strict=True)]
    narrow = q.bfloat16()
    out = fa3.flash_attn_with_kvcache(narrow, *caches, cache_seqlens=lengths, k_descale=scales[1], v_descale=scales[2])
    want = fa3.flash_attn_with_kvcache(narrow.float(), *wide, cache_seqlens=lengths)
    torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=2e-2)
    stored, fresh = q.to(kind), [torch.randn(2, 1, 2, 16, generator=generator).to(kind) for _ in "kv"]
    how = dict(cache_seqlens=lengths, q_descale=scales[0], k_descale=scales[1], v_descale=scales[2], causal=True)
    out, lse, *_ = fa3.flash_attn_with_kvcache(stored, *caches, *fresh, **how, return_softmax_lse=True)
    assert out.dtype is torch.bfloat16
    for item, row in enumerate(lengths.tolist()):
        assert all(torch.equal(c[item, row].float(), n[item, 0].float()) for c, n in zip(caches, fresh, strict=True))
    wide = [t.float() * s[:, None, :, None] for t, s in zip(caches, scales[1:], strict=True)]
    turned = stored.float() * scales[0].repeat_interleave(2, 1)[:, None, :, None]
    want, sums, *_ = fa3.flash_attn_with_kvcache(turned, *wide, cache_seqlens=lengths + 1, causal=True, return_softmax_lse=True)
    torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, sums, rtol=1e-4, atol=1e-4)
    with pytest.raises(InvalidProblem, match="q_descale is given and q is"):
        fa3.flash_attn_with_kvcache(narrow, *caches, cache_seqlens=lengths, q_descale=scales[0])
    with pytest.raises(InvalidProblem, match="both must have one dtype"):
        fa3.flash_attn_with_kvcache(stored, k, v, cache_seqlens=lengths)
    with pytest.raises(InvalidProblem, match=r"k_descale has shape \(3,\)"):
        fa3.flash_attn_with_kvcache(narrow, *caches, cache_seqlens=lengths, k_descale=torch.ones(3))
