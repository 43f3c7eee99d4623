"""Dropout in the registers of a warpgroup; `lib/dropout.py` has the portable form, `spec/dropout.py` says which bits."""

from flashtile.kernels.hopper.gluon import gl, gluon
from flashtile.kernels.hopper.layouts import matrix_layout
from flashtile.kernels.lib.dropout import philox


@gluon.jit
def kept(seed, batch_head, row, column, COLUMNS: gl.constexpr, BY_KEY: gl.constexpr):
    """Which of the 64 x COLUMNS scores from (row, column) are kept: queries by keys or, if BY_KEY, keys by queries.

    Rows and columns that differ in bit 3 alone share a counter. A thread of the matrix unit's layout holds all four.
    """
    whole = gl.zeros([64, COLUMNS], gl.float32, matrix_layout(COLUMNS))  # pyright: ignore[reportCallIssue]
    half, _ = gl.split(whole.reshape([4, 2, 8, COLUMNS // 16, 2, 8]).permute([0, 2, 3, 5, 1, 4]))
    quarter, _ = gl.split(half)
    L: gl.constexpr = quarter.type.layout
    rows = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))[:, None, None, None] * 8
    rows = rows + gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))[None, :, None, None]
    columns = gl.arange(0, COLUMNS // 16, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))[None, None, :, None] * 8
    columns = columns + gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))[None, None, None, :]
    rows, columns = (rows + row // 2).to(gl.uint32), (columns + column // 2).to(gl.uint32)
    batch_head = batch_head.to(gl.uint32)
    if BY_KEY:
        a, b, c, d = philox(columns, rows, batch_head, seed[2], seed[0], seed[1])
        words = gl.join(gl.join(a, b), gl.join(c, d))
    else:
        a, b, c, d = philox(rows, columns, batch_head, seed[2], seed[0], seed[1])
        words = gl.join(gl.join(a, c), gl.join(b, d))
    words = words.permute([0, 4, 1, 2, 5, 3]).reshape([64, COLUMNS])
    words = gl.convert_layout(words, matrix_layout(COLUMNS), assert_trivial=True)
    return words >= seed[3]
