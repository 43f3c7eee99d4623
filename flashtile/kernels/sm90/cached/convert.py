"""fp16 of tiles of 8 bits: the matrix unit multiplies nothing else of a cache with queries of 16 bits."""

from flashtile.kernels.device.stored import widened
from flashtile.kernels.sm90.device.parts import first_parts
from flashtile.triton_glue.gluon import fence_async_shared, gl, gluon, recast

COLUMNS = gl.constexpr(64)  # of a swizzle of 16 bits
EDGE_ROWS = gl.constexpr(16)  # that are converted at a time where some may be NaN: registers


@gluon.jit
def convert_tile(tiles, place, wide, start, seat, PARTS: gl.constexpr, ROWS: gl.constexpr, T: gl.constexpr):
    """The ring's tile of bytes at a place as the tile `wide`, of keys from `start` on, ROWS at a time; zeros for rows that no
    query sees, which may be NaN.
    """
    BLOCK_K: gl.constexpr = T.block_k
    WIDTH: gl.constexpr = PARTS * COLUMNS
    BYTES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, WIDTH], tiles.dtype)
    narrow = recast(tiles, tiles.dtype, [T.pipeline.stages, BLOCK_K, WIDTH], BYTES).index(place)
    whole = first_parts(wide, 0, BLOCK_K, COLUMNS, PARTS)
    if (start >= seat.seen_from) & (start + BLOCK_K <= seat.seen_to):
        convert_rows(narrow, whole, start, seat, False, ROWS, T)
    else:
        convert_rows(narrow, whole, start, seat, True, EDGE_ROWS, T)
    fence_async_shared()


@gluon.jit
def convert_rows(narrow, whole, start, seat, EDGE: gl.constexpr, ROWS: gl.constexpr, T: gl.constexpr):
    """All rows of a tile; threads have eight neighbours: both are read and written without a conflict of banks."""
    BLOCK_K: gl.constexpr = T.block_k
    WIDTH: gl.constexpr = narrow.shape[1]
    STORED: gl.constexpr = T.stored
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])  # pyright: ignore[reportAssignmentType]
    for first in gl.static_range(0, BLOCK_K, ROWS):
        x = narrow.slice(first, ROWS).load(LAYOUT)
        if EDGE:
            key = start + first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
            x = gl.where(((key >= seat.seen_from) & (key < seat.seen_to))[:, None], x, 0)
        whole.slice(first, ROWS).store(widened(x, gl.float16, STORED, True))
