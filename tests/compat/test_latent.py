"""Absorbed latent attention by FlashMLA's and flashinfer's names: values are columns of keys, in pages full of rubbish."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import flashtile
from flashtile import InvalidProblem, NotSupported
from flashtile.compat import flash_attn_3 as fa3
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


def lists(made: Latents, counts: list[int]) -> list[torch.Tensor]:
    """A plan's: where queries and pages begin, longer than it is read, the pages, and the lengths."""
    begins, starts = ([sum(n[:i]) for i in range(len(n) + 1)] for n in (made.counts, counts))
    device = made.pool.device
    two = [torch.tensor(n, dtype=torch.int32, device=device) for n in (starts, [*begins, begins[-1], begins[-1]])]
    return [*two, made.lists.to(device), made.used]


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(("counts", "apart", "base_e"), [
    ([2, 1, 0, 1], False, True), ([2, 1, 0, 1], True, False), ([2] * 4, True, False),
])  # fmt: skip
def test_flashinfers_wrapper(counts: list[int], apart: bool, base_e: bool, graph: bool, device: torch.device) -> None:
    """Caches of two tensors or of one; with a graph a plan of empty requests comes first, and a replay reads the next."""
    made = Latents(8, 1, torch.bfloat16, device)
    pool = made.pool[:, :, 0]
    ckv, kpe = (t.clone() if apart else t for t in pool.split((512, 64), -1))
    plan = lists(made, counts)
    kept = [torch.full((n,), RUBBISH, dtype=torch.int32, device=device) for n in (5, 9, 99, 4)] if graph else []
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(0), graph, *kept)
    sizes = (16, 512, 64, 8, True, 0.05, torch.bfloat16, torch.bfloat16)
    q = torch.randn(sum(counts), 16, 576, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)

    def run() -> Any:
        return wrapper.run(q[..., :512], q[..., 512:], ckv, kpe, return_lse=True, return_lse_base_on_e=base_e)

    with torch.no_grad():
        captured = None
        if graph:
            wrapper.plan(plan[0], torch.zeros_like(plan[1]), plan[2][:1], torch.zeros_like(plan[3]), *sizes)
            out, lse = run()
            assert not out.any()
            if device.type == "cuda":
                captured = torch.cuda.CUDAGraph()
                with torch.cuda.graph(captured):
                    out, lse = run()
        wrapper.plan(*plan, *sizes)
        for tensor in plan if graph else ():
            tensor.fill_(RUBBISH)
        if captured is not None:
            captured.replay()
        else:
            out, lse = run()
        kept_out, kept_lse = torch.empty_like(out), torch.empty_like(lse)
        wrapper.run(q[..., :512], q[..., 512:], ckv, kpe, kept_out, kept_lse, return_lse_base_on_e=base_e)
        assert torch.equal(kept_out, out)
        assert torch.equal(kept_lse, lse)
    starts = [sum(counts[:i]) for i in range(5)]
    for item, rows in enumerate(made.rows):
        some = slice(starts[item], starts[item + 1])
        exact, sums = formula(q[some], rows, True, 0.05)
        if exact.numel():
            torch.testing.assert_close(out[some].double().cpu(), exact, rtol=0, atol=1e-2 * max(float(exact.abs().max()), 1e-3))
            sums = sums.T if base_e else sums.T / math.log(2)
            torch.testing.assert_close(lse[some].double().cpu(), sums, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("page", "heads", "heads_kv", "append", "apart"), [
    (64, 16, 1, True, False), (5, 6, 3, True, True), (8, 4, 1, False, True),
])  # fmt: skip
def test_version_3_multiplies_qv_with_the_values(
    page: int, heads: int, heads_kv: int, append: bool, apart: bool, packed: bool, device: torch.device
) -> None:
    """Latents and rotated columns in one tensor, as serving keeps them, or in two; a new row of each, rotated as q is."""
    made, generator = Latents(page, heads_kv, torch.bfloat16, device), torch.Generator().manual_seed(1)
    qv, q, v, k = (
        torch.randn(len(USED), 1, n, d, generator=generator).bfloat16().to(device)
        for n, d in ((heads, 512), (heads, 64), (heads_kv, 512), (heads_kv, 64))
    )
    angle = torch.rand(256, 8, generator=generator)
    cos, sin = (t.bfloat16().to(device) for t in (angle.cos(), angle.sin()))
    v_cache, k_cache = (t.clone() if apart else t for t in made.pool.split((512, 64), -1))
    if heads_kv == 1:  # as who keeps no axis of heads gives them, whose strides there differ
        v_cache, k_cache = v_cache[:, :, 0].unsqueeze(-2), k_cache[:, :, 0].unsqueeze(-2)
    given, before, rows, turned = dict[str, Any](), made.used, made.rows, list(q)
    if append:  # where each item's last row was, and the empty item's first, in a page that was nobody's
        given, before = dict(rotary_cos=cos, rotary_sin=sin), (made.used - 1).clamp(min=0)
        made.table[1, 0] = next(n for n in range(len(made.pool)) if n not in made.lists.tolist())
        for i, n in enumerate(before.tolist()):
            one, new = flashtile.ops.rotary(q[i : i + 1], k[i : i + 1], cos, sin, interleaved=True, offset=n)
            turned[i], rows[i] = one[0], torch.cat([rows[i][:n], torch.cat([v[i], new[0]], -1).cpu()])
    latent = qv.double().cpu()
    starts = torch.arange(len(USED) + 1, dtype=torch.int32, device=device)
    if packed:
        given |= dict(cu_seqlens_q=starts, max_seqlen_q=1) | (dict(cu_seqlens_k_new=starts) if append else {})
        q, qv, k, v = (t[:, 0] for t in (q, qv, k, v))
    fresh = (k, v) if append else (None, None)
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        q, k_cache, v_cache, *fresh, qv, cache_seqlens=before, page_table=made.table, causal=True, return_softmax_lse=True,
        **given,
    )  # fmt: skip
    for i, row in enumerate(rows):  # by two products, in float64
        values, keys = row.double().repeat_interleave(heads // heads_kv, 1).split((512, 64), -1)
        scores = torch.einsum("qhd,khd->hqk", turned[i].double().cpu(), keys)
        scores = (scores + torch.einsum("qhd,khd->hqk", latent[i], values)) / 24
        exact = torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0.0), values)
        mine, mine_lse = (out[i : i + 1], lse[:, i : i + 1]) if packed else (out[i], lse[i])
        torch.testing.assert_close(mine.double().cpu(), exact, rtol=0, atol=1e-2 * max(float(exact.abs().max()), 1e-3))
        torch.testing.assert_close(mine_lse.double().cpu(), scores.logsumexp(-1), rtol=1e-4, atol=1e-4)


