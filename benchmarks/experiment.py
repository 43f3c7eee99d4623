"""The runner of this folder: an experiment says which cells there are and measures one; everything else is done here.

python -m benchmarks                        every experiment, with its first line
python -m benchmarks NAME [options]         the same as python benchmarks/NAME.py [options]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Generic, TypeVar

from benchmarks import processes
from benchmarks.processes import WORKERS, Failure
from benchmarks.record import Record, machine, need_gpu, options

Cell = TypeVar("Cell")
Ahead = tuple[Callable[..., Any], Sequence[tuple[Any, ...]]]


class Experiment(Generic[Cell]):
    """What is measured, as the command line asked for it (`chosen`). A subclass has `cells` and `measure`."""

    output: ClassVar[str]  # the CSV, unless --output names another one
    budget_s: ClassVar[float]
    gpu: ClassVar[bool] = True  # it ends with a usage error where there is none
    ahead_share: ClassVar[float] = 0.6  # of the budget, for compiling on all cores
    reserve_s: ClassVar[float] = 0.0  # cells are not begun in the last of the budget

    def __init__(self, chosen: argparse.Namespace):
        self.chosen = chosen

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Options beside --budget, --output and --commit."""

    @classmethod
    def check(cls, chosen: argparse.Namespace, parser: argparse.ArgumentParser) -> int | None:
        """A usage error by `parser.error`, or the exit status of a command that measures nothing."""

    def device(self) -> Any:
        """Where it runs, as rows say."""
        import torch

        return torch.device("cuda", 0) if self.gpu else torch.device("cpu")

    def about(self) -> Mapping[str, Any]:
        """Columns of every row, before those of machine, date and commit."""
        return {}

    def machine(self) -> Mapping[str, str]:
        """Columns of every row: machine, date and commit."""
        return machine(self.device(), self.chosen.commit)

    def ahead(self) -> Ahead | None:
        """A function that a new process can import, and jobs for it, which leave compiled kernels in the caches."""

    def begin(self, record: Record) -> AbstractContextManager[Any]:
        """What comes before the first cell, and lasts until the last one."""
        return nullcontext()

    def cells(self) -> Sequence[Cell]:
        raise NotImplementedError

    def place(self, cell: Cell) -> dict[str, Any]:
        """The columns of a row that say which cell it is; a cell that raises is a row of them, and `failure`."""
        raise NotImplementedError

    def name(self, cell: Cell) -> str:
        """How a cell for which there is no time is named."""
        return str(cell)

    def measure(self, cell: Cell, record: Record, until: float) -> None:
        """Add the rows of a cell; until: the moment of time.monotonic at which its share of the budget ends."""
        raise NotImplementedError

    def report(self, record: Record) -> None:
        """Say what comes of all rows."""

    def run(self, record: Record) -> None:
        """Every cell for which there is time, one after another; one that raises is a failed row."""
        for cell, until in record.parts(self.cells(), self.name, self.reserve_s):
            with record.attempt(**self.place(cell)):
                self.measure(cell, record, until)
            _let_go(self.gpu)


class Judged(Experiment[tuple[Any, ...]]):
    """Cells that are judged in several processes side by side. A cell is what a process is given; nothing is timed."""

    judge: Callable[..., Any]  # a static method, or set before `run`: a function that a new process can import
    workers: int = WORKERS
    fresh: bool = False  # every cell has a process of its own

    def write(self, cell: tuple[Any, ...], made: Any, record: Record) -> None:
        """Add the rows of a cell of which `judge` made this, or of its Failure."""
        raise NotImplementedError

    def name(self, cell: tuple[Any, ...]) -> str:
        return " ".join(map(str, cell))

    def measure(self, cell: tuple[Any, ...], record: Record, until: float) -> None:
        """One cell alone, in this process."""
        try:
            made = self.judge(*cell)
        except Exception as error:
            made = Failure(f"{type(error).__name__}: {error}")
        self.write(cell, made, record)

    def run(self, record: Record) -> None:
        """Every cell, in the order in which they are done; those that are not done in time are noted."""
        left = {cell: self.name(cell) for cell in self.cells()}
        for cell, made in processes.in_processes(self.judge, list(left), record.ends, self.workers, self.fresh):
            del left[cell]
            self.write(cell, made, record)
        for name in left.values():
            record.leave(name)


def main_of(kind: type[Experiment[Any]]) -> int:
    """The command line of an experiment: its exit status, 1 if a row failed."""
    description = sys.modules[kind.__module__].__doc__
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    kind.add_options(parser)
    options(parser, kind.output, kind.budget_s)
    chosen = parser.parse_args()
    status = kind.check(chosen, parser)
    if status is not None:
        return status
    if kind.gpu:
        need_gpu(parser)
    return run_experiment(kind(chosen), chosen)


def run_experiment(experiment: Experiment[Any], chosen: argparse.Namespace) -> int:
    """Everything behind the command line: the exit status, 1 if a row failed."""
    record = Record(chosen.output, chosen.budget, {**experiment.about(), **experiment.machine()})
    if ahead := experiment.ahead():
        processes.compile_ahead(*ahead, record.left(), experiment.ahead_share)
    with experiment.begin(record):
        experiment.run(record)
    experiment.report(record)
    return record.end()


def _let_go(gpu: bool) -> None:
    if gpu:
        import torch

        torch.cuda.empty_cache()
