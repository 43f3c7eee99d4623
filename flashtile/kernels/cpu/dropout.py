"""Dropout on the CPU: `problem/dropout.py` says which probabilities are kept."""

from __future__ import annotations

import torch

from flashtile.kernels.cpu.region import Tile
from flashtile.kernels.cpu.strip import Rows
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.dropout import SEED_WORDS, keep, placed


class Drop:
    """The dropout of one call; without one its functions do nothing."""

    def __init__(self, p: AttentionProblem, tensors: dict[str, torch.Tensor]):
        self.p, self.heads = p.dropout, p.heads_q
        self.factor = 1.0 if p.dropout is None else 1.0 / (1.0 - p.dropout)
        self.seed = None if p.dropout is None else tensors["seed"]

    def mask(self, rows: Rows, tile: Tile) -> torch.Tensor | None:
        """Which of a tile's probabilities are dropped, (items, group * rows, keys)."""
        if self.p is None or self.seed is None:
            return None
        at = rows.at(tile)
        batch_head, row, key = at.batch.long() * self.heads + at.head.long(), at.row.long(), at.k.long()
        if len(self.seed) > SEED_WORDS:
            origin = self.seed[SEED_WORDS:].tolist()
            batch_head, row, key = placed(origin, at.batch.long(), at.head.long(), row, key, self.heads)
        kept = keep(self.p, 0, batch_head, row, key, self.heads, self.seed[:SEED_WORDS].view(torch.int64))
        return kept.logical_not_().view(-1, rows.strip.group * (rows.stop - rows.first), tile.stop - tile.start)
