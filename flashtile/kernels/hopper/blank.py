"""Rows of shared memory that nothing may depend on: 0 times NaN is NaN."""

from flashtile.kernels.hopper.gluon import gl, gluon


@gluon.jit
def blank_rows(tile, first, end):
    """Zero the rows of a tile outside first <= row < end, in place. Fence before the matrix unit reads it.

    Several warpgroups may do the same to a tile: whoever reads it meanwhile finds what will stand there.
    """
    ROWS: gl.constexpr = tile.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])  # pyright: ignore[reportAssignmentType]
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    tile.store(gl.where(((row >= first) & (row < end))[:, None], tile.load(LAYOUT), 0.0))
