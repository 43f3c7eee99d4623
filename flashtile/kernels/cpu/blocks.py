"""What each block of a mask holds, in plain torch."""

from __future__ import annotations

import torch

from flashtile.kernels.cpu.strip import Predicates, indices
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.score import Position


def classify(p: AttentionProblem, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """state, int8 (batch, heads_q, rows, columns): 0 where a block holds no score, 2 where all are visible, else 1."""
    assert p.blocks is not None
    rows, columns, size_q, size_k = p.blocks.rows(p.seqlen_q), p.blocks.columns(p.seqlen_k), p.blocks.block_q, p.blocks.block_k
    state = torch.zeros((p.batch, p.heads_q, rows, columns), dtype=torch.int8, device="cpu")
    predicates, band = Predicates(p, tensors) if p.where else None, p.band
    batch, head = indices(0, p.batch)[:, None, None, None], indices(0, p.heads_q)[:, None, None]
    key = indices(0, p.seqlen_k)
    for row in range(rows):
        index = indices(row * size_q, min((row + 1) * size_q, p.seqlen_q))[:, None]
        position = index + p.shift
        keep = index.new_ones((p.batch, p.heads_q, len(index), p.seqlen_k), dtype=torch.bool)
        if band.left is not None:
            keep &= key >= position - band.left
        if band.right is not None:
            keep &= key <= position + band.right
        if predicates is not None:
            keep &= predicates.hold(Position(batch, head, index, position, key))
        counts = torch.nn.functional.pad(keep.sum(2), (0, columns * size_k - p.seqlen_k)).unflatten(2, (columns, size_k)).sum(3)
        state[:, :, row] = (counts > 0).to(torch.int8) + (counts == size_q * size_k).to(torch.int8)
    return state
