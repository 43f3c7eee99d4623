"""The portable kernels from JAX, run by Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir

from flashtile import Mass, dispatch
from flashtile.jax import dot_product_attention
from flashtile.jax.arrays import JAX_DTYPES
from flashtile.jax.launch import held
from flashtile.jax.run import plan_p
from flashtile.jax.step import Along, Backward
from flashtile.plan.call import KernelCall, Plan, Pointer, Strides
from flashtile.plan.device import CPU
from flashtile.triton_glue.compile import contiguous
from tests.jax.judge import CASES, evaluate, judge


class Memory:
    """A numpy array as the interpreter takes a tensor."""

    def __init__(self, array: Any, dtype: str):
        self.array, self.dtype = array, dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data


def launch(plan: Plan, arrays: dict[str, Any]) -> None:
    """Run a plan on numpy arrays; what it makes is added to them, NaN where it writes nothing."""
    buffers = {b.name: b for b in plan.buffers}
    for buffer in plan.buffers:
        if buffer.role != "input":
            shape, dtype = held(buffer)
            dtype = jnp.dtype(dtype)
            fill = 0 if buffer.zeroed or dtype.kind in "iub" else math.nan
            arrays[buffer.name] = np.full(shape, fill, dtype)

    def argument(arg: Any) -> Any:
        if isinstance(arg, Pointer):
            dtype = buffers[arg.name].dtype
            return Memory(arrays[arg.name], "float64" if dtype == "fp64" else jnp.dtype(JAX_DTYPES[dtype]).name)
        if isinstance(arg, Strides):
            shape = buffers[arg.name].shape
            return arg.of(shape, contiguous(shape))
        return tuple(map(argument, arg)) if isinstance(arg, tuple) else arg

    for call in plan.calls:
        assert isinstance(call, KernelCall)
        if 0 not in call.grid:
            call.kernel[call.grid](*map(argument, call.args), **dict(call.constants))


def run_step(step: Any, *given: Any) -> tuple[Any, ...]:
    arrays = dict(zip((b.name for b in step.inputs()), map(np.array, given), strict=True))
    if isinstance(step, Along):
        plan = dispatch.plan_pass(step.name, step.problem, CPU, step.direction, "triton")
    elif isinstance(step, Backward):
        plan = dispatch.plan_backward(step.problem, CPU, step.gradients, "triton", step.variant)
    else:
        plan = dispatch.plan_forward(step.problem, CPU, "triton")
    launch(plan, arrays)
    return tuple(arrays[b.name] for b in step.outputs())


def lower(ctx: Any, *operands: Any, step: Any, guarded: bool) -> Any:
    shapes = tuple(jax.ShapeDtypeStruct(b.shape, JAX_DTYPES[b.dtype]) for b in step.outputs())

    def program(*given: Any) -> Any:
        return jax.pure_callback(lambda *a: run_step(step, *a), shapes, *given, vmap_method="sequential")

    return mlir.lower_fun(program, multiple_results=True)(ctx, *operands)


@pytest.fixture(autouse=True, scope="module")
def _interpreter() -> Iterator[None]:
    """On the CPU kernels are lowered to a call of the interpreter; arrays need no copy to the host."""
    from triton.runtime.interpreter import GridExecutor

    from flashtile.jax import run
    from tests.interpreter import hasten

    hasten()
    patch = pytest.MonkeyPatch()
    patch.setattr(GridExecutor, "_init_args_hst", lambda self, args, kwargs: (args, kwargs))
    patch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
    mlir.register_lowering(plan_p, lower)
    yield
    mlir.register_lowering(plan_p, run._lower_elsewhere)
    patch.undo()


NAMES = (
    "full-float32", "causal-bfloat16", "bottom-right-long-queries", "window", "bias-b1ts", "mask-11ts", "lengths-bottom-right",
    "softcap", "sinks", "slopes", "dropout", "all",
)  # fmt: skip


@pytest.mark.parametrize("backward", ["split", "fused"])
@pytest.mark.parametrize("case", [c for c in CASES if c.name in NAMES], ids=lambda case: case.name)
def test_case(case: Any, backward: str) -> None:
    case = replace(case, seqlen_k=min(case.seqlen_k, 50), heads=2, heads_kv=1)
    judge(case, evaluate(lambda leaves: case.ours(leaves, "triton", backward=backward), case.leaves(), case.cotangents()))


def test_vmap_joins_the_batch() -> None:
    case = next(c for c in CASES if c.name == "causal-float32")
    leaves = {name: jnp.stack([x, x[::-1]]) for name, x in case.leaves().items()}
    got = jax.vmap(lambda x: case.ours(x, "triton"))(leaves)
    for i in range(2):
        for mine, theirs in zip(got, case.ours({name: x[i] for name, x in leaves.items()}, "triton"), strict=True):
            np.testing.assert_array_equal(mine[i], theirs)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_statistics_are_those_of_plain_jax(softcap: float | None) -> None:
    q, k, v = (jax.random.normal(jax.random.key(i), (1, n, h, 16)) for i, (n, h) in enumerate(((37, 2), (50, 1), (50, 1))))
    sinks = jnp.array([0.5, -1.0])

    def entropy(q: Any, k: Any, sinks: Any, implementation: str) -> Any:
        how = dict(softcap=softcap, sinks=sinks, is_causal=True, implementation=implementation)
        _, found = dot_product_attention(q, k, v, **how, returns=("lse", "max_logit", "entropy", Mass(last=5)))
        return jnp.square(found.entropy).sum(), found

    ours, plain = (jax.grad(entropy, (0, 1, 2), has_aux=True)(q, k, sinks, name) for name in ("triton", "xla"))
    for mine, theirs in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("kind", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8])
@pytest.mark.parametrize("shape", [(), (2, 1), (2, 50, 1)])
def test_bytes_are_the_numbers_that_they_stand_for(kind: Any, shape: tuple[int, ...]) -> None:
    q, k, v = (jax.random.normal(jax.random.key(i), (2, n, h, 16)) for i, (n, h) in enumerate(((37, 2), (50, 1), (50, 1))))
    q, k, v = q.astype(jnp.bfloat16), *((3.0 * x).astype(kind) for x in (k, v))
    scale = jax.random.uniform(jax.random.key(7), shape) + 0.5
    ours, exact = (  # plain JAX would round keys times their scales to query's 16 bits
        dot_product_attention(q, k, v, is_causal=True, k_scale=scale, v_scale=scale, implementation=name, return_residual=True)
        for q, name in ((q, "triton"), (q.astype(jnp.float32), "xla"))
    )
    for mine, theirs in zip(ours, exact, strict=True):
        assert np.linalg.norm(np.float32(mine) - theirs) < 5e-3 * np.linalg.norm(theirs)
