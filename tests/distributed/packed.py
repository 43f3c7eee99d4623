"""Packed documents over ranks: what is refused, how shards of them come back, and that padding may hold anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import flashtile
from flashtile import Bias, Dropout, InvalidProblem, KeyPadding, NotSupported
from flashtile.distributed import Context, attention, attention_varlen, document_ids, position_ids, shard, unshard
from tests.distributed.cases import CU, IDS, SEQLEN, data
from tests.distributed.checks import METHODS, shards


def shards_of_documents_come_back() -> None:
    context, tokens = Context(layout="documents"), torch.arange(2 * 29).view(2, 29)
    part = shard(tokens, context, pad=-1, cu_seqlens=(starts := torch.tensor([0, 10, 29])))
    assert torch.equal(unshard(part, context, seqlen=29, cu_seqlens=starts), tokens)
    assert torch.equal(document_ids(CU, context), shard(IDS, context, 0, cu_seqlens=CU))
    within = torch.arange(SEQLEN) - CU[IDS.long()]
    assert torch.equal(position_ids(SEQLEN, context, cu_seqlens=CU), shard(within, context, 0, cu_seqlens=CU))


def documents_that_cannot_be_are_refused() -> None:
    rank, total = dist.get_rank(), 4 * dist.get_world_size()
    given, cu = [t[0] for t in shards()], torch.tensor([0, 3, total], dtype=torch.int32)
    laws: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((cu + (rank == 1) * torch.tensor([0, 1, 0], dtype=torch.int32),), {}, r"what cu_seqlens_q holds is \[0, 3"),
        ((None,), {}, "cu_seqlens_q is None"),
        ((torch.tensor([0, 5, 3]),), {}, "it must start with 0, never fall"),
        ((torch.tensor([0, total + 1]),), {}, f"end with at most {total}"),
        ((cu,), {"max_seqlen_q": 2}, "max_seqlen_q is 2"),
        ((cu, cu[:2]), {}, "cu_seqlens_k that is not cu_seqlens_q"),
        ((cu,), {"mask": KeyPadding(torch.ones(1, 4, dtype=torch.bool))}, "a mask beside cu_seqlens"),
        ((cu,), {"score": (Bias(torch.ones(total)),)}, "score modifier bias beside cu_seqlens"),
        ((cu,), {"dropout": 0.1}, r"dropout is 0\.1; it must be a flashtile\.Dropout"),
    ]
    for starts, arguments, words in laws:
        with pytest.raises((InvalidProblem, NotSupported), match=words):
            attention_varlen(*given, *starts, context=Context(), **arguments)
    for method in ("allgather", "ring"):
        with pytest.raises(NotSupported, match="dropout of packed documents"):
            attention_varlen(*given, cu, context=Context(method=method), dropout=Dropout(0.1))
    with pytest.raises(NotSupported, match="layout 'documents' with a band that looks ahead"):
        attention_varlen(*given, cu, context=Context(layout="documents"), window=(2, 1))
    with pytest.raises(NotSupported, match="layout 'documents' without cu_seqlens; attention_varlen takes them"):
        attention(*shards(), context=Context(layout="documents"), causal=True)
    with pytest.raises(NotSupported, match="dropout of packed documents"):
        attention_varlen(*given, cu, context=Context(layout="documents"), causal=True, dropout=Dropout(0.1))
    with pytest.raises((InvalidProblem, NotSupported), match=r"q has shape .* \(total / ranks, heads, head_dim\)"):
        attention_varlen(*shards(), cu, context=Context())


def padding_may_hold_nan() -> None:
    d = data(torch.float32, 4)
    starts = torch.tensor([0, 7, 7, 20])
    packed = [t[0].masked_fill((torch.arange(SEQLEN) >= 20)[:, None, None], torch.nan) for t in (d.q, d.k, d.v)]
    for window in ((9, 0), (9, 2)):
        expected = flashtile.attention_varlen(d.q[0], d.k[0], d.v[0], starts, window=window)
        looks_ahead = window[1] > 0
        for method, layout in [*((method, "zigzag") for method in METHODS), *[("auto", "documents")] * (not looks_ahead)]:
            context = Context(method=method, layout=layout)  # pyright: ignore[reportArgumentType]
            local = [shard(t, context, 0, cu_seqlens=starts).requires_grad_() for t in packed]
            out = attention_varlen(*local, starts, context=context, window=window)
            torch.testing.assert_close(unshard(out, context, 0, cu_seqlens=starts), expected)
            assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), local))
    used = torch.tensor([29, 10], dtype=torch.int32)
    beyond = (torch.arange(SEQLEN) >= used[:, None])[..., None, None]
    holed = [t.masked_fill(beyond, torch.nan) for t in (d.q, d.k, d.v)]
    one = flashtile.attention(d.q, d.k, d.v, causal=True, seqused_q=used, seqused_k=used)
    for method in METHODS:
        context = Context(method=method, layout="zigzag")
        local = [shard(t, context).requires_grad_() for t in holed]
        out = attention(*local, context=context, causal=True, seqused_q=used, seqused_k=used)
        torch.testing.assert_close(unshard(out, context), one)
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), local))


OF_DOCUMENTS = documents_that_cannot_be_are_refused, padding_may_hold_nan
