"""Attention over a cache by its definition: every item's keys gathered, one after another. Imports no kernels."""

from __future__ import annotations

import math
from typing import Any

import torch

from flashtile.problem.predicate import normal_form
from flashtile.reference.attention import Changes, Pair, attend_item


def gather(
    pool: torch.Tensor, page_table: torch.Tensor | None, item: int, first: int, end: int,
) -> torch.Tensor:  # fmt: skip
    """(1, end - first, heads, head_dim): rows of one item, one by one."""
    size = pool.shape[1]
    rows = [
        pool[item, t] if page_table is None else pool[int(page_table[item, t // size]), t % size] for t in range(first, end)
    ]
    return torch.stack(rows)[None] if rows else pool.new_zeros((1, 0, *pool.shape[2:]))


def multiplied(
    rows: torch.Tensor, scale: torch.Tensor | None, page_table: torch.Tensor | None, where: tuple[int, int, int],
) -> torch.Tensor:  # fmt: skip
    """Rows of one item times their scales, as `attention_cached` has these."""
    if scale is None:
        return rows
    scale = scale.to(torch.promote_types(rows.dtype, torch.float32))
    if scale.dim() == 3:
        scale = gather(scale, page_table, *where)
    elif scale.dim() == 2:
        scale = scale[where[0]]
    return (rows.to(scale.dtype) * scale[..., None]).to(rows.dtype)


def cached_plain(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor | None = None, *,
    seqused_k: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None, first_k: torch.Tensor | None = None,
    causal: bool = False, window: Any = None, mask: Any = None, **changes: Any,
) -> Pair:  # fmt: skip
    """(out, lse) in the inputs' own dtype, laid out as `flashtile.attention_cached` does."""
    packed = cu_seqlens_q is not None
    wide = q[None] if packed else q
    out = wide.new_zeros((*wide.shape[:3], v_cache.shape[3]))
    lse = wide.new_full((wide.shape[0], wide.shape[2], wide.shape[1]), -math.inf)
    softmax: Changes = (changes.get("score", ()), changes.get("scale"), changes.get("sink"), None)
    for i, end in enumerate(seqused_k.tolist()):
        slab, rows = slice(i, i + 1), slice(0, wide.shape[1])
        if cu_seqlens_q is not None:
            slab, rows = slice(0, 1), slice(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1]))
        first = 0 if first_k is None else min(int(first_k[i]), end)
        k, v = (
            multiplied(gather(pool.to(q.dtype), page_table, i, first, end), changes.get(name), page_table, (i, first, end))
            for pool, name in ((k_cache, "k_scale"), (v_cache, "v_scale"))
        )
        form = normal_form(causal, window, mask)
        out[slab, rows], lse[slab, :, rows] = attend_item(wide[slab, rows], k, v, form, softmax, (i, len(seqused_k)))
    return (out[0], lse[0]) if packed else (out, lse)


def cached_reference(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *rest: Any, **arguments: Any) -> Pair:
    """(out, lse) in float64."""
    return cached_plain(q.double(), k_cache.double(), v_cache.double(), *rest, **arguments)
