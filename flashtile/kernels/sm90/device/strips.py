"""A tile of shared memory as strips of its rows, for warps whose registers hold no more at a time."""

from flashtile.triton_glue.gluon import gl, gluon, recast

WIDTH = gl.constexpr(64)  # columns of a strip: 128 bytes, after which the widest swizzle begins anew


@gluon.jit
def strips(tile, ROWS: gl.constexpr):
    """A 16-bit tile's strips of ROWS rows, column after column, as a swizzled tile has them in memory; ROWS a multiple of 8."""
    COUNT: gl.constexpr = tile.shape[0] // ROWS * (tile.shape[1] // WIDTH)
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], tile.dtype)
    return recast(tile, tile.dtype, [COUNT, ROWS, WIDTH], SHARED)
