"""Attention by tiles with an online softmax (arXiv 2307.08691), in plain torch and float32.

Tiles are (items, group * rows, width): an item is a (batch, key/value head) pair, whose group of query heads shares the
keys, so that grouped heads need no repeated k and v.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from flashtile.kernels.cpu.region import Region, Tile, Tiling, region_of, tiling_of
from flashtile.spec.attention import AttentionProblem
from flashtile.spec.mask import Band
from flashtile.spec.score import Position

Tensors = dict[str, torch.Tensor]

LOG2E = 1.0 / math.log(2.0)
# Probabilities below 2^-100 of a row's largest change no float32 sum, but they and their products become denormal numbers,
# on which a matrix product is 9 times slower (ALiBi, Xeon with AVX-512, torch 2.13.0).
LEAST_LOG2 = -100.0


def forward(p: AttentionProblem, tensors: Tensors, outputs: tuple[str, ...]) -> Tensors:
    """The outputs out and lse."""
    out = tensors["q"].new_zeros((p.batch, p.seqlen_q, p.heads_q, p.head_dim_v))
    lse = out.new_full((p.batch, p.heads_q, p.seqlen_q), -math.inf, dtype=torch.float32)
    modifiers = Modifiers(p, tensors)
    for strip in _strips(p):
        k, v = strip.load(tensors["k"]), strip.load(tensors["v"])
        for rows in strip.runs():
            made, sums = _attend(rows, modifiers, rows.load(tensors["q"]).mul_(p.scale_value), k, v)
            rows.of(out).copy_(rows.by_head(made))
            rows.of(_column(lse)).copy_(rows.by_head(sums))
    return {"out": out, "lse": lse}


def _attend(
    rows: Rows, modifiers: Modifiers, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a run of rows: (items, group * rows, head_dim_v) and (items, group * rows, 1)."""
    peak = q.new_full((*q.shape[:2], 1), -math.inf)
    total, made = torch.zeros_like(peak), q.new_zeros((*q.shape[:2], v.shape[2]))
    for tile in rows.tiles():
        s = torch.bmm(q, k[:, tile.keys].mT)
        if modifiers.chain:
            by_head = rows.by_head(s)
            by_head.copy_(modifiers.apply(by_head, rows.at(tile)))
        rows.hide(s, tile, -math.inf)
        new_peak = torch.maximum(peak, s.amax(2, keepdim=True))
        base = _finite(new_peak)  # a row may see nothing in this tile: no -inf - -inf
        prob = _exp_(s.sub_(base))
        decay = _exp_(peak - base)
        total.mul_(decay).add_(prob.sum(2, keepdim=True))
        made.mul_(decay).baddbmm_(prob, v[:, tile.keys])
        peak = new_peak
    lse = peak + total.log()
    return made.div_(total.masked_fill_(total == 0.0, 1.0)), lse


def backward(p: AttentionProblem, tensors: Tensors, outputs: tuple[str, ...]) -> Tensors:
    """Those of dq, dk, dv, dscore.I.J that `outputs` names. One pass over the tiles, summed in float32 in a fixed order."""
    made = {f"d{n}": tensors[n].new_zeros(tensors[n].shape) for n in "qkv" if f"d{n}" in outputs}
    modifiers = Modifiers(p, tensors)
    for strip in _strips(p):
        k, v = strip.load(tensors["k"]), strip.load(tensors["v"])
        dk, dv = (torch.zeros_like(t) if name in made else None for name, t in (("dk", k), ("dv", v)))
        for rows in strip.runs():
            given = _load(p, rows, tensors)
            dq = torch.zeros_like(given.q) if "dq" in made else None
            for tile in rows.tiles():
                keys = tile.keys
                prob, saved = _probabilities(rows, tile, modifiers, given, k[:, keys])
                if dv is not None:
                    dv[:, keys].baddbmm_(prob.mT, given.dout)
                if outputs == ("dv",):
                    continue
                ds = torch.bmm(given.dout, v[:, keys].mT).sub_(given.delta).mul_(prob)
                if saved is not None:
                    ds = modifiers.pull(saved, rows.by_head(ds)).reshape(ds.shape)
                    rows.hide(ds, tile, 0.0)
                if dk is not None:
                    dk[:, keys].baddbmm_(ds.mT, given.q)
                if dq is not None:
                    dq.baddbmm_(ds, k[:, keys])
            if dq is not None:
                rows.of(made["dq"]).copy_(rows.by_head(dq.mul_(p.scale_value)))
        if dk is not None:  # the scale came with q
            strip.of(made["dk"]).copy_(strip.by_head(dk))
        if dv is not None:
            strip.of(made["dv"]).copy_(strip.by_head(dv))
    return {**made, **modifiers.grads}


