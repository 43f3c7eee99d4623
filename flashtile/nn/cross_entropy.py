"""CrossEntropyLoss as a module."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.ops.loss import cross_entropy


class CrossEntropyLoss(torch.nn.Module):
    """`flashtile.ops.cross_entropy` with its options."""

    def __init__(self, **options: Any):
        super().__init__()
        self.options = options

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        return cross_entropy(logits, labels, **self.options)
