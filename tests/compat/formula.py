"""Attention as other libraries' documents define it, in quadratic float64 PyTorch that knows nothing of flashtile."""

from __future__ import annotations

import math
from typing import Any

import torch


def visible(seqlen_q: int, seqlen_k: int, left: int = -1, right: int = -1, top_left: bool = False) -> torch.Tensor:
    """Boolean (seqlen_q, seqlen_k), on the CPU; negative distances are unbounded."""
    row = torch.arange(seqlen_q)[:, None] + (0 if top_left else seqlen_k - seqlen_q)
    key = torch.arange(seqlen_k)
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if left >= 0:
        seen &= key >= row - left
    if right >= 0:
        seen &= key <= row + right
    return seen


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None = None, *, scale: float | None = None,
    softcap: float = 0.0, slopes: torch.Tensor | None = None, bias: torch.Tensor | None = None, dropped: Any = None,
    p: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out, lse, probabilities before dropout) of (batch, seqlen, heads, head_dim); lse is +inf where nothing is visible."""
    q, k, v = (t.double() for t in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seqlen_q, seqlen_k = scores.shape[2:]
    if slopes is not None:
        distance = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q - torch.arange(seqlen_k)
        rows = slopes if slopes.dim() == 2 else slopes[None]
        scores = scores - rows[:, :, None, None].double() * distance.abs().to(q.device)
    if bias is not None:
        scores = scores + bias.double()
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool) if seen is None else seen
    seen = seen.to(q.device).expand(scores.shape)
    some = seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen, -math.inf).masked_fill(~some, 0.0)
    lse = scores.logsumexp(-1).masked_fill(~some[..., 0], math.inf)
    made = scores.softmax(-1).masked_fill(~seen, 0.0)
    kept = made if dropped is None else made.masked_fill(dropped, 0.0) / (1 - p)
    return torch.einsum("bhqk,bkhd->bqhd", kept, v), lse, made
