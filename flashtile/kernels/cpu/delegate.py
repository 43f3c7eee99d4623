"""Attention by torch's own CPU flash attention, for the problems that it computes exactly.

What was found by experiment (torch 2.13.0): it takes grouped heads, unequal lengths and all strides but one: q, k, v and out
must be dense along head_dim, else it reads the wrong elements without a word. Its causal mask is aligned top-left and needs a
positive scale (it hides a score before it scales it). In float32 NaN and Inf propagate as in plain torch, but a row whose
scores are all NaN counts as one that sees nothing where there are fewer keys than a vector register holds, 16. Its roundings
are of plain torch's size, and the largest of two such draws differ: out, dq, dk and dv each pass the contract's 1.5 times
plain torch's error in 2 to 6 of 100 problems of 512 to 2048 keys. Of the forward the rows that make the largest errors are
computed again (`peaked.py`); the backward, where p = exp(s - lse) inherits the rounding of lse besides, is tiled.

In fp16 and bf16 its exponential is coarse. out is as exact as it is in plain torch or better. lse is off by 5e-5 where a row
has one key, and by up to 1.1e-4 elsewhere; the contract is 1e-5, so it serves the backward alone, or is mended (`lse.py`).
NaN and Inf vanish: where scores may hold them, or are so large that the backward's own would differ, tiles compute the
forward. dk and dv are summed in 16 bits (99th percentile of their error up to 1.5 times that of plain torch; the contract is
1.1), so no backward is delegated in 16 bits: it is tiled, or widened to float32 where the CPU multiplies nothing faster than
that.
"""

from __future__ import annotations

import math

import torch

from flashtile.kernels.cpu import tiled
from flashtile.kernels.cpu.lse import mend_lse
from flashtile.kernels.cpu.peaked import Rows, mend_peaked
from flashtile.kernels.cpu.products import mends
from flashtile.kernels.cpu.region import region_of
from flashtile.spec.attention import AttentionProblem
from flashtile.spec.dtype import DType

Tensors = dict[str, torch.Tensor]

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


# Below this a score's error in float32, and with it that of p = exp(score - lse), is less than that of bf16.
MOST_SCORE = 2.0**16


def forward(p: AttentionProblem, tensors: Tensors, outputs: tuple[str, ...], first_batch: int = 0) -> Tensors:
    """The outputs out and lse; lse, float32, is coarse for 16-bit inputs unless the problem returns it.

    `first_batch` as in `tiled.forward`.
    """
    region = region_of(p)
    rows, keys = region.row_slice, region.key_slice
    dtype = torch.float32 if p.returns_lse and not mends(p) else tensors["q"].dtype
    q, k, v = (heads_first(tensors[name], part, dtype) for name, part in (("q", rows), ("k", keys), ("v", keys)))
    if dtype is not torch.float32 and not most_score(p, q, k) <= MOST_SCORE:
        return tiled.forward(p, tensors, outputs, first_batch)
    out, lse = FLASH(q, k, v, 0.0, not region.full, scale=p.scale_value)
    low = torch.zeros_like(lse) if p.dtype is DType.FP32 else None
    if low is not None:
        mend_peaked(p, q, k, v, Rows(out, lse, low))
    made = {
        "out": embedded(out.transpose(1, 2), 1, rows, p.seqlen_q, 0.0),
        "lse": embedded(lse, 2, rows, p.seqlen_q, -math.inf),
    }
    if low is not None:
        made["lse_low"] = embedded(low, 2, rows, p.seqlen_q, 0.0)
    if p.returns_lse and dtype is not torch.float32:
        mend_lse(p, tensors, made["lse"])
    return made


def most_score(p: AttentionProblem, q: torch.Tensor, k: torch.Tensor) -> float:
    """What no score of q and k, (batch, heads, seqlen, head_dim), exceeds; NaN or Inf if an element is."""
    ends = (torch.aminmax(t.transpose(1, 2)) for t in (q, k))  # in the order in which most callers' tensors lie
    largest = ((-low).maximum(high).item() for low, high in ends)
    return p.head_dim * abs(p.scale_value) * math.prod(largest)


def backward(p: AttentionProblem, tensors: Tensors, outputs: tuple[str, ...], first_batch: int = 0) -> Tensors:
    """Those of dq, dk, dv that `outputs` names, float32; `first_batch` matters to modifiers alone, of which there are none."""
    region = region_of(p)
    rows, keys = region.row_slice, region.key_slice
    parts = {"dout": rows, "q": rows, "k": keys, "v": keys, "out": rows}
    inputs = (heads_first(tensors[name], part, torch.float32) for name, part in parts.items())
    lse = tensors["lse"][:, :, rows]
    dq, dk, dv = FLASH_BACKWARD(*inputs, lse, 0.0, not region.full, scale=p.scale_value)
    made = {"dq": (dq, rows, p.seqlen_q), "dk": (dk, keys, p.seqlen_k), "dv": (dv, keys, p.seqlen_k)}
    return {name: embedded(made[name][0].transpose(1, 2), 1, *made[name][1:], 0.0) for name in outputs}


def heads_first(tensor: torch.Tensor, part: slice, dtype: torch.dtype) -> torch.Tensor:
    """A (batch, heads, part of seqlen, head_dim) view; a copy where the dtype or the innermost stride ask for it."""
    if part.stop - part.start < tensor.shape[1]:
        tensor = tensor[:, part]
    if tensor.dtype is not dtype or tensor.stride(3) != 1:
        tensor = tensor.new_empty(tensor.shape, dtype=dtype).copy_(tensor)
    return tensor.transpose(1, 2)


def embedded(tensor: torch.Tensor, axis: int, part: slice, length: int, fill: float) -> torch.Tensor:
    """`tensor` put at `part` of an axis that is `length` long and `fill` elsewhere."""
    if tensor.shape[axis] == length:
        return tensor
    shape = list(tensor.shape)
    shape[axis] = length
    whole = tensor.new_full(shape, fill)
    whole.narrow(axis, part.start, part.stop - part.start).copy_(tensor)
    return whole
