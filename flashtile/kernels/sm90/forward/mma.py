"""Products of a warpgroup with tiles of shared memory, whose head dims are rows of parts, and accumulators of them."""

from flashtile.kernels.sm90.device.halves import half_of
from flashtile.kernels.sm90.device.layouts import matrix_layout, operand_layout, row_layout
from flashtile.kernels.sm90.device.parts import first_parts, part_at
from flashtile.kernels.sm90.device.scores import across
from flashtile.triton_glue.gluon import gl, gluon, scale_unless_one, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def multiply_parts(start, left, right, ADDS: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, COLUMNS: gl.constexpr,
                   PARTS: gl.constexpr, HALF: gl.constexpr = 0):  # fmt: skip
    """Rows times rows, or a HALF of these, under way, onto `start` if ADDS; of three parts two are summed over in one product.

    left, right: (tiles, place).
    """
    a, b = first_parts(*left, ROWS, COLUMNS, PARTS), half_of(first_parts(*right, KEYS, COLUMNS, PARTS), HALF)
    score = warpgroup_mma(a, b.permute((1, 0)), start, use_acc=ADDS, is_async=True)
    if PARTS == 3:
        a, b = part_at(*left, 2, PARTS).reshape([ROWS, COLUMNS]), part_at(*right, 2, PARTS).reshape([KEYS, COLUMNS])
        score = warpgroup_mma(a, half_of(b, HALF).permute((1, 0)), score, is_async=True)
    return score


@gluon.jit
def add_parts(acc, weights, tiles, place, KEYS: gl.constexpr, COLUMNS: gl.constexpr, PARTS: gl.constexpr,
              HALF: gl.constexpr = 0):  # fmt: skip
    """Accumulators plus weights times the parts of the tile at a place, or of a HALF of its rows, under way."""
    wide = add_columns(acc[0], weights, first_parts(tiles, place, KEYS, COLUMNS, PARTS), HALF)
    if PARTS == 3:
        return wide, add_columns(acc[1], weights, part_at(tiles, place, 2, PARTS).reshape([KEYS, COLUMNS]), HALF)
    else:
        return (wide,)


@gluon.jit
def add_columns(acc, weights, tile, HALF: gl.constexpr):
    """An accumulator plus weights times a tile, under way."""
    COLUMNS: gl.constexpr = tile.shape[1]
    weights = gl.convert_layout(weights, operand_layout(COLUMNS))
    return warpgroup_mma(weights, half_of(tile, HALF), acc, is_async=True)


@gluon.jit
def settle(acc, channel, use, PIECES: gl.constexpr):
    """The accumulators, once all products are done; the tile that was multiplied is let go of."""
    done = ()
    for i in gl.static_range(PIECES):
        done = done + (warpgroup_mma_wait(0, deps=[acc[i]]),)  # noqa: RUF005
    channel.release(use)
    return done


@gluon.jit
def scaled(acc, decay, T: gl.constexpr):
    """The accumulators times a number of each row, mostly 1 where T.softmax.watches, for each of its lanes: then a jump."""
    PIECES: gl.constexpr = T.pieces
    result = ()
    for i in gl.static_range(PIECES):
        result = result + (scaled_columns(acc[i], decay, T),)  # noqa: RUF005
    return result


@gluon.jit
def scaled_columns(acc, decay, T: gl.constexpr):
    COLUMNS: gl.constexpr = acc.shape[1]
    if T.softmax.watches:
        return scale_unless_one(acc, across(decay, COLUMNS), COLUMNS)
    else:
        return acc * gl.convert_layout(decay, row_layout(COLUMNS))[:, None]


@gluon.jit
def empty(ROWS: gl.constexpr, COLUMNS: gl.constexpr, PARTS: gl.constexpr):
    """Accumulators of nothing."""
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, matrix_layout(COLUMNS))  # pyright: ignore[reportCallIssue]
    if PARTS == 3:
        WIDE: gl.constexpr = 2 * COLUMNS
        return gl.zeros([ROWS, WIDE], gl.float32, matrix_layout(WIDE)), acc  # pyright: ignore[reportCallIssue]
    elif PARTS == 2:
        return acc, gl.zeros([ROWS, COLUMNS], gl.float32, matrix_layout(COLUMNS))  # pyright: ignore[reportCallIssue]
    else:
        return (acc,)
