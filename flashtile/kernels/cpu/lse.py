"""An exact lse, given one that is nearly so.

torch's 16-bit flash attention sums exponentials that are off by up to 1.1e-4, a function of where a score lies between two
powers of two; at a row's largest score it is 5.3e-5 (torch 2.13.0). What its lse is short of is log sum_j exp(score_j - lse):
no peak has to be found, and no value multiplied, which costs half of what tiles do.
"""

from __future__ import annotations

import torch

from flashtile.kernels.cpu.distance import LEAST_EXPONENT, Distances, longest
from flashtile.kernels.cpu.products import Scratch
from flashtile.kernels.cpu.strip import Rows, Strip, strips
from flashtile.problem.attention import AttentionProblem

Tensors = dict[str, torch.Tensor]

NEGLIGIBLE = -32.0  # an exponent: 2^17 keys of such a probability are below float32's resolution, 2^-24, of a row's sum


def mend_lse(p: AttentionProblem, tensors: Tensors, lse: torch.Tensor, distances: Distances | None = None) -> None:
    """Make a nearly exact float32 lse, (batch, heads_q, seqlen_q), exact. Its scores are finite, and products float32.

    `distances`: what modifiers add, where there are some. The product subtracts lse, as one more element of q, where k has -1.
    """
    scratch, column = Scratch(), lse.transpose(1, 2).unsqueeze(3)
    for strip in strips(p, tensors):
        k = _keys(p, strip, tensors["k"])
        longest_k = longest(k)
        for rows in strip.runs():
            q = _queries(p, rows, tensors["q"], column, scratch)
            most, total = longest(q) * longest_k, q.new_zeros((*q.shape[:2], 1))  # what no product exceeds
            for tile in rows.tiles():
                where = rows.first, rows.stop, tile.keys, strip.batches, strip.heads_q
                if distances is not None and most + distances.largest(*where) < NEGLIGIBLE:
                    continue
                exponents = scratch.product("scores", q, k[:, tile.keys].mT)
                if distances is not None:
                    rows.by_head(exponents).add_(distances.at(*where))
                if distances is not None or most > -LEAST_EXPONENT:
                    exponents.clamp_min_(LEAST_EXPONENT)
                exponents.exp_()
                if distances is None:
                    rows.hide(exponents, tile, 0.0)
                total += exponents.sum(2, keepdim=True)
            rows.of(column).add_(_turned(p, rows.by_head(total.log_())))


def _turned(p: AttentionProblem, rows: torch.Tensor) -> torch.Tensor:
    """(batch, heads, rows, n) in the order of `Distances.at` where there are any, and back."""
    return rows.flip(2) if p.score else rows


def _keys(p: AttentionProblem, strip: Strip, tensor: torch.Tensor) -> torch.Tensor:
    """The keys of a strip times the scale, and -1: float32 (items, keys, head_dim + 1)."""
    batches, heads = (part.stop - part.start for part in (strip.batches, strip.heads_kv))
    k = torch.empty((batches * heads, strip.region.keys, p.head_dim + 1), dtype=torch.float32, device="cpu")
    k[:, :, p.head_dim] = -1.0
    strip.by_head(k)[..., : p.head_dim].copy_(strip.of(tensor)).mul_(p.scale_value)
    return k


def _queries(p: AttentionProblem, rows: Rows, tensor: torch.Tensor, column: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """The queries, and their lse: float32 (items, group * rows, head_dim + 1)."""
    given = rows.of(tensor)
    q = scratch.empty("q", (*given.shape[:3], p.head_dim + 1), torch.float32)
    q[..., : p.head_dim].copy_(_turned(p, given))
    q[..., p.head_dim :].copy_(_turned(p, rows.of(column)))
    return q.view(-1, p.group * given.shape[2], p.head_dim + 1)
