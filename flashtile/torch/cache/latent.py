"""Absorbed latent attention whose keys come in two tensors: the latents, which are the values too, and the columns behind."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.errors import InvalidProblem
from flashtile.torch.cache.tensors import check_pools
from flashtile.torch.call.stored import check_kind


def is_apart(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether queries have the columns of both pools: values are the first columns of keys, and k_cache has those behind."""
    return q.shape[-1] == k_cache.shape[-1] + v_cache.shape[-1]


def check_latents(q: torch.Tensor, qv: Any, k_cache: torch.Tensor, v_cache: torch.Tensor, packed: bool) -> None:
    """Raise InvalidProblem for a qv that is none. What kernels read is [qv, q]."""
    check_pools(q, k_cache, v_cache, packed)
    check_kind("qv", qv)
    shape = (*q.shape[:-1], v_cache.shape[-1])
    if tuple(qv.shape) != shape:
        raise InvalidProblem(f"qv has shape {tuple(qv.shape)}; it must be {shape}, as q but for v_cache's columns.")
    if qv.dtype != q.dtype or qv.device != q.device:
        raise InvalidProblem(f"qv is {qv.dtype} on {qv.device} and q is {q.dtype} on {q.device}; they must be alike.")
    if q.shape[-1] != k_cache.shape[-1]:
        raise InvalidProblem(f"q has head_dim {q.shape[-1]} and k_cache {k_cache.shape[-1]}; they must be equal.")
