"""flashinfer's functions and wrappers, by its rules: pages as lists, plan and run, lse of base 2."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashtile
from flashtile import InvalidProblem, NotSupported
from flashtile.compat import flashinfer as fi
from flashtile.compat import flashinfer_shared as shared

WORKSPACE = torch.zeros(1)
USED = [11, 0, 4, 16]
FLOAT = torch.float32


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def starts(counts: list[int]) -> torch.Tensor:
    return ints(*[sum(counts[:i]) for i in range(len(counts) + 1)])


class Pages:
    """Requests with so many keys in pages of some size; NaN in all other rows."""

    def __init__(self, used: list[int], size: int, layout: str = "NHD", joined: bool = True, heads: int = 2, dim: int = 16):
        generator = torch.Generator().manual_seed(1)
        self.keys, self.values = ([torch.randn(n, heads, dim, generator=generator) for n in used] for _ in "kv")
        counts = [-(-n // size) for n in used]
        total = sum(counts)
        pools = torch.full((total + 2, 2, size, heads, dim), torch.nan)
        order = torch.randperm(total + 2, generator=generator)[:total].tolist()
        self.indptr, self.indices = starts(counts), ints(*order)
        self.last = ints(*[(n - 1) % size + 1 if n else 0 for n in used])
        for i, (k, v) in enumerate(zip(self.keys, self.values, strict=True)):
            for t in range(len(k)):
                page = order[int(self.indptr[i]) + t // size]
                pools[page, 0, t % size], pools[page, 1, t % size] = k[t], v[t]
        pools = pools.transpose(2, 3).contiguous() if layout == "HND" else pools
        self.size, self.cache = size, pools if joined else (pools[:, 0].clone(), pools[:, 1].clone())

    @property
    def lists(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.indptr, self.indices, self.last


def true(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse (queries, heads) of base 2) of one request in float64."""
    out, lse = flashtile.attention(*(t[None].double() for t in (q, k, v)), return_lse=True, **how)
    return out[0].float(), lse[0].transpose(0, 1).float() / math.log(2)


def close(got: Any, want: Any) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("size", "joined"), [(1, True), (5, False), (16, True)])
def test_decode(size: int, layout: str, joined: bool) -> None:
    pages, q = Pages(USED, size, layout, joined), torch.randn(4, 4, 16)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, layout)
    wrapper.plan(*pages.lists, 4, 2, 16, size, q_data_type=FLOAT, window_left=7, logits_soft_cap=3.0, sm_scale=0.3)
    sinks = torch.randn(4)
    for how in ({}, {"sinks": sinks}):
        out, lse = wrapper.run(q, pages.cache, return_lse=True, k_scale=2.0, v_scale=0.5, **how)
        for i, (k, v) in enumerate(zip(pages.keys, pages.values, strict=True)):
            want, sums = true(
                q[i : i + 1], k, v, causal=True, window=(7, None), scale=0.6, score=(flashtile.Softcap(3.0),),
                sink=how.get("sinks"),
            )  # fmt: skip
            close((out[i : i + 1], lse[i : i + 1]), (want * 0.5, sums))
    into = torch.empty_like(q), torch.empty(4, 4)
    wrapper.run(q, pages.cache, out=into[0], lse=into[1])  # which writes both
    close(into, wrapper.run_return_lse(q, pages.cache))
    wrapper.run(q.clone().requires_grad_(), pages.cache, out=into[0].fill_(torch.nan))  # a copy, which has gradients
    close(into[:1], wrapper.run_return_lse(q, pages.cache)[:1])
    assert into[0].requires_grad


def test_several_queries_of_a_request_that_decodes() -> None:
    pages, q = Pages([11, 6], 4), torch.randn(6, 4, 16)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*pages.lists, 4, 2, 16, 4, data_type="float32", q_len_per_req=3)
    out, lse = wrapper.run(q, pages.cache, return_lse=True)
    for i, rows in enumerate((slice(3), slice(3, 6))):
        close((out[rows], lse[rows]), true(q[rows], pages.keys[i], pages.values[i], causal=True))


