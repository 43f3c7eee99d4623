"""The CPU beside PyTorch's own attention, `F.scaled_dot_product_attention`, in rotation within one process.

    python benchmarks/cpu.py [--section calls step memory features] [--dtype fp32 bf16 fp16] [--rounds 40] [--threads N]
        [--budget 240] [--output benchmarks/results/cpu.csv] [--commit HASH]

calls: a call, and one with its backward, of small and long problems. Ours and SDPA, which is given and gives back the same
    (batch, seqlen, heads, head_dim) tensors, take turns, there and back. `ratio` is the median of ours / SDPA's of each round,
    which load on the machine disturbs least; times are medians, microseconds of wall time, and the least ones.
step: a training step of the demo's model with either, likewise.
memory: what a forward and backward hold at their highest point beyond inputs and the gradient that arrives, bytes.
features: what features cost beside SDPA without them, on one thread; q is 1x2048x4x64. `forward_ms` and `both_ms` are the least
    CPU time of a turn.

Outputs and gradients are first held against float64: those of features by the accuracy rule of tests/judge.py; those of calls
may err 1.5 times as much as the worse of plain PyTorch and SDPA, whose kernel computes them. A row fails that is wrong or above
its bar: SMALL times SDPA's time, LONG from LONG_KEYS keys on, STEP, MEMORY, or MOST for features.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import flashtile
from benchmarks.experiment import Experiment, main_of
from benchmarks.record import Record, at_least_one
from flashtile import Options
from flashtile.bench.rotation import rotate
from flashtile.demo.memory import peak_bytes
from flashtile.demo.model import attend_flashtile, attend_sdpa
from flashtile.demo.train import Setup, Text, Trainer
from tests.cases import Case, Tensors
from tests.judge import breaches, expected, measure, run

SECTIONS = ("calls", "step", "memory", "features")
SMALL, LONG, STEP, MEMORY = 1.5, 1.05, 1.05, 1.1  # bars, times SDPA's
LONG_KEYS = 1024
SHAPES = (  # batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, causal
    (1, 64, 64, 2, 2, 32, True), (2, 48, 48, 4, 4, 16, True), (1, 1, 128, 8, 2, 64, False), (1, 128, 128, 4, 4, 64, False),
    (4, 256, 256, 4, 4, 32, True), (1, 1024, 1024, 4, 4, 64, True), (1, 1024, 1024, 4, 4, 64, False),
    (1, 2048, 2048, 4, 2, 64, True),
)  # fmt: skip
BURST_US = 1000.0  # of a turn, at least one call: seldom interrupted where others work too
SMALL_ROUNDS = 10  # rounds of a call with fewer than LONG_KEYS keys for one with more
STEPS = Setup(steps=40)
LENGTHS = (64, 512, 1024, 2048, 4096)  # of memory
MOST = 3.0  # times SDPA's time
SEQLEN = 2048
HEADS, HEAD_DIM = 4, 64
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {}, "lse": {"lse": True}, "window": {"window": (256, 256)}, "alibi": {"score": ("alibi",)},
    "alibi, lse": {"score": ("alibi",), "lse": True}, "softcap": {"score": ("softcap30",)},
    "softcap, lse": {"score": ("softcap30",), "lse": True},
}  # fmt: skip


def case_of(feature: str, dtype: str, causal: bool) -> Case:
    """The case of a row; of a window under a causal mask the left half is left."""
    given = {name: value for name, value in FEATURES[feature].items() if name != "lse"}
    return Case(
        "cpu", seqlen_q=SEQLEN, seqlen_k=SEQLEN, heads_q=HEADS, heads_kv=HEADS, head_dim=HEAD_DIM, dtype=dtype, causal=causal,
        fixed_slopes=True, upstream="both" if FEATURES[feature].get("lse") else "out", **given,
    )  # fmt: skip


def ours(case: Case, tensors: Tensors) -> Callable[[], Any]:
    """The call of a case, on the CPU backend."""
    how = {**case.given(tensors), **case.masks(torch.device("cpu")), "options": Options(backend="cpu")}
    return_lse = case.upstream == "both"
    return lambda: flashtile.attention(*(tensors[name] for name in "qkv"), **how, return_lse=return_lse)


def sdpa(case: Case, tensors: Tensors) -> Callable[[], Any]:
    """SDPA of the same tensors, without the feature."""
    attend: Any = torch.nn.functional.scaled_dot_product_attention
    grouped = case.heads_q != case.heads_kv
    return lambda: attend(*(tensors[n].transpose(1, 2) for n in "qkv"), is_causal=case.causal, enable_gqa=grouped)


def cpu_ms(call: Callable[[], Any], backward: bool) -> float:
    """CPU milliseconds of a call, and its backward."""
    with torch.set_grad_enabled(backward):
        begun = time.process_time()
        made = call()
        if backward:
            outputs = made if isinstance(made, tuple) else (made,)
            torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])
        return (time.process_time() - begun) * 1e3


def measure_features(dtype: str, causal: bool, rounds: int, until: float, record: Record) -> None:
    """The rows of a dtype and mask."""
    cases = {feature: case_of(feature, dtype, causal) for feature in FEATURES}
    calls: dict[str, Callable[[], Any]] = {}
    failures = dict[str, str]()
    for feature, case in cases.items():
        tensors = case.tensors(torch.device("cpu"))
        truth, plain = expected(case, tensors)
        results = run("cpu", case, tensors)
        leaves = {name: t.detach().requires_grad_(name in "qkv") for name, t in tensors.items()}
        calls[feature] = ours(case, leaves)
        if case.upstream == "out":  # `run` asks for lse too, which other code may compute
            results["out"] = calls[feature]().detach()
        failures[feature] = "; ".join(breaches(case, results, truth, plain))
        if feature == "plain":
            calls["sdpa"] = sdpa(case, leaves)
    least = {}
    for backward in (False, True):
        times = rotate(
            list(calls), rounds, lambda name, both=backward: cpu_ms(calls[name], both), lambda: time.monotonic() < until
        )
        least[backward] = {name: min(some) for name, some in times.items()}
    for name in calls:
        row: dict[str, Any] = {"section": "features", "dtype": dtype, "causal": causal, "what": name}
        for word, backward in (("forward", False), ("both", True)):
            row |= {f"{word}_ms": least[backward][name], f"{word}_ratio": least[backward][name] / least[backward]["sdpa"]}
        slow = [f"{word} {row[word + '_ratio']:.2f}" for word in ("forward", "both") if row[f"{word}_ratio"] > MOST]
        record.add({**row, "failure": "; ".join(filter(None, [failures.get(name, ""), *slow]))})
        print(*(f"{value:.2f}" if isinstance(value, float) else value for value in record.rows[-1].values()), flush=True)


def call_case(shape: tuple[Any, ...], dtype: str) -> Case:
    """The case of a call, whose lse nobody sees."""
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, causal = shape
    sizes = dict(batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=heads_q, heads_kv=heads_kv, head_dim=head_dim)
    return Case("cpu", **sizes, dtype=dtype, causal=causal, upstream="out")


def beside(case: Case, tensors: Tensors) -> Callable[[], torch.Tensor]:
    """`sdpa`, which gives back what ours does."""
    call = sdpa(case, tensors)
    return lambda: call().transpose(1, 2)


def results(call: Callable[[], torch.Tensor], leaves: Tensors) -> Tensors:
    """out, dq, dk and dv of a call."""
    out = call()
    grads = torch.autograd.grad(out, [leaves[name] for name in "qkv"], leaves["dout"])
    return {"out": out.detach(), **{f"d{name}": grad for name, grad in zip("qkv", grads, strict=True)}}


def errors(case: Case, tensors: Tensors, calls: dict[str, Callable[[], torch.Tensor]]) -> tuple[dict[str, Any], list[str]]:
    """(the largest errors against float64 of ours, SDPA's and plain PyTorch's, and what of ours is wrong)."""
    truth, plain = expected(case, tensors)
    made = {name: results(call, tensors) for name, call in calls.items()}
    row, wrong = dict[str, Any](), list[str]()
    for name in ("out", "dq", "dk", "dv"):
        mine, theirs = (measure(name, case, made[who][name], truth[name], plain[name]) for who in ("ours", "sdpa"))
        row |= {f"{name}_error": mine.largest, f"{name}_sdpa": theirs.largest, f"{name}_plain": mine.plain_largest}
        allowed = max(mine.allowed, 1.5 * theirs.largest)
        if not mine.largest <= allowed:
            wrong.append(f"{name} is off by {mine.largest:.3g}, allowed {allowed:.3g}")
    return row, wrong


def bursts(call: Callable[[], torch.Tensor], tensors: Tensors, backward: bool) -> Callable[[], float]:
    """Microseconds per call of a burst of them, after one that is not timed: the other's turn has emptied the caches."""
    leaves = [tensors[name] for name in "qkv"]

    def burst(count: int) -> float:
        with torch.set_grad_enabled(backward):
            begun = 0.0
            for i in range(count + 1):
                begun = time.perf_counter() if i == 1 else begun
                out = call()
                if backward:
                    torch.autograd.grad(out, leaves, tensors["dout"])
            return (time.perf_counter() - begun) * 1e6 / count

    count = max(1, round(BURST_US / min(burst(1) for _ in range(5))))
    return lambda: burst(count)


