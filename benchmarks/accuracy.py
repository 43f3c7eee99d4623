"""Judges random GPU cases by the accuracy rule of tests/judge.py, and writes what it found.

    python benchmarks/accuracy.py [--cases 2400] [--seed 0] [--backend hopper] [--dtype fp32 ...] [--numbers 2217 ...]
        [--budget SECONDS] [--output benchmarks/results/accuracy.csv]

Lengths, batch and upstream gradients are random; dtype, head dims, mask kind, modifiers, heads and backward variant are
drawn from a bounded set, so that a run compiles a few hundred kernels and no more. Processes check cases side by side, first
one of every combination, so that the kernels are compiled on all cores. Of error ratios to plain PyTorch's the
rule bounds the largest (1.5; it counts errors below the floor as being on it), the 99th percentile (1.1) and the mean (1).
The last part of a case's name is its number: --numbers runs it again.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.experiment import Experiment, main_of
from benchmarks.processes import Failure, in_processes
from benchmarks.record import Record, at_least_one
from flashtile import dispatch
from flashtile.torch.call.arguments import Arguments
from flashtile.torch.call.describe import make_problem
from flashtile.torch.call.lengths import given_lengths
from flashtile.torch.execute.bound import device_of
from flashtile.torch.execute.prepared import PreparedCall
from flashtile.torch.routes.eager import prepare
from tests.cases import DTYPES, Case, Tensors
from tests.judge import breaches, expected, measure, measure_lse, run, wants_gradient

DIMS = ((64, 64), (128, 128), (80, 80), (16, 16), (256, 256), (192, 128), (64, 128), (5, 40), (8, 128))
MASKS = ({}, {"causal": True}, {"window": (33, 17)}, {"window": (100, None)})
SCORES = ((), (), (), ("softcap30",), ("alibi",), ("softcap30", "alibi"))
COLUMNS = (
    "name", "dtype", "head_dim", "head_dim_v", "causal", "window", "score", "backward", "batch", "heads_q", "heads_kv",
    "seqlen_q", "seqlen_k", "upstream",
)  # fmt: skip
SIZES = ("name", "batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "upstream", "cu_q", "cu_k", "used_q", "used_k")


def profiles(seed: int) -> list[dict[str, Any]]:
    """The bounded set: every dtype and pair of head dims, with mask, modifiers, variant and heads drawn for each."""
    dice = random.Random(seed)
    made = []
    for dtype in DTYPES:
        for head_dim, head_dim_v in DIMS:
            mask, score, backward = dice.choice(MASKS), dice.choice(SCORES), dice.choice(("split", "fused"))
            heads_kv, group = dice.choice((1, 2, 3)), dice.choice((1, 1, 2, 3))
            made.append(dict(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v, score=score, backward=backward,
                             heads_q=heads_kv * group, heads_kv=heads_kv, **mask))  # fmt: skip
    return made


def draw(number: int, seed: int) -> Case:
    """The case of this number: the same in every run with this seed."""
    dice = random.Random(seed * 1_000_003 + number)
    seqlen_q = dice.choice((dice.randint(1, 96), dice.randint(97, 700), dice.choice((128, 256, 512, 1024))))
    seqlen_k = seqlen_q if dice.random() < 0.4 else dice.randint(1, 800)
    return Case(
        f"random-{seed}-{number}", batch=dice.randint(1, 3), seqlen_q=seqlen_q, seqlen_k=seqlen_k,
        upstream="both" if dice.random() < 0.3 else "out", **dice.choice(profiles(seed)),
    )  # fmt: skip


def as_hopper_has_it(case: Case) -> Case:
    """The case with the one backward there is, slopes that want no gradient and, now and then, a bias that may."""
    made, dice = replace(case, backward="fused", fixed_slopes=bool(case.score)), random.Random(case.name)
    bias = dice.choice(("", "", "bias", "bias-heads"))  # of every score, or of every head
    if not bias or "softcap30" in case.score:
        return made
    keys, gradient = -(-case.seqlen_k // 8) * 8, not case.score and dice.random() < 0.7
    return replace(made, score=(*case.score, bias), score_dtype=case.dtype, fixed_slopes=not gradient, seqlen_k=keys)


def refused(case: Case, device: torch.device) -> list[str]:
    """Why the hopper backend does not run a case."""
    tensors = captured(case, case.tensors(device))
    arguments = {**case.given(tensors), **case.masks(device)}
    problem, _ = make_problem(*(tensors[n] for n in "qkv"), Arguments(**arguments, options=case.options("hopper")))
    hopper = dispatch.backend_named("hopper")
    return hopper.unsupported(problem, device_of(device)) or hopper.unsupported(problem, device_of(device), "fused")


def assess(case: Case, device: torch.device, backend: str) -> dict[str, Any]:
    """A row: the errors, and `failure`, which says what broke the rule."""
    tensors = case.tensors(device)
    row = describe(case) | {"problem": prepared(case, tensors, backend)[0].problem.spell(), "backend": backend}
    got = run(backend, case, tensors)
    truth, plain = expected(case, tensors)
    for name, exact in truth.items():
        if name == "lse":
            row["lse_error"] = measure_lse(got[name], exact)
            continue
        error = measure(name, case, got[name], exact, plain[name])
        row |= {f"{name}_error": error.largest, f"{name}_plain": error.plain_largest, f"{name}_floor": error.floor,
                f"{name}_ratio": error.ratio, f"{name}_mean_ratio": error.mean_ratio}  # fmt: skip
    return {**row, "failure": "; ".join(breaches(case, got, truth, plain))}


def describe(case: Case) -> dict[str, Any]:
    return {column: str(value) for column, value in asdict(case).items() if column in COLUMNS}


def prepared(case: Case, tensors: Tensors, backend: str) -> tuple[PreparedCall, tuple[torch.Tensor, ...]]:
    """The prepared call of a case, and the tensors besides q, k, v."""
    tensors = captured(case, tensors)
    q, k, v = (tensors[n] if case.cu_q is None else tensors[n][None] for n in "qkv")
    arguments = {**case.given(tensors), **case.masks(q.device), "given": given_lengths(**case.lengths(q.device))}
    return prepare(q, k, v, **arguments, options=case.options(backend))


def captured(case: Case, tensors: Tensors) -> Tensors:
    """The same, where those besides q, k, v want a gradient as the case says."""
    for name, tensor in tensors.items():
        if is_captured(name):
            tensor.requires_grad_(wants_gradient(case, name))
    return tensors


def is_captured(name: str) -> bool:
    return name.startswith(("score", "sink"))


def checked(case: Case, backend: str) -> dict[str, Any]:
    """The row of a case, on this process's GPU; empty where the hopper backend refuses it."""
    device = torch.device("cuda", 0)
    return {} if backend == "hopper" and refused(case, device) else assess(case, device, backend)


