"""Dropout: which probabilities are kept, by absolute position.

Sixteen probabilities, whose positions (i, j) differ in bits 0 and 3 alone, share a call of Philox4x32 with seven rounds
(Salmon, Moraes, Dror and Shaw, SC 2011: the fewest that pass BigCrush). The key is the seed; the counter is (offset, j',
b * heads_q + h, i'), where i' and j' are i and j without these bits. A probability's number is the lower seven bits of byte
2 * (bit 0 of j) + (bit 3 of i) in word 2 * (bit 0 of i) + (bit 3 of j): two neighbours' numbers stand in the upper bytes of
a word's halves, where Hopper compares them two by two (`kernels/sm90/device/dropout.py`).

A probability is dropped if its number is below its limit or, where p is above 1/2, kept if it is. Limits are
128 * min(p, 1 - p), rounded up where a word, the dither, is below what would be rounded away, else down: over seeds the chance
is p to 2^-32. Dithers are one random word of the call, plus multiples of three steps (1.2207, the root of x^4 = x + 1, to the
powers -1 to -3) for the head, for i // 64 * 4 + i // 2 % 4 and for j alike, so that those of many probabilities are spread
evenly. Two that share a dither are correlated by f * (1 - f) / (128^2 * p * (1 - p)), where f is what is rounded away: 1.1e-4
at p = 0.1, less than 1/128 at any p, nothing where 128 * p is whole; two others by at most as much, to either side.

Nothing else enters: not the backend, the tile, the direction, nor how many GPUs share the work.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, field
from typing import Any, Literal

from flashtile.errors import InvalidProblem
from flashtile.problem.number import PLAIN, plain, told

ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF
LATTICE = (0xD1B54A33, 0xABC98389, 0x8CB92BA7)  # of heads, queries, keys: the ratio's powers in units of 2^-32, odd
SEED_WORDS = 4  # of a call's seed tensor, in front of those of an Origin
GRAIN = 64  # queries and keys of a call of Philox, and of a dither, lie within so many: tiles and origins are multiples
OriginKind = Literal["aligned", "any"]  # "aligned": queries and keys follow one another, from multiples of GRAIN
ORIGINS: tuple[OriginKind, ...] = ("aligned", "any")


@dataclass(frozen=True)
class Origin:
    """Where a call stands in a larger one, whose positions decide what is dropped; `flashtile.distributed` makes it.

    head: its first head of q there; a batch entry further on counts as the larger call's heads more. heads, more: how many
    heads of q this call has, and how many more the larger one. query, key: positions of its first ones there, and by how many
    these go up from one to the next. The fields, in order, are the words that follow the seed's.
    """

    head: int = 0
    heads: int = 1
    more: int = 0
    query: int = 0
    key: int = 0
    query_step: int = 1
    key_step: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = int(name in ("heads", "query_step", "key_step"))
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
                raise InvalidProblem(f"dropout origin's {name} is {value!r}; it must be an int from {least} to 2^31 - 1.")

    @property
    def kind(self) -> OriginKind:
        """What kernels must know of it."""
        aligned = self.query % GRAIN == self.key % GRAIN == 0 and self.query_step == self.key_step == 1
        return "aligned" if aligned else "any"

    @property
    def words(self) -> tuple[int, ...]:
        return astuple(self)


def placed(words: Any, batch: Any, head: Any, row: Any, key: Any, heads_q: int) -> tuple[Any, Any, Any]:
    """(batch * heads + head, row, key) in the larger call, of positions in this one. words: those of an Origin."""
    first, _, more, query, start, query_step, key_step = words
    return batch * (heads_q + more) + head + first, row * query_step + query, key * key_step + start


def no_dropout(value: object) -> InvalidProblem:
    """The error for what is no dropout, with what to write for it."""
    remedy = " Dropout(p) drops with probability p." if isinstance(value, float) else ""
    return InvalidProblem(f"dropout is {value!r}; it must be a flashtile.Dropout or None.{remedy}")


@dataclass(frozen=True)
class Dropout:
    """Zero each probability with chance `p`, 0 <= p < 1, and multiply the others by 1 / (1 - p).

    seed: None draws a new one from PyTorch's generator of the device at every call, so that a captured CUDA graph draws at
    every replay and checkpointing repeats it. An int gives the same mask at every call. A tensor, int64 (2,) on the
    device of q, is (seed, offset), read by the kernels. `flashtile.dropout_mask` shows what a seed keeps.
    origin: where the call stands in a larger one, an Origin; None where it is the whole.
    """

    p: float
    seed: Any = None
    origin: Origin | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("p", "seed"):
            if type(getattr(self, name)) not in PLAIN:
                object.__setattr__(self, name, plain(getattr(self, name)))
        check_chance(self.p)
        if isinstance(self.seed, bool) or not (self.seed is None or isinstance(self.seed, int) or hasattr(self.seed, "shape")):
            raise InvalidProblem(f"dropout seed is {self.seed!r}; it must be an int, an int64 tensor (2,) or None.")
        if isinstance(self.seed, int) and not -(2**63) <= self.seed < 2**63:
            raise InvalidProblem(f"dropout seed is {self.seed}; it must lie within 64 bits.")
        if not (self.origin is None or isinstance(self.origin, Origin)):
            raise InvalidProblem(f"dropout origin is a {type(self.origin).__name__}; it must be an Origin or None.")


def check_chance(p: object) -> None:
    """Raise InvalidProblem unless p is a chance that leaves something."""
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p < 1 or threshold(p) > WORD:
        raise InvalidProblem(f"dropout p is {told(p)}; it must be a number, at least 0 and below 1.")


def threshold(p: float) -> int:
    """p in units of 2^-32."""
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


def call_index(index: Any) -> Any:
    """The index with bits 0 and 3 taken out."""
    return index >> 4 << 2 | index >> 1 & 3


def dither_index(index: Any) -> Any:
    """Which indices share a dither: those of 64 that agree in bits 1 and 2."""
    return index >> 6 << 2 | index >> 1 & 3


def keep(p: float, batch: Any, head: Any, row: Any, key: Any, heads_q: int, seed: Any) -> Any:
    """Boolean tensor: whether the probabilities at these positions (as for `numbers`) are kept."""
    below = numbers(batch, head, row, key, heads_q, seed) < limits(p, batch, head, row, key, heads_q, seed)
    return below if threshold(p) > 2**31 else below ^ True


def numbers(batch: Any, head: Any, row: Any, key: Any, heads_q: int, seed: Any) -> Any:
    """The random numbers, 0 to 127, at int64 positions that broadcast; seed is an int64 tensor (2,): (seed, offset)."""
    counter = (seed[1] & WORD, call_index(key), batch * heads_q + head & WORD, call_index(row))
    four = philox(counter, (seed[0] & WORD, seed[0] >> 32 & WORD))
    by_row, by_key = row & 1, key >> 3 & 1
    first, second = (pair[0] * (1 - by_key) + pair[1] * by_key for pair in (four[:2], four[2:]))
    word = first * (1 - by_row) + second * by_row
    return word >> 16 * (key & 1) + 8 * (row >> 3 & 1) & 127


def limits(p: float, batch: Any, head: Any, row: Any, key: Any, heads_q: int, seed: Any) -> Any:
    """What numbers are compared with, 0 to 64."""
    dither, *_ = philox((seed[1] & WORD, WORD, 0, WORD), (seed[0] & WORD, seed[0] >> 32 & WORD))  # no position's counter
    for step, index in zip(LATTICE, (batch * heads_q + head, dither_index(row), dither_index(key)), strict=True):
        dither = dither + step * (index & WORD) & WORD
    chance = min(threshold(p), 2**32 - threshold(p))
    return (chance >> 25) + (dither < (chance << 7 & WORD))
