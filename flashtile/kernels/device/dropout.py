"""Dropout on the device: `problem/dropout.py` says which scores are kept."""

from __future__ import annotations

from typing import NamedTuple

from flashtile.problem import dropout
from flashtile.problem.attention import AttentionProblem
from flashtile.triton_glue.language import constexpr, jit, tl

ROUNDS = constexpr(dropout.ROUNDS)
MULTIPLIER_A, MULTIPLIER_B = constexpr(dropout.MULTIPLIERS[0]), constexpr(dropout.MULTIPLIERS[1])
HALF = constexpr(2**31)
TWO_TO_32 = constexpr(2.0**32)
WEYL_A, WEYL_B = constexpr(dropout.WEYL[0]), constexpr(dropout.WEYL[1])
WORD = constexpr(dropout.WORD)
HEADS_STEP, ROWS_STEP, KEYS_STEP = (constexpr(step) for step in dropout.LATTICE)


def origin_refusals(p: AttentionProblem) -> list[str]:
    """What kernels have against a call's place in a larger one."""
    if p.origin != "any":
        return []
    return [f"dropout's origin is not aligned; queries and keys must follow one another, from multiples of {dropout.GRAIN}"]


class Seed(NamedTuple):
    """What a call's dropout is made of; all numbers unsigned but the last two."""

    low: tl.tensor
    high: tl.tensor
    offset: tl.tensor
    dither: tl.tensor
    limit: tl.tensor  # rounded down
    rest: tl.tensor  # dithers below it round up
    flip: tl.tensor  # all bits set where numbers below the limit are kept, none where they are dropped
    below: tl.tensor  # the least that is kept of words shifted left until a number stands on top, after `flip`; rounded down
    above: tl.tensor  # or up
    factor: tl.tensor  # 1 / (1 - p)
    zero: tl.tensor
    origin: tl.tuple  # the call's Origin but for its steps, which are 1; empty where it has none


@jit
def load_seed(score_args, T: tl.constexpr):
    """The call's Seed; one of no meaning unless T.modifiers.dropout."""
    if T.modifiers.dropout:
        args = score_args[T.modifiers.count]
        low = tl.load(args[0]).to(tl.uint32, bitcast=True)
        high = tl.load(args[0] + 1).to(tl.uint32, bitcast=True)
        offset = tl.load(args[0] + 2).to(tl.uint32, bitcast=True)
        none, every = (low & 0).to(tl.uint32), (low | WORD).to(tl.uint32)
        dither, _, _, _ = philox(offset, every, none, every, low, high)
        keeps = args[1] > 0  # p less 1/2, in units of 2^-32
        chance = (tl.where(keeps, -args[1], args[1]).to(tl.int64) + HALF).to(tl.uint32)
        flip = tl.where(keeps, every, none)
        limit, rest = chance >> 25, (chance << 7).to(tl.uint32)
        below, above = (limit << 25).to(tl.uint32), (limit + 1 << 25).to(tl.uint32)
        if keeps:  # bit 0 of a shifted word is 0: it is less than `every`
            below, above = tl.where(limit == 0, every, (none - below).to(tl.uint32)), (none - above).to(tl.uint32)
        factor = args[2]
        if T.wide:
            factor = TWO_TO_32 / (HALF - (none.to(tl.int64) + args[1]).to(tl.float64))
        if len(args) == 3:
            return Seed(low, high, offset, dither, limit, rest, flip, below, above, factor, args[2] - args[2], ())
        else:
            origin = (
                tl.load(args[0] + 4), tl.load(args[0] + 5), tl.load(args[0] + 6), tl.load(args[0] + 7), tl.load(args[0] + 8),
            )  # fmt: skip
            return Seed(low, high, offset, dither, limit, rest, flip, below, above, factor, args[2] - args[2], origin)
    else:
        return Seed(0, 0, 0, 0, 0, 0, 0, 0, 0, 1.0, 0.0, ())


@jit
def placed(seed, batch_head, row, key):
    """The same positions in the larger call that the Seed's Origin says; asked only where there is one."""
    head, heads, more, first_query, first_key = seed.origin
    return batch_head + batch_head // heads * more + head, row + first_query, key + first_key


@jit
def wide_product(a, FACTOR: tl.constexpr):
    """(high, low) words of a * FACTOR."""
    product = a.to(tl.uint64) * FACTOR
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@jit
def philox(a, b, c, d, low, high):
    """Four random words; the counter's parts stay as narrow as they can: its first rounds work on rows and columns."""
    for _ in tl.static_range(ROUNDS):
        left, right = wide_product(a, MULTIPLIER_A), wide_product(c, MULTIPLIER_B)
        a, b, c, d = right[0] ^ b ^ low, right[1], left[0] ^ d ^ high, left[1]
        low, high = (low + WEYL_A).to(tl.uint32), (high + WEYL_B).to(tl.uint32)
    return a, b, c, d


