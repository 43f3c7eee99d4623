"""Masked softmax in whatever dtype its scores have (float64: the truth), differentiated by autograd."""

from __future__ import annotations

import torch


def softmax_reference(
    x: torch.Tensor, mask: torch.Tensor | None = None, *, scale: float = 1.0, causal: bool = False,
    masked_score: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """softmax(where(mask, masked_score, scale * x)) along the last axis; 0 in rows that see nothing."""
    fill = -torch.inf if masked_score is None else masked_score
    x = x * scale
    hidden = torch.zeros(x.shape, dtype=torch.bool, device=x.device) if mask is None else mask != 0
    x = x.masked_fill(hidden, fill)
    if causal:
        above = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(x.shape[-1] - x.shape[-2] + 1)
        x, hidden = x.masked_fill(above, -torch.inf), hidden | above
    blind = hidden.all(-1, keepdim=True)
    return x.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
