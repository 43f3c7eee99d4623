"""`vmap` of a step: the mapped axis joins the batch where a problem allows it, and is walked otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from flashtile.errors import NotSupported
from flashtile.jax.explicit import automatically
from flashtile.jax.partition import Step, primal, run_partitioned
from flashtile.jax.step import Along
from flashtile.plan.backend import ROW_STATISTICS
from flashtile.plan.buffers import place_of
from flashtile.plan.call import Buffer


def run_mapped(step: Step, implementation: str | None, *given: Any) -> tuple[Any, ...]:
    """The step's outputs; under `vmap` those of every element, one by one the same as without."""

    @custom_vmap
    def call(*given: Any) -> tuple[Any, ...]:
        return run_partitioned(step.fit(given), implementation, *given)

    @call.def_vmap
    def _(size: int, batched: Sequence[bool], *given: Any) -> Any:
        names = [b.name for b in step.inputs()]
        which = {name for name, is_batched in zip(names, batched, strict=True) if is_batched}
        each = step.fit(tuple(jax.ShapeDtypeStruct(x.shape[b:], x.dtype) for x, b in zip(given, batched, strict=True)))
        if joins_batch(each, which):
            wide = [_joined(each, n, x, which, size) for n, x in zip(names, given, strict=True)]
            made = call(*wide)
            outputs = tuple(_parted(each, b, x, size) for b, x in zip(each.outputs(), made, strict=True))
            return outputs, (True,) * len(outputs)
        return one_by_one(call)(size, batched, *given)

    named = dict(zip((b.name for b in step.inputs()), given, strict=True))
    batch, seqlen, heads, _ = jax.typeof(named["q"]).sharding.spec
    specs = {"out": (batch, seqlen, heads), "stats": (batch, heads, None, seqlen), "mass": (batch, heads)}
    specs |= dict.fromkeys(("lse", *ROW_STATISTICS), (batch, heads, seqlen))
    specs |= {f"t{name}": specs[name] for name in ("out", "lse")}
    made = tuple(b.name for b in step.outputs())
    what, order = step.problem.spell(), "third"
    if isinstance(step, Along) and step.name in ("statistics", "entropy"):
        what, order = f"the entropy of {what}", "second"
    return automatically(undifferentiated(what, call, order), named, made, specs)


def undifferentiated(
    what: str, function: Callable[..., tuple[Any, ...]], order: str = "second"
) -> Callable[..., tuple[Any, ...]]:
    """The function of arrays, a pass of `what`; it raises NotSupported where autodiff comes by once more."""
    call = jax.custom_jvp(function)

    @call.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise NotSupported(
            f"{order} derivatives of {what}", {"jax": ["passes that differentiate have no derivative of their own"]}
        )

    return call


def one_by_one(call: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    """The rule of `custom_vmap` that walks the mapped axis."""

    def rule(size: int, batched: Sequence[bool], *given: Any) -> Any:
        def one(part: Sequence[Any]) -> tuple[Any, ...]:
            rest = iter(part)
            return call(*(next(rest) if b else x for x, b in zip(given, batched, strict=True)))

        outputs = jax.lax.map(one, [x for x, is_batched in zip(given, batched, strict=True) if is_batched])
        return outputs, (True,) * len(outputs)

    return rule


def joins_batch(step: Step, batched: set[str]) -> bool:
    """Whether the mapped axis may join the batch: nothing depends on an item's place in it, nor is summed over it."""
    p = step.problem
    captured = [c for spec in p.score for c in spec.kind.captured]
    if p.lengths.varlen or p.dropout is not None or p.where or any(c.index is not None for c in captured):
        return False
    return p.sink is None or (batched.isdisjoint(("sink", "tsink")) and not p.sink.grad)


def _joined(step: Step, name: str, x: Any, which: set[str], size: int) -> Any:
    """An input of all elements: (size * batch, ...), or as it is where it has no batch, nor has what it is a tangent of."""
    p, source, batched = step.problem, primal(name), name in which
    if source == "sink":
        return x
    if source.startswith("score."):
        i, j = place_of(name)
        if p.score[i].kind.captured[j].broadcast:
            if which.isdisjoint((source, f"t{source}")) and x.shape[0] == 1 and not p.score[i].tensors[j].grad:
                return x
            x = jnp.broadcast_to(x, (size, p.batch, *x.shape[-3:]))
            return x.reshape(size * p.batch, *x.shape[2:])
    x = x if batched else jnp.broadcast_to(x, (size, *x.shape))
    return x.reshape(size * x.shape[1], *x.shape[2:])


def _parted(step: Step, output: Buffer, x: Any, size: int) -> Any:
    """An output of every element, as the step of one element has it."""
    if output.name.startswith("dscore.") and output.shape[0] == 1:
        return x.reshape(size, step.problem.batch, *x.shape[1:]).sum(1, keepdims=True)
    return x.reshape(size, *output.shape)
