"""Rows of shared memory that nothing may depend on: 0 times NaN is NaN."""

from flashtile.kernels.device.grid import Sizes
from flashtile.kernels.device.mask import seen
from flashtile.kernels.device.score import locate
from flashtile.kernels.sm90.device.parts import part_at
from flashtile.triton_glue.gluon import fence_async_shared, gl, gluon, recast, zeros_of


@gluon.jit
def blank_rows(tile, first, end):
    """Zero the rows of a tile outside first <= row < end, in place. Fence before the matrix unit reads it.

    Several warpgroups may do the same to a tile: whoever reads it meanwhile finds what will stand there.
    """
    ROWS: gl.constexpr = tile.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])  # pyright: ignore[reportAssignmentType]
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    tile.store(gl.where(((row >= first) & (row < end))[:, None], tile.load(LAYOUT), 0.0))


@gluon.jit
def blank_strips(tile, first, end, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """As `blank_rows`, by a single warp, which has few registers: two elements at a time, and few."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [1, 1], [1, 0])  # pyright: ignore[reportAssignmentType]
    words = in_pairs(tile, ROWS, COLUMNS)
    for start in gl.static_range(0, ROWS, 8):
        if (start < first) | (start + 8 > end):
            row = start + gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
            blank_strip(words.slice(start, 8), (row >= first) & (row < end), LAYOUT)


@gluon.jit
def blank_blind(tile, levels, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """As `blank_strips`, of queries that see nothing: their level is infinite."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [1, 1], [1, 0])  # pyright: ignore[reportAssignmentType]
    words = in_pairs(tile, ROWS, COLUMNS)
    for start in gl.static_range(0, ROWS, 8):
        level = gl.abs(levels.slice(start, 8).load(gl.SliceLayout(1, LAYOUT)))
        if gl.max(level, 0) == float("inf"):
            blank_strip(words.slice(start, 8), level < float("inf"), LAYOUT)


@gluon.jit
def in_pairs(tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """A tile of 16-bit elements as 32-bit words: swizzling moves 16 bytes at a time, so both lie alike."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS // 2], gl.int32)
    return recast(tile, gl.int32, [ROWS, COLUMNS // 2], SHARED)


@gluon.jit
def blank_strip(words, keep, LAYOUT: gl.constexpr):
    """Zero the rows of a strip that are not to be kept."""
    WIDTH: gl.constexpr = words.shape[1]
    for column in gl.static_range(0, WIDTH, 32):
        part = words.slice(column, 32, 1)
        part.store(gl.where(keep[:, None], part.load(LAYOUT), 0))


@gluon.jit
def blank_unseen(tiles, channel, use, tile, size, COLUMNS: gl.constexpr, PARTS: gl.constexpr, T: gl.constexpr):
    """Zero the rows of a channel's tile, keys or values, that no query sees, unless T.mask.asks.

    Such keys lie in the first and the last tile of a walk, and in no other.
    """
    BLOCK_K: gl.constexpr = T.block_k
    first, end, start = 0, size.seqlen_k, tile * BLOCK_K
    if T.mask.left:
        first = size.seqlen_k - size.seqlen_q - size.left
    if T.mask.right:
        end = gl.minimum(size.seqlen_k, size.seqlen_k + size.right)
    if (start < first) | (start + BLOCK_K > end):
        channel.wait(use)
        for part in gl.static_range(PARTS):
            rows = part_at(tiles, channel.at(use), part, PARTS).reshape([BLOCK_K, COLUMNS])
            blank_rows(rows, first - start, end - start)
        fence_async_shared()


@gluon.jit
def blank_hidden(tiles, channel, use, tile, at, size, mask_args, GROUP: gl.constexpr, COLUMNS: gl.constexpr,
                 PARTS: gl.constexpr, T: gl.constexpr, MASK: gl.constexpr):  # fmt: skip
    """Zero the rows of a channel's tile, keys or values, that no query of the block sees, if any there is not finite.

    Which they are is known by asking the mask for all queries of the block: so it is asked only where it matters, a few
    keys at a time, for the accumulators are in the registers.
    """
    BLOCK_K: gl.constexpr = T.block_k
    STRIP: gl.constexpr = 16  # pyright: ignore[reportAssignmentType]
    QUERIES: gl.constexpr = 128 if T.groups == 2 else 256  # pyright: ignore[reportAssignmentType]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])  # pyright: ignore[reportAssignmentType]
    SCORES: gl.constexpr = gl.BlockedLayout([1, STRIP], [32, 1], [4, 1], [1, 0])  # pyright: ignore[reportAssignmentType]
    channel.wait(use)
    zeros = gl.zeros([STRIP, COLUMNS], tiles.dtype, LAYOUT)  # pyright: ignore[reportCallIssue]
    for part in gl.static_range(PARTS):
        v = part_at(tiles, channel.at(use), part, PARTS).reshape([BLOCK_K, COLUMNS])
        for first in gl.static_range(0, BLOCK_K, STRIP):
            zeros = zeros_of(v.slice(first, STRIP).load(LAYOUT), zeros)
    if gl.max(gl.max(zeros.to(gl.int16, bitcast=True) & 0x7FFF, 1), 0) > 0:  # NaN
        sizes = Sizes(size.seqlen_q, size.seqlen_k, size.heads, size.group)
        places = Sizes(gl.maximum(size.seqlen_q, 1), gl.maximum(size.seqlen_k, 1), size.heads, size.group)  # tensors have some
        row = at.row - GROUP * T.rows + gl.arange(0, QUERIES, gl.SliceLayout(1, SCORES))[:, None]
        for first in gl.static_range(0, BLOCK_K, STRIP):
            key = tile * BLOCK_K + first + gl.arange(0, STRIP, gl.SliceLayout(0, SCORES))[None, :]
            position = locate(at.item.batch, at.head, row, key, places)
            keep = seen(position, row, key, sizes, (size.left, size.right, mask_args), True, T, MASK)
            keep = (keep & (row < at.row + (T.groups - GROUP) * T.rows)).to(gl.int32)
            wanted = gl.convert_layout(gl.max(keep, 0), gl.SliceLayout(1, LAYOUT))[:, None] > 0
            for part in gl.static_range(PARTS):
                strip = part_at(tiles, channel.at(use), part, PARTS).reshape([BLOCK_K, COLUMNS]).slice(first, STRIP)
                strip.store(gl.where(wanted, strip.load(LAYOUT), 0.0))
    fence_async_shared()