@pytest.mark.parametrize(
    ("said", "dtypes"),
    [
        ({}, (torch.float16, torch.float16)),
        ({"data_type": FLOAT}, (FLOAT, FLOAT)),
        ({"data_type": torch.float8_e4m3fn, "q_data_type": FLOAT}, (FLOAT, torch.float8_e4m3fn)),
        ({"data_type": torch.float16, "kv_data_type": torch.float8_e4m3fn}, (torch.float16, torch.float8_e4m3fn)),
    ],
)
def test_dtypes_that_a_plan_says(said: dict[str, Any], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """data_type is what is not said otherwise."""
    pages, wrapper = Pages([11, 6], 4), fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*pages.lists, 4, 2, 16, 4, **said)
    kinds = (torch.float16, FLOAT, torch.float8_e4m3fn)
    for q_kind in kinds[:2]:
        for kind in kinds:
            q, cache = torch.randn(2, 4, 16).to(q_kind), pages.cache.nan_to_num().to(kind)
            if (q_kind, kind) == dtypes:
                assert wrapper.run(q, cache).isfinite().all()
            else:
                with pytest.raises(InvalidProblem, match="they must be equal"):
                    wrapper.run(q, cache)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_prefix_that_all_requests_share(layout: str, causal: bool) -> None:
    pages, prefix = Pages(USED, 5, layout), [torch.randn(13, 2, 16) for _ in "kv"]
    given = [t.transpose(0, 1) if layout == "HND" else t for t in prefix]
    q, counts = torch.randn(8, 4, 16), [3, 0, 4, 1]
    decode = shared.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(WORKSPACE, layout)
    decode.begin_forward(*pages.lists, 4, 2, 16, 5, FLOAT)
    prefill = shared.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(WORKSPACE, layout)
    prefill.begin_forward(starts(counts), *pages.lists, 4, 2, 16, 5)
    out = decode.forward(q[:4], *given, pages.cache)
    packed = prefill.forward(q, *given, pages.cache, causal=causal, sm_scale=0.3)
    for i, own in enumerate(zip(pages.keys, pages.values, strict=True)):
        k, v = (torch.cat(both) for both in zip(prefix, own, strict=True))
        close((out[i : i + 1],), true(q[i : i + 1], k, v)[:1])
        rows = slice(sum(counts[:i]), sum(counts[: i + 1]))
        if counts[i]:
            close((packed[rows],), true(q[rows], k, v, causal=causal, scale=0.3)[:1])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [False, True])
