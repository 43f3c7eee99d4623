"""Checks and times tiles of the Hopper backward, beside the backward of SDPA's cuDNN backend.

    python benchmarks/hopper_backward.py [--head-dim 128 ...] [--variant 128-stages3 ...] [--output FILE] [--dry]

Every variant first answers small, odd problems against float64, in a process of its own and on poisoned memory: one that
is wrong, fails or hangs is named and left out. The others are timed in rotation. --dry compiles every variant without a
GPU and prints what the compiler says of it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.record import record
from flashtile.bench.rotation import rotate
from flashtile.bench.timing import burst_ms, calls_for
from flashtile.bench.yardstick import Yardstick, tolerance
from flashtile.kernels.hopper.backend import BACKEND
from flashtile.kernels.hopper.tile_backward import BACKWARD, BackwardLaunch, ordered
from flashtile.plan.backend import Gradients
from flashtile.plan.buffers import shapes
from flashtile.plan.call import KernelCall, Plan
from flashtile.plan.device import H100, Device
from flashtile.reference.attention import attention_reference
from flashtile.spec.attention import AttentionProblem
from flashtile.torch.run import TORCH_DTYPES, Bound, device_of

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """A tile for one head dim."""

    head_dim: int
    launch: BackwardLaunch
    deterministic: bool = False

    def plan(self, problem: AttentionProblem, device: Device, dlse: bool = False) -> Plan:
        problem = replace(problem, deterministic=self.deterministic)
        launch = ordered(self.launch, problem, device) if self.deterministic else self.launch
        return BACKEND.backward(problem, device, Gradients(dlse=dlse), "fused", launch)


D64, D128, D256 = BACKWARD[64], BACKWARD[128], BACKWARD[256]
VARIANTS = {
    "64": Variant(64, D64),
    "64-launched": Variant(64, replace(D64, resident=False)),
    "64-lag0": Variant(64, replace(D64, lag=0)),
    "64-lag0-launched": Variant(64, replace(D64, lag=0, resident=False)),
    "64-clears": Variant(64, replace(D64, clears=True)),
    "64-swizzle8": Variant(64, replace(D64, swizzle=8)),
    "64-deterministic": Variant(64, D64, True),
    "64-lag0-deterministic": Variant(64, replace(D64, lag=0), True),
    "128": Variant(128, D128),
    "128-launched": Variant(128, replace(D128, resident=False)),
    "128-lag0": Variant(128, replace(D128, lag=0)),
    "128-lag0-launched": Variant(128, replace(D128, lag=0, resident=False)),
    "128-clears": Variant(128, replace(D128, clears=True)),
    "128-deterministic": Variant(128, D128, True),
    "128-lag0-deterministic": Variant(128, replace(D128, lag=0), True),
    "256": Variant(256, D256),
    "256-launched": Variant(256, replace(D256, resident=False)),
    "256-deterministic": Variant(256, D256, True),
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
TIMED = {64: ("4x4096x32", "16x1024x32"), 128: ("4x4096x16", "16x1024x16"), 256: ("4x4096x8", "16x1024x8")}
PARTS = ("rows", "keys", "dq")  # the calls of a plan
CUDNN = "sdpa/cudnn"


def checked(head_dim: int) -> Iterator[tuple[AttentionProblem, bool]]:
    """Small problems, and whether lse has a gradient."""
    for queries, keys, rest, dlse in CHECKS:
        yield AttentionProblem.parse(f"attention(q={queries}x{head_dim},kv={keys}x{head_dim},{rest})"), dlse


def timed(head_dim: int) -> Iterator[AttentionProblem]:
    """Problems that are timed."""
    for sizes in TIMED[head_dim]:
        keys = sizes.partition("x")[2]
        for band in ("", ",band=:0"):
            yield AttentionProblem.parse(f"attention(q={sizes}x{head_dim},kv={keys}x{head_dim},bf16{band})")


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


def check(variant: Variant) -> list[str]:
    """What is wrong with a variant, on this GPU."""
    device, wrong = torch.device("cuda", 0), []
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


def check_all(names: list[str], limit_s: float, script: str = __file__) -> list[str]:
    """The names of those that `script --check` finds right; the others are printed. All run at the same time."""
    command = [sys.executable, "-u", str(Path(script).resolve()), "--check"]
    children = {
        name: subprocess.Popen([*command, name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for name in names
    }
    end, right = time.perf_counter() + limit_s, []
    for name, child in children.items():
        try:
            said = child.communicate(timeout=max(5.0, end - time.perf_counter()))[0]
        except subprocess.TimeoutExpired:
            child.kill()
            said = f"HANGS, or is not done after {limit_s:.0f} s\n"
            with suppress(subprocess.TimeoutExpired):  # a process may not die while its kernel does not
                said += child.communicate(timeout=10.0)[0]
        print(f"check {name}: {'right' if child.returncode == 0 else said.strip()[-1500:]}", flush=True)
        if child.returncode == 0:
            right.append(name)
    return right


def answer_check(name: str, check: Callable[[Any], list[str]], table: Mapping[str, Any]) -> int:
    """The child of `check_all`: says what is wrong with an entry of a script's table, and exits with 1 if anything is."""
    try:
        wrong = check(table[name])
    except Exception as error:  # a kernel that does not compile or run is as wrong as another
        wrong = [f"{type(error).__name__}: {error}"[:600]]
    print("\n".join(wrong))
    return 1 if wrong else 0


# -- time -----------------------------------------------------------------------------------------------------------


