"""What is added to scores by distance alone: a band's -inf, and modifiers like ALiBi.

For a run of queries in reverse order that is one vector, seen with strides (1, 1): O(seqlen) memory, and no time to make.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flashtile.kernels.cpu.modifiers import Modifiers
from flashtile.kernels.cpu.region import Region, Tile, region_of
from flashtile.kernels.cpu.strip import Rows, indices
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.score import Position

ALL = slice(None)
# Probabilities below 2^-100 of a row's largest change no float32 sum, but they and their products become denormal numbers,
# on which a matrix product is 9 times slower (ALiBi, Xeon with AVX-512, torch 2.13.0).
LEAST = 2.0**-100
LEAST_EXPONENT = math.log(LEAST)


@dataclass(frozen=True)
class Distances:
    """`added`: float32 (batch or 1, heads_q or 1, rows + keys - 1), by local key less local row, from 1 - rows.

    `most`: the largest of them in magnitude, the band's aside; NaN if one is.
    """

    added: torch.Tensor
    most: float
    rows: int

    def at(self, first: int, stop: int, keys: slice, batches: slice = ALL, heads: slice = ALL) -> torch.Tensor:
        """A float32 view (batch or 1, heads_q or 1, stop - first, keys): of the local rows from stop - 1 down to first."""
        added = self._part(first, stop, keys, batches, heads)
        shape = (*added.shape[:2], stop - first, keys.stop - keys.start)
        return added.as_strided(shape, (*added.stride()[:2], 1, 1), added.storage_offset())

    def largest(self, first: int, stop: int, keys: slice, batches: slice = ALL, heads: slice = ALL) -> float:
        """The largest number of what `at` shows."""
        return self._part(first, stop, keys, batches, heads).amax().item()

    def _part(self, first: int, stop: int, keys: slice, batches: slice, heads: slice) -> torch.Tensor:
        batches, heads = (part if size > 1 else ALL for part, size in zip((batches, heads), self.added.shape[:2], strict=True))
        return self.added[batches, heads, self.rows - stop + keys.start : self.rows - first + keys.stop - 1]


def distances_of(p: AttentionProblem, tensors: dict[str, torch.Tensor], first_batch: int = 0) -> Distances:
    """The Distances of a problem whose modifiers are all `by_distance`; `first_batch` as in `tiled.forward`."""
    region = region_of(p)
    local = indices(1 - region.rows, region.keys)
    added, most = local.new_zeros((1, 1, len(local)), dtype=torch.float32), 0.0
    if p.score:
        batch = indices(first_batch, first_batch + p.batch)[:, None, None, None]
        here, distance = local.new_zeros(()), local + (region.first_key - region.first_row - p.shift)
        at = Position(batch, indices(0, p.heads_q)[:, None, None], here - p.shift, here, distance)
        scores = added.new_zeros((p.batch, p.heads_q, 1, len(local)))
        added = Modifiers(p, tensors, torch.float32).apply(scores, at).detach().squeeze(2)
        most = added.abs().max().item()
    return Distances(added.masked_fill(_hidden(region, local), -math.inf).contiguous(), most, region.rows)


def _hidden(region: Region, local: torch.Tensor) -> torch.Tensor:
    """Which local distances the band hides."""
    hidden = torch.zeros_like(local, dtype=torch.bool)
    if region.band.left is not None:
        hidden |= local < -region.band.left
    if region.band.right is not None:
        hidden |= local > region.band.right
    return hidden


def longest(vectors: torch.Tensor) -> float:
    """The length of the longest of (..., head_dim) vectors."""
    return math.sqrt(vectors.square().sum(-1).max().item())


class Reach:
    """Which tiles lie so far away that no probability in them counts, of problems whose modifiers are all `by_distance`."""

    def __init__(self, p: AttentionProblem, tensors: dict[str, torch.Tensor], first_batch: int):
        far = bool(p.score) and region_of(p).rows > 0 and all(spec.kind.by_distance for spec in p.score)
        self.distances = distances_of(p, tensors, first_batch) if far else None
        self.row = region_of(p).first_row + p.shift - region_of(p).first_key  # where local row 0 stands among local keys

    def bound(self, vectors: torch.Tensor, *others: torch.Tensor) -> float:
        """`longest`, or infinity where nothing may be left out: a NaN in `others` is to be seen, whatever its probability."""
        if self.distances is None or not all(t.sum().isfinite() for t in others):
            return math.inf
        return longest(vectors)

    def tiles(self, rows: Rows) -> list[Tile]:
        """The tiles of a run, the nearest first where some may be too far."""
        middle = 2 * self.row + rows.first + rows.stop
        return sorted(rows.tiles(), key=lambda tile: 0 if self.distances is None else abs(tile.start + tile.stop - middle))

    def misses(self, rows: Rows, tile: Tile, most: float, least: torch.Tensor) -> bool:
        """Whether exp(score - least) is below LEAST in a whole tile, where no product q k^T is above `most`."""
        if self.distances is None or most == math.inf:
            return False
        added = self.distances.largest(rows.first, rows.stop, tile.keys, rows.strip.batches, rows.strip.heads_q)
        return most + added - least.amin().item() < LEAST_EXPONENT