@jit
def rounds_up(seed, batch_head, row, key):
    """Whether the limit at these `dither_index`es is rounded up."""
    dither = seed.dither + batch_head.to(tl.uint32) * HEADS_STEP + row.to(tl.uint32) * ROWS_STEP + key.to(tl.uint32) * KEYS_STEP
    return dither.to(tl.uint32) < seed.rest


@jit
def dither_index(first, SIZE: tl.constexpr):
    """Of SIZE indices from `first`, a multiple of SIZE: a thread's are the same, which the compiler sees of offsets alone."""
    index = tl.arange(0, SIZE)
    return (first // 64 + index // 64) * 4 + index // 2 % 4


@jit
def kept(seed, batch_head, row, key, BY_KEY: tl.constexpr, T: tl.constexpr):
    """Which scores of the tile from (row, key) are kept: queries by keys or, if BY_KEY, keys by queries.

    Tiles begin at multiples of their sizes. Of the scores that a call of Philox is for a thread that holds an accumulator's
    elements holds half, and another lane the other half: both make the call, so that nothing is exchanged. Unless
    T.modifiers.dropout the answer is 0, unread.
    """
    if T.modifiers.dropout:
        if len(seed.origin) > 0:
            batch_head, row, key = placed(seed, batch_head, row, key)
        LINES: tl.constexpr = T.block_k if BY_KEY else T.block_q
        COLUMNS: tl.constexpr = T.block_q if BY_KEY else T.block_k
        line, column = tl.arange(0, LINES // 2), tl.arange(0, COLUMNS // 4)  # without bit 3; without bits 0 and 3
        if BY_KEY:
            first_line, first_column = key, row
        else:
            first_line, first_column = row, key
        lines, columns = (first_line // 4 + line // 2).to(tl.uint32), (first_column // 4 + column).to(tl.uint32)
        last = (line % 2)[:, None]
        if BY_KEY:
            a, b, c, d = philox(seed.offset, lines[:, None], batch_head.to(tl.uint32), columns[None, :], seed.low, seed.high)
            up = rounds_up(seed, batch_head, dither_index(row, COLUMNS)[None, :], dither_index(key, LINES)[:, None])
            words = tl.join(tl.join(a, c), tl.join(b, d)) ^ seed.flip  # [..., bit 0, bit 3 of the key]
            shift = (16 - 16 * last).to(tl.uint32)[:, :, None, None]
            words = tl.join(words << shift + 9, words << shift + 1)  # [..., bit 3]
            words = tl.reshape(words, (LINES // 16, 8, COLUMNS // 16, 4, 2, 2, 2))
            words = tl.permute(words, (0, 5, 1, 2, 6, 3, 4))
        else:
            a, b, c, d = philox(seed.offset, columns[None, :], batch_head.to(tl.uint32), lines[:, None], seed.low, seed.high)
            up = rounds_up(seed, batch_head, dither_index(row, LINES)[:, None], dither_index(key, COLUMNS)[None, :])
            words = tl.join(tl.where(last > 0, c, a), tl.where(last > 0, d, b)) ^ seed.flip  # [..., bit 3]
            words = tl.join(words << 16, words)  # [..., bit 0]
            words = tl.join(words << 9, words << 1)  # [..., bit 3 of the query]
            words = tl.reshape(words, (LINES // 16, 8, COLUMNS // 16, 4, 2, 2, 2))
            words = tl.permute(words, (0, 6, 1, 2, 4, 3, 5))
        words = tl.reshape(words, (LINES, COLUMNS))
        if T.wide:  # Triton 3.6.0 cannot multiply float64 numbers that depend on `join` other than through a reduction
            words = tl.max(tl.reshape(words, (words.shape[0], words.shape[1], 1)), 2)
        return words >= tl.where(up, seed.above, seed.below)
    else:
        return 0


@jit
def dropped(p, survives, seed, T: tl.constexpr):
    """p where `survives` says so, 0 elsewhere; p as it is unless T.modifiers.dropout.

    The zero is one that LLVM does not know: with a constant it would draw the conversion to 16 bits that follows into the
    select, and take packed pairs apart and together again (1.2 instructions per score).
    """
    if T.modifiers.dropout:
        return tl.where(survives, p, seed.zero)
    else:
        return p
