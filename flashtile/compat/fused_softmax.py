"""apex's and flash-attention v1's fused softmaxes. Masked scores are -10000, and a row that is masked whole gives 0."""

from __future__ import annotations

from typing import Any

import torch

from flashtile import ops
from flashtile.torch.ops.run import prepare

MASKED_SCORE = -10000.0


def scaled_masked_softmax(inputs: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """softmax of inputs (batch, heads, rows, columns) under a mask (batch or 1, 1, rows, columns) that is 1 where hidden."""
    return ops.softmax(inputs, mask, scale=float(scale), masked_score=MASKED_SCORE)


def scaled_upper_triang_masked_softmax(inputs: torch.Tensor, _: Any, scale: float) -> torch.Tensor:
    """softmax of inputs (..., rows, rows) of which row i sees columns up to i."""
    return ops.softmax(inputs, scale=float(scale), causal=True)


def scaled_masked_softmax_forward(inputs: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """`scaled_masked_softmax` without a gradient."""
    with torch.no_grad():
        return scaled_masked_softmax(inputs, mask, scale)


def scaled_upper_triang_masked_softmax_forward(inputs: torch.Tensor, scale: float) -> torch.Tensor:
    """`scaled_upper_triang_masked_softmax` without a gradient."""
    with torch.no_grad():
        return scaled_upper_triang_masked_softmax(inputs, None, scale)


def scaled_masked_softmax_backward(output_grads: torch.Tensor, softmax_results: torch.Tensor, scale: float) -> torch.Tensor:
    """The gradient of inputs; output_grads are left as they are."""
    return _backward(output_grads, softmax_results, dict(scale=float(scale)))


def scaled_upper_triang_masked_softmax_backward(
    output_grads: torch.Tensor, softmax_results: torch.Tensor, scale: float
) -> torch.Tensor:
    """The gradient of inputs of which row i sees columns up to i; output_grads are left as they are."""
    return _backward(output_grads, softmax_results, dict(scale=float(scale), causal=True))


def _backward(grads: torch.Tensor, y: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    wide = [t[(None,) * (4 - t.dim())].detach() for t in (y, grads)]
    with torch.enable_grad():
        call = prepare("softmax", {"x": wide[0].detach().requires_grad_()}, options, None)
    return call.backward({"y": wide[0], "dy": wide[1]})["dx"].view(y.shape)


class FusedScaleMaskSoftmax(torch.nn.Module):
    """apex's module. attn_mask_type: "causal", which reads no mask, or "padding", or an enumeration whose names say so.

    The other arguments change nothing: there is one kernel for every dtype, which computes in float32, and mask_func is not
    called.
    """

    def __init__(
        self, input_in_fp16: bool, input_in_bf16: bool, attn_mask_type: Any, scaled_masked_softmax_fusion: bool, mask_func: Any,
        softmax_in_fp32: bool, scale: float | None,
    ):  # fmt: skip
        super().__init__()
        self.causal = "causal" in str(getattr(attn_mask_type, "name", attn_mask_type)).lower()
        self.scale = 1.0 if scale is None else scale

    def forward(self, input: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        if self.causal:
            return scaled_upper_triang_masked_softmax(input, None, self.scale)
        return scaled_masked_softmax(input, mask, self.scale)
