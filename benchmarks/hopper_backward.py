"""Checks and times tiles of the Hopper backward, beside the backward of SDPA's cuDNN backend.

    python benchmarks/hopper_backward.py [--head-dim 128 ...] [--variant 128-launched ...] [--budget SECONDS] [--output FILE]
        [--dry]

Every variant first answers small, odd problems against float64, in several processes and on poisoned memory: one that
is wrong, fails or hangs is named and left out. The others are timed in rotation. --dry compiles every variant without a
GPU and prints what the compiler says of it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.experiment import Experiment, main_of
from benchmarks.processes import Failure, in_processes
from benchmarks.record import Record, at_least_one
from flashtile.bench.rotation import rotate
from flashtile.bench.timing import burst_ms, calls_for
from flashtile.bench.yardstick import Yardstick, tolerance
from flashtile.kernels.sm90.backend import BACKEND
from flashtile.kernels.sm90.host.choose_backward import BACKWARD, ordered
from flashtile.kernels.sm90.host.tile_backward import BackwardLaunch
from flashtile.plan.backend import Gradients
from flashtile.plan.buffers import shapes
from flashtile.plan.call import KernelCall, Plan
from flashtile.plan.device import H100, Device
from flashtile.problem.attention import AttentionProblem
from flashtile.reference.attention import attention_reference
from flashtile.torch.execute.bound import TORCH_DTYPES, Bound, device_of

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """A tile for one head dim."""

    head_dim: int
    launch: BackwardLaunch
    deterministic: bool = False
    split: bool = False  # dq by a pass over queries

    def plan(self, problem: AttentionProblem, device: Device, dlse: bool = False) -> Plan:
        problem = replace(problem, deterministic=self.deterministic)
        launch = ordered(self.launch, problem, device) if self.deterministic and not self.split else self.launch
        return BACKEND.backward(problem, device, Gradients(dlse=dlse), "split" if self.split else "fused", launch)


D64, D128, D256 = (BACKWARD[columns].launch for columns in (64, 128, 256))
D192 = replace(D256, stages=2, stages_dout=2)  # as `choose_backward` has it where values are narrower
VARIANTS = {
    "64": Variant(64, D64),
    "64-launched": Variant(64, replace(D64, resident=False)),
    "64-swizzle8": Variant(64, replace(D64, swizzle=8)),
    "64-deterministic": Variant(64, D64, True),
    "64-apart": Variant(64, replace(D64, joined=False)),
    "64-split": Variant(64, D64, True, True),
    "128": Variant(128, D128),
    "128-launched": Variant(128, replace(D128, resident=False)),
    "128-deterministic": Variant(128, D128, True),
    "128-joined": Variant(128, replace(D128, joined=True, stages_dout=3)),
    "128-split": Variant(128, D128, True, True),
    "96": Variant(96, D128),
    "96-narrow": Variant(96, replace(D128, narrow=True)),
    "96-narrow-deterministic": Variant(96, replace(D128, narrow=True), True),
    "256": Variant(256, D256),
    "256-launched": Variant(256, replace(D256, resident=False)),
    "256-deterministic": Variant(256, D256, True),
    "256-split": Variant(256, D256, True, True),
    "192": Variant(192, D192),
}

# batch x seqlen_q x heads_q, seqlen_k x heads_kv, dtype and mask, and whether lse has a gradient
CHECKS = (
    ("1x1x1", "1x1", "bf16", False), ("1x5x2", "7x2", "bf16,band=:0", False), ("2x333x2", "333x2", "bf16", False),
    ("2x333x2", "333x2", "bf16,band=:0", False), ("1x200x4", "500x2", "fp16,band=:0", False),
    ("2x257x4", "1000x1", "bf16", True), ("1x1500x2", "700x2", "bf16,band=:0", False),
    ("1x600x2", "640x2", "bf16,band=100:30", False), ("1x512x2", "512x1", "bf16,band=64:", False),
    ("1x1024x2", "1024x2", "bf16,band=:0", False), ("1x1024x2", "1024x2", "bf16", False),
)  # fmt: skip
LIMITS = {"bf16": 1.2e-2, "fp16": 2e-3}  # of a gradient's norm: twice what rounding alone costs

# batch x seqlen x heads, by head dim; each with and without a causal mask
TIMED = {
    64: ("4x4096x32", "16x1024x32"), 96: ("4x4096x16", "16x1024x16"), 128: ("4x4096x16", "16x1024x16"),
    192: ("4x4096x16", "16x1024x16"), 256: ("4x4096x8", "16x1024x8"),
}  # fmt: skip
VALUES = {192: 128}  # head dims of values that are not those of keys
PARTS = ("rows", "keys", "dq")  # the calls of a plan
CUDNN = "sdpa/cudnn"


def checked(head_dim: int) -> Iterator[tuple[AttentionProblem, bool]]:
    """Small problems, and whether lse has a gradient."""
    for queries, keys, rest, dlse in CHECKS:
        yield spelled(queries, keys, head_dim, rest), dlse


def timed(head_dim: int) -> Iterator[AttentionProblem]:
    """Problems that are timed."""
    for sizes in TIMED[head_dim]:
        keys = sizes.partition("x")[2]
        for band in ("", ",band=:0"):
            yield spelled(sizes, keys, head_dim, f"bf16{band}")


def spelled(queries: str, keys: str, head_dim: int, rest: str) -> AttentionProblem:
    """The problem of these sizes, with values of the head dim that goes with that of keys."""
    return AttentionProblem.parse(f"attention(q={queries}x{head_dim},kv={keys}x{VALUES.get(head_dim, head_dim)},{rest})")


def draw(problem: AttentionProblem, device: torch.device) -> Tensors:
    """q, k, v, dout and dlse."""
    torch.manual_seed(0)
    size, dtype = shapes(problem), TORCH_DTYPES[problem.dtype.value]
    made = {
        name: torch.randn(size["out" if name == "dout" else name], device=device).to(dtype) for name in ("q", "k", "v", "dout")
    }
    return {**made, "dlse": torch.randn(size["lse"], device=device)}


def bind(plan: Plan, tensors: Tensors, device: torch.device) -> tuple[Bound, Tensors]:
    """The bound plan and its inputs."""
    inputs = {buffer.name: tensors[buffer.name] for buffer in plan.named("input")}
    return Bound(plan, inputs, device), inputs


# -- correctness ----------------------------------------------------------------------------------------------------


def check(name: str) -> list[str]:
    """What is wrong with a variant, on this GPU."""
    variant, device, wrong = VARIANTS[name], torch.device("cuda", 0), []
    for problem, dlse in checked(variant.head_dim):
        tensors = draw(problem, device)
        exact = expect(problem, tensors, dlse)
        bound, inputs = bind(variant.plan(problem, device_of(device), dlse), tensors, device)
        with patch.object(torch, "empty_strided", poisoned):
            first, second = (bound.run(dict(inputs)) for _ in range(2))
        torch.cuda.synchronize()
        errors = {name: distance(first[name], exact[name]) for name in exact}
        if not max(errors.values()) < LIMITS[problem.dtype.value]:
            wrong.append(f"{problem.spell()} is off by {', '.join(f'{n} {e:.1e}' for n, e in errors.items())}")
        if variant.deterministic and not all(torch.equal(first[name], second[name]) for name in exact):
            wrong.append(f"{problem.spell()} differs from run to run")
    return wrong


def expect(problem: AttentionProblem, tensors: Tensors, dlse: bool) -> Tensors:
    """The gradients in float64; out and lse, from which the backward starts, join the tensors."""
    leaves = [tensors[name].double().requires_grad_() for name in "qkv"]
    out, lse = attention_reference(*leaves, mask=problem.mask, scale=problem.scale)
    arriving = [tensors["dout"].double(), tensors["dlse"].double()]
    outputs = [out, lse] if dlse else [out]
    gradients = torch.autograd.grad(outputs, leaves, arriving[: len(outputs)])
    tensors["out"] = out.detach().to(tensors["q"].dtype).contiguous()
    tensors["lse"] = lse.detach().float().contiguous()
    return dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def distance(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative error norm, absolute below 1 (one key: dq and dk are zero); infinite for NaN."""
    off = ((result.double() - exact).norm() / exact.norm().clamp(min=1.0)).item()
    return off if off == off else float("inf")


