"""Gradients over a cache: its keys are gathered, and what follows is `attention`, with its gradients.

Those of q, of the new keys and values, of sinks and of what modifiers capture. The cache itself has none.
"""

from __future__ import annotations

from typing import Any

import torch

from flashtile.problem.attention import AttentionProblem
from flashtile.problem.cache import Pages
from flashtile.problem.options import Options
from flashtile.torch.api.attention import attention
from flashtile.torch.api.layouts import attention_varlen
from flashtile.torch.cache.append import New
from flashtile.torch.cache.latent import is_apart
from flashtile.torch.cache.tensors import gather
from flashtile.torch.call.stored import STORED, Scales
from flashtile.torch.execute.prepared import PreparedCall


def check_gradients(problem: AttentionProblem, options: Options, device: torch.device) -> None:
    """Raise NotSupported where `attention` of gathered keys would, which has this problem."""
    PreparedCall(problem, options, device).require_backward()


def attend_gathered(
    q: torch.Tensor, pools: tuple[torch.Tensor, torch.Tensor], scales: Scales, pages: Pages, page_table: torch.Tensor | None,
    used: torch.Tensor, first: torch.Tensor | None, cu_q: torch.Tensor | None, new: New | None, arguments: dict[str, Any],
) -> Any:  # fmt: skip
    """What `attention_cached` returns, differentiable; pools have the new rows already, without their gradients."""
    keys = gather(pools, pages, page_table, used, first, scales, q.dtype)
    if new is not None:
        place = _rows(new, pages, first)
        keys = tuple(
            _replaced(old, made, place, pools[0].dtype in STORED) for old, made in zip(keys, (new.k, new.v), strict=True)
        )
    if is_apart(q, *pools):
        keys = (torch.cat([keys[1], keys[0]], -1), keys[1])
    count = used if first is None else (used - first).clamp(min=0)
    if cu_q is None:
        return attention(q, *keys, seqused_k=count, **arguments)
    starts = torch.arange(used.shape[0] + 1, dtype=torch.int32, device=q.device) * pages.capacity
    keys = tuple(t.flatten(0, 1) for t in keys)
    return attention_varlen(
        q, *keys, cu_seqlens_q=cu_q, cu_seqlens_k=starts, seqused_k=count, max_seqlen_k=pages.capacity, **arguments
    )


def _rows(new: New, pages: Pages, first: torch.Tensor | None) -> torch.Tensor:
    """Among all gathered rows, that of each new token; of one that belongs to no item, or has no row, one behind the last."""
    begins = new.before if first is None else new.before - first
    batch = new.before.shape[0]
    if new.cu is None:
        item = torch.arange(batch, device=new.k.device)[:, None]
        row = begins[:, None] + torch.arange(new.k.shape[1], device=new.k.device)
        exists = row >= 0
    else:
        index = torch.arange(new.k.shape[0], device=new.k.device)
        item = torch.searchsorted(new.cu[1:].contiguous(), index.int(), right=True).clamp(max=max(batch - 1, 0))
        row = begins[item] + index - new.cu[item]
        exists = (index >= new.cu[0]) & (index < new.cu[-1]) & (row >= 0)
    place = item * pages.capacity + row
    return place.where(exists & (row < pages.capacity), batch * pages.capacity).flatten()


def _replaced(old: torch.Tensor, made: torch.Tensor, place: torch.Tensor, stored: bool) -> torch.Tensor:
    """The gathered rows, with those at `place` in the stead of what was read; where they are stored in 8 bits what was read,
    with the gradient straight through.
    """
    flat = torch.cat([old.flatten(0, 1), old.new_zeros((1, *old.shape[2:]))])
    rows = made.reshape(-1, *made.shape[-2:])
    if stored:
        rows = flat[place] + (rows - rows.detach())
    return flat.index_copy(0, place, rows)[:-1].view(old.shape)