def compared(times: dict[str, list[float]], bar: float) -> dict[str, Any]:
    """Medians and least of both, and the ratio beside its bar."""
    ratio = statistics.median(a / b for a, b in zip(times["ours"], times["sdpa"], strict=True))
    middles = {f"{name}_us": statistics.median(some) for name, some in times.items()}
    least = {f"{name}_least_us": min(some) for name, some in times.items()}
    return {**middles, **least, "ratio": ratio, "bar": bar}


def judged(record: Record, row: dict[str, Any], wrong: list[str]) -> None:
    """Add a row; it fails if something is wrong or its ratio is above its bar."""
    slow = [f"ratio {row['ratio']:.3f} above {row['bar']}"] if row["ratio"] > row["bar"] else []
    record.add({**row, "failure": "; ".join([*wrong, *slow])})
    shown = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in record.rows[-1].values())
    print(*shown, flush=True)


def measure_call(shape: tuple[Any, ...], dtype: str, rounds: int, until: float, record: Record) -> None:
    """The rows of a call."""
    case = call_case(shape, dtype)
    drawn = case.tensors(torch.device("cpu"))
    tensors = {name: t.detach().requires_grad_(name in "qkv") for name, t in drawn.items()}
    calls = {"ours": ours(case, tensors), "sdpa": beside(case, tensors)}
    about = dict(section="calls", dtype=dtype, shape="x".join(map(str, shape[:-1])), causal=case.causal)
    found, wrong = errors(case, tensors, calls)
    for backward in (False, True):
        turns = {name: bursts(call, tensors, backward) for name, call in calls.items()}
        bar, more = (LONG, 1) if case.seqlen_k >= LONG_KEYS else (SMALL, SMALL_ROUNDS)
        times = rotate(list(turns), rounds * more, lambda name, turns=turns: turns[name](), lambda: time.monotonic() < until)
        judged(record, {**about, "what": "both" if backward else "forward", **compared(times, bar), **found}, wrong)


