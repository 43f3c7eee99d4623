"""Automatic sharding of a step: over batch, heads and queries each device computes its part; what else is sharded is gathered.

Where queries are cut each device has all keys, and is told by seqused how many of them come before its last query's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from flashtile.jax.arrays import JAX_DTYPES
from flashtile.jax.run import run
from flashtile.jax.step import Along, Backward, Forward
from flashtile.jax.symbolic import resized, symbols
from flashtile.plan.buffers import place_of
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.lengths import Lengths
from flashtile.problem.mask import FULL

HEADS = "heads"  # the axis of query heads, which are groups of those that share keys
Roles = tuple[str, ...]
Step = Forward | Backward | Along

# What the axes of a buffer are: batch, heads, kv (heads of keys), or, by any other name, nothing that is ever cut.
ROLES: dict[str, Roles] = {
    "q": ("batch", "t", HEADS, "d"), "k": ("batch", "s", "kv", "d"), "v": ("batch", "s", "kv", "w"),
    "out": ("batch", "t", HEADS, "w"), "lse": ("batch", HEADS, "t"), "stats": ("batch", HEADS, "c", "t"),
    "peak": ("batch", HEADS, "t"), "entropy": ("batch", HEADS, "t"), "mass": ("batch", HEADS, "s"),
    "sink": (HEADS,), "seqused_q": ("batch",), "seqused_k": ("batch",),
}  # fmt: skip
# Axes of predicates' tensors, by the predicate's name; of others nothing is known, and they are never cut.
PREDICATES: dict[str, tuple[Roles, ...]] = {
    "prefix": (("batch",),), "key_padding": (("batch", "s"),), "document": (("batch", "t"), ("batch", "s")),
    "stored": (("batch", HEADS, "t", "s"),), "within": (), "dilated": (), "chunked": (),
}  # fmt: skip


def run_partitioned(step: Step, implementation: str | None, *given: Any) -> tuple[Any, ...]:
    """The step's outputs; in a program over several devices those of each device's part of batch and heads."""

    @custom_partitioning
    def call(*given: Any) -> tuple[Any, ...]:
        return tuple(run(step.fit(given), implementation, *given))

    inputs = [(b.name, roles(step.problem, b.name, b.shape)) for b in step.inputs()]
    outputs = [(b.name, roles(step.problem, b.name, b.shape)) for b in step.outputs()]

    dtypes = [JAX_DTYPES[b.dtype] for b in step.outputs()]

    def partition(mesh: Any, arguments: Sequence[Any], results: Any) -> Any:
        axes = cut(step, mesh, arguments[0].sharding)
        shard = lambda own: NamedSharding(mesh, PartitionSpec(*(axes.get(role) for role in own)))  # noqa: E731

        def part(*given: Any) -> tuple[Any, ...]:
            # JAX traces this under the mesh around the program, whose axes may be explicit: a part has no sharding to state
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                own_step, given = _of_queries(step, axes, given)
                made = run(own_step, implementation, *given)
                return tuple(
                    _summed(step, axes, name, own, x, dtype)
                    for (name, own), x, dtype in zip(outputs, made, dtypes, strict=True)
                )

        made = tuple(shard(own) for _, own in outputs)
        return mesh, part, made, tuple(shard(own) for _, own in inputs)

    rule, sizes, whole = sharding_rule(step, [own for _, own in inputs], [own for _, own in outputs])
    call.def_partition(partition, sharding_rule=rule, need_replication_factors=whole, **sizes)  # pyright: ignore[reportArgumentType]
    return call(*given)


def roles(p: AttentionProblem, name: str, shape: tuple[int, ...]) -> Roles:
    """What the axes of a buffer are; axes of one element that stand for many are nothing."""
    kind = primal(name)
    if kind in ROLES:
        return ROLES[kind]
    if kind in ("k_scale", "v_scale"):  # one of each head of an item, or of each token
        return ("batch", "kv") if len(shape) == 2 else ("batch", "s", "kv")
    found: Roles = ()
    if kind.startswith("score."):
        i, j = place_of(kind)
        captured = p.score[i].kind.captured[j]
        found = ("batch", HEADS, "t", "s") if captured.broadcast else ("batch", HEADS) if captured.index is None else ()
    elif kind.startswith("mask."):
        i, j = place_of(kind)
        known = PREDICATES.get(p.leaves[i].kind.name, ())
        found = known[j] if j < len(known) else ()
    if len(found) != len(shape):
        return tuple(f"{name}.{axis}" for axis in range(len(shape)))
    sizes = {"batch": p.batch, HEADS: p.heads_q, "t": p.span_q, "s": p.span_k}
    return tuple(
        role if size == sizes[role] else f"{name}.{axis}" for axis, (role, size) in enumerate(zip(found, shape, strict=True))
    )


def primal(name: str) -> str:
    """What a gradient, a tangent, or the tangent of a gradient is of, by name."""
    return name.removeprefix("t").removeprefix("d")


def cuts_nothing(p: AttentionProblem) -> bool:
    """Whether each device must see all: dropout and some tensors go by the absolute batch and head."""
    known = all(leaf.kind.name in PREDICATES for leaf in p.leaves)
    return p.dropout is not None or not known or any(c.index is not None for s in p.score for c in s.kind.captured)


def cuts_queries(step: Step) -> bool:
    """Whether a device may have some of the queries, by positions alone: no query sees beyond the last key that a device is
    told of, or none asks where it stands. Of sizes that are not known nothing can be said.
    """
    p = step.problem
    if symbols((p.seqlen_q, p.seqlen_k)):
        return False
    if isinstance(step, Along) or cuts_nothing(p) or p.lengths.ragged or p.deterministic:
        return False
    known = {"softcap", "bias"} | ({"alibi"} if p.mask != FULL else set[str]())
    if any(spec.kind.name not in known for spec in p.score):
        return False
    if any(leaf.kind.name not in ("document", "key_padding", "prefix") for leaf in p.leaves):
        return False
    return p.mask == FULL or (p.mask.right is not None and p.mask.right <= 0 and p.seqlen_k >= p.seqlen_q)


def _of_queries(step: Step, axes: dict[str, Any], given: tuple[Any, ...]) -> tuple[Step, tuple[Any, ...]]:
    """The step of what a device has, and what it takes."""
    own = step.fit(given)
    if "t" not in axes or isinstance(own, Along):
        return own, given
    p, arrays = own.problem, dict(zip((b.name for b in step.inputs()), given, strict=True))
    tokens = arrays["q"].shape[1]
    if p.mask != FULL:
        own = replace(own, problem=resized(p, given, lengths=Lengths(used_k=True)))
        end = (jax.lax.axis_index(axes["t"]) + 1) * tokens + p.seqlen_k - step.problem.seqlen_q
        arrays["seqused_k"] = jnp.broadcast_to(end.astype(jnp.int32), (p.batch,))
    if isinstance(own, Backward):  # parts of dk and dv are summed in float32
        own = replace(own, gradients=replace(own.gradients, wide_keys=True))
    return own, tuple(arrays[b.name] for b in own.inputs())


def cut(step: Step, mesh: Any, sharding: Any) -> dict[str, Any]:
    """The mesh axes over which batch, heads, kv and t are cut, by role, as q's sharding wants them and the sizes allow."""
    p = step.problem
    spec = tuple(getattr(sharding, "spec", ())) + (None,) * 4
    axes: dict[str, Any] = {}
    if cuts_nothing(p):
        return axes
    batch, heads = _names(spec[0]), _names(spec[2])
    if batch and not p.lengths.varlen and p.batch % _count(mesh, batch) == 0:
        axes["batch"] = batch
    if heads and p.heads_kv % _count(mesh, heads) == 0:
        axes[HEADS] = axes["kv"] = heads
    elif heads and p.heads_kv == 1 and p.heads_q % _count(mesh, heads) == 0:
        axes[HEADS] = heads
    tokens = _names(spec[1])
    if tokens and cuts_queries(step) and p.seqlen_q % _count(mesh, tokens) == 0:
        axes["t"] = tokens
    return axes