def kind(case: Case) -> str:
    """What two cases have in common that differ in sizes alone: most of their kernels."""
    return str([value for name, value in asdict(case).items() if name not in SIZES])


def check_all(
    function: Callable[[Case, str], dict[str, Any]], cases: list[Case], backend: str, record: Record, ends: float
) -> Iterator[dict[str, Any]]:
    """What `function` makes of each case that is done in time, in several processes; the others are noted as missing.

    The first case of every kind comes first, then the second of every kind: neighbours compile different kernels.
    """
    seen: Counter[str] = Counter()
    turns: list[int] = []
    for case in cases:
        turns.append(seen[kind(case)])
        seen[kind(case)] += 1
    ordered = [case for _, case in sorted(zip(turns, cases, strict=True), key=lambda pair: pair[0])]
    left, begun = {case.name: case for case in ordered}, time.monotonic()
    for (case, _), made in in_processes(function, [(case, backend) for case in ordered], ends):
        del left[case.name]
        if len(ordered) - len(left) == len(seen):
            print(f"as many cases as kinds are compiled and checked in {time.monotonic() - begun:.0f} s", flush=True)
        row = {**describe(case), "failure": made.text} if isinstance(made, Failure) else made
        if row.get("failure"):
            print("FAILED", case, row["failure"], flush=True)
        yield row
    for name in left:
        record.leave(name)


def report(rows: list[dict[str, Any]]) -> None:
    """Per dtype and tensor what the rule bounds; then lse, and the worst cases."""
    for dtype in DTYPES:
        for name in ("out", "dq", "dk", "dv", "dscore.0", "dscore.1"):
            mine = [r for r in rows if r["dtype"] == dtype and f"{name}_ratio" in r]
            if mine:
                largest, means = sorted(r[f"{name}_ratio"] for r in mine), [r[f"{name}_mean_ratio"] for r in mine]
                print(
                    f"{dtype} {name:8s} {len(mine):5d} cases  error / plain's or floor: worst {largest[-1]:.3f}"
                    f" p99 {largest[int(0.99 * len(mine))]:.3f} mean {mean(largest):.3f}"
                    f"  mean error / plain's: mean {mean(means):.3f}"
                )
    lse = sorted(r["lse_error"] for r in rows if "lse_error" in r)
    if lse:
        print(f"lse relative error: worst {lse[-1]:.2e} p99 {lse[int(0.99 * len(lse))]:.2e}")
    for name in ("out", "dq", "dk", "dv", "dscore.0", "dscore.1"):
        worst = sorted((r for r in rows if f"{name}_ratio" in r), key=lambda r: -r[f"{name}_ratio"])[:5]
        print(f"worst {name}:", ", ".join(f"{r['name']} {r['dtype']} {r[f'{name}_ratio']:.2f}" for r in worst))


class Accuracy(Experiment[Case]):
    """A cell is a case; several processes judge them side by side."""

    output, budget_s = "benchmarks/results/accuracy.csv", 400

    def __init__(self, chosen: argparse.Namespace):
        super().__init__(chosen)
        self.rows: list[dict[str, Any]] = []
        self.refusals = 0

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--cases", type=at_least_one, default=2400)
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--backend", default="triton", choices=[backend.name for backend in dispatch.BACKENDS])
        parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=list(DTYPES))
        parser.add_argument("--numbers", type=int, nargs="+", help="the cases of these numbers alone")

    @classmethod
    def check(cls, chosen: argparse.Namespace, parser: argparse.ArgumentParser) -> int | None:
        if not cls(chosen).cells():
            parser.error("no case is left of those that are asked for")
        return None

    def cells(self) -> list[Case]:
        chosen = self.chosen
        drawn = (draw(number, chosen.seed) for number in chosen.numbers or range(chosen.cases))
        cases = [case for case in drawn if case.dtype in chosen.dtype]
        return [as_hopper_has_it(case) for case in cases] if chosen.backend == "hopper" else cases

    def run(self, record: Record) -> None:
        """Several processes judge cases side by side."""
        for row in check_all(checked, self.cells(), self.chosen.backend, record, record.ends):
            if row:
                self.rows.append(row)
                record.add({column: f"{v:.3e}" if isinstance(v, float) else v for column, v in row.items()})
            else:
                self.refusals += 1

    def report(self, record: Record) -> None:
        if self.refusals and not (self.rows or record.missing):
            raise SystemExit("no case is left of those that are asked for: Hopper refuses all")
        report(self.rows)
        print(f"{self.refusals} refused")


def main() -> int:
    return main_of(Accuracy)


if __name__ == "__main__":
    sys.exit(main())
