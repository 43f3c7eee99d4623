"""Times fp32 forwards and backwards on a GPU by tile and kind of product, beside PyTorch's own fp32 kernel.

    python benchmarks/fp32.py [--forward 64x64/4/1/cut ...] [--fused 32x64/4/1/cut ...] [--split 32x64/4/1/cut,64x64/4/1/cut]
        [--shapes 8x1024x12x64 ...] [--seconds 60] [--output fp32.csv]

A tile is block_q x block_k / warps / stages / products; of the split backward keys, queries. Without tiles, those that are
chosen anyway. Every variant is compiled first, in parallel processes, then judged against float64 on its own heads (largest
and mean error beside plain PyTorch's), then timed: all of a shape in one rotation, medians of bursts.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flashtile.kernels.triton.backend import BACKEND
from flashtile.kernels.triton.tile import Launch, Pass
from flashtile.plan.backend import Gradients
from flashtile.reference.attention import attention_plain, attention_reference
from flashtile.spec.attention import AttentionProblem
from flashtile.torch.run import Bound, KernelLaunch, device_of

Tensors = dict[str, torch.Tensor]
SHAPES = ("8x1024x12x64", "6x4096x12x64", "1x8192x12x64")
PASSES: dict[str, tuple[Pass, ...]] = {"forward": ("forward",), "fused": ("fused",), "split": ("keys", "queries")}
BURST, ROUNDS = 3, 9


def problem_of(shape: str) -> AttentionProblem:
    batch, seqlen, heads, head_dim = shape.split("x")
    return AttentionProblem.parse(
        f"attention(q={batch}x{seqlen}x{heads}x{head_dim},kv={seqlen}x{heads}x{head_dim},fp32,band=:0,tf32x3)"
    )


def launches_of(kind: str, text: str) -> dict[Pass, Launch]:
    """The tiles of a variant by pass; none of an empty text."""
    made: dict[Pass, Launch] = {}
    for which, tile in zip(PASSES[kind], text.split(","), strict=False):
        if tile:
            size, warps, stages, products = tile.split("/")
            block_q, block_k = map(int, size.split("x"))
            made[which] = Launch(block_q, block_k, int(warps), int(stages), 8, products=products)  # pyright: ignore[reportArgumentType]
    return made


def bind(shape: str, kind: str, text: str, tensors: Tensors) -> Bound:
    problem, place = problem_of(shape), device_of(torch.device("cuda", 0))
    launches = launches_of(kind, text)
    if kind == "forward":
        plan = BACKEND.forward(problem, place, launches)
    else:
        plan = BACKEND.backward(problem, place, Gradients(), "fused" if kind == "fused" else "split", launches)
    return Bound(plan, {b.name: tensors[b.name] for b in plan.named("input")}, torch.device("cuda", 0))


def inputs_of(shape: str) -> Tensors:
    problem, generator = problem_of(shape), torch.Generator("cuda").manual_seed(0)
    size = (problem.batch, problem.seqlen_q, problem.heads_q, problem.head_dim)
    made = {name: torch.randn(size, generator=generator, device="cuda") for name in ("q", "k", "v", "dout")}
    rows = (problem.batch, problem.heads_q, problem.seqlen_q)
    made["out"], made["lse"] = torch.empty_like(made["q"]), torch.empty(rows, device="cuda")
    made["stats"] = torch.empty((problem.batch, problem.heads_q, 2, problem.seqlen_q), device="cuda")
    return made


def warm(job: tuple[str, str, str]) -> str:
    """Compile a variant's kernels into Triton's cache; what went wrong, or ''."""
    shape, kind, text = job
    try:
        tensors = inputs_of("1x128x1x" + shape.split("x")[-1])
        bound = bind("1x1024x1x" + shape.split("x")[-1], kind, text, {**tensors})
        tensors.update({name: torch.empty(1, dtype=dtype, device="cuda") for name, _, _, dtype, _ in bound.allocations})
        for launch in bound.launches:
            assert isinstance(launch, KernelLaunch)
            launch.warm(tensors)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def errors(shape: str, tensors: Tensors, made: Tensors) -> dict[str, float]:
    """Largest and mean error of the first item's first two heads against float64, beside plain PyTorch's."""
    alone = {n: tensors[n][:1, :, :2] for n in ("q", "k", "v", "dout")}
    found: dict[str, float] = {}
    answers = []
    for function, dtype in ((attention_reference, torch.float64), (attention_plain, torch.float32)):
        q, k, v = (alone[n].to(dtype).detach().requires_grad_() for n in "qkv")
        out, _ = function(q, k, v, causal=True)
        grads = torch.autograd.grad(out, (q, k, v), alone["dout"].to(dtype))
        answers.append(dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True)))
    for name in answers[0]:
        if name in made:
            mine, plain = ((x.double() - answers[0][name]).abs() for x in (made[name][:1, :, :2], answers[1][name]))
            found[f"{name}_largest"] = (mine.max() / plain.max()).item()
            found[f"{name}_mean"] = (mine.mean() / plain.mean()).item()
    return found


def peers(tensors: Tensors) -> dict[str, Callable[[], Any]]:
    q, k, v = (tensors[n].transpose(1, 2).detach().requires_grad_() for n in "qkv")
    dout, attend = tensors["dout"].transpose(1, 2), torch.nn.functional.scaled_dot_product_attention
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        out = attend(q, k, v, is_causal=True)

    def forward() -> None:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            attend(q.detach(), k.detach(), v.detach(), is_causal=True)

    return {
        "forward sdpa": forward,
        "backward sdpa": lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True),
    }


def clock(call: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(BURST):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / BURST


def measure(shape: str, jobs: list[tuple[str, str]], seconds: float) -> list[dict[str, Any]]:
    tensors = inputs_of(shape)
    bind(shape, "forward", "", tensors).run(tensors)
    calls: dict[str, Callable[[], Any]] = peers(tensors)
    rows: dict[str, dict[str, Any]] = {name: {"shape": shape, "variant": name} for name in calls}
    for kind, text in jobs:
        name = f"{'forward' if kind == 'forward' else 'backward'} {kind} {text or 'chosen'}"
        bound = bind(shape, kind, text, tensors)
        made = bound.run(dict(tensors))
        rows[name] = {"shape": shape, "variant": name, **errors(shape, tensors, made)}
        if not all(math.isfinite(v) and v < 3 for k, v in rows[name].items() if k.endswith(("_largest", "_mean"))):
            rows[name]["ms"] = math.nan
            continue
        calls[name] = lambda bound=bound: bound.run(dict(tensors))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        clock(call)
    end = time.perf_counter() + seconds
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(clock(call))
        if time.perf_counter() > end:
            break
    for name, found in times.items():
        rows[name]["ms"] = median(found)
        rows[name]["of_sdpa"] = median(times[f"{name.split()[0]} sdpa"]) / median(found)
    return list(rows.values())


def main() -> int:
    parser = argparse.ArgumentParser()
    for kind in PASSES:
        parser.add_argument(f"--{kind}", nargs="*", default=[""])
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--seconds", type=float, default=60.0, help="of timing, all shapes together")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/fp32.csv"))
    chosen = parser.parse_args()
    jobs = [(kind, text) for kind in PASSES for text in getattr(chosen, kind)]
    every = [(shape, *job) for shape in {s.split("x")[-1]: s for s in chosen.shapes}.values() for job in jobs]
    with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as pool:
        broken = {job: why for job, why in zip(every, pool.map(warm, every), strict=True) if why}
    for job, why in broken.items():
        print("BROKEN", job, why, flush=True)
    jobs = [job for job in jobs if not any(bad[1:] == job for bad in broken)]
    rows: list[dict[str, Any]] = []
    for shape in chosen.shapes:
        rows += measure(shape, jobs, chosen.seconds / len(chosen.shapes))
        for row in rows[-len(jobs) - 2 :]:
            print({n: round(v, 3) if isinstance(v, float) else v for n, v in row.items()}, flush=True)
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    with chosen.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(column for row in rows for column in row)))
        writer.writeheader()
        writer.writerows({n: f"{v:.4g}" if isinstance(v, float) else v for n, v in row.items()} for row in rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
