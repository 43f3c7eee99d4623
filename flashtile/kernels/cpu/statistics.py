"""Statistics of the softmax by tiles: each row's largest score and entropy, each key's mass, and the entropy's gradient.

Of a row of scores y with p = exp(y - lse): the entropy is H = lse - sum p y, its derivative by y is -p (y - lse + H).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from flashtile.kernels.cpu.directed import DirectedModifiers
from flashtile.kernels.cpu.products import lse_dtype
from flashtile.kernels.cpu.region import Tile
from flashtile.kernels.cpu.strip import Rows, strips
from flashtile.kernels.cpu.tangent import Keys, Queries, finite, scores, wide_dtype
from flashtile.problem.attention import AttentionProblem

Tensors = dict[str, torch.Tensor]


def forward(p: AttentionProblem, tensors: Tensors, outputs: tuple[str, ...], first_batch: int = 0, last: int = 0) -> Tensors:
    """Those of peak, entropy (batch, heads_q, seqlen_q) and mass (batch, heads_q, seqlen_k) that `outputs` names.

    last: of how many of the last queries mass is; 0 for all.
    """
    wide, dtype, q = wide_dtype(p), lse_dtype(p), tensors["q"]
    made = {"peak": q.new_full((p.batch, p.heads_q, p.seqlen_q), -math.inf, dtype=dtype)}
    made["entropy"] = q.new_zeros((p.batch, p.heads_q, p.seqlen_q), dtype=dtype)
    made["mass"] = q.new_zeros((p.batch, p.heads_q, p.seqlen_k), dtype=wide)
    modifiers, first = DirectedModifiers(p, tensors, wide), p.seqlen_q - last if last else 0
    for strip in strips(p, tensors, first_batch):
        keys = Keys.of(strip, tensors, wide)
        for rows in strip.runs():
            counted = rows.row_index.view(-1) >= first
            if set(outputs) == {"mass"} and not counted.any():
                continue
            queries = Queries.of(rows, p, tensors, wide)
            peak, lse, entropy = _rows(rows, modifiers, queries, keys)
            _put(rows, made["peak"], peak)
            _put(rows, made["entropy"], entropy)
            if "mass" not in outputs or not counted.any():
                continue
            for tile in rows.tiles():
                prob = rows.by_head(_probabilities(rows, tile, modifiers, queries, keys, lse)[1])
                start = strip.region.first_key
                whole = made["mass"][strip.batches, strip.heads_q, start + tile.start : start + tile.stop]
                whole += prob[:, :, counted].sum(2)
    return {name: made[name].to(dtype) for name in outputs}


def backward(p: AttentionProblem, tensors: Tensors, outputs: tuple[str, ...], first_batch: int = 0) -> Tensors:
    """The gradients of the entropy (that arrives as dentropy) that `outputs` names: of dq, dk, dscore.I.J, dsink."""
    wide = wide_dtype(p)
    made = {f"d{n}": tensors[n].new_zeros(tensors[n].shape) for n in "qkv" if f"d{n}" in outputs}
    modifiers, sinks = DirectedModifiers(p, tensors, wide), torch.zeros(p.heads_q, dtype=torch.float64, device="cpu")
    for strip in strips(p, tensors, first_batch):
        keys = Keys.of(strip, tensors, wide)
        dk = torch.zeros_like(keys.k)
        for rows in strip.runs():
            queries = Queries.of(rows, p, tensors, wide)
            _, lse, entropy = _rows(rows, modifiers, queries, keys)
            arriving = rows.load(tensors["dentropy"].transpose(1, 2).unsqueeze(3), wide)
            dq = torch.zeros_like(queries.q)
            for tile in rows.tiles():
                directed, prob, y = _probabilities(rows, tile, modifiers, queries, keys, lse)
                ds = _slope(prob, y - finite(lse) + entropy) * arriving
                _, raw = modifiers.pull(directed, ds, ds, rows)
                dq.baddbmm_(raw, rows.some_keys(keys.k[:, tile.keys], tile), alpha=p.scale_value)
                dk[:, tile.keys].baddbmm_(raw.mT, rows.some_rows(queries.q, tile))
            if "dq" in made:
                rows.of(made["dq"]).copy_(rows.by_head(dq))
            if queries.sink is not None and "dsink" in outputs:
                share = (queries.sink - finite(lse)).exp()
                each = _slope(share, queries.sink - finite(lse) + entropy) * arriving
                sinks[strip.heads_q] += rows.by_head(each).sum((0, 2, 3)).double()
        if "dk" in made:
            strip.of(made["dk"]).copy_(strip.by_head(dk))
    if "dsink" in outputs:
        made["dsink"] = sinks
    return {**made, **modifiers.grads}


def _slope(prob: torch.Tensor, bend: torch.Tensor) -> torch.Tensor:
    """-prob * bend; 0 where the probability is, whatever its logarithm."""
    return torch.where(prob > 0.0, -prob * bend, torch.zeros_like(prob))


def _rows(
    rows: Rows, modifiers: DirectedModifiers, queries: Queries, keys: Keys
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(largest score, lse, entropy) of a run of rows, (items, group * rows, 1)."""
    peak = queries.q.new_full((*queries.q.shape[:2], 1), -math.inf)
    total, mean = torch.zeros_like(peak), torch.zeros_like(peak)

    def join(y: torch.Tensor, base: torch.Tensor, total: torch.Tensor, mean: torch.Tensor) -> tuple[Any, Any, Any]:
        top = torch.maximum(base, y.amax(2, keepdim=True))
        pivot, before = finite(top), finite(base)
        prob, decay = (y - pivot).exp(), (base - pivot).exp()
        bend = torch.where(prob == 0.0, prob, prob * (y - pivot)).sum(2, keepdim=True)
        return top, total * decay + prob.sum(2, keepdim=True), (mean + total * (before - pivot)) * decay + bend

    for tile in rows.tiles():
        y = modifiers.along(scores(queries, keys, tile)[0], None, rows, tile, False).y
        rows.hide(y, tile, -math.inf)
        peak, total, mean = join(y, peak, total, mean)
    top = peak
    if queries.sink is not None:
        top, total, mean = join(queries.sink, peak, total, mean)
    whole = total.masked_fill(total == 0.0, 1.0)
    return peak, top + total.log(), whole.log() - mean / whole


def _probabilities(
    rows: Rows, tile: Tile, modifiers: DirectedModifiers, queries: Queries, keys: Keys, lse: torch.Tensor
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """(what modifiers made, probabilities, scores) of a tile."""
    directed = modifiers.along(scores(queries, keys, tile)[0], None, rows, tile, True)
    y = directed.y.clone()
    rows.hide(y, tile, -math.inf)
    return directed, (y - finite(lse)).exp(), y


def _put(rows: Rows, whole: torch.Tensor, found: torch.Tensor) -> None:
    rows.of(whole.transpose(1, 2).unsqueeze(3)).copy_(rows.by_head(found))
