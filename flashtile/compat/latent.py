"""Absorbed latent attention whose keys come in two tensors: the latents, which are the values too, and the rotated columns."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.compat.asked import refuse
from flashtile.errors import InvalidProblem
from flashtile.torch.call.stored import check_kind


def joined(name: str, called: tuple[str, str], latents: torch.Tensor, turned: torch.Tensor) -> torch.Tensor:
    """The tensor of which both are views: its first columns, and those behind. NotSupported where they lie apart.

    name: the function that is called; called: the names of both tensors there.
    """
    columns, width = latents.shape[-1], latents.shape[-1] + turned.shape[-1]
    there = latents.storage_offset() + columns == turned.storage_offset() and latents.dtype is turned.dtype
    one = latents.untyped_storage().data_ptr() == turned.untyped_storage().data_ptr()
    axes = zip(latents.stride()[:-1], turned.stride()[:-1], latents.shape[:-1], strict=True)
    alike = latents.shape[:-1] == turned.shape[:-1] and all(a == b >= width for a, b, n in axes if n > 1)
    dense = (latents.stride(-1), turned.stride(-1)) == (1, 1)
    first, second = called
    refuse(name, {
        f"{first} and {second} lie apart; make them views of one tensor of {width} columns: pool[..., :{columns}] and "
        f"pool[..., {columns}:]": not (there and one and alike and dense),
    })  # fmt: skip
    strides = (max(s, width) for s in latents.stride()[:-1])  # of axes of one element any number may stand there
    return latents.as_strided((*latents.shape[:-1], width), (*strides, 1))


def latent_pools(
    q: torch.Tensor, qv: Any, k_cache: torch.Tensor, v_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Pools for queries [qv, q]: keys are rows of both caches, values their first columns. q as kernels take it."""
    check_kind("qv", qv)
    shape = (*q.shape[:-1], v_cache.shape[-1])
    if tuple(qv.shape) != shape:
        raise InvalidProblem(f"qv has shape {tuple(qv.shape)}; it must be {shape}, as q but for v_cache's columns.")
    if qv.dtype != q.dtype or qv.device != q.device:
        raise InvalidProblem(f"qv is {qv.dtype} on {qv.device} and q is {q.dtype} on {q.device}; they must be alike.")
    keys = joined("flash_attn_with_kvcache with qv", ("v_cache", "k_cache"), v_cache, k_cache)
    return keys, keys[..., : v_cache.shape[-1]]
