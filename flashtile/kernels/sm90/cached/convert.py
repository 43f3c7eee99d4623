"""fp16 of tiles of 8 bits: the matrix unit multiplies nothing else of a cache with queries of 16 bits.

Who multiplies converts, or who loads does, a warpgroup then. A third role would cost the registers of another warpgroup: two
blocks of two warpgroups with 128 for each thread fill a multiprocessor.
"""

from flashtile.kernels.device.stored import widened
from flashtile.kernels.device.stream import await_stream
from flashtile.kernels.sm90.cached.producer import boxes_of, fill_both, load_tile, look_up_tile
from flashtile.kernels.sm90.cached.seat import seat_of
from flashtile.kernels.sm90.device.parts import first_parts
from flashtile.triton_glue.gluon import fence_async_shared, gl, gluon, recast

COLUMNS = gl.constexpr(64)  # of a swizzle of 16 bits
EDGE_ROWS = gl.constexpr(16)  # that are converted at a time where some may be NaN: registers


@gluon.jit
def load_and_convert(k_desc, v_desc, table_ptr, table_strides, lengths, mem, sizes, T: gl.constexpr):
    """Role: bring every key tile of a block, and its values, a ring ahead, and convert them. Pages are looked up before a tile
    is converted, behind which they are asked for.
    """
    AHEAD: gl.constexpr = T.pipeline.stages * T.block_k
    await_stream(False)
    seat = seat_of(gl.program_id(0), lengths, sizes, T)
    use = gl.to_tensor(0)
    for start in range(seat.first, gl.minimum(seat.end, seat.first + AHEAD), T.block_k):
        load_tile(k_desc, v_desc, table_ptr, table_strides, mem, use, start, seat, T)
        use += 1
    use = gl.to_tensor(0)
    for start in range(seat.first, seat.end, T.block_k):
        known = look_up_tile(table_ptr, table_strides, start + AHEAD, seat, T)
        pages, rows = boxes_of(start + AHEAD, known, seat, k_desc.shape[0], T)
        hand_on(mem.k, mem.loaded_k, mem.wide_k, mem.keys, use, start, seat, T.parts_k, T)
        hand_on(mem.v, mem.loaded_v, mem.wide_v, mem.values, use, start, seat, T.parts_v, T)
        if start + AHEAD < seat.end:
            fill_both(k_desc, v_desc, mem, use + T.pipeline.stages, pages, rows, seat, T)
        use += 1


@gluon.jit
def hand_on(tiles, loaded, wide, channel, use, start, seat, PARTS: gl.constexpr, T: gl.constexpr):
    """A tile that was loaded, as one of the ring `wide`."""
    loaded.wait(use)
    channel.claim(use)
    convert_tile(tiles, loaded.at(use), wide, channel.at(use), start, seat, PARTS, T.block_k, T)
    loaded.release(use)
    channel.hand_over(use)


@gluon.jit
def convert_tile(
    tiles, place, wide, wide_place, start, seat, PARTS: gl.constexpr, ROWS: gl.constexpr, T: gl.constexpr
):  # fmt: skip
    """The ring's tile of bytes at a place as the one of `wide` at another, of keys from `start` on, ROWS at a time; zeros
    for rows that no query sees, which may be NaN.
    """
    BLOCK_K: gl.constexpr = T.block_k
    WIDTH: gl.constexpr = PARTS * COLUMNS
    BYTES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, WIDTH], tiles.dtype)
    narrow = recast(tiles, tiles.dtype, [T.pipeline.stages, BLOCK_K, WIDTH], BYTES).index(place)
    whole = first_parts(wide, wide_place, BLOCK_K, COLUMNS, PARTS)
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
