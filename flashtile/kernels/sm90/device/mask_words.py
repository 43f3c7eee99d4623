"""Which scores of a tile are to be kept, as words of bits for `gluon.select_bits`.

A thread's columns of a row are 8 j + k and an offset of its own: 8 j + k has bit 2 j + k.
"""

from flashtile.kernels.sm90.device.layouts import matrix_layout
from flashtile.triton_glue.gluon import gl, gluon, stay


@gluon.jit
def parts_of(COLUMNS: gl.constexpr):
    """Zeros of a tile: [64 rows, COLUMNS / 8 groups of eight columns, 4 offsets, 2 neighbours]."""
    return gl.zeros([64, COLUMNS], gl.int32, matrix_layout(COLUMNS)).reshape([64, COLUMNS // 8, 4, 2])  # pyright: ignore[reportCallIssue]


@gluon.jit
def numbers_of(COLUMNS: gl.constexpr):
    """(row, 8 j, offset, k) of a tile's scores, each along its axis of `parts_of`."""
    L: gl.constexpr = parts_of(COLUMNS).type.layout
    row = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))[:, None, None, None]
    eight = gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))[None, :, None, None] * 8
    offset = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))[None, None, :, None] * 2
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))[None, None, None, :]
    return row, eight, offset, pair


@gluon.jit
def whole(parts, COLUMNS: gl.constexpr):
    """Parts of a tile as the tile."""
    return gl.convert_layout(parts.reshape([64, COLUMNS]), matrix_layout(COLUMNS), assert_trivial=True)


@gluon.jit
def of_tile(words, COLUMNS: gl.constexpr):
    """Words of rows and offsets, one for each of a tile's scores."""
    words, _ = gl.broadcast(words, parts_of(COLUMNS))
    return whole(words, COLUMNS)


@gluon.jit
def lane_bits(keep, COLUMNS: gl.constexpr):
    """Words of the booleans of a tile of COLUMNS, one for each row and offset: [64, 4].

    ptxas would make such words of what it keeps until scores are there, too, but take them apart again, for a second selection
    of every score.
    """
    zeros = parts_of(COLUMNS)
    _, eight, _, pair = numbers_of(COLUMNS)
    bits = gl.where((whole(zeros, COLUMNS) + keep).reshape(zeros.shape) != 0, 1 << (eight // 4 + pair), zeros)
    return stay(gl.reduce(gl.reduce(bits, 3, either), 1, either))


@gluon.jit
def of_lanes(lanes, COLUMNS: gl.constexpr):
    """What `lane_bits` returned, one for each score of a tile of COLUMNS, which may be another one."""
    L: gl.constexpr = parts_of(COLUMNS).type.layout
    lanes = gl.convert_layout(lanes, gl.SliceLayout(1, gl.SliceLayout(3, L)), assert_trivial=True)
    return of_tile(lanes[:, None, :, None], COLUMNS)


@gluon.jit
def either(a, b):
    return a | b


@gluon.jit
def columns_below(bound):
    """How many of the columns 8 j + k, k of 0 and 1, are below a bound; 0 or less where none is."""
    return (bound >> 3) * 2 + gl.minimum(bound & 7, 2)
