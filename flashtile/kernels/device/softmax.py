"""Online softmax over the rows of a query tile (Milakov and Gimelshein, arXiv 1805.02867), in base 2."""

from __future__ import annotations

from typing import NamedTuple

from flashtile.kernels.device.dropout import dropped
from flashtile.kernels.device.exponential import FAR, LN2, LOG2E, exp, finite
from flashtile.kernels.device.product import add_product, free_parts
from flashtile.kernels.device.score import bent, unit
from flashtile.kernels.device.stored import as_e4m3
from flashtile.triton_glue.language import jit, tl


class Rows(NamedTuple):
    """Running state of a query tile: weighted values, running maximum, running sum.

    The maximum is a score where T.modifiers.prescale, otherwise in units of the base-2 exponential, rounded: what is
    subtracted and what the next tile starts from are then one number, and where scores are large its rounding cancels between
    acc and total.
    """

    acc: tl.tensor
    top: tl.tensor
    total: tl.tensor


class WatchedRows(NamedTuple):
    """Rows of T.finds_entropy.

    depth: the running sum of p times how far its score lies below the maximum, in the units of that: at most 0.
    """

    acc: tl.tensor
    top: tl.tensor
    total: tl.tensor
    depth: tl.tensor


@jit
def empty_rows(ROWS: tl.constexpr, COLUMNS: tl.constexpr, T: tl.constexpr):
    WIDE = tl.float64 if T.wide else tl.float32
    none, top, total = tl.zeros([ROWS, COLUMNS], WIDE), tl.full([ROWS], float("-inf"), WIDE), tl.zeros([ROWS], WIDE)
    if T.finds_entropy:
        return WatchedRows(none, top, total, tl.zeros([ROWS], WIDE))
    else:
        return Rows(none, top, total)


@jit
def fold(rows, score, keep, survives, seed, v, scale, score_args, MASKED: tl.constexpr, T: tl.constexpr,
         SCORE: tl.constexpr, LIFT: tl.constexpr = 1.0):  # fmt: skip
    """The state after a tile of `logits`; keep says which exist, survives, where T.modifiers.dropout, which count for the
    values, which are added up LIFT times.

    A 16-bit problem leaves scores unscaled, so that the scale is part of the exponent's multiply-add; where
    T.modifiers.prescale is set the difference to the maximum is formed first, which costs an instruction and rounds nothing. A
    row without any visible score stays finite: its pivot is 0. Plain unmasked tiles have none. A curve rises: where nothing is
    hidden it is evaluated while the maximum is being found.
    """
    if MASKED:
        score = tl.where(keep, bent(score, scale, score_args, T, SCORE), float("-inf"))
        top = tl.max(score, 1)
    else:
        top = bent(tl.max(score, 1), scale, score_args, T, SCORE)
        score = bent(score, scale, score_args, T, SCORE)
    factor = unit(scale, score_args, T, SCORE) * LOG2E
    if not T.modifiers.prescale:
        top = top * factor
    top = tl.maximum(rows.top, top)
    pivot = top
    if MASKED or T.modifiers.prescale or T.modifiers.adds > 0:  # a modifier may add -inf
        pivot = tl.where(top == float("-inf"), 0.0, top)
    if T.modifiers.prescale:
        decay = exp(rows.top - pivot, T)
        below = score - pivot[:, None]
        p = exp(below, T)
    else:
        decay = tl.exp2(rows.top - pivot)
        below = score * factor - pivot[:, None]
        p = tl.exp2(below)
    total = rows.total * decay + tl.sum(p, 1)
    if T.finds_entropy:
        deep = p * below
        if MASKED or T.modifiers.prescale or T.modifiers.adds > 0:
            deep = tl.where(p > 0.0, deep, 0.0)
        depth = (rows.depth + rows.total * (finite(rows.top) - pivot)) * decay + tl.sum(deep, 1)
    p = dropped(p, survives, seed, T)
    if LIFT != 1.0:
        p = p * LIFT
    if T.fp8:  # a tile's sum starts from zero: Hopper's fp8 units keep 13 bits of what they add to
        return Rows(tl.fma(rows.acc, decay[:, None] + tl.zeros_like(rows.acc), tl.dot(as_e4m3(p), v)), top, total)
    acc = add_product(rows.acc * decay[:, None], free_parts(p, v.dtype, T), free_parts(v, v.dtype, T), T)
    if T.finds_entropy:
        return WatchedRows(acc, top, total, depth)
    else:
        return Rows(acc, top, total)


@jit
def entropy_of(top, total, depth, sink, T: tl.constexpr):
    """The entropy of rows whose maximum is a score, depth the sum of p (score - top); a sink, unless None, is one more key.

    A row that saw nothing has none.
    """
    if sink is not None:
        level = tl.maximum(top, sink)
        pivot = finite(level)
        decay, share = exp(top - pivot, T), exp(sink - pivot, T)
        depth = (depth + total * (finite(top) - pivot)) * decay + tl.where(share > 0.0, share * (sink - pivot), 0.0)
        total = total * decay + share
    whole = tl.where(total == 0.0, 1.0, total)
    return tl.log(whole) - depth / whole


@jit
def scored(rows, T: tl.constexpr):
    """The state, whose maximum is a score, and of what is watched no more than it."""
    if T.modifiers.prescale:
        return rows
    else:
        return Rows(rows.acc, rows.top * LN2, rows.total)


@jit
def add_sink(rows, sink, T: tl.constexpr):
    """The state, as `scored`, after one more key, whose logit is `sink` and whose value is zero."""
    top = rows.top
    level = tl.maximum(top, sink)
    pivot = tl.where(level == float("-inf"), 0.0, level)
    decay = exp(top - pivot, T)
    return Rows(rows.acc * decay[:, None], level, rows.total * decay + exp(sink - pivot, T))


@jit
def divisor(total, top, DTYPE: tl.constexpr):
    """What the values of rows are divided by that were weighted with numbers of DTYPE: `total`, the sum of the weights.

    Where the maximum `top` is FAR from 0, `total` as DTYPE holds it. A rounded maximum is taken from a product that is not, so
    that the largest weight is no longer 1 there. One key that has all the weight then gives its very value: both are rounded
    alike. Otherwise delta, which is made of out, would not be dp.
    """
    far = tl.abs(top) > FAR
    if DTYPE == tl.float16:  # which holds no larger sums
        far = far & (total < 32768.0)
    return tl.where(far, total.to(DTYPE).to(tl.float32), total)


@jit
def finish(rows, T: tl.constexpr, DTYPE: tl.constexpr = None):
    """(out tile, lse in natural units) of a state, as `scored`; a row that saw nothing gives 0 and -inf.

    DTYPE: of the weights that values had, where a backward asks what they were rounded by; None where none does.
    """
    total = tl.where(rows.total == 0.0, 1.0, rows.total)
    if T.wide:
        out = rows.acc / total[:, None]
        lse = rows.top + tl.log(total)
    else:
        if T.exact:  # a plain division may be two units off
            out = tl.div_rn(rows.acc, total[:, None])
        elif DTYPE is None:
            out = rows.acc / total[:, None]
        else:
            out = rows.acc / divisor(total, rows.top, DTYPE)[:, None]
        lse = rows.top + tl.log2(total) * LN2
    return out, lse
