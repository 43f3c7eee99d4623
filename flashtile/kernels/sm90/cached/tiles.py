"""The tiles that a block over a cache multiplies: views of them, and what is done to them."""

from flashtile.kernels.sm90.cached.seat import STRIP
from flashtile.kernels.sm90.device.blank import blank_rows
from flashtile.kernels.sm90.device.parts import first_parts
from flashtile.triton_glue.gluon import abreast, fence_async_shared, gl, gluon, recast, uniform


@gluon.jit
def tile_of(tiles, place, PARTS: gl.constexpr, T: gl.constexpr):
    """A ring's tile, of all boxes and columns."""
    COUNT: gl.constexpr = T.places * PARTS
    BLOCK_K: gl.constexpr = T.block_k
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, STRIP], tiles.dtype)
    strips = recast(tiles, tiles.dtype, [COUNT, BLOCK_K, STRIP], SHARED)
    if PARTS > 2:
        return abreast(strips, uniform(place), BLOCK_K, STRIP, PARTS)
    else:
        return first_parts(strips, place, BLOCK_K, STRIP, PARTS)


@gluon.jit
def blank(mem, use, first, end, T: gl.constexpr):
    """Zero the rows of a value tile outside of first <= row < end."""
    PARTS: gl.constexpr = T.parts_v
    BOXES: gl.constexpr = T.boxes
    BOX: gl.constexpr = T.box
    mem.values.wait(use)
    for part in gl.static_range(PARTS):
        for box in gl.static_range(BOXES):
            place = (mem.values.at(use) * PARTS + part) * BOXES + box
            blank_rows(mem.v.index(place).reshape([BOX, STRIP]), first - box * BOX, end - box * BOX)
    fence_async_shared()


@gluon.jit
def let_go(channel, use, T: gl.constexpr):
    """Let go of a tile that was multiplied, but where who multiplies has converted it, and let go of its bytes before."""
    if T.apart or not T.converts:
        channel.release(use)
