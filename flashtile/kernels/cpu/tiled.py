"""Attention by tiles with an online softmax (arXiv 2307.08691), in plain torch.

Scores and sums are float32; of float32 inputs sums are formed in parts (`products.py`), and rows that see few keys are float64.
So are the products with probabilities, except where a CPU multiplies 16-bit numbers faster: then probabilities and gradients
of scores are rounded to the inputs' dtype, as in plain PyTorch, and each tile's product once more, while tiles are summed in
float32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from flashtile.kernels.cpu.distance import LEAST, LEAST_EXPONENT, Reach
from flashtile.kernels.cpu.dropout import Drop
from flashtile.kernels.cpu.modifiers import Modifiers
from flashtile.kernels.cpu.products import (
    FEW_KEYS,
    PART_OF_KEYS,
    PART_OF_ROWS,
    Scratch,
    dtypes_of_rows,
    headroom,
    lse_dtype,
    product_dtype,
    score_dtype,
)
from flashtile.kernels.cpu.region import Tile
from flashtile.kernels.cpu.strip import Rows, strips
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.dtype import DType

Tensors = dict[str, torch.Tensor]
FAR = 1024.0  # an lse, as `exponential.FAR` of kernels


def forward(p: AttentionProblem, tensors: Tensors, outputs: tuple[str, ...], first_batch: int = 0) -> Tensors:
    """The outputs out, lse and, if named, lse_low: what lse is short of, being float32.

    `first_batch` is what modifiers take the first batch entry for.
    """
    out = tensors["q"].new_zeros((p.batch, p.seqlen_q, p.heads_q, p.head_dim_v))
    lse = out.new_full((p.batch, p.heads_q, p.seqlen_q), -math.inf, dtype=lse_dtype(p))
    made, sink = {"out": out, "lse": lse}, _sink(p, tensors)
    if sink is not None:
        lse.copy_(sink[:, None])  # what rows have that see nothing
    if "lse_low" in outputs:
        made["lse_low"] = torch.zeros_like(lse)
    wide, scratch = score_dtype(p), Scratch(exact=p.dtype is DType.FP32)
    few = FEW_KEYS if p.returns_lse else _few(p)
    modifiers, drop, reach = Modifiers(p, tensors, wide), Drop(p, tensors), Reach(p, tensors, first_batch)
    for strip in strips(p, tensors, first_batch):
        k, v = strip.load(tensors["k"], wide), strip.load(tensors["v"], product_dtype(p))
        longest_k = reach.bound(k, v)
        for rows in strip.runs(few):
            q = rows.load(tensors["q"], dtypes_of_rows(p, rows.first, rows.stop)[0]).mul_(p.scale_value)
            # A product that cancels in float32 is off by more than lse may be, and among few keys one such may be the largest.
            scratch.sharp = p.returns_lse and strip.region.most_keys(rows.first, rows.stop - 1) <= FEW_KEYS
            last, most = None if sink is None else rows.per_head(sink), longest_k * reach.bound(q)
            values, sums = _attend(rows, modifiers, drop, scratch, reach, most, q, k, v, last)
            rows.of(out).copy_(rows.by_head(values))
            rounded = sums.to(lse.dtype)
            rows.of(_column(lse)).copy_(rows.by_head(rounded))
            if "lse_low" in made:
                low = torch.where(rounded.isfinite(), sums - rounded, 0.0)
                rows.of(_column(made["lse_low"])).copy_(rows.by_head(low))
    return made


def _attend(
    rows: Rows, modifiers: Modifiers, drop: Drop, scratch: Scratch, reach: Reach, most: float, q: torch.Tensor, k: torch.Tensor,
    v: torch.Tensor, sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out, float64 lse) of a run of rows: (items, group * rows, head_dim_v) and (items, group * rows, 1), like `sink`.

    No product of q and k is above `most`.
    """
    peak, tiles = q.new_full((*q.shape[:2], 1), -math.inf), reach.tiles(rows)
    sums = torch.float64 if scratch.exact and len(tiles) > 1 else q.dtype
    total, made = torch.zeros_like(peak, dtype=sums), q.new_zeros((*q.shape[:2], v.shape[2]), dtype=sums)
    shift, dtype = headroom(v.dtype, rows.strip.tiling.width), q.dtype if q.dtype is torch.float64 else v.dtype
    if sink is not None:
        peak.copy_(sink)
        total.add_(math.exp(-shift)).masked_fill_(sink == -math.inf, 0.0)
    for tile in tiles:
        if reach.misses(rows, tile, most, peak):
            continue
        s = scratch.product("scores", q, scratch.cast("k", k[:, tile.keys], q.dtype).mT)
        if modifiers.chain:
            modifiers.write(rows.by_head(s), rows.at(tile))
        rows.hide(s, tile, -math.inf)
        new_peak = torch.maximum(peak, s.amax(2, keepdim=True))
        base = _finite(new_peak)  # a row may see nothing in this tile: no -inf - -inf
        prob = _hidden_exp_(s.sub_(base + shift), rows, tile, modifiers)
        decay = (peak - base).exp_()
        total.mul_(decay).add_(prob.sum(2, keepdim=True))
        made.mul_(decay)
        if len(tiles) == 1:  # as plain PyTorch does; fewer roundings at the size of the sum
            prob.div_(_or_one(total))
        dropped = drop.mask(rows, tile)
        if dropped is not None:
            prob.masked_fill_(dropped, 0.0)
        values = scratch.cast("v", v[:, tile.keys], dtype)
        scratch.add_product(made, scratch.cast("operand", prob, dtype), rows.some_keys(values, tile), PART_OF_KEYS)
        peak = new_peak
    lse = peak.double() + total.double().log() + shift
    if drop.p is not None:
        made.mul_(drop.factor)
    return made if len(tiles) == 1 else made.div_(_or_one(total)), lse


