"""What the Hopper kernels promise beside speed: repeats that agree bit for bit, clean sanitizer runs, a quick first call.

    python benchmarks/hopper_checks.py [--sections repeats first sanitizer] [--only NAME ...] [--repeats 1000] [--budget 240]
                                       [--output hopper-checks.csv]

repeats: forward and deterministic backward of CONFIGURATIONS, again and again on the same tensors; every result is compared
bitwise with the first. first: seconds of NEW problems' first forward and first backward, one problem after another, in
processes that have computed another one before, with an empty disk cache and with what this left. sanitizer: SANITIZED under
compute-sanitizer's memcheck and racecheck, which must report nothing; and, for what racecheck makes of mbarriers alone,
`handover.py`, which has two and nothing else. --only: of these configurations. --sanitizer PROGRAM is another compute-sanitizer
than PATH's: by its release notes that of CUDA 13.0 (2025.3) takes some orders that mbarriers make for races, and 2025.4, 2026.1
and 2026.3 fewer. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import flashtile
from benchmarks.experiment import Ahead, Experiment, main_of
from benchmarks.processes import WORKERS, Failure, in_processes
from benchmarks.record import Record, at_least_one, need_gpu
from flashtile import Options
from tests.cases import Case
from tests.judge import run

TOOLS = ("memcheck", "racecheck")
HANDOVER = "handover"
BARRIERS = 128  # more than a block has; compute-sanitizer's own count is of barriers that a compiler of C++ knows
FIRST_S, WARM_S = 5.0, 0.3  # bars of a first call
APART: dict[str, Any] = dict(batch=1, seqlen_q=2300, seqlen_k=2300, heads_q=11, heads_kv=11)  # 132 tiles of three warpgroups
# so many tiles that the pass over keys makes dq, too
MANY: dict[str, Any] = dict(batch=4, seqlen_q=520, seqlen_k=520, heads_q=24, heads_kv=24)
SHAPES: tuple[dict[str, Any], ...] = (
    dict(head_dim=64), dict(head_dim=64, causal=True), dict(head_dim=64, window=(100, 0), dtype="fp16"),
    dict(head_dim=64, heads_q=8, heads_kv=2, causal=True), dict(head_dim=64, seqlen_q=20, dtype="fp16"),
    dict(head_dim=96, causal=True), dict(head_dim=96, dtype="fp16"), dict(head_dim=128), dict(head_dim=128, causal=True),
    dict(head_dim=128, dtype="fp16", causal=True), dict(head_dim=128, window=(300, 200)),
    dict(head_dim=128, heads_q=8, heads_kv=1, causal=True), dict(head_dim=128, score=("softcap30",)),
    dict(head_dim=64, backward="split", dropout=0.2), dict(head_dim=128, causal=True, backward="split"),
    dict(head_dim=128, dropout=0.2, causal=True), dict(head_dim=128, mask="table"),
    dict(head_dim=128, mask="one-long", seqlen_q=1100, seqlen_k=2048, heads_q=8), dict(head_dim=192, head_dim_v=128),
    dict(head_dim=192, head_dim_v=128, causal=True), dict(head_dim=256), dict(head_dim=256, causal=True, dtype="fp16"),
    dict(head_dim=256, heads_q=4, heads_kv=2, window=(64, 0)),
    dict(head_dim=128, score=("bias",), seqlen_k=776, fixed_slopes=False), dict(head_dim=256, score=("bias",), seqlen_k=776),
    dict(head_dim=64, score=("bias-heads",), seqlen_k=776, fixed_slopes=False, causal=True),
    dict(head_dim=128, score=("bias-heads",), seqlen_k=776),
    *({**APART, "head_dim": head_dim, "dtype": dtype} for head_dim, dtype in ((96, "fp16"), (128, "bf16"))),
    {**MANY, "head_dim": 64}, {**MANY, "head_dim": 128, "causal": True},
)  # fmt: skip
COMMON: dict[str, Any] = dict(
    batch=2, seqlen_q=777, seqlen_k=777, heads_q=4, heads_kv=4, dtype="bf16", fixed_slopes=True, score_dtype="bf16"
)
CONFIGURATIONS = {
    " ".join(f"{key}={value}" for key, value in shape.items()): Case("hopper-checks", **{**COMMON, **shape}) for shape in SHAPES
}
NEW = [
    "head_dim=256", "head_dim=192 head_dim_v=128", "head_dim=128 causal=True", "head_dim=128", "head_dim=96 causal=True",
    "head_dim=64 causal=True",
]  # fmt: skip
BEFORE = "head_dim=64 window=(100, 0) dtype=fp16"  # another one
SANITIZED = [
    "head_dim=64 causal=True", "head_dim=128", "head_dim=128 causal=True", "head_dim=128 mask=table",
    "head_dim=128 mask=one-long seqlen_q=1100 seqlen_k=2048 heads_q=8", "head_dim=256",
    "head_dim=128 causal=True backward=split", "head_dim=128 dropout=0.2 causal=True",
    "head_dim=128 score=('bias',) seqlen_k=776 fixed_slopes=False",
    "head_dim=64 score=('bias-heads',) seqlen_k=776 fixed_slopes=False causal=True",
    "batch=1 seqlen_q=2300 seqlen_k=2300 heads_q=11 heads_kv=11 head_dim=128 dtype=bf16",
    *(name for name in CONFIGURATIONS if name.startswith("batch=4 ")),
]  # fmt: skip


def warm(name: str) -> None:
    """Compile a configuration, fused and deterministic."""
    case = CONFIGURATIONS[name]
    tensors = case.tensors(torch.device("cuda"))
    for deterministic in (None, True):
        run("hopper", replace(case, deterministic=deterministic), tensors)


def repeated(name: str, repeats: int) -> dict[str, int]:
    """How many repeats differ from the first run, in any bit of each result."""
    case = replace(CONFIGURATIONS[name], deterministic=True)
    device = torch.device("cuda")
    warm(name)  # the other backward, once
    torch.cuda.synchronize()
    tensors, different = case.tensors(device), dict[str, torch.Tensor]()
    first: dict[str, torch.Tensor] = {}
    for _ in range(repeats):
        for result, tensor in run("hopper", case, tensors).items():
            bits = tensor.detach().contiguous().view(torch.uint8)
            expected = first.setdefault(result, bits.clone())
            different[result] = (
                different.get(result, torch.zeros((), dtype=torch.int64, device=device)) + (bits != expected).any()
            )
    return {f"{result}_differs": int(count) for result, count in different.items()}


def first_call(name: str) -> tuple[float, float]:
    """Seconds of the first forward and of its backward in this process, after another configuration's."""
    once(BEFORE)
    return once(name)


