"""Checks and times Hopper forwards that do more than plain attention, against the plain one and SDPA's cuDNN backend.

    python benchmarks/hopper_forward.py [--row softcap-128-full ...] [--budget SECONDS] [--output FILE] [--dry]

Every row first answers small, odd problems and the end of its own against float64, in several processes and on poisoned
memory: one that is wrong, fails or hangs is named and left out. The others are timed in rotation with the plain problem
that they are compared with. --dry compiles every row without a GPU and prints what the compiler says of it.
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
from benchmarks.hopper_backward import Tensors, bind, check_all, distance, poisoned
from benchmarks.record import Record, at_least_one
from flashtile.bench.rotation import rotate
from flashtile.bench.timing import burst_ms, calls_for
from flashtile.kernels.sm90.backend import BACKEND
from flashtile.plan.buffers import shapes
from flashtile.plan.call import KernelCall, Plan
from flashtile.plan.device import H100, Device
from flashtile.problem.attention import AttentionProblem
from flashtile.reference.attention import attention_plain, attention_reference
from flashtile.torch.execute.bound import TORCH_DTYPES, device_of


@dataclass(frozen=True)
class Row:
    """A problem: batch x seqlen x heads, heads of keys, head dims, the rest of its spelling."""

    sizes: str
    head_dim: int
    rest: str = "bf16"
    base: str = ""  # the plain row with which it is timed and compared
    heads_kv: int | None = None
    head_dim_v: int | None = None
    returns_lse: bool = False

    def problem(self, queries: str = "", keys: str = "", rest: str = "") -> AttentionProblem:
        """The row's problem, or a small one of its kind: batch x seqlen x heads and seqlen x heads."""
        if not queries:
            _, length, heads = self.sizes.split("x")
            queries, keys, rest = self.sizes, f"{length}x{self.heads_kv or heads}", self.rest
        text = f"attention(q={queries}x{self.head_dim},kv={keys}x{self.head_dim_v or self.head_dim},{rest})"
        return replace(AttentionProblem.parse(text), returns_lse=self.returns_lse)

    def plan(self, problem: AttentionProblem, device: Device) -> Plan:
        return BACKEND.forward(problem, device)


CAUSAL, SOFTCAP, ALIBI = ",band=:0", ",score=softcap(30.0)", ",score=alibi({heads}:fp32)"


def _rows() -> Iterator[tuple[str, Row]]:
    for head_dim, sizes in ((64, "4x4096x32"), (128, "4x4096x16"), (256, "4x4096x8")):
        alibi = ALIBI.format(heads="4x" + sizes.rpartition("x")[2])
        for mask, tail in (("full", ""), ("causal", CAUSAL)):
            base = f"plain-{head_dim}-{mask}"
            yield base, Row(sizes, head_dim, f"bf16{tail}", base)
            yield f"softcap-{head_dim}-{mask}", Row(sizes, head_dim, f"bf16{tail}{SOFTCAP}", base)
            if head_dim < 256:
                yield f"alibi-{head_dim}-{mask}", Row(sizes, head_dim, f"bf16{tail}{alibi}", base)
    sizes = "4x4096x16"
    for mask, tail in (("full", ""), ("causal", CAUSAL)):
        base = f"plain-128-{mask}"
        yield f"gqa-8-{mask}", Row(sizes, 128, f"bf16{tail}", base, heads_kv=2)
        yield f"head_dim-96-{mask}", Row(sizes, 96, f"bf16{tail}", base)
        yield f"head_dim-192-128-{mask}", Row(sizes, 192, f"bf16{tail}", base, head_dim_v=128)
    yield "softcap-128-fp16", Row(sizes, 128, f"fp16{SOFTCAP}", "plain-128-full")
    yield "softcap-128-with-lse", Row(sizes, 128, f"bf16{SOFTCAP}", "plain-128-full", returns_lse=True)
    yield "plain-128-16k", Row("1x16384x16", 128, f"bf16{CAUSAL}", "plain-128-16k")
    yield "window-1024-16k", Row("1x16384x16", 128, "bf16,band=1024:0", "plain-128-16k")
    yield "plain-128-1k", Row("16x1024x16", 128, "bf16", "plain-128-16k")  # as many FLOPs as the window's


ROWS = dict(_rows())
CHECKS = (("2x333x2", "333x1", ",band=:0"), ("1x200x4", "500x2", ""), ("1x600x2", "640x2", ",band=100:30"),
          ("1x300x2", "150x2", ",band=:0"))  # fmt: skip
