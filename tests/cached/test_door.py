"""flash-attention's flash_attn_with_kvcache and its tables of pages, by the rules of versions 2 and 3."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import flashtile
from flashtile.compat import flash_attn as fa
from flashtile.compat import flash_attn_3 as fa3
from flashtile.compat import flash_attn_passes as passes


def test_append_rotary_and_pages_as_flash_attention_has_them() -> None:
    q, k, v = (torch.randn(2, 3, h, 16) for h in (4, 2, 2))
    pools = [torch.randn(6, 4, 2, 16) for _ in "kv"]
    table = torch.tensor([[1, 0, 3], [5, 2, 4]], dtype=torch.int32)
    lengths = torch.tensor([2, 7], dtype=torch.int32)
    angle = torch.rand(12, 8)
    cos, sin = angle.cos(), angle.sin()
    for causal in (True, False):
        k_cache, v_cache = (pool.clone() for pool in pools)
        out, lse = fa.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cos, sin, lengths, block_table=table, causal=causal, return_softmax_lse=True
        )
        for i, n in enumerate(lengths.tolist()):
            at = torch.arange(n, n + 3)[None]
            mine = slice(i, i + 1)
            turn = flashtile.ops.rotary(k[mine], None, cos, sin, interleaved=True, positions=at)
            places = at if causal else at * 0 + n
            query = flashtile.ops.rotary(q[mine], None, cos, sin, interleaved=True, positions=places)
            keys, values = (pool[table[i].long()].flatten(0, 1)[None, :n] for pool in pools)
            keys, values = torch.cat([keys, turn], 1), torch.cat([values, v[mine]], 1)
            want, sums = flashtile.attention(query, keys, values, causal=causal, return_lse=True)
            torch.testing.assert_close(out[mine], want)
            torch.testing.assert_close(lse[mine], sums)


def test_contiguous_caches_rows_left_padding_and_blind_rows() -> None:
    q, pools = torch.randn(2, 3, 2, 16), [torch.randn(4, 9, 2, 16) for _ in "kv"]
    k_cache, v_cache = pools
    rows, left = torch.tensor([3, 1]), torch.tensor([2, 0], dtype=torch.int32)
    out = fa.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=7, cache_batch_idx=rows, cache_leftpad=left, causal=True
    )
    for i, (row, first) in enumerate(((3, 2), (1, 0))):
        keys = [pool[row : row + 1, first:7] for pool in pools]
        torch.testing.assert_close(out[i : i + 1], flashtile.attention(q[i : i + 1], *keys, causal=True))
    k_cache, v_cache = k_cache[:2], v_cache[:2]
    _, lse = fa.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=2, causal=True, return_softmax_lse=True)
    assert (lse[:, :, 0] == torch.inf).all()
    whole = fa.flash_attn_with_kvcache(q, k_cache, v_cache, softcap=3.0, num_splits=1)
    want = flashtile.attention(q, k_cache, v_cache, score=(flashtile.Softcap(3.0),))
    torch.testing.assert_close(whole, want)


TABLE = torch.tensor([[1, 0, 3], [5, 2, 4]], dtype=torch.int32)
LENGTHS = torch.tensor([2, 7], dtype=torch.int32)


def some_pools() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 4, 2, 16), torch.randn(6, 4, 2, 16)


def test_version_2_reads_pages_in_its_packed_function() -> None:
    pools, q = some_pools(), torch.randn(4, 4, 16)
    starts, ends = torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([0, 5, 12], dtype=torch.int32)
    leaf = q.clone().requires_grad_()
    out, lse, _ = fa.flash_attn_varlen_func(
        leaf, *pools, starts, ends, 3, 7, causal=True, block_table=TABLE, return_attn_probs=True
    )
    keys = [torch.cat([pool[TABLE[i].long()].flatten(0, 1)[:n] for i, n in enumerate((5, 7))]) for pool in pools]
    other = q.clone().requires_grad_()
    want, sums, _ = fa.flash_attn_varlen_func(other, keys[0], keys[1], starts, ends, 3, 7, causal=True, return_attn_probs=True)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, sums)
    torch.testing.assert_close(*(torch.autograd.grad(o.sum(), t)[0] for o, t in ((out, leaf), (want, other))))
    with pytest.raises(flashtile.NotSupported, match=r"dropout_p is 0\.1"):
        fa.flash_attn_varlen_func(q, *pools, starts, ends, 3, 7, dropout_p=0.1, block_table=TABLE)
    for named in ({}, {"seqused_k": ends.diff()}):  # lengths by either
        made = passes._flash_attn_varlen_forward(
            q, *pools, starts, ends, 3, 7, 0.0, None, True, block_table=TABLE, **named
        )  # fmt: skip
        torch.testing.assert_close(made[:2], (out.detach(), lse.detach()))


def test_version_3_packs_queries_and_new_keys_apart() -> None:
    """Items of 3 and 1 queries, 2 and 1 new keys, rows of the table by number, positions that begin elsewhere."""
    pools, q, k, v = some_pools(), torch.randn(4, 4, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    cu_q, cu_new = torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([0, 2, 3], dtype=torch.int32)
    rows, starts = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([4, 1], dtype=torch.int32)
    angle = torch.rand(12, 8)
    cos, sin = angle.cos(), angle.sin()
    made = pools[0].clone(), pools[1].clone()
    call = partial(fa3.flash_attn_with_kvcache, cu_seqlens_q=cu_q, cu_seqlens_k_new=cu_new, causal=True)
    call = partial(call, rotary_seqlens=starts, page_table=TABLE, return_softmax_lse=True)
    out, lse, *rest = call(
        q, *made, k, v, None, cos, sin, LENGTHS, rows,
        scheduler_metadata=fa3.get_scheduler_metadata(2, 3, 12, 4, 2, 16, LENGTHS),
    )  # fmt: skip
    again = pools[0].clone(), pools[1].clone()
    whole = torch.compile(call, fullgraph=True, backend="eager")(q, *again, k, v, None, cos, sin, LENGTHS, rows)
    assert all(torch.equal(a, b) for a, b in zip((out, lse, *made), (*whole[:2], *again), strict=True))
    assert [t.numel() for t in rest] == [0, 0]
    for i, (row, n) in enumerate(zip(rows.tolist(), LENGTHS.tolist(), strict=True)):
        mine, new = slice(int(cu_q[i]), int(cu_q[i + 1])), slice(int(cu_new[i]), int(cu_new[i + 1]))
        begin = int(starts[i])
        turn = flashtile.ops.rotary(k[None, new], None, cos, sin, interleaved=True, offset=begin)
        query = flashtile.ops.rotary(q[None, mine], None, cos, sin, interleaved=True, offset=begin)
        keys, values = (pool[TABLE[row].long()].flatten(0, 1)[None, :n] for pool in pools)
        keys, values = torch.cat([keys, turn], 1), torch.cat([values, v[None, new]], 1)
        want, sums = flashtile.attention(query, keys, values, causal=True, return_lse=True)
        torch.testing.assert_close(out[None, mine], want)
        torch.testing.assert_close(lse[None, :, mine], sums)
        held = made[0][TABLE[row].long()].flatten(0, 1)[n : n + turn.shape[1]]
        torch.testing.assert_close(held, turn[0])


def test_version_3_is_minus_inf_where_no_key_is_seen_and_counts_left_padding_within_pages() -> None:
    pools, q = some_pools(), torch.randn(2, 3, 2, 16)
    left = torch.tensor([1, 7], dtype=torch.int32)
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        q, *pools, cache_seqlens=LENGTHS, cache_leftpad=left, page_table=TABLE, causal=True, return_softmax_lse=True
    )
    keys = [pool[TABLE[0].long()].flatten(0, 1)[None, 1:2] for pool in pools]
    torch.testing.assert_close(out[:1], flashtile.attention(q[:1], *keys, causal=True))
    assert (out[1] == 0).all()
    assert (lse[1] == -torch.inf).all()


NEW = {name: torch.randn(2, 1, 2, 16) for name in "kv"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"cache_seqlens": 4.7}, "cache_seqlens is 4.7; it must be an int from 0 to 12"),
    ({"cache_seqlens": True}, "cache_seqlens is True"),
    ({"cache_seqlens": 13}, "cache_seqlens is 13"),
    ({"cache_seqlens": [5, 7]}, "cache_seqlens is [5, 7]"),
    ({"cache_seqlens": LENGTHS[:1]}, "cache_seqlens has 1 elements and the batch 2"),
    ({"cache_seqlens": LENGTHS + 6}, "cache_seqlens[1] is 13; it must be from 0 to 12"),
    ({"cache_seqlens": LENGTHS.float()}, "cache_seqlens is torch.float32"),
    ({"block_table": TABLE.long()}, "block_table is torch.int64; it must be int32: block_table.int()"),
    ({"block_table": TABLE[:1]}, "block_table has shape (1, 3)"),
    ({"block_table": TABLE[0]}, "block_table has shape (3,)"),
    ({"block_table": TABLE + 3}, "block_table[1] names page 8"),
    ({"block_table": None, "cache_seqlens": 3, "cache_batch_idx": torch.tensor([1, 2**32 + 1])},
     "cache_batch_idx holds 4294967297"),
    ({"block_table": None, "cache_seqlens": 3, "cache_batch_idx": torch.tensor([1, 6])}, "cache_batch_idx holds 6"),
    ({"block_table": None, "cache_seqlens": 3, "cache_batch_idx": torch.tensor([1])}, "cache_batch_idx has 1 elements"),
    ({"block_table": None, "cache_seqlens": 3, "k_cache": torch.randn(1, 4, 2, 16), "v_cache": torch.randn(1, 4, 2, 16)},
     "k_cache has 1 items and the batch 2"),
    ({"block_table": None, "cache_seqlens": 3, "cache_leftpad": torch.tensor([5, 0])}, "cache_leftpad[0] is 5"),
    ({"k_cache": torch.randn(6, 4, 2)}, "k_cache has shape (6, 4, 2)"),
    ({"k_cache": torch.randn(6, 4, 2), **NEW}, "k_cache has shape (6, 4, 2); it must be (pages"),
    ({"k": torch.randn(2), "v": torch.randn(2)}, "k has shape (2,)"),
    ({"block_table": TABLE[:1].expand(2, 3), "cache_seqlens": 2, **NEW}, "block_table gives two new keys, of items 0 and 1"),
    ({"block_table": None, "cache_seqlens": 3, "cache_batch_idx": torch.tensor([1, 1]), **NEW},
     "cache_batch_idx gives two new keys, of items 0 and 1, one place: page 1, row 3"),
    ({"softmax_scale": "0.1", **NEW}, "scale is '0.1'"),
    ({"alibi_slopes": torch.rand(3), **NEW}, "alibi slopes have shape (3,); it must be (2,)"),
    ({"q": torch.randn(2, 1, 3, 16), **NEW}, "heads_q is 3 and heads_kv is 2"),
    ({"block_table": None, "cache_seqlens": 2, "cache_leftpad": torch.tensor([5, 0]), **NEW}, "cache_leftpad[0] is 5"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "says"), WRONG, ids=[says for _, says in WRONG])
def test_errors_say_what_the_caller_gave(change: dict[str, Any], says: str) -> None:
    k_cache, v_cache = some_pools()
    given = {"k_cache": k_cache, "v_cache": v_cache, "block_table": TABLE, "cache_seqlens": LENGTHS, **change}
    with pytest.raises(flashtile.InvalidProblem) as error:
        fa.flash_attn_with_kvcache(**{"q": torch.randn(2, 1, 2, 16), **given})
    assert says in str(error.value)
    assert not k_cache._version, "nothing is written for a call that fails"
