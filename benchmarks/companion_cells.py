"""How `companions.py` checks and times: cells of an op, a shape and a direction, in each of which providers meet."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import Any

import torch

from benchmarks.record import Record, is_lost
from flashtile.bench.rotation import rotate

BF16 = torch.bfloat16
FLUSH_BYTES = 2**30  # larger than any L2, and long enough to clear (0.35 ms) that the host is ahead of the device
ROUNDS, MOST_CALLS, BURST_MS = 4, 20, 12.0
WARM_CALLS, HOST_CALLS = 10, 10
TOLERANCE = 1.5e-2  # relative error norm against float32; bf16 rounds to 2e-3 of it
Call = Callable[[], Any]


@dataclass
class Entrant:
    """One provider of one cell: a call, and what it made, for the check."""

    call: Call
    made: Callable[[], tuple[torch.Tensor, ...]] | None = None


@dataclass
class Cell:
    """One op, shape and direction; `entrants` and `exact` are made when its turn comes."""

    section: str
    case: str
    direction: str
    entrants: Callable[[], dict[str, Entrant]]
    exact: Callable[[], tuple[torch.Tensor, ...]]
    bytes: float = 0.0
    flops: float = 0.0
    memory: bool = False
    tolerance: float = TOLERANCE


@dataclass
class Session:
    """What all cells share. `until`: the moment of time.monotonic at which the section has to end."""

    device: torch.device
    record: Record
    until: float = float("inf")
    ceilings: dict[str, float] = field(default_factory=dict)
    flush: torch.Tensor | None = None

    def left(self) -> float:
        """Seconds until the section has to end."""
        return min(self.until - time.monotonic(), self.record.left())

    def ms(self, call: Call, calls: int) -> float:
        """Median milliseconds of a call, each after the caches were cleared."""
        if self.flush is None:
            self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        pairs = []
        for _ in range(calls):
            self.flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize(self.device)
        return median(start.elapsed_time(end) for start, end in pairs)

    def run(self, cell: Cell) -> None:
        """Rows of a cell: of every entrant that is right, in rotation; our own that is not is a failed row."""
        place = dict(section=cell.section, case=cell.case, direction=cell.direction)
        found = cell.entrants()
        exact = [t.float() for t in cell.exact()]
        right: dict[str, Call] = {}
        peaks: dict[str, float] = {}
        for name, entrant in found.items():
            try:
                worst = 0.0
                for got, true in zip((entrant.made or entrant.call)(), exact, strict=True):
                    worst = max(worst, distance(got, true))
                if not worst < cell.tolerance:
                    raise ArithmeticError(f"off by {worst:.2e}")
                entrant.call(), entrant.call()
                peaks[name] = peak_mb(entrant.call, self.device) if cell.memory else 0.0
            except Exception as error:  # a peer that cannot run this is out; ours fails the run
                if name.startswith("flashtile") or is_lost(error):
                    self.record.fail(error, **place, provider=name)
                else:
                    print("OUT", *place.values(), name, f"{type(error).__name__}: {error}"[:300], flush=True)
                continue
            right[name] = entrant.call
        del exact
        for call in right.values():  # the clocks of a card that has waited for a compiler are low, and host code is cold
            self.ms(call, WARM_CALLS)
        counts = {name: max(3, min(MOST_CALLS, int(BURST_MS / self.ms(call, 2)))) for name, call in right.items()}
        times = rotate(list(right), ROUNDS, lambda name: self.ms(right[name], counts[name]), lambda: self.left() > 0)
        for name, taken in times.items():
            ms = median(taken)
            row: dict[str, Any] = dict(
                **place, provider=name, ms=round(ms, 4), least_ms=round(min(taken), 4), most_ms=round(max(taken), 4),
                gbps="", of_copy="", of_read="", tflops="", peak_mb="", host_us=round(self.host_us(right[name])),
            )  # fmt: skip
            if cell.bytes:
                gbps = cell.bytes / ms * 1e-6
                row |= dict(gbps=round(gbps), of_copy=round(gbps / self.ceilings["copy"], 3))
                row |= dict(of_read=round(gbps / self.ceilings["read"], 3))
            if cell.flops:
                row |= dict(tflops=round(cell.flops / ms * 1e-9, 1))
            if cell.memory:
                row |= dict(peak_mb=round(peaks[name]))
            self.record.add(row)
            rate = f"{row['gbps']:>5} GB/s {row['of_copy']:.3f} of copy" if cell.bytes else f"{row['tflops']} TFLOP/s"
            memory = f"  peak {row['peak_mb']} MB" if cell.memory else ""
            print(f"{cell.section:9s}{cell.case:44s}{cell.direction:8s}{name:14s}{ms:9.4f} ms {rate}{memory}", flush=True)

    def host_us(self, call: Call) -> float:
        """Microseconds until a call returns: one that takes longer than clearing the caches is timed by the host."""
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        taken = time.perf_counter() - start
        torch.cuda.synchronize(self.device)
        return taken / HOST_CALLS * 1e6

    def measure_ceilings(self) -> None:
        """Best rate of a 1 GiB copy and of a 1 GiB read, torch's own."""
        source = torch.randn(FLUSH_BYTES // 2, dtype=BF16, device=self.device)
        target = torch.empty_like(source)
        copy = min(self.ms(lambda: target.copy_(source), 10) for _ in range(3))
        read = min(self.ms(lambda: source.view(torch.int32).amax(), 10) for _ in range(3))
        self.ceilings = {"copy": 2 * FLUSH_BYTES / copy * 1e-6, "read": FLUSH_BYTES * max(1 / read, 2 / copy) * 1e-6}
        for name, gbps in self.ceilings.items():
            self.record.add(dict(section="ceiling", case="1 GiB", direction=name, provider="torch", gbps=round(gbps)))
            print(f"ceiling {name} {gbps:.0f} GB/s", flush=True)


def distance(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative error norm; infinite where anything is not finite."""
    if got.shape != exact.shape:
        return float("inf")
    off = ((got.float() - exact).norm() / exact.norm().clamp(min=1e-20)).item()
    return off if off == off else float("inf")


def peak_mb(call: Call, device: torch.device) -> float:
    """Megabytes allocated at most during a call, beyond what was before."""
    gc.collect()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    made = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    del made
    return (peak - before) / 2**20


def normal(*shape: int, grad: bool = False, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda", dtype=BF16) * scale).requires_grad_(grad)


def both(
    section: str, case: str, functions: dict[str, Callable[..., Any]], inputs: tuple[torch.Tensor, ...],
    sizes: tuple[float, float], exact: Callable[..., Any],
) -> Iterator[Cell]:  # fmt: skip
    """A forward cell and a backward cell of functions of the same inputs, that `exact` computes in float32."""
    leaves = [t for t in inputs if t.requires_grad]

    def outputs(function: Callable[..., Any], given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        made = function(*given)
        return made if isinstance(made, tuple) else (made,)

    @cache
    def douts() -> list[torch.Tensor]:
        return [normal(*t.shape) for t in outputs(functions["flashtile"], inputs)]

    def forwards() -> dict[str, Entrant]:
        def entrant(function: Callable[..., Any]) -> Entrant:
            return Entrant(lambda: outputs(function, tuple(t.detach() for t in inputs)))

        return {name: entrant(function) for name, function in functions.items()}

    def backwards() -> dict[str, Entrant]:
        def entrant(function: Callable[..., Any]) -> Entrant:
            made = outputs(function, inputs)
            return Entrant(lambda: torch.autograd.grad(made, leaves, douts(), retain_graph=True))

        found = {}
        for name, function in functions.items():
            try:
                found[name] = entrant(function)
            except Exception as error:
                if name.startswith("flashtile"):
                    raise
                print(f"OUT {section} {case} bwd {name}: {error}"[:300], flush=True)
        return found

    def wide(grad: bool) -> tuple[torch.Tensor, ...]:
        return tuple(
            t.detach().float().requires_grad_(grad and t.requires_grad) if t.is_floating_point() else t for t in inputs
        )

    def exact_backward() -> tuple[torch.Tensor, ...]:
        given = wide(True)
        made = outputs(exact, given)
        return torch.autograd.grad(made, [t for t in given if t.requires_grad], [d.float() for d in douts()])

    yield Cell(section, case, "fwd", forwards, lambda: outputs(exact, wide(False)), sizes[0])
    yield Cell(section, case, "bwd", backwards, exact_backward, sizes[1])
