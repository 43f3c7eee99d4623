"""MLP as a module."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.ops.dense import mlp


class MLP(torch.nn.Module):
    """`flashtile.ops.mlp` with its parameters: fc1 (width to hidden, 4 * width by default) and fc2 (to out, or width)."""

    def __init__(
        self, width: int, hidden: int | None = None, out: int | None = None, *, bias: bool = True,
        activation: str = "gelu_tanh", recompute: bool = False, device: Any = None, dtype: Any = None,
    ):  # fmt: skip
        super().__init__()
        hidden = 4 * width if hidden is None else hidden
        self.fc1 = torch.nn.Linear(width, hidden, bias, device, dtype)
        self.fc2 = torch.nn.Linear(hidden, width if out is None else out, bias, device, dtype)
        self.activation, self.recompute = activation, recompute

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, recompute={self.recompute}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = (self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)
        return mlp(x, *weights, activation=self.activation, recompute=self.recompute)
