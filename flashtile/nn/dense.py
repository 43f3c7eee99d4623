"""MLP as a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from flashtile.errors import check_sizes
from flashtile.ops.dense import mlp
from flashtile.problem.op import Described
from flashtile.torch.ops.call import AS_IT_IS, check_options

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu, "sqrelu": lambda x: F.relu(x).square(),
}  # fmt: skip


def two_layers(x: torch.Tensor, fc1: torch.nn.Linear, fc2: torch.nn.Linear, activation: str, recompute: bool) -> torch.Tensor:
    """`flashtile.ops.mlp` by two layers; one after the other, as modules, where one is more than its weights say."""
    if _does_more(fc1) or _does_more(fc2):
        return fc2(ACTIVATIONS[activation](fc1(x)))
    return mlp(x, fc1.weight, fc1.bias, fc2.weight, fc2.bias, activation=activation, recompute=recompute)


def _does_more(layer: torch.nn.Module) -> bool:
    """Whether a layer is more than torch.nn.Linear with its weight and bias: an adapter, or one with hooks."""
    replaced = type(layer).forward is not torch.nn.Linear.forward or "forward" in layer.__dict__
    hooks = layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks
    return replaced or any(hooks)


class MLP(torch.nn.Module):
    """`flashtile.ops.mlp` with its parameters: fc1 (width to hidden, 4 * width by default) and fc2 (to out, or width).

    activation, recompute: as there. Where a layer has hooks, or a forward of its own (an adapter, as peft's LoRA), both run
    one after the other, as modules, and recompute says nothing. Raises InvalidProblem for an argument without meaning.
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
        return two_layers(x, self.fc1, self.fc2, self.activation, self.recompute)
