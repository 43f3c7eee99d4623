"""Which tile of which head a program computes."""

from __future__ import annotations

from flashtile._triton import jit, tl


@jit
def assign(tiles, heads, SWIZZLE: tl.constexpr, LAST_FIRST: tl.constexpr):
    """(tile, head) of this program, out of `tiles` per head and `heads` = batch * heads of a one-dimensional grid.

    SWIZZLE heads go together, tile by tile: their keys and values stay in the L2 cache, while the long tiles of all
    of them start before the short ones. LAST_FIRST begins with the last tile, the longest one under a causal mask.
    """
    program = tl.program_id(0)
    span = tiles * SWIZZLE
    first = program // span * SWIZZLE
    heads_here = tl.minimum(heads - first, SWIZZLE)
    rest = program % span
    tile = rest // heads_here
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return tile, first + rest % heads_here
