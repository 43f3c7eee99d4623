"""flash-attention 2's flash_attn_with_kvcache, by its own rules."""

from __future__ import annotations

import torch

import flashtile
from flashtile.compat import flash_attn as fa


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
