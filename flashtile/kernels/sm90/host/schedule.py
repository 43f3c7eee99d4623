"""How blocks share the tiles of a forward: the arithmetic of `work.job_at` on the host, to choose by."""

from __future__ import annotations

from heapq import heapreplace
from math import ceil

from flashtile.kernels.device.varlen import most_tiles
from flashtile.kernels.sm90.host.tile_forward import ForwardLaunch
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.mask import key_range

MOST_QUEUED = 4000  # tiles that `queued` plays through; with more the end is a small part of the whole


def tile_lengths(problem: AttentionProblem, block_q: int, block_k: int) -> list[int]:
    """Key tiles that each query tile of a head visits."""
    p = problem
    band = p.mask.clipped(p.seqlen_q, p.seqlen_k)
    lengths: list[int] = []
    for row in range(0, p.seqlen_q, block_q):
        last = min(row + block_q, p.seqlen_q) - 1
        lo, _, _, hi = key_range(
            row + p.shift, last + p.shift, p.seqlen_k, band.left or 0, band.right or 0,
            band.left is not None, band.right is not None, block_k,
        )  # fmt: skip
        lengths.append(max(ceil(hi / block_k) - lo // block_k, 1))
    return lengths


def busiest(costs: list[float], heads: int, swizzle: int, blocks: int, listed: bool = False) -> float:
    """Cost of the block that gets most: `blocks` resident ones take tiles to and fro, `swizzle` heads together.

    listed: as with lists, where groups of heads go to and fro, and turns if there is one group alone.
    """
    order, load = _order(costs, heads, swizzle, listed), [0.0] * blocks
    zigzag = not listed or swizzle >= heads
    for turn, first in enumerate(range(0, len(order), blocks)):
        served = order[first : first + blocks]
        served += [0.0] * (blocks - len(served))
        load = [a + b for a, b in zip(load, reversed(served) if zigzag and turn & 1 else served, strict=True)]
    return max(load)


def queued(costs: list[float], heads: int, swizzle: int, places: int) -> float:
    """When the last tile is done if every tile has a block of its own, started as soon as one of `places` is free."""
    if len(costs) * heads > MOST_QUEUED:
        return sum(costs) * heads / places + max(costs) / 2
    ends = [0.0] * places
    for cost in _order(costs, heads, swizzle):
        heapreplace(ends, ends[0] + cost)
    return max(ends)


def _order(costs: list[float], heads: int, swizzle: int, listed: bool = False) -> list[float]:
    """Costs in the order of places (see `work.job_at`): the last tile of a head first, with lists of every other group."""
    order: list[float] = []
    groups = range(0, heads, swizzle)
    for group, first in enumerate(groups):
        together, back = min(heads - first, swizzle), listed and (len(groups) - group) % 2 == 0
        for cost in costs if back else reversed(costs):
            order += [cost] * together
    return order


def tile_count(problem: AttentionProblem, launch: ForwardLaunch) -> int:
    """Query tiles of all heads; where items differ in length the most that there can be."""
    return most_tiles(problem.span_q, problem.batch, launch.block_q, problem.lengths.varlen) * problem.heads_q
