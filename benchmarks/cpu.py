"""What features cost on a CPU: every call's time beside SDPA's flash attention without them, on one thread.

    python benchmarks/cpu.py [--dtype bf16 fp16 fp32] [--rounds 15] [--budget 240] [--output cpu.csv]

q is 1x2048x4x64. Calls of a dtype and mask take turns, there and back; `forward_ms` and `both_ms` are the least CPU time of
a turn, which other work on the machine disturbs least, and the ratios are to SDPA's. Outputs are first held against float64 by
the accuracy rule of tests/judge.py. A row fails that breaks the rule or takes more than MOST times SDPA's time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import flashtile
from benchmarks.record import Record, at_least_one, machine, options
from flashtile import Options
from flashtile.bench.rotation import rotate
from tests.cases import Case, Tensors
from tests.judge import breaches, expected, run

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
    heads_first = [tensors[name].transpose(1, 2) for name in "qkv"]
    return lambda: torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=case.causal)


def cpu_ms(call: Callable[[], Any], backward: bool) -> float:
    """CPU milliseconds of a call, and its backward."""
    with torch.set_grad_enabled(backward):
        begun = time.process_time()
        made = call()
        if backward:
            outputs = made if isinstance(made, tuple) else (made,)
            torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])
        return (time.process_time() - begun) * 1e3


def measure(dtype: str, causal: bool, rounds: int, until: float, record: Record) -> None:
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
        row: dict[str, Any] = {"dtype": dtype, "causal": causal, "name": name}
        for word, backward in (("forward", False), ("both", True)):
            row |= {f"{word}_ms": least[backward][name], f"{word}_ratio": least[backward][name] / least[backward]["sdpa"]}
        slow = [f"{word} {row[word + '_ratio']:.2f}" for word in ("forward", "both") if row[f"{word}_ratio"] > MOST]
        record.add({**row, "failure": "; ".join(filter(None, [failures.get(name, ""), *slow]))})
        print(*(f"{value:.2f}" if isinstance(value, float) else value for value in record.rows[-1].values()), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=["bf16", "fp16", "fp32"], default=["bf16", "fp16", "fp32"])
    parser.add_argument("--rounds", type=at_least_one, default=15)
    options(parser, "bench-output/cpu.csv", 240)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    record = Record(chosen.output, chosen.budget, machine(torch.device("cpu"), chosen.commit))
    for (dtype, causal), until in record.parts([(dtype, causal) for dtype in chosen.dtype for causal in (False, True)]):
        with record.attempt(dtype=dtype, causal=causal):
            measure(dtype, causal, chosen.rounds, until, record)
    return record.end()


if __name__ == "__main__":
    sys.exit(main())
