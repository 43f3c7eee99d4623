"""Whose a row of q, k or v is, and whether it counts, by the tensors that hold items' lengths."""

from __future__ import annotations

import torch

from flashtile.torch.call.lengths import Given

Rows = tuple[torch.Tensor, torch.Tensor | None]


def rows_of_items(tensor: torch.Tensor, given: Given | None, side: str) -> Rows:
    """(item, counts) of each row of a tensor (slabs, span, heads, head_dim): int64, and bool or None where all count."""
    slabs, span, device = *tensor.shape[:2], tensor.device
    at = torch.arange(span, device=device)[None]
    cu, used = (None if given is None else given.tensors.get(f"{name}_{side}") for name in ("cu_seqlens", "seqused"))
    if cu is None:
        item = torch.arange(slabs, device=device)[:, None].expand(slabs, span)
        return item, None if used is None else at < used[:, None]
    items = cu.shape[0] - 1
    if items == 0:
        return torch.zeros_like(at), torch.zeros_like(at, dtype=torch.bool)
    item = torch.searchsorted(cu[1:].contiguous(), at.int(), right=True).clamp(max=items - 1)
    counts = (at >= cu[0]) & (at < cu[-1])
    return item, counts if used is None else counts & (at - cu[item] < used[item])


def spread(scale: torch.Tensor, tensor: torch.Tensor, given: Given | None, side: str) -> torch.Tensor:
    """A scale (items, heads), or of rows as it is, as one of the rows of a tensor, (slabs, span, heads)."""
    return scale if scale.dim() == 3 else scale[rows_of_items(tensor, given, side)[0]] if scale.shape[0] else scale[:, None]