def test_prefill_over_pages_and_over_packed_keys(layout: str, causal: bool) -> None:
    pages, counts = Pages([11, 3, 4, 16], 5, layout), [3, 1, 4, 0]
    q, cu = torch.randn(8, 4, 16), starts([3, 1, 4, 0])
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, layout)
    rest = None, None, causal, "NONE", False  # by place, as in 0.7.4: masks, causal order, no rotation
    wrapper.plan(cu, *pages.lists, 4, 2, 16, 5, None, *rest, None, 6, None, None, None, FLOAT, fixed_split_size=2)
    made = wrapper.run(q, pages.cache, return_lse=True)
    packed = fi.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    packed.plan(cu, starts([11, 3, 4, 16]), 4, 2, 16, None, *rest, 6, None, None, None, None, FLOAT)
    close(packed.run(q, torch.cat(pages.keys), torch.cat(pages.values), return_lse=True), made)
    for i in range(3):
        rows = slice(sum(counts[:i]), sum(counts[: i + 1]))
        want = true(q[rows], pages.keys[i], pages.values[i], causal=causal, window=(6, None))
        close((made[0][rows], made[1][rows]), want)
    lse = wrapper.run(q, pages.cache, return_lse=True, lse_base="ln", lse_layout="HN")[1]
    torch.testing.assert_close(lse, made[1].T * math.log(2))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_single(layout: str) -> None:
    q, k, v = torch.randn(5, 4, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    keys = [t.transpose(0, 1).contiguous() if layout == "HND" else t for t in (k, v)]
    close(fi.single_prefill_with_kv_cache(q, *keys, causal=True, kv_layout=layout, return_lse=True), true(q, k, v, causal=True))
    seen = torch.rand(5, 9) < 0.6
    want = true(q, k, v, mask=flashtile.Stored(seen[None, None]))
    bits = torch.zeros(48, dtype=torch.uint8)
    bits[:45] = seen.flatten()
    packed = (bits.view(6, 8) << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8)
    for how in ({"custom_mask": seen}, {"packed_custom_mask": packed}):
        close(fi.single_prefill_with_kv_cache(q, *keys, causal=True, kv_layout=layout, return_lse=True, **how), want)
    out, lse = fi.single_decode_with_kv_cache(q[0], *keys, layout, window_left=4, return_lse=True)
    want = true(q[:1], k, v, causal=True, window=(4, None))
    close((out[None], lse[None]), want)
    torch.testing.assert_close(fi.single_decode_with_kv_cache(q[0], *keys, layout, window_left=4), out)


def test_append_and_positions() -> None:
    """Lengths after the append; a token behind the last request's goes nowhere. In a graph, too."""
    compiled = torch.compile(fi.append_paged_kv_cache, fullgraph=True, backend="eager")
    for layout in ("NHD", "HND"):
        pages, new = Pages([7, 3, 9], 4, layout), [2, 0, 3]
        before = [n.clone() for n in pages.keys]
        append = torch.randn(7, 2, 16)
        lengths = fi.get_seq_lens(pages.indptr, pages.last, 4)
        assert lengths.tolist() == [7, 3, 9]
        item, position = fi.get_batch_indices_positions(starts(new), lengths, 7)
        assert item.tolist() == [0, 0, 2, 2, 2, -1, -1]
        assert position.tolist() == [5, 6, 6, 7, 8, -1, -1]
        other = pages.cache.clone()  # pyright: ignore[reportAttributeAccessIssue]
        for write, cache in ((fi.append_paged_kv_cache, pages.cache), (compiled, other)):
            write(append, append * 2, item, position, cache, pages.indices, pages.indptr, pages.last, layout)
        torch.testing.assert_close(other, pages.cache, rtol=0, atol=0, equal_nan=True)
        wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, layout)
        wrapper.plan(*pages.lists, 2, 2, 16, 4, q_data_type=FLOAT)
        q = torch.randn(3, 2, 16)
        keys = [torch.cat([before[0][:5], append[:2]]), before[1], torch.cat([before[2][:6], append[2:5]])]
        values = [torch.cat([pages.values[0][:5], append[:2] * 2]), pages.values[1]]
        values.append(torch.cat([pages.values[2][:6], append[2:5] * 2]))
        close(wrapper.run(q, pages.cache), torch.cat([true(q[i : i + 1], keys[i], values[i])[0] for i in range(3)]))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_append_in_the_dtype_of_an_fp8_cache(dtype: torch.dtype) -> None:
    """flashinfer reads new keys as numbers of the cache; every one that there is arrives as it was."""
    every = torch.arange(256).to(torch.uint8).view(dtype)
    every = every[every.float().isfinite()]
    every = torch.cat([every, every[: -every.numel() % 8]]).view(-1, 1, 8)
    pool, n = [torch.zeros(1, every.shape[0], 1, 8).to(dtype) for _ in "kv"], every.shape[0]
    where = torch.zeros(n, dtype=torch.int32), torch.arange(n, dtype=torch.int32)
    fi.append_paged_kv_cache(every, every.flip(0), *where, tuple(pool), ints(0), ints(0, 1), ints(n))
    assert torch.equal(pool[0][0].float(), every.float())
    assert torch.equal(pool[1][0].float(), every.flip(0).float())
    with pytest.raises(InvalidProblem, match=r"append_key is torch\.\w+; it must be float16"):
        fi.append_paged_kv_cache(every, every, *where, (torch.zeros(1, n, 1, 8),) * 2, ints(0), ints(0, 1), ints(n))


def test_append_of_two_tokens_to_one_place() -> None:
    pool, new = (torch.zeros(4, 4, 2, 16), torch.zeros(4, 4, 2, 16)), torch.randn(2, 2, 16)
    for item, last in ((0, 3), (1, 1)):  # a request's row twice, and a page of two requests
        says = f"positions holds 5 of request 0 and 5 of request {item}, which are one place, page 1, row 1"
        with pytest.raises(InvalidProblem, match=says):
            fi.append_paged_kv_cache(new, new, ints(0, item), ints(5, 5), pool, ints(0, 1, 2, last), ints(0, 2, 4), ints(2, 2))
        assert not pool[0].any()
    fi.append_paged_kv_cache(new, new, ints(-1, -1), ints(-1, -1), pool, ints(0, 1, 2, 3), ints(0, 2, 4), ints(2, 2))
    for page in (-1, 4):  # the last row of page -1 would be slot -1, which is nowhere
        with pytest.raises(InvalidProblem, match=f"kv_indices holds page {page}; it must be from 0 to 3"):
            fi.append_paged_kv_cache(new, new, ints(0, 1), ints(3, 0), pool, ints(page, 1), ints(0, 1, 2), ints(4, 1))
    for lists in ((ints(), ints(0)), (ints(), ints(0, 0))):  # of no request, and of one without a page: nowhere
        item, position = fi.get_batch_indices_positions(lists[1], lists[1][1:], 2)
        assert item.tolist() == position.tolist() == [-1, -1]
        fi.append_paged_kv_cache(new, new, item, position, pool, *lists, lists[1][1:])
    assert not pool[0].any()


