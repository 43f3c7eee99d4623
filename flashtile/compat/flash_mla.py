"""FlashMLA 1.0: absorbed latent attention over pages, whose values are the first columns of the keys.

Its rules: queries stand at the last keys under causal; lse is +inf where a query sees no key. Metadata are an empty object
that nobody reads: a plan is made of shapes, and lengths stay on the device. Pages have any size.
"""

from __future__ import annotations

from typing import Any

import torch

from flashtile.compat.asked import blind_rows_positive, refuse
from flashtile.compat.flash_attn_cache import saying
from flashtile.errors import InvalidProblem
from flashtile.problem.number import plain, told
from flashtile.torch.cache.attention import attention_cached
from flashtile.torch.cache.tensors import check_pools

__all__ = ["FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]
SPARSE = (
    "indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length",
)  # fmt: skip


class FlashMLASchedMeta:
    """What `get_mla_metadata` gives; it may be kept for any calls."""


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """(an empty object, None), whatever is given: nothing is scheduled ahead here."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor | None, cache_seqlens: torch.Tensor | None,
    head_dim_v: int, tile_scheduler_metadata: Any = None, num_splits: Any = None, softmax_scale: float | None = None,
    causal: bool = False, is_fp8_kvcache: bool = False, indices: Any = None, attn_sink: Any = None, extra_k_cache: Any = None,
    extra_indices_in_kvcache: Any = None, topk_length: Any = None, extra_topk_length: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out (batch, seqlen_q, heads, head_dim_v), lse (batch, heads, seqlen_q)), of all keys of each item.

    q: (batch, seqlen_q, heads, head_dim); k_cache: (pages, page_size, heads_kv, head_dim), whose first head_dim_v columns are
    the values; block_table: int32 (batch, columns); cache_seqlens: int32 (batch,). tile_scheduler_metadata, num_splits: hints.
    """
    sparse = dict(zip(SPARSE, (indices, attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length),
                      strict=True))  # fmt: skip
    refuse("flash_mla_with_kvcache", {
        **{f"{name} is given; keys are chosen by no list of tokens here": value is not None for name, value in sparse.items()},
        "is_fp8_kvcache is True; its rows hold scales and numbers of two kinds, give flashtile.attention_cached a cache of one":
            bool(is_fp8_kvcache),
    })  # fmt: skip
    for name, tensor in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
        if tensor is None:
            raise InvalidProblem(f"{name} is None; it must be an int32 tensor, which says where keys lie.")
    assert cache_seqlens is not None
    columns = plain(head_dim_v)
    check_pools(q, k_cache, k_cache, False)
    if isinstance(columns, bool) or not isinstance(columns, int) or not 1 <= columns <= k_cache.shape[-1]:
        raise InvalidProblem(f"head_dim_v is {told(head_dim_v)}; it must be an int from 1 to {k_cache.shape[-1]}, k_cache's.")
    with saying({"page_table": "block_table", "seqused_k": "cache_seqlens", "v_cache": "k_cache"}):
        out, lse = attention_cached(
            q, k_cache, k_cache[..., :columns], block_table, seqused_k=cache_seqlens, causal=causal, scale=softmax_scale,
            return_lse=True,
        )  # fmt: skip
    return out, blind_rows_positive(lse)
