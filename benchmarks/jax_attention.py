"""Times `flashtile.jax` beside JAX's own attentions on a GPU, in one rotation, after a check against float32.

    python benchmarks/jax_attention.py [--budget SECONDS] [--output FILE]

Cells: bf16, batch 4, 4096 tokens, head_dim 64 with 32 heads and 128 with 16, causal and full, forward and forward with
backward. Our kernels are compiled first, in parallel processes; then a process times flashtile from PyTorch, where PyTorch is
installed: device time is to be the same.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.processes import Failure, compile_ahead, in_processes
from benchmarks.record import Record, at_least_one, options, provenance

CELLS = [(head_dim, causal) for head_dim in (64, 128) for causal in (True, False)]
BATCH, SEQLEN, TOLERANCE = 4, 4096, 1.5e-2  # of the norm, against float32 attention of a part
PASSES = ("forward", "both")
Call = Callable[[], Any]


def heads(head_dim: int) -> int:
    return 2048 // head_dim


def flops(head_dim: int, causal: bool, which: str) -> float:
    one = 2 * BATCH * heads(head_dim) * SEQLEN * SEQLEN * head_dim / (2 if causal else 1)
    return one * (2 if which == "forward" else 7)


def time_torch() -> dict[tuple[int, bool, str], list[float]]:
    """Milliseconds of flashtile from PyTorch, by cell."""
    import torch

    import flashtile

    found: dict[tuple[int, bool, str], list[float]] = {}
    for head_dim, causal in CELLS:
        shape = (BATCH, SEQLEN, heads(head_dim), head_dim)
        q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        for t in (q, k, v):
            t.requires_grad_()

        def both(q: Any = q, k: Any = k, v: Any = v, dout: Any = dout, causal: bool = causal) -> None:
            torch.autograd.grad(flashtile.attention(q, k, v, causal=causal), (q, k, v), dout)

        def forward(q: Any = q, k: Any = k, v: Any = v, causal: bool = causal) -> None:
            with torch.no_grad():
                flashtile.attention(q, k, v, causal=causal)

        for which, call in (("forward", forward), ("both", both)):
            call()
            torch.cuda.synchronize()
            taken = []
            for _ in range(6):
                start = time.perf_counter()
                for _ in range(10):
                    call()
                torch.cuda.synchronize()
                taken.append((time.perf_counter() - start) * 100)
            found[head_dim, causal, which] = taken
    return found


def lower(head_dim: int, causal: bool, backward: str) -> None:
    """Compile a cell's kernels for an H100, without a GPU: Triton keeps them on disk."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp

    from flashtile.jax import dot_product_attention, target
    from flashtile.jax.launch import HANDLER

    array = jax.ShapeDtypeStruct((BATCH, SEQLEN, heads(head_dim), head_dim), jnp.bfloat16)
    implementation = None if backward == "auto" else "triton"

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(
            lambda *x: dot_product_attention(*x, is_causal=causal, backward=backward, implementation=implementation), q, k, v
        )
        return out, *pull(dout)

    check = jax.export.DisabledSafetyCheck.custom_call(HANDLER)
    with target("sm90"):
        jax.export.export(jax.jit(both), platforms=["cuda"], disabled_checks=[check])(*(array,) * 4)


def providers(head_dim: int, causal: bool) -> dict[str, Any]:
    """Functions of (q, k, v) by name."""
    import jax

    from flashtile.jax import dot_product_attention

    ours = {f"flashtile/{b}": b for b in ("auto", "split", "fused")}
    found: dict[str, Any] = {
        name: lambda q, k, v, b=b, i=None if b == "auto" else "triton": dot_product_attention(
            q, k, v, is_causal=causal, backward=b, implementation=i
        )
        for name, b in ours.items()
    }
    for name in ("cudnn", "xla"):
        found[f"jax.nn/{name}"] = lambda q, k, v, name=name: jax.nn.dot_product_attention(
            q, k, v, is_causal=causal, implementation=name
        )
    try:
        from jax.experimental.pallas.ops.gpu.attention import mha

        found["pallas/mha"] = lambda q, k, v: mha(q, k, v, None, sm_scale=head_dim**-0.5, causal=causal)
    except ImportError as error:
        print(f"pallas: {error}")
    try:
        import tokamax

        for name in ("mosaic", "triton", "cudnn"):
            found[f"tokamax/{name}"] = lambda q, k, v, name=name: tokamax.dot_product_attention(
                q, k, v, is_causal=causal, implementation=name
            )
    except ImportError as error:
        print(f"tokamax: {error}")
    return found


