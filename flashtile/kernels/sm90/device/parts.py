"""Where the parts of a head dim lie in a buffer of shared memory: tiles are 2^n columns wide, so 96 and 192 are three parts.

Of three parts the first two are multiplied as one tile. So those of every place in the buffer come first, side by side, and
then the third ones: the same memory holds tiles of two parts, for no view may exceed what it is a view of (Triton 3.9).
"""

from flashtile.triton_glue.gluon import abreast, gl, gluon


@gluon.jit
def part_at(tiles, place, PART: gl.constexpr, PARTS: gl.constexpr):
    """A part of the tile at a place."""
    if PARTS == 1:
        return tiles.index(place)
    elif PART == 2:
        return tiles.index(tiles.shape[0] // 3 * 2 + place)
    else:
        return tiles.index(2 * place + PART)


@gluon.jit
def first_parts(tiles, place, ROWS: gl.constexpr, COLUMNS: gl.constexpr, PARTS: gl.constexpr):
    """The tile at a place, or of its three parts the first two, as rows of all their columns."""
    if PARTS == 1:
        return tiles.index(place).reshape([ROWS, COLUMNS])
    else:
        return abreast(tiles, place, ROWS, COLUMNS)
