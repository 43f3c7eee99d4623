"""attention_cached and append_to_cache: attention over a key/value cache in JAX."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from flashtile import dispatch
from flashtile.errors import InvalidProblem, NotSupported
from flashtile.features.scores.softcap import Softcap
from flashtile.jax.arguments import FLOATS, converted, floating, integers
from flashtile.jax.arrays import JAX_DTYPES, Arrays
from flashtile.jax.run import NAMES, run
from flashtile.plan.buffers import cached_buffers
from flashtile.plan.call import Buffer, Plan
from flashtile.plan.device import Device
from flashtile.problem.cache import CachedProblem, Pages, check_split, contiguous, default_split
from flashtile.problem.describe import Wanted, describe
from flashtile.problem.dtype import DType
from flashtile.problem.lengths import Lengths
from flashtile.problem.mask import make_mask
from flashtile.problem.number import plain as number
from flashtile.problem.score import ScoreSpec, TensorSpec

IMPLEMENTATIONS = (None, "triton", "xla")


@dataclass(frozen=True)
class Cached:
    """q, the pools, their table and lengths to out and lse."""

    problem: CachedProblem
    backend: str | None = None

    def __repr__(self) -> str:
        return self.problem.spell()

    def inputs(self) -> tuple[Buffer, ...]:
        return tuple(b for b in cached_buffers(self.problem) if b.role == "input")

    def outputs(self) -> tuple[Buffer, ...]:
        return tuple(b for b in cached_buffers(self.problem) if b.role == "output")

    def plan(self, device: Device) -> Plan:
        from flashtile.jax.launch import refusals  # which reads kernels' parameters, by Triton

        plan = dispatch.plan_cached(self.problem, device, self.backend)
        reasons = refusals(plan)
        if reasons:
            raise NotSupported(f"{self!r} on {device.target}", {plan.backend: reasons})
        return plan

    def plain_refusals(self) -> list[str]:
        return []

    def plain(self, arrays: Arrays) -> Arrays:
        """Keys are gathered, (batch, columns * page_size) of them; scores of all are held at once, in float32."""
        p, pages = self.problem.attention, self.problem.pages
        used, first = jnp.clip(arrays["seqused_k"], 0, pages.capacity), arrays.get("first_k")
        begins = jnp.zeros_like(used) if first is None else jnp.clip(first, 0, None)
        row = jnp.arange(pages.capacity)[None]
        exists = (row >= begins[:, None]) & (row < used[:, None])
        k, v = (_gathered(arrays[n], arrays.get("page_table"), pages, exists) for n in "kv")
        wide = jnp.promote_types(arrays["q"].dtype, jnp.float32)
        q = arrays["q"].reshape(p.batch, p.seqlen_q, p.heads_kv, p.group, p.head_dim).astype(wide)
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k.astype(wide), precision="highest") * p.scale_value
        nowhere: Any = None  # softcap, which looks at no position
        for spec in p.score:
            scores = spec.kind.apply_jax(scores, nowhere, spec.scalars, ())
        ahead = (row - used[:, None])[:, None] - (jnp.arange(p.seqlen_q) - p.seqlen_q)[None, :, None]
        seen = jnp.broadcast_to(exists[:, None], ahead.shape)
        band = p.band
        if band.left is not None:
            seen &= ahead >= -band.left
        if band.right is not None:
            seen &= ahead <= band.right
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        sink = arrays["sink"].astype(wide).reshape(1, p.heads_kv, p.group, 1) if p.sink is not None else None
        top = scores.max(-1, initial=-jnp.inf)  # of no key, where there is no row
        top = top if sink is None else jnp.maximum(top, sink)
        top = jnp.where(jnp.isfinite(top), top, 0.0)
        weights = jnp.exp(scores - top[..., None])
        total = weights.sum(-1) + (0.0 if sink is None else jnp.exp(sink - top))
        v = jnp.where(seen.any(1)[:, :, None, None], v, 0).astype(wide)  # weights of 0 must meet no NaN
        out = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v, precision="highest")
        out = out / jnp.where(total == 0.0, 1.0, total).transpose(0, 3, 1, 2)[..., None]
        lse = jnp.where(total == 0.0, -jnp.inf, top + jnp.log(jnp.where(total == 0.0, 1.0, total)))
        shape = (p.batch, p.seqlen_q, p.heads_q, p.head_dim_v)
        return {"out": out.reshape(shape).astype(arrays["q"].dtype), "lse": lse.reshape(p.batch, p.heads_q, p.seqlen_q)}


def _gathered(pool: Any, table: Any, pages: Pages, exists: Any) -> Any:
    """(batch, capacity, heads, head_dim); 0 where there is no key, whatever the pool or the table holds there."""
    row = jnp.arange(pages.capacity)
    if table is None:
        page = jnp.arange(exists.shape[0])[:, None]
    else:
        page = jnp.where(exists, table[:, row // pages.page_size], 0).clip(0, pages.pages - 1)
    return jnp.where(exists[..., None, None], pool[page, row % pages.page_size], 0)


def attention_cached(
    q: Any, k_cache: Any, v_cache: Any, page_table: Any = None, *, seqused_k: Any, first_k: Any = None, causal: bool = False,
    window: tuple[int | None, int | None] | None = None, softcap: float | None = None, scale: float | None = None,
    sink: Any = None, split: int | None = None, return_lse: bool = False, implementation: str | None = None,
) -> Any:  # fmt: skip
    """out (batch, seqlen_q, heads_q, head_dim_v) over a key/value cache, or (out, lse (batch, heads_q, seqlen_q)).

    q: (batch, seqlen_q, heads_q, head_dim). k_cache: (pages, page_size, heads_kv, head_dim); v_cache with its own head_dim.
    page_table: int32 (batch, columns), or None for item i in page i; seqused_k: int32 (batch,), rows that count, those of
    `append_to_cache` included; first_k: int32 (batch,), the row of an item's first key. Positions, window, sink and split are
    as `flashtile.attention_cached` has them: the last query stands at the last key. Pages and lengths that point out of the
    pools are clamped into them. There are no gradients.
    implementation: "triton" for kernels, "xla" for plain JAX; None for kernels on an NVIDIA GPU and plain JAX elsewhere.
    """
    if implementation not in IMPLEMENTATIONS:
        raise InvalidProblem(f"implementation is {implementation!r}; it must be None, 'triton' or 'xla'.")
    q, k_cache, v_cache = map(converted, ("q", "k_cache", "v_cache"), (q, k_cache, v_cache))
    _check_pools(q, k_cache, v_cache, "q")
    batch, head_dim = q.shape[0], q.shape[3]
    if k_cache.shape[3] != head_dim:
        raise InvalidProblem(f"k_cache has head_dim {k_cache.shape[3]} and q has {head_dim}; they must be equal.")
    given = {"q": q, "k": k_cache, "v": v_cache}
    page_table = None if page_table is None else integers("page_table", page_table)
    pages = _pages(k_cache, page_table, batch, first_k is not None)
    given["seqused_k"] = _ints("seqused_k", seqused_k, batch)
    if page_table is not None:
        given["page_table"] = page_table
    if first_k is not None:
        given["first_k"] = _ints("first_k", first_k, batch)
    if sink is not None:
        given["sink"] = floating("sink", sink)
    score = () if softcap is None else (ScoreSpec(Softcap, Softcap(softcap).scalars(), ()),)
    held = None if sink is None else TensorSpec(given["sink"].shape, NAMES[given["sink"].dtype])
    keys, values = ((batch, pages.capacity, *t.shape[2:]) for t in (k_cache, v_cache))
    wanted = Wanted(make_mask(causal, window, None), score=score, scale=scale, sink=held, returns_lse=return_lse)
    problem = describe((q.shape, keys, values), DType(NAMES[q.dtype]), wanted, batch, Lengths(used_k=True))
    chosen = default_split(problem, pages) if split is None else check_split(number(split), pages)
    step = Cached(CachedProblem(problem, pages, chosen), None if implementation == "xla" else implementation)
    made: Any = _attend(step, implementation, *(given[b.name] for b in step.inputs()))
    found = dict(zip((b.name for b in step.outputs()), made, strict=True))
    return (found["out"], found["lse"]) if return_lse else found["out"]


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _attend(step: Cached, implementation: str | None, *given: Any) -> tuple[Any, ...]:
    """The step's outputs, which have neither derivatives nor a batch of calls."""

    @jax.custom_batching.custom_vmap
    def once(*given: Any) -> tuple[Any, ...]:
        return tuple(run(step, implementation, *given))

    @once.def_vmap
    def _(*_: Any) -> Any:
        raise NotSupported("vmap of attention_cached", {"jax": ["pools and tables have no batch axis; items are one"]})

    return once(*given)