def test_merged_states() -> None:
    q, k, v = torch.randn(5, 4, 16), torch.randn(9, 4, 16), torch.randn(9, 4, 16)
    parts = [true(q, k[s], v[s]) for s in (slice(4), slice(4, 6), slice(6, 9))]
    want = true(q, k, v)
    close(fi.merge_states(torch.stack([p[0] for p in parts], 1), torch.stack([p[1] for p in parts], 1)), want)
    close(fi.merge_state(*fi.merge_state(*parts[0], *parts[1]), *parts[2]), want)
    out, lse = (t.clone() for t in fi.merge_state(*parts[0], *parts[1]))
    kept, mask = (out.clone(), lse.clone()), torch.tensor([True, False, True, False, True])
    fi.merge_state_in_place(out, lse, *parts[2], mask=mask)
    close((out[mask], lse[mask], out[~mask], lse[~mask]), (want[0][mask], want[1][mask], kept[0][~mask], kept[1][~mask]))
    empty = torch.full((5, 4, 16), torch.nan), torch.full((5, 4), -torch.inf)
    close(fi.merge_state(*parts[0], *empty), parts[0])
    assert (fi.merge_state(*empty, *empty)[0] == 0).all()


def test_cascade() -> None:
    """A prefix of all requests, one of the first two, and each one's own keys, in one pool."""
    levels, counts = Pages([12, 7, 5, 3, 9, 2], 4), [2, 1, 3]
    q = torch.randn(6, 4, 16)
    cuts = [slice(0, 1), slice(1, 3), slice(3, 6)]
    lists: list[list[torch.Tensor]] = [[], [], [], []]
    for cut, cu in zip(cuts, (ints(0, 6), ints(0, 3, 6), starts(counts)), strict=True):
        ends = levels.indptr[cut.start : cut.stop + 1]
        for kept, one in zip(
            lists, (cu, ends - ends[0], levels.indices[int(ends[0]) : int(ends[-1])], levels.last[cut]), strict=True
        ):
            kept.append(one)
    wrapper = fi.MultiLevelCascadeAttentionWrapper(3, WORKSPACE)
    wrapper.plan(*lists, 4, 2, 16, 4, causal=True, q_data_type=FLOAT)
    out = wrapper.run(q, levels.cache)
    for i, (chain, rows) in enumerate((((0, 1, 3), slice(2)), ((0, 1, 4), slice(2, 3)), ((0, 2, 5), slice(3, 6)))):
        k, v = (torch.cat([side[n] for n in chain]) for side in (levels.keys, levels.values))
        torch.testing.assert_close(out[rows], true(q[rows], k, v, causal=True)[0], rtol=1e-5, atol=1e-5, msg=str(i))


@pytest.mark.parametrize(("told", "split"), [(None, None), (-1, None), (3, 128), (33, 256), (2048, 8192), (2**30, 2**30)])
def test_with_a_fixed_split_size_keys_are_split_alike_beside_any_request(
    told: Any, split: int | None, monkeypatch: Any
) -> None:
    splits = list[Any]()
    attend = fi.attention_cached
    monkeypatch.setattr(fi, "attention_cached", lambda *args, **how: splits.append(how["split"]) or attend(*args, **how))
    for lengths in ([11, 2], [11, 700]):
        pages, wrapper = Pages(lengths, 4), fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
        q = torch.randn(2, 4, 16)
        wrapper.plan(*pages.lists, 4, 2, 16, 4, q_data_type=FLOAT, fixed_split_size=told)
        close(wrapper.run(q, pages.cache)[:1], true(q[:1], pages.keys[0], pages.values[0])[0])
    assert splits == [split, split]
    wrapper.plan(*pages.lists, 4, 2, 16, 4, q_data_type=FLOAT, fixed_split_size=told, disable_split_kv=True)
    wrapper.run(q, pages.cache)
    assert splits[2] == 0
    for wrong in (0, True, 1.5, -2):
        with pytest.raises(InvalidProblem, match=r"fixed_split_size is .*; it must be an int of at least 1"):
            wrapper.plan(*pages.lists, 4, 2, 16, 4, q_data_type=FLOAT, fixed_split_size=wrong)


