"""Times fp32 forwards and backwards on a GPU by tile and kind of product, beside PyTorch's own fp32 kernel.

    python benchmarks/fp32.py [--forward 64x64/4/1/cut ...] [--fused 32x64/4/1/cut ...] [--split 32x64/4/1/cut,64x64/4/1/cut]
        [--shapes 8x1024x12x64 ...] [--precision tf32] [--budget 150] [--output fp32.csv]

A tile is block_q x block_k / warps / stages / products; of the split backward keys, queries. Without tiles, those that are
chosen anyway. Every variant is compiled first, in parallel processes, then judged against float64 on its own heads (largest
and mean error beside plain PyTorch's, in TF32 where that is asked for), then timed: all of a shape in one rotation, medians
of bursts.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.experiment import Ahead, Experiment, main_of
from benchmarks.record import Record, sized
from flashtile.kernels.portable.backend import BACKEND
from flashtile.kernels.portable.tile import Launch, Pass, Products
from flashtile.plan.backend import Gradients
from flashtile.problem.attention import PRECISIONS, AttentionProblem
from flashtile.reference.attention import attention_plain, attention_reference
from flashtile.torch.execute.bound import Bound, KernelLaunch, device_of

Tensors = dict[str, torch.Tensor]
Kind = Literal["forward", "fused", "split"]
SHAPES = ("8x1024x12x64", "6x4096x12x64", "1x8192x12x64")
PASSES: dict[Kind, tuple[Pass, ...]] = {"forward": ("forward",), "fused": ("fused",), "split": ("keys", "queries")}
BURST, ROUNDS = 3, 9


def problem_of(shape: str) -> AttentionProblem:
    """Of "8x1024x12x64/tf32": sizes and precision."""
    sizes, precision = shape.split("/")
    batch, seqlen, heads, head_dim = sizes.split("x")
    return AttentionProblem.parse(
        f"attention(q={batch}x{seqlen}x{heads}x{head_dim},kv={seqlen}x{heads}x{head_dim},fp32,band=:0,{precision})"
    )


def launches_of(kind: Kind, text: str) -> dict[Pass, Launch]:
    """The tiles of a variant by pass; none of an empty text."""
    made: dict[Pass, Launch] = {}
    for which, tile in zip(PASSES[kind], text.split(","), strict=False):
        if tile:
            size, warps, stages, products = tile.split("/")
            block_q, block_k = map(int, size.split("x"))
            made[which] = Launch(block_q, block_k, int(warps), int(stages), 8, products=products)  # pyright: ignore[reportArgumentType]
    return made


def bind(shape: str, kind: Kind, text: str, tensors: Tensors) -> Bound:
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


def variant(kind: Kind) -> Callable[[str], str]:
    """An argument that spells the tiles of a kind of pass."""

    def checked(text: str) -> str:
        try:
            made = launches_of(kind, text)
        except (ValueError, TypeError) as error:
            raise argparse.ArgumentTypeError(f"{text} is no tile: {error}") from error
        if (text and not made) or any(m.products not in get_args(Products) for m in made.values()):
            raise argparse.ArgumentTypeError(f"{text} is not tiles of {', '.join(PASSES[kind])}")
        return text

    return checked


def warm(shape: str, kind: Kind, text: str) -> None:
    """Compile a variant's kernels into Triton's cache."""
    tensors = inputs_of(shape)
    bound = bind(shape, kind, text, tensors)
    tensors.update({name: torch.empty(1, dtype=dtype, device="cuda") for name, _, _, dtype, _ in bound.allocations})
    for launch in bound.launches:
        assert isinstance(launch, KernelLaunch)
        launch.warm(tensors)


def errors(shape: str, tensors: Tensors, made: Tensors) -> dict[str, float]:
    """Largest and mean error of the first item's first two heads against float64, beside plain PyTorch's."""
    alone = {n: tensors[n][:1, :, :2] for n in ("q", "k", "v", "dout")}
    found: dict[str, float] = {}
    answers = []
    torch.backends.cuda.matmul.allow_tf32 = problem_of(shape).precision == "tf32"
    for function, dtype in ((attention_reference, torch.float64), (attention_plain, torch.float32)):
        q, k, v = (alone[n].to(dtype).detach().requires_grad_() for n in "qkv")
        out, _ = function(q, k, v, causal=True)
        grads = torch.autograd.grad(out, (q, k, v), alone["dout"].to(dtype))
        answers.append(dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True)))
    torch.backends.cuda.matmul.allow_tf32 = False
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


def measure(shape: str, jobs: list[tuple[Kind, str]], until: float, record: Record) -> None:
    """The rows of a shape: the peer's, and each variant's that is right."""
    tensors = inputs_of(shape)
    bind(shape, "forward", "", tensors).run(tensors)
    calls: dict[str, Callable[[], Any]] = peers(tensors)
    found: dict[str, dict[str, float]] = {name: {} for name in calls}
    for kind, text in jobs:
        name = f"{'forward' if kind == 'forward' else 'backward'} {kind} {text or 'chosen'}"
        with record.attempt(shape=shape, variant=name):
            bound = bind(shape, kind, text, tensors)
            found[name] = errors(shape, tensors, bound.run(dict(tensors)))
            if not all(math.isfinite(v) and v < 3 for v in found[name].values()):
                raise ArithmeticError(f"wrong: {found[name]}")
            calls[name] = lambda bound=bound: bound.run(dict(tensors))
            clock(calls[name])
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS):
        if turn and time.monotonic() > until:
            break
        for name, call in calls.items():
            times[name].append(clock(call))
    for name, taken in times.items():
        row = {"ms": median(taken), "of_sdpa": median(times[f"{name.split()[0]} sdpa"]) / median(taken), **found[name]}
        print(shape, name, {n: round(v, 3) for n, v in row.items()}, flush=True)
        record.add({"shape": shape, "variant": name, **{n: f"{v:.4g}" for n, v in row.items()}})


class Fp32(Experiment[str]):
    """A cell is a shape with its precision, "8x1024x12x64/tf32"."""

    output, budget_s = "benchmarks/results/fp32.csv", 150

    def __init__(self, chosen: argparse.Namespace):
        super().__init__(chosen)
        self.jobs: list[tuple[Kind, str]] = [(kind, text) for kind in PASSES for text in getattr(chosen, kind)]

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        for kind in PASSES:
            parser.add_argument(f"--{kind}", nargs="*", type=variant(kind), default=[""])
        parser.add_argument("--shapes", nargs="+", type=sized(4), default=SHAPES, help="batch x seqlen x heads x head_dim")
        parser.add_argument("--precision", choices=PRECISIONS, default="tf32x3")

    def cells(self) -> list[str]:
        return [f"{shape}/{self.chosen.precision}" for shape in self.chosen.shapes]

    def ahead(self) -> Ahead:
        firsts = {shape.split("x")[-1]: shape for shape in reversed(self.cells())}.values()
        return warm, [(shape, kind, text) for shape in firsts for kind, text in dict.fromkeys([("forward", ""), *self.jobs])]

    def place(self, cell: str) -> dict[str, str]:
        return dict(shape=cell, variant="all")

    def measure(self, cell: str, record: Record, until: float) -> None:
        measure(cell, self.jobs, until, record)


def main() -> int:
    return main_of(Fp32)


if __name__ == "__main__":
    sys.exit(main())
