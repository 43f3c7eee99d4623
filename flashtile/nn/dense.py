"""MLP as a module."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.errors import InvalidProblem, check_sizes
from flashtile.ops.dense import mlp
from flashtile.problem.op import Described
from flashtile.torch.ops.call import AS_IT_IS, check_options


def check_layers(**layers: torch.nn.Module) -> None:
    """Raise InvalidProblem for a layer that does more than torch.nn.Linear with its weight and bias, which alone are read."""
    for name, layer in layers.items():
        replaced = type(layer).forward is not torch.nn.Linear.forward or "forward" in layer.__dict__
        if replaced or layer._forward_pre_hooks or layer._forward_hooks:
            kind, more = type(layer), "a forward of its own" if replaced else "forward hooks"
            raise InvalidProblem(
                f"{name} is a {kind.__module__}.{kind.__qualname__} with {more}, which would be left out: both layers run as "
                f"one op of their weights. It must be a torch.nn.Linear without hooks: merge adapters, or call both yourself."
            )


class MLP(torch.nn.Module):
    """`flashtile.ops.mlp` with its parameters: fc1 (width to hidden, 4 * width by default) and fc2 (to out, or width).

    activation, recompute: as there. Raises InvalidProblem for an argument without meaning, and when called for a layer that has
    an adapter or hooks.
    """

    def __init__(
        self, width: int, hidden: int | None = None, out: int | None = None, *, bias: bool = True,
        activation: str = "gelu_tanh", recompute: bool = False, device: Any = None, dtype: Any = None,
    ):  # fmt: skip
        super().__init__()
        check_sizes(width=width)
        hidden = 4 * width if hidden is None else hidden
        out = width if out is None else out
        check_sizes(hidden=hidden, out=out)
        shapes = {"x": (1, width), "weight1": (hidden, width), "weight2": (out, hidden)}
        given = {name: Described(shape, "fp32") for name, shape in shapes.items()}
        check_options("dense", given, {"activation": activation, "recompute": recompute}, AS_IT_IS)
        self.fc1 = torch.nn.Linear(width, hidden, bias, device, dtype)
        self.fc2 = torch.nn.Linear(hidden, out, bias, device, dtype)
        self.activation, self.recompute = activation, recompute

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, recompute={self.recompute}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., out), of x (..., width), fp16, bf16 or fp32 as the parameters."""
        check_layers(fc1=self.fc1, fc2=self.fc2)
        weights = (self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)
        return mlp(x, *weights, activation=self.activation, recompute=self.recompute)
