"""`flashtile fuzz`: is flashtile right here?"""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.util import find_spec
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from flashtile import __version__, dispatch
from flashtile.errors import InvalidProblem
from flashtile.fuzz.case import Case
from flashtile.fuzz.check import place, settled
from flashtile.fuzz.pool import SHRINKING_S, Event, Order, in_processes, prepare
from flashtile.output import prepare as prepare_output
from flashtile.plan.device import cpu_name
from flashtile.triton_glue import language as _triton

SHOWN = 20  # reasons of refusals


@dataclass(frozen=True)
class Request:
    """What is asked of a session. backends: by name, "" for the planner's own choice; none: what this machine has.

    variants: how many, if not as many as the budget allows; cases: of each, or 0: those that bring a kernel, on a GPU.
    without: cases whose line holds one of these words are left out.
    setup: MODULE:FUNCTION that every process calls first. summary: a file of counts that this session adds to.
    """

    budget_s: float
    seed: int = 0
    backends: tuple[str, ...] = ()
    jobs: int | None = None
    variants: int | None = None
    cases: int | None = None
    without: tuple[str, ...] = ()
    setup: str = ""
    shrinking_s: float = SHRINKING_S
    summary: Path | None = None

    def __post_init__(self) -> None:
        for name in self.backends:
            check_backend(name)
        check_setup(self.setup)
        if not self.budget_s > 0:
            raise InvalidProblem(f"budget is {self.budget_s}; it must be above 0 seconds.")
        if self.cases == 0 and ("cpu" in self.backends_here or means_of(self.backends_here[0]) != "gpu"):
            raise InvalidProblem("cases is 0 where nothing is compiled; it must be 1 or more there, or None.")

    @property
    def backends_here(self) -> tuple[str, ...]:
        if self.backends:
            return self.backends
        if torch.cuda.is_available() and not _triton.INTERPRETED:
            hopper = torch.cuda.get_device_capability() == (9, 0) and torch.version.hip is None
            return ("triton", "hopper", "triton", "") if hopper else ("triton", "")
        return ("triton",) if _triton.INTERPRETED else ("cpu",)


def check_backend(name: str) -> None:
    """Raise InvalidProblem for what no backend is called; "" is the planner's choice."""
    known = [backend.name for backend in dispatch.BACKENDS]
    if name and name not in known:
        raise InvalidProblem(f"backend is {name!r}; it must be one of {', '.join(known)}.")


def check_setup(setup: str) -> None:
    """Raise InvalidProblem for what no process could import."""
    module, _, function = setup.partition(":")
    if not setup:
        return
    try:
        there = bool(function) and find_spec(module) is not None
    except (ImportError, ValueError):
        there = False
    if not there:
        raise InvalidProblem(f"setup is {setup!r}; it must be MODULE:FUNCTION, of a module that Python finds here.")


@dataclass
class Counts:
    """What a session found. Reasons are without numbers."""

    status: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    kernels: set[str] = field(default_factory=set)
    variants: int = 0
    close: list[tuple[float, str, str]] = field(default_factory=list)
    wrong: list[dict[str, Any]] = field(default_factory=list)

    @property
    def cases(self) -> int:
        return sum(self.status.values())

    def line(self) -> str:
        """How far a session is."""
        refused, wrong = self.status["refused"], len(self.wrong)
        return f"{self.cases} cases, {len(self.kernels)} kernels, {refused} refused, {wrong} wrong"

    def add(self, event: Event) -> None:
        self.kernels |= event.kernels
        if event.kind == "variant":
            self.variants += 1
        if event.kind != "done":
            return
        self.status[event.status] += 1
        if event.status == "refused":
            self.reasons[re.sub(r"\d+", "N", event.text)[:160]] += 1
        if event.status == "close":
            self.close.append((event.ratio, event.case, event.text))

    @property
    def judged(self) -> int:
        """Cases that ran."""
        return self.cases - self.status["refused"]

    def session(self, request: Request, seconds: float) -> dict[str, Any]:
        """What a file of counts has of a session. A kernel is named by Triton's hash of its source and options."""
        return {
            "machine": machine(), "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "version": __version__,
            "seed": request.seed, "backends": list(request.backends_here), "seconds": round(seconds), "cases": self.cases,
            "variants": self.variants, "status": dict(self.status), "wrong": self.wrong,
            "close": [case for _, case, _ in self.close], "kernels": sorted(self.kernels),
        }  # fmt: skip


