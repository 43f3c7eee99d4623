"""Dropout: which probabilities are kept, by absolute position.

keep[b, h, i, j] is a word of Philox4x32 with seven rounds (Salmon, Moraes, Dror and Shaw, SC 2011: the fewest that pass
BigCrush), compared with p * 2^32. The key is the seed; the counter is (i', j', b * heads_q + h, offset), where i' and j' are
i and j without their bit 3, and the word is 2 * (bit 3 of i) + (bit 3 of j): in the layouts of every matrix unit one thread
holds all four. Nothing else enters: not the backend, the tile, the direction, nor how many GPUs share the work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashtile.errors import InvalidProblem

ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Dropout:
    """Zero each probability with chance `p`, 0 <= p < 1, and multiply the others by 1 / (1 - p).

    seed: None draws a new one from PyTorch's generator of the device at every call, so that a captured CUDA graph draws at
    every replay and checkpointing repeats it. An int gives the same mask at every call. A tensor, int64 (2,) on the
    device of q, is (seed, offset), read by the kernels. `flashtile.dropout_mask` shows what a seed keeps.
    """

    p: float
    seed: Any = None

    def __post_init__(self) -> None:
        check_chance(self.p)
        if isinstance(self.seed, bool) or not (self.seed is None or isinstance(self.seed, int) or hasattr(self.seed, "shape")):
            raise InvalidProblem(f"dropout seed is {self.seed!r}; it must be an int, an int64 tensor (2,) or None.")
        if isinstance(self.seed, int) and not -(2**63) <= self.seed < 2**63:
            raise InvalidProblem(f"dropout seed is {self.seed}; it must lie within 64 bits.")


def check_chance(p: object) -> None:
    """Raise InvalidProblem unless p is a chance that leaves something."""
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p < 1 or threshold(p) > WORD:
        raise InvalidProblem(f"dropout p is {p!r}; it must be a number, at least 0 and below 1.")


def threshold(p: float) -> int:
    """The least word that is kept: p to 2^-32."""
    return round(p * 2**32)


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any], rounds: int = ROUNDS) -> tuple[Any, Any, Any, Any]:
    """Four random words of 32 bits; of ints, or of int64 tensors that broadcast (their products wrap, which is right here)."""
    a, b, c, d = counter
    low, high = key
    for _ in range(rounds):
        left, right = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = (right >> 32 & WORD) ^ b ^ low, right & WORD, (left >> 32 & WORD) ^ d ^ high, left & WORD
        low, high = low + WEYL[0] & WORD, high + WEYL[1] & WORD
    return a, b, c, d


def without_bit_3(index: Any) -> Any:
    """The index with bit 3 taken out."""
    return index >> 4 << 3 | index & 7


def keep(p: float, batch: Any, head: Any, row: Any, key: Any, heads_q: int, seed: Any) -> Any:
    """Boolean tensor: whether the probabilities at these positions (as for `words`) are kept."""
    return words(batch, head, row, key, heads_q, seed) >= threshold(p)


def words(batch: Any, head: Any, row: Any, key: Any, heads_q: int, seed: Any) -> Any:
    """The random words at int64 positions that broadcast; seed is an int64 tensor (2,): (seed, offset)."""
    counter = (without_bit_3(row), without_bit_3(key), batch * heads_q + head & WORD, seed[1] & WORD)
    four = philox(counter, (seed[0] & WORD, seed[0] >> 32 & WORD))
    by_row, by_key = row >> 3 & 1, key >> 3 & 1
    first, second = (pair[0] * (1 - by_key) + pair[1] * by_key for pair in (four[:2], four[2:]))
    return first * (1 - by_row) + second * by_row
