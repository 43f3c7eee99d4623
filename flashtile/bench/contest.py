"""One case: every provider is checked, the right ones are timed in rotation, the others are named with their reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from statistics import median
from typing import Any

from flashtile.bench.cases import CPU_MOST_FLOPS, DIRECTIONS, Direction, field_flops
from flashtile.bench.result import BASE, OWN, Result, Status, describe, speed, unique
from flashtile.bench.rotation import rotate
from flashtile.bench.worker import Worker, WorkerLostError
from flashtile.errors import InvalidProblem
from flashtile.problem.attention import AttentionProblem

MOST_CRASHES = 2  # after that many dead processes, or one hung, a provider is left out of the remaining cases

Who = tuple[str, Direction]


@dataclass(frozen=True)
class Settings:
    """What is asked of every case. `patterns` are shell patterns or parts of providers' names; none means all."""

    directions: tuple[Direction, ...] = DIRECTIONS
    patterns: tuple[str, ...] = ()
    rounds: int = 5


@dataclass(frozen=True)
class Entrant:
    """One provider in one direction, and the process that runs it."""

    worker: Worker
    provider: str  # the name it has in its process
    label: str  # the name it has in the results
    direction: Direction


@dataclass
class Verdict:
    """What became of an entrant."""

    status: Status
    reason: str = ""
    error: float | None = None
    times: list[float] = field(default_factory=list[float])
    host_us: float | None = None


def wanted(label: str, patterns: Sequence[str]) -> bool:
    """Whether a provider is meant by any of the patterns: "flex", "sdpa", "flashtile/*"."""
    return not patterns or any(fnmatchcase(label, p) or p in label.split("/") or label == p for p in patterns)


def label_of(worker: Worker, provider: str) -> str:
    """The name that a provider of this process has in the results."""
    return BASE + provider.removeprefix(OWN) if worker.base else provider


def entrants_of(workers: Sequence[Worker], settings: Settings) -> list[Entrant]:
    """Everybody who may take part: direction by direction, each in the order of the providers."""
    return [
        Entrant(worker, provider, label_of(worker, provider), direction)
        for direction in DIRECTIONS
        if direction in settings.directions
        for worker in workers
        for provider in worker.greeting["providers"]
        if (not worker.base or provider.startswith(OWN)) and wanted(label_of(worker, provider), settings.patterns)
    ]


def check_patterns(workers: Sequence[Worker], settings: Settings) -> None:
    """Raise InvalidProblem for a pattern that means nobody."""
    labels = unique(entrant.label for entrant in entrants_of(workers, replace(settings, patterns=())))
    for pattern in settings.patterns:
        if not any(wanted(label, (pattern,)) for label in labels):
            raise InvalidProblem(f"provider is {pattern!r}; it must match one of {', '.join(labels)}.")


