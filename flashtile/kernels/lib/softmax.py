"""Online softmax over the rows of a query tile (Milakov and Gimelshein, arXiv 1805.02867), in base 2."""

from __future__ import annotations

from typing import NamedTuple

from flashtile._triton import jit, tl
from flashtile.kernels.lib.score import LOG2E


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
def fold(rows, score, v, factor, GUARD: tl.constexpr, PRECISION: tl.constexpr):
    """The state after a tile of scores; `factor` turns scores into base-2 logits and must be positive.

    GUARD keeps a row without any visible score finite; plain unmasked tiles need none.
    """
    top = tl.maximum(rows.top, tl.max(score, 1))
    pivot = top * factor
    if GUARD:
        pivot = tl.where(top == float("-inf"), 0.0, pivot)
    decay = tl.exp2(rows.top * factor - pivot)
    p = tl.exp2(score * factor - pivot[:, None])
    total = rows.total * decay + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, rows.acc * decay[:, None], input_precision=PRECISION)
    return Rows(acc, top, total)


@jit
def finish(rows, factor):
    """(out tile in float32, lse in natural units); a row that saw nothing gives 0 and -inf."""
    total = tl.where(rows.total == 0.0, 1.0, rows.total)
    return rows.acc / total[:, None], (rows.top * factor + tl.log2(total)) / LOG2E
