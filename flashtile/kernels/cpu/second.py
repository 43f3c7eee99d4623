"""Second order: how the gradients change along a direction, by tiles.

The direction moves q, k, v, captured tensors and sinks (tq, tk, tv, tscore.I.J, tsink), and the gradients that arrive (tdout,
tdlse). The Hessian is symmetric, so that this serves double backward, where the direction is what arrives at dq, dk and dv,
forward mode of the backward, and the backward of forward mode.

With ds = p e, where e = keep dout v^T - delta: its derivative is p ((T - mu) e + e'), e' = keep (dout v'^T + dout' v^T) -
delta', and delta' = sum(dout' out + dout out') - dlse', which needs no sum over keys. `tangent.attend` gives mu, out and out'
of a run of rows before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashtile.kernels.cpu.directed import DirectedModifiers
from flashtile.kernels.cpu.dropout import Drop
from flashtile.kernels.cpu.strip import Rows, strips
from flashtile.kernels.cpu.tangent import Keys, Moved, Queries, attend, finite, no_rows, put, scores, wide_dtype
from flashtile.problem.attention import AttentionProblem

Tensors = dict[str, torch.Tensor]


def backward(p: AttentionProblem, tensors: Tensors, outputs: tuple[str, ...], first_batch: int = 0) -> Tensors:
    """The derivatives of those of dq, dk, dv, dscore.I.J and dsink that `outputs` names, and of out and lse as tout, tlse."""
    wide = wide_dtype(p)
    made = {f"d{n}": tensors[n].new_zeros(tensors[n].shape) for n in "qkv" if f"d{n}" in outputs}
    made |= {name: t for name, t in no_rows(p, tensors).items() if name in outputs}
    modifiers, drop = DirectedModifiers(p, tensors, wide), Drop(p, tensors)
    sinks = torch.zeros(p.heads_q, dtype=torch.float64, device="cpu")
    if p.sink is not None and "dsink" in outputs and "tdlse" in tensors:  # of rows that see nothing, lse is the sink
        sinks = _sink_of_rows(p, tensors, sinks)
    for strip in strips(p, tensors, first_batch):
        keys = Keys.of(strip, tensors, wide)
        sums = {n: torch.zeros_like(t) for n, t in (("dk", keys.k), ("dv", keys.v)) if n in made}
        for rows in strip.runs():
            queries = Queries.of(rows, p, tensors, wide)
            moved = attend(rows, modifiers, drop, queries, keys)
            put(rows, made, moved)
            given = _load(rows, tensors, wide, moved)
            dq = torch.zeros_like(queries.q) if "dq" in made else None
            _add(p, rows, modifiers, drop, queries, keys, given, dq, sums)
            if dq is not None:
                rows.of(made["dq"]).copy_(rows.by_head(dq))
            if queries.sink is not None and "dsink" in outputs:
                sinks += _sink(p, rows, queries, given)
        for name, total in sums.items():
            strip.of(made[name]).copy_(strip.by_head(total))
    if "dsink" in outputs:
        made["dsink"] = sinks
    return {**made, **modifiers.grads}


class Arriving(NamedTuple):
    """What is known of a run of rows: (items, group * rows, head_dim_v or 1); None for zero."""

    dout: torch.Tensor | None
    tdout: torch.Tensor | None
    delta: torch.Tensor  # sum out dout - dlse
    tdelta: torch.Tensor  # its derivative
    lse: torch.Tensor  # 0 for -inf
    mean: torch.Tensor  # lse's derivative


def _load(rows: Rows, tensors: Tensors, dtype: torch.dtype, moved: Moved) -> Arriving:
    dout, tdout = (rows.load(tensors[n], dtype) if n in tensors else None for n in ("dout", "tdout"))
    delta, tdelta = torch.zeros_like(moved.lse), torch.zeros_like(moved.lse)
    if dout is not None:
        delta += (dout * moved.out).sum(2, keepdim=True)
        tdelta += (dout * moved.tout).sum(2, keepdim=True)
    if tdout is not None:
        tdelta += (tdout * moved.out).sum(2, keepdim=True)
    for name, total in (("dlse", delta), ("tdlse", tdelta)):
        if name in tensors:
            total -= rows.load(tensors[name].transpose(1, 2).unsqueeze(3), dtype)
    return Arriving(dout, tdout, delta, tdelta, finite(moved.lse), moved.tlse)


def _add(
    p: AttentionProblem, rows: Rows, modifiers: DirectedModifiers, drop: Drop, queries: Queries, keys: Keys, given: Arriving,
    dq: torch.Tensor | None, sums: Tensors,
) -> None:  # fmt: skip
    """Add a run's share, tile by tile."""
    for tile in rows.tiles():
        made = modifiers.along(*scores(queries, keys, tile), rows, tile, True)
        y = made.y
        rows.hide(y, tile, -torch.inf)
        prob = y.sub_(given.lse).exp_()
        rows.hide(prob, tile, 0.0)
        bend = -given.mean if made.t is None else made.t - given.mean  # T - mu
        if made.t is not None:
            rows.hide(bend, tile, 0.0)
        v = rows.some_keys(keys.v[:, tile.keys], tile)
        e, te = torch.zeros_like(prob), torch.zeros_like(prob)
        if given.dout is not None:
            e.baddbmm_(given.dout, v.mT)
            if keys.tv is not None:
                te.baddbmm_(given.dout, rows.some_keys(keys.tv[:, tile.keys], tile).mT)
        if given.tdout is not None:
            te.baddbmm_(given.tdout, v.mT)
        dropped = drop.mask(rows, tile)
        for some, less in ((e, given.delta), (te, given.tdelta)):
            if dropped is not None:
                some.masked_fill_(dropped, 0.0).mul_(drop.factor)
            some -= less
        ds, ds2 = prob * e, (bend * e).add_(te).mul_(prob)
        rows.hide(ds, tile, 0.0)
        rows.hide(ds2, tile, 0.0)
        if "dv" in sums:
            dv, kept = sums["dv"][:, tile.keys], prob
            if dropped is not None:
                kept = prob.masked_fill(dropped, 0.0).mul_(drop.factor)
            if given.dout is not None:
                dv.baddbmm_((kept * bend).mT, rows.some_rows(given.dout, tile))
            if given.tdout is not None:
                dv.baddbmm_(kept.mT, rows.some_rows(given.tdout, tile))
        raw, raw2 = modifiers.pull(made, ds, ds2, rows)
        if dq is not None:
            dq.baddbmm_(raw2, rows.some_keys(keys.k[:, tile.keys], tile), alpha=p.scale_value)
            if keys.tk is not None:
                dq.baddbmm_(raw, rows.some_keys(keys.tk[:, tile.keys], tile), alpha=p.scale_value)
        if "dk" in sums:  # queries are scaled already
            dk = sums["dk"][:, tile.keys]
            dk.baddbmm_(raw2.mT, rows.some_rows(queries.q, tile))
            if queries.tq is not None:
                dk.baddbmm_(raw.mT, rows.some_rows(queries.tq, tile))


def _sink(p: AttentionProblem, rows: Rows, queries: Queries, given: Arriving) -> torch.Tensor:
    """A run's share of the derivative of the sinks' gradient, (heads_q,)."""
    assert queries.sink is not None
    prob = (queries.sink - given.lse).exp()
    bend = -given.mean if queries.tsink is None else queries.tsink - given.mean
    each = rows.by_head(-prob * (bend * given.delta + given.tdelta)).sum((0, 2, 3))
    total = torch.zeros(p.heads_q, dtype=torch.float64, device="cpu")
    total[rows.strip.heads_q] = each.double()
    return total


def _sink_of_rows(p: AttentionProblem, tensors: Tensors, sinks: torch.Tensor) -> torch.Tensor:
    """The share of rows outside of the region, whose softmax is the sink's alone."""
    from flashtile.kernels.cpu.region import region_of

    given, region = tensors["tdlse"].double(), region_of(p)
    outside = given.sum((0, 2)) - given[:, :, region.row_slice].sum((0, 2))
    return sinks + torch.where(tensors["sink"] == -torch.inf, 0.0, outside)