def test_what_qv_needs() -> None:
    made = Latents(64, 1, torch.bfloat16, torch.device("cpu"))
    v_cache, k_cache = made.pool.split((512, 64), -1)
    qv, q = (torch.randn(len(USED), 1, 4, d).bfloat16() for d in (512, 64))
    how: dict[str, Any] = dict(cache_seqlens=made.used, page_table=made.table)
    refused: list[tuple[tuple[torch.Tensor, ...], type[Exception], str]] = [
        ((q[..., :60], k_cache, v_cache, qv), InvalidProblem, "q has head_dim 60 and k_cache 64; they must be equal"),
        ((q, k_cache, v_cache, qv[..., :500]), InvalidProblem, r"qv has shape \(4, 1, 4, 500\); it must be \(4, 1, 4, 512\)"),
        ((q, k_cache, v_cache, qv.float()), InvalidProblem, r"qv is torch\.float32 on cpu and q is torch\.bfloat16"),
        ((q.to(torch.float8_e4m3fn), k_cache, v_cache, qv), NotSupported, r"qv is given and q is torch\.float8_e4m3fn"),
    ]
    for (q_, k_, v_, qv_), error, says in refused:
        with pytest.raises(error, match=says):
            fa3.flash_attn_with_kvcache(q_, k_, v_, qv=qv_, **how)
    with pytest.raises(NotSupported, match="qv is given; flash_attn_with_kvcache takes it"):
        fa3.flash_attn_func(q, k_cache, v_cache, qv=qv)


