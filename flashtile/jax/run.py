"""Executes plans on JAX arrays: the interpreter of `Plan` beside `torch/execute/bound.py`.

A plan enters a JAX program as one primitive, `flashtile`, whose lowering for CUDA makes the plan for the GPU at hand and
compiles its kernels; tracing it costs nothing, and needs neither Triton nor a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from flashtile.errors import InvalidProblem, NotSupported
from flashtile.jax.arrays import JAX_DTYPES, Arrays
from flashtile.jax.symbolic import refusal
from flashtile.plan.call import Buffer, KernelCall, Plan
from flashtile.plan.device import NAMED, Device

NAMES = {jnp.dtype(dtype): name for name, dtype in JAX_DTYPES.items()}


class Step(Protocol):
    """One pass of an op, hashable and without arrays: what a program keeps of it until it is lowered."""

    def inputs(self) -> tuple[Buffer, ...]:
        """What it takes, in order."""
        ...

    def outputs(self) -> tuple[Buffer, ...]:
        """What it makes, in order; the same whatever runs it."""
        ...

    def plan(self, device: Device) -> Plan:
        """How a GPU makes them. Raises NotSupported with every backend's reasons."""
        ...

    def plain_refusals(self) -> list[str]:
        """Reasons why `plain` cannot; empty when it can."""
        ...

    def plain(self, arrays: Arrays) -> Arrays:
        """The same in plain JAX."""
        ...


# The Device of `target`: a part of the keys of JAX's caches, for it decides what is lowered.
_TARGET = jax.make_user_context(None)


@contextmanager
def target(name: str) -> Iterator[None]:
    """Lower for a named GPU, such as "sm90", that need not be there: for `jax.export` on a machine without one."""
    if name not in NAMED or NAMED[name].kind != "cuda":
        known = ", ".join(n for n, device in NAMED.items() if device.kind == "cuda")
        raise InvalidProblem(f"target is {name!r}; it must be one of {known}.")
    with _TARGET(NAMED[name]):
        yield


def device_here() -> Device:
    """The GPU that a program is being lowered for: that of `target`, or JAX's first one."""
    if _TARGET.value is not None:
        return _TARGET.value
    try:
        gpu = jax.devices("cuda")[0]
    except RuntimeError as error:
        reason = "JAX sees no GPU here; say which one with flashtile.jax.target, for example target('sm90')"
        raise NotSupported("lowering for CUDA", {"jax": [reason]}) from error
    arch = int(gpu.compute_capability.replace(".", ""))
    known = NAMED.get(f"sm{arch}")
    if known is None:
        return Device("cuda", gpu.device_kind, arch, gpu.core_count, 99 * 1024)
    return replace(known, name=gpu.device_kind, sm_count=gpu.core_count)


def execute(plan: Plan, device: Device, given: Sequence[Any]) -> list[Any]:
    """The plan's outputs from its inputs, both in the plan's order, as calls of the program that is being traced."""
    from flashtile.jax.launch import launch  # which compiles them, by Triton

    arrays: Arrays = dict(zip((b.name for b in plan.named("input")), given, strict=True))
    for call in plan.calls:
        assert isinstance(call, KernelCall)
        launch(call, plan, device, arrays)
    made: list[Any] = []
    for buffer in plan.named("output"):
        source = buffer.name if buffer.over is None else buffer.over
        if source not in arrays:  # nothing to launch, nothing to hold
            arrays[source] = jnp.zeros(buffer.shape, JAX_DTYPES[buffer.dtype])
        made.append(arrays[source])
    return made


plan_p = Primitive("flashtile")
plan_p.multiple_results = True


@plan_p.def_abstract_eval
def _abstract(*avals: Any, step: Step, guarded: bool) -> list[Any]:
    return [ShapedArray(b.shape, JAX_DTYPES[b.dtype]) for b in step.outputs()]


@plan_p.def_impl
def _evaluate(*given: Any, **parameters: Any) -> Any:
    return jax.jit(partial(plan_p.bind, **parameters))(*given)


def _lower_cuda(ctx: Any, *operands: Any, step: Step, guarded: bool) -> Any:
    unknown = refusal(step.inputs())
    if unknown:
        raise NotSupported(repr(step), {"triton": unknown, "hopper": unknown, "xla": step.plain_refusals()})
    device = device_here()
    plan = step.plan(device)
    order = [b.name for b in step.inputs()]
    made = [b.name for b in step.outputs()]

    def program(*given: Any) -> list[Any]:
        by_name = dict(zip(order, given, strict=True))
        found = execute(plan, device, [by_name[b.name] for b in plan.named("input")])
        outputs = dict(zip((b.name for b in plan.named("output")), found, strict=True))
        return [outputs[name] for name in made]

    return mlir.lower_fun(program, multiple_results=True)(ctx, *operands)


def _lower_elsewhere(ctx: Any, *operands: Any, step: Step, guarded: bool) -> Any:
    if guarded:  # of a program for several platforms: nobody comes here on this one
        zeros = lambda *_: [jnp.zeros(b.shape, JAX_DTYPES[b.dtype]) for b in step.outputs()]  # noqa: E731
        return mlir.lower_fun(zeros, multiple_results=True)(ctx, *operands)
    platforms = ", ".join(ctx.module_context.platforms)
    reason = f"arrays are on {platforms}; these kernels need an NVIDIA GPU (implementation=None or 'xla' runs here)"
    raise NotSupported(repr(step), {"triton": [reason], "hopper": [reason], "xla": step.plain_refusals()})


mlir.register_lowering(plan_p, _lower_cuda, platform="cuda")
mlir.register_lowering(plan_p, _lower_elsewhere)


def varying_like(made: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """Mark what was made as varying over all mesh axes that anything given varies over (`shard_map` checks it)."""
    axes = frozenset(axis for array in given for axis in _axes(array))
    missing = [tuple(sorted(axes - _axes(m), key=str)) for m in made]
    return [jax.lax.pcast(m, more, to="varying") if more else m for m, more in zip(made, missing, strict=True)]


def _axes(array: Any) -> frozenset[Any]:
    return frozenset(jax.typeof(array).manual_axis_type.varying)


def kernels(step: Step, *given: Any, guarded: bool = False) -> list[Any]:
    """The step by a backend's kernels; `guarded` where other platforms have their own branch."""
    return varying_like(plan_p.bind(*given, step=step, guarded=guarded), given)


def plain(step: Step, *given: Any) -> list[Any]:
    """The step in plain JAX. Raises NotSupported where it has no formula there."""
    reasons = step.plain_refusals()
    if reasons:
        raise NotSupported(repr(step), {"xla": reasons})
    made = step.plain(dict(zip((b.name for b in step.inputs()), given, strict=True)))
    return varying_like([made[b.name] for b in step.outputs()], given)


def run(step: Step, implementation: str | None, *given: Any) -> list[Any]:
    """The step's outputs: by kernels on an NVIDIA GPU and in plain JAX elsewhere, or as `implementation` says."""
    if implementation == "xla":
        return plain(step, *given)
    if implementation is not None or step.plain_refusals():
        return kernels(step, *given)
    on_gpu = lambda *a: tuple(kernels(step, *a, guarded=True))  # noqa: E731
    elsewhere = lambda *a: tuple(plain(step, *a))  # noqa: E731
    return list(jax.lax.platform_dependent(*given, cuda=on_gpu, default=elsewhere))
