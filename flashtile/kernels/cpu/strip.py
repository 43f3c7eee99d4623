"""How the tiles of a problem lie in its tensors.

Tiles are (items, group * rows, width): an item is a (batch, key/value head) pair, whose group of query heads shares the
keys, so that grouped heads need no repeated k and v.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch

from flashtile.kernels.cpu.region import Region, Tile, Tiling, region_of, tiling_of
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.mask import Band
from flashtile.problem.score import Position


@dataclass(frozen=True)
class Strip:
    """Some items: batch entries times key/value heads, and all their keys."""

    region: Region
    tiling: Tiling
    batches: slice
    heads_kv: slice
    group: int
    masks: Masks
    first_batch: int
    predicates: Predicates | None

    @property
    def heads_q(self) -> slice:
        """The query heads of the key/value heads."""
        return slice(self.heads_kv.start * self.group, self.heads_kv.stop * self.group)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The (batch, heads_kv, keys, head_dim) view of a tensor like k."""
        return tensor[self.batches, self.region.key_slice, self.heads_kv].transpose(1, 2)

    def load(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A dense copy, (items, keys, head_dim), of a tensor like k."""
        return _dense(self.of(tensor), dtype).view(-1, self.region.keys, tensor.shape[3])

    def by_head(self, keys: torch.Tensor) -> torch.Tensor:
        """What `load` flattened, seen as `of` has it."""
        return keys.view(-1, self.heads_kv.stop - self.heads_kv.start, *keys.shape[1:])

    @cached_property
    def batch_index(self) -> torch.Tensor:
        """`Position.batch`."""
        first = self.first_batch
        return indices(first + self.batches.start, first + self.batches.stop)[:, None, None, None]

    @cached_property
    def head_index(self) -> torch.Tensor:
        """`Position.head`."""
        return indices(self.heads_q.start, self.heads_q.stop)[:, None, None]

    def runs(self, few: int = 0) -> Iterator[Rows]:
        """All rows, a tile's worth at a time; those at the ends that see at most `few` keys apart."""
        for first, stop in self.region.runs(self.tiling.rows, few):
            yield Rows(self, first, stop)


@dataclass(frozen=True)
class Rows:
    """The local rows [first, stop) of a strip."""

    strip: Strip
    first: int
    stop: int

    def tiles(self) -> Iterator[Tile]:
        """The tiles of keys that these rows see."""
        return self.strip.region.tiles(self.first, self.stop - 1, self.strip.tiling.width)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The (batch, heads_q, rows, head_dim) view of a tensor like q."""
        start = self.strip.region.first_row
        return tensor[self.strip.batches, start + self.first : start + self.stop, self.strip.heads_q].transpose(1, 2)

    def load(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A dense copy, (items, group * rows, head_dim), of a tensor like q."""
        return _dense(self.of(tensor), dtype).view(-1, self.strip.group * (self.stop - self.first), tensor.shape[3])

    def by_head(self, tile: torch.Tensor) -> torch.Tensor:
        """An (items, group * rows, n) tensor seen as (batch, heads_q, rows, n)."""
        heads = self.strip.heads_q
        return tile.view(-1, heads.stop - heads.start, self.stop - self.first, tile.shape[2])

    def per_head(self, values: torch.Tensor) -> torch.Tensor:
        """A (heads_q,) tensor as (items, group * rows, 1)."""
        batches, heads, rows = self.strip.batches, self.strip.heads_q, self.stop - self.first
        column = values[heads, None].expand(batches.stop - batches.start, heads.stop - heads.start, rows)
        return column.reshape(-1, self.strip.group * rows, 1)

    def at(self, tile: Tile) -> Position:
        """Where a tile lies, in the problem's own indices."""
        start = self.strip.region.first_key
        key = indices(start + tile.start, start + tile.stop)
        return Position(self.strip.batch_index, self.strip.head_index, self.row_index, self.position, key)

    @cached_property
    def row_index(self) -> torch.Tensor:
        """`Position.row`."""
        start = self.strip.region.first_row
        return indices(start + self.first, start + self.stop)[:, None]

    @cached_property
    def position(self) -> torch.Tensor:
        """`Position.q`."""
        return self.row_index + self.strip.region.shift

    def hide(self, scores: torch.Tensor, tile: Tile, value: float) -> None:
        """Write `value`, 0 or -inf, where a row does not see a key, whatever stands there; only at the tile's edges is there
        anything to do.

        tril_ writes 0 in a quarter of the time of bitwise_and_, and that in an eighth of masked_fill_'s (512 x 512 float32:
        10, 37 and 300 us; one core of a Xeon with AVX-512, torch 2.13.0).
        """
        if tile.edges:
            whole, band, ahead = self.by_head(scores), self.strip.region.band, self.first - tile.start
            if band.right is not None:
                whole.tril_(ahead + band.right)
            if band.left is not None:
                whole.triu_(ahead - band.left)
            for start, stop in tile.edges if value else ():
                mask = self.strip.masks.added(self.stop - self.first, stop - start, start - self.first, whole.dtype)
                whole[..., start - tile.start : stop - tile.start].add_(mask)
        if self.strip.predicates is not None:
            self.by_head(scores).masked_fill_(~self.kept(tile), value)

    def seen(self, tile: Tile) -> torch.Tensor | None:
        """`kept`, or None where that is all of them."""
        return self.kept(tile) if tile.edges or self.strip.predicates is not None else None

    def kept(self, tile: Tile) -> torch.Tensor:
        """Which scores of a tile band and predicates let through, bool (batch, heads_q, rows, width)."""
        predicates, band = self.strip.predicates, self.strip.region.band
        keep = torch.ones((1, 1, 1, 1), dtype=torch.bool) if predicates is None else predicates.hold(self.at(tile))
        distance = indices(tile.start, tile.stop) - indices(self.first, self.stop)[:, None]
        if band.left is not None:
            keep = keep & (distance >= -band.left)
        if band.right is not None:
            keep = keep & (distance <= band.right)
        shape = (*(s.stop - s.start for s in (self.strip.batches, self.strip.heads_q)), self.stop - self.first)
        return keep.expand(*shape, tile.stop - tile.start)

    def lone(self) -> torch.Tensor | None:
        """Which rows see a single key, bool (items, group * rows, 1); None where no row does."""
        band, keys = self.strip.region.band, self.strip.region.keys
        if self.strip.predicates is None:
            row = indices(self.first, self.stop)
            stop = torch.full_like(row, keys) if band.right is None else (row + band.right + 1).clamp(max=keys)
            start = torch.zeros_like(row) if band.left is None else (row - band.left).clamp(min=0)
            single = (stop - start == 1).repeat(self.strip.group)[None, :, None]
        else:
            single = sum(self.kept(tile).sum(3) for tile in self.tiles()) == 1
            single = single.reshape(-1, self.strip.group * (self.stop - self.first), 1)
        return single if single.any() else None

    def some_keys(self, keys: torch.Tensor, tile: Tile) -> torch.Tensor:
        """A tile's (items, width, n) keys, 0 where the predicates hide them from all of these rows."""
        if self.strip.predicates is None:
            return keys
        kept = self.kept(tile).any(2).unflatten(1, (-1, self.strip.group)).any(2)
        return keys.masked_fill(~kept.reshape(-1, keys.shape[1], 1), 0.0)

    def some_rows(self, rows: torch.Tensor, tile: Tile) -> torch.Tensor:
        """An (items, group * rows, n) tensor, 0 in rows from which the predicates hide all keys of the tile."""
        if self.strip.predicates is None:
            return rows
        return rows.masked_fill(~self.kept(tile).any(3).reshape(rows.shape[0], -1, 1), 0.0)


class Predicates:
    """The predicates of a problem, with their tensors."""

    def __init__(self, p: AttentionProblem, tensors: dict[str, torch.Tensor]):
        leaves = iter(enumerate(p.leaves))
        self.terms = [
            [
                (leaf, tuple(tensors[f"mask.{i}.{j}"] for j in range(len(leaf.tensors))))
                for i, leaf in (next(leaves) for _ in term)
            ]
            for term in p.where
        ]

    def hold(self, at: Position) -> torch.Tensor:
        """Where one of the terms holds; broadcasts against the tile."""
        whole = torch.zeros((), dtype=torch.bool, device="cpu")
        for term in self.terms:
            every = torch.ones((), dtype=torch.bool, device="cpu")
            for leaf, tensors in term:
                every = every & leaf.kind.apply(at, leaf.scalars, tensors)
            whole = whole | every
        return whole


@dataclass(frozen=True)
class Masks:
    """The masks of one call; most tiles at the edge of a band share one."""

    band: Band
    made: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def added(self, rows: int, width: int, offset: int, dtype: torch.dtype) -> torch.Tensor:
        """-inf where a row does not see a key and else 0, (rows, width).

        `offset` is the first key's index less the first row's.
        """
        key = rows, width, offset, dtype
        if key not in self.made:
            distance = indices(offset, offset + width) - indices(0, rows)[:, None]
            hidden = torch.zeros_like(distance, dtype=torch.bool)
            if self.band.left is not None:
                hidden |= distance < -self.band.left
            if self.band.right is not None:
                hidden |= distance > self.band.right
            self.made[key] = torch.zeros_like(distance, dtype=dtype).masked_fill_(hidden, -math.inf)
        return self.made[key]


def indices(start: int, stop: int) -> torch.Tensor:
    """int32 like the kernels' indices, and because torch subtracts them 5 times faster than int64."""
    return torch.arange(start, stop, dtype=torch.int32, device="cpu")


def _dense(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.new_empty(tensor.shape, dtype=dtype).copy_(tensor)


def strips(
    p: AttentionProblem, tensors: dict[str, torch.Tensor], first_batch: int = 0, tiling: Tiling | None = None
) -> Iterator[Strip]:
    """Strips that cover all items: as many heads at once as fill a tile, and if those are all, several batch entries."""
    region = region_of(p)
    if not region.rows:
        return
    tiling = tiling or tiling_of(p, region)
    items = tiling.items(torch.get_num_threads())
    heads = min(items, p.heads_kv)
    batches = max(1, items // p.heads_kv)
    masks, predicates = Masks(region.band), Predicates(p, tensors) if p.where else None
    for batch in range(0, p.batch, batches):
        for head in range(0, p.heads_kv, heads):
            some = slice(batch, min(batch + batches, p.batch)), slice(head, min(head + heads, p.heads_kv))
            yield Strip(region, tiling, *some, p.group, masks, first_batch, predicates)
