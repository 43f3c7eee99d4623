"""The loading role over a cache: key and value tiles by the copy engine, a box for each page or for a whole tile."""

from flashtile.triton_glue.gluon import gl, gluon, tma_load

STRIP = gl.constexpr(64)  # columns that one box of the copy engine has: 128 bytes, a swizzle


@gluon.jit
def load(k_desc, v_desc, table_ptr, table_strides, mem, seat, T: gl.constexpr):
    """Role: bring every key tile of a block, and its values, into shared memory."""
    use = gl.to_tensor(0)
    for start in range(seat.first, seat.end, T.block_k):
        load_tile(k_desc, v_desc, table_ptr, table_strides, mem, use, start, seat, T)
        use += 1


@gluon.jit
def load_tile(k_desc, v_desc, table_ptr, table_strides, mem, use, start, seat, T: gl.constexpr):
    """Bring the key tile at `start`, and its values, once their places are free."""
    pages, rows = boxes_of(start, table_ptr, table_strides, seat, k_desc.shape[0], T)
    fill_both(k_desc, v_desc, mem, use, pages, rows, seat, T)


@gluon.jit
def fill_both(k_desc, v_desc, mem, use, pages, rows, seat, T: gl.constexpr):
    """The same, of these boxes."""
    PIECES: gl.constexpr = T.pieces
    fill(k_desc, mem.k, mem.loaded_k, use, pages, rows, seat.head, T.copied_k, T, T.first_copied_k)
    if PIECES > 1:
        for piece in gl.static_range(PIECES):
            fill(v_desc, mem.v, mem.loaded_v, use * PIECES + piece, pages, rows, seat.head, T.piece_v, T, piece * T.piece_v)
    else:
        fill(v_desc, mem.v, mem.loaded_v, use, pages, rows, seat.head, T.copied_v, T)


@gluon.jit
def boxes_of(start, table_ptr, table_strides, seat, count, T: gl.constexpr):
    """(page, row) of each box of the key tile at `start`: two tuples.

    The table is read for keys that some query sees, and for no others: a box without any takes the nearest one's place.
    """
    BOX: gl.constexpr = T.box
    BOXES: gl.constexpr = T.boxes
    PAGE: gl.constexpr = T.page
    pages, rows = (), ()
    for box in gl.static_range(BOXES):
        key = start + box * BOX
        if T.table:
            key = gl.minimum(gl.maximum(key, seat.seen_from // BOX * BOX), (seat.seen_to - 1) // BOX * BOX)
            at = seat.item.to(gl.int64) * table_strides[0] + (key // PAGE).to(gl.int64) * table_strides[1]
            page = gl.minimum(gl.maximum(gl.load(table_ptr + at), 0), count - 1)
            row = key % PAGE
        else:
            page, row = seat.item, seat.row + key
        pages, rows = pages + (page,), rows + (row,)  # noqa: RUF005
    return pages, rows


@gluon.jit
def fill(desc, tiles, channel, use, pages, rows, head, PARTS: gl.constexpr, T: gl.constexpr, FIRST: gl.constexpr = 0):
    """Load PARTS strips of a tile, from the strip FIRST on, into their place in the ring."""
    BOXES: gl.constexpr = T.boxes
    bar = channel.acquire(use, desc.block_type.nbytes * PARTS * BOXES)
    for box in gl.static_range(BOXES):
        for part in gl.static_range(PARTS):  # a row's strips stand side by side in memory: they are asked for together
            place = (channel.at(use) * PARTS + part) * BOXES + box
            tma_load(desc, [pages[box], head, rows[box], (FIRST + part) * STRIP], bar, tiles.index(place))