def poisoned(shape: Any, strides: Any, **options: Any) -> torch.Tensor:
    """Uninitialised memory that shows in every result."""
    made = EMPTY_STRIDED(shape, strides, **options)
    return made.fill_(float("nan") if made.is_floating_point() else -9)


EMPTY_STRIDED = torch.empty_strided


def check_all(check: Callable[[str], list[str]], names: list[str], record: Record, share: float = 0.6) -> list[str]:
    """The names of those that `check` finds nothing wrong with, in several processes; the others are failed rows.

    What is not done within that share of the seconds left hangs, or is missing: it is not timed.
    """
    begun, right = time.monotonic(), list[str]()
    left = dict.fromkeys(names)
    for (name,), made in in_processes(check, [(name,) for name in names], begun + share * record.left()):
        del left[name]
        wrong = [made.text] if isinstance(made, Failure) else made
        if wrong:
            record.fail("; ".join(wrong), provider=name)
        else:
            right.append(name)
    for name in left:
        record.fail(f"hangs, or its check did not come to an end within {share * record.budget_s:.0f} s", provider=name)
    print(f"compiled and checked in {time.monotonic() - begun:.0f} s; right: {' '.join(right)}", flush=True)
    return [name for name in names if name in right]


# -- time -----------------------------------------------------------------------------------------------------------


