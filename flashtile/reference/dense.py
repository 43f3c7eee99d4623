"""Linear layers with an activation between, in whatever dtype their inputs have, differentiated by autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def dense_reference(tensors: dict[str, torch.Tensor], *, activation: str = "gelu_tanh") -> torch.Tensor:
    """act(x weight1^T + bias1), or that times weight2^T + bias2."""
    pre = F.linear(tensors["x"], tensors["weight1"], tensors.get("bias1"))
    act = {"gelu_tanh": lambda: F.gelu(pre, approximate="tanh"), "relu": pre.relu, "sqrelu": lambda: pre.relu().square()}[
        activation
    ]()
    return F.linear(act, tensors["weight2"], tensors.get("bias2")) if "weight2" in tensors else act
