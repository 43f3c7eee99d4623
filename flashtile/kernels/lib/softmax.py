"""Online softmax over the rows of a query tile (Milakov and Gimelshein, arXiv 1805.02867), in base 2."""

from __future__ import annotations

from typing import NamedTuple

from flashtile._triton import jit, tl
from flashtile.kernels.lib.exponential import LN2, LOG2E, exp
from flashtile.kernels.lib.product import add_product, free_parts


class Rows(NamedTuple):
    """Running state of a query tile: weighted values, running maximum, running sum."""

    acc: tl.tensor
    top: tl.tensor
    total: tl.tensor


@jit
def empty_rows(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return Rows(
        tl.zeros([ROWS, COLUMNS], tl.float32),
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
    )


@jit
def fold(rows, score, v, keep, scale, GUARD: tl.constexpr, T: tl.constexpr):
    """The state after a tile of scores; keep says, where T.dropout, which probabilities count for the values.

    A plain 16-bit problem leaves scores unscaled, so that the scale is part of the exponent's multiply-add; where
    T.prescale is set the difference to the maximum is formed first, which costs an instruction and rounds nothing.
    GUARD keeps a row without any visible score finite; plain unmasked tiles need none.
    """
    top = tl.maximum(rows.top, tl.max(score, 1))
    pivot = top
    if GUARD:
        pivot = tl.where(top == float("-inf"), 0.0, top)
    if T.prescale:
        decay = exp(rows.top - pivot, T)
        p = exp(score - pivot[:, None], T)
    else:
        factor = scale * LOG2E
        pivot = pivot * factor
        decay = tl.exp2(rows.top * factor - pivot)
        p = tl.exp2(score * factor - pivot[:, None])
    total = rows.total * decay + tl.sum(p, 1)
    if T.dropout:
        p = tl.where(keep, p, 0.0)
    acc = add_product(rows.acc * decay[:, None], free_parts(p, v.dtype, T), free_parts(v, v.dtype, T), T)
    return Rows(acc, top, total)


@jit
def add_sink(rows, sink, scale, T: tl.constexpr):
    """The state after one more key, whose logit is `sink` and whose value is zero; its maximum is in natural units."""
    top = rows.top if T.prescale else rows.top * scale
    level = tl.maximum(top, sink)
    pivot = tl.where(level == float("-inf"), 0.0, level)
    decay = exp(top - pivot, T)
    return Rows(rows.acc * decay[:, None], level, rows.total * decay + exp(sink - pivot, T))


@jit
def finish(rows, scale, T: tl.constexpr):
    """(out tile in float32, lse in natural units); a row that saw nothing gives 0 and -inf."""
    total = tl.where(rows.total == 0.0, 1.0, rows.total)
    top = rows.top if T.prescale else rows.top * scale
    return rows.acc / total[:, None], top + tl.log2(total) * LN2
