"""Attention by torch's CPU flash attention with an additive mask, for 16-bit problems whose scores change by distance alone.

The kernel reads a float32 mask under any strides, overlapping ones too, adds it to float32 scores, and skips nothing, so that
queries go in strips, each with the keys that it sees (torch 2.13.0). What `delegate.py` says of 16 bits holds here too.
"""

from __future__ import annotations

import math

import torch

from flashtile.kernels.cpu import tiled
from flashtile.kernels.cpu.delegate import FLASH, MOST_SCORE, embedded, heads_first, most_score
from flashtile.kernels.cpu.distance import distances_of
from flashtile.kernels.cpu.lse import mend_lse
from flashtile.kernels.cpu.region import Region, region_of
from flashtile.problem.attention import AttentionProblem

Tensors = dict[str, torch.Tensor]

# Queries at once where some keys are hidden from them. Of q 1x2048x4x64 bf16, one core of a Xeon with AMX, torch 2.13.0,
# 2026-11-21: causal ALiBi 256 rows 9.5 ms, 512 9.4, 1024 11.1; a window of 257 keys 256 rows 4.2 ms, 512 5.3, 1024 7.2.
ROWS = 512
ROWS_OF_WINDOW = 256


def forward(p: AttentionProblem, tensors: Tensors, outputs: tuple[str, ...], first_batch: int = 0) -> Tensors:
    """The outputs out and lse; lse, float32, is coarse unless the problem returns it.

    `first_batch` is what modifiers take the first batch entry for.
    """
    region = region_of(p)
    rows, keys = region.row_slice, region.key_slice
    q, k, v = (heads_first(tensors[name], part, tensors["q"].dtype) for name, part in (("q", rows), ("k", keys), ("v", keys)))
    distances = distances_of(p, tensors, first_batch)
    if not most_score(p, q, k) + distances.most <= MOST_SCORE:
        return tiled.forward(p, tensors, outputs, first_batch)
    out = q.new_empty((p.batch, region.rows, p.heads_q, p.head_dim_v))
    lse = q.new_empty((p.batch, p.heads_q, region.rows), dtype=torch.float32)
    for first in range(0, region.rows, height := _height(region)):
        stop = min(first + height, region.rows)
        seen = next(region.tiles(first, stop - 1, region.keys)).keys
        values, sums = FLASH(
            q[:, :, first:stop].flip(2), k[:, :, seen], v[:, :, seen], 0.0, False,
            attn_mask=distances.at(first, stop, seen), scale=p.scale_value,
        )  # fmt: skip
        out[:, first:stop] = values.transpose(1, 2).flip(1)
        lse[:, :, first:stop] = sums.flip(2)
    made = {"out": embedded(out, 1, rows, p.seqlen_q, 0.0), "lse": embedded(lse, 2, rows, p.seqlen_q, -math.inf)}
    if p.returns_lse:
        mend_lse(p, tensors, made["lse"], distances if p.score else None)
    return made


def _height(region: Region) -> int:
    """How many queries to compute at once."""
    if region.full:
        return region.rows
    return ROWS if region.band.left is None or region.band.right is None else ROWS_OF_WINDOW