def cudnn_backward(problem: AttentionProblem, tensors: Tensors) -> Callable[[], Any]:
    """cuDNN's backward of the same problem; its forward is run here."""
    leaves = q, k, v = tuple(tensors[name].transpose(1, 2).detach().requires_grad_() for name in "qkv")
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=problem.mask.right == 0, scale=problem.scale)
    dout = tensors["dout"].transpose(1, 2)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def measure(problem: AttentionProblem, names: list[str], rounds: int) -> list[dict[str, Any]]:
    """A row for cuDNN and for each variant that is right at this size too."""
    device = torch.device("cuda", 0)
    tensors = draw(problem, device)
    forward, inputs = bind(BACKEND.forward(problem, device_of(device)), tensors, device)
    tensors.update({name: tensor for name, tensor in forward.run(dict(inputs)).items() if name in ("out", "lse")})
    yardstick = Yardstick(problem, {name: tensors[name] for name in ("q", "k", "v", "dout")})
    calls: dict[str, Callable[[], Any]] = {CUDNN: cudnn_backward(problem, tensors)}
    bounds: dict[str, tuple[Bound, Tensors]] = {}
    for name in names:
        bound, given = bind(VARIANTS[name].plan(problem, device_of(device)), tensors, device)
        made = bound.run(dict(given))
        errors = {grad: yardstick.error(grad, made[grad]) for grad in ("dq", "dk", "dv")}
        if not all(error < tolerance(problem)[1] for error in errors.values()):
            print(f"WRONG {name} {problem.spell()} {errors}", flush=True)
            continue
        bounds[name] = bound, made
        calls[name] = lambda bound=bound, given=given: bound.run(dict(given))
    counts = {name: calls_for(burst_ms(call, 3, device), device) for name, call in calls.items()}
    times = rotate(list(calls), rounds, lambda name: burst_ms(calls[name], counts[name], device))
    flops, base = problem.flops("backward"), median(times[CUDNN])
    rows = []
    for name, taken in times.items():
        ms = median(taken)
        row = dict(
            problem=problem.spell(), provider=name, tile=VARIANTS[name].launch.spell() if name in VARIANTS else "",
            ms=round(ms, 4), least_ms=round(min(taken), 4), most_ms=round(max(taken), 4),
            tflops=round(flops / ms * 1e-9, 1), ratio=round(base / ms, 3),
        )  # fmt: skip
        parts = {} if name == CUDNN else parts_ms(*bounds[name], ms, device)
        rows.append({**row, **{f"{part}_ms": parts.get(f"{part}_ms", "") for part in PARTS}})
        print(
            f"{row['problem']:58s} {name:26s} {ms:8.3f} ms {row['tflops']:6.1f} TFLOP/s x {row['ratio']:.3f}"
            f"  {' '.join(f'{part} {part_ms}' for part, part_ms in parts.items())}",
            flush=True,
        )
    return rows


def parts_ms(bound: Bound, tensors: Tensors, ms: float, device: torch.device) -> dict[str, float]:
    """Milliseconds of each call of a plan that takes `ms`.

    The pass over keys is what the others leave: by itself it would add to a sum that nobody cleared and, where it is
    deterministic, wait for ever for a turn that has passed.
    """
    rows, dq = (burst_ms(lambda launch=launch: launch(tensors), 5, device) for launch in (bound.launches[0], bound.launches[2]))
    return {"rows_ms": round(rows, 4), "keys_ms": round(ms - rows - dq, 4), "dq_ms": round(dq, 4)}


# -- without a GPU --------------------------------------------------------------------------------------------------


def compile_all(names: list[str]) -> int:
    """Compile every variant, full and causal; the number of kernels that failed."""
    from flashtile.export.compile import compile_call, resources

    failures = 0
    for name in names:
        for problem in list(timed(VARIANTS[name].head_dim))[:2]:
            plan = VARIANTS[name].plan(problem, H100)
            assert len(plan.calls) == len(PARTS)
            for part, call in zip(PARTS, plan.calls, strict=True):
                assert isinstance(call, KernelCall)
                try:
                    used = resources(compile_call(call, plan, H100), H100)
                    fits = used.shared_bytes <= H100.smem_bytes
                    said = f"{used.registers} registers, spills {used.spill_bytes} B, {used.shared_bytes} B shared"
                    said += "" if fits else f"; the device has {H100.smem_bytes}"
                except Exception as error:  # the others are to be compiled all the same
                    fits, said = False, f"{type(error).__name__}: {error}"[:300]
                failures += not fits
                print(f"{'ok  ' if fits else 'FAIL'} {name} {problem.spell()} {part}: {said}", flush=True)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, nargs="+", choices=list(TIMED), default=list(TIMED))
    parser.add_argument("--variant", nargs="+", choices=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--limit", type=float, default=150.0, help="seconds that the checks may take, all together")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/hopper-backward.csv"))
    parser.add_argument("--commit", default="")
    parser.add_argument("--dry", action="store_true", help="compile every variant, without a GPU")
    parser.add_argument("--check", choices=list(VARIANTS), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.check:
        return answer_check(chosen.check, check, VARIANTS)
    names = [n for n in chosen.variant or VARIANTS if VARIANTS[n].head_dim in chosen.head_dim]
    if chosen.dry:
        return 1 if compile_all(names) else 0
    right = check_all(names, chosen.limit)
    rows: list[dict[str, Any]] = []
    for head_dim in chosen.head_dim:
        mine = [name for name in right if VARIANTS[name].head_dim == head_dim]
        for problem in timed(head_dim) if mine else ():
            rows += measure(problem, mine, chosen.rounds)
            torch.cuda.empty_cache()
    if rows:
        record(chosen.output, rows, torch.device("cuda", 0), chosen.commit)
    return 0 if len(right) == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
