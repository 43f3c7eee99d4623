"""Host time of one eager call, (1, 128, 8, 64) bf16, beside SDPA's flash backend: calls are queued, not waited for.

With --ops that of calls of `flashtile.ops`, eager and under torch.compile; with --cross backwards of the cross attention that
the suite cudnn-cross times, beside SDPA's cuDNN backend, in the same process and with what the GPU takes.

python benchmarks/host.py [--ops | --cross] [--budget SECONDS] [--output benchmarks/results/host.csv] [--commit HASH]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import flashtile
from benchmarks.experiment import Experiment, main_of
from benchmarks.hopper_backward import draw
from benchmarks.record import Record
from flashtile import ops
from flashtile.bench.cases import suite_named
from flashtile.problem.attention import AttentionProblem
from flashtile.reference.attention import attention_reference

SHAPE = (1, 128, 8, 64)
CALLS, ROUNDS, WARM_CALLS = 200, 15, 100
WHAT = ("forward", "forward+backward")
CROSS = suite_named("cudnn-cross").cases[:2]  # backwards of which the host takes longer than the GPU
Call = Callable[[], object]


def host_us(call: Callable[[], object], waits: bool = False, calls: int | None = None) -> float:
    """Microseconds per call, a burst short enough not to fill the launch queue; if it `waits`, with what the GPU takes."""
    torch.cuda.synchronize()
    calls = calls or CALLS
    start = time.perf_counter()
    for _ in range(calls):
        call()
    if waits:
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / calls * 1e6


def check(name: str, made: torch.Tensor, exact: torch.Tensor) -> None:
    """Raise ArithmeticError unless a provider's result is right."""
    error = ((made.double() - exact).norm() / exact.norm()).item()
    if not error < 1e-2:
        raise ArithmeticError(f"{name} is wrong: {error}")


def providers(device: torch.device) -> dict[str, tuple[Call, Call]]:
    """By name: a forward, and a forward with its backward."""
    q, k, v = (torch.randn(SHAPE, device=device, dtype=torch.bfloat16) for _ in range(3))
    qt, kt, vt = (t.transpose(1, 2) for t in (q, k, v))
    qg, kg, vg = (t.detach().clone().requires_grad_() for t in (q, k, v))
    qs, ks, vs = (t.transpose(1, 2) for t in (qg, kg, vg))
    dout, douts = torch.randn_like(q), torch.randn_like(qt)
    exact = attention_reference(q.double(), k.double(), v.double(), causal=True)[0]
    check("flashtile", flashtile.attention(q, k, v, causal=True), exact)
    check("sdpa/flash", F.scaled_dot_product_attention(qt, kt, vt, is_causal=True).transpose(1, 2), exact)
    return {
        "flashtile": (
            lambda: flashtile.attention(q, k, v, causal=True),
            lambda: torch.autograd.grad(flashtile.attention(qg, kg, vg, causal=True), (qg, kg, vg), dout),
        ),
        "sdpa/flash": (
            lambda: F.scaled_dot_product_attention(qt, kt, vt, is_causal=True),
            lambda: torch.autograd.grad(F.scaled_dot_product_attention(qs, ks, vs, is_causal=True), (qg, kg, vg), douts),
        ),
    }


def cross_backwards(problem: AttentionProblem, device: torch.device) -> dict[str, Call]:
    """By name: a backward, of a forward that is done."""
    drawn = draw(problem, device)
    leaves, dout = [drawn[name].requires_grad_() for name in "qkv"], drawn["dout"]
    theirs = [t.detach().transpose(1, 2).requires_grad_() for t in leaves]
    out, out_of_theirs = flashtile.attention(*leaves), F.scaled_dot_product_attention(*theirs)
    calls: dict[str, Call] = {
        "flashtile": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
        "sdpa/cudnn": lambda: torch.autograd.grad(out_of_theirs, theirs, dout.transpose(1, 2), retain_graph=True),
    }
    exact = [t.detach().double().requires_grad_() for t in leaves]
    truth = torch.autograd.grad(attention_reference(*exact)[0], exact, dout.double())
    for name, call in calls.items():
        for made, right in zip(cast(tuple[torch.Tensor, ...], call()), truth, strict=True):
            check(name, made if name == "flashtile" else made.transpose(1, 2), right)
    return calls


