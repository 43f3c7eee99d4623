"""Attention by torch's own CPU flash attention, for the problems that it computes exactly.

What was found by experiment (torch 2.13.0): it takes grouped heads, unequal lengths and all strides but one: q, k, v and out
must be dense along head_dim, else it reads the wrong elements without a word. Its causal mask is aligned top-left and needs a
positive scale (it hides a score before it scales it). In float32 NaN and Inf propagate as in plain torch, but a row whose
scores are all NaN counts as one that sees nothing, and has lse 0, where there are fewer keys than a vector register holds, at
most 16: tiles compute such calls.

In float32 its roundings are of plain torch's size: mean errors are 1.0 (out), 1.2 to 1.4 (dq), 1.0 to 1.4 (dk, dv) times plain
torch's, where p = exp(score - lse) inherits the rounding of lse. The largest errors of two such draws differ, and so break the
contract's 1.5 times in 0 to 7 of 100 problems (out), and in 0 to 73 (dq), of 48 to 700 keys. Where scores are large, p is off
by more, and tiles compute the backward of such items. This is what a call gets by default. Where sums are to be strict
(`products.strict`), few keys are computed by the same kernels in float64; of more, the rows of out that make the largest errors
are computed again, and the backward is tiled (`peaked.py`).

In fp16 and bf16 its exponential is coarse. out is as exact as it is in plain torch or better. lse is off by 5e-5 where a row
has one key, and by up to 1.1e-4 elsewhere; the contract is 1e-5, so it serves the backward alone, or is mended (`lse.py`).
NaN and Inf vanish: where scores may hold them, or are so large that the backward's own would differ, tiles compute the
forward. dk and dv are summed in 16 bits (99th percentile of their error up to 1.5 times that of plain torch; the contract is
1.1), so no backward is delegated in 16 bits: it is tiled, or widened to float32 where the CPU multiplies nothing faster than
that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from flashtile.kernels.cpu import tiled
from flashtile.kernels.cpu.lse import mend_lse
from flashtile.kernels.cpu.peaked import Rows, mend_peaked
from flashtile.kernels.cpu.products import FEW_KEYS, mends, strict, widens
from flashtile.kernels.cpu.region import region_of
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.dtype import DType

Tensors = dict[str, torch.Tensor]
Bound = Callable[..., list[torch.Tensor] | None]

# From `torch.ops` it would take 4 us longer.
FLASH: Any = torch._scaled_dot_product_flash_attention_for_cpu  # pyright: ignore[reportPrivateImportUsage]
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# Below this a score's error in float32, and with it that of p = exp(score - lse), is less than that of bf16.
MOST_SCORE = 2.0**16
# Up to here p, off by the rounding of lse and of its score, is within 1e-5 of itself, which is what lse is promised to be.
MOST_LSE = {torch.float32: 128.0, torch.float64: 2.0**30}
REGISTER_KEYS = 16  # float32 numbers in the widest vector register


def forward(p: AttentionProblem, tensors: Tensors, outputs: tuple[str, ...], first_batch: int = 0) -> Tensors:
    """The outputs out, lse and, if named, lse_low and out_wide, which is out in float32.

    lse, float32, is coarse for 16-bit inputs unless the problem returns it.

    `first_batch` as in `tiled.forward`.
    """
    region = region_of(p)
    rows, keys = region.row_slice, region.key_slice
    q, k, v = (heads_first(tensors[name], part, _dtype(p)) for name, part in (("q", rows), ("k", keys), ("v", keys)))
    found = _attend(p, not region.full, q, k, v)
    if found is None:
        return tiled.forward(p, tensors, outputs, first_batch)
    out, sums = found
    lse = sums.float()
    low = torch.zeros_like(lse) if strict(p) else None
    if low is not None and q.dtype is torch.float64:
        low = torch.where(lse.isfinite(), sums - lse, 0.0).float()
    elif low is not None:
        mend_peaked(p, q, k, v, Rows(out, lse, low))
    made = {
        "out": embedded(out.transpose(1, 2), 1, rows, p.seqlen_q, 0.0),
        "lse": embedded(lse, 2, rows, p.seqlen_q, -math.inf),
    }
    if "out_wide" in outputs:
        made["out_wide"] = made["out"]
    if low is not None:
        made["lse_low"] = embedded(low, 2, rows, p.seqlen_q, 0.0)
    if p.returns_lse and q.dtype.itemsize == 2:
        mend_lse(p, tensors, made["lse"])
    if p.returns_lse and p.dtype is not DType.FP32 and q.dtype is not torch.float64 and not region.full:
        few = slice(0, min(FEW_KEYS, region.rows, region.keys))  # rows of few keys: a score that cancels is off by too much
        wide = FLASH(*(t[:, :, few].double() for t in (q, k, v)), 0.0, True, scale=p.scale)
        made["lse"][:, :, rows][:, :, few] = wide[1].float()
    return made


def bind_forward(p: AttentionProblem, outputs: tuple[str, ...], given: Sequence[torch.Tensor]) -> Bound | None:
    """`forward` as a function of q, k and v, where all of it is one call of torch's."""
    causal, scale = not region_of(p).full, p.scale_value
    if not _as_it_is(p, given, _dtype(p)) or outputs != ("out", "lse") or (p.returns_lse and p.dtype is not DType.FP32):
        return None

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        out, lse = FLASH(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, causal, scale=scale)
        return [out.transpose(1, 2), lse]

    def checked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor] | None:
        found = _attend(p, causal, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return found and [found[0].transpose(1, 2), found[1]]

    return plain if p.dtype is DType.FP32 and p.seqlen_k >= REGISTER_KEYS else checked


def _as_it_is(p: AttentionProblem, given: Iterable[torch.Tensor], dtype: torch.dtype) -> bool:
    """Whether all queries see a key, all keys are seen, and torch's kernel reads the tensors where they lie."""
    region = region_of(p)
    if region.rows < p.seqlen_q or region.keys < p.seqlen_k:
        return False
    return all(t.dtype is dtype and t.stride(3) == 1 for t in given)


def _dtype(p: AttentionProblem) -> torch.dtype:
    """The dtype in which torch's kernel computes the forward."""
    if region_of(p).keys <= FEW_KEYS and (strict(p) or (p.returns_lse and p.dtype is not DType.FP32)):
        return torch.float64
    if p.dtype is DType.FP32:
        return torch.float32
    return (
        torch.float32
        if widens(p) or (p.returns_lse and not mends(p))
        else torch.bfloat16
        if p.dtype is DType.BF16
        else torch.float16
    )


def _attend(
    p: AttentionProblem, causal: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(out, lse) of (batch, heads, seqlen, head_dim) tensors; None where tiles must compute it."""
    if q.dtype.itemsize == 2 and not most_score(p, q, k) <= MOST_SCORE:
        return None
    out, lse = FLASH(q, k, v, 0.0, causal, scale=p.scale)
    if k.shape[2] < REGISTER_KEYS and q.dtype.itemsize > 2 and not lse.all():
        return None
    return out, lse


def most_score(p: AttentionProblem, q: torch.Tensor, k: torch.Tensor) -> float:
    """What no score of q and k, (batch, heads, seqlen, head_dim), exceeds; NaN or Inf if an element is."""
    largest = p.head_dim * abs(p.scale_value)
    for t in (q, k):
        low, high = torch.aminmax(t.transpose(1, 2))  # in the order in which most callers' tensors lie
        largest *= max(-low.item(), high.item())  # both are NaN if one is
    return largest


def backward(
    p: AttentionProblem, tensors: Tensors, outputs: tuple[str, ...], first_batch: int = 0, wide_keys: bool = False
) -> Tensors:
    """Those of dq, dk, dv that `outputs` names, in float32 or better; of items with large float32 scores by tiles.

    `first_batch` matters to modifiers alone, of which there are none.
    """
    region = region_of(p)
    rows, keys = region.row_slice, region.key_slice
    lse, dtype = tensors["lse"][:, :, rows], torch.float32
    if strict(p):  # of other items it is 0, and float64 would meet the rounding of their float32 scores in lse
        lse, dtype = lse.double() + tensors["lse_low"][:, :, rows], torch.float64
    parts = {"dout": rows, "q": rows, "k": keys, "v": keys, "out": rows}
    dout, q, k, v, out = (heads_first(tensors[name], part, dtype) for name, part in parts.items())
    if p.dtype is not DType.FP32:  # delta of an out that was rounded to 16 bits would leave what cancels to that rounding
        if region.causal:  # the first row sees one key: with a score of 0 its probability is 1, and its part of dk 0, exactly
            q[:, :, 0] *= 0.0
        if "out_wide" in tensors:
            out = heads_first(tensors["out_wide"], rows, dtype)
            if region.causal:
                lse = lse.clone()
                lse[:, :, 0] *= 0.0
        else:
            out, lse = FLASH(q, k, v, 0.0, not region.full, scale=p.scale)
    dq, dk, dv = FLASH_BACKWARD(dout, q, k, v, out, lse, 0.0, not region.full, scale=p.scale_value)
    if p.dtype is not DType.FP32 and region.causal:
        dq[:, :, 0] *= 0.0
    made = {"dq": (dq, rows, p.seqlen_q), "dk": (dk, keys, p.seqlen_k), "dv": (dv, keys, p.seqlen_k)}
    found = {name: embedded(made[name][0].transpose(1, 2), 1, *made[name][1:], 0.0) for name in outputs}
    return found if is_moderate(lse) else _large_again(p, tensors, outputs, found, lse, wide_keys)


def bind_backward(p: AttentionProblem, outputs: tuple[str, ...], given: Sequence[torch.Tensor]) -> Bound | None:
    """`backward` as a function of q, k, v, out, lse and dout, where all of it is one call of torch's."""
    if strict(p) or not _as_it_is(p, (*given[:4], given[5]), torch.float32):
        return None
    causal, scale = not region_of(p).full, p.scale_value
    places, all_three = ["qkv".index(name[1]) for name in outputs], len(outputs) == 3

    def bound(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor
    ) -> list[torch.Tensor] | None:
        if not is_moderate(lse) or not q.stride(3) == k.stride(3) == v.stride(3) == out.stride(3) == 1:
            return None  # a hook of saved tensors may have laid them otherwise
        if dout.stride(3) != 1:
            dout = dout.contiguous()
        dq, dk, dv = FLASH_BACKWARD(
            dout.transpose(1, 2), q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), out.transpose(1, 2), lse, 0.0,
            causal, scale=scale,
        )  # fmt: skip
        if all_three:
            return [dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)]
        return [(dq, dk, dv)[i].transpose(1, 2) for i in places]

    return bound


def is_moderate(lse: torch.Tensor) -> bool:
    """Whether all scores are so small that p = exp(score - lse) is exact. NaN and Inf are not."""
    (low, high), most = torch.aminmax(lse if lse.is_contiguous() else lse.mT), MOST_LSE[lse.dtype]  # in the order of memory
    return low.item() >= -most and high.item() <= most


def _large_again(
    p: AttentionProblem, tensors: Tensors, outputs: tuple[str, ...], made: Tensors, lse: torch.Tensor, wide_keys: bool
) -> Tensors:
    """The gradients `made`, those of items whose scores are large by tiles, of a forward by tiles."""
    one = replace(p, batch=1)
    for batch in range(p.batch):
        if not is_moderate(lse[batch]):
            item = {name: tensors[name][batch : batch + 1] for name in ("q", "k", "v", "dout")}
            item |= tiled.forward(one, item, ("out", "lse", "lse_low"))
            for name, gradient in tiled.backward(one, item, outputs, wide_keys=wide_keys).items():
                made[name][batch] = gradient[0]
    return made


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
