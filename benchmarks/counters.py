"""Hardware counters of the Hopper kernels, by Nsight Compute, to see which limit binds: a row per kernel.

    python benchmarks/counters.py [--cell NAME ...] [--budget SECONDS] [--output FILE] [--commit HASH] [--list]

A cell is a problem and a pass; a problem's name stands for both passes. Problems are compiled in several processes, then this
calls itself under `ncu` for one after another: of each pass it reads one call, after two that warm up. ncu runs a kernel alone,
again and again, each time on cold caches, at whatever clock the card then has: its microseconds are no benchmark. Columns
`*_pct` are percents of a unit's peak, while an SM is active (tensor to issue) or all the time (shared to dram); `stall_*` are
warps that wait for that reason per instruction issued. Where ncu fails or hangs, passes are tried one by one; what fails again
is a failed row. (No script may be named `profile`: it would stand in the place of Python's module, which cProfile needs.)
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.experiment import Ahead, Experiment, main_of
from benchmarks.hopper_backward import Tensors, bind
from benchmarks.record import Record, need_gpu
from flashtile.kernels.sm90.backend import BACKEND
from flashtile.plan.backend import Gradients
from flashtile.plan.call import Plan
from flashtile.problem.attention import AttentionProblem
from flashtile.torch.execute.bound import TORCH_DTYPES, device_of

WARM_CALLS = 2  # the first compiles, the second prepares what later ones reuse; after eight a plan's launches become a graph
MOST_S = 90.0  # of one ncu; what takes longer hangs
LEAST_S = 25.0  # less is not enough to begin another


def _problems() -> Iterator[tuple[str, str]]:
    sizes = "q=2x4096x16x128,kv=4096x16x128"
    for mask, band in (("full", ""), ("causal", ",band=:0")):
        yield f"plain-{mask}", f"{sizes},bf16{band}"
        yield f"softcap-{mask}", f"{sizes},bf16{band},score=softcap(50.0)"
        yield f"dropout-{mask}", f"{sizes},bf16{band},dropout=0.1"
        yield f"head_dim-256-{mask}", f"q=4x4096x8x256,kv=4096x8x256,bf16{band}"
    yield "window-1024", "q=1x16384x16x128,kv=16384x16x128,bf16,band=1024:0"
    yield "head_dim-96-full", "q=4x4096x16x96,kv=4096x16x96,bf16"
    yield "head_dim-192-128-full", "q=4x4096x16x192,kv=4096x16x128,bf16"
    yield "varlen-full", "q=16x4096x16x128,kv=4096x16x128,bf16,varlen=65536x65536"
    yield "dense-full", "q=16x4096x16x128,kv=4096x16x128,bf16"
    for dtype in ("bf16", "fp16"):
        yield f"bias-causal-{dtype}", f"{sizes},{dtype},band=:0,score=bias(2x16x4096x4096:{dtype}:grad)"


PROBLEMS = {name: AttentionProblem.parse(f"attention({text})") for name, text in _problems()}
CELLS = {f"{problem}-{which}": (problem, which) for problem in PROBLEMS for which in ("forward", "backward")}

ACTIVE, ELAPSED = ".avg.pct_of_peak_sustained_active", ".avg.pct_of_peak_sustained_elapsed"
PIPES = ("tensor_op_gmma", "xu", "alu", "fma", "lsu", "uniform")  # by instructions issued to them
STALLS = (
    "barrier", "branch_resolving", "dispatch_stall", "gmma", "imc_miss", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "no_instruction", "not_selected", "selected", "short_scoreboard",
    "sleeping", "wait",
)  # fmt: skip
# By column: what ncu calls it, of which the first that it knows is read. Products of warpgroups count as hmma's cycles.
METRICS: dict[str, tuple[str, ...]] = {
    "us": ("gpu__time_duration.sum",),
    "clock_hz": ("gpc__cycles_elapsed.avg.per_second", "sm__cycles_elapsed.avg.per_second"),
    "sm_cycles": ("sm__cycles_active.avg",),
    "instructions": ("sm__inst_executed.sum", "smsp__inst_executed.sum"),
    "tensor_pct": (f"sm__pipe_tensor_cycles_active{ACTIVE}", f"sm__pipe_tensor_op_hmma_cycles_active{ACTIVE}"),
    **{f"{pipe}_pct": (f"sm__inst_executed_pipe_{pipe}{ACTIVE}",) for pipe in PIPES},
    "fmaheavy_pct": (f"sm__pipe_fmaheavy_cycles_active{ACTIVE}", f"sm__inst_executed_pipe_fmaheavy{ACTIVE}"),
    "issue_pct": (f"smsp__issue_active{ACTIVE}", f"sm__issue_active{ACTIVE}"),
    "shared_pct": (f"l1tex__data_pipe_lsu_wavefronts_mem_shared{ELAPSED}", f"l1tex__data_pipe_lsu_wavefronts{ELAPSED}"),
    "bank_reads_pct": (f"l1tex__data_bank_reads{ELAPSED}",),
    "bank_writes_pct": (f"l1tex__data_bank_writes{ELAPSED}",),
    "l2_pct": (f"lts__throughput{ELAPSED}",),
    "l2_sectors_pct": (f"lts__t_sectors{ELAPSED}",),
    "l2_atomics_pct": (f"lts__d_atomic_input_cycles_active{ELAPSED}",),
    "dram_pct": (f"dram__throughput{ELAPSED}", "dram__bytes.sum.pct_of_peak_sustained_elapsed"),
    "bank_conflicts": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",),
    "l2_red_sectors": ("lts__t_sectors_op_red.sum",),
    "bulk_red_bytes": ("l1tex__m_l1tex2xbar_write_bytes_mem_global_op_tma_red.sum",),
    "dram_read_bytes": ("dram__bytes_read.sum",),
    "dram_write_bytes": ("dram__bytes_write.sum",),
    **{f"stall_{why}": (f"smsp__average_warps_issue_stalled_{why}_per_issue_active.ratio",) for why in STALLS},
}


def draw(problem: AttentionProblem, plan: Plan, device: torch.device) -> Tensors:
    """Random inputs of a problem's plan; items of unequal lengths are all of the greatest."""
    torch.manual_seed(0)
    made: Tensors = {}
    for buffer in plan.named("input"):
        shape, dtype = buffer.shape, TORCH_DTYPES[buffer.dtype]
        if buffer.name.startswith("cu_seqlens"):
            made[buffer.name] = torch.arange(shape[0], device=device, dtype=dtype) * problem.seqlen_q
        elif dtype.is_floating_point:
            made[buffer.name] = torch.randn(shape, device=device, dtype=dtype)
        else:
            made[buffer.name] = torch.randint(2**31 - 1, shape, device=device, dtype=dtype)
    return made