class Contest:
    """Judges and times the entrants of one case. `crashes` counts dead processes by label and direction, across cases."""

    def __init__(
        self, suite: str, problem: AttentionProblem, workers: Sequence[Worker], settings: Settings, crashes: Counter[Who]
    ):
        self.suite, self.problem, self.workers, self.settings, self.crashes = suite, problem, workers, settings, crashes
        self.entrants = entrants_of(workers, settings)
        self.verdicts: dict[Entrant, Verdict] = {}
        self.guesses: dict[Entrant, float] = {}  # milliseconds, as last heard

    def run(self, in_time: Callable[[], bool] = lambda: True) -> None:
        """Check everybody, then time whoever was right. `in_time` says no when rounds should be saved."""
        if self._too_large():
            return
        for worker in self.workers:
            self._open(worker)
        for entrant in self.entrants:
            if entrant not in self.verdicts:
                self._prepare(entrant)
        right = [e for e in self.entrants if self.verdicts[e].status == "ok"]
        times = rotate(right, self.settings.rounds, self._burst, in_time)
        for entrant, found in times.items():
            self.verdicts[entrant].times = found
        for entrant in times:
            if entrant.worker.greeting["kind"] == "cuda" and self.verdicts[entrant].status == "ok":
                reply = self._ask(entrant, "host")
                if reply is not None:
                    self.verdicts[entrant].host_us = reply["us"]
        for worker in self.workers:
            self._close(worker)

    def skip(self, reason: str) -> None:
        """Give every entrant that has no verdict yet the same one: not measured."""
        for entrant in self.entrants:
            self.verdicts.setdefault(entrant, Verdict("skipped", reason))

    def results(self, facts: Mapping[str, Any], commits: dict[bool, str]) -> list[Result]:
        """A row per entrant; `commits` by whether the entrant belongs to the base."""
        rows: list[Result] = []
        for entrant in self.entrants:
            verdict = self.verdicts[entrant]
            numbers: dict[str, Any] = {}
            if verdict.status == "ok":
                ms = median(verdict.times)
                numbers = {"ms": ms, "ms_low": min(verdict.times), "ms_high": max(verdict.times)}
                numbers["tflops"] = speed(self.problem, entrant.direction, ms)
                numbers["host_us" if entrant.direction == "forward" else "host_step_us"] = verdict.host_us
            rows.append(Result(
                **describe(self.suite, self.problem), direction=entrant.direction, provider=entrant.label,
                status=verdict.status, reason=verdict.reason, error=verdict.error,
                commit=commits[entrant.worker.base], **numbers, **facts,
            ))  # fmt: skip
        return rows

    # -- asking, and surviving a dead process -----------------------------------------------------------------------

    def _prepare(self, entrant: Entrant) -> None:
        forward = next((e for e in self.verdicts if e.label == entrant.label and e.direction == "forward"), None)
        if self.crashes[entrant.label, entrant.direction] >= MOST_CRASHES:
            self.verdicts[entrant] = Verdict("failed", "left out: it hung or crashed before")
        elif entrant.direction == "backward" and forward is not None and self.verdicts[forward].status != "ok":
            before = self.verdicts[forward]
            reason = before.reason if before.status == "refused" else f"forward: {before.reason}"
            self.verdicts[entrant] = Verdict(before.status, reason)
        else:
            reply = self._ask(entrant, "prepare")
            if reply is not None:
                self.verdicts[entrant] = Verdict(reply["status"], reply.get("reason", ""), reply.get("error"))

    def _burst(self, entrant: Entrant) -> float | None:
        if self.verdicts[entrant].status != "ok":
            return None
        reply = self._ask(entrant, "burst")
        return None if reply is None else reply["ms"]

    def _ask(self, entrant: Entrant, verb: str) -> dict[str, Any] | None:
        """The reply, or None when the process died of it: the entrant has then failed, and the others have a new process."""
        try:
            slow_s = 0.05 * self.guesses.get(entrant, 0.0)  # 50 calls of an honestly slow provider are no hang
            patience_s = entrant.worker.patience_s[verb] + slow_s
            reply = entrant.worker.ask(verb, patience_s, name=entrant.provider, direction=entrant.direction)
            if "ms" in reply:
                self.guesses[entrant] = reply["ms"]
            return reply
        except WorkerLostError as loss:
            self.crashes[entrant.label, entrant.direction] += MOST_CRASHES if loss.hung else 1
            self.verdicts[entrant] = Verdict("failed", f"{verb}: {loss}")
            self._restore(entrant.worker)
            return None

    def _restore(self, worker: Worker) -> None:
        """A fresh process in which everybody who was right is prepared again."""
        if not self._open(worker):
            return
        for entrant in self.entrants:
            if entrant.worker is worker and entrant in self.verdicts and self.verdicts[entrant].status == "ok":
                reply = self._ask(entrant, "prepare")
                if reply is None:
                    return  # died again: the call that noticed has restored the rest
                if reply["status"] != "ok":
                    self.verdicts[entrant] = Verdict(reply["status"], reply.get("reason", ""), reply.get("error"))

    def _open(self, worker: Worker) -> bool:
        """Whether the process holds the case; if not, everybody in it has failed."""
        try:
            if worker.process is None:
                worker.start()
            worker.ask("open", spelling=self.problem.spell(), backward="backward" in self.settings.directions)
            return True
        except WorkerLostError as loss:
            for entrant in self.entrants:
                if entrant.worker is worker and (entrant not in self.verdicts or self.verdicts[entrant].status == "ok"):
                    self.verdicts[entrant] = Verdict("failed", f"open: {loss}")
            return False

    def _close(self, worker: Worker) -> None:
        with suppress(WorkerLostError):  # the next case starts a new process
            worker.ask("close")

    def _too_large(self) -> bool:
        """Whether the case is refused as a whole, because there is only a CPU."""
        flops = field_flops(self.problem, "forward")
        if self.workers[0].greeting["kind"] != "cpu" or flops <= CPU_MOST_FLOPS:
            return False
        reason = f"{flops * 1e-9:,.0f} GFLOP; on a CPU the limit is {CPU_MOST_FLOPS * 1e-9:.0f}"
        self.verdicts = {entrant: Verdict("refused", reason) for entrant in self.entrants}
        return True
