"""Programs for CUDA, without a GPU: kernels are compiled by Triton, and the calls are what jaxlib's launcher takes."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from flashtile import Alibi, AttentionProblem, Dropout, Mass, NotSupported
from flashtile.audit.matrix import jobs_of, plan_of, problems, small_problems
from flashtile.jax import (
    dot_product_attention,
    dot_product_attention_sharded,
    dot_product_attention_varlen,
    launch,
    reorder,
    target,
)
from flashtile.jax.launch import HANDLER, Seating, refusals, seat
from flashtile.jax.reorder import ENTRY, reordered
from flashtile.jax.step import Backward, Forward
from flashtile.plan.backend import Gradients
from flashtile.plan.call import KernelCall, Plan
from flashtile.plan.device import H100
from flashtile.triton_glue import compile as compile_module

pytestmark = pytest.mark.compiles
CHECK = jax.export.DisabledSafetyCheck.custom_call(HANDLER)


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def lowered(function: Callable[..., Any], *arrays: Any, name: str = "sm90") -> str:
    with target(name):
        exported = jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=[CHECK])(*arrays)
    jax.export.deserialize(exported.serialize())
    return exported.mlir_module()


def gradient(**options: Any) -> Callable[..., Any]:
    def loss(q: Any, k: Any, v: Any) -> Any:
        return dot_product_attention(q, k, v, is_causal=True, **options).astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1, 2))


def stored(q: Any, k: Any, v: Any) -> Any:
    """A forward whose keys and values are bytes."""
    return dot_product_attention(q, k, v, k_scale=2.0, v_scale=jnp.ones((2, 2)))


def statistics(q: Any, k: Any, v: Any) -> Any:
    """Gradients of a sum of entropies by q and k, beside every statistic."""

    def total(q: Any, k: Any) -> Any:
        out, found = dot_product_attention(
            q, k, v, is_causal=True, softcap=30.0, returns=("max_logit", "entropy", Mass(last=64))
        )
        return found.entropy.sum(), (out, found)

    return jax.grad(total, (0, 1), has_aux=True)(q, k)


QKV = array(2, 256, 4, 64), array(2, 256, 2, 64), array(2, 256, 2, 64)
LONG = array(1, 1024, 4, 64), array(1, 1024, 2, 64), array(1, 1024, 2, 64)
BYTES = tuple(array(*x.shape, dtype=jnp.float8_e4m3fn) for x in QKV[1:])
WIDE = tuple(array(*x.shape, dtype=jnp.float32) for x in QKV)


@pytest.mark.parametrize(
    ("function", "arrays", "calls"),
    [
        (lambda q, k, v: dot_product_attention(q, k, v), QKV, 1),
        (gradient(), QKV, 4),  # Hopper: forward, rows, keys, dq
        (gradient(), LONG, 5),  # and the sums of dk and dv of query heads that share keys
        (gradient(backward="split"), QKV, 4),  # forward, delta, queries, keys
        (gradient(backward="fused", implementation="triton"), QKV, 5),  # forward, delta, queries, keys, conversion
        (gradient(backward="xla"), QKV, 1),
        (gradient(implementation="xla"), QKV, 0),
        (gradient(softcap=30.0, dropout=Dropout(0.1, 3)), QKV, 4),
        (gradient(), WIDE, None),
        (jax.vmap(gradient()), tuple(array(3, *x.shape) for x in QKV), 4),
        (jax.grad(lambda q, k, v, s: dot_product_attention(q, k, v, score=(Alibi(s),)).astype(jnp.float32).sum(), (0, 3)),
         (*QKV, array(4, dtype=jnp.float32)), None),
        (jax.grad(lambda q, k, v, b: dot_product_attention(q, k, v, b).astype(jnp.float32).sum(), (0, 3)),
         (*QKV, array(1, 4, 256, 256)), None),
        (jax.grad(lambda q, k, v, b: dot_product_attention(q, k, v, b, is_causal=True).astype(jnp.float32).sum(), (0, 3)),
         (*QKV, array(2, 4, 256, 256)), None),
        (jax.grad(lambda q, k, v, cu: dot_product_attention_varlen(q, k, v, cu, is_causal=True).astype(jnp.float32).sum()),
         (*(array(*x.shape[1:]) for x in QKV), array(4, dtype=jnp.int32)), None),
        (stored, (array(2, 64, 4, 64), *BYTES), 1),
        (stored, (QKV[0], *BYTES), 3),  # Hopper: keys and values in memory, forward
        (statistics, QKV, 5),  # forward, rows' statistics, mass, the entropy's queries and keys
    ],
    ids=[
        *("forward", "hopper", "hopper-ungrouped", "split", "fused", "xla-backward", "xla", "dropout", "fp32", "vmap", "alibi"),
        *("bias", "causal-bias", "varlen", "stored", "stored-long", "statistics"),
    ],
)  # fmt: skip
def test_a_program_for_an_h100(function: Callable[..., Any], arrays: Any, calls: int | None) -> None:
    found = lowered(function, *arrays).count(HANDLER)
    assert found == calls if calls is not None else found > 1


@pytest.mark.parametrize("implementation", ["triton", "hopper"])
def test_within_shard_map_kernels_store_parts_of_dk_and_dv_in_float32(implementation: str) -> None:
    tokens = PartitionSpec(None, "cp")
    part = jax.shard_map(
        lambda *x: dot_product_attention_sharded(*x, axis_name="cp", is_causal=True, implementation=implementation),
        mesh=Mesh(np.array(jax.devices()[:2]), ("cp",)), in_specs=(tokens,) * 3, out_specs=tokens,
    )  # fmt: skip
    text = lowered(jax.grad(lambda *x: part(*x).astype(jnp.float32).sum(), (0, 1, 2)), *QKV)
    made = "".join(line.rpartition(" -> ")[2] for line in text.splitlines() if HANDLER in line)
    assert made.count("tensor<2x256x2x64xf32>") == 2
    assert "tensor<2x256x2x64xbf16>" not in made


def test_float64_sums_lie_in_pairs_of_floats() -> None:
    assert "tensor<2x256x4x64x2xf32>" in lowered(gradient(backward="fused", implementation="triton"), *WIDE)


def test_a_gradient_that_nobody_wants_is_not_computed() -> None:
    def loss(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return dot_product_attention(q, k, v, bias, implementation="triton").astype(jnp.float32).sum()

    given = (*QKV, array(1, 4, 256, 256))
    without, with_it = (lowered(jax.grad(loss, wanted), *given).count(HANDLER) for wanted in (0, (0, 3)))
    assert without < with_it


def test_one_program_for_both() -> None:
    with target("sm90"):
        exported = jax.export.export(jax.jit(gradient()), platforms=["cpu", "cuda"], disabled_checks=[CHECK])(*QKV)
    assert HANDLER in exported.mlir_module()
    given = tuple(jnp.ones(x.shape, x.dtype) for x in QKV)
    for mine, theirs in zip(exported.call(*given), gradient()(*given), strict=True):
        assert jnp.allclose(mine, theirs, atol=1e-2)


def test_one_function_lowered_for_two_targets() -> None:
    function = jax.jit(dot_product_attention)
    modules: dict[str, str] = {}
    for name in ("sm90", "sm80", "sm90"):
        with target(name):
            exported = jax.export.export(function, platforms=["cuda"], disabled_checks=[CHECK])(*QKV)
        assert modules.setdefault(name, exported.mlir_module()) == exported.mlir_module()
    assert modules["sm80"] != modules["sm90"]


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_without_a_gpu_and_a_target() -> None:
    with pytest.raises(NotSupported, match="JAX sees no GPU here; say which one"):
        jax.export.export(jax.jit(dot_product_attention), platforms=["cuda"], disabled_checks=[CHECK])(*QKV)


@cache
def plans() -> list[Plan]:
    """Every plan that the compile-only stage knows, for an H100, of backends with kernels."""
    found: dict[Plan, None] = {}
    for spelling in (*problems(), *small_problems()):
        for job in jobs_of(spelling, "sm90"):
            if job.index == 0:
                found[plan_of(job)] = None
    return list(found)


def test_every_shipped_plan_can_be_launched() -> None:
    refused = {plan.problem.spell() for plan in plans() if refusals(plan)}
    assert not refused


def test_a_kernel_that_adds_to_what_it_takes_twice_gets_its_parameters_in_another_order() -> None:
    """Hopper's backward takes dq_sum by descriptor and by pointer, and what it also writes after that."""
    problem = AttentionProblem.parse("attention(q=2x256x4x64,kv=256x2x64,bf16,deterministic)")
    plan = Backward(problem, Gradients()).plan(H100)
    call = next(c for c in plan.calls if isinstance(c, KernelCall) and c.kernel.fn.__name__ == "attention_backward")
    found = seat(call, plan, frozenset({"rows", "dq_sum", "tickets", "locks"}))
    assert plan.backend == "hopper"
    assert isinstance(found, Seating)
    assert found.places is not None
    kernel, runtime = launch.compiled(call, plan, H100), launch.specialise(call, {b.name: b for b in plan.buffers}).runtime
    text = reordered(kernel.asm["ptx"], runtime, found.places)
    before, after = (ENTRY.search(t).group(2) for t in (kernel.asm["ptx"], text))
    numbers = [int(n) for n in re.findall(r"_param_(\d+)", after)]
    assert sorted(numbers) == list(range(len(re.findall(r"_param_", before))))
    assert numbers != sorted(numbers)
    assert numbers[-2:] == sorted(numbers)[-2:]  # Triton's scratch
    assert text.replace(after, before) == kernel.asm["ptx"]
    own = (compile_module.assemble(ptx, H100, "-v")[1] for ptx in (kernel.asm["ptx"], text))
    used = [re.search(r"Used (\d+) registers", log).group(1) for log in own]
    assert used[0] == used[1]


