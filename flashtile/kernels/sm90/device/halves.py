"""Halves of key tiles: of the first and the last one of a walk a warpgroup may see no more."""

from flashtile.kernels.sm90.device.layouts import matrix_layout
from flashtile.triton_glue.gluon import gl, gluon

WHOLE, LOWER, UPPER = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)


@gluon.constexpr_function
def keys_of(half: int, block_k: int) -> int:
    """How many keys WHOLE, LOWER and UPPER mean."""
    return block_k // 2 if half else block_k


@gluon.jit
def part_of(tile, HALF: gl.constexpr):
    """A tile's place or, counted in halves, that of its half."""
    return tile if HALF == 0 else 2 * tile + (HALF - 1)


@gluon.jit
def half_of(rows, HALF: gl.constexpr):
    """A tile of shared memory, or half of its rows."""
    COUNT: gl.constexpr = rows.shape[0] // 2
    return rows if HALF == 0 else rows.slice((HALF - 1) * COUNT, COUNT)


@gluon.jit
def ends_in_lower_half(at, seen, size, T: gl.constexpr):
    """Whether a warpgroup's queries see the lower half at most of a walk's first tile."""
    end = size.seqlen_k
    if T.mask.right:
        end = gl.minimum(end, gl.minimum(at.row + T.rows, size.seqlen_q) + size.seqlen_k - size.seqlen_q + size.right)
    return end <= (seen.end - 1) * T.block_k + T.block_k // 2


@gluon.jit
def begins_in_upper_half(at, seen, size, T: gl.constexpr):
    """Whether a warpgroup's queries see the upper half at most of a walk's last tile, which is not its first."""
    start = at.row + size.seqlen_k - size.seqlen_q - size.left
    return (start >= seen.first * T.block_k + T.block_k // 2) & (seen.first < seen.low)


@gluon.jit
def followed_by_zeros(p):
    """The lower half of a tile of scores as a tile."""
    ROWS: gl.constexpr = p.shape[0]
    KEYS: gl.constexpr = p.shape[1]
    whole = join_halves(p, gl.zeros([ROWS, KEYS], gl.float32, matrix_layout(KEYS)))  # pyright: ignore[reportCallIssue]
    return gl.convert_layout(whole, matrix_layout(2 * KEYS), assert_trivial=True)


@gluon.jit
def split_halves(score):
    """The halves of a tile of scores."""
    ROWS: gl.constexpr = score.shape[0]
    KEYS: gl.constexpr = score.shape[1] // 2
    return gl.split(score.reshape([ROWS, 2, KEYS]).permute([0, 2, 1]))


@gluon.jit
def join_halves(low, high):
    """Halves as one tile."""
    ROWS: gl.constexpr = low.shape[0]
    KEYS: gl.constexpr = low.shape[1]
    return gl.join(low, high).permute([0, 2, 1]).reshape([ROWS, 2 * KEYS])