def backward(
    p: AttentionProblem, tensors: Tensors, outputs: tuple[str, ...], first_batch: int = 0, rough_lse: bool = False,
    wide_keys: bool = False,
) -> Tensors:  # fmt: skip
    """Those of dq, dk, dv, dscore.I.J that `outputs` names. One pass over the tiles, summed in a fixed order.

    `rough_lse`: lse is rounded, and probabilities do not quite add up to 1. `wide_keys`: dk and dv are not rounded to 16 bits.
    """
    made = {f"d{n}": tensors[n].new_zeros(tensors[n].shape) for n in "qkv" if f"d{n}" in outputs}
    if wide_keys:
        made |= {name: t.to(score_dtype(p)) for name, t in made.items() if name != "dq"}
    far = p.dtype.is_narrow and _is_far(tensors["lse"])  # then a row's sum is found, not taken from lse
    product = score_dtype(p) if far else product_dtype(p)
    scratch, few = Scratch(exact=p.dtype is DType.FP32), _few(p)
    modifiers, sink, drop = Modifiers(p, tensors, score_dtype(p)), _sink(p, tensors), Drop(p, tensors)
    reach, by_rows = Reach(p, tensors, first_batch), p.dtype is DType.FP32 and _adds_rows(p)
    mean = (
        torch.zeros_like(tensors["lse"], dtype=torch.float64).transpose(1, 2).unsqueeze(3)
    )  # of a row's dp, where it is wanted
    for strip in strips(p, tensors, first_batch):
        all_k, all_v = strip.load(tensors["k"], score_dtype(p)), strip.load(tensors["v"], product)
        longest_k = reach.bound(all_k, all_v)
        narrow_k = all_k if product is score_dtype(p) else strip.load(tensors["k"], product)
        dk, dv = (
            torch.zeros_like(t, dtype=score_dtype(p)) if name in made else None for name, t in (("dk", all_k), ("dv", all_v))
        )
        for rows in strip.runs(few):
            wide, dtype = dtypes_of_rows(p, rows.first, rows.stop)
            dtype = wide if far else dtype
            tiles = list(rows.tiles())
            whole = len(tiles) == 1 and dtype is wide
            sums = p.dtype.is_narrow and dtype is wide and not whole
            given = _load(p, rows, tensors, whole, sums, sink, (wide, dtype))
            cancels = whole and "dlse" not in tensors  # in a row of one key by itself
            lone = None if cancels or not p.dtype.is_narrow or p.sink is not None else rows.lone()
            most = longest_k * reach.bound(given.scaled_q, given.dout)
            dq = torch.zeros_like(given.scaled_q) if "dq" in made else None
            total = torch.zeros_like(given.delta) if rough_lse and dq is not None and not whole else None
            rest = None
            if sums:
                given = _summed(given, *_sums(rows, modifiers, drop, scratch, reach, most, given, all_k, all_v))
            elif by_rows and dtype is wide and not whole:
                given, rest = _cancelling(given, *_sums(rows, modifiers, drop, scratch, reach, most, given, all_k, all_v))
            for tile in tiles:
                if reach.misses(rows, tile, most, given.lse):
                    continue
                keys = tile.keys
                wide_k, v = scratch.cast("k", all_k[:, keys], wide), scratch.cast("v", all_v[:, keys], dtype)
                k = wide_k if dtype is wide else narrow_k[:, keys]
                prob, saved = _probabilities(rows, tile, modifiers, scratch, given, wide_k, whole)
                dropped = drop.mask(rows, tile)
                if dv is not None:
                    weight = prob if dropped is None else prob.masked_fill(dropped, 0.0).mul_(drop.factor)
                    scratch.add_product(
                        dv[:, keys], scratch.cast("operand", weight, dtype).mT, rows.some_rows(given.dout, tile), PART_OF_ROWS
                    )
                if outputs == ("dv",):
                    continue
                dp = scratch.product("dp", given.dout, rows.some_keys(v, tile).mT)
                if dropped is not None:
                    dp.masked_fill_(dropped, 0.0).mul_(drop.factor)
                if "dsink" in outputs:
                    rows.of(mean).add_(rows.by_head((prob * dp).sum(2, keepdim=True)))
                ds = scratch.cast("ds", dp, wide).sub_(given.delta)
                if rest is not None:
                    ds.sub_(rest)
                if whole:
                    ds.sub_((prob * ds).sum(2, keepdim=True).sub_(given.dlse))
                if lone is not None:  # what changes the row's one score changes nothing but lse
                    ds = torch.where(lone, (ds * 0.0).add_(given.dlse), ds)
                ds.mul_(prob)
                if saved is not None or p.where:
                    rows.hide(ds, tile, 0.0)
                if saved is not None:
                    ds = modifiers.pull(saved, rows.by_head(ds)).reshape(ds.shape)
                ds = scratch.cast("operand", ds.mul_(p.scale_value), dtype)
                if dk is not None:
                    scratch.add_product(dk[:, keys], ds.mT, rows.some_rows(given.q, tile), PART_OF_ROWS)
                if dq is not None:
                    scratch.add_product(dq, ds, rows.some_keys(k, tile), PART_OF_KEYS)
                if total is not None:
                    total += prob.sum(2, keepdim=True)
            if dq is not None:
                if total is not None:
                    dq.div_(_or_one(total))
                rows.of(made["dq"]).copy_(rows.by_head(dq))
        if dk is not None:
            strip.of(made["dk"]).copy_(strip.by_head(dk))
        if dv is not None:
            strip.of(made["dv"]).copy_(strip.by_head(dv))
    if "dsink" in outputs:
        made["dsink"] = _sink_gradient(tensors, mean)
    return {**made, **modifiers.grads}


