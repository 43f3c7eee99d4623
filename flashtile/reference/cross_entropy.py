"""Cross-entropy in whatever dtype its logits have (float64: the truth), differentiated by autograd."""

from __future__ import annotations

import torch


def cross_entropy_reference(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    reduction: str = "none",
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, lse): of rows, or summed, or their mean over the rows that count.

    weight: (classes,): of each class's part of the loss; a mean divides by those of the labels, and what z_loss adds, which
    knows no classes, by the rows that count.
    """
    labels = labels.long()
    counts = labels != ignore_index
    x = logits * logit_scale
    if softcap is not None:
        x = softcap * (x / softcap).tanh()
    lse = x.logsumexp(1)
    index = labels.where(counts, 0)
    at_label = x.gather(1, index[:, None])[:, 0]
    if weight is None:
        loss = lse - (1.0 - smoothing) * at_label
        if smoothing:
            loss = loss - smoothing * x.mean(1)
        count = counts.sum()
    else:
        weight = weight.to(x.dtype)
        loss = (1.0 - smoothing) * weight[index] * (lse - at_label)
        if smoothing:
            loss = loss + smoothing * (weight * (lse[:, None] - x)).mean(1)
        count = weight[index].where(counts, 0.0).sum()
    square = (z_loss * lse.square()).where(counts, 0.0)
    loss = loss.where(counts, 0.0)
    if reduction == "none":
        return loss + square, lse
    if reduction == "sum":
        return loss.sum() + square.sum(), lse
    return loss.sum() / count + square.sum() / counts.sum(), lse
