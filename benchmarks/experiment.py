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

from benchmarks.processes import compile_ahead
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
    experiment = kind(chosen)
    record = Record(chosen.output, chosen.budget, {**experiment.about(), **machine(experiment.device(), chosen.commit)})
    if ahead := experiment.ahead():
        compile_ahead(*ahead, record.left(), kind.ahead_share)
    with experiment.begin(record):
        for cell, until in record.parts(experiment.cells(), experiment.name, kind.reserve_s):
            with record.attempt(**experiment.place(cell)):
                experiment.measure(cell, record, until)
            _let_go(kind.gpu)
    experiment.report(record)
    return record.end()


def _let_go(gpu: bool) -> None:
    if gpu:
        import torch

        torch.cuda.empty_cache()
