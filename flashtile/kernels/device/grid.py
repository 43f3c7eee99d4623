"""Which tile of which head a program computes."""

from __future__ import annotations

from typing import NamedTuple

from flashtile.triton_glue.language import constexpr, jit, tl


class Sizes(NamedTuple):
    """Lengths and head counts of a problem."""

    q: tl.tensor  # seqlen_q
    k: tl.tensor  # seqlen_k
    heads: tl.tensor  # heads_q
    group: tl.tensor  # query heads per key/value head


@jit
def this_program():
    """(its number, how many there are): of the launch, where a kernel gives no others."""
    return tl.program_id(0), tl.num_programs(0)


ROWS = constexpr(128)  # what a backward keeps of each query is padded to whole tiles: a multiple of every block_q


@jit
def padded_rows(seqlen_q):
    """Queries of a head, padded."""
    return tl.cdiv(seqlen_q, ROWS) * ROWS


@jit
def assign(tiles, SWIZZLE: tl.constexpr, LAST_FIRST: tl.constexpr):
    """(tile, head) of this program in a one-dimensional grid of `tiles` per head; head counts over batch and heads."""
    return seat(tl.program_id(0), tiles, tl.num_programs(0) // tiles, SWIZZLE, LAST_FIRST)


@jit
def seat(number, tiles, heads, together, LAST_FIRST: tl.constexpr):
    """(tile, head) of a number in the order in which tiles are computed.

    `together` heads go together, tile by tile: their keys and values stay in the L2 cache, while the long tiles of all
    of them start before the short ones. LAST_FIRST begins with the last tile, the longest one under a causal mask.
    """
    span = tiles * together
    first = number // span * together
    heads_here = tl.minimum(heads - first, together)
    rest = number % span
    tile = rest // heads_here
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return tile, first + rest % heads_here
