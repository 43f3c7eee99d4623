"""Absorbed latent attention by FlashMLA's and flashinfer's names: values are columns of keys, in pages full of rubbish."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flashtile import InvalidProblem, NotSupported
from flashtile.compat import flash_mla, install, uninstall
from flashtile.compat.flashinfer_mla import BatchMLAPagedAttentionWrapper

USED = [70, 0, 9, 1]
RUBBISH = 2147480000


class Latents:
    """Items of rows of 576 columns in pages; NaN in all other rows, and rubbish behind an item's pages."""

    def __init__(self, page: int, heads: int, dtype: torch.dtype, place: torch.device):
        generator = torch.Generator().manual_seed(3)
        counts = [-(-n // page) for n in USED]
        pool = torch.full((sum(counts) + 2, page, heads, 576), torch.nan)
        self.rows = [torch.randn(n, heads, 576, generator=generator).to(dtype) for n in USED]
        order = torch.randperm(sum(counts) + 2, generator=generator)[: sum(counts)].int().split(counts)
        table = torch.full((len(USED), max(counts) + 1), RUBBISH, dtype=torch.int32)
        for item, (pages, rows) in enumerate(zip(order, self.rows, strict=True)):
            table[item, : len(pages)] = pages
            for t, row in enumerate(rows):
                pool[pages[t // page], t % page] = row.float()
        self.pool, self.table, self.lists = pool.to(dtype).to(place), table.to(place), torch.cat(order)
        self.used, self.counts = torch.tensor(USED, dtype=torch.int32, device=place), counts


def formula(q: torch.Tensor, rows: torch.Tensor, causal: bool, scale: float = 1 / 24) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of one item's queries, in float64."""
    wide = rows.double().repeat_interleave(q.shape[1] // rows.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", q.double().cpu(), wide) * scale
    position = torch.arange(q.shape[0])[:, None] + len(rows) - q.shape[0]
    scores = scores.masked_fill((torch.arange(len(rows)) > position) & causal, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0.0), wide[..., :512]), scores.logsumexp(-1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("page", "heads", "heads_kv", "queries"), [(64, 16, 1, 1), (64, 6, 3, 2), (5, 9, 1, 4)])
def test_flash_mla(page: int, heads: int, heads_kv: int, queries: int, causal: bool, device: torch.device) -> None:
    """As its test has it: tails and unused pages are NaN, entries behind them rubbish, an item is empty."""
    made = Latents(page, heads_kv, torch.bfloat16, device)
    q = torch.randn(len(USED), queries, heads, 576, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    metadata, splits = flash_mla.get_mla_metadata(made.used, queries * heads, heads_kv)
    with torch.no_grad():
        out, lse = flash_mla.flash_mla_with_kvcache(q, made.pool, made.table, made.used, 512, metadata, splits, causal=causal)
    assert (out.shape, lse.shape) == ((len(USED), queries, heads, 512), (len(USED), heads, queries))
    for item, rows in enumerate(made.rows):
        exact, sums = formula(q[item], rows, causal)
        torch.testing.assert_close(out[item].double().cpu(), exact, rtol=0, atol=1e-2 * max(float(exact.abs().max()), 1e-3))
        sums = sums.masked_fill(sums == -torch.inf, torch.inf)
        torch.testing.assert_close(lse[item].double().cpu(), sums, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("base_e", [False, True])
def test_flashinfers_wrapper(base_e: bool, device: torch.device) -> None:
    made, counts = Latents(8, 1, torch.bfloat16, device), [2, 1, 0, 1]
    pool = made.pool[:, :, 0]
    begins, starts = ([sum(n[:i]) for i in range(len(n) + 1)] for n in (made.counts, counts))
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(0))
    plan = [torch.tensor(n, dtype=torch.int32, device=device) for n in (starts, [*begins, 0, 0])]  # more than are read
    wrapper.plan(*plan, made.lists.to(device), made.used, 16, 512, 64, 8, True, 0.05, torch.bfloat16, torch.bfloat16)
    q = torch.randn(4, 16, 576, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    with torch.no_grad():
        out, lse = wrapper.run(
            q[..., :512], q[..., 512:], pool[..., :512], pool[..., 512:], return_lse=True, return_lse_base_on_e=base_e
        )
    for item, rows in enumerate(made.rows):
        some = slice(starts[item], starts[item + 1])
        exact, sums = formula(q[some], rows, True, 0.05)
        if exact.numel():
            torch.testing.assert_close(out[some].double().cpu(), exact, rtol=0, atol=1e-2 * max(float(exact.abs().max()), 1e-3))
            sums = sums.T if base_e else sums.T / math.log(2)
            torch.testing.assert_close(lse[some].double().cpu(), sums, rtol=1e-4, atol=1e-4)


def test_installed() -> None:
    install("flash_mla")
    try:
        import flash_mla as theirs  # pyright: ignore[reportMissingImports]

        assert theirs.flash_mla_with_kvcache is flash_mla.flash_mla_with_kvcache
        assert theirs.__version__ == "1.0.0"
        with pytest.raises(AttributeError, match="has no attribute 'flash_mla_sparse_fwd'"):
            theirs.flash_mla_sparse_fwd  # noqa: B018
    finally:
        uninstall("flash_mla")


def test_refusals() -> None:
    made = Latents(64, 1, torch.float32, torch.device("cpu"))
    q = torch.randn(len(USED), 1, 4, 576)

    def call(*given: Any, **named: Any) -> Any:
        return flash_mla.flash_mla_with_kvcache(*(given or (q, made.pool, made.table, made.used, 512)), **named)

    refused = {
        "indices is given": {"indices": made.table}, "attn_sink is given": {"attn_sink": q}, "is_fp8_kvcache is True":
        {"is_fp8_kvcache": True},
    }  # fmt: skip
    for says, named in refused.items():
        with pytest.raises(NotSupported, match=says):
            call(**named)
    wrong: dict[str, tuple[Any, ...]] = {
        "block_table is None": (q, made.pool, None, made.used, 512),
        "cache_seqlens is None": (q, made.pool, made.table, None, 512),
        r"block_table is torch\.int64": (q, made.pool, made.table.long(), made.used, 512),
        r"cache_seqlens\[0\] is 500": (q, made.pool, made.table, made.used + 430, 512),
        "head_dim_v is 600; it must be an int from 1 to 576": (q, made.pool, made.table, made.used, 600),
    }
    for says, given in wrong.items():
        with pytest.raises(InvalidProblem, match=says):
            call(*given)
    wrapper, pool = BatchMLAPagedAttentionWrapper(), made.pool[:, :, 0]
    with pytest.raises(InvalidProblem, match="run is called before plan"):
        wrapper.run(q[:, 0, :, :512], q[:, 0, :, 512:], pool[..., :512], pool[..., 512:])
    starts, begins = (torch.tensor(n, dtype=torch.int32) for n in ([0, 1, 2, 3, 4], [0, 2, 2, 3, 4]))
    sizes = (4, 512, 64, 64, False, 0.1)
    with pytest.raises(InvalidProblem, match=r"kv_len_arr\[2\] is 109 and the request has 1 pages of 64 rows"):
        wrapper.plan(starts, begins, made.lists, made.used + torch.tensor([0, 0, 100, 0], dtype=torch.int32), *sizes)
    with pytest.raises(InvalidProblem, match="qo_indptr has 3 elements and kv_len_arr 4"):
        wrapper.plan(starts[:3], begins, made.lists, made.used, *sizes)
    wrapper.plan(starts, begins, made.lists, made.used, *sizes)
    with pytest.raises(NotSupported, match="ckv_cache and kpe_cache lie apart; make them views of one tensor"):
        wrapper.run(q[:, 0, :, :512], q[:, 0, :, 512:], pool[..., :512].clone(), pool[..., 512:])
    with pytest.raises(InvalidProblem, match=r"kpe_cache has shape .* as plan was told"):
        wrapper.run(q[:, 0, :, :512], q[:, 0, :, 512:], pool[..., :512], pool[..., 500:])
    with pytest.raises(NotSupported, match="use_cuda_graph is True"):
        BatchMLAPagedAttentionWrapper(use_cuda_graph=True)
