"""Attention by torch's CPU flash attention, with a mask that holds an element for every score: 16-bit problems.

Of a curve, like softcap, the mask is the modified scores, and the kernel's own q is zero. It then does what follows the scores,
maxima, exponentials, sums and products with v, in less time than plain torch takes for a pass over the tile for each of
these. Of what is added, like a bias, the mask is the sum. The kernel needs whole rows: a strip of queries with all keys
that they see. What `delegate.py` says of 16 bits holds here too.
"""

from __future__ import annotations

import math

import torch

from flashtile.kernels.cpu import tiled
from flashtile.kernels.cpu.delegate import FLASH, MOST_SCORE, heads_first, most_score
from flashtile.kernels.cpu.modifiers import Modifiers
from flashtile.kernels.cpu.products import Scratch
from flashtile.kernels.cpu.region import Region, Tile, Tiling, region_of
from flashtile.kernels.cpu.strip import Rows, strips
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.score import Position

Tensors = dict[str, torch.Tensor]

# Scores of a strip: 2 MiB, a core's L2 cache. Of q 1x2048x4x64 bf16 softcap, one core of a Xeon with AMX, torch 2.13.0,
# 2026-11-21: causal strips of 128 queries 25.2 ms, 256 24.4, 512 26.3; full ones 46.9, 41.7, 39.2. With fewer than 128 the
# kernel's own tiles are small.
SCORES = 2**19
SCORES_OF_FULL = 2**20
LEAST_ROWS = 128
MOST_KEYS = 2**15  # 16 MiB of scores per head at once


def forward(p: AttentionProblem, tensors: Tensors, outputs: tuple[str, ...], first_batch: int = 0) -> Tensors:
    """The outputs out and lse; lse, float32, is coarse. `first_batch` as in `tiled.forward`."""
    region, modifiers = region_of(p), Modifiers(p, tensors, torch.float32)
    q, k, v = (
        heads_first(tensors[name], part, tensors["q"].dtype)
        for name, part in (("q", region.row_slice), ("k", region.key_slice), ("v", region.key_slice))
    )
    most, bends = most_score(p, q, k), p.score[0].kind.curve is not None
    if not (_bent(most, modifiers) if bends else most) <= MOST_SCORE:
        return tiled.forward(p, tensors, outputs, first_batch)
    out = tensors["q"].new_zeros((p.batch, p.seqlen_q, p.heads_q, p.head_dim_v))
    lse = out.new_full((p.batch, p.heads_q, p.seqlen_q), -math.inf, dtype=torch.float32)
    scratch, column = Scratch(), lse.transpose(1, 2).unsqueeze(3)
    for strip in strips(p, tensors, first_batch, _tiling(p, region)):
        wide = strip.load(tensors["k"], torch.float32) if bends else None
        for rows in strip.runs():
            (tile,) = rows.tiles()
            scores = _scores(p, rows, tile, tensors["q"], wide, scratch)
            mask = rows.by_head(scores)
            modifiers.write(mask, rows.at(tile))
            rows.hide(scores, tile, -math.inf)
            if not bends and not most + mask.amax(3).abs().max().item() <= MOST_SCORE:  # NaN, or -inf in a whole row, too
                return tiled.forward(p, tensors, outputs, first_batch)
            queries = q[strip.batches, strip.heads_q, rows.first : rows.stop]
            if bends:
                queries = torch.zeros_like(queries)
            keys, values = (t[strip.batches, strip.heads_kv, tile.keys] for t in (k, v))
            made, sums = FLASH(queries, keys, values, 0.0, False, attn_mask=mask, scale=p.scale_value)
            rows.of(out).copy_(made)
            rows.of(column).copy_(sums.unsqueeze(3))
    return {"out": out, "lse": lse}


def _bent(most: float, modifiers: Modifiers) -> float:
    """What no score exceeds, given that before the curve, which rises; NaN or Inf where that is not known."""
    here = torch.zeros((), dtype=torch.int32, device="cpu")
    bounds = torch.tensor([most, -most], dtype=torch.float32, device="cpu").view(1, 1, 1, 2)
    after = modifiers.apply(bounds, Position(here, here, here, here, here))
    return torch.maximum(bounds, after.abs()).max().item()


def delegates_strips(p: AttentionProblem) -> bool:
    """Whether the modifiers are such, and rows short enough to be held."""
    bends = len(p.score) == 1 and p.score[0].kind.curve is not None
    adds = bool(p.score) and all(spec.kind.add is not None for spec in p.score)
    return (bends or adds) and region_of(p).keys <= MOST_KEYS


def _scores(
    p: AttentionProblem, rows: Rows, tile: Tile, q: torch.Tensor, wide: torch.Tensor | None, scratch: Scratch
) -> torch.Tensor:
    """Scores for a curve, given float32 keys, and else 0: float32 (items, group * rows, width)."""
    if wide is None:
        batches, heads = rows.strip.batches, rows.strip.heads_q
        items = (batches.stop - batches.start) * (heads.stop - heads.start) // p.group
        return scratch.empty(
            "scores", (items, p.group * (rows.stop - rows.first), tile.stop - tile.start), torch.float32
        ).zero_()
    scaled = rows.load(q, torch.float32).mul_(p.scale_value)
    return scratch.product("scores", scaled, wide[:, tile.keys].mT)


def _tiling(p: AttentionProblem, region: Region) -> Tiling:
    """Strips of whole rows."""
    scores = SCORES_OF_FULL if region.full else SCORES
    rows = min(max(1, max(LEAST_ROWS, scores // region.keys) // p.group), region.rows)
    return Tiling(rows, region.keys, p.group * rows * region.keys)
