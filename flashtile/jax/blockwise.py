"""Attention in plain JAX, block of keys by block of keys: what runs where there is no NVIDIA GPU, in O(seqlen) memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from flashtile.jax.arrays import JAX_DTYPES, Arrays
from flashtile.jax.dropout import keep
from flashtile.jax.run import varying_like
from flashtile.jax.symbolic import symbols
from flashtile.kernels.device.score import sums_per_head, uneven_refusals
from flashtile.plan.buffers import keys_dtype, place_of
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.dtype import DType
from flashtile.problem.score import Position, Score, ScoreSpec

BLOCK_K = 128


def unsupported(p: AttentionProblem) -> list[str]:
    """Reasons why plain JAX cannot compute a problem; empty when it can."""
    reasons = [
        f"score modifier {spec.kind.name} has no `apply_jax`, its formula in JAX"
        for spec in p.score
        if spec.kind.apply_jax is Score.apply_jax
    ]
    reasons += uneven_refusals(p)
    if p.blocks is not None:
        reasons.append("the mask has block lists; this path reads the mask alone")
    return reasons


def forward(p: AttentionProblem, arrays: Arrays) -> Arrays:
    """out and lse."""
    return computed(lambda given, dtype: _forward(p, given, dtype), arrays, few_keys(p))


def backward(p: AttentionProblem, arrays: Arrays, outputs: Sequence[str], wide_keys: bool = False) -> Arrays:
    """The gradients of `outputs` ("dq", "dscore.0.0", ...). wide_keys: dk and dv are not rounded to 16 bits."""
    wide = few_keys(p) or (p.dtype is DType.FP32 and sums_per_head(p))
    return computed(lambda given, dtype: _backward(p, given, outputs, dtype, wide_keys), arrays, wide)


def tangent(p: AttentionProblem, arrays: Arrays, names: Sequence[str]) -> Arrays:
    """out, lse and their tangents, by forward mode through the pass; names: the inputs, that of x is moved by tx."""

    def along(given: Arrays, dtype: Any) -> Arrays:
        made, tangents = _along(lambda x: _forward(p, x, dtype), given, names)
        return {**made, **{f"t{n}": t for n, t in tangents.items()}}

    return computed(along, arrays, few_keys(p))


def second(p: AttentionProblem, arrays: Arrays, names: Sequence[str], outputs: Sequence[str]) -> Arrays:
    """How the gradients of `outputs` change along a direction, and the tangents of out and lse, by forward mode likewise.

    names: the inputs, dout and dlse.
    """
    inputs = [n for n in names if n not in ("dout", "dlse")]

    def along(given: Arrays, dtype: Any) -> Arrays:
        def gradients(x: Arrays) -> Arrays:
            found = _forward(p, {n: x[n] for n in inputs}, dtype)
            return {**found, **_backward(p, {**x, **found}, outputs, dtype)}

        _, tangents = _along(gradients, given, names)
        return {**{n: tangents[n] for n in outputs}, "tout": tangents["out"], "tlse": tangents["lse"]}

    return computed(along, arrays, few_keys(p) or (p.dtype is DType.FP32 and sums_per_head(p)))


def _along(function: Callable[[Arrays], Arrays], arrays: Arrays, names: Sequence[str]) -> tuple[Arrays, Arrays]:
    """(what the function makes of the named arrays, how that changes as those move that have a tangent)."""
    moved = [n for n in names if f"t{n}" in arrays]
    rest = {n: arrays[n] for n in names if n not in moved}
    tangents = tuple(arrays[f"t{n}"].astype(arrays[n].dtype) for n in moved)
    given = tuple(arrays[n] for n in moved)
    return jax.jvp(lambda *x: function({**rest, **dict(zip(moved, x, strict=True))}), given, tangents)


def few_keys(p: AttentionProblem) -> bool:
    """Whether errors are those of few roundings, of which the largest decides: 1.5 times plain JAX's is then a matter of luck.

    The CPU's PyTorch code draws the same line (`kernels/cpu/products.py`). Sums per head are few numbers at any size.
    """
    return p.dtype is DType.FP32 and not symbols((p.span_k,)) and p.span_k <= BLOCK_K


def computed(function: Callable[[Arrays, Any], Arrays], arrays: Arrays, wide: bool) -> Arrays:
    """What the function makes, in float32 inside; `wide`: in float64 where that runs on the CPU. Others may not have it."""
    if not wide:
        return function(arrays, jnp.float32)

    def widely(given: Arrays) -> Arrays:
        with jax.enable_x64(True):
            return function(given, jnp.float64)

    return lax.platform_dependent(arrays, cpu=widely, default=lambda given: function(given, jnp.float32))


def _forward(p: AttentionProblem, arrays: Arrays, dtype: Any) -> Arrays:
    scene = Scene(p, arrays, dtype)

    def step(state: tuple[Any, Any, Any], block: Block) -> tuple[Any, None]:
        top, total, out = state
        at = scene.position(block)
        seen = scene.visible(at, block)
        block = scene.shown(block, seen)
        score = jnp.where(seen, scene.modified(scene.products(block), scene.modifiers(block), at, seen), -jnp.inf)
        # Any pivot serves, so none has a tangent; max's own, by who equals it, is NaN where XLA computes scores twice.
        higher = jnp.maximum(top, lax.stop_gradient(score).max(-1))
        pivot = jnp.where(higher == -jnp.inf, 0.0, higher)
        weight, decay = jnp.exp(score - pivot[..., None]), jnp.exp(top - pivot)
        kept = weight if p.dropout is None else jnp.where(scene.kept(at), weight, 0.0)
        out = out * decay[..., None] + scene.over_keys(kept, block.v)
        return (higher, total * decay + weight.sum(-1), out), None

    start = jnp.full(scene.rows, -jnp.inf, dtype), scene.zeros(), scene.zeros(p.head_dim_v)
    state = tuple(varying_like(start, tuple(arrays.values())))
    (top, total, out), _ = lax.scan(step, state, scene.blocks)
    if p.sink is not None:
        sink = arrays["sink"].astype(dtype)[:, None]
        higher = jnp.maximum(top, lax.stop_gradient(sink))
        pivot = jnp.where(higher == -jnp.inf, 0.0, higher)
        decay = jnp.exp(top - pivot)
        top, total, out = higher, total * decay + jnp.exp(sink - pivot), out * decay[..., None]
    empty = total == 0.0
    divisor = jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(divisor))
    scale = 1.0 if p.dropout is None else 1.0 / (1.0 - p.dropout)
    out = out * (scale / divisor)[..., None]
    if scene.counts_q is not None:
        out, lse = jnp.where(scene.counts_q, out, 0.0), jnp.where(scene.counts_q[..., 0], lse, -jnp.inf)
    return {"out": jnp.swapaxes(out, 1, 2).astype(JAX_DTYPES[p.dtype.value]), "lse": lse.astype(jnp.float32)}


def _backward(p: AttentionProblem, arrays: Arrays, outputs: Sequence[str], dtype: Any, wide_keys: bool = False) -> Arrays:
    scene = Scene(p, arrays, dtype)
    lse = arrays["lse"].astype(dtype)
    pivot, divisor = jnp.where(lse == -jnp.inf, 0.0, lse), jnp.ones(scene.rows, dtype)
    alive = (lse != -jnp.inf if p.sink is None else scene.seeing())[..., None]
    dout, out = (jnp.where(alive, jnp.swapaxes(arrays[name], 1, 2).astype(dtype), 0.0) for name in ("dout", "out"))
    scale = 1.0 if p.dropout is None else 1.0 / (1.0 - p.dropout)
    sink = None  # its probabilities, before `divisor`
    if p.sink is not None:
        sink = jnp.where(lse != -jnp.inf, jnp.exp(arrays["sink"].astype(dtype)[:, None] - pivot), 0.0)

    def weights(score: Any, seen: Any, at: Position, block: Block) -> tuple[Any, Any, Any]:
        """(probabilities, what is kept of them, their gradients)."""
        weight = jnp.where(seen, jnp.exp(score - pivot[..., None]) / divisor[..., None], 0.0)
        dweight = scene.over_columns(dout, block.v)
        if p.dropout is None:
            return weight, weight, dweight
        keeps = scene.kept(at)
        return weight, jnp.where(keeps, weight * scale, 0.0), jnp.where(keeps, dweight * scale, 0.0)

    if p.dtype is DType.FP32 or p.lone or p.shares_offset or p.exact_delta:
        # Sums of these very probabilities, and of those times dp, as differentiated softmax has them: lse was rounded, of large
        # scores by more than log(sum), other programs add in other orders, and where one key has all the gradient is to be 0.

        def add(sums: tuple[Any, Any], block: Block) -> tuple[Any, None]:
            at = scene.position(block)
            seen = scene.visible(at, block) & alive
            block = scene.shown(block, seen)
            score = scene.modified(scene.products(block), scene.modifiers(block), at, seen)
            weight, _, dweight = weights(score, seen, at, block)
            return (sums[0] + weight.sum(-1), sums[1] + (weight * dweight).sum(-1)), None

        zeros = varying_like([scene.zeros()] * 2, tuple(arrays.values()))
        (total, delta), _ = lax.scan(add, tuple(zeros), scene.blocks)
        if sink is not None:
            total = total + sink
        divisor = jnp.where(total == 0.0, 1.0, total)
        delta = delta / divisor
    else:
        delta = (dout * out).sum(-1)
    dlse = arrays["dlse"].astype(dtype) if "dlse" in arrays else jnp.zeros((), dtype)
    if scene.counts_q is not None:
        dlse = jnp.where(scene.counts_q[..., 0], dlse, 0.0)
    dlse = jnp.broadcast_to(dlse, scene.rows)

    def derivatives(score: Any, seen: Any, at: Position, block: Block) -> tuple[Any, Any]:
        weight, kept, dweight = weights(score, seen, at, block)
        dscore = jnp.where(seen, weight * (dweight - delta[..., None] + dlse[..., None]), 0.0)
        return dscore, scene.over_rows(kept, dout)

    made, dv = through_scores(scene, outputs, alive, derivatives, wide_keys)
    made["dv"] = scene.joined(dv).astype(JAX_DTYPES[keys_dtype(p, wide_keys)])
    if sink is not None and "dsink" in outputs:
        made["dsink"] = (sink / divisor * (dlse - delta)).sum((0, 2)).astype(jnp.float32)
    return {name: made[name] for name in outputs}


def through_scores(
    scene: Scene, outputs: Sequence[str], alive: Any, derivatives: Callable[..., tuple[Any, Any]], wide_keys: bool = False
) -> tuple[Arrays, Any]:
    """(dq, dk and the gradients of modifiers' tensors, what else `derivatives` makes of each block of keys).

    derivatives: from modified scores, which of them are seen, where they lie and the block, their gradients and that. alive: of
    which rows there are any. wide_keys: dk is not rounded to 16 bits.
    """
    p, arrays, dtype, q = scene.p, scene.arrays, scene.dtype, jnp.where(alive, scene.q, 0.0)
    wanted = [(i, j) for i, s in enumerate(p.score) for j in range(len(s.tensors)) if _name(i, j) in outputs]
    across = [w for w in wanted if not scene.cut(*w)]

    def step(state: tuple[Any, Arrays], block: Block) -> tuple[Any, Any]:
        dq, sums = state
        at = scene.position(block)
        seen = scene.visible(at, block) & alive
        block = scene.shown(block, seen)
        raw, tensors = scene.products(block), scene.modifiers(block)
        score, pull = jax.vjp(lambda s, t: scene.modified(s, t, at, seen), raw, tensors)
        dscore, more = derivatives(score, seen, at, block)
        draw, dtensors = pull(dscore)
        dk = scene.over_rows(draw, q)
        sums = {key: total + dtensors[i][j] for key, total in sums.items() for i, j in [place_of(key)]}
        cuts = {_name(i, j): dtensors[i][j] for i, j in wanted if (i, j) not in across}
        return (dq + scene.over_keys(draw, block.k), sums), (dk, cuts, more)

    start = [scene.zeros(p.head_dim), *(jnp.zeros(arrays[f"score.{i}.{j}"].shape, dtype) for i, j in across)]
    dq, *totals = varying_like(start, tuple(arrays.values()))
    sums = dict(zip((_name(i, j) for i, j in across), totals, strict=True))
    (dq, sums), (dk, cuts, more) = lax.scan(step, (dq, sums), scene.blocks)
    made: Arrays = {"dq": jnp.swapaxes(dq, 1, 2) * p.scale_value, "dk": scene.joined(dk) * p.scale_value}
    dtypes = {"dq": p.dtype.value, "dk": keys_dtype(p, wide_keys)}
    made = {name: grad.astype(JAX_DTYPES[dtypes[name]]) for name, grad in made.items()}
    for i, j in wanted:
        name = _name(i, j)
        made[name] = sums[name] if name in sums else scene.joined_columns(cuts[name], arrays[f"score.{i}.{j}"].shape)
        broadcast = p.score[i].kind.captured[j].broadcast
        made[name] = made[name].astype(arrays[f"score.{i}.{j}"].dtype if broadcast else jnp.float32)
    return made, more


class Block(NamedTuple):
    """A block of keys, as a scan hands it out."""

    start: Any
    k: Any  # (slabs, heads_kv, BLOCK_K, head_dim), in the scene's dtype
    v: Any
    cut: dict[str, Any]  # what tensors with an element for every key have here


class Scene:
    """The arrays of a problem as blocks, and where they lie; dtype: that of all arithmetic."""

    def __init__(self, p: AttentionProblem, arrays: Arrays, dtype: Any):
        self.p, self.arrays, self.dtype = p, arrays, dtype
        self.precision = lax.Precision.HIGHEST if p.precision != "tf32" else lax.Precision.DEFAULT
        self.rows = (p.slabs, p.heads_q, p.span_q)
        row, key = jnp.arange(p.span_q, dtype=jnp.int32), jnp.arange(p.span_k, dtype=jnp.int32)
        self.item_q: Any = None
        self.item_k: Any = None
        self.row, self.key = row[:, None], key
        self.batch: Any = jnp.arange(p.batch, dtype=jnp.int32)[:, None, None, None]
        if p.lengths.varlen:
            self.item_q, self.row, length_q = _items(arrays["cu_seqlens_q"], row)
            self.item_k, self.key, length_k = _items(arrays["cu_seqlens_k"], key)
            counts_k = self.item_k < p.batch
            self.item_q, self.row = self.item_q[:, None], self.row[:, None]
            self.batch = jnp.minimum(self.item_q, max(p.batch - 1, 0))
        else:
            length_q = jnp.full((p.batch,), p.span_q, jnp.int32)
            length_k = jnp.full((p.batch,), p.span_k, jnp.int32)
            counts_k = jnp.ones((p.span_k,), bool)
        if p.lengths.used_q:
            length_q = jnp.clip(arrays["seqused_q"], 0, length_q)
        if p.lengths.used_k:
            length_k = jnp.clip(arrays["seqused_k"], 0, length_k)
        self.shift: Any = p.span_k - p.span_q
        self.counts_q: Any = None
        if p.lengths.ragged:
            self.shift = _take(length_k - length_q, self.batch)
            self.counts_q = self.row < _take(length_q, self.batch)
            if self.item_q is not None:
                self.counts_q = (self.counts_q & (self.item_q < p.batch))[None, None]
                counts_k = counts_k & (self.key < _take(length_k, jnp.minimum(self.item_k, max(p.batch - 1, 0))))
                counts_k = counts_k[None]
            else:
                counts_k = self.key < length_k[:, None]
        self.counts_k = jnp.broadcast_to(counts_k, (p.slabs, p.span_k))
        self.length_q = _take(length_q, self.batch)  # of each row's item
        self.q = self.counted_rows(jnp.swapaxes(arrays["q"], 1, 2).astype(dtype))
        self.blocks = self.cut_keys()

    def zeros(self, *width: int) -> Any:
        """Sums of rows, at their start."""
        return jnp.zeros((*self.rows, *width), self.dtype)

    def counted_rows(self, x: Any) -> Any:
        """Rows (slabs, heads_q, span_q, width) that belong to nobody as zeros, whatever lies there."""
        return x if self.counts_q is None else jnp.where(self.counts_q, x, 0.0)

    def cut(self, i: int, j: int) -> bool:
        """Whether a captured tensor has an element for every key of a dense problem, and so is cut into blocks of those."""
        tensor = self.p.score[i].tensors[j]
        return self.p.score[i].kind.captured[j].broadcast and tensor.shape[3] != 1

    def cut_keys(self) -> Block:
        def blocks(x: Any, axis: int) -> Any:
            count = (x.shape[axis] + BLOCK_K - 1) // BLOCK_K
            x = jnp.pad(x, [(0, count * BLOCK_K - x.shape[axis] if a == axis else 0) for a in range(x.ndim)])
            return jnp.moveaxis(x.reshape(*x.shape[:axis], count, BLOCK_K, *x.shape[axis + 1 :]), axis, 0)

        counts = self.counts_k[:, None, :, None]
        k, v = (jnp.where(counts, jnp.swapaxes(self.arrays[n], 1, 2).astype(self.dtype), 0.0) for n in "kv")
        cut: dict[str, Any] = {}
        for i, spec in enumerate(self.p.score):
            cut |= {_name(i, j): blocks(self.arrays[f"score.{i}.{j}"], 3) for j in range(len(spec.tensors)) if self.cut(i, j)}
        cut |= {"counts": blocks(self.counts_k, 1), "key": blocks(self.key, self.key.ndim - 1)}
        if self.item_k is not None:
            cut["item"] = blocks(self.item_k, 0)
        k, v = blocks(k, 2), blocks(v, 2)
        return Block(jnp.arange(k.shape[0], dtype=jnp.int32) * BLOCK_K, k, v, cut)

    def position(self, block: Block) -> Position:
        head = jnp.arange(self.p.heads_q, dtype=jnp.int32)[:, None, None]
        batch, row = (x if x.ndim == 4 else x.reshape(1, 1, *x.shape) for x in (self.batch, self.row))
        return Position(batch, head[None], row, row + self.shift, block.cut["key"][None, None, None, :])

    def visible(self, at: Position, block: Block) -> Any:
        """Broadcasts against (slabs, heads_q, span_q, BLOCK_K)."""
        p = self.p
        inside = block.start + jnp.arange(BLOCK_K, dtype=jnp.int32) < p.span_k
        seen = (block.cut["counts"] & inside)[:, None, None, :]
        if self.item_q is not None:
            seen = seen & (self.item_q == block.cut["item"][None, :])
        if self.counts_q is not None:
            seen = seen & self.counts_q
        if p.band.left is not None:
            seen = seen & (at.k >= at.q - p.band.left)
        if p.band.right is not None:
            seen = seen & (at.k <= at.q + p.band.right)
        if not p.where or not p.span_k:  # tensors without keys answer nothing
            return seen
        leaves = iter(range(len(p.leaves)))
        terms = []
        clamped = at._replace(k=jnp.clip(at.k, 0, max(p.seqlen_k - 1, 0)), row=jnp.clip(at.row, 0, max(p.seqlen_q - 1, 0)))
        for term in p.where:
            holds: Any = True
            for leaf in term:
                i = next(leaves)
                tensors = tuple(self.arrays[f"mask.{i}.{j}"] for j in range(len(leaf.tensors)))
                holds = holds & leaf.kind.apply(clamped, leaf.scalars, tensors)
            terms.append(holds)
        return seen & _any_of(terms)

    def shown(self, block: Block, seen: Any) -> Block:
        """The block, keys that no query sees as zeros, whatever lies there: a product of 0 and NaN is NaN."""
        p = self.p
        if seen.shape[1] == 1:
            some = seen.any(2)
        else:
            seen = jnp.broadcast_to(seen, (seen.shape[0], p.heads_q, *seen.shape[2:]))
            some = seen.reshape(seen.shape[0], p.heads_kv, p.group, *seen.shape[2:]).any((2, 3))
        return block._replace(k=jnp.where(some[..., None], block.k, 0.0), v=jnp.where(some[..., None], block.v, 0.0))

    def seeing(self) -> Any:
        """Which rows see a key, (slabs, heads_q, span_q)."""

        def step(found: Any, block: Block) -> tuple[Any, None]:
            return found | self.visible(self.position(block), block).any(-1), None

        start = varying_like([jnp.zeros(self.rows, bool)], tuple(self.arrays.values()))[0]
        return lax.scan(step, start, self.blocks)[0]

    def kept(self, at: Position) -> Any:
        assert self.p.dropout is not None
        return keep(self.p.dropout, at.batch, at.head, at.row, at.k, self.p.heads_q, self.arrays["seed"])

    def modifiers(self, block: Block) -> tuple[tuple[Any, ...], ...]:
        """The modifiers' tensors; of those with an element for every key what this block has of it."""
        return tuple(
            tuple(
                block.cut.get(_name(i, j), self.arrays[f"score.{i}.{j}"]).astype(self.dtype) for j in range(len(spec.tensors))
            )
            for i, spec in enumerate(self.p.score)
        )

    def modified(self, score: Any, tensors: tuple[tuple[Any, ...], ...], at: Position, seen: Any) -> Any:
        """What the modifiers make of scores; each takes hidden ones as 0, and so sends no NaN that was hidden backwards."""
        for spec, own in zip(self.p.score, tensors, strict=True):
            placed = tuple(self.placed(spec, j, tensor, at) for j, tensor in enumerate(own))
            score = spec.kind.apply_jax(jnp.where(seen, score, 0.0), at, spec.scalars, placed)
        return score

    def placed(self, spec: ScoreSpec, j: int, tensor: Any, at: Position) -> Any:
        """A tensor as `apply_jax` takes it: broadcasting against the tile where it is `broadcast`."""
        if spec.kind.captured[j].broadcast and self.item_q is not None and tensor.shape[0] > 1:
            return jnp.swapaxes(tensor[self.batch[:, 0], :, 0, 0], 0, 1)[None, :, :, None]
        return tensor

    def products(self, block: Block) -> Any:
        q = self.q.reshape(self.p.slabs, self.p.heads_kv, self.p.group, self.p.span_q, self.p.head_dim)
        score = jnp.einsum("bkgtd,bksd->bkgts", q, block.k, precision=self.precision)
        return score.reshape(*self.rows, BLOCK_K) * self.p.scale_value

    def _grouped(self, x: Any) -> Any:
        return x.reshape(self.p.slabs, self.p.heads_kv, self.p.group, *x.shape[2:])

    def over_keys(self, weight: Any, x: Any) -> Any:
        """sum over keys of weight * x, for each row."""
        made = jnp.einsum("bkgts,bksd->bkgtd", self._grouped(weight), x, precision=self.precision)
        return made.reshape(*self.rows, x.shape[-1])

    def over_columns(self, x: Any, y: Any) -> Any:
        """The products of rows x with keys' y."""
        made = jnp.einsum("bkgtd,bksd->bkgts", self._grouped(x), y, precision=self.precision)
        return made.reshape(*self.rows, BLOCK_K)

    def over_rows(self, weight: Any, x: Any) -> Any:
        """sum over rows, and over the heads that share keys, of weight * x, for each key."""
        return jnp.einsum("bkgts,bkgtd->bksd", self._grouped(weight), self._grouped(x), precision=self.precision)

    def joined(self, blocks: Any) -> Any:
        """Blocks of keys as (slabs, span_k, heads_kv, width)."""
        whole = jnp.moveaxis(blocks, 0, 2)
        whole = whole.reshape(*whole.shape[:2], whole.shape[2] * BLOCK_K, whole.shape[-1])[:, :, : self.p.span_k]
        return jnp.swapaxes(whole, 1, 2)

    def joined_columns(self, blocks: Any, shape: tuple[int, ...]) -> Any:
        """Blocks of a tensor with an element for every key, as it was."""
        whole = jnp.moveaxis(blocks, 0, 3)
        return whole.reshape(*whole.shape[:3], whole.shape[3] * BLOCK_K)[..., : shape[3]]


def _any_of(terms: Sequence[Any]) -> Any:
    """Whether any of these holds."""
    found = terms[0]
    for term in terms[1:]:
        found = found | term
    return found


def _items(cu_seqlens: Any, index: Any) -> tuple[Any, Any, Any]:
    """(item of each token, its place in it, items' lengths); a token of nobody has the number of items."""
    ends = jnp.zeros(index.shape[0] + 1, jnp.int32).at[jnp.clip(cu_seqlens[1:], 0, index.shape[0])].add(1)
    item = jnp.cumsum(ends[:-1], dtype=jnp.int32)  # as searchsorted, which knows no symbolic sizes
    item = jnp.where(index < cu_seqlens[0], cu_seqlens.shape[0] - 1, item)
    first = cu_seqlens[jnp.minimum(item, max(cu_seqlens.shape[0] - 2, 0))]
    return item, index - first, cu_seqlens[1:] - cu_seqlens[:-1]


def _take(numbers: Any, index: Any) -> Any:
    """numbers[index], 0 where there are none at all."""
    return numbers[index] if math.prod(numbers.shape) else jnp.zeros_like(index)


def _name(i: int, j: int) -> str:
    return f"dscore.{i}.{j}"
