"""The role that loads a cache of 8 bits and makes fp16 of it, which the matrix unit multiplies with queries of 16 bits.

A third role would cost a warpgroup's registers: two blocks of two warpgroups with 128 for each thread fill a multiprocessor.
"""

from flashtile.kernels.device.stored import widened
from flashtile.kernels.sm90.cached.producer import load_tile
from flashtile.kernels.sm90.device.parts import first_parts
from flashtile.triton_glue.gluon import fence_async_shared, gl, gluon, recast

COLUMNS = gl.constexpr(64)  # of a swizzle of 16 bits
ROWS = gl.constexpr(32)  # that are converted at a time: registers


@gluon.jit
def load_and_convert(k_desc, v_desc, table_ptr, table_strides, mem, seat, T: gl.constexpr):
    """Role: bring every key tile of a block, and its values, and convert them; loads are a ring ahead."""
    AHEAD: gl.constexpr = T.pipeline.stages * T.block_k
    use = gl.to_tensor(0)
    for start in range(seat.first, gl.minimum(seat.end, seat.first + AHEAD), T.block_k):
        load_tile(k_desc, v_desc, table_ptr, table_strides, mem, use, start, seat, T)
        use += 1
    use = gl.to_tensor(0)
    for start in range(seat.first, seat.end, T.block_k):
        convert_tile(mem.k, mem.loaded_k, mem.wide_k, mem.keys, use, start, seat, T.parts_k, T)
        convert_tile(mem.v, mem.loaded_v, mem.wide_v, mem.values, use, start, seat, T.parts_v, T)
        if start + AHEAD < seat.end:
            load_tile(k_desc, v_desc, table_ptr, table_strides, mem, use + T.pipeline.stages, start + AHEAD, seat, T)
        use += 1


@gluon.jit
def convert_tile(tiles, loaded, wide, channel, use, start, seat, PARTS: gl.constexpr, T: gl.constexpr):
    """A tile of bytes, of keys from `start` on, as one of the ring `wide`."""
    BLOCK_K: gl.constexpr = T.block_k
    WIDTH: gl.constexpr = PARTS * COLUMNS
    BYTES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, WIDTH], tiles.dtype)
    loaded.wait(use)
    channel.claim(use)
    narrow = recast(tiles, tiles.dtype, [T.pipeline.stages, BLOCK_K, WIDTH], BYTES).index(loaded.at(use))
    whole = first_parts(wide, channel.at(use), BLOCK_K, COLUMNS, PARTS)
    if (start >= seat.seen_from) & (start + BLOCK_K <= seat.seen_to):
        convert_rows(narrow, whole, start, seat, False, T)
    else:
        convert_rows(narrow, whole, start, seat, True, T)
    fence_async_shared()
    loaded.release(use)
    channel.hand_over(use)


@gluon.jit
def convert_rows(narrow, whole, start, seat, EDGE: gl.constexpr, T: gl.constexpr):
    """All rows of a tile; where it is at an EDGE zeros for those that no query sees, which may be NaN."""
    BLOCK_K: gl.constexpr = T.block_k
    WIDTH: gl.constexpr = narrow.shape[1]
    STORED: gl.constexpr = T.stored
    # Threads have eight neighbours: both are read and written without a conflict of banks.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])  # pyright: ignore[reportAssignmentType]
    for first in gl.static_range(0, BLOCK_K, ROWS):
        x = narrow.slice(first, ROWS).load(LAYOUT)
        if EDGE:
            key = start + first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
            x = gl.where(((key >= seat.seen_from) & (key < seat.seen_to))[:, None], x, 0)
        whole.slice(first, ROWS).store(widened(x, gl.float16, STORED, True))