def test_plans_of_a_graph_write_where_the_first_one_did() -> None:
    first, second = Pages([11, 2], 4), Pages([3, 14], 4)
    buffers = torch.zeros(3, dtype=torch.int32), torch.zeros(6, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    wrapper = fi.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers)
    assert wrapper.is_cuda_graph_enabled
    q = torch.randn(2, 4, 16)
    wrapper.plan(*first.lists, 4, 2, 16, 4, q_data_type=FLOAT)
    tables = wrapper._tables
    assert tables is not None
    address = tables.table.data_ptr(), tables.used.data_ptr()
    wrapper.plan(*second.lists, 4, 2, 16, 4, q_data_type=FLOAT)
    assert wrapper._tables is tables
    assert address == (tables.table.data_ptr(), tables.used.data_ptr())
    out = wrapper.run(q, second.cache)
    close(out, torch.cat([true(q[i : i + 1], second.keys[i], second.values[i])[0] for i in range(2)]))
    with pytest.raises(InvalidProblem, match="keeps its batch size"):
        wrapper.plan(*Pages([3], 4).lists, 4, 2, 16, 4, q_data_type=FLOAT)


def test_refusals() -> None:
    pages, q = Pages([5], 4), torch.randn(1, 4, 16)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    with pytest.raises(InvalidProblem, match="run is called before plan"):
        wrapper.run(q, pages.cache)
    with pytest.raises(NotSupported, match=r"pos_encoding_mode is ROPE_LLAMA.*flashtile\.ops\.rotary"):
        wrapper.plan(*pages.lists, 4, 2, 16, 4, pos_encoding_mode="ROPE_LLAMA")
    with pytest.raises(NotSupported, match="o_data_type is"):
        wrapper.plan(*pages.lists, 4, 2, 16, 4, o_data_type=torch.float32)
    with pytest.raises(TypeError, match="plan has no argument 'casual'"):
        wrapper.plan(*pages.lists, 4, 2, 16, 4, casual=True)
    with pytest.raises(InvalidProblem, match="kv_layout is 'HDN'"):
        fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "HDN")
    wrapper.plan(*pages.lists, 4, 2, 16, 4)
    with pytest.raises(InvalidProblem, match=r"q is torch\.float32 and plan's q_data_type torch\.float16"):
        wrapper.run(q, pages.cache)
    wrapper.plan(*pages.lists, 4, 2, 16, 4, q_data_type=FLOAT)
    with pytest.raises(NotSupported, match="kv_cache_sf is given"):
        wrapper.run(q, pages.cache, kv_cache_sf=q)
    with pytest.raises(InvalidProblem, match=r"q has shape \(2, 4, 16\); it must be \(1, heads, head_dim\)"):
        wrapper.run(q.expand(2, -1, -1), pages.cache)
    with pytest.raises(InvalidProblem, match=r"pages of 2 and plan's page_size is 4"):
        wrapper.run(q, pages.cache[:, :, :2])
    wrapper.plan(pages.indptr, pages.indices + 9, pages.last, 4, 2, 16, 4, q_data_type=FLOAT)
    with pytest.raises(InvalidProblem, match=r"indices\[0\] names page"):
        wrapper.run(q, pages.cache)
    for starts_of, says in (
        (ints(0, 3), r"\[0, 3\]; it must .* end with at most 2"),
        (ints(1, 2), r"\[1, 2\]"),
        ([0, 2], "no int32"),
    ):
        with pytest.raises(InvalidProblem, match=f"indptr is {says}"):
            wrapper.plan(starts_of, *pages.lists[1:], 4, 2, 16, 4)
    with pytest.raises(InvalidProblem, match="q_data_type is 'float61'"):
        wrapper.plan(*pages.lists, 4, 2, 16, 4, q_data_type="float61")
    with pytest.raises(InvalidProblem, match="window_left is None"):
        wrapper.plan(*pages.lists, 4, 2, 16, 4, window_left=None)
    with pytest.raises(InvalidProblem, match="float_workspace_buffer is a NoneType"):
        fi.BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(*pages.lists, 4, 2, 16, 4, q_data_type=FLOAT, o_data_type="float32")
    for out in (q.half(), q.new_empty(2, *q.shape)):
        with pytest.raises(InvalidProblem, match=r"out is .*; it must be torch\.float32 of shape \(1, 4, 16\)"):
            wrapper.run(q, pages.cache, out=out)
    with pytest.raises(InvalidProblem, match="lse is torch"):
        wrapper.run(q, pages.cache, lse=torch.empty(4, 1), return_lse=True)
    with pytest.raises(InvalidProblem, match="kv_indptr is no int32 tensor"):
        fi.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE).plan(ints(0, 1), [0, 5], 4, 2, 16)
    k = pages.keys[0]
    with pytest.raises(InvalidProblem, match="q is a int"):
        fi.single_decode_with_kv_cache(3, k, k)
    with pytest.raises(InvalidProblem, match=r"custom_mask has shape \(4,\); it must be \(1, 5\)"):
        fi.single_prefill_with_kv_cache(q, k, k, custom_mask=torch.ones(4))
    with pytest.raises(InvalidProblem, match=r"packed_custom_mask is torch\.int32 of shape \(1,\); it must be uint8 of 1"):
        fi.single_prefill_with_kv_cache(q, k, k, packed_custom_mask=ints(31))
    with pytest.raises(InvalidProblem, match="positions holds 8 of request 0, which kv_indptr has no page for"):
        fi.append_paged_kv_cache(k[:1], k[:1], ints(0), ints(8), pages.cache, pages.indices, pages.indptr, pages.last)
    prefill = fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    with pytest.raises(NotSupported, match=r"a mask by bits.*flashtile\.Tree"):
        prefill.plan(ints(0, 1), *pages.lists, 4, 2, 16, 4, custom_mask=torch.ones(5, dtype=torch.bool))
    cascade = fi.MultiLevelCascadeAttentionWrapper(1, WORKSPACE)
    with pytest.raises(NotSupported, match="window_left is given"):
        cascade.plan([ints(0, 1)], *([one] for one in pages.lists), 4, 2, 16, 4, window_left=3)
    with pytest.raises(InvalidProblem, match=r"v has shape \(1, 4, 16\)"):
        fi.merge_states(q, q[..., 0])