@_attend.defjvp
def _refuse_derivatives(*_: Any) -> Any:
    reason = "a cache has no gradients here; call jax.lax.stop_gradient on what goes in, or dot_product_attention on dense keys"
    raise NotSupported("derivatives of attention_cached", {"jax": [reason]})


def append_to_cache(
    k: Any, v: Any, k_cache: Any, v_cache: Any, page_table: Any = None, *, seqused_k: Any = None, slots: Any = None
) -> tuple[Any, Any]:
    """(k_cache, v_cache) with new keys and values written behind each item's rows: in place where the pools are donated.

    k, v: (batch, seqlen, heads_kv, head_dim). seqused_k: int32 (batch,): rows that each item has; the caller advances it.
    slots: instead, ints (batch, seqlen): page * page_size + row. A row that an item has no page for, and a slot that is
    negative or outside of the pools, is written nowhere. Two tokens of one place raise InvalidProblem on the CPU outside of
    `jax.jit`; elsewhere nobody looks, and either stays. `jax.jit(..., donate_argnums=...)` donates the pools.
    """
    k, v, k_cache, v_cache = map(converted, ("k", "v", "k_cache", "v_cache"), (k, v, k_cache, v_cache))
    _check_pools(k, k_cache, v_cache, "k")
    if v.dtype != k.dtype:
        raise InvalidProblem(f"v is {v.dtype} and k is {k.dtype}; they must have one dtype.")
    if v.shape[:3] != k.shape[:3] or k.shape[2:] != k_cache.shape[2:] or v.shape[2:] != v_cache.shape[2:]:
        raise InvalidProblem(
            f"k has shape {k.shape} and v {v.shape}; they must be (batch, seqlen, heads_kv, head_dim), of the pools' heads and "
            f"head_dim, {k_cache.shape[2:]} and {v_cache.shape[2:]}."
        )
    if (seqused_k is None) == (slots is None):
        raise InvalidProblem("seqused_k and slots are both given, or neither; exactly one must say where tokens go.")
    count, size = k_cache.shape[:2]
    if slots is not None:
        slots = integers("slots", slots)  # of 8 bits they would not hold how many there are
        if slots.shape != k.shape[:2] or slots.dtype != jnp.int32:
            raise InvalidProblem(f"slots is {slots.dtype} of shape {slots.shape}; it must be ints of shape {k.shape[:2]}.")
        page, row, exists = slots // size, slots % size, (slots >= 0) & (slots < count * size)
    else:
        page_table = None if page_table is None else integers("page_table", page_table)
        pages = _pages(k_cache, page_table, k.shape[0], False)
        place = _ints("seqused_k", seqused_k, k.shape[0])[:, None] + jnp.arange(k.shape[1], dtype=jnp.int32)
        column, row = place // size, place % size
        item = jnp.arange(k.shape[0])[:, None]
        within = (place >= 0) & (column < pages.columns)
        page = page_table[item, column.clip(0, pages.columns - 1)] if page_table is not None and pages.columns else item
        page = jnp.broadcast_to(page, place.shape)
        exists = within & (page >= 0) & (page < count)
    page = jnp.where(exists, page, count)  # one that there is not, which is dropped
    _check_places("page_table" if slots is None else "slots", page, row, count)
    write = lambda pool, new: pool.at[page, row].set(new, mode="drop")  # noqa: E731
    return write(k_cache, k), write(v_cache, v)