class Given(NamedTuple):
    """What the backward knows of a run of rows: (items, group * rows, head_dim or 1)."""

    q: torch.Tensor
    dout: torch.Tensor
    lse: torch.Tensor  # 0 for -inf
    delta: torch.Tensor  # sum_d out * dout - dlse


def _load(p: AttentionProblem, rows: Rows, tensors: Tensors) -> Given:
    dout = rows.load(tensors["dout"])
    delta = (rows.load(tensors["out"]) * dout).sum(2, keepdim=True)
    if "dlse" in tensors:
        delta -= rows.load(_column(tensors["dlse"]))
    lse = _finite(rows.load(_column(tensors["lse"])))
    return Given(rows.load(tensors["q"]).mul_(p.scale_value), dout, lse, delta)


def _probabilities(
    rows: Rows, tile: Tile, modifiers: Modifiers, given: Given, k: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """The probabilities of a tile, and what `Modifiers.pull` needs where there are modifiers."""
    s = torch.bmm(given.q, k.mT)
    if modifiers.chain:
        saved = modifiers.record(rows.by_head(s), rows.at(tile))
        prob = _exp_(saved[1].detach().reshape(s.shape) - given.lse)
    else:
        saved, prob = None, _exp_(s.sub_(given.lse))
    rows.hide(prob, tile, 0.0)
    return prob, saved


def _exp_(exponents: torch.Tensor) -> torch.Tensor:
    """exp(exponents) in place, and 0 where that is below 2 ** LEAST_LOG2.

    torch.exp2 does 2 to 4e9 elements/s whatever the argument, torch.exp (MKL) 1e7 to 3e8 where results underflow (one core
    of a Xeon with AVX-512, torch 2.13.0).
    """
    return torch.threshold_(exponents.mul_(LOG2E), LEAST_LOG2, -math.inf).exp2_()


def _finite(rows: torch.Tensor) -> torch.Tensor:
    """A copy with 0 for -inf; NaN and +inf stay and propagate."""
    return rows.masked_fill(rows == -math.inf, 0.0)


def _column(per_row: torch.Tensor) -> torch.Tensor:
    """A (batch, heads, seqlen) tensor seen as (batch, seqlen, heads, 1)."""
    return per_row.transpose(1, 2).unsqueeze(3)


class Modifiers:
    """The score modifiers of a problem with their captured tensors, and the gradients of those so far (`dscore.I.J`)."""

    def __init__(self, p: AttentionProblem, tensors: Tensors):
        self.chain, self.captured, self.grads = p.score, {}, {}
        for i, spec in enumerate(p.score):
            for j, described in enumerate(spec.tensors):
                tensor = tensors[f"score.{i}.{j}"].detach()
                if described.grad:
                    tensor = tensor.float().requires_grad_()
                    self.grads[f"dscore.{i}.{j}"] = tensor.new_zeros(described.shape, dtype=torch.float32)
                self.captured[i, j] = tensor
        self.leaves = [t for t in self.captured.values() if t.requires_grad]

    def apply(self, score: torch.Tensor, at: Position) -> torch.Tensor:
        """The modified scores, float32, in the shape (batch, heads_q, rows, width) of `score`."""
        for i, spec in enumerate(self.chain):
            captured = tuple(self.captured[i, j] for j in range(len(spec.tensors)))
            score = spec.kind.apply(score, at, spec.scalars, captured).to(torch.float32)
        return score

    def record(self, score: torch.Tensor, at: Position) -> tuple[torch.Tensor, torch.Tensor]:
        """(score, modified score) with autograd's graph between them."""
        with torch.enable_grad():
            score = score.detach().requires_grad_()
            return score, self.apply(score, at)

    def pull(self, saved: tuple[torch.Tensor, torch.Tensor], grad: torch.Tensor) -> torch.Tensor:
        """The gradient of the score, given that of the modified score; what captured tensors receive is added up."""
        score, modified = saved
        ds, *given = torch.autograd.grad(modified, (score, *self.leaves), grad, allow_unused=True)
        for total, share in zip(self.grads.values(), given, strict=True):
            if share is not None:
                total += share
        return torch.zeros_like(score) if ds is None else ds


@dataclass(frozen=True)
class Strip:
    """Some items: batch entries times key/value heads, and all their keys."""

    region: Region
    tiling: Tiling
    batches: slice
    heads_kv: slice
    group: int
    masks: Masks

    @property
    def heads_q(self) -> slice:
        """The query heads of the key/value heads."""
        return slice(self.heads_kv.start * self.group, self.heads_kv.stop * self.group)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The (batch, heads_kv, keys, head_dim) view of a tensor like k."""
        return tensor[self.batches, self.region.key_slice, self.heads_kv].transpose(1, 2)

    def load(self, tensor: torch.Tensor) -> torch.Tensor:
        """A dense float32 copy, (items, keys, head_dim), of a tensor like k."""
        return _dense(self.of(tensor)).view(-1, self.region.keys, tensor.shape[3])

    def by_head(self, keys: torch.Tensor) -> torch.Tensor:
        """What `load` flattened, seen as `of` has it."""
        return keys.view(-1, self.heads_kv.stop - self.heads_kv.start, *keys.shape[1:])

    @cached_property
    def batch_index(self) -> torch.Tensor:
        """`Position.batch`."""
        return _indices(self.batches.start, self.batches.stop)[:, None, None, None]

    @cached_property
    def head_index(self) -> torch.Tensor:
        """`Position.head`."""
        return _indices(self.heads_q.start, self.heads_q.stop)[:, None, None]

    def runs(self) -> Iterator[Rows]:
        """All rows, a tile's worth at a time."""
        for first in range(0, self.region.rows, self.tiling.rows):
            yield Rows(self, first, min(first + self.tiling.rows, self.region.rows))


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

    def load(self, tensor: torch.Tensor) -> torch.Tensor:
        """A dense float32 copy, (items, group * rows, head_dim), of a tensor like q."""
        return _dense(self.of(tensor)).view(-1, self.strip.group * (self.stop - self.first), tensor.shape[3])

    def by_head(self, tile: torch.Tensor) -> torch.Tensor:
        """An (items, group * rows, n) tensor seen as (batch, heads_q, rows, n)."""
        heads = self.strip.heads_q
        return tile.view(-1, heads.stop - heads.start, self.stop - self.first, tile.shape[2])

    def at(self, tile: Tile) -> Position:
        """Where a tile lies, in the problem's own indices."""
        start = self.strip.region.first_key
        key = _indices(start + tile.start, start + tile.stop)
        return Position(self.strip.batch_index, self.strip.head_index, self.row_index, self.position, key)

    @cached_property
    def row_index(self) -> torch.Tensor:
        """`Position.row`."""
        start = self.strip.region.first_row
        return _indices(start + self.first, start + self.stop)[:, None]

    @cached_property
    def position(self) -> torch.Tensor:
        """`Position.q`."""
        return self.row_index + self.strip.region.shift

    def hide(self, scores: torch.Tensor, tile: Tile, value: float) -> None:
        """Write `value` where a row does not see a key; only at the tile's edges is there anything to do."""
        for start, stop in tile.edges:
            hidden = self.strip.masks.hidden(self.stop - self.first, stop - start, start - self.first)
            self.by_head(scores)[..., start - tile.start : stop - tile.start].masked_fill_(hidden, value)


@dataclass(frozen=True)
class Masks:
    """The masks of one call; most tiles at the edge of a band share one."""

    band: Band
    made: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)

    def hidden(self, rows: int, width: int, offset: int) -> torch.Tensor:
        """Boolean (rows, width): which row does not see which key; `offset` is the first key's index less the first row's."""
        if (rows, width, offset) not in self.made:
            distance = _indices(offset, offset + width) - _indices(0, rows)[:, None]
            hidden = torch.zeros_like(distance, dtype=torch.bool)
            if self.band.left is not None:
                hidden |= distance < -self.band.left
            if self.band.right is not None:
                hidden |= distance > self.band.right
            self.made[rows, width, offset] = hidden
        return self.made[rows, width, offset]


def _indices(start: int, stop: int) -> torch.Tensor:
    """int32 like the kernels' indices, and because torch subtracts them 5 times faster than int64."""
    return torch.arange(start, stop, dtype=torch.int32, device="cpu")


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty(tensor.shape, dtype=torch.float32).copy_(tensor)


def _strips(p: AttentionProblem) -> Iterator[Strip]:
    """Strips that cover all items: as many heads at once as fill a tile, and if those are all, several batch entries."""
    region = region_of(p)
    if not region.rows:
        return
    tiling = tiling_of(p, region)
    items = tiling.items(torch.get_num_threads())
    heads = min(items, p.heads_kv)
    batches = max(1, items // p.heads_kv)
    masks = Masks(region.band)
    for batch in range(0, p.batch, batches):
        for head in range(0, p.heads_kv, heads):
            some = slice(batch, min(batch + batches, p.batch)), slice(head, min(head + heads, p.heads_kv))
            yield Strip(region, tiling, *some, p.group, masks)
