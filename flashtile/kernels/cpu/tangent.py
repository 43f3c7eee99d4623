"""Forward mode: the tangents of out and lse along given tangents of the inputs, by tiles with an online softmax.

With T the derivative of modified scores, mu = sum p T is lse's, and out's is sum p (T - mu) v + p v'. One pass forms both,
out and lse among them: sums of p, p T, p v and (p T) v + p v' are rescaled alike as a row's maximum rises. Nothing of the
size of all scores is stored, and nothing that a forward keeps is read. fp32 inputs are computed in float64, 16-bit ones in
float32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from flashtile.kernels.cpu.directed import DirectedModifiers
from flashtile.kernels.cpu.dropout import Drop
from flashtile.kernels.cpu.products import lse_dtype
from flashtile.kernels.cpu.region import Tile
from flashtile.kernels.cpu.strip import Rows, Strip, strips
from flashtile.problem.attention import AttentionProblem

Tensors = dict[str, torch.Tensor]


def wide_dtype(p: AttentionProblem) -> torch.dtype:
    """The dtype of all that is computed."""
    return torch.float32 if p.dtype.is_narrow else torch.float64


class Keys(NamedTuple):
    """A strip's keys and values with their tangents: (items, keys, head_dim)."""

    k: torch.Tensor
    v: torch.Tensor
    tk: torch.Tensor | None
    tv: torch.Tensor | None

    @staticmethod
    def of(strip: Strip, tensors: Tensors, dtype: torch.dtype) -> Keys:
        return Keys(*(strip.load(tensors[n], dtype) if n in tensors else None for n in ("k", "v", "tk", "tv")))  # pyright: ignore[reportArgumentType]


class Queries(NamedTuple):
    """A run's scaled queries with their tangents, and its sinks: (items, group * rows, head_dim or 1)."""

    q: torch.Tensor
    tq: torch.Tensor | None
    sink: torch.Tensor | None
    tsink: torch.Tensor | None

    @staticmethod
    def of(rows: Rows, p: AttentionProblem, tensors: Tensors, dtype: torch.dtype) -> Queries:
        q, tq = (rows.load(tensors[n], dtype) * p.scale_value if n in tensors else None for n in ("q", "tq"))
        sinks = (rows.per_head(tensors[n].to(dtype)) if n in tensors else None for n in ("sink", "tsink"))
        return Queries(q, tq, *sinks)  # pyright: ignore[reportArgumentType]


class Moved(NamedTuple):
    """out and lse of a run of rows, and their tangents."""

    out: torch.Tensor
    lse: torch.Tensor
    tout: torch.Tensor
    tlse: torch.Tensor


def scores(queries: Queries, keys: Keys, tile: Tile) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scaled scores of a tile, and their derivative; None for zero."""
    k, t = keys.k[:, tile.keys], None
    if queries.tq is not None:
        t = queries.tq @ k.mT
    if keys.tk is not None:
        other = queries.q @ keys.tk[:, tile.keys].mT
        t = other if t is None else t.add_(other)
    return queries.q @ k.mT, t


def forward(p: AttentionProblem, tensors: Tensors, outputs: tuple[str, ...], first_batch: int = 0) -> Tensors:
    """out, lse and their tangents. `first_batch` is what modifiers take the first batch entry for."""
    wide, made = wide_dtype(p), no_rows(p, tensors)
    modifiers, drop = DirectedModifiers(p, tensors, wide), Drop(p, tensors)
    for strip in strips(p, tensors, first_batch):
        keys = Keys.of(strip, tensors, wide)
        for rows in strip.runs():
            moved = attend(rows, modifiers, drop, Queries.of(rows, p, tensors, wide), keys)
            put(rows, made, moved)
    return made


def no_rows(p: AttentionProblem, tensors: Tensors) -> Tensors:
    """out, lse and their tangents of rows that see nothing."""
    q = tensors["q"]
    made = {name: q.new_zeros((p.batch, p.seqlen_q, p.heads_q, p.head_dim_v)) for name in ("out", "tout")}
    made["lse"] = q.new_full((p.batch, p.heads_q, p.seqlen_q), -math.inf, dtype=lse_dtype(p))
    made["tlse"] = torch.zeros_like(made["lse"])
    if "sink" in tensors:  # what rows have that see nothing
        made["lse"].copy_(tensors["sink"][:, None])
    if "tsink" in tensors:
        there = tensors["sink"] != -math.inf
        made["tlse"].copy_(torch.where(there, tensors["tsink"], 0.0)[:, None])
    return made


def put(rows: Rows, made: Tensors, moved: Moved) -> None:
    """Write a run of rows of those that are there."""
    for name, found in moved._asdict().items():
        if name in made:
            whole = made[name] if name.endswith("out") else made[name].transpose(1, 2).unsqueeze(3)
            rows.of(whole).copy_(rows.by_head(found))


def attend(rows: Rows, modifiers: DirectedModifiers, drop: Drop, queries: Queries, keys: Keys) -> Moved:
    """out, lse and their tangents of a run of rows."""
    q = queries.q
    peak = q.new_full((*q.shape[:2], 1), -math.inf)
    total, mean = torch.zeros_like(peak), torch.zeros_like(peak)
    out = q.new_zeros((*q.shape[:2], keys.v.shape[2]))
    tout = torch.zeros_like(out)
    if queries.sink is not None:
        peak.copy_(queries.sink)
        total.add_(1.0).masked_fill_(peak == -math.inf, 0.0)
        if queries.tsink is not None:
            mean.copy_(queries.tsink).masked_fill_(peak == -math.inf, 0.0)
    for tile in rows.tiles():
        s, t = scores(queries, keys, tile)
        y, t, *_ = modifiers.along(s, t, rows, tile, False)
        rows.hide(y, tile, -math.inf)
        new_peak = torch.maximum(peak, y.amax(2, keepdim=True))
        base = finite(new_peak)  # a row may see nothing in this tile: no -inf - -inf
        prob, decay = y.sub_(base).exp_(), (peak - base).exp_()
        rows.hide(prob, tile, 0.0)
        for sums in (total, mean, out, tout):
            sums.mul_(decay)
        total += prob.sum(2, keepdim=True)
        bent = None
        if t is not None:
            rows.hide(t, tile, 0.0)
            bent = t.mul_(prob)
            mean += bent.sum(2, keepdim=True)
        dropped = drop.mask(rows, tile)
        if dropped is not None:
            prob.masked_fill_(dropped, 0.0)
            bent = None if bent is None else bent.masked_fill_(dropped, 0.0)
        v = rows.some_keys(keys.v[:, tile.keys], tile)
        out.baddbmm_(prob, v)
        if bent is not None:
            tout.baddbmm_(bent, v)
        if keys.tv is not None:
            tout.baddbmm_(prob, rows.some_keys(keys.tv[:, tile.keys], tile))
        peak = new_peak
    lse, total = peak + total.log(), total.masked_fill(total == 0.0, 1.0)
    mean.div_(total)
    out.mul_(drop.factor).div_(total)
    return Moved(out, lse, tout.mul_(drop.factor).div_(total).sub_(out * mean), mean)


def finite(rows: torch.Tensor) -> torch.Tensor:
    """A copy with 0 for -inf; NaN and +inf stay and propagate."""
    return rows.masked_fill(rows == -math.inf, 0.0)