def _check_places(called: str, page: Any, row: Any, count: int) -> None:
    """Raise InvalidProblem for two tokens of one place, where the host can look: on the CPU, outside of `jax.jit`."""
    if isinstance(page, Tracer) or isinstance(row, Tracer) or {d.platform for d in page.devices()} != {"cpu"}:
        return
    places, times = np.unique(np.stack([np.asarray(page), np.asarray(row)], -1).reshape(-1, 2), axis=0, return_counts=True)
    twice = places[(times > 1) & (places[:, 0] < count)]
    if len(twice):
        raise InvalidProblem(
            f"{called} gives two new keys one place: page {twice[0][0]}, row {twice[0][1]}; each must have its own: copy a "
            "page that items share before they write into it, and give each of them one."
        )


def _check_pools(q: Any, k_cache: Any, v_cache: Any, name: str) -> None:
    """Raise InvalidProblem unless these have the right ranks and one dtype."""
    for called, array in ((name, q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if array.ndim != 4:
            meant = "(batch, seqlen, heads, head_dim)" if called == name else "(pages, page_size, heads_kv, head_dim)"
            raise InvalidProblem(f"{called} has shape {array.shape}; it must be {meant}.")
        kinds = [kind for kind in JAX_DTYPES if name != "q" or kind in FLOATS]  # an append copies what nobody multiplies
        if NAMES.get(array.dtype) not in kinds or array.dtype != q.dtype:
            known = ", ".join(str(jnp.dtype(JAX_DTYPES[kind])) for kind in kinds)
            beside = "" if called == name else f" and {name} is {q.dtype}"
            raise InvalidProblem(f"{called} is {array.dtype}{beside}; all three must have one dtype of {known}.")
    if k_cache.shape[:3] != v_cache.shape[:3] or 0 in k_cache.shape:
        raise InvalidProblem(
            f"v_cache has shape {v_cache.shape} and k_cache {k_cache.shape}; they must be equal but for head_dim."
        )


def _pages(k_cache: Any, page_table: Any, batch: int, first: bool) -> Pages:
    """The Pages of a cache; InvalidProblem for a table that is none."""
    count, size = k_cache.shape[:2]
    if page_table is None:
        return contiguous(count, size, batch, first)
    if page_table.dtype != jnp.int32 or page_table.ndim != 2 or page_table.shape[0] != batch:
        raise InvalidProblem(
            f"page_table is {page_table.dtype} of shape {page_table.shape}; it must be int32 ({batch}, columns)."
        )
    return Pages(count, size, page_table.shape[1], True, first)


def _ints(name: str, given: Any, batch: int) -> Any:
    array = integers(name, given)
    if array.shape != (batch,) or array.dtype != jnp.int32:
        raise InvalidProblem(f"{name} is {array.dtype} of shape {array.shape}; it must be int32 ({batch},).")
    return array