def test_installed() -> None:
    flashtile.compat.install("flashinfer")
    try:
        import flashinfer
        from flashinfer.cascade import merge_states

        assert merge_states is fi.merge_states
        assert flashinfer.BatchDecodeWithPagedKVCacheWrapper is fi.BatchDecodeWithPagedKVCacheWrapper
        assert flashinfer.__version__ == "0.7.4"
        with pytest.raises(AttributeError, match="PODWithPagedKVCacheWrapper"):
            _ = flashinfer.PODWithPagedKVCacheWrapper
    finally:
        flashtile.compat.uninstall("flashinfer")


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_caches_in_fp8_with_scales_that_are_numbers_or_tensors(kind: torch.dtype) -> None:
    pages, q = Pages([11, 4], 5), torch.randn(2, 4, 16)
    cache = pages.cache.to(kind)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NHD")
    wrapper.plan(*pages.lists, 4, 2, 16, 5, q_data_type=FLOAT, kv_data_type=kind)
    want = fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NHD")
    want.plan(*pages.lists, 4, 2, 16, 5, q_data_type=FLOAT)
    heads = torch.rand(2) + 0.5
    for k_scale, v_scale in ((2.0, 0.5), (torch.tensor(2.0), torch.tensor([0.5])), (heads, heads * 2), (0.7, heads)):
        made = wrapper.run(q, cache, return_lse=True, k_scale=k_scale, v_scale=v_scale)
        k, v = (torch.as_tensor(scale).flatten()[:, None] for scale in (k_scale, v_scale))
        wide = torch.stack([cache[:, 0].float() * k, cache[:, 1].float() * v], 1)
        close(made, want.run(q, wide, return_lse=True))
    with pytest.raises(NotSupported, match="k_scale is a tensor"):
        want.run(q, pages.cache, k_scale=torch.tensor(2.0))
    with pytest.raises(InvalidProblem, match="plan's kv_data_type"):
        want.run(q, cache)


