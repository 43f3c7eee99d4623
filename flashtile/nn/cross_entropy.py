"""CrossEntropyLoss as a module."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch

from flashtile.errors import check_names
from flashtile.ops.loss import check_loss, cross_entropy

OPTIONS = tuple(signature(cross_entropy).parameters)[2:]  # besides logits and labels


class CrossEntropyLoss(torch.nn.Module):
    """`flashtile.ops.cross_entropy` with its options: reduction, label_smoothing and so on, and weight, a buffer as torch's.

    Raises TypeError for an option that it has not, InvalidProblem for a value without meaning.
    """

    def __init__(self, **options: Any):
        super().__init__()
        check_names("CrossEntropyLoss", options, OPTIONS)
        check_loss(**options)
        self.weight: torch.Tensor | None
        self.register_buffer("weight", options.pop("weight", None))
        self.options = options

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        """The loss of logits (..., classes) and labels (...): a float32 scalar, (...) with reduction "none"; with return_lse
        (loss, lse (...)).
        """
        return cross_entropy(logits, labels, weight=self.weight, **self.options)