def fuzz(request: Request, output: Path, console: Console) -> Counts:
    """Draw, run and judge cases until the budget is spent. Failures are printed and written to `output` as they are found."""
    before = sessions_of(request.summary)
    prepare_output(*filter(None, (output, request.summary)))
    backends, counts, begun = request.backends_here, Counts(), time.monotonic()
    order = Order(request.seed, means_of(backends[0]), request.setup, request.without, request.shrinking_s, request.cases)
    numbers = islice(count(), request.variants)
    variants: Iterator[tuple[int, str]] = ((number, backends[number % len(backends)]) for number in numbers)
    jobs = request.jobs or len(os.sched_getaffinity(0))
    console.print(Text(f"{machine()}; backends {', '.join(name or 'chosen' for name in backends)}; {jobs} processes"))
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, redirect_stdout=False) as progress:
        bar = progress.add_task("", total=request.budget_s)
        for event in in_processes(order, variants, begun + request.budget_s, jobs):
            counts.add(event)
            elapsed = time.monotonic() - begun
            progress.update(bar, completed=elapsed, description=counts.line())
            if event.kind == "failed":
                keep(event, counts, output, progress.console)
            if event.kind == "variant" and request.summary is not None:
                write(request.summary, [*before, counts.session(request, elapsed)])
            if not counts.cases and len(counts.wrong) >= jobs:  # no process can begin
                break
    seconds = time.monotonic() - begun
    summarize(counts, seconds, console)
    if request.summary is not None:
        sessions = [*before, counts.session(request, seconds)]
        write(request.summary, sessions)
        console.print(Text(f"{request.summary}: {total(sessions)}"), soft_wrap=True)
    return counts


def sessions_of(summary: Path | None) -> list[dict[str, Any]]:
    """The sessions that a file of counts holds. Raises InvalidProblem for another file."""
    if summary is None or not summary.exists():
        return []
    try:
        sessions = json.loads(summary.read_text())["sessions"]
        total(sessions)
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidProblem(f"summary is '{summary}', which holds no counts of `flashtile fuzz`: {error}.") from error
    return sessions


def write(summary: Path, sessions: list[dict[str, Any]]) -> None:
    """Replace a file of counts."""
    told = {"total": total(sessions), "sessions": sessions}
    beside = summary.with_name(f"{summary.name}.new")
    beside.write_text(json.dumps(told, indent=1) + "\n")
    beside.replace(summary)


def total(sessions: Sequence[dict[str, Any]]) -> str:
    """All sessions of a file of counts, in one line; kernels that several of them ran count once."""
    cases, close, wrong = (
        sum(map(size, (s[name] for s in sessions))) for name, size in (("cases", int), ("close", len), ("wrong", len))
    )
    kernels = {kernel for s in sessions for kernel in s["kernels"]}
    return f"{cases} cases, {len(kernels)} distinct kernels, {close} close, {wrong} wrong in {len(sessions)} sessions"


def means_of(backend: str) -> str:
    if backend == "cpu":
        return "cpu"
    if _triton.INTERPRETED:
        return "interpreted"
    return "gpu" if torch.cuda.is_available() else "emulated"


def machine() -> str:
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    return f"{where}, torch {torch.__version__}, triton {_triton.VERSION}{' interpreted' if _triton.INTERPRETED else ''}"


def keep(event: Event, counts: Counts, output: Path, console: Console) -> None:
    """Print a failure and write it down."""
    if not event.case:
        console.print(Text(f"LOST between cases: {event.text}"))
        counts.wrong.append({"case": "", "text": event.text})
        return
    found = {
        "case": event.shrunk or event.case, "text": (event.shrunk_text or event.text)[:600], "of": event.case,
        "of_text": event.text[:600], "ratio": event.ratio if event.ratio < float("inf") else "inf", "machine": machine(),
    }  # fmt: skip
    counts.wrong.append(found)
    with output.open("a") as file:
        file.write(json.dumps(found) + "\n")
    console.print(Text(f'WRONG flashtile fuzz --repeat "{found["case"]}"\n      {found["text"][:300]}'), soft_wrap=True)


def summarize(counts: Counts, seconds: float, console: Console) -> None:
    """Print the counts."""

    def say(line: str) -> None:
        console.print(Text(line), soft_wrap=True)

    say(
        f"{counts.cases} cases of {counts.variants} variants, {len(counts.kernels)} distinct kernels, in {seconds:.0f} s "
        f"({counts.cases / max(seconds, 1e-9):.1f} a second)"
    )
    say(", ".join(f"{number} {status}" for status, number in sorted(counts.status.items())) or "no case was done")
    for reason, number in counts.reasons.most_common(SHOWN):
        say(f"  refused {number}: {reason}")
    for ratio, case, text in sorted(counts.close, reverse=True)[:5]:
        say(f'  close, {ratio:.2f} times what is allowed, right with other seeds: --repeat "{case}": {text[:160]}')
    say(f"{len(counts.wrong)} wrong")
    if not counts.judged:
        say("NOTHING was judged: give more seconds, --budget, or other backends")


def repeat(lines: Sequence[str], console: Console, backend: str = "", setup: str = "") -> int:
    """Run single cases here and say what becomes of each; how many are wrong. backend: in the place of the cases' own."""
    check_backend(backend)
    check_setup(setup)
    prepare(setup)
    wrong = 0
    for line in lines:
        case = Case.parse(line)
        case = case.smaller(backend=backend) if backend else case
        result = settled(case, place(case.backend))
        wrong += result.status == "wrong"
        console.print(Text(f"{result.status.upper()} {case.spell()}\n      {result.text}".rstrip()), soft_wrap=True)
    return wrong


def lines_of(file: Path) -> list[str]:
    """The cases of a file that a session wrote."""
    try:
        return [json.loads(line)["case"] for line in file.read_text().splitlines() if line.strip()]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidProblem(f"{file} holds no failures of `flashtile fuzz`: {error}.") from error
