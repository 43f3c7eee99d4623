"""What the tensors of a cache must be, whoever reads or writes it."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.errors import InvalidProblem
from flashtile.problem.cache import Pages
from flashtile.torch.execute.bound import DTYPES

CALLED = {"k": "k_cache", "v": "v_cache"}  # what errors of the dense problem call them


def check_pools(q: Any, k_cache: Any, v_cache: Any, packed: bool, name: str = "q") -> None:
    """Raise InvalidProblem unless these are dense tensors of the right ranks, of one dtype and device."""
    for called, tensor in ((name, q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if not isinstance(tensor, torch.Tensor):
            raise InvalidProblem(f"{called} is a {type(tensor).__name__}; it must be a torch.Tensor.")
        rank, meant = 4, "(pages, page_size, heads_kv, head_dim)"
        if called == name:
            rank, meant = (3, "(total, heads, head_dim)") if packed else (4, "(batch, seqlen, heads, head_dim)")
        if tensor.dim() != rank:
            raise InvalidProblem(f"{called} has shape {tuple(tensor.shape)}; it must be {meant}.")
        if tensor.dtype not in DTYPES:
            raise InvalidProblem(f"{called} is {tensor.dtype}; it must be float16, bfloat16 or float32.")
        if tensor.dtype != q.dtype:
            raise InvalidProblem(f"{called} is {tensor.dtype} and {name} is {q.dtype}; they must have one dtype.")
        if tensor.device != q.device:
            raise InvalidProblem(f"{called} is on {tensor.device} and {name} is on {q.device}; they must be on one device.")
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise InvalidProblem(
            f"v_cache has shape {tuple(v_cache.shape)} and k_cache {tuple(k_cache.shape)}; they must be equal but for head_dim."
        )
    if 0 in k_cache.shape:
        raise InvalidProblem(f"k_cache has shape {tuple(k_cache.shape)}; it must have pages, rows, heads and columns.")


def check_table(k_cache: torch.Tensor, page_table: Any, batch: int, first: bool) -> Pages:
    """The Pages of a cache; InvalidProblem for a table that is none."""
    count, size = k_cache.shape[:2]
    if page_table is None:
        if count != batch:
            raise InvalidProblem(
                f"k_cache has {count} items and the batch {batch}; they must be equal, or page_table say which page is whose."
            )
        return Pages(count, size, 1, False, first)
    if not isinstance(page_table, torch.Tensor):
        raise InvalidProblem(f"page_table is a {type(page_table).__name__}; it must be a torch.Tensor or None.")
    if page_table.dtype is not torch.int32:
        raise InvalidProblem(f"page_table is {page_table.dtype}; it must be int32: page_table.int().")
    if page_table.dim() != 2 or page_table.shape[0] != batch:
        raise InvalidProblem(f"page_table has shape {tuple(page_table.shape)}; it must be (batch, columns), of batch {batch}.")
    if page_table.device != k_cache.device:
        raise InvalidProblem(
            f"page_table is on {page_table.device} and k_cache is on {k_cache.device}; they must be on one device."
        )
    return Pages(count, size, page_table.shape[1], True, first)


def int32(name: str, tensor: Any, q: torch.Tensor) -> torch.Tensor:
    """A tensor of lengths as kernels read it; InvalidProblem for what is none."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidProblem(f"{name} is a {type(tensor).__name__}; it must be an int32 tensor.")
    if tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64):
        raise InvalidProblem(f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; it must be int32 of one axis.")
    if tensor.device != q.device:
        raise InvalidProblem(f"{name} is on {tensor.device} and q is on {q.device}; they must be on one device.")
    return tensor.to(torch.int32).contiguous()
