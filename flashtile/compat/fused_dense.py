"""flash-attention's fused dense layers: `flash_attn.ops.fused_dense` and the functions of `fused_dense_lib` (v0.2.1 and v1)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from flashtile import ops
from flashtile.errors import InvalidProblem, NotSupported
from flashtile.nn.dense import two_layers
from flashtile.torch.ops.call import Call
from flashtile.torch.ops.run import prepare

ACTIVATIONS = {"gelu_approx": "gelu_tanh", "relu": "relu", "sqrelu": "sqrelu"}  # by their names there


def linear_bias_forward(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """input weight^T + bias."""
    return F.linear(input, weight, bias)


def linear_bias_wgrad(input: torch.Tensor, d_output: torch.Tensor, has_d_bias: bool = True) -> list[Any]:
    """[d_weight, d_bias or None]."""
    return [d_output.t() @ input, d_output.sum(0) if has_d_bias else None]


def linear_bias_backward(input: torch.Tensor, weight: torch.Tensor, d_output: torch.Tensor) -> list[torch.Tensor]:
    """[d_input, d_weight, d_bias]."""
    return [d_output @ weight, *linear_bias_wgrad(input, d_output)]


def linear_bias_residual_backward(
    input: torch.Tensor, weight: torch.Tensor, d_output: torch.Tensor, d_input: torch.Tensor
) -> list[torch.Tensor]:
    """[d_input, d_weight, d_bias]: d_output weight is added to d_input, in place."""
    return [d_input.addmm_(d_output, weight), *linear_bias_wgrad(input, d_output)]


def linear_gelu_forward(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, save_gelu_in: bool = True, heuristic: int = 0
) -> list[torch.Tensor]:
    """[output], with gelu_in if it is to be saved. heuristic chooses among cuBLASLt's kernels there, nothing here."""
    with torch.no_grad():
        made = ops.linear_act(input, weight, bias, return_pre=save_gelu_in)
    return list(made) if save_gelu_in else [made]


def linear_act_forward(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_gelu: bool, save_pre_act: bool = True,
    heuristic: int = 0,
) -> list[torch.Tensor]:  # fmt: skip
    """[output], with pre_act if it is to be saved: numbers, for ReLU too, whose bit mask version 1 keeps."""
    with torch.no_grad():
        made = ops.linear_act(input, weight, bias, activation="gelu_tanh" if is_gelu else "relu", return_pre=save_pre_act)
    return list(made) if save_pre_act else [made]


def _differentiated(tensors: dict[str, torch.Tensor], fixed: tuple[str, ...] = (), **options: Any) -> Call:
    """The op of which these are inputs, bound for gradients of those that are not fixed."""
    with torch.enable_grad():
        return prepare("dense", {n: t.detach().requires_grad_(n not in fixed) for n, t in tensors.items()}, options, None)


def linear_gelu_linear_backward(
    input: torch.Tensor, gelu_in: torch.Tensor, output1: torch.Tensor, weight1: torch.Tensor, weight2: torch.Tensor,
    d_output2: torch.Tensor, heuristic: int = 0,
) -> list[torch.Tensor]:  # fmt: skip
    """[d_input, d_weight1, d_bias1, d_weight2, d_bias2]."""
    bias1, bias2 = weight1.new_empty(len(weight1)), weight2.new_empty(len(weight2))
    call = _differentiated({"x": input, "weight1": weight1, "bias1": bias1, "weight2": weight2, "bias2": bias2})
    kept = {"weight2": weight2, "pre": gelu_in, "act": output1, "weight1": weight1, "x": input}
    made = call.backward({**kept, "dout": d_output2})
    return [made[f"d{name}"] for name in ("x", "weight1", "bias1", "weight2", "bias2")]


