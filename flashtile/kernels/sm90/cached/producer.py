"""The loading role over a cache: key and value tiles by the copy engine, a box for each page or for a whole tile."""

from flashtile.kernels.device.stream import await_stream
from flashtile.kernels.sm90.cached.seat import LANES, STRIP, first_key, seat_of, whose
from flashtile.triton_glue.gluon import gl, gluon, lane, of_lane, tma_load


@gluon.jit
def load(k_desc, v_desc, table_ptr, table_strides, lengths, mem, sizes, T: gl.constexpr):
    """Role: bring every key tile of a block, and its values, into shared memory.

    Where the first key does not depend on lengths, its pages are looked up while these are.
    """
    await_stream(False)
    number = gl.program_id(0)
    known = gl.to_tensor(0), gl.to_tensor(-LANES)  # nothing yet
    if T.table and not T.mask.left and T.whole == 0:
        item, _, share = whose(number, sizes, T)
        known = look_up(table_ptr, table_strides, item, first_key(share, T) // T.page, sizes.capacity // T.page - 1)
    seat = seat_of(number, lengths, sizes, T)
    use = gl.to_tensor(0)
    for start in range(seat.first, seat.end, T.block_k):
        if T.table:
            first, last = pages_of(start, seat, T)
            if last - known[1] >= LANES:
                known = look_up(table_ptr, table_strides, seat.item, first, (seat.seen_to - 1) // T.page)
        pages, rows = boxes_of(start, known, seat, k_desc.shape[0], T)
        fill_both(k_desc, v_desc, mem, use, pages, rows, seat, T)
        use += 1


@gluon.jit
def load_tile(k_desc, v_desc, table_ptr, table_strides, mem, use, start, seat, T: gl.constexpr):
    """Bring the key tile at `start`, and its values, once their places are free."""
    known = look_up_tile(table_ptr, table_strides, start, seat, T)
    pages, rows = boxes_of(start, known, seat, k_desc.shape[0], T)
    fill_both(k_desc, v_desc, mem, use, pages, rows, seat, T)


@gluon.jit
def fill_both(k_desc, v_desc, mem, use, pages, rows, seat, T: gl.constexpr):
    """The same, of these boxes."""
    fill(k_desc, mem.k, mem.loaded_k, use, pages, rows, seat.head, T.copied_k, T, T.first_copied_k)
    fill(v_desc, mem.v, mem.loaded_v, use, pages, rows, seat.head, T.copied_v, T)


@gluon.jit
def look_up(table_ptr, table_strides, item, first, last):
    """(a page of an item for each lane of a warp, from its page `first` on, none behind `last`; `first`)."""
    at = item.to(gl.int64) * table_strides[0] + gl.minimum(first + lane(), last).to(gl.int64) * table_strides[1]
    return gl.load(table_ptr + at), first


@gluon.jit
def look_up_tile(table_ptr, table_strides, start, seat, T: gl.constexpr):
    """The same of the key tile at `start`, where there is a table."""
    if T.table:
        first, last = pages_of(start, seat, T)
        return look_up(table_ptr, table_strides, seat.item, first, last)
    else:
        return start, start


@gluon.jit
def pages_of(start, seat, T: gl.constexpr):
    """Which of the item's pages are the first and the last that a query sees of the key tile at `start`."""
    first = gl.minimum(gl.maximum(start, seat.seen_from), seat.seen_to - 1)
    return first // T.page, gl.maximum(gl.minimum(start + T.block_k, seat.seen_to) - 1, first) // T.page


@gluon.jit
def boxes_of(start, known, seat, count, T: gl.constexpr):
    """(page, row) of each box of the key tile at `start`: two tuples. known: its pages, as `look_up` has them.

    A box of which no query sees a key takes the place of the nearest one that some query does: what the table has for it may
    be rubbish.
    """
    BOX: gl.constexpr = T.box
    BOXES: gl.constexpr = T.boxes
    PAGE: gl.constexpr = T.page
    pages, rows = (), ()
    for box in gl.static_range(BOXES):
        key = start + box * BOX
        if T.table:
            key = gl.minimum(gl.maximum(key, seat.seen_from // BOX * BOX), (seat.seen_to - 1) // BOX * BOX)
            page = gl.minimum(gl.maximum(of_lane(known[0], key // PAGE - known[1]), 0), count - 1)
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
