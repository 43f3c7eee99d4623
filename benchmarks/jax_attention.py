"""Times `flashtile.jax` beside JAX's own attentions on a GPU, in one rotation, after a check against float32.

    python benchmarks/jax_attention.py [--limit SECONDS] [--output FILE]

Cells: bf16, batch 4, 4096 tokens, head_dim 64 with 32 heads and 128 with 16, causal and full, forward and forward with
backward. Before them a child process times flashtile from PyTorch, where PyTorch is installed: device time is to be the same.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import json
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

CELLS = [(head_dim, causal) for head_dim in (64, 128) for causal in (True, False)]
BATCH, SEQLEN, TOLERANCE = 4, 4096, 1.5e-2  # of the norm, against float32 attention of a part
PASSES = ("forward", "both")
Call = Callable[[], Any]


def heads(head_dim: int) -> int:
    return 2048 // head_dim


def flops(head_dim: int, causal: bool, which: str) -> float:
    one = 2 * BATCH * heads(head_dim) * SEQLEN * SEQLEN * head_dim / (2 if causal else 1)
    return one * (2 if which == "forward" else 7)


def time_torch(limit: float) -> dict[str, float]:
    """Milliseconds of flashtile from PyTorch, by cell."""
    import torch

    import flashtile

    found: dict[str, float] = {}
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
            found[f"{head_dim} {causal} {which}"] = median(taken)
    return found


def lower(head_dim: int, causal: bool, backward: str) -> None:
    """Compile a cell's kernels for an H100, without a GPU: Triton keeps them on disk."""
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


def lower_all() -> None:
    """All cells at once, each in a process of its own."""
    import os

    jobs = [f"{d},{int(causal)},{backward}" for d, causal in CELLS for backward in ("auto", "split", "fused")]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    children = [subprocess.Popen([sys.executable, __file__, "--lower", job], env=environment) for job in jobs]
    print(f"{sum(child.wait() != 0 for child in children)} of {len(children)} compilations failed", flush=True)


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


def measure(head_dim: int, causal: bool, rounds: int, end: float) -> list[dict[str, Any]]:
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
            if max(off) > TOLERANCE:
                raise AssertionError(f"off by {[f'{x:.1e}' for x in off]} of the norm")
            print(f"{head_dim} {causal} {name}: compiled in {compiled:.1f} s, off by {max(off):.1e}", flush=True)
        except Exception as error:
            print(f"{head_dim} {causal} {name}: {type(error).__name__}: {error}"[:400], flush=True)
            continue
        calls["forward"][name] = lambda forward=forward: forward(q, k, v)
        calls["both"][name] = lambda both=both: both(q, k, v, dout)
    rows = []
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
            if turn and time.perf_counter() > end:
                break
        for name, times in taken.items():
            if times:
                ms = median(times)
                cell = dict(head_dim=head_dim, causal=causal, which=which, provider=name)
                speed = flops(head_dim, causal, which) / ms * 1e-9
                rows.append(dict(**cell, ms=round(ms, 4), least_ms=round(min(times), 4), tflops=round(speed, 1)))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of the timing")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/jax-attention.csv"))
    parser.add_argument("--torch", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--lower", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.lower:
        head_dim, causal, backward = chosen.lower.split(",")
        lower(int(head_dim), causal == "1", backward)
        return 0
    if chosen.torch:
        print(json.dumps(time_torch(60.0)))
        return 0
    started = time.perf_counter()
    lower_all()
    print(f"compiled in {time.perf_counter() - started:.0f} s", flush=True)
    child = subprocess.run([sys.executable, __file__, "--torch"], capture_output=True, text=True, check=False)
    theirs = json.loads(child.stdout.splitlines()[-1]) if child.returncode == 0 and child.stdout else {}
    if not theirs:
        print(f"PyTorch: {child.stderr[-300:]}")
    import jax

    rows: list[dict[str, Any]] = []
    for key, ms in theirs.items():
        head_dim, causal, which = key.split()
        speed = flops(int(head_dim), causal == "True", which) / ms * 1e-9
        rows.append(dict(head_dim=head_dim, causal=causal, which=which, provider="flashtile/torch", ms=round(ms, 4),
                         least_ms="", tflops=round(speed, 1)))  # fmt: skip
    start = time.perf_counter()
    for i, (head_dim, causal) in enumerate(CELLS):
        rows += measure(head_dim, causal, chosen.rounds, start + chosen.limit * (i + 1) / len(CELLS))
    facts = dict(device=jax.devices()[0].device_kind, date=datetime.now(timezone.utc).isoformat(timespec="seconds"))
    facts |= {name: importlib.metadata.version(name) for name in ("jax", "triton")}
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    with chosen.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *facts])
        writer.writeheader()
        writer.writerows({**row, **facts} for row in rows)
    for row in rows:
        cell = f"{row['head_dim']:>4} {row['causal']!s:5} {row['which']:8} {row['provider']:18}"
        print(f"{cell} {row['ms']:>9} ms {row['tflops']:>7} TFLOP/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
