"""Attention by its definition, O(seqlen_q x seqlen_k), differentiable by autograd. Imports no kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flashtile.spec.dropout import Dropout
from flashtile.spec.dropout import keep as dropout_keep
from flashtile.spec.mask import Band, make_mask
from flashtile.spec.score import Position, Score

Pair = tuple[torch.Tensor, torch.Tensor]


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Band | None = None,
    score: Sequence[Score] = (),
    scale: float | None = None,
    sink: torch.Tensor | None = None,
    dropout: Dropout | None = None,
) -> Pair:
    """(out, lse) of `flashtile.attention` in float64: out like q's layout, lse (batch, heads_q, seqlen_q)."""
    return _attend(q.double(), k.double(), v.double(), make_mask(causal, window, mask), score, scale, sink, dropout)


def attention_plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Band | None = None,
    score: Sequence[Score] = (),
    scale: float | None = None,
    sink: torch.Tensor | None = None,
    dropout: Dropout | None = None,
) -> Pair:
    """(out, lse) as a few lines of PyTorch compute them in the inputs' own dtype: what the accuracy rule measures against."""
    return _attend(q, k, v, make_mask(causal, window, mask), score, scale, sink, dropout)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    band: Band,
    score: Sequence[Score],
    scale: float | None,
    sink: torch.Tensor | None,
    dropout: Dropout | None,
) -> Pair:
    (batch, seqlen_q, heads_q, head_dim), (seqlen_k, heads_kv) = q.shape, k.shape[1:3]
    group = heads_q // heads_kv
    keep = visible(band, seqlen_q, seqlen_k, q.device)
    sees, seen = keep.any(1), keep.any(0)
    # What nobody looks at may hold NaN, and 0 * NaN is NaN: replace it. The gradient there becomes exactly 0.
    q = q.masked_fill(~sees[:, None, None], 0.0).transpose(1, 2)
    k, v = (t.masked_fill(~seen[:, None, None], 0.0).transpose(1, 2).repeat_interleave(group, 1) for t in (k, v))

    scores = q @ k.transpose(2, 3) * (1.0 / math.sqrt(head_dim) if scale is None else scale)
    at = positions(batch, heads_q, seqlen_q, seqlen_k, q.device)
    for modifier in score:
        tensors = modifier.tensors(batch, heads_q)
        scores = type(modifier).apply(scores, at, modifier.scalars(), tensors).to(q.dtype)
    scores = scores.masked_fill(~keep, -math.inf)
    if sink is not None:  # one more key, whose value is zero
        last = sink.to(q.dtype)[None, :, None, None].expand(batch, heads_q, seqlen_q, 1)
        whole = torch.cat([scores, last], -1)
        p, lse = torch.softmax(whole, -1)[..., :seqlen_k], torch.logsumexp(whole, -1)
    else:  # a row that sees nothing would be exp(-inf - -inf): give it finite scores first, then discard them
        scores = scores.masked_fill(~sees[:, None], 0.0)
        lse = torch.logsumexp(scores, -1) if seqlen_k else scores.sum(-1)
        p, lse = torch.softmax(scores, -1).masked_fill(~keep, 0.0), lse.masked_fill(~sees, -math.inf)
    if dropout is not None:
        seed = dropout.seed if isinstance(dropout.seed, torch.Tensor) else torch.tensor([dropout.seed, 0])
        kept = dropout_keep(dropout.p, at.batch, at.head, at.row, at.k, heads_q, seed.to(q.device))
        p = p * kept / (1.0 - dropout.p)
    return (p @ v).transpose(1, 2), lse


def visible(band: Band, seqlen_q: int, seqlen_k: int, device: torch.device) -> torch.Tensor:
    """Boolean (seqlen_q, seqlen_k): which query sees which key."""
    distance = torch.arange(seqlen_k, device=device) - (torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q)
    keep = torch.ones_like(distance, dtype=torch.bool)
    if band.left is not None:
        keep &= distance >= -band.left
    if band.right is not None:
        keep &= distance <= band.right
    return keep


def positions(batch: int, heads_q: int, seqlen_q: int, seqlen_k: int, device: torch.device) -> Position:
    """The Position of all scores at once; every field broadcasts against (batch, heads_q, seqlen_q, seqlen_k)."""
    row = torch.arange(seqlen_q, device=device)[:, None]
    return Position(
        batch=torch.arange(batch, device=device)[:, None, None, None],
        head=torch.arange(heads_q, device=device)[:, None, None],
        row=row,
        q=row + seqlen_k - seqlen_q,
        k=torch.arange(seqlen_k, device=device)[None, :],
    )