def prepare(problem: AttentionProblem, passes: Iterable[str]) -> list[Callable[[], object]]:
    """A call for each pass, warm; the backward's starts from a forward's results."""
    device = torch.device("cuda", 0)
    plans = {
        "forward": BACKEND.forward(problem, device_of(device)),
        "backward": BACKEND.backward(problem, device_of(device), Gradients(), "fused"),
    }
    tensors = draw(problem, plans["backward"], device)
    forward, inputs = bind(plans["forward"], tensors, device)
    made = forward.run(dict(inputs))
    tensors |= {name: made[name] for name in ("out", "lse")}
    calls: list[Callable[[], object]] = []
    for which in passes:
        bound, given = bind(plans[which], tensors, device)
        calls.append(lambda bound=bound, given=given: bound.run(dict(given)))
        for _ in range(WARM_CALLS):
            calls[-1]()
    torch.cuda.synchronize()
    return calls


def warm(problem: str, *passes: str) -> None:
    """Compile a problem's passes."""
    prepare(PROBLEMS[problem], passes)


def called(cells: list[str]) -> None:
    """One call of each cell, all of one problem, where a profiler sees it and nothing else."""
    signal.alarm(int(MOST_S) + 5)  # should ncu's end leave it behind
    calls = prepare(PROBLEMS[CELLS[cells[0]][0]], [CELLS[cell][1] for cell in cells])
    torch.cuda.profiler.start()
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def ask(*command: str, limit_s: float = 60.0) -> str:
    """What a program says. Raises RuntimeError where it fails, or takes longer: then its children end with it."""
    with TemporaryFile("w+", errors="replace") as said:  # a pipe would stay open for as long as any child has it
        how: dict[str, Any] = dict(stdout=said, stderr=subprocess.STDOUT, env={**os.environ, "LC_ALL": "C"})
        process = subprocess.Popen(command, start_new_session=True, **how)
        try:
            failure = f"exit status {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            failure = f"hangs, or takes more than {limit_s:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said.seek(0)
        text = said.read()
    if process.returncode:
        raise RuntimeError(f"{failure}: {complaints(text)}")
    return text


def nsight(parser: argparse.ArgumentParser) -> tuple[str, str]:
    """Where ncu is, and which; the parser's error if it is nowhere."""
    ncu = shutil.which("ncu") or parser.error("ncu, of Nsight Compute, is not on the PATH")
    return ncu, ask(ncu, "--version").partition("Version ")[2].split(" ")[0]


def complaints(text: str) -> str:
    """The lines in which ncu says what is wrong, and the last of the program that it ran."""
    lines = text.splitlines()
    own = [line for line in lines if not line.startswith("==")][-1:]
    return " ".join([*(line for line in lines if line.startswith(("==ERROR==", "==WARNING=="))), *own])


def known_columns(listed: str) -> dict[str, str]:
    """The metric of each column that ncu has, by what `ncu --query-metrics` lists; the first where it lists nothing."""
    known = {line.split()[0] for line in listed.splitlines() if "__" in line}
    found = {
        column: next((metric for metric in metrics if not known or metric.partition(".")[0] in known), "")
        for column, metrics in METRICS.items()
    }
    print("ncu does not know:", *(METRICS[column][0] for column, metric in found.items() if not metric), flush=True)
    return {column: metric for column, metric in found.items() if metric}


def read(text: str) -> list[dict[str, str]]:
    """A kernel's name and metrics, for each that ncu's CSV (one line per metric) names, in their order."""
    kernels: dict[str, dict[str, str]] = {}
    begin = text.find('"ID",')
    for line in csv.DictReader(line for line in text[begin:].splitlines() if begin >= 0 and line.startswith('"')):
        kernel = kernels.setdefault(line["ID"], {"kernel": line["Kernel Name"]})
        kernel[line["Metric Name"]] = line["Metric Value"].replace(",", "")
    return list(kernels.values())


def rows_of(text: str, cells: list[str], columns: dict[str, str]) -> list[dict[str, Any]]:
    """A row per kernel. Of both passes `attention_forward` is the last of the forward."""
    kernels, rows = read(text), list[dict[str, Any]]()
    if not kernels:
        raise RuntimeError(f"ncu read no kernel: {complaints(text)}")
    ends = 0 if len(cells) == 1 else 1 + [kernel["kernel"] for kernel in kernels].index("attention_forward")
    for i, kernel in enumerate(kernels):
        cell = cells[0] if i < ends else cells[-1]
        row: dict[str, Any] = dict(cell=cell, problem=PROBLEMS[CELLS[cell][0]].spell(), kernel=kernel["kernel"])
        for column, metric in columns.items():
            try:
                row[column] = float(kernel.get(metric, "")) / (1000 if column == "us" else 1)  # of nanoseconds
            except ValueError:  # n/a
                row[column] = ""
        rows.append(row)
    return rows


def count(ncu: str, cells: list[str], columns: dict[str, str], limit_s: float) -> list[dict[str, Any]]:
    """The rows of cells of one problem. Columns whose metric ncu refuses are taken out, for those that follow too."""
    how = ("--csv", "--print-units", "base", "--print-kernel-base", "function", "--clock-control", "none")
    how += ("--profile-from-start", "off", "--metrics", ",".join(columns.values()))
    try:
        text = ask(ncu, *how, sys.executable, str(Path(__file__).resolve()), "--child", *cells, limit_s=limit_s)
    except RuntimeError as error:
        refused = [column for column, metric in columns.items() if metric in str(error)]
        if not refused or len(refused) == len(columns):
            raise
        print("ncu refuses:", *(columns.pop(column) for column in refused), flush=True)
        return count(ncu, cells, columns, limit_s)
    return rows_of(text, cells, columns)


def measure(ncu: str, cells: list[str], columns: dict[str, str], record: Record) -> None:
    """Add the rows of cells of one problem; where both passes together fail, each by itself."""
    try:
        rows = count(ncu, cells, columns, min(MOST_S, record.left()))
    except Exception as error:
        record.lost |= "ERR_NVGPUCTRPERM" in str(error)  # nobody may read counters here
        if len(cells) == 1 or record.lost:
            record.fail(str(error), cell=" ".join(cells))
            return
        print("AGAIN, one by one:", *cells, error, flush=True)
        for cell, _ in record.parts(cells, reserve_s=LEAST_S):
            measure(ncu, [cell], columns, record)
        return
    for row in rows:
        record.add(row)
        busy = " ".join(f"{name[:-4]} {row[name]:.0f}" for name in row if name.endswith("_pct") and row[name] != "")
        stalls = sorted(((row[name], name[6:]) for name in row if name.startswith("stall_") and row[name] != ""), reverse=True)
        waits = " ".join(f"{name} {warps:.2f}" for warps, name in stalls[:4])
        print(f"{row['cell']:30s} {row['kernel'][:24]:24s} {row.get('us') or 0:9.1f} us | {busy} | {waits}", flush=True)


class Counters(Experiment[list[str]]):
    """A cell is a problem: its passes, which one process of ncu reads."""

    output, budget_s, ahead_share, reserve_s = "benchmarks/results/profile-h100.csv", 540, 0.4, LEAST_S

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--cell", nargs="+", choices=[*PROBLEMS, *CELLS], default=list(PROBLEMS), metavar="NAME")
        parser.add_argument("--list", action="store_true", help="say which cells there are")
        parser.add_argument("--child", nargs="+", choices=list(CELLS), metavar="NAME", help="call these, of one problem, once")

    @classmethod
    def check(cls, chosen: argparse.Namespace, parser: argparse.ArgumentParser) -> int | None:
        if chosen.list:
            print(*(f"{cell:34s} {PROBLEMS[problem].spell()}" for cell, (problem, _) in CELLS.items()), sep="\n")
            return 0
        need_gpu(parser)
        if chosen.child:
            called(chosen.child)
            return 0
        chosen.ncu, chosen.version = nsight(parser)
        return None

    def about(self) -> dict[str, str]:
        return {"ncu": self.chosen.version}

    def cells(self) -> list[list[str]]:
        cells = [cell for cell, (problem, _) in CELLS.items() if {cell, problem} & set(self.chosen.cell)]
        return [list(group) for _, group in groupby(cells, lambda cell: CELLS[cell][0])]

    def ahead(self) -> Ahead:
        return warm, [(CELLS[group[0]][0], *(CELLS[cell][1] for cell in group)) for group in self.cells()]

    def place(self, cell: list[str]) -> dict[str, str]:
        return {"cell": self.name(cell)}

    def name(self, cell: list[str]) -> str:
        return " ".join(cell)

    @contextmanager
    def begin(self, record: Record) -> Iterator[None]:
        self.columns = known_columns(ask(self.chosen.ncu, "--query-metrics", "--chips", "gh100"))
        yield

    def measure(self, cell: list[str], record: Record, until: float) -> None:
        measure(self.chosen.ncu, cell, self.columns, record)


def main() -> int:
    return main_of(Counters)


if __name__ == "__main__":
    sys.exit(main())