class BackwardRows(NamedTuple):
    """What the backward knows of a run of rows: (items, group * rows, head_dim or 1)."""

    q: torch.Tensor
    scaled_q: torch.Tensor
    dout: torch.Tensor
    lse: torch.Tensor  # 0 for -inf
    delta: torch.Tensor  # sum_d out * dout - dlse
    dlse: torch.Tensor
    sink: torch.Tensor | None


def _sums(
    rows: Rows, modifiers: Modifiers, drop: Drop, scratch: Scratch, reach: Reach, most: float, given: BackwardRows,
    k: torch.Tensor, v: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(sum of p, sum of p times its gradient) of each row, in a pass over the tiles; float64 where sums are to be exact."""
    sums = torch.float64 if scratch.exact else given.delta.dtype
    total, mean = (torch.zeros_like(given.delta, dtype=sums) for _ in range(2))
    if given.sink is not None:
        total += (given.sink - given.lse).exp_()
    for tile in rows.tiles():
        if reach.misses(rows, tile, most, given.lse):
            continue
        prob, _ = _probabilities(rows, tile, modifiers, scratch, given, k[:, tile.keys], False)
        dp = scratch.product("dp", given.dout, rows.some_keys(v[:, tile.keys], tile).mT)
        dropped = drop.mask(rows, tile)
        if dropped is not None:
            dp.masked_fill_(dropped, 0.0).mul_(drop.factor)
        total += prob.sum(2, keepdim=True, dtype=sums)
        mean += dp.mul_(prob).sum(2, keepdim=True, dtype=sums)
    return _or_one(total), mean


def _summed(given: BackwardRows, total: torch.Tensor, mean: torch.Tensor) -> BackwardRows:
    """The same with delta as `_sums` of these probabilities and their gradients make it: sum_d out * dout would bring in the
    rounding of out to 16 bits. What is `given` beside p is divided by their sum, as lse is rounded too.
    """
    dlse = given.dlse / total
    return given._replace(dout=given.dout / total, delta=(mean / total) / total - dlse, dlse=dlse)


def _cancelling(given: BackwardRows, total: torch.Tensor, mean: torch.Tensor) -> tuple[BackwardRows, torch.Tensor]:
    """(the same with delta as `_sums` make it, what its rounding takes off it): a row's gradients then add up to dlse."""
    exact = (mean - given.dlse) / total
    delta = exact.to(given.delta.dtype)
    return given._replace(delta=delta), (exact - delta).to(delta.dtype)


def _adds_rows(p: AttentionProblem) -> bool:
    """Whether a captured tensor's gradient is made of whole rows' sums, which are 0 but for dlse."""
    pairs = ((kind, tensor) for spec in p.score for kind, tensor in zip(spec.kind.captured, spec.tensors, strict=True))
    return any(kind.broadcast and tensor.grad and tensor.shape[-1] == 1 for kind, tensor in pairs)


def _few(p: AttentionProblem) -> int:
    """Rows that see at most so many keys are computed apart, in float64."""
    return FEW_KEYS if p.dtype is DType.FP32 else 0


def _is_far(lse: torch.Tensor) -> bool:
    """Whether float32 rounds some row's lse by so much that probabilities are off by more than 2^-14."""
    return bool(((lse.abs() > FAR) & lse.isfinite()).any())


def _load(
    p: AttentionProblem, rows: Rows, tensors: Tensors, whole: bool, sums: bool, sink: torch.Tensor | None,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> BackwardRows:  # fmt: skip
    """p = exp(s - lse) has the relative error that lse has in absolute terms, 2^-24 |lse| from its rounding alone.

    Where a tile holds whole rows, these are normalised anew, as plain PyTorch does. Else, unless products are narrow, the
    row's factor is mended where it costs nothing: every product with p has dout or delta beside it. `sums`: by `_summed`.
    """
    lse = rows.load(_column(tensors["lse"]), torch.float64)
    if "lse_low" in tensors:
        lse += rows.load(_column(tensors["lse_low"]), torch.float64)
    lse, (wide, dtype) = _finite(lse), dtypes
    rounded = lse.to(wide)
    dout = rows.load(tensors["dout"], wide)
    dlse = rows.load(_column(tensors["dlse"]), torch.float64) if "dlse" in tensors else torch.zeros_like(lse)
    delta = (rows.load(tensors["out"], torch.float64) * dout).sum(2, keepdim=True)
    if not whole:
        delta = delta.sub_(dlse)
    elif sink is not None:
        delta.zero_()
    delta = delta.to(wide)
    if dtype is wide and not whole and not sums:
        mend = torch.where(rounded.isfinite(), (rounded - lse).exp_(), 1.0).to(wide)
        dout *= mend
        delta *= mend
    q = rows.load(tensors["q"], wide)
    last = None if sink is None else rows.per_head(sink)
    return BackwardRows(q.to(dtype), q * p.scale_value, dout.to(dtype), rounded, delta, dlse.to(wide), last)


def _probabilities(
    rows: Rows, tile: Tile, modifiers: Modifiers, scratch: Scratch, given: BackwardRows, k: torch.Tensor, whole: bool
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """The probabilities of a tile, and what `Modifiers.pull` needs where there are modifiers."""
    s, saved = scratch.product("scores", given.scaled_q, k.mT), None
    if modifiers.adds:
        modifiers.write(rows.by_head(s), rows.at(tile))
    else:
        saved = modifiers.record(rows.by_head(s), rows.at(tile), rows.seen(tile))
        s = scratch.empty("modified", tuple(s.shape), s.dtype).copy_(saved[1].detach().reshape(s.shape))
    if whole:
        rows.hide(s, tile, -math.inf)
        peak = s.amax(2, keepdim=True)
        peak = _finite(peak if given.sink is None else torch.maximum(peak, given.sink))
        prob = _hidden_exp_(s.sub_(peak), rows, tile, modifiers)
        total = prob.sum(2, keepdim=True)
        if given.sink is not None:
            total += (given.sink - peak).exp_()
        return prob.div_(_or_one(total)), saved
    return _hidden_exp_(s.sub_(given.lse), rows, tile, modifiers), saved


def _hidden_exp_(exponents: torch.Tensor, rows: Rows, tile: Tile, modifiers: Modifiers) -> torch.Tensor:
    """exp(exponents) in place, 0 where a row does not see a key, and LEAST or 0 where it would be below LEAST.

    torch.exp (MKL) is exact to the last bit and does 5e9 elements/s, but 4e7 where it underflows, at -inf too; hence the
    detour. torch.exp2 does 2.5e9, and its argument's rounding costs a factor of 3 in accuracy (one core of a Xeon with
    AVX-512, torch 2.13.0).
    """
    prob = torch.clamp_min_(exponents, LEAST_EXPONENT).exp_()
    if modifiers.hide:
        torch.threshold_(prob, 1.01 * LEAST, 0.0)
    rows.hide(prob, tile, 0.0)
    return prob


def _sink(p: AttentionProblem, tensors: Tensors) -> torch.Tensor | None:
    """The sinks, (heads_q,), in the scores' dtype."""
    return None if p.sink is None else tensors["sink"].to(score_dtype(p))


def _sink_gradient(tensors: Tensors, mean: torch.Tensor) -> torch.Tensor:
    """The sum over batch and rows of the probability that a sink takes, times what that changes: dlse - mean.

    `mean` (batch, seqlen, heads, 1) is what a row's dp averages to; sum_d out * dout would bring in the rounding of out.
    """
    lse = tensors["lse"].double()
    if "lse_low" in tensors:
        lse += tensors["lse_low"]
    change = -mean.squeeze(3).transpose(1, 2).double()
    if "dlse" in tensors:
        change += tensors["dlse"]
    taken = (tensors["sink"].double()[:, None] - lse).exp_().masked_fill_(lse == -math.inf, 0.0)
    return (taken * change).sum((0, 2))


def _finite(rows: torch.Tensor) -> torch.Tensor:
    """A copy with 0 for -inf; NaN and +inf stay and propagate."""
    return rows.masked_fill(rows == -math.inf, 0.0)


def _or_one(total: torch.Tensor) -> torch.Tensor:
    """1 in the place of 0, so that a row that sees nothing divides nothing by it."""
    return total.masked_fill(total == 0.0, 1.0)


def _column(per_row: torch.Tensor) -> torch.Tensor:
    """A (batch, heads, seqlen) tensor seen as (batch, seqlen, heads, 1)."""
    return per_row.transpose(1, 2).unsqueeze(3)
