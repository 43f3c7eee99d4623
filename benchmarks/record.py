"""What the scripts of this folder share: their options, a CSV that grows row by row, and a budget of seconds.

A row is on disk as soon as it is measured, with machine, date and commit. A cell that raises is a row whose column `failure`
says how, and the others go on; cells for which no time is left are named. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

Cell = TypeVar("Cell")
STARTED = time.monotonic()
LOST = ("illegal", "misaligned", "launch failure", "launch timed out", "device-side assert", "hardware stack error")


def options(parser: argparse.ArgumentParser, output: str, budget: float) -> None:
    """The options of every script: --budget, --output, --commit."""
    parser.add_argument("--budget", type=positive, default=budget, help=f"seconds for everything, compilation too; {budget:g}")
    parser.add_argument("--output", type=csv_path, default=Path(output), help=f"the CSV; {output}")
    parser.add_argument("--commit", default="", help="what is measured, in the place of what git says")


def positive(text: str) -> float:
    """An argument above zero."""
    if not float(text) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return float(text)


def at_least_one(text: str) -> int:
    """An argument of at least one."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least one")
    return int(text)


def csv_path(text: str) -> Path:
    """A CSV that can be written: the folder is made, and a folder is no file."""
    path = Path(text)
    if path.suffix != ".csv":
        raise argparse.ArgumentTypeError(f"{text} is not the name of a .csv file")
    return path


def sized(parts: int) -> Callable[[str], str]:
    """An argument like 8x1024: so many positive numbers with x between them."""

    def sizes(text: str) -> str:
        numbers = text.split("x")
        if len(numbers) != parts or not all(n.isdecimal() and int(n) for n in numbers):
            raise argparse.ArgumentTypeError(f"{text} is not {parts} positive numbers with x between them")
        return text

    return sizes


def need_gpu(parser: argparse.ArgumentParser) -> None:
    """End with a usage error where PyTorch sees no GPU."""
    import torch

    if not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU here")


def provenance(given: str) -> dict[str, str]:
    """Date and commit: the one that was given, or git's."""
    from flashtile.bench.revision import LIBRARY, commit

    return {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "commit": given or commit(LIBRARY)}


def machine(device: Any, given: str) -> dict[str, str]:
    """What a measurement through PyTorch ran on."""
    from flashtile.bench.machine import facts

    return {**facts(device), **provenance(given)}


def is_lost(error: BaseException) -> bool:
    """Whether this process's GPU context died of the error."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in LOST)


class Record:
    """A CSV that grows, and what there is time for. Times are seconds."""

    def __init__(self, path: Path, budget_s: float, about: Mapping[str, Any]):
        self.path, self.about, self.budget_s, self.ends = path, dict(about), budget_s, STARTED + budget_s
        self.rows: list[dict[str, Any]] = []
        self.missing: list[str] = []
        self.columns: list[str] = []
        self.lost = False
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    def left(self) -> float:
        """Seconds of the budget that are left; none once the GPU context is lost."""
        return float("-inf") if self.lost else self.ends - time.monotonic()

    def add(self, row: Mapping[str, Any]) -> None:
        """Write a row, whose columns may differ from the others'."""
        self.put(len(self.rows), [row])

    def put(self, first: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows in the place of those from the `first` on: what was measured first, once more is known."""
        anew, self.rows[first:] = first < len(self.rows), map(dict, rows)
        new = list(dict.fromkeys(name for row in rows for name in row if name not in self.columns))
        self.columns += new
        with self.path.open("w" if new or anew else "a", newline="") as file:
            writer = csv.DictWriter(file, [*self.columns, *self.about], restval="")
            if new or anew:
                writer.writeheader()
            writer.writerows({**r, **self.about} for r in self.rows[0 if new or anew else first :])

    def leave(self, cell: object) -> None:
        """Note a cell for which there is no time."""
        self.missing.append(str(cell))

    def count_missing(self, kind: Callable[[str], str] = str) -> None:
        """Name kinds of what is missing, with their number, in the place of each."""
        self.missing = [f"{n} x {name}" for name, n in Counter(map(kind, self.missing)).items()]

    def parts(
        self, cells: Sequence[Cell], name: Callable[[Cell], object] = str, reserve_s: float = 0.0
    ) -> Iterator[tuple[Cell, float]]:
        """Each cell, with the moment of time.monotonic at which its share of what is left by now ends.

        Once no more than `reserve_s` is left, cells are not begun, but noted as missing.
        """
        for i, cell in enumerate(cells):
            if self.left() > reserve_s:
                yield cell, time.monotonic() + (self.left() - reserve_s) / (len(cells) - i)
            else:
                self.leave(name(cell))

    @contextmanager
    def attempt(self, **row: Any) -> Generator[None, None, None]:
        """Make a failed row of what is raised inside."""
        try:
            yield
        except Exception as error:
            self.fail(error, **row)

    def fail(self, error: BaseException | str, **row: Any) -> None:
        """A row that says what went wrong."""
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        text = " ".join(text.split())[:500]
        self.lost |= isinstance(error, BaseException) and is_lost(error)
        print("FAILED", *row.values(), text, "(the GPU context is lost)" if self.lost else "", flush=True)
        self.add({**row, "failure": text})

    def end(self) -> int:
        """The exit status: 1 if a row's `failure` says something. Says what is missing."""
        failed = sum(bool(row.get("failure")) for row in self.rows)
        taken = time.monotonic() - STARTED
        if self.missing:
            print(f"MISSING, no time or no GPU left: {len(self.missing)} cells: {'; '.join(self.missing)}", flush=True)
        print(f"{len(self.rows)} rows, {failed} failed, {len(self.missing)} missing, {taken:.0f} s: {self.path}", flush=True)
        return int(failed > 0)