FACTOR = 1.5  # of plain PyTorch's error in the same dtype
FLOOR = {"bf16": 4e-3, "fp16": 5e-4}  # of out's norm: what rounding costs that nobody avoids
LAST = 512  # rows of the row's own problem that are checked
LSE_LIMIT, COARSE_LSE_LIMIT = 1e-5, 2e-2  # relative, absolute below 1; where nobody sees it a coarse curve makes it


def draw(problem: AttentionProblem, device: torch.device) -> Tensors:
    """q, k, v and modifiers' tensors; queries are large enough that a soft cap bends their scores."""
    torch.manual_seed(0)
    size, dtype = shapes(problem), TORCH_DTYPES[problem.dtype.value]
    made = {name: torch.randn(size[name], device=device) for name in "qkv"}
    if problem.score:
        made["q"] *= 4.0
    made = {name: tensor.to(dtype) for name, tensor in made.items()}
    for i, spec in enumerate(problem.score):
        for j, tensor in enumerate(spec.tensors):
            made[f"score.{i}.{j}"] = torch.rand(tensor.shape, device=device) / 8
    return made


def check(name: str) -> list[str]:
    """What is wrong with a row, on this GPU."""
    row, device, wrong = ROWS[name], torch.device("cuda", 0), []
    rest = row.rest.partition(",band=:0")
    tail = (rest[0] + rest[2]).replace("(4x", "({batch}x")
    modified = tail.partition(",")[2]
    problems = [row.problem()]
    for queries, keys, band in CHECKS:
        batch, _, heads = queries.split("x")
        score = (
            f",score=alibi({batch}x{heads}:fp32)" if "alibi" in modified else f",{modified}" if "softcap" in modified else ""
        )
        problems.append(row.problem(queries, keys, f"{row.rest[:4]}{band}{score}"))
    for problem in problems:
        tensors = draw(problem, device)
        bound, inputs = bind(row.plan(problem, device_of(device)), tensors, device)
        with patch.object(torch, "empty_strided", poisoned):
            made, again = (bound.run(dict(inputs)) for _ in range(2))
        torch.cuda.synchronize()
        out, lse = expect(attention_reference, problem, tensors)
        plain = distance(expect(attention_plain, problem, tensors)[0], out)
        got, got_lse = made["out"][-1:, -LAST:, -1:], made["lse"][-1:, -1:, -LAST:]
        off, lse_off = distance(got, out), lse_distance(got_lse, lse)
        coarse = "softcap" in modified and not row.returns_lse
        if not off <= max(FACTOR * plain, FLOOR[problem.dtype.value]):
            wrong.append(f"{problem.spell()}: out is off by {off:.1e}, plain PyTorch by {plain:.1e}")
        if not lse_off < (COARSE_LSE_LIMIT if coarse else LSE_LIMIT):
            wrong.append(f"{problem.spell()}: lse is off by {lse_off:.1e}")
        if not bool(made["out"].isfinite().all()):
            wrong.append(f"{problem.spell()}: out is not finite")
        if not all(torch.equal(made[name], again[name]) for name in ("out", "lse")):
            wrong.append(f"{problem.spell()} differs from run to run")
    return wrong


def expect(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor]], problem: AttentionProblem, tensors: Tensors
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of the last rows of the last head. Positions count from the end, so the rest may be left out."""
    q = tensors["q"][-1:, -LAST:, -1:]
    k, v = (tensors[name][-1:, :, -1:] for name in "kv")
    score = [
        spec.kind(*spec.scalars, *(tensors[f"score.{i}.{j}"][-1:, -1:] for j in range(len(spec.tensors))))
        for i, spec in enumerate(problem.score)
    ]
    return function(q, k, v, mask=problem.mask, score=score, scale=problem.scale)


def lse_distance(result: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest relative error, absolute below 1; infinite where -inf is in the wrong rows, and for NaN."""
    unseen = exact == -torch.inf
    if not torch.equal(result == -torch.inf, unseen) or bool(result.isnan().any()):
        return float("inf")
    off = (result.double() - exact)[~unseen].abs() / exact[~unseen].abs().clamp(min=1.0)
    return off.max().item() if off.numel() else 0.0


def cudnn_forward(problem: AttentionProblem, tensors: Tensors) -> Callable[[], Any]:
    """cuDNN's forward of the same problem."""
    q, k, v = (tensors[name].transpose(1, 2) for name in "qkv")

    def call() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=problem.mask.right == 0, enable_gqa=problem.group > 1)

    return call


