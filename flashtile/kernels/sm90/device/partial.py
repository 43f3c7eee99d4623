"""A tile of shared memory of which some rows belong to another item: what the copy engine may not write whole."""

from flashtile.kernels.device.memory import head_offset, row_offset
from flashtile.triton_glue.gluon import fence_async_shared, gl, gluon


@gluon.jit
def store_part(tile, column, ptr, strides, slab, head, row, rows, WIDTH: gl.constexpr):
    """Write a tile's first `rows` rows to rows from `row` and columns from `column` on, those below WIDTH."""
    ROWS: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])  # pyright: ignore[reportAssignmentType]
    index = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    column += gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]
    first = ptr + head_offset(slab, head, strides)
    at = first + row_offset(row + index, strides) + column * strides[3]
    gl.store(at, tile.load(LAYOUT), mask=(index < rows) & (column < WIDTH))
    fence_async_shared()
