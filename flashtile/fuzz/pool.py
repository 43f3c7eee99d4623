"""Processes that compile and judge variants side by side, on all cores and all GPUs.

What one of them compiles Triton keeps on disk for the others. A process that dies, hangs or loses its GPU context takes the
case that it was at with it, which is a failure, and no other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashtile.fuzz.planned import Unmet

SHRINKING_S = 60.0
SILENT_S = 420.0  # after which a process hangs


@dataclass(frozen=True)
class Order:
    """What a process is to do. setup: MODULE:FUNCTION that is called first. means: the name of one of draw.MEANS."""

    seed: int
    means: str
    setup: str = ""
    without: tuple[str, ...] = ()
    shrinking_s: float = SHRINKING_S
    cases: int | None = None  # of a variant, in the place of the means' own number; 0: of those that bring a kernel


@dataclass(frozen=True)
class Event:
    """What a process tells. kind: "begun", "done" (of a case), "failed", or "variant" (is done)."""

    kind: str
    case: str = ""
    status: str = ""
    text: str = ""
    ratio: float = 0.0
    kernels: frozenset[str] = frozenset()
    shrunk: str = ""
    shrunk_text: str = ""


class Worker:
    """A process, and the case it is at. number: of the process; on a machine of several GPUs it says which one is used."""

    def __init__(self, order: Order, number: int):
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(order, number, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.at, self.heard = "", time.monotonic()

    def take(self, number: int, backend: str) -> None:
        self.heard = time.monotonic()
        self.pipe.send((number, backend))

    def tell(self) -> Event:
        """What the process says; its end is a failure of the case it was at."""
        self.heard = time.monotonic()
        try:
            event: Event = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(5.0)
            return self.ended(f"its process ended with {self.process.exitcode}")
        self.at = event.case if event.kind == "begun" else "" if event.kind in ("done", "variant") else self.at
        return event

    def ended(self, text: str) -> Event:
        return Event("failed", self.at, "wrong", text, float("inf"))

    def stop(self) -> None:
        self.process.kill()
        self.process.join(5.0)
        self.pipe.close()


def in_processes(order: Order, variants: Iterator[tuple[int, str]], ends: float, workers: int) -> Iterator[Event]:
    """What becomes of the variants, (number, backend), until time.monotonic is at `ends`."""
    os.environ |= {"OMP_NUM_THREADS": "1"}
    busy: list[Worker] = []
    left, numbers = True, count()

    def give(worker: Worker) -> bool:
        nonlocal left
        asked = next(variants, None) if left and time.monotonic() < ends else None
        left = left and asked is not None
        if asked is None:
            return False
        worker.take(*asked)
        return True

    try:
        while True:
            while left and len(busy) < workers:
                worker = Worker(order, next(numbers))
                if not give(worker):
                    worker.stop()
                    break
                busy.append(worker)
            if not busy or time.monotonic() > ends:
                return
            ready = wait([worker.pipe for worker in busy], min(max(0.0, ends - time.monotonic()), 1.0))
            if not ready:
                yield Event("waiting")
            for worker in list(busy):
                lost = False
                if worker.pipe in ready:
                    event = worker.tell()
                    yield event
                    lost = event.kind == "failed" and event.text.startswith("its process")
                    if event.kind == "variant" and not give(worker):
                        lost = True
                elif time.monotonic() - worker.heard > SILENT_S:
                    yield worker.ended(f"its process said nothing for {SILENT_S:.0f} s")
                    lost = True
                if lost:
                    worker.stop()
                    busy.remove(worker)
    finally:
        for worker in busy:
            worker.stop()


def serve(order: Order, process: int, pipe: Connection) -> None:
    """The process: judges variants until there is nobody to ask, or no GPU context to work with."""
    prepare(order.setup, process)
    unmet = first_met() if order.cases == 0 else None
    while True:
        try:
            number, backend = pipe.recv()
        except EOFError:
            return
        judge(order, number, backend, pipe.send, unmet)


def first_met() -> Unmet:
    """What remembers the kernels that this process has had on its GPU."""
    from flashtile.fuzz.check import place
    from flashtile.fuzz.planned import Unmet
    from flashtile.torch.execute.bound import device_of

    here = place("")
    return Unmet(device_of(here), here)


def prepare(setup: str, process: int = 0) -> None:
    """What a process needs before its first case. Processes take the GPUs in turn."""
    import warnings

    import torch

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if torch.cuda.device_count() > 1:
        torch.cuda.set_device(process % torch.cuda.device_count())
    if setup:
        module, _, function = setup.partition(":")
        getattr(import_module(module), function)()


def judge(order: Order, number: int, backend: str, tell: Callable[[Event], Any], unmet: Unmet | None = None) -> None:
    """Every case of a variant; with `unmet` those alone that bring a kernel."""
    from flashtile.fuzz import draw
    from flashtile.fuzz.check import check, forget, is_lost, place, settled
    from flashtile.fuzz.shrink import shrink
    from flashtile.torch.execute.bound import device_of

    device = place(backend)
    means = draw.MEANS[order.means]
    if order.cases:
        means = replace(means, cases=order.cases)
    given = draw.variant(order.seed, number, backend, means)
    met: set[str] = set()
    shrunk_before = False
    for case in draw.cases(given, None if backend == "cpu" else device_of(device)):
        spelled = case.spell()
        if any(word in spelled for word in order.without) or (unmet is not None and not unmet.brings(case)):
            continue
        tell(Event("begun", spelled))
        try:
            result = settled(case, device)
        except RuntimeError as error:
            if not is_lost(error):
                raise
            tell(Event("failed", spelled, "wrong", f"its process lost the GPU: {str(error)[:200]}", float("inf")))
            raise SystemExit(1) from error
        new = result.kernels - met
        met |= new
        if result.status == "wrong":
            smaller, found = case, result
            if not shrunk_before and order.shrinking_s > 0:
                shrunk_before = True
                smaller, found = shrink(case, result, lambda c: check(c, device), order.shrinking_s)
            tell(Event("failed", spelled, "wrong", result.text, result.ratio, new, smaller.spell(), found.text))
        text = result.text if result.status in ("refused", "close") else ""
        tell(Event("done", spelled, result.status, text, result.ratio, new))
    forget()
    tell(Event("variant"))
