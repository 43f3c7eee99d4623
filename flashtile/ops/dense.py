"""linear_act and mlp: the public functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flashtile.torch.ops.call import AS_IT_IS
from flashtile.torch.ops.run import autocast, check_tensor, rows, run

ONE_LAYER = {"weight1": "weight", "bias1": "bias"}  # what `linear_act` calls them


def linear_act(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str = "gelu_tanh",
    return_pre: bool = False,
    backend: str | None = None,
) -> Any:
    """activation(x weight^T + bias).

    x (..., width), weight (hidden, width), bias (hidden,), of one dtype; activation: "gelu_tanh", "relu" or "sqrelu" (the
    square of relu). return_pre: also return what the activation was taken of, without a gradient.
    backend: "triton", "cpu", or None for the first that runs on the tensors' device; NotSupported says why one does not.

    GELU is a part of the product for fp16 and bf16 (sizes multiples of 8): of cuBLASLt's, or on Hopper of one of our own where
    it is large; any other product is cuBLAS's. A backward reads the gradient that arrives once: for that of x weight^T and for
    bias's, summed in float32. Raises InvalidProblem for a request without meaning.
    """
    out, pre = _run(x, {"weight1": weight, "bias1": bias}, dict(activation=activation), backend, return_pre, ONE_LAYER)
    return (out, pre) if return_pre else out


def mlp(
    x: torch.Tensor,
    weight1: torch.Tensor,
    bias1: torch.Tensor | None,
    weight2: torch.Tensor,
    bias2: torch.Tensor | None = None,
    *,
    activation: str = "gelu_tanh",
    recompute: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """activation(x weight1^T + bias1) weight2^T + bias2.

    x (..., width), weight1 (hidden, width), bias1 (hidden,) or None, weight2 (out, hidden), bias2 (out,) or None, of one dtype;
    activations as in `linear_act`.
    recompute: keep only what the activation is taken of, and make the activation again in the backward's one pass over it.
    backend: "triton", "cpu", or None for the first that runs on the tensors' device; NotSupported says why one does not.

    Returns (..., out). Raises InvalidProblem for a request without meaning.
    """
    given = {"weight1": weight1, "bias1": bias1, "weight2": weight2, "bias2": bias2}
    return _run(x, given, dict(activation=activation, recompute=recompute), backend, False)[0]


def _run(
    x: Any, given: dict[str, Any], options: dict[str, Any], backend: Any, keeps: bool, called: Mapping[str, str] = AS_IT_IS
) -> tuple[Any, Any]:
    check_tensor("x", x)
    for name, tensor in given.items():
        if tensor is not None or name.startswith("weight"):
            check_tensor(called.get(name, name), tensor)
    if keeps:
        options["returns_pre"] = True
    factors = zip(("x", *given), autocast(rows(x), *given.values()), strict=True)
    made = run("dense", dict(factors), options, backend, called)
    out, *pre = (t if x.dim() == 2 else t.view(*x.shape[:-1], t.shape[-1]) for t in made[: 1 + keeps])
    return out, pre[0] if pre else None