def cudnn_backward(problem: AttentionProblem, tensors: Tensors) -> Callable[[], Any]:
    """cuDNN's backward of the same problem; its forward is run here."""
    leaves = q, k, v = tuple(tensors[name].transpose(1, 2).detach().requires_grad_() for name in "qkv")
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=problem.mask.right == 0, scale=problem.scale)
    dout = tensors["dout"].transpose(1, 2)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def measure(problem: AttentionProblem, names: list[str], rounds: int, until: float, record: Record) -> None:
    """A row for cuDNN and for each variant that is right at this size too."""
    device = torch.device("cuda", 0)
    tensors = draw(problem, device)
    forward, inputs = bind(BACKEND.forward(problem, device_of(device)), tensors, device)
    tensors.update({name: tensor for name, tensor in forward.run(dict(inputs)).items() if name in ("out", "lse")})
    yardstick = Yardstick(problem, {name: tensors[name] for name in ("q", "k", "v", "dout")})
    calls: dict[str, Callable[[], Any]] = {CUDNN: cudnn_backward(problem, tensors)}
    bounds: dict[str, tuple[Bound, Tensors]] = {}
    for name in names:
        with record.attempt(problem=problem.spell(), provider=name):
            bound, given = bind(VARIANTS[name].plan(problem, device_of(device)), tensors, device)
            made = bound.run(dict(given))
            errors = {grad: yardstick.error(grad, made[grad]) for grad in ("dq", "dk", "dv")}
            if not all(error < tolerance(problem)[1] for error in errors.values()):
                raise ArithmeticError(f"WRONG {errors}")
            bounds[name] = bound, made
            calls[name] = lambda bound=bound, given=given: bound.run(dict(given))
    counts = {name: calls_for(burst_ms(call, 3, device), device) for name, call in calls.items()}
    times = rotate(
        list(calls), rounds, lambda name: burst_ms(calls[name], counts[name], device), lambda: time.monotonic() < until
    )  # fmt: skip
    flops, base = problem.flops("backward"), median(times[CUDNN])
    for name, taken in times.items():
        ms = median(taken)
        row: dict[str, Any] = dict(
            problem=problem.spell(), provider=name, tile=VARIANTS[name].launch.spell() if name in VARIANTS else "",
            ms=round(ms, 4), least_ms=round(min(taken), 4), most_ms=round(max(taken), 4),
            tflops=round(flops / ms * 1e-9, 1), ratio=round(base / ms, 3),
        )  # fmt: skip
        parts = {} if name == CUDNN else parts_ms(*bounds[name], ms, device)
        record.add({**row, **{f"{part}_ms": parts.get(f"{part}_ms", "") for part in PARTS}})
        print(
            f"{row['problem']:58s} {name:26s} {ms:8.3f} ms {row['tflops']:6.1f} TFLOP/s x {row['ratio']:.3f}"
            f"  {' '.join(f'{part} {part_ms}' for part, part_ms in parts.items())}",
            flush=True,
        )


