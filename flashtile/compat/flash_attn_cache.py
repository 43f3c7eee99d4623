"""flash-attention 2's `flash_attn_with_kvcache`: lengths before the append, lse +inf where a query sees no key."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.compat.asked import Asked, blind_rows_positive
from flashtile.errors import InvalidProblem
from flashtile.ops.position import rotary
from flashtile.torch.cache.append import append_to_cache
from flashtile.torch.cache.attention import attention_cached


def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: Any = None, v: Any = None, rotary_cos: Any = None,
    rotary_sin: Any = None, cache_seqlens: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None,
    block_table: Any = None, softmax_scale: float | None = None, causal: bool = False, window_size: Any = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Any = None, num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """out, or (out, lse). k, v are written into the cache behind cache_seqlens rows, in place; the caller advances those.

    Pages of any size. num_splits: 1 for one pass; other numbers leave the split to `attention_cached`, whose bits they do not
    change. With rotary, queries stand at cache_seqlens + i under causal or a window, else all of them at cache_seqlens.
    """
    batch, table = q.shape[0], block_table
    if (k is None) != (v is None):
        raise InvalidProblem("one of k and v is None; both or neither must be given.")
    if k is not None and cache_seqlens is None:
        raise InvalidProblem("k is given and cache_seqlens is None; it must say behind how many rows k is written.")
    if rotary_cos is not None and k is None:
        raise InvalidProblem("rotary_cos is given without k; it must be rotated beside k, or by flashtile.ops.rotary.")
    if table is not None and (cache_batch_idx is not None or cache_leftpad is not None):
        raise InvalidProblem("cache_batch_idx or cache_leftpad is given beside block_table; it must be None there.")
    if table is None and (cache_batch_idx is not None or k_cache.shape[0] != batch):
        rows = torch.arange(batch, device=q.device) if cache_batch_idx is None else cache_batch_idx
        table = rows.to(torch.int32)[:, None]
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    if not isinstance(cache_seqlens, torch.Tensor):
        cache_seqlens = torch.full(
            (batch,), capacity if cache_seqlens is None else int(cache_seqlens), dtype=torch.int32, device=q.device
        )
    asked = Asked(softmax_scale, causal, window_size, softcap, alibi_slopes)
    how = asked.arguments()
    del how["dropout"]
    if k is not None:
        turn = None if rotary_cos is None else (rotary_cos, rotary_sin, rotary_interleaved)
        append_to_cache(k, v, k_cache, v_cache, table, seqused_k=cache_seqlens, rotary=turn)
        if rotary_cos is not None:
            step = torch.arange(q.shape[1], device=q.device) * int(causal or how["window"] is not None)
            positions = cache_seqlens[:, None] + step
            q = rotary(q, None, rotary_cos, rotary_sin, interleaved=rotary_interleaved, positions=positions)
        cache_seqlens = cache_seqlens + k.shape[1]
    split = 0 if num_splits == 1 else None
    out, lse = attention_cached(
        q, k_cache, v_cache, table, seqused_k=cache_seqlens, first_k=cache_leftpad, split=split, return_lse=True, **how
    )
    return (out, blind_rows_positive(lse)) if return_softmax_lse else out