def linear_residual_gelu_linear_backward(
    input: torch.Tensor, gelu_in: torch.Tensor, output1: torch.Tensor, weight1: torch.Tensor, weight2: torch.Tensor,
    d_output2: torch.Tensor, d_input: torch.Tensor, heuristic: int = 0,
) -> list[torch.Tensor]:  # fmt: skip
    """The same; the gradient of input is added to d_input, in place."""
    made = linear_gelu_linear_backward(input, gelu_in, output1, weight1, weight2, d_output2, heuristic)
    return [d_input.add_(made[0]), *made[1:]]


def fused_dense_func(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, return_residual: bool = False,
    process_group: Any = None, sequence_parallel: bool = True,
) -> Any:  # fmt: skip
    """x weight^T + bias, or (that, x) with return_residual."""
    _refuse_group(process_group)
    out = F.linear(x, weight, bias)
    return (out, x) if return_residual else out


def fused_mlp_func(
    x: torch.Tensor, weight1: torch.Tensor, weight2: torch.Tensor, bias1: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None, activation: str = "gelu_approx", save_pre_act: bool = True,
    return_residual: bool = False, checkpoint_lvl: int = 0, heuristic: int = 0, process_group: Any = None,
    sequence_parallel: bool = True,
) -> Any:  # fmt: skip
    """The two layers, with activation gelu_approx, relu or sqrelu; checkpoint_lvl 1 and 2 make it again in the backward.

    save_pre_act, heuristic and sequence_parallel change nothing here.
    """
    _refuse_group(process_group)
    _check(activation, checkpoint_lvl)
    out = ops.mlp(x, weight1, bias1, weight2, bias2, activation=ACTIVATIONS[activation], recompute=checkpoint_lvl > 0)
    return (out, x) if return_residual else out


def _check(activation: Any, checkpoint_lvl: Any) -> None:
    if activation not in tuple(ACTIVATIONS):
        raise InvalidProblem(f"activation is {activation!r}; it must be one of {', '.join(ACTIVATIONS)}.")
    if checkpoint_lvl not in (0, 1, 2):
        raise InvalidProblem(f"checkpoint_lvl is {checkpoint_lvl!r}; it must be 0, 1 or 2.")


def _refuse_group(process_group: Any) -> None:
    if process_group is not None:
        raise NotSupported("dense layers over a process group", {"torch": ["tensor parallelism is not implemented"]})


class FusedDense(torch.nn.Linear):
    """`flash_attn.ops.fused_dense.FusedDense`."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, return_residual: bool = False, device: Any = None,
        dtype: Any = None,
    ):  # fmt: skip
        super().__init__(in_features, out_features, bias, device, dtype)
        self.return_residual = return_residual

    def forward(self, input: torch.Tensor) -> Any:
        return fused_dense_func(input, self.weight, self.bias, self.return_residual)


class FusedMLP(torch.nn.Module):
    """`flash_attn.ops.fused_dense.FusedMLP`, without a process group. heuristic changes nothing here."""

    def __init__(
        self, in_features: int, hidden_features: int | None = None, out_features: int | None = None, bias1: bool = True,
        bias2: bool = True, activation: str = "gelu_approx", return_residual: bool = False, checkpoint_lvl: int = 0,
        heuristic: Any = "auto", device: Any = None, dtype: Any = None,
    ):  # fmt: skip
        super().__init__()
        _check(activation, checkpoint_lvl)
        hidden = 4 * in_features if hidden_features is None else hidden_features
        self.fc1 = torch.nn.Linear(in_features, hidden, bias1, device, dtype)
        self.fc2 = torch.nn.Linear(hidden, in_features if out_features is None else out_features, bias2, device, dtype)
        self.activation, self.checkpoint_lvl, self.return_residual = activation, checkpoint_lvl, return_residual

    def forward(self, x: torch.Tensor) -> Any:
        out = two_layers(x, self.fc1, self.fc2, ACTIVATIONS[self.activation], self.checkpoint_lvl > 0)
        return (out, x) if self.return_residual else out
