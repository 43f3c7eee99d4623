"""Cross-entropy in whatever dtype its logits have (float64: the truth), differentiated by autograd."""

from __future__ import annotations

import torch


def cross_entropy_reference(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    reduction: str = "none",
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, lse): of rows, or summed, or their mean over the rows that count."""
    labels = labels.long()
    counts = labels != ignore_index
    x = logits * logit_scale
    lse = x.logsumexp(1)
    at_label = x.gather(1, labels.where(counts, 0)[:, None])[:, 0]
    loss = lse - (1.0 - smoothing) * at_label + z_loss * lse.square()
    if smoothing:
        loss = loss - smoothing * x.mean(1)
    loss = loss.where(counts, 0.0)
    if reduction == "none":
        return loss, lse
    return (loss.sum() / counts.sum() if reduction == "mean" else loss.sum()), lse