def measure(base: str, names: list[str], rounds: int, until: float, record: Record) -> None:
    """Results of the rows that are compared with `base`, and of cuDNN where it computes the same, in one rotation."""
    device = torch.device("cuda", 0)
    calls: dict[str, Callable[[], Any]] = {}
    problems: dict[str, AttentionProblem] = {}
    for name in names:
        problem = problems[name] = ROWS[name].problem()
        tensors = draw(problem, device)
        bound, given = bind(ROWS[name].plan(problem, device_of(device)), tensors, device)
        calls[name] = lambda bound=bound, given=given: bound.run(dict(given))
        if not problem.score and problem.mask.left is None:
            calls[f"cudnn {name}"], problems[f"cudnn {name}"] = cudnn_forward(problem, tensors), problem
    counts = {name: calls_for(burst_ms(call, 3, device), device) for name, call in calls.items()}
    times = rotate(
        list(calls), rounds, lambda name: burst_ms(calls[name], counts[name], device), lambda: time.monotonic() < until
    )  # fmt: skip
    speeds = {name: problems[name].flops() / median(taken) * 1e-9 for name, taken in times.items()}
    for name in names:
        cudnn = f"cudnn {name}"
        row: dict[str, Any] = dict(
            row=name, problem=problems[name].spell(), tile=ROWS[name].plan(problems[name], H100).notes[0],
            ms=round(median(times[name]), 4), least_ms=round(min(times[name]), 4), most_ms=round(max(times[name]), 4),
            tflops=round(speeds[name], 1), base=base, of_base=round(speeds[name] / speeds[base], 3) if base in speeds else "",
            of_cudnn=round(speeds[name] / speeds[cudnn], 3) if cudnn in speeds else "",
        )  # fmt: skip
        record.add(row)
        print(
            f"{name:26s} {row['ms']:8.4f} ms {speeds[name]:6.1f} TFLOP/s, {row['of_base']} of {base}, "
            f"{row['of_cudnn'] or '-'} of cuDNN",
            flush=True,
        )


def compile_all(names: list[str]) -> int:
    """Compile every row; the number of kernels that failed."""
    from flashtile.triton_glue.compile import compile_and_read
    from flashtile.triton_glue.sass import disassemble, matrix_loops

    failures = 0
    for name in names:
        plan = ROWS[name].plan(ROWS[name].problem(), H100)
        (call,) = plan.calls
        assert isinstance(call, KernelCall)
        try:
            compiled, used = compile_and_read(call, plan, H100)
            lengths = [len(loop.opcodes) for loop in matrix_loops(disassemble(compiled))]
            fits = used.shared_bytes <= H100.smem_bytes
            said = f"spills {used.spill_bytes} B, {used.shared_bytes} B shared, loops of {lengths} instructions"
        except Exception as error:  # the others are to be compiled all the same
            fits, said = False, f"{type(error).__name__}: {error}"[:300]
        failures += not fits
        print(f"{'ok  ' if fits else 'FAIL'} {name}: {said}", flush=True)
    return failures


class Forward(Experiment[str]):
    """A cell is a row that others are compared with, of those that are right (`right`, once they were checked)."""

    output, budget_s = "benchmarks/results/hopper-forward.csv", 140
    right: Sequence[str] = ()

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--row", nargs="+", choices=list(ROWS), default=list(ROWS))
        parser.add_argument("--rounds", type=at_least_one, default=6)
        parser.add_argument("--dry", action="store_true", help="compile every row, without a GPU")

    @classmethod
    def check(cls, chosen: argparse.Namespace, parser: argparse.ArgumentParser) -> int | None:
        return int(bool(compile_all(chosen.row))) if chosen.dry else None

    def begin(self, record: Record) -> AbstractContextManager[Any]:
        self.right = check_all(check, self.chosen.row, record)
        return nullcontext()

    def cells(self) -> list[str]:
        return list(dict.fromkeys(ROWS[name].base for name in self.right))

    def place(self, cell: str) -> dict[str, str]:
        return dict(row=cell, problem="all that are compared with it")

    def measure(self, cell: str, record: Record, until: float) -> None:
        measure(cell, [name for name in self.right if ROWS[name].base == cell], self.chosen.rounds, until, record)


def main() -> int:
    return main_of(Forward)


if __name__ == "__main__":
    sys.exit(main())
