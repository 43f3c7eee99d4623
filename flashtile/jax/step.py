"""The forward and the backward of an attention problem as steps of a JAX program."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from flashtile import dispatch
from flashtile.errors import NotSupported
from flashtile.jax import blockwise, blockwise_statistics
from flashtile.jax.arrays import JAX_DTYPES, Arrays
from flashtile.jax.symbolic import predicate_of, resized
from flashtile.plan.backend import Direction, Gradients
from flashtile.plan.buffers import (
    backward_buffers,
    entropy_buffers,
    forward_buffers,
    input_buffers,
    second_buffers,
    statistics_buffers,
    tangent_buffers,
)
from flashtile.plan.call import Buffer, Plan
from flashtile.plan.device import Device
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.options import Variant


def kept(p: AttentionProblem) -> tuple[Buffer, ...]:
    """What a forward leaves for the backward besides out and lse: for float32's grade each row's maximum and sum."""
    shape = (p.slabs, p.heads_q, 2, p.span_q)
    return (Buffer("stats", shape, "fp32", "output"),) if p.float32_grade else ()


@dataclass(frozen=True)
class Forward:
    """q, k, v and the rest to out, lse and what is `kept`."""

    problem: AttentionProblem
    backend: str | None = None

    def __repr__(self) -> str:
        return self.problem.spell()

    def inputs(self) -> tuple[Buffer, ...]:
        return input_buffers(self.problem)

    def outputs(self) -> tuple[Buffer, ...]:
        return (*(b for b in forward_buffers(self.problem) if b.role == "output"), *kept(self.problem))

    def plan(self, device: Device) -> Plan:
        return _first_plan(self.problem, device, self.backend, None, Gradients())

    def plain_refusals(self) -> list[str]:
        return blockwise.unsupported(self.problem)

    def plain(self, arrays: Arrays) -> Arrays:
        """What is `kept` serves kernels alone, and is zero here."""
        kept_here = {b.name: jnp.zeros(b.shape, JAX_DTYPES[b.dtype]) for b in kept(self.problem)}
        return {**blockwise.forward(self.problem, arrays), **kept_here}

    def fit(self, given: tuple[Any, ...]) -> Forward:
        return replace(self, problem=fitted(self.problem, dict(zip((b.name for b in self.inputs()), given, strict=True))))


@dataclass(frozen=True)
class Backward:
    """What the forward took and made, dout and perhaps dlse, to the gradients that are wanted."""

    problem: AttentionProblem
    gradients: Gradients
    backend: str | None = None
    variant: Variant = "auto"
    keeps: bool = True  # whether what the forward `kept` is at hand

    def __repr__(self) -> str:
        return f"the backward of {self.problem.spell()}"

    def inputs(self) -> tuple[Buffer, ...]:
        given = [b for b in backward_buffers(self.problem, self.gradients) if b.role == "input"]
        return (*given, *(replace(b, role="input") for b in kept(self.problem) if self.keeps))

    def outputs(self) -> tuple[Buffer, ...]:
        return tuple(b for b in backward_buffers(self.problem, self.gradients) if b.role == "output")

    def plan(self, device: Device) -> Plan:
        return _first_plan(self.problem, device, self.backend, self.variant, self.gradients)

    def plain_refusals(self) -> list[str]:
        return blockwise.unsupported(self.problem)

    def plain(self, arrays: Arrays) -> Arrays:
        return blockwise.backward(self.problem, arrays, [b.name for b in self.outputs()], self.gradients.wide_keys)

    def fit(self, given: tuple[Any, ...]) -> Backward:
        return replace(self, problem=fitted(self.problem, dict(zip((b.name for b in self.inputs()), given, strict=True))))


BUFFERS = {
    "tangent": tangent_buffers, "second": second_buffers, "statistics": statistics_buffers, "entropy": entropy_buffers,
}  # fmt: skip


@dataclass(frozen=True)
class Along:
    """A pass along a direction: "tangent" makes out, lse and their tangents, "second" how gradients change, or both;
    "statistics" and "entropy" make those of the softmax, and the entropy's gradients.
    """

    name: str
    problem: AttentionProblem
    direction: Direction
    backend: str | None = None

    def __repr__(self) -> str:
        return f"{self.name} of {self.problem.spell()}"

    def _buffers(self) -> tuple[Buffer, ...]:
        return BUFFERS[self.name](self.problem, self.direction)

    def inputs(self) -> tuple[Buffer, ...]:
        return tuple(b for b in self._buffers() if b.role == "input")

    def outputs(self) -> tuple[Buffer, ...]:
        return tuple(b for b in self._buffers() if b.role == "output")

    def plan(self, device: Device) -> Plan:
        from flashtile.jax.launch import refusals

        plan = dispatch.plan_pass(self.name, self.problem, device, self.direction, self.backend)
        reasons = refusals(plan)
        if reasons:
            raise NotSupported(f"{self!r} on {device.target}", {plan.backend: reasons})
        return plan

    def plain_refusals(self) -> list[str]:
        return blockwise.unsupported(self.problem)

    def plain(self, arrays: Arrays) -> Arrays:
        """Derivatives by forward mode through the plain passes, block by block as these are."""
        made = [b.name for b in self.outputs()]
        if self.name == "statistics":
            return blockwise_statistics.statistics(self.problem, arrays, made, self.direction.last)
        if self.name == "entropy":
            return blockwise_statistics.entropy(self.problem, arrays, made)
        given = [b.name for b in input_buffers(self.problem)]
        if self.name == "tangent":
            return blockwise.tangent(self.problem, arrays, given)
        rows = {b.name: jnp.zeros(b.shape, JAX_DTYPES[b.dtype]) for b in forward_buffers(self.problem) if b.role == "output"}
        there = {f"d{n}": arrays.get(f"d{n}", zero) for n, zero in rows.items()}
        wanted = [name for name in made if name not in ("tout", "tlse")]
        return blockwise.second(self.problem, {**arrays, **there}, [*given, *there], wanted)

    def fit(self, given: tuple[Any, ...]) -> Along:
        return replace(self, problem=fitted(self.problem, dict(zip((b.name for b in self.inputs()), given, strict=True))))


def _first_plan(
    p: AttentionProblem, device: Device, backend: str | None, variant: Variant | None, gradients: Gradients
) -> Plan:
    """The plan of the first backend that takes the problem and that jaxlib can launch."""
    from flashtile.jax.launch import refusals  # which reads kernels' parameters, by Triton

    reasons: dict[str, list[str]] = {}
    for candidate in dispatch.BACKENDS if backend is None else (dispatch.backend_named(backend),):
        reasons[candidate.name] = candidate.unsupported(p, device, variant)
        if reasons[candidate.name]:
            continue
        forward = variant is None
        plan = candidate.forward(p, device) if forward else candidate.backward(p, device, gradients, variant)
        reasons[candidate.name] = refusals(plan)
        if not reasons[candidate.name]:
            return plan
    raise NotSupported(f"{p.spell()} on {device.target}", reasons)


def fitted(p: AttentionProblem, arrays: Arrays) -> AttentionProblem:
    """The problem of arrays that have other sizes: a part of the batch, of the heads or of the queries, or several batches."""
    heads_q, heads_kv = arrays["q"].shape[2], arrays["k"].shape[2]
    batch = arrays["cu_seqlens_q"].shape[0] - 1 if p.lengths.varlen else arrays["q"].shape[0]
    score = tuple(
        replace(spec, tensors=tuple(replace(t, shape=arrays[f"score.{i}.{j}"].shape) for j, t in enumerate(spec.tensors)))
        for i, spec in enumerate(p.score)
    )
    leaves = iter(range(len(p.leaves)))
    where = tuple(tuple(_placed(leaf, next(leaves), arrays) for leaf in term) for term in p.where)
    sink = None if p.sink is None else replace(p.sink, shape=arrays["sink"].shape)
    seqlen_q = p.seqlen_q if p.lengths.varlen else arrays["q"].shape[1]
    sizes = {"batch": batch, "seqlen_q": seqlen_q, "heads_q": heads_q, "heads_kv": heads_kv}
    return resized(p, arrays.values(), **sizes, score=score, where=where, sink=sink)


def _placed(leaf: Any, i: int, arrays: Arrays) -> Any:
    tensors = tuple((arrays[f"mask.{i}.{j}"].shape, dtype) for j, (_, dtype) in enumerate(leaf.tensors))
    return predicate_of(leaf.kind, leaf.scalars, tensors)


__all__ = ["Along", "Backward", "Forward", "fitted", "kept"]
