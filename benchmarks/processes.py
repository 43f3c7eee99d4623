"""Runs jobs in several processes: to compile on all cores before anything is timed, or to check many cases at once.

What a process compiles, Triton and Inductor keep on disk for the others. A process that dies, hangs or loses its GPU context
takes its own job with it and no other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from benchmarks.record import is_lost

WORKERS = max(1, min(16, os.cpu_count() or 1))
Job = tuple[Any, ...]


@dataclass(frozen=True)
class Failure:
    """What a job raised, or how its process ended."""

    text: str
    fatal: bool = False  # the process can do no more


class Worker:
    """A process, and the job it is at."""

    def __init__(self, function: Callable[..., Any]):
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(function, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.job: Job | None = None

    def take(self, job: Job) -> None:
        self.job = job
        self.pipe.send(job)

    def is_done(self, seconds: float) -> bool:
        """Whether there is an answer within so many seconds."""
        return self.pipe.poll(seconds)

    def answer(self) -> Any:
        """What became of the job; a Failure where the process is no more."""
        self.job = None
        try:
            return self.pipe.recv()
        except EOFError:
            self.process.join(5.0)
            return Failure(f"its process ended with {self.process.exitcode}", True)

    def stop(self) -> None:
        self.process.kill()
        self.process.join(5.0)
        self.pipe.close()


def serve(function: Callable[..., Any], pipe: Connection) -> None:
    """The process: answers jobs until there is nobody to ask, or no GPU context to work with."""
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            made = function(*job)
        except Exception as error:
            made = Failure(f"{type(error).__name__}: {error}"[:500], is_lost(error))
        pipe.send(made)


def in_processes(
    function: Callable[..., Any], jobs: Sequence[Job], ends: float, workers: int = WORKERS, fresh: bool = False
) -> Iterator[tuple[Job, Any]]:
    """Each job with what `function(*job)` returned, or a Failure, in the order in which they are done.

    ends: the moment of time.monotonic after which nothing is waited for: what is not done by then does not come.
    `function` is one that a new process can import. fresh: every job has a process of its own.
    """
    waiting, busy = list(reversed(jobs)), list[Worker]()
    os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}  # the processes are threads enough
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:  # at first, and for one that is no more
                busy.append(Worker(function))
                busy[-1].take(waiting.pop())
            ready = wait([worker.pipe for worker in busy], max(0.0, ends - time.monotonic()))
            if not ready:
                return
            for worker in [w for w in busy if w.pipe in ready]:
                job, made = worker.job, worker.answer()
                assert job is not None
                if waiting and not fresh and not (isinstance(made, Failure) and made.fatal):
                    worker.take(waiting.pop())
                else:
                    worker.stop()
                    busy.remove(worker)
                yield job, made
    finally:
        for worker in busy:
            worker.stop()


def compile_ahead(
    function: Callable[..., Any], jobs: Sequence[Job], left_s: float, share: float = 0.6, workers: int = WORKERS
) -> None:
    """Run jobs for the sake of what they leave in the compilers' caches, in at most this share of the seconds that are left.

    What fails here is said, and fails again, as a row, when it is measured.
    """
    begun, done = time.monotonic(), 0
    for job, made in in_processes(function, jobs, begun + share * max(left_s, 0.0), workers):
        done += 1
        if isinstance(made, Failure):
            print("AHEAD", *job, made.text, flush=True)
    print(f"compiled ahead: {done} of {len(jobs)} jobs in {time.monotonic() - begun:.0f} s", flush=True)
