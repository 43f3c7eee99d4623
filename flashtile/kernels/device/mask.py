"""The band and the predicates on the device."""

from __future__ import annotations

from flashtile.problem import mask
from flashtile.problem.attention import AttentionProblem
from flashtile.triton_glue.language import JitTuple, jit, shared, tl

key_range = shared(mask.key_range)


@jit
def tiles_seen(start, size, other, before, after, BEFORE: tl.constexpr, AFTER: tl.constexpr, BLOCK: tl.constexpr,
               OTHER: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """What the tile of BLOCK queries from `start`, of `size`, sees of `other` keys, which come in tiles of OTHER.

    That is `key_range`, and the (first, end) keys that it sees at all. With sizes and bounds swapped: the queries that see a
    tile of keys.
    """
    shift = other - size
    first, last, length = start + shift, tl.minimum(start + BLOCK, size) - 1 + shift, other
    if T.items.ragged:
        length = tl.where(start < size, other, 0)
    lo, full_lo, full_hi, hi = key_range(first, last, length, before, after, BEFORE, AFTER, OTHER)
    if T.mask.predicate:  # any tile may be visible in part
        full_lo = lo
        full_hi = lo
    seen_from = 0
    if BEFORE:
        seen_from = tl.maximum(first - before, 0)
    return lo, full_lo, full_hi, hi, (seen_from, hi)


@jit
def visible(row, key, sizes, band, T: tl.constexpr):
    """Which scores exist: inside both lengths and inside band = (left, right)."""
    keep = (key < sizes.k) & (row < sizes.q)
    position = row + (sizes.k - sizes.q)
    if T.mask.left:
        keep = keep & (key >= position - band[0])
    if T.mask.right:
        keep = keep & (key <= position + band[1])
    return keep


def predicates(p: AttentionProblem) -> JitTuple:
    """MASK of a problem: the functions of its predicates, in order."""
    return JitTuple(leaf.kind.visible for leaf in p.leaves)


def term_starts(p: AttentionProblem) -> int:
    """T.mask.starts: bit i is set where predicate i > 0 begins a term of the "or"."""
    starts, count = 0, 0
    for term in p.where:
        starts |= (1 << count) if count else 0
        count += len(term)
    return starts


@jit
def holds(at, mask_args, T: tl.constexpr, MASK: tl.constexpr):
    """Which scores the predicates let through: an "or" of "and"s."""
    term = MASK[0](at, mask_args[0])
    whole = term != term  # nothing yet
    for i in tl.static_range(1, len(MASK)):
        leaf = MASK[i](at, mask_args[i])
        if (T.mask.starts >> i) & 1:
            whole = whole | term
            term = leaf
        else:
            term = term & leaf
    return whole | term


@jit
def seen(at, row, key, sizes, band, MASKED: tl.constexpr, T: tl.constexpr, MASK: tl.constexpr):
    """Which scores exist; band = (left, right, arguments of the predicates). Predicates are asked where MASKED alone."""
    keep = visible(row, key, sizes, band, T)
    if MASKED and T.mask.predicate:
        keep = keep & holds(at, band[2], T, MASK)
    return keep


@jit
def zero_unseen(x, keep, AXIS: tl.constexpr):
    """The rows of a tile that some score of `keep`, along its AXIS, needs; the others, which may hold NaN, become 0."""
    return tl.where((tl.max(keep.to(tl.int32), AXIS) > 0)[:, None], x, 0.0).to(x.dtype)
