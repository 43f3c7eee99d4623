"""Which rows and keys of a problem take part, and which tiles of keys a run of rows visits."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from flashtile.memory import remembered
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.mask import FULL, Band, key_range


@dataclass(frozen=True)
class Region:
    """The queries [first_row, first_row + rows) that see a key, and the keys that one of them sees.

    Every mask here is a band, so both are intervals and nothing inside them is idle. Whatever lies outside is never
    read. `band` is the mask over local indices: local row i sees local key j when i - left <= j <= i + right. `shift` is
    the problem's own: a row's aligned position less its index.
    """

    first_row: int
    rows: int
    first_key: int
    keys: int
    band: Band
    shift: int

    @property
    def row_slice(self) -> slice:
        """The rows in the problem's own indices."""
        return slice(self.first_row, self.first_row + self.rows)

    @property
    def key_slice(self) -> slice:
        """The keys in the problem's own indices."""
        return slice(self.first_key, self.first_key + self.keys)

    @property
    def full(self) -> bool:
        """Whether every row sees every key."""
        return not self._hides_left and (self.band.right is None or self.band.right >= self.keys - 1)

    @property
    def causal(self) -> bool:
        """Whether local row i sees exactly the local keys up to i."""
        return not self._hides_left and self.band.right == 0

    @property
    def _hides_left(self) -> bool:
        return self.band.left is not None and self.band.left < self.rows - 1

    def most_keys(self, first: int, last: int) -> int:
        """How many keys that one of the local rows first..last sees which sees the most."""
        left, right = self.band.left, self.band.right
        turns = (last if left is None else left, first if right is None else self.keys - 1 - right)
        return max(self._count(row) for row in (first, last, *(min(max(row, first), last) for row in turns)))

    def _count(self, row: int) -> int:
        left, right = self.band.left, self.band.right
        stop = self.keys if right is None else min(self.keys, row + right + 1)
        return max(0, stop - (0 if left is None else max(0, row - left)))

    def runs(self, height: int, few: int) -> Iterator[tuple[int, int]]:
        """All local rows, (first, stop) of at most `height` at a time; those at the ends that see at most `few` keys apart."""
        everything = range(self.rows + 1)
        head = bisect_right(everything, few, key=lambda count: self.most_keys(0, count - 1) if count else 0) - 1
        tail = (
            bisect_right(everything, few, key=lambda count: self.most_keys(self.rows - count, self.rows - 1) if count else 0)
            - 1
        )
        ends = sorted({0, head, max(head, self.rows - tail), self.rows})
        for first, stop in pairwise(ends):
            yield from ((row, min(row + height, stop)) for row in range(first, stop, height))

    def tiles(self, first: int, last: int, width: int) -> Iterator[Tile]:
        """The tiles, at most `width` keys wide, that hold all keys visible to the local rows first..last."""
        left, right = self.band.left, self.band.right
        lo, full_lo, full_hi, hi = key_range(
            first, last, self.keys, left or 0, right or 0, left is not None, right is not None, 1
        )
        for start in range(lo, hi, width):
            stop = min(start + width, hi)
            edges = ((start, min(full_lo, stop)), (max(full_hi, start), stop))
            yield Tile(start, stop, tuple((a, b) for a, b in edges if a < b))


@dataclass(frozen=True)
class Tile:
    """Local keys [start, stop) of a run of rows; within `edges` some row does not see some key."""

    start: int
    stop: int
    edges: tuple[tuple[int, int], ...]

    @property
    def keys(self) -> slice:
        """The tile's local keys."""
        return slice(self.start, self.stop)


@remembered(1024, "regions on the CPU")
def region_of(p: AttentionProblem) -> Region:
    """The part of a problem that is to be computed; of size 0 x 0 where no query sees a key."""
    mask = p.mask.clipped(p.seqlen_q, p.seqlen_k)
    left, right = mask.left, mask.right
    first_row = 0 if right is None else max(0, -right - p.shift)
    end_row = p.seqlen_q if left is None else min(p.seqlen_q, p.seqlen_k + left - p.shift)
    if p.empty or end_row <= first_row or (left is not None and right is not None and left + right < 0):
        return Region(0, 0, 0, 0, FULL, p.shift)
    first_key = 0 if left is None else max(0, first_row + p.shift - left)
    end_key = p.seqlen_k if right is None else min(p.seqlen_k, end_row + p.shift + right)
    moved = first_row + p.shift - first_key  # local position of local row 0
    band = Band(None if left is None else left - moved, None if right is None else right + moved)
    return Region(first_row, end_row - first_row, first_key, end_key - first_key, band, p.shift)


# 256 x 512 float32 scores, half a MiB, stay in a core's L2 cache (2 MiB) together with what a modifier makes of them. Time of
# q 1x2048x8x64 fp32 causal softcap, forward + backward, one core of a Xeon with AVX-512, torch 2.13.0: 64x512 407 ms,
# 128x512 350, 256x512 301, two heads of 256x512 at once 310, 512x512 315, 256x1024 293 but with twice the cache.
# In 16 bits higher tiles repay the casts and the narrow products: the same without softcap, bf16, backward alone, 256x512
# 65 ms, 512x512 58, 256x1024 62.
ROWS = 256  # of all query heads that share a key/value head together
ROWS_16_BIT = 512
WIDTH = 512
ELEMENTS = ROWS * WIDTH  # scores per thread and tile


@dataclass(frozen=True)
class Tiling:
    """Rows (of one query head) and keys of a tile; `scores` of them per item."""

    rows: int
    width: int
    scores: int

    def items(self, threads: int) -> int:
        """How many (batch, key/value head) pairs to compute at once."""
        return max(1, ELEMENTS * threads // self.scores)

    def spell(self) -> str:
        """The tile as `explain` prints it."""
        return f"{self.rows}x{self.width}"


def tiling_of(p: AttentionProblem, region: Region) -> Tiling:
    """Tiles of ROWS x WIDTH scores per item; where the rows are few, as in decoding, they are wider."""
    rows = min(max(1, (ROWS_16_BIT if p.dtype.is_narrow else ROWS) // p.group), region.rows)
    width = min(max(WIDTH, ELEMENTS // (p.group * rows)), region.keys)
    return Tiling(rows, width, p.group * rows * width)