def measure(head_dim: int, causal: bool, rounds: int, until: float, record: Record) -> None:
    """The rows of a cell."""
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), 4)
    shape = (BATCH, SEQLEN, heads(head_dim), head_dim)
    q, k, v, dout = (jax.random.normal(key, shape).astype(jnp.bfloat16) for key in keys)
    part = tuple(x[:1, :, :1].astype(jnp.float32) for x in (q, k, v))

    def exact(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal)

    def both_of(function: Any) -> Any:
        def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
            out, pull = jax.vjp(function, q, k, v)
            return out, *pull(dout.astype(out.dtype))

        return both

    with jax.default_matmul_precision("highest"):
        truth = jax.jit(both_of(exact))(*part, dout[:1, :, :1].astype(jnp.float32))
    calls: dict[str, dict[str, Call]] = {which: {} for which in PASSES}
    for name, function in providers(head_dim, causal).items():
        if time.monotonic() > until:
            record.leave(f"{head_dim} {causal} {name}")
            continue
        try:
            forward, both = jax.jit(function), jax.jit(both_of(function))
            started = time.perf_counter()
            made = jax.block_until_ready(both(q, k, v, dout))
            jax.block_until_ready(forward(q, k, v))
            compiled = time.perf_counter() - started
            off = [
                float(jnp.linalg.norm(m[:1, :, :1].astype(jnp.float32) - t) / jnp.linalg.norm(t))
                for m, t in zip(made, truth, strict=True)
            ]
            if not max(off) <= TOLERANCE:
                raise ArithmeticError(f"off by {[f'{x:.1e}' for x in off]} of the norm")
            print(f"{head_dim} {causal} {name}: compiled in {compiled:.1f} s, off by {max(off):.1e}", flush=True)
        except Exception as error:
            if name.startswith("flashtile"):
                record.fail(error, head_dim=head_dim, causal=causal, provider=name)
            else:
                print(f"{head_dim} {causal} {name}: {type(error).__name__}: {error}"[:400], flush=True)
            continue
        calls["forward"][name] = lambda forward=forward: forward(q, k, v)
        calls["both"][name] = lambda both=both: both(q, k, v, dout)
    for which in PASSES:
        taken: dict[str, list[float]] = {name: [] for name in calls[which]}
        for turn in range(rounds):
            for name, call in calls[which].items():
                count = 3 if name == "jax.nn/xla" else 10
                jax.block_until_ready(call())
                started = time.perf_counter()
                for _ in range(count):
                    made = call()
                jax.block_until_ready(made)
                taken[name].append((time.perf_counter() - started) * 1000 / count)
            if turn and time.monotonic() > until:
                break
        for name, times in taken.items():
            add(record, head_dim, causal, which, name, times)


def add(record: Record, head_dim: int, causal: bool, which: str, name: str, times: list[float]) -> None:
    """The row of a provider's times in milliseconds."""
    ms = median(times)
    speed = flops(head_dim, causal, which) / ms * 1e-9
    cell = dict(head_dim=head_dim, causal=causal, which=which, provider=name)
    record.add(dict(**cell, ms=round(ms, 4), least_ms=round(min(times), 4), tflops=round(speed, 1)))
    print(f"{head_dim:>4} {causal!s:5} {which:8} {name:18} {ms:>9.4f} ms {speed:>7.1f} TFLOP/s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least_one, default=6)
    options(parser, "benchmarks/results/jax-attention.csv", 180)
    chosen = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other processes need memory too
    about = {name: importlib.metadata.version(name) for name in ("jax", "triton")}
    record = Record(chosen.output, chosen.budget, {**gpu(parser), **about, **provenance(chosen.commit)})
    compile_ahead(lower, [(*cell, backward) for cell in CELLS for backward in ("auto", "split", "fused")], record.left(), 0.5)
    for _, made in in_processes(time_torch, [()], time.monotonic() + 0.3 * record.left()):
        if isinstance(made, Failure):
            print(f"PyTorch: {made.text}", flush=True)
            continue
        for (head_dim, causal, which), times in made.items():
            add(record, head_dim, causal, which, "flashtile/torch", times)
    for (head_dim, causal), until in record.parts(CELLS):
        with record.attempt(head_dim=head_dim, causal=causal, provider="all"):
            measure(head_dim, causal, chosen.rounds, until, record)
    return record.end()


def gpu(parser: argparse.ArgumentParser) -> dict[str, str]:
    """JAX's GPU; ends with a usage error where there is none."""
    import jax

    try:
        return {"device": jax.devices("cuda")[0].device_kind}
    except RuntimeError as error:
        parser.error(f"JAX sees no GPU here: {error}")


if __name__ == "__main__":
    sys.exit(main())