def once(name: str) -> tuple[float, float]:
    """Seconds of a forward and of its backward."""
    case = CONFIGURATIONS[name]
    tensors = case.tensors(torch.device("cuda"))
    q, k, v = (tensors[n].requires_grad_() for n in "qkv")
    how = {**case.given(tensors), **case.masks(q.device), "options": Options(backend="hopper")}
    torch.cuda.synchronize()
    begun = time.perf_counter()
    out = flashtile.attention(q, k, v, **how)
    torch.cuda.synchronize()
    forward = time.perf_counter() - begun
    begun = time.perf_counter()
    out.backward(tensors["dout"])
    torch.cuda.synchronize()
    return forward, time.perf_counter() - begun


def first_of(name: str) -> dict[str, float]:
    """Seconds of first calls with an empty and with a filled disk cache, each in a process of its own."""
    row: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as cache:
        for state in ("cold", "warm"):
            told = ask(str(Path(__file__).resolve()), "--first", name, TRITON_CACHE_DIR=cache)
            seconds = [float(word) for word in told.split()[-2:]]
            row |= {f"{state}_forward_s": seconds[0], f"{state}_backward_s": seconds[1]}
    return row


def ask(*arguments: str, tool: tuple[str, ...] = (), **environment: str) -> str:
    """What Python prints, called with these arguments. Raises RuntimeError where it fails."""
    done = subprocess.run(
        [*tool, sys.executable, *arguments], env={**os.environ, **environment}, capture_output=True, text=True, check=False,
        timeout=240.0,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {summary(done.stdout) or (done.stdout + done.stderr)[-400:]}")
    return done.stdout


def summary(text: str) -> str:
    """What compute-sanitizer found: between which lines, and how often; nothing where it found nothing."""
    found = Counter[str]()
    for report in re.split(r"(?:Error|Warning): ", text)[1:]:
        places = dict.fromkeys(re.findall(r"(?:Read|Write) access at \S+ in (\S+:\d+)", report))
        found[" with ".join(places) or report.splitlines()[0]] += 1
    return "; ".join(f"{count} x {places}" for places, count in found.most_common())


def sanitized(name: str, tool: str, program: str) -> dict[str, str]:
    """A configuration once under a tool of compute-sanitizer, which ends with status 1 if it has anything to report."""
    how = {"tool": tool, "error-exitcode": "1", "num-cuda-barriers": str(BARRIERS), "kernel-regex": "kns=attention_"}
    command = (program, *(word for name, value in how.items() for word in (f"--{name}", value)))
    told = ask(str(Path(__file__).resolve()), "--once", name, tool=command)
    return {"summary": "; ".join(filter(None, (told.strip().splitlines()[-1], summary(told))))}


def version(program: str) -> str:
    """compute-sanitizer's own."""
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"Version (\S+)", told)
    return found.group(1) if found else told.strip()


