"""Online softmax over the rows of a query tile (Milakov and Gimelshein, arXiv 1805.02867), in base 2."""

from __future__ import annotations

from typing import NamedTuple

from flashtile.kernels.device.dropout import dropped
from flashtile.kernels.device.exponential import LN2, LOG2E, exp
from flashtile.kernels.device.product import add_product, free_parts
from flashtile.kernels.device.score import bent, unit
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


@jit
def empty_rows(ROWS: tl.constexpr, COLUMNS: tl.constexpr, T: tl.constexpr):
    WIDE = tl.float64 if T.wide else tl.float32
    return Rows(
        tl.zeros([ROWS, COLUMNS], WIDE),
        tl.full([ROWS], float("-inf"), WIDE),
        tl.zeros([ROWS], WIDE),
    )


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
        p = exp(score - pivot[:, None], T)
    else:
        decay = tl.exp2(rows.top - pivot)
        p = tl.exp2(score * factor - pivot[:, None])
    total = rows.total * decay + tl.sum(p, 1)
    p = dropped(p, survives, seed, T)
    if LIFT != 1.0:
        p = p * LIFT
    acc = add_product(rows.acc * decay[:, None], free_parts(p, v.dtype, T), free_parts(v, v.dtype, T), T)
    return Rows(acc, top, total)


@jit
def scored(rows, T: tl.constexpr):
    """The state, whose maximum is a score."""
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
def finish(rows, T: tl.constexpr):
    """(out tile, lse in natural units) of a state, as `scored`; a row that saw nothing gives 0 and -inf."""
    total = tl.where(rows.total == 0.0, 1.0, rows.total)
    if T.wide:
        out = rows.acc / total[:, None]
        lse = rows.top + tl.log(total)
    else:
        if T.exact:  # a plain division may be two units off
            out = tl.div_rn(rows.acc, total[:, None])
        else:
            out = rows.acc / total[:, None]
        lse = rows.top + tl.log2(total) * LN2
    return out, lse