WRAPPERS = ("decode", "prefill", "ragged", "cascade")


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_of_a_plan_that_fails_nothing_is_kept_and_callers_keep_their_lists(name: str, graph: bool) -> None:
    """A run after it is that of the plan before; lists that callers write over, and later plans, are none of its business."""
    pages, q, buffer = Pages([7, 3], 4, "NHD"), torch.randn(2, 2, 16), torch.zeros(8, dtype=torch.int32)
    k, v = torch.randn(10, 2, 16), torch.randn(10, 2, 16)
    lists = {"cu": ints(0, 1, 2), "kv": starts([7, 3]), "indptr": pages.indptr, "indices": pages.indices, "last": pages.last}
    made: Any = {
        "decode": lambda: fi.BatchDecodeWithPagedKVCacheWrapper(
            WORKSPACE, use_cuda_graph=graph, paged_kv_indices_buffer=buffer
        ),
        "prefill": lambda: fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, use_cuda_graph=graph, paged_kv_indices_buf=buffer),
        "ragged": lambda: fi.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, use_cuda_graph=graph),
        "cascade": lambda: fi.MultiLevelCascadeAttentionWrapper(1, WORKSPACE),
    }[name]()

    def plan(sm_scale: float = 0.1, **change: Any) -> None:
        given, how = {**lists, **change}, dict(q_data_type=FLOAT, sm_scale=sm_scale)
        cu, kv, paged = given["cu"], given["kv"], [given[n] for n in ("indptr", "indices", "last")]
        if name == "cascade":
            made.plan([cu], *([one] for one in paged), 2, 2, 16, 4, **how)
        elif name == "ragged":
            made.plan(cu, kv, 2, 2, 16, **how)
        else:
            made.plan(*([] if name == "decode" else [cu]), *paged, 2, 2, 16, 4, **how)

    def run() -> torch.Tensor:
        return made.run(q, k, v) if name == "ragged" else made.run(q, pages.cache)

    plan()
    want = run()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"last": ints(3)}, "indptr has 3 elements and last_page_len 1"),
        ({"indptr": ints(0, 3, 2)}, r"indptr is \[0, 3, 2\]"),
    ]
    if name == "ragged":
        wrong = [({"kv": [0, 7, 10]}, "kv_indptr is no int32 tensor")]
        wrong += [({"cu": ints(0, 1, 1, 2)}, "qo_indptr has 4 elements and the captured graph's 3")] if graph else []
    elif name == "prefill" and graph:
        wrong.append(({"cu": ints(0, 1, 1, 2)}, "qo_indptr has 4 elements and the captured graph's 3"))
    for change, says in wrong:
        with pytest.raises(InvalidProblem, match=says):
            plan(3.0, **change)
        assert torch.equal(run(), want)
    before = {n: t.clone() for n, t in lists.items()}
    plan(cu=ints(0, 0, 2), kv=ints(0, 2, 10), last=ints(1, 1))  # a graph's plans go where the first one went
    assert all(torch.equal(t, before[n]) for n, t in lists.items())
    plan()
    for tensor in lists.values():
        tensor.zero_()
    assert torch.equal(run(), want)


ROW, CACHE = torch.randn(1, 2, 16), torch.randn(1, 2, 4, 2, 16)
BAD_NUMBERS: list[tuple[str, Callable[[Any], Any]]] = [
    ("page_size is 0; it must be an int of at least 1", lambda w: w.plan(ints(0, 1), ints(0), ints(1), 2, 2, 16, 0)),
    ("q_len_per_req is 0", lambda w: w.run(ROW, None, q_len_per_req=0)),
    ("k_scale is 'a'; it must be a number or None", lambda w: w.run(ROW, CACHE, k_scale="a")),
    ("v_scale is True", lambda w: w.run(ROW, CACHE, v_scale=True)),
    ("v_a is a NoneType", lambda w: fi.merge_state(*[None] * 4)),  # pyright: ignore[reportArgumentType]
    ("v is a NoneType", lambda w: fi.merge_states(*[None] * 2)),  # pyright: ignore[reportArgumentType]
    ("kv_indptr is no int32 tensor", lambda w: fi.get_seq_lens([0, 1], ints(1), 4)),  # pyright: ignore[reportArgumentType]
]  # fmt: skip


@pytest.mark.parametrize(("says", "call"), BAD_NUMBERS, ids=[says for says, _ in BAD_NUMBERS])
def test_bad_numbers_are_named(says: str, call: Callable[[Any], Any]) -> None:
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(ints(0, 1), ints(0), ints(1), 2, 2, 16, 4, q_data_type=FLOAT)
    with pytest.raises(InvalidProblem, match=re.escape(says)):
        call(wrapper)