def test_gradients_and_refusals_of_qv() -> None:
    """By two tensors what one of all columns gives, where head dims are small enough for gradients."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(2, n, heads, d, generator=generator) for n, heads, d in ((3, 4, 8), (3, 4, 24), (9, 2, 8), (9, 2, 24))]
    q, qv, k, v = made[0].requires_grad_(), made[1].requires_grad_(), *made[2:]
    used = torch.tensor([9, 4], dtype=torch.int32)
    out = flashtile.attention_cached(q, k, v, seqused_k=used, qv=qv, causal=True)
    both = torch.cat([v, k], -1)
    whole = flashtile.attention_cached(torch.cat([qv, q], -1), both, both[..., :24], seqused_k=used, causal=True)
    torch.testing.assert_close(out, whole)
    grads = [torch.autograd.grad(o.square().sum(), (q, qv)) for o in (out, whole)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
    for says, named in (
        ("append is given beside qv", {"append": (k[:, :3], v[:, :3])}),
        ("shared_prefix", {"shared_prefix": 4}),
    ):
        with pytest.raises(NotSupported, match=says):
            flashtile.attention_cached(q, k, v, seqused_k=used, qv=qv, **named)
    with torch.no_grad():
        flashtile.attention_cached(q, k, v, seqused_k=used, qv=qv)
        with pytest.raises(InvalidProblem, match="k_cache has head_dim 8 and q has 32"):  # though such a call is known now
            flashtile.attention_cached(torch.cat([qv, q], -1), k, v, seqused_k=used)


def test_nothing_is_written_for_a_call_that_runs_nowhere() -> None:
    """Rows of 600 columns can be appended, and no kernel attends to them."""
    q, k, v = (torch.randn(1, 1, 2, 600) for _ in "qkv")
    pools = [torch.zeros(1, 8, 2, 600) for _ in "kv"]
    with pytest.raises(NotSupported, match="head_dim is 600"):
        fa3.flash_attn_with_kvcache(q, *pools, k, v, cache_seqlens=3)
    assert not any(bool(pool.any()) for pool in pools)


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
    with pytest.raises(InvalidProblem, match=r"qo_indptr is \[1, 2, 3, 4, 5\]; it must start with 0"):
        wrapper.plan(starts + 1, begins, made.lists, made.used, *sizes)
    wrapper.plan(starts, begins, made.lists, made.used, *sizes)
    empty = torch.zeros_like(made.used)
    wrapper.plan(starts, empty.new_zeros(5), made.lists[:0], empty, *sizes)  # a cache of no pages
    out, lse = wrapper.run(q[:, 0, :, :512], q[:, 0, :, 512:], pool[:0, :, :512], pool[:0, :, 512:], return_lse=True)
    assert not out.any()
    assert (lse == -torch.inf).all()
    wrapper.plan(starts, begins, made.lists, made.used, *sizes)
    with pytest.raises(InvalidProblem, match=r"q_nope is torch\.float64 on cpu and q_pe is torch"):
        wrapper.run(q[:, 0, :, :512].double(), q[:, 0, :, 512:], pool[..., :512], pool[..., 512:])
    wrapper.plan(starts, begins, made.lists, made.used, 4, 512, 0, 64, False, 0.1)
    with pytest.raises(InvalidProblem, match=r"ckv_cache is torch\.float64 and q_nope is torch"):
        wrapper.run(q[:, 0, :, :512], q[:, 0, :, :0], pool[..., :512].double(), pool[..., :0])
    wrapper.plan(starts, begins, made.lists, made.used, *sizes)
    with pytest.raises(InvalidProblem, match=r"kpe_cache has shape .* as plan was told"):
        wrapper.run(q[:, 0, :, :512], q[:, 0, :, 512:], pool[..., :512], pool[..., 500:])
    with pytest.raises(InvalidProblem, match="kv_indptr is no int32 tensor of one axis; with use_cuda_graph=True plans write"):
        BatchMLAPagedAttentionWrapper(None, True, starts.clone(), None, made.lists.clone(), made.used.clone())
    kept = [t.clone() for t in (starts, begins, made.lists, made.used)]
    wrapper = BatchMLAPagedAttentionWrapper(None, True, *kept)
    wrapper.plan(starts, begins, made.lists, made.used, *sizes)
    with pytest.raises(InvalidProblem, match="qo_indptr has queries a request: 2, and the plan before 1; with use_cuda_graph"):
        wrapper.plan(2 * starts, begins, made.lists, made.used, *sizes)
    with pytest.raises(InvalidProblem, match="qo_indptr has queries a request: 0, and the plan before 1; with use_cuda_graph"):
        wrapper.plan(0 * starts, begins, made.lists, made.used, *sizes)
    with pytest.raises(InvalidProblem, match="kv_indices has 8 elements and the wrapper's 4; with use_cuda_graph=True"):
        wrapper.plan(starts, begins, made.lists.repeat(2), made.used, *sizes)
