"""Batches whose items differ in length: each item is a problem of its own, computed in its place in the tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from flashtile.kernels.cpu import tiled, ways
from flashtile.kernels.cpu.products import lse_dtype
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.lengths import ALIKE
from flashtile.problem.predicate import PredicateSpec
from flashtile.problem.score import ScoreSpec

Tensors = dict[str, torch.Tensor]
PER_ROW = (
    "lse",
    "lse_low",
    "dlse",
    "tlse",
    "tdlse",
    "peak",
    "entropy",
    "dentropy",
)  # (batch, heads, seqlen); the others are (batch, seqlen, heads, head_dim)


@dataclass(frozen=True)
class Item:
    """One item: its problem, and where it lies in the tensors' first two axes."""

    problem: AttentionProblem
    index: int
    slab: slice
    rows: slice
    keys: slice

    def of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The item's part of a tensor: of a captured one and of what holds lengths, all of it."""
        if name in PER_ROW:
            return tensor[self.slab, :, self.rows]
        if name == "mass":
            return tensor[self.slab, :, self.keys]
        part = {"q": self.rows, "out": self.rows, "k": self.keys, "v": self.keys}.get(name.removeprefix("t").removeprefix("d"))
        return tensor if part is None else tensor[self.slab, part]


def items(p: AttentionProblem, tensors: Tensors) -> Iterator[Item]:
    """The items that have queries, and keys or a sink, by the lengths that the tensors hold."""
    held = {name: tensors[name].tolist() for name in p.lengths.tensors}
    for i in range(p.batch):
        parts: list[slice] = []
        for side, span in (("q", p.span_q), ("k", p.span_k)):
            cu, used = held.get(f"cu_seqlens_{side}"), held.get(f"seqused_{side}")
            first, end = (0, span) if cu is None else (cu[i], cu[i + 1])
            parts.append(slice(first, end if used is None else first + used[i]))
        rows, keys = parts
        if rows.stop > rows.start and (keys.stop > keys.start or p.sink is not None):
            scores = (1, p.heads_q, rows.stop - rows.start, keys.stop - keys.start)
            one = replace(
                p, batch=1, seqlen_q=scores[2], seqlen_k=scores[3], lengths=ALIKE,
                score=tuple(_of_one_item(spec, scores) for spec in p.score),
                where=tuple(tuple(_seen_by_one_item(leaf, scores) for leaf in term) for term in p.where),
            )  # fmt: skip
            yield Item(one, i, slice(0, 1) if p.lengths.varlen else slice(i, i + 1), rows, keys)


def _of_one_item(spec: ScoreSpec, scores: tuple[int, ...]) -> ScoreSpec:
    """The modifier as a problem with these scores may have it. The tensors that it is given are whole, and indexed by
    `Item.index`.
    """
    described = list(spec.tensors)
    for i, (captured, tensor) in enumerate(zip(spec.kind.captured, spec.tensors, strict=True)):
        if captured.broadcast:
            described[i] = replace(tensor, shape=_cut(tensor.shape, scores))
        elif captured.index is None:
            described[i] = replace(tensor, shape=(1, *tensor.shape[1:]))
    return replace(spec, tensors=tuple(described))


def _seen_by_one_item(spec: PredicateSpec, scores: tuple[int, ...]) -> PredicateSpec:
    """The predicate likewise."""
    if not spec.kind.broadcast:
        return spec
    return replace(spec, tensors=tuple((_cut(shape, scores), dtype) for shape, dtype in spec.tensors))


def _cut(shape: tuple[int, ...], scores: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(min(n, size) for n, size in zip(shape, scores, strict=True))


def forward(p: AttentionProblem, tensors: Tensors, outputs: tuple[str, ...], tiles: bool = False) -> Tensors:
    """The outputs named; 0, and -inf in lse, in rows that belong to no item. tiles: of items too that PyTorch could compute."""
    q = tensors["q"]
    made = {"out": q.new_zeros((*q.shape[:3], p.head_dim_v))}
    made["lse"] = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=lse_dtype(p))
    if "lse_low" in outputs:
        made["lse_low"] = torch.zeros_like(made["lse"])
    for item in items(p, tensors):
        module = tiled if tiles else ways.forward_way(item.problem)[0]
        _embed(item, made, _call(module.forward, item, tensors, outputs))
    return made