FOUND_BY: dict[str, Callable[..., dict[str, Any]]] = {"repeats": repeated, "first": first_of, "sanitizer": sanitized}
AT_ONCE = {"repeats": 4, "first": 1, "sanitizer": WORKERS}  # processes


def jobs_of(section: str, repeats: int, sanitizer: str) -> list[tuple[Any, ...]]:
    """What a section's function is called with, a configuration first."""
    if section == "repeats":
        return [(name, repeats) for name in CONFIGURATIONS]
    if section == "first":
        return [(name,) for name in NEW]
    return [(HANDOVER, "racecheck", sanitizer), *((name, tool, sanitizer) for name in SANITIZED for tool in TOOLS)]


def named(section: str, job: tuple[Any, ...]) -> str:
    """What its row is called."""
    return " ".join(job[:2]) if section == "sanitizer" else job[0]


def late(row: dict[str, Any]) -> str:
    """What a row breaks of what was promised."""
    bars = {"cold": FIRST_S, "warm": WARM_S}
    slow = [f"{name} {value:.2f}" for name, value in row.items() if name.endswith("_s") and value > bars[name.split("_")[0]]]
    different = [f"{name} {value}" for name, value in row.items() if name.endswith("_differs") and value]
    return "; ".join(slow + different)


class HopperChecks(Experiment[str]):
    """A cell is a section; several processes check its configurations side by side."""

    output, budget_s, ahead_share = "bench-output/hopper-checks.csv", 240, 0.4

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        usual, every = ["repeats", "first", "sanitizer"], [*CONFIGURATIONS, HANDOVER]
        parser.add_argument("--sections", nargs="+", choices=usual, default=usual)
        parser.add_argument("--only", nargs="+", choices=every, default=every, metavar="NAME")
        parser.add_argument("--repeats", type=at_least_one, default=1000)
        parser.add_argument(
            "--first", choices=list(CONFIGURATIONS), metavar="NAME", help="print the seconds of a configuration's first calls"
        )
        parser.add_argument("--once", choices=every, metavar="NAME", help="run a configuration once here")
        parser.add_argument("--sanitizer", default="compute-sanitizer", metavar="PROGRAM")

    @classmethod
    def check(cls, chosen: argparse.Namespace, parser: argparse.ArgumentParser) -> int | None:
        need_gpu(parser)
        if chosen.first:
            print(*first_call(chosen.first))
            return 0
        if chosen.once:
            return run_once(chosen.once)
        if "sanitizer" in chosen.sections and shutil.which(chosen.sanitizer) is None:
            parser.error(f"there is no {chosen.sanitizer} here: --sanitizer PROGRAM names one, --sections leaves it out")
        if not any(map(cls(chosen).jobs, chosen.sections)):
            parser.error("--only names nothing that these sections check")
        chosen.tool = version(chosen.sanitizer) if "sanitizer" in chosen.sections else ""
        return None

    def jobs(self, section: str) -> list[tuple[Any, ...]]:
        """The jobs of a section that are asked for."""
        chosen = self.chosen
        return [job for job in jobs_of(section, chosen.repeats, chosen.sanitizer) if job[0] in chosen.only]

    def ahead(self) -> Ahead | None:
        if not {"repeats", "sanitizer"} & set(self.chosen.sections):
            return None
        return warm, [(name,) for name in CONFIGURATIONS if name in self.chosen.only]

    def cells(self) -> list[str]:
        return self.chosen.sections

    def place(self, cell: str) -> dict[str, str]:
        return {"section": cell, "name": "the section"}

    def measure(self, cell: str, record: Record, until: float) -> None:
        jobs = self.jobs(cell)
        wanted = [named(cell, job) for job in jobs]
        for job, made in in_processes(FOUND_BY[cell], jobs, until, AT_ONCE[cell]):
            name = named(cell, job)
            wanted.remove(name)
            about = {"section": cell, "name": name, "tool": self.chosen.tool if cell == "sanitizer" else ""}
            if isinstance(made, Failure):
                record.fail(made.text, **about)
            else:
                row = {**about, "repeats": self.chosen.repeats if cell == "repeats" else "", **made}
                record.add({**row, "failure": late(made)})
                print(*row.values(), late(made), flush=True)
        for name in wanted:
            record.leave(f"{cell} {name}")


def run_once(name: str) -> int:
    """Run a configuration once here: the exit status."""
    if name == HANDOVER:
        from benchmarks.handover import all_arrive

        return 0 if all_arrive() else 1
    warm(name)
    torch.cuda.synchronize()
    return 0


def main() -> int:
    return main_of(HopperChecks)


if __name__ == "__main__":
    sys.exit(main())
