"""Which positions of a sequence a rank holds. Standard library alone."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.errors import InvalidProblem
from flashtile.memory import remembered
from flashtile.problem.mask import Band

LAYOUTS = ("contiguous", "zigzag", "striped", "documents")


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
    return 2 * ranks if layout in ("zigzag", "documents") else ranks


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

    Zigzag is rank r's chunks r and 2 ranks - 1 - r of 2 ranks chunks, which is TransformerEngine's and torch's order. Of
    "documents" these are places in the order of chunks, which `documents.py` makes of cu_seqlens.
    """
    if layout == "striped":
        return (Run(rank, seqlen // ranks, ranks),)
    if layout in ("zigzag", "documents"):
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


@dataclass(frozen=True)
class Fetched:
    """Which keys of the whole a rank fetches: runs of them, in order and apart, which lie one after another where they arrive.

    halo: whether it leaves some out because the band hides them; otherwise they are all keys.
    """

    runs: tuple[Run, ...]
    halo: bool

    def place(self, key: Run) -> slice:
        """Where keys lie of which all are there."""
        if not key.count:
            return slice(0, 0)
        before = 0
        for run in self.runs:
            if run.start <= key.start <= key.last <= run.last:
                first = before + key.start - run.start
                return slice(first, first + key.count)
            before += run.count
        raise AssertionError(f"{key} is not within {self.runs}")

    def shared(self, source: tuple[Run, ...]) -> list[tuple[slice, slice]]:
        """Which rows of a rank that holds `source` these keys are, and where they lie here, in the order in which they go."""
        found: list[tuple[slice, slice]] = []
        row = 0
        for run in source:
            before = 0
            for key in self.runs:
                first, end = max(run.start, key.start), min(run.last, key.last) + 1
                if first < end:
                    here = before + first - key.start
                    there = row + first - run.start
                    found.append((slice(there, there + end - first), slice(here, here + end - first)))
                before += key.count
            row += run.count
        return found


@remembered(256, "keys that ranks fetch")
def fetched(layout: str, seqlens: tuple[int, int], ranks: int, band: Band) -> tuple[Fetched, ...]:
    """What each rank of all fetches of the keys: those that its queries see, where that is less than half of the others' keys;
    else all of them, by one all-gather.

    seqlens: of queries and keys of the whole. The layout is contiguous or zigzag.
    """
    seqlen_q, seqlen_k = seqlens
    everything = (Fetched((Run(0, seqlen_k),), False),) * ranks
    if band.left is None or band.right is None or seqlen_k == 0:
        return everything
    own = [runs(layout, seqlen_q, ranks, rank) for rank in range(ranks)]
    seen = [[seen_keys(run, seqlen_k - seqlen_q, seqlen_k, band, True) for run in of_rank] for of_rank in own]
    halos = tuple(Fetched(_apart(keys), True) for keys in seen)
    return halos if 2 * sum(sent for sent, _ in sent_rows(layout, seqlen_k, halos)) < (ranks - 1) * seqlen_k else everything


@dataclass(frozen=True)
class Stages:
    """Which keys come to each rank for which of its runs of queries, where no halo is enough.

    held: by rank, the runs of keys that it has. ends: by rank and by its run of queries, how many of the whole's first keys
    that run sees. Runs come in order, so that each sees what the one before does.
    """

    held: tuple[tuple[Run, ...], ...]
    ends: tuple[tuple[int, ...], ...]

    def news(self, stage: int, to: int, source: int) -> list[tuple[slice, slice]]:
        """(which rows of `source`, which keys of the whole): those that a run of queries sees and the runs before do not."""
        start, end = self.ends[to][stage - 1] if stage else 0, self.ends[to][stage]
        found: list[tuple[slice, slice]] = []
        row = 0
        for run in self.held[source]:
            first, stop = max(run.start, start), min(run.start + run.count, end)
            if first < stop:
                found.append((slice(row + first - run.start, row + stop - run.start), slice(first, stop)))
            row += run.count
        return found

    def returned(self, stage: int, by: int, to: int) -> list[tuple[int, slice, slice]]:
        """(of which run's call, which rows of `to`, which keys of the whole): sums that `by` returns to `to` behind the call of
        its run `stage`, calls of later runs being done.

        They go when no call is left that adds to them, but not before the call of that run of `to` among whose keys they are:
        so half of them at a time, and as many to each rank.
        """
        found: list[tuple[int, slice, slice]] = []
        for of in range(stage, len(self.ends[by])):
            row = 0
            for i, run in enumerate(self.held[to]):
                if min(of, i) == stage:
                    found += [(of, rows, at) for rows, at in self.news(of, by, to) if row <= rows.start < row + run.count]
                row += run.count
        return found


@remembered(256, "keys of ranks' runs")
def stages(layout: str, seqlens: tuple[int, int], ranks: int, band: Band) -> Stages:
    """Of queries and keys of the whole, in a layout of steps of 1."""
    seqlen_q, seqlen_k = seqlens
    held = tuple(runs(layout, seqlen_k, ranks, rank) for rank in range(ranks))
    own = [runs(layout, seqlen_q, ranks, rank) for rank in range(ranks)]
    see = [[seen_keys(run, seqlen_k - seqlen_q, seqlen_k, band, False) for run in of_rank] for of_rank in own]
    return Stages(held, tuple(tuple(min(key.count, seqlen_k) for key in of_rank) for of_rank in see))


def sent_rows(layout: str, seqlen_k: int, wanted: tuple[Fetched, ...]) -> list[tuple[int, int]]:
    """How many keys each rank sends to others, and gets from them; one that goes to two ranks counts twice."""
    ranks = range(len(wanted))
    held = [runs(layout, seqlen_k, len(wanted), rank) for rank in ranks]
    gone = [
        [sum(rows.stop - rows.start for rows, _ in wanted[to].shared(held[by])) * (to != by) for to in ranks] for by in ranks
    ]
    return [(sum(gone[rank]), sum(of_rank[rank] for of_rank in gone)) for rank in ranks]


def seen_keys(run: Run, shift: int, seqlen_k: int, band: Band, from_left: bool) -> Run:
    """The keys between the first and the last that a run of queries sees, at least one; from the first of all unless from_left.

    shift: seqlen_k - seqlen_q of the whole.
    """
    first = run.start + shift - band.left if from_left and band.left is not None else 0
    first = min(max(first, 0), seqlen_k - 1)
    end = seqlen_k if band.right is None else min(max(run.last + shift + band.right + 1, first + 1), seqlen_k)
    return Run(first, end - first)


def _apart(keys: list[Run]) -> tuple[Run, ...]:
    """The same keys as runs in order that do not meet."""
    found: list[Run] = []
    for run in sorted(keys, key=lambda run: run.start):
        if found and run.start <= found[-1].last + 1:
            before = found.pop()
            run = Run(before.start, max(run.last, before.last) + 1 - before.start)
        found.append(run)
    return tuple(found)


def prefixes(own: tuple[Run, ...], shift: int, seqlen_k: int, band: Band, have: Fetched) -> tuple[Piece, ...]:
    """For each of a rank's runs of queries: a call with the first keys of all, as many as the band lets it see; of those from
    the first that it sees on where a halo is there.

    own: steps of 1. shift: seqlen_k - seqlen_q of the whole.
    """
    pieces: list[Piece] = []
    row = 0
    for run in own:
        key = seen_keys(run, shift, seqlen_k, band, have.halo) if seqlen_k else Run(0, 0)
        pieces.append(Piece(Run(run.start + shift, run.count), key, slice(row, row + run.count), have.place(key)))
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


@remembered(256, "shares of ranks' work")
def busiest(layout: str, seqlens: tuple[int, int], ranks: int, band: Band) -> float:
    """How many times the mean of scores the rank has that has most, where each attends its own queries.

    seqlens: of queries and keys of the whole.
    """
    shift = seqlens[1] - seqlens[0]
    striped = [runs(layout, seqlens[1], ranks, rank) for rank in range(ranks)] if layout == "striped" else None
    work = [
        sum(
            piece.band(band).count_visible(piece.query.count, piece.key.count)
            for keys in striped or [(Run(0, seqlens[1]),)]  # steps are alike
            for piece in pairs(runs(layout, seqlens[0], ranks, rank), keys, shift, band)
        )
        for rank in range(ranks)
    ]
    return max(work) * ranks / max(sum(work), 1)
