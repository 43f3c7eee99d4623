"""Caches of 8 bits, and their scales: what a number of the cache is to be multiplied by."""

from __future__ import annotations

import torch

from flashtile.problem.cache import Scaling, Stored

STORED = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}
Maybe = torch.Tensor | None
Scales = tuple[Maybe, Maybe]  # of keys, of values


def stored_of(pool: torch.Tensor, scales: Scales) -> Stored | None:
    """What a pool holds, with scales as `check_scale` returns them; None where that is numbers of the queries' dtype."""
    if pool.dtype not in STORED:
        return None
    return Stored(STORED[pool.dtype], scaling_of(scales[0]), scaling_of(scales[1]))


def scaling_of(scale: Maybe) -> Scaling:
    """How a scale says it."""
    return "" if scale is None else "token" if scale.dim() == 3 else "head"


def bytes_of(pool: torch.Tensor) -> torch.Tensor:
    """The pool as kernels read it."""
    return pool.view(torch.uint8) if pool.dtype in STORED and pool.dtype is not torch.int8 else pool


def is_shared(k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether values are the first columns of the keys, in the same memory."""
    same = k_cache.data_ptr() == v_cache.data_ptr() and k_cache.stride() == v_cache.stride()
    if k_cache.device.type == "meta":  # where nothing has an address
        one = k_cache.untyped_storage() is v_cache.untyped_storage()
        same = same and one and k_cache.storage_offset() == v_cache.storage_offset()
    return same and v_cache.shape[3] <= k_cache.shape[3] and v_cache.shape[:3] == k_cache.shape[:3]


def number_of(stored: torch.Tensor, scale: Maybe, dtype: torch.dtype) -> torch.Tensor:
    """Rows of 8 bits, (..., heads_kv, head_dim), times their scales, (..., heads_kv), in dtype: rounded once."""
    wide = stored.to(torch.float64 if dtype is torch.float64 else torch.float32)
    return (wide if scale is None else wide * scale[..., None]).to(dtype)