def parts_ms(bound: Bound, tensors: Tensors, ms: float, device: torch.device) -> dict[str, float]:
    """Milliseconds of each call of a plan that takes `ms`.

    The pass over keys is what the others leave: by itself it would add to a sum that nobody cleared and, where it is
    deterministic, wait for ever for a turn that has passed.
    """
    rows, dq = (
        burst_ms(lambda launch=launch: launch(tensors), 5, device) for launch in (bound.launches[0], bound.launches[-1])
    )
    return {"rows_ms": round(rows, 4), "keys_ms": round(ms - rows - dq, 4), "dq_ms": round(dq, 4)}


# -- without a GPU --------------------------------------------------------------------------------------------------


def compile_all(names: list[str]) -> int:
    """Compile every variant, full and causal; the number of kernels that failed."""
    from flashtile.triton_glue.compile import compile_and_read

    failures = 0
    for name in names:
        for problem in list(timed(VARIANTS[name].head_dim))[:2]:
            plan = VARIANTS[name].plan(problem, H100)
            rows, *keys, dq = plan.calls
            for part, call in (("rows", rows), *(("keys", call) for call in keys), ("dq", dq)):
                assert isinstance(call, KernelCall)
                try:
                    _, used = compile_and_read(call, plan, H100)
                    fits = used.shared_bytes <= H100.smem_bytes
                    said = f"{used.registers} registers, spills {used.spill_bytes} B, {used.shared_bytes} B shared"
                    said += "" if fits else f"; the device has {H100.smem_bytes}"
                except Exception as error:  # the others are to be compiled all the same
                    fits, said = False, f"{type(error).__name__}: {error}"[:300]
                failures += not fits
                print(f"{'ok  ' if fits else 'FAIL'} {name} {problem.spell()} {part}: {said}", flush=True)
    return failures


class Backward(Experiment[AttentionProblem]):
    """A cell is a problem, of variants that are right (`right`, once they were checked)."""

    output, budget_s = "benchmarks/results/hopper-backward.csv", 150
    right: Sequence[str] = ()

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--head-dim", type=int, nargs="+", choices=list(TIMED), default=list(TIMED))
        parser.add_argument("--variant", nargs="+", choices=list(VARIANTS))
        parser.add_argument("--rounds", type=at_least_one, default=4)
        parser.add_argument("--dry", action="store_true", help="compile every variant, without a GPU")

    @classmethod
    def check(cls, chosen: argparse.Namespace, parser: argparse.ArgumentParser) -> int | None:
        chosen.names = [n for n in chosen.variant or VARIANTS if VARIANTS[n].head_dim in chosen.head_dim]
        if not chosen.names:
            parser.error("no variant that is named has a head dim that is")
        return int(bool(compile_all(chosen.names))) if chosen.dry else None

    def begin(self, record: Record) -> AbstractContextManager[Any]:
        self.right = check_all(check, self.chosen.names, record)
        return nullcontext()

    def cells(self) -> list[AttentionProblem]:
        dims = dict.fromkeys(VARIANTS[name].head_dim for name in self.right)
        return [problem for head_dim in dims for problem in timed(head_dim)]

    def name(self, cell: AttentionProblem) -> str:
        return cell.spell()

    def place(self, cell: AttentionProblem) -> dict[str, str]:
        return dict(problem=cell.spell(), provider="all")

    def measure(self, cell: AttentionProblem, record: Record, until: float) -> None:
        mine = [name for name in self.right if VARIANTS[name].head_dim == cell.head_dim]
        measure(cell, mine, self.chosen.rounds, until, record)


def main() -> int:
    return main_of(Backward)


if __name__ == "__main__":
    sys.exit(main())
