"""How a program begins: which tile of which head it is, what that sees, what its walk carries along."""

from typing import Any, NamedTuple

from flashtile.kernels.device.grid import Sizes
from flashtile.kernels.device.mask import tiles_seen
from flashtile.kernels.device.varlen import slab, tile_of
from flashtile.triton_glue.language import jit, tl


class Scene(NamedTuple):
    """What all steps of a walk share: which program it is, and what the kernel was given.

    place = (batch, head of the tile's own tensors, its indices along their axis, the first of them, seed of dropout), so far as
    steps ask.
    """

    ptrs: Any  # of what is walked, at the item's first row; of its head where keys are walked, else of head 0
    strides: Any  # of all tensors, as the kernel has them
    sizes: Any  # `Sizes` of the item
    ends: Any  # (first, end) of those that see this tile, or that it sees
    place: Any
    scale: Any
    band: Any  # (left, right, arguments of the predicates)
    score_args: Any  # of the modifiers
    extra_args: Any = None  # of captured tensors: their tangents', or for `capture` where their gradients go


@jit
def query_tile(program, region, spans, band, T: tl.constexpr):
    """(tile, head, Item, unit, Sizes, slab, first query, what `tiles_seen` says of its keys) of a query tile of one head.

    program = (its number, how many there are); spans: the `Sizes` of the tensors; band = (left, right, ...).
    """
    seqlen_q, seqlen_k, heads, group = spans
    tile, head, item, unit = tile_of(
        program[0], program[1], region[0], seqlen_q, seqlen_q, seqlen_k, heads, T.block_q, False, T
    )
    row = tile * T.block_q
    keys = tiles_seen(row, item.q, item.k, band[0], band[1], T.mask.left, T.mask.right, T.block_q, T.block_k, T)
    return tile, head, item, unit, Sizes(item.q, item.k, heads, group), slab(item, T), row, keys


@jit
def key_tile(program, region, spans, split, band, T: tl.constexpr):
    """(head, Item, Sizes, slab, first key, keys beyond the queries, what `tiles_seen` says of its queries) of a key tile.

    It is one of `split` heads; all else as for `query_tile`.
    """
    seqlen_q, seqlen_k, heads, group = spans
    tile, head, item, _ = tile_of(program[0], program[1], region[0], seqlen_k, seqlen_q, seqlen_k, split, T.block_k, True, T)
    sizes, batch = Sizes(item.q, item.k, heads, group), slab(item, T)
    column, shift = tile * T.block_k, item.k - item.q
    queries = tiles_seen(column, item.k, item.q, band[1], band[0], T.mask.right, T.mask.left, T.block_k, T.block_q, T)
    return head, item, sizes, batch, column, shift, queries


@jit
def keys_seen(column, keys_here, shift, left, right, T: tl.constexpr):
    """(first, end), counted from `column`, of a tile's keys that any query sees: others may hold NaN, and 0 * NaN is NaN."""
    first, end = 0, keys_here
    if T.mask.left:
        first = tl.maximum(shift - left - column, 0)
    if T.mask.right:
        end = tl.minimum(keys_here, keys_here + right)
    return first, end
