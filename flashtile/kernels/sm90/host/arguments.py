"""Arguments that Hopper's kernels over queries have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flashtile.kernels.device.varlen import Schedules, most_tiles
from flashtile.kernels.sm90.host.tile_forward import LOST, ForwardLaunch, ForwardTile
from flashtile.plan.arguments import integers, mask_args, score_args
from flashtile.plan.buffers import scale_shapes
from flashtile.plan.call import Descriptor, Pointer, Strides
from flashtile.problem.attention import AttentionProblem


def product_scale(p: AttentionProblem) -> float:
    """The scale of what the matrix unit makes of q and k, which on average is a little less than their product.

    How much less of e4m3 nobody has measured.
    """
    return p.scale_value if p.multiplies_fp8 else p.scale_value * (1.0 + LOST * p.head_dim)


def over_queries(
    p: AttentionProblem, launch: ForwardLaunch, tile: ForwardTile, schedules: Schedules
) -> tuple[tuple[Descriptor, ...], tuple[Any, ...]]:
    """The first and the last arguments of a pass over queries: q, k and v, and which tiles there are and what makes scores."""
    schedule = schedules.of(launch.block_q)
    records = schedule and most_tiles(p.span_q, p.batch, launch.block_q, p.lengths.varlen)
    tiles = (
        Descriptor("q", (1, 1, tile.rows, tile.columns)),
        Descriptor("k", (1, 1, tile.block_k, tile.columns)),
        Descriptor("v", (1, 1, tile.block_k, tile.columns_v)),
    )
    region: tuple[Any, ...] = (schedule, records, mask_args(p), block_lists(p, "q"))
    if p.multiplies_fp8:
        tiles = (*tiles[:2], Descriptor("turned", (1, 1, tile.columns_v, tile.block_k), axes=(0, 1, 2, 3)))
    elif p.stored is not None:
        tiles = (tiles[0], *(replace(t, name=f"wide.{t.name}") for t in tiles[1:]))
    if p.stored is not None:
        names = [f"{side}_scale" if side in scale_shapes(p) else None for side in "qkv"]
        region = (*region, tuple(arg for name in names for arg in (name and Pointer(name), name and Strides(name))))
    rest = product_scale(p), score_args(p), region
    return tiles, (*(integers(p)[n] for n in ("heads", "group", "left", "right")), launch.swizzle, rest)


def block_lists(p: AttentionProblem, side: str) -> tuple[Any, ...] | None:
    """The mask's lists by blocks of queries ("q") or keys ("k"): counts, indices and order, each with its strides."""
    names = () if p.blocks is None else (f"blocks.{what}_{side}" for what in ("count", "index", "order"))
    return tuple(arg for name in names for arg in (Pointer(name), Strides(name))) or None
