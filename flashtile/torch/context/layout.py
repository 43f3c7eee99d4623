"""Which positions of a sequence a rank holds. Standard library alone."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.errors import InvalidProblem
from flashtile.problem.mask import Band

LAYOUTS = ("contiguous", "zigzag", "striped")


@dataclass(frozen=True)
class Run:
    """`count` positions, `step` apart, the first of them `start`."""

    start: int
    count: int
    step: int = 1

    @property
    def last(self) -> int:
        return self.start + (self.count - 1) * self.step

    @property
    def keys(self) -> slice:
        """Where a tensor of the whole sequence has them."""
        return slice(self.start, self.start + self.count * self.step, self.step)


def grain(layout: str, ranks: int) -> int:
    """What a sequence's length must be a multiple of."""
    return 2 * ranks if layout == "zigzag" else ranks


def check_length(layout: str, ranks: int, seqlen: int, name: str = "the length") -> None:
    """Raise InvalidProblem for a whole sequence that ranks cannot share evenly."""
    part = grain(layout, ranks)
    if seqlen % part:
        raise InvalidProblem(
            f"{name} is {seqlen}; of layout {layout!r} over {ranks} ranks it must be a multiple of {part}. Pad the end to "
            f"{-(-seqlen // part) * part} (`shard(..., pad=value)` does), and hide it by causal order or seqused."
        )


def runs(layout: str, seqlen: int, ranks: int, rank: int) -> tuple[Run, ...]:
    """What a rank holds of a sequence, in its own order.

    Zigzag is rank r's chunks r and 2 ranks - 1 - r of 2 ranks chunks, which is TransformerEngine's and torch's order.
    """
    if layout == "striped":
        return (Run(rank, seqlen // ranks, ranks),)
    if layout == "zigzag":
        chunk = seqlen // (2 * ranks)
        return (Run(rank * chunk, chunk), Run((2 * ranks - 1 - rank) * chunk, chunk))
    return (Run(rank * (seqlen // ranks), seqlen // ranks),)


@dataclass(frozen=True)
class Piece:
    """A local call: a run of queries beside a run of keys with the same step.

    rows: which of this rank's queries, keys: which of the tensor of keys at hand. query: at which positions these queries
    stand, counted as keys are.
    """

    query: Run
    key: Run
    rows: slice
    keys: slice

    @property
    def lag(self) -> int:
        """How far the first query stands behind the first key."""
        return self.query.start - self.key.start

    @property
    def slack(self) -> int:
        """By how much a local call moves its queries: they are aligned to the last key."""
        return self.key.count - self.query.count

    @property
    def natural(self) -> bool:
        """Whether the local call's positions differ as those of the whole do."""
        return self.query.step == 1 and self.lag == self.slack

    def band(self, band: Band) -> Band:
        """The whole's band as the local call must be told it."""
        left = None if band.left is None else (band.left - self.lag) // self.query.step + self.slack
        right = None if band.right is None else (band.right + self.lag) // self.query.step - self.slack
        return Band(left, right)

    def sees(self, band: Band) -> bool:
        """Whether any of its queries sees any of its keys."""
        return self.band(band).count_visible(self.query.count, self.key.count) > 0


def prefixes(own: tuple[Run, ...], shift: int, seqlen_k: int, band: Band) -> tuple[Piece, ...]:
    """For each of a rank's runs of queries: a call with the first keys of all, as many as the band lets it see.

    own: steps of 1. shift: seqlen_k - seqlen_q of the whole.
    """
    pieces: list[Piece] = []
    row = 0
    for run in own:
        query = Run(run.start + shift, run.count)
        end = seqlen_k if band.right is None else min(max(query.last + band.right + 1, 1), seqlen_k)
        pieces.append(Piece(query, Run(0, end), slice(row, row + run.count), slice(0, end)))
        row += run.count
    return tuple(pieces)


def pairs(own: tuple[Run, ...], others: tuple[Run, ...], shift: int, band: Band) -> tuple[Piece, ...]:
    """The calls of a rank's queries with another rank's keys, without those in which nothing is visible."""
    pieces: list[Piece] = []
    row = 0
    for run in own:
        key_row = 0
        for key in others:
            query = Run(run.start + shift, run.count, run.step)
            piece = Piece(query, key, slice(row, row + run.count), slice(key_row, key_row + key.count))
            if piece.sees(band):
                pieces.append(piece)
            key_row += key.count
        row += run.count
    return tuple(pieces)
