"""Philox4x32-7 (Salmon, Moraes, Dror, Shaw, SC 2011), on the device: the same bits as `kernels/ops/host.py` computes."""

from __future__ import annotations

from flashtile.problem import dropout
from flashtile.triton_glue.language import constexpr, jit, tl

ROUNDS = constexpr(dropout.ROUNDS)


@jit
def keep_elements(seed, row, first, branch, threshold, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Which elements of a tile survive a dropout that drops a word below `threshold` = p * 2^32.

    Element (r, c) takes word c % 4 of the counter (c // 4, r, branch, 0). row is (ROWS,), first the first column, a
    multiple of 4. Four columns share a counter, and lie in one thread, so that nothing is exchanged.
    """
    group = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    rest = tl.zeros([ROWS, BLOCK // 4], tl.uint32)
    c0 = rest + group[None, :]
    c1 = rest + row.to(tl.uint32)[:, None]
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, rest + branch, rest, ROUNDS)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [ROWS, BLOCK])
    return words.to(tl.int64) >= threshold