def ops_providers(device: torch.device) -> dict[str, tuple[Call, Call]]:
    """By name: a forward, and a forward with its backward."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)

    x, weight, bias, q, k, logits = normal(64, 256), normal(256), normal(256), normal(*SHAPE), normal(*SHAPE), normal(64, 256)
    angles, labels = torch.randn(SHAPE[1], SHAPE[3] // 2, device=device), torch.arange(64, device=device)
    calls: dict[str, tuple[Callable[..., object], tuple[torch.Tensor, ...]]] = {
        "layer_norm": (ops.layer_norm, (x, weight, bias)),
        "rms_norm": (ops.rms_norm, (x, weight)),
        "rotary": (lambda q, k: ops.rotary(q, k, angles, angles), (q, k)),
        "cross_entropy": (lambda logits: ops.cross_entropy(logits, labels), (logits,)),
        "softmax": (ops.softmax, (x,)),
    }
    found: dict[str, tuple[Call, Call]] = {}
    for name, (function, leaves) in calls.items():
        for how, call in (("eager", function), ("compiled", torch.compile(function, fullgraph=True, dynamic=False))):
            found[f"{name}/{how}"] = pair(call, leaves)
    return found


def pair(call: Callable[..., object], leaves: tuple[torch.Tensor, ...]) -> tuple[Call, Call]:
    """The forward of a call without gradients, and with its backward."""
    fixed = [t.detach() for t in leaves]
    made = call(*leaves)
    grads = [torch.ones_like(t) for t in (made if isinstance(made, tuple) else (made,))]

    def both() -> object:
        made = call(*leaves)
        return torch.autograd.grad(made if isinstance(made, tuple) else (made,), leaves, grads)

    return lambda: call(*fixed), both


def calls_of(providers: dict[str, tuple[Call, Call]]) -> dict[tuple[str, str], Call]:
    """The calls by provider and by what they do."""
    return {(name, what): call for name, pair in providers.items() for what, call in zip(WHAT, pair, strict=True)}


def cross_calls(device: torch.device) -> dict[tuple[str, str], Call]:
    """The same of `cross_backwards`."""
    found: dict[tuple[str, str], Call] = {}
    for problem in CROSS:
        what = f"backward of batch {problem.batch}"
        found |= {(name, what): call for name, call in cross_backwards(problem, device).items()}
    return found


class Host(Experiment[str]):
    """The one cell is a set of calls, all in one rotation."""

    output, budget_s = "benchmarks/results/host.csv", 60

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        others = parser.add_mutually_exclusive_group()
        others.add_argument("--ops", action="store_true", help="calls of flashtile.ops in the place of attention")
        others.add_argument("--cross", action="store_true", help="backwards of cross attention, beside cuDNN's")

    def about(self) -> dict[str, int]:
        return {"calls": CALLS, "rounds": ROUNDS}

    def cells(self) -> list[str]:
        return ["cross" if self.chosen.cross else "ops" if self.chosen.ops else "attention"]

    def place(self, cell: str) -> dict[str, str]:
        return {"provider": "all"}

    def measure(self, cell: str, record: Record, until: float) -> None:
        crosses, device = cell == "cross", self.device()
        peer = "sdpa/cudnn" if crosses else "sdpa/flash"
        times: dict[tuple[str, str], list[float]] = {}
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if crosses else SDPBackend.FLASH_ATTENTION):
            begun = time.monotonic()
            named = cross_calls(device) if crosses else calls_of((ops_providers if cell == "ops" else providers)(device))
            for call in named.values():
                for _ in range(WARM_CALLS):
                    call()
            torch.cuda.synchronize()
            print(f"compiled and warmed up in {time.monotonic() - begun:.0f} s", flush=True)
            for turn in range(ROUNDS):
                if turn and record.left() < 0:
                    record.leave(f"rounds {turn + 1} to {ROUNDS}")
                    break
                for key in list(named) if turn % 2 == 0 else list(reversed(named)):
                    times.setdefault(key, []).append(host_us(named[key], crosses))
        for (name, what), taken in times.items():
            middle, beside = statistics.median(taken), times.get((peer, what))
            ratio = f", {middle / statistics.median(beside):.2f} x {peer}'s" if beside else ""
            print(f"{name} {what} {middle:.2f} us (least {min(taken):.2f}){ratio}", flush=True)
            record.add(dict(provider=name, what=what, host_us=round(middle, 2), least_us=round(min(taken), 2)))


def main() -> int:
    return main_of(Host)


if __name__ == "__main__":
    sys.exit(main())
