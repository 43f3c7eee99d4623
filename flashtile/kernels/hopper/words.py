"""Which scores of a tile are to be kept, as words of bits for `gluon.select_bits`.

A thread's columns of a row are 8 j + k and an offset of its own: 8 j + k has bit 2 j + k.
"""

from flashtile.kernels.hopper.gluon import gl, gluon, stay
from flashtile.kernels.hopper.layouts import matrix_layout


@gluon.jit
def rows_and_offsets(COLUMNS: gl.constexpr):
    """Numbers of a tile's 64 rows and the threads' offsets, [64, COLUMNS / 8, 4, 2] or 1 in the place of each but one's."""
    parts = gl.zeros([64, COLUMNS], gl.int32, matrix_layout(COLUMNS)).reshape([64, COLUMNS // 8, 4, 2])  # pyright: ignore[reportCallIssue]
    L: gl.constexpr = parts.type.layout
    row = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))[:, None, None, None]
    offset = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))[None, None, :, None] * 2
    return row, offset


@gluon.jit
def of_tile(words, COLUMNS: gl.constexpr):
    """Words of rows and offsets, one for each of a tile's scores."""
    parts = gl.zeros([64, COLUMNS], gl.int32, matrix_layout(COLUMNS)).reshape([64, COLUMNS // 8, 4, 2])  # pyright: ignore[reportCallIssue]
    words, _ = gl.broadcast(words, parts)
    return gl.convert_layout(words.reshape([64, COLUMNS]), matrix_layout(COLUMNS), assert_trivial=True)


@gluon.jit
def lane_bits(keep, COLUMNS: gl.constexpr):
    """Words of the booleans of a tile of COLUMNS, one for each row and offset: [64, 4].

    ptxas would make such words of what it keeps until scores are there, too, but take them apart again, for a second selection
    of every score.
    """
    whole = gl.zeros([64, COLUMNS], gl.int32, matrix_layout(COLUMNS))  # pyright: ignore[reportCallIssue]
    parts = whole.reshape([64, COLUMNS // 8, 4, 2])
    L: gl.constexpr = parts.type.layout
    eight = gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))[None, :, None, None]
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))[None, None, None, :]
    bits = gl.where((whole + keep).reshape([64, COLUMNS // 8, 4, 2]) != 0, 1 << (eight * 2 + pair), parts)
    return stay(gl.reduce(gl.reduce(bits, 3, either), 1, either))


@gluon.jit
def of_lanes(lanes, COLUMNS: gl.constexpr):
    """What `lane_bits` returned, one for each score of a tile of COLUMNS, which may be another one."""
    parts = gl.zeros([64, COLUMNS], gl.int32, matrix_layout(COLUMNS)).reshape([64, COLUMNS // 8, 4, 2])  # pyright: ignore[reportCallIssue]
    lanes = gl.convert_layout(lanes, gl.SliceLayout(1, gl.SliceLayout(3, parts.type.layout)), assert_trivial=True)
    return of_tile(lanes[:, None, :, None], COLUMNS)


@gluon.jit
def either(a, b):
    return a | b


@gluon.jit
def columns_below(bound):
    """How many of the columns 8 j + k, k of 0 and 1, are below a bound; 0 or less where none is."""
    return (bound >> 3) * 2 + gl.minimum(bound & 7, 2)
