"""Runs suites: compiles ahead, then case after case, within a budget of time."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from flashtile.bench.cases import Suite
from flashtile.bench.contest import Contest, Settings, Who, check_patterns, entrants_of
from flashtile.bench.result import Result, Writer, unique
from flashtile.bench.revision import LIBRARY, checked_out, commit
from flashtile.bench.worker import Worker, WorkerLostError
from flashtile.output import prepare
from flashtile.problem.attention import AttentionProblem

MOST_COMPILERS = 8  # processes that compile ahead; each holds one case and a context of half a GiB on the device
LONGEST_WAIT_S = 1e6  # for an answer: queues know no infinity
LEAST_LEFT_S = 5.0  # with less of the budget left no further case is begun


@dataclass(frozen=True)
class Order:
    """What to run.

    base: a revision to compare with, or a folder that holds one. also: a Python file with further PROVIDERS. commit: the
    hash to write down in the place of what git says.
    """

    suites: tuple[Suite, ...]
    settings: Settings = field(default_factory=Settings)
    budget_s: float = 240.0
    base: str | None = None
    also: Path | None = None
    commit: str | None = None


def run(order: Order, csv: Path, say: Callable[[str], None]) -> list[Result]:
    """All rows, which are also written to `csv` case by case; `say` hears of the progress.

    With `order.base` a second process runs that commit's library under this commit's measuring code. Both take part
    in one rotation, so "base/..." and "flashtile/..." alternate burst by burst on the same case.
    """
    started = time.monotonic()
    crashes, results = Counter[Who](), list[Result]()
    prepare(csv)
    log = csv.with_suffix(".log")
    with ExitStack() as stack:
        stack.callback(_drop_empty, log)
        workers = [Worker(LIBRARY, log, order.also)]
        if order.base is not None:
            workers.append(Worker(stack.enter_context(checked_out(order.base)), log, base=True))
        commits = {worker.base: commit(worker.library) for worker in workers}
        commits[False] = order.commit or commits[False]
        for worker in workers:
            stack.callback(worker.stop)
            worker.start()
        check_patterns(workers, order.settings)
        writer = Writer(csv)
        facts = workers[0].greeting["facts"] | {"date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        if workers[0].greeting["kind"] == "cpu":
            say("No GPU here: the CPU's providers run what is small enough, and everything else is refused with its reason.")
        if not commits[False]:
            say("No git here: the CSV's column `commit` stays empty unless --commit HASH says what is measured.")
        cases = [(suite.name, problem) for suite in order.suites for problem in suite.cases]
        compile_ahead([problem for _, problem in cases], workers, order.settings, order.budget_s / 2, say)
        for index, (suite, problem) in enumerate(cases):
            contest = Contest(suite, problem, workers, order.settings, crashes)
            left = order.budget_s - (time.monotonic() - started)
            if left < LEAST_LEFT_S and index:
                contest.skip(f"the budget of {order.budget_s:.0f} s was used up")
            else:
                end = time.monotonic() + left / (len(cases) - index)
                contest.run(lambda end=end: time.monotonic() < end)
            rows = contest.results(facts, commits)
            writer.add(rows)
            results += rows
            say(f"[{index + 1}/{len(cases)}] {suite} {problem.spell()}: {_headline(rows)}")
    return results


def compile_ahead(
    cases: Sequence[AttentionProblem], workers: Sequence[Worker], settings: Settings, limit_s: float, say: Callable[[str], None]
) -> None:
    """Fill the compilers' caches on disk from several processes; what goes wrong here is told when it is timed."""
    count = min(MOST_COMPILERS, (os.cpu_count() or 1) // 2, len(cases))
    if count < 2 or workers[0].greeting["kind"] == "cpu":
        return
    started = time.monotonic()
    end = started + min(limit_s, LONGEST_WAIT_S)
    backward = "backward" in settings.directions
    jobs = [(worker, problem) for problem in cases for worker in workers]
    compiling = {
        worker: unique(e.provider for e in entrants_of([worker], settings) if e.provider in worker.greeting["compiling"])
        for worker in workers
    }
    helpers: list[Worker] = []
    over = threading.Event()

    def work(share: Sequence[tuple[Worker, AttentionProblem]]) -> None:
        mine: dict[Worker, Worker] = {}
        for worker, problem in share:
            left = end - time.monotonic()
            if over.is_set() or left <= 0:
                return
            if worker not in mine:
                mine[worker] = Worker(worker.library, worker.log, worker.also, worker.base)
                helpers.append(mine[worker])
            with suppress(WorkerLostError):
                if mine[worker].process is None:
                    mine[worker].start()
                spelling, names = problem.spell(), compiling[worker]
                mine[worker].ask("compile", max(left, 1.0), spelling=spelling, backward=backward, names=names)

    say(f"compiling ahead in {count} processes")
    with ThreadPoolExecutor(count) as pool:
        try:
            list(pool.map(work, [jobs[i::count] for i in range(count)]))
        finally:
            over.set()
            for helper in helpers:
                helper.stop()
    say(f"compiled ahead in {time.monotonic() - started:.0f} s")


def in_directory(output: Path, suites: Sequence[str]) -> Path:
    """The CSV to write: `output` itself if it names one, otherwise a new file in that folder."""
    if output.suffix == ".csv":
        return output
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    return output / f"{'_'.join(suites)}-{stamp}.csv"


def _drop_empty(log: Path) -> None:
    if log.exists() and not log.stat().st_size:
        log.unlink()


def _headline(rows: Sequence[Result]) -> str:
    """The fastest of each direction, and who went wrong."""
    parts: list[str] = []
    for direction in dict.fromkeys(row.direction for row in rows):
        timed = [row for row in rows if row.direction == direction and row.tflops is not None]
        if timed:
            speed, provider = max((row.tflops or 0.0, row.provider) for row in timed)
            rate = f"{speed:.3g} TFLOP/s" if speed >= 1 else f"{speed * 1e3:.3g} GFLOP/s"
            parts.append(f"{direction} {rate} ({provider})")
    parts += [
        f"{row.provider} {row.direction} {row.status.upper()}: {row.reason}"
        for row in rows
        if row.status in ("wrong", "failed")
    ]
    skipped = next((row.reason for row in rows if row.status == "skipped"), "")
    return "; ".join([*parts, *([skipped] if skipped else [])]) or next((row.reason for row in rows), "nobody takes part")
