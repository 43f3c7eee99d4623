"""Attention by torch's own CPU flash attention, for the problems that it computes exactly.

What was found by experiment (torch 2.13.0): it takes grouped heads, unequal lengths and all strides but one: q, k, v and out
must be dense along head_dim, else it reads the wrong elements without a word. Its causal mask is aligned top-left and needs a
positive scale (it hides a score before it scales it). NaN and Inf propagate as in plain torch. In fp16 and bf16 its
exponential is coarse (lse is off by 6e-5 even where a row has one key; the contract is 1e-5) and it sums dk and dv in 16 bits
(error up to 3.5 times that of plain torch; the contract is 1.5), so 16-bit inputs are widened and run as float32.
"""

from __future__ import annotations

import math

import torch

from flashtile.kernels.cpu.region import region_of
from flashtile.spec.attention import AttentionProblem

Tensors = dict[str, torch.Tensor]

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def forward(p: AttentionProblem, tensors: Tensors, outputs: tuple[str, ...]) -> Tensors:
    """The outputs out and lse, float32."""
    region = region_of(p)
    rows, keys = region.row_slice, region.key_slice
    q, k, v = (_heads_first(tensors[name], part) for name, part in (("q", rows), ("k", keys), ("v", keys)))
    out, lse = FLASH(q, k, v, 0.0, not region.full, scale=p.scale_value)
    return {
        "out": _embedded(out.transpose(1, 2), 1, rows, p.seqlen_q, 0.0),
        "lse": _embedded(lse, 2, rows, p.seqlen_q, -math.inf),
    }


def backward(p: AttentionProblem, tensors: Tensors, outputs: tuple[str, ...]) -> Tensors:
    """Those of dq, dk, dv that `outputs` names, float32."""
    region = region_of(p)
    rows, keys = region.row_slice, region.key_slice
    parts = {"dout": rows, "q": rows, "k": keys, "v": keys, "out": rows}
    inputs = (_heads_first(tensors[name], part) for name, part in parts.items())
    lse = tensors["lse"][:, :, rows]
    dq, dk, dv = FLASH_BACKWARD(*inputs, lse, 0.0, not region.full, scale=p.scale_value)
    made = {"dq": (dq, rows, p.seqlen_q), "dk": (dk, keys, p.seqlen_k), "dv": (dv, keys, p.seqlen_k)}
    return {name: _embedded(made[name][0].transpose(1, 2), 1, *made[name][1:], 0.0) for name in outputs}


def _heads_first(tensor: torch.Tensor, part: slice) -> torch.Tensor:
    """A (batch, heads, part of seqlen, head_dim) float32 view; a copy where the dtype or the innermost stride ask for it."""
    if part.stop - part.start < tensor.shape[1]:
        tensor = tensor[:, part]
    if tensor.dtype is not torch.float32 or tensor.stride(3) != 1:
        tensor = tensor.new_empty(tensor.shape, dtype=torch.float32).copy_(tensor)
    return tensor.transpose(1, 2)


def _embedded(tensor: torch.Tensor, axis: int, part: slice, length: int, fill: float) -> torch.Tensor:
    """`tensor` put at `part` of an axis that is `length` long and `fill` elsewhere."""
    if tensor.shape[axis] == length:
        return tensor
    shape = list(tensor.shape)
    shape[axis] = length
    whole = tensor.new_full(shape, fill)
    whole.narrow(axis, part.start, part.stop - part.start).copy_(tensor)
    return whole
