"""float32 problems whose sums are to be strict (`products.strict`) and whose forward is torch's flash attention: the rows
that few keys decide, and the backward.

Nothing averages out the error of such a row's few large terms, which is that of their scores. The largest errors of out are
here, plain PyTorch's as well as torch's flash attention's, as two draws of the same roundings. With these rows computed again,
out's error is at most 1.4 times plain PyTorch's, and without 2.5 times (81 problems of 512 to 2048 keys, torch 2.13.0).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from flashtile.kernels.cpu import tiled
from flashtile.kernels.cpu.distance import LEAST_EXPONENT
from flashtile.kernels.cpu.products import Scratch
from flashtile.kernels.cpu.region import ELEMENTS, region_of
from flashtile.kernels.cpu.strip import indices
from flashtile.problem.attention import AttentionProblem

Tensors = dict[str, torch.Tensor]

# Of each head's rows one in so many, and at least so many, are computed again: 1 in 128 mends no more and takes longer.
SHARE = 256
LEAST_ROWS = 8
FIRST_ROWS = 64  # of a causal problem: they see few keys, and are computed in float64
SAMPLE = 16  # rows that stand for one another where out is averaged
PART = 256  # keys whose products are added up by themselves
# How far |lse| may be above log(keys). Of normal numbers it is up to 1.5 above; where scores deviate by 2.4, which is 3 above,
# torch's lse makes the gradients' errors 2 times plain PyTorch's.
MOST = 2.0


class Rows(NamedTuple):
    """Results by (batch, heads_q, local row), written in place; `low` is what lse is short of, being float32."""

    out: torch.Tensor
    lse: torch.Tensor
    low: torch.Tensor


def mend_peaked(p: AttentionProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, made: Rows) -> None:
    """Mend `made` of a problem without modifiers whose mask is full or causal; q, k, v (batch, heads, length, head_dim)."""
    region, scratch = region_of(p), Scratch(exact=True)
    if region.rows < FIRST_ROWS:  # as in decoding: too few for one to stand out
        return
    first = FIRST_ROWS if region.causal else 0
    left = region.rows - first
    count = min(max(LEAST_ROWS, left // SHARE), left)
    chosen = _far_out(made.out[:, :, first:], count).add_(first)
    heads = max(1, ELEMENTS // (p.group * max(count, 1) * region.keys))  # of as many batch entries as it takes
    height = max(1, ELEMENTS // (p.group * region.keys))
    batches = max(1, heads // p.heads_kv)
    for batch in range(0, p.batch, batches):
        for head in range(0, p.heads_kv, heads):
            here = slice(batch, batch + batches)
            some = here, slice(head * p.group, (head + heads) * p.group)
            keys, values = (t[here, head : head + heads] for t in (k, v))
            queries, rows = q[some], Rows(*(t[some] for t in made))
            if first:
                index = torch.arange(first, device="cpu").expand(*queries.shape[:2], first)
                few_q, few_k, few_v = (t[:, :, :first].double() for t in (queries, keys, values))
                _mend(p, index, few_q, few_k, few_v, rows, scratch)
            for start in range(0, count, height):
                _mend(p, chosen[some][:, :, start : start + height], queries, keys, values, rows, scratch)


def _far_out(out: torch.Tensor, count: int) -> torch.Tensor:
    """The rows of each head, (batch, heads, count), whose out is farthest from its mean; averages of many values are near."""
    mean = out[:, :, ::SAMPLE].mean(2).unsqueeze(3)
    squares = torch.linalg.vector_norm(out, dim=3).square_()
    return squares.sub_((out @ mean).squeeze(3), alpha=2.0).topk(count, 2, sorted=False).indices


def _mend(
    p: AttentionProblem, index: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, made: Rows, scratch: Scratch
) -> None:
    """The rows of `index` (batch, heads_q, n), in the dtype of q, k, v (batch, heads, length, head_dim)."""
    hidden, wide = None, index[..., None].expand(-1, -1, -1, p.head_dim)
    if region_of(p).causal:
        last = min(int(index.max()) + 1, k.shape[2])
        k, v = k[:, :, :last], v[:, :, :last]
        hidden = indices(0, last) > index.reshape(k.shape[0] * k.shape[1], -1, 1)
    k, v = k.flatten(0, 1), v.flatten(0, 1)
    queries = q.gather(2, wide).mul_(p.scale_value).view(k.shape[0], -1, p.head_dim)
    scores = scratch.product("scores", queries, k.mT)
    if hidden is not None:
        scores.masked_fill_(hidden, -math.inf)
    peak = scores.amax(2, keepdim=True)
    prob = scores.sub_(peak).clamp_min_(LEAST_EXPONENT).exp_()
    if hidden is not None:
        prob.masked_fill_(hidden, 0.0)
    total = prob.sum(2, keepdim=True)
    out = torch.zeros_like(queries)
    for weights, values in zip(prob.div_(total).split(PART, 2), v.split(PART, 1), strict=True):
        out.baddbmm_(weights, values)
    sums = (peak.double() + total.double().log()).view(index.shape)
    lse = sums.float()
    made.out.scatter_(2, wide, out.float().view(wide.shape))
    made.lse.scatter_(2, index, lse)
    made.low.scatter_(2, index, (sums - lse).float())


def backward(p: AttentionProblem, tensors: Tensors, outputs: tuple[str, ...], first_batch: int = 0) -> Tensors:
    """The gradients of a delegated forward, by tiles. Where scores are large, their p = exp(score - lse) and torch's lse, whose
    scores differ by some roundings, do not add up to 1: such items are computed again.
    """
    most = math.log(region_of(p).keys) + MOST
    lse = tensors["lse"]
    again = (lse.masked_fill(lse == -math.inf, 0.0).abs().amax((1, 2)) > most).tolist()
    if any(again):
        low = tensors.get("lse_low", torch.zeros_like(lse))
        tensors = tensors | {"out": tensors["out"].clone(), "lse": lse.clone(), "lse_low": low.clone()}
        for batch in (i for i, large in enumerate(again) if large):
            item = {name: tensors[name][batch : batch + 1] for name in "qkv"}
            for name, made in tiled.forward(replace(p, batch=1), item, ("out", "lse", "lse_low")).items():
                tensors[name][batch] = made[0]
    return tiled.backward(p, tensors, outputs, first_batch, rough_lse=True)