def measure_step(until: float, record: Record) -> None:
    """The row of a training step."""
    text = Text()
    trainers = {
        name: Trainer(attend, text, STEPS, torch.device("cpu"))
        for name, attend in (("ours", attend_flashtile), ("sdpa", attend_sdpa))
    }
    rotate(list(trainers), STEPS.steps, lambda name: trainers[name].step(), lambda: time.monotonic() < until)
    times = {name: [1e3 * ms for ms in trainer.times_ms[len(trainer.times_ms) // 8 :]] for name, trainer in trainers.items()}
    apart = max(abs(a - b) for a, b in zip(*(trainer.losses for trainer in trainers.values()), strict=True))
    row = dict(section="step", dtype="fp32", what="training step", **compared(times, STEP), loss_difference=apart)
    judged(record, row, [] if apart < 1e-2 else [f"losses differ by {apart:.3g}"])


def measure_memory(record: Record) -> None:
    """The rows of memory."""
    for seqlen in LENGTHS:
        ours, theirs = (peak_bytes(attend, seqlen, torch.device("cpu")) for attend in (attend_flashtile, attend_sdpa))
        row = dict(section="memory", dtype="fp32", what="bytes", seqlen=seqlen, ours_bytes=ours, sdpa_bytes=theirs)
        judged(record, {**row, "ratio": ours / theirs, "bar": MEMORY}, [])


class Cpu(Experiment[tuple[str, Any]]):
    """A cell is a section and what of it."""

    output, budget_s, gpu = "benchmarks/results/cpu.csv", 240, False

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--section", nargs="+", choices=SECTIONS, default=["calls", "step", "memory"])
        parser.add_argument("--dtype", nargs="+", choices=["bf16", "fp16", "fp32"], default=["fp32"])
        parser.add_argument("--rounds", type=at_least_one, default=40)
        parser.add_argument(
            "--threads", type=at_least_one, default=torch.get_num_threads(), help="of all sections but features"
        )

    def about(self) -> dict[str, Any]:
        torch.set_num_threads(self.chosen.threads)
        return {"threads": self.chosen.threads}

    def cells(self) -> list[tuple[str, Any]]:
        chosen = self.chosen
        cells: list[tuple[str, Any]] = [(name, None) for name in ("memory", "step") if name in chosen.section]
        if "calls" in chosen.section:
            cells += [("calls", (shape, dtype)) for dtype in chosen.dtype for shape in SHAPES]
        if "features" in chosen.section:
            cells += [("features", (dtype, causal)) for dtype in chosen.dtype for causal in (False, True)]
        return cells

    def place(self, cell: tuple[str, Any]) -> dict[str, Any]:
        return dict(section=cell[0], about=cell[1])

    def measure(self, cell: tuple[str, Any], record: Record, until: float) -> None:
        section, about = cell
        if section == "memory":
            measure_memory(record)
        elif section == "step":
            measure_step(until, record)
        elif section == "calls":
            measure_call(about[0], about[1], self.chosen.rounds, until, record)
        else:
            torch.set_num_threads(1)
            measure_features(about[0], about[1], self.chosen.rounds, until, record)


def main() -> int:
    return main_of(Cpu)


if __name__ == "__main__":
    sys.exit(main())
