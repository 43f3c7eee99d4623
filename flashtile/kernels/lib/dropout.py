"""Dropout on the device: `spec/dropout.py` says which scores are kept."""

from __future__ import annotations

from flashtile._triton import constexpr, jit, tl
from flashtile.spec import dropout

ROUNDS = constexpr(dropout.ROUNDS)
MULTIPLIER_A, MULTIPLIER_B = constexpr(dropout.MULTIPLIERS[0]), constexpr(dropout.MULTIPLIERS[1])
SIGN = constexpr(-(2**31))
WEYL_A, WEYL_B = constexpr(dropout.WEYL[0]), constexpr(dropout.WEYL[1])


@jit
def load_seed(score_args, T: tl.constexpr):
    """(two words of seed, offset, least word that is kept, 1 / (1 - p), 0); any tuple unless T.dropout."""
    if T.dropout:
        args = score_args[T.modifiers]
        return (
            tl.load(args[0]).to(tl.uint32, bitcast=True),
            tl.load(args[0] + 1).to(tl.uint32, bitcast=True),
            tl.load(args[0] + 2).to(tl.uint32, bitcast=True),
            (args[1] ^ SIGN).to(tl.uint32, bitcast=True),  # it comes less 2^31
            args[2],
            args[2] - args[2],
        )
    else:
        return (0, 0, 0, 0, 1.0, 0.0)


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
def kept(seed, batch_head, row, key, BY_KEY: tl.constexpr, T: tl.constexpr):
    """Which scores of the tile from (row, key) are kept: queries by keys or, if BY_KEY, keys by queries.

    Tiles begin at multiples of 16. Their quarters, by bit 3 of row and key, share counters; a thread that holds an
    accumulator's elements holds all four of each, so that nothing is exchanged. Unless T.dropout the answer is 0, unread.
    """
    if T.dropout:
        BLOCK_Q: tl.constexpr = T.block_q
        BLOCK_K: tl.constexpr = T.block_k
        rows, keys = row // 2 + tl.arange(0, BLOCK_Q // 2), key // 2 + tl.arange(0, BLOCK_K // 2)
        rows, keys, batch_head = rows.to(tl.uint32), keys.to(tl.uint32), batch_head.to(tl.uint32)
        if BY_KEY:
            a, b, c, d = philox(rows[None, :], keys[:, None], batch_head, seed[2], seed[0], seed[1])
        else:
            a, b, c, d = philox(rows[:, None], keys[None, :], batch_head, seed[2], seed[0], seed[1])
        words = tl.join(tl.join(a, b), tl.join(c, d))  # [..., bit 3 of the key, bit 3 of the row]
        if BY_KEY:
            words = tl.permute(tl.reshape(words, (BLOCK_K // 16, 8, BLOCK_Q // 16, 8, 2, 2)), (0, 4, 1, 2, 5, 3))
            words = tl.reshape(words, (BLOCK_K, BLOCK_Q))
        else:
            words = tl.permute(tl.reshape(words, (BLOCK_Q // 16, 8, BLOCK_K // 16, 8, 2, 2)), (0, 5, 1, 2, 4, 3))
            words = tl.reshape(words, (BLOCK_Q, BLOCK_K))
        if T.wide:  # Triton 3.6.0 cannot multiply float64 numbers that depend on `join` other than through a reduction
            words = tl.max(tl.reshape(words, (words.shape[0], words.shape[1], 1)), 2)
        return words >= seed[3]
    else:
        return 0


@jit
def dropped(p, survives, seed, T: tl.constexpr):
    """p where `survives` says so, 0 elsewhere; p as it is unless T.dropout.

    The zero is one that LLVM does not know: with a constant it would draw the conversion to 16 bits that follows into the
    select, and take packed pairs apart and together again (1.2 instructions per score).
    """
    if T.dropout:
        return tl.where(survives, p, seed[5])
    else:
        return p