def sharding_rule(step: Step, inputs: list[Roles], outputs: list[Roles]) -> tuple[str, dict[str, int], tuple[str, ...]]:
    """How shardings spread (an einsum-like rule), sizes of its factors, and the factors that are never cut."""
    p, queries, numbers = step.problem, cuts_queries(step), dict[str, str]()
    split = p.heads_kv > 1 and p.group > 1
    together = {"kv": "kv" if p.heads_kv > 1 else "one", HEADS: "kv" if p.group == 1 and p.heads_kv > 1 else "group"}

    def factor(role: str) -> str:
        if role == HEADS and split:
            return "(kv group)"
        if role in together:
            return together[role]
        if (role == "batch" and not p.lengths.varlen) or (role == "t" and queries):
            return role
        return numbers.setdefault(role, f"x{len(numbers)}")

    spelled = [", ".join(" ".join(factor(role) for role in own) for own in side) for side in (inputs, outputs)]
    text = " -> ".join(spelled)
    return text, {"group": p.group} if split else {}, tuple(numbers.values())


def _summed(step: Step, axes: dict[str, Any], name: str, own: Roles, x: Any, like: Any) -> Any:
    """An output of which each device holds a part of the sum, as the sum."""
    if isinstance(step, Forward):
        return x
    over: list[str] = []
    if "batch" not in own:
        over += axes.get("batch", ())
    if "t" not in own:
        over += axes.get("t", ())
    if HEADS not in own and ((name in ("dk", "dv") and "kv" not in axes) or name.startswith("dscore.")):
        over += axes.get(HEADS, ())
    x = jax.lax.psum(x, tuple(over)) if over else x
    return x.astype(like)


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _count(mesh: Any, names: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[name] for name in names)