def backward(p: AttentionProblem, tensors: Tensors, outputs: tuple[str, ...], wide_keys: bool = False) -> Tensors:
    """The gradients named; 0 in rows that belong to no item. Those of captured tensors are summed over items, in order."""
    how = {"wide_keys": True} if wide_keys else {}
    made = {name: torch.zeros_like(tensors[name.removeprefix("d")], dtype=lse_dtype(p)) for name in outputs}
    for item in items(p, tensors):
        module, _ = ways.backward_way(item.problem, "dlse" in tensors)
        _embed(item, made, _call(partial(module.backward, **how), item, tensors, outputs))
    return made


def tangent(p: AttentionProblem, tensors: Tensors, outputs: tuple[str, ...]) -> Tensors:
    """out, lse and their tangents; 0, and -inf in lse, in rows that belong to no item."""
    from flashtile.kernels.cpu import tangent

    q = tensors["q"]
    made = {name: q.new_zeros((*q.shape[:3], p.head_dim_v)) for name in ("out", "tout")}
    made["lse"] = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=lse_dtype(p))
    made["tlse"] = torch.zeros_like(made["lse"])
    for item in items(p, tensors):
        _embed(item, made, _call(tangent.forward, item, tensors, outputs))
    return made


def second(p: AttentionProblem, tensors: Tensors, outputs: tuple[str, ...]) -> Tensors:
    """The derivatives of the gradients named, as `backward` has these."""
    from flashtile.kernels.cpu import second

    q, rows = tensors["q"], (tensors["q"].shape[0], p.heads_q, tensors["q"].shape[1])
    shapes = {"tout": (*q.shape[:3], p.head_dim_v), "tlse": rows}
    shapes |= {name: tensors[name.removeprefix("d")].shape for name in outputs if name not in shapes}
    made = {name: q.new_zeros(shapes[name], dtype=torch.float64) for name in outputs}
    for item in items(p, tensors):
        _embed(item, made, _call(second.backward, item, tensors, outputs))
    return made


def statistics(p: AttentionProblem, tensors: Tensors, outputs: tuple[str, ...], last: int = 0) -> Tensors:
    """The statistics named; -inf in the peaks, and 0 elsewhere, of rows and keys that belong to no item."""
    from flashtile.kernels.cpu import statistics

    q, k = tensors["q"], tensors["k"]
    sizes = {"peak": q.shape[1], "entropy": q.shape[1], "mass": k.shape[1]}
    made = {
        name: q.new_full((q.shape[0], p.heads_q, sizes[name]), -math.inf if name == "peak" else 0.0, dtype=lse_dtype(p))
        for name in outputs
    }
    for item in items(p, tensors):
        _embed(item, made, _call(partial(statistics.forward, last=last), item, tensors, outputs))
    return made


def entropy(p: AttentionProblem, tensors: Tensors, outputs: tuple[str, ...]) -> Tensors:
    """The gradients named of the entropy, as `backward` has those of out."""
    from flashtile.kernels.cpu import statistics

    made = {name: torch.zeros_like(tensors[name.removeprefix("d")], dtype=torch.float64) for name in outputs}
    for item in items(p, tensors):
        _embed(item, made, _call(statistics.backward, item, tensors, outputs))
    return made


def _call(function: Any, item: Item, tensors: Tensors, outputs: tuple[str, ...]) -> Tensors:
    mine = {name: item.of(name, tensor) for name, tensor in tensors.items()}
    return function(item.problem, mine, outputs, item.index)


def _embed(item: Item, made: Tensors, parts: Tensors) -> None:
    """Put an item's results in their place; sums over items are added to."""
    for name, part in parts.items():
        if name.startswith(("dscore", "dsink")):
            made[name] += part
        else:
            item.of(name, made[name]).copy_(part)