def test_messages_hold_machine_code_under_its_own_name_and_no_text() -> None:
    """What stands in the place of PTX jaxlib copies and hashes at every launch, and tells kernels of one name apart by it."""
    names: set[bytes] = set()
    for softcap in ("", ",score=softcap(30.0)"):
        plan = Forward(AttentionProblem.parse(f"attention(q=2x256x4x64,kv=256x2x64,bf16,band=:0{softcap})")).plan(H100)
        call = next(c for c in plan.calls if isinstance(c, KernelCall))
        message = zlib.decompress(launch._message(call, plan, H100, frozenset()))
        cubin = launch.compiled(call, plan, H100).asm["cubin"]
        assert cubin in message
        assert len(message) < len(cubin) + 2000
        names.update(re.findall(rb"// sm_90 machine code [0-9a-f]{64}", message))
    assert len(names) == 2


def test_a_reordered_kernel_is_assembled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's cache keeps its machine code too, by text and by what compiled it."""
    made: list[str] = []

    def assemble(text: str, *_: Any) -> tuple[bytes, str]:
        made.append(text)
        return f"code {len(made)}".encode(), ""

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(reorder, "assemble", assemble)
    of = lambda digest: SimpleNamespace(hash=digest, metadata=SimpleNamespace(name="kernel"))  # noqa: E731
    codes = [reorder.machine_code(of(digest), text, H100, True) for digest, text in ("aA", "aA", "aB", "bB", "aA")]
    assert codes == [b"code 1", b"code 1", b"code 2", b"code 3", b"code 1"]
    assert made == ["A", "B", "B"]
    monkeypatch.setattr(reorder, "assemble", lambda *_: (None, "no"))
    with pytest.raises(RuntimeError, match="ptxas refused a kernel for sm90"):
        reorder.machine_code(of("c"), "C", H100, True)


def test_what_is_written_is_a_result_and_what_follows_stays_in_order() -> None:
    """The launcher hands out buffers in order, operands before results: each parameter must get its own."""
    for plan in plans()[::3]:
        inputs, made = {b.name for b in plan.named("input")}, set[str]()
        for call in plan.calls:
            assert isinstance(call, KernelCall)
            found = seat(call, plan, frozenset(made))
            assert isinstance(found, Seating)
            order = launch.specialise(call, {b.name: b for b in plan.buffers}).runtime
            order = [order[i] for i in range(len(order)) if found.places is None] + [order[i] for i in found.places or ()]
            places = [a.name for a, _ in order if hasattr(a, "name")]
            assert [*found.operands, *found.results][: len(places)] == places
            assert all(found.operands[o] == found.results[r] for o, r in found.aliases)
            assert made.intersection(places) - inputs <= {found.operands[o] for o, _ in found.aliases}
            made.update(found.results)


def test_the_message_holds_triton_s_own_code() -> None:
    plan = plans()[0]
    (call,) = (c for c in plan.calls if isinstance(c, KernelCall))
    message = zlib.decompress(launch._message(call, plan, H100, frozenset()))
    assert launch.compiled(call, plan, H100).asm["cubin"] in message
