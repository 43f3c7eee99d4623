"""Checks, then times, the ops of `flashtile.ops` beside torch.compile and, where it is installed, Liger, in rotation.

    python benchmarks/companions.py [--section norm rotary ...] [--budget SECONDS] [--output benchmarks/results/companions.csv]

GB/s are those of the fewest bytes that the op must move; `of_copy` and `of_read` are fractions of what this run's own copy
and read of 1 GiB reach. The caches are cleared before every call. `compiled` is torch.compile of the plain formula.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.companion_cells import Session
from benchmarks.companion_sections import SECTIONS
from benchmarks.experiment import Ahead, Experiment, main_of
from benchmarks.record import Record


def configure() -> None:
    """How torch.compile is to work here and in the processes that compile ahead."""
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # a compiled backward is to be called again and again
    torch._dynamo.config.recompile_limit = 1000  # one function, many shapes: beyond the limit it would run eagerly
    torch._dynamo.config.accumulated_recompile_limit = 10000
    torch.manual_seed(0)


def warm(section: str, number: int) -> None:
    """Run every entrant of a section's cell once, which compiles it."""
    configure()
    wrong: list[str] = []
    cell = next(islice(SECTIONS[section](), number, None))
    for name, entrant in cell.entrants().items():
        try:
            entrant.call()
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}"[:200])
    torch.cuda.synchronize()
    del cell
    gc.collect()
    torch.cuda.empty_cache()
    if wrong:
        raise RuntimeError(f"{'; '.join(wrong)}")


class Companions(Experiment[str]):
    """A cell is a section."""

    output, budget_s, ahead_share = "benchmarks/results/companions.csv", 200, 0.5
    session: Session

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--section", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))

    def ahead(self) -> Ahead:
        configure()
        cells = [(number, section) for section in self.chosen.section for number, _ in enumerate(SECTIONS[section]())]
        gc.collect()
        torch.cuda.empty_cache()  # the other processes need the memory
        return warm, [(section, number) for number, section in sorted(cells, key=lambda cell: cell[0])]  # the large ones apart

    @contextmanager
    def begin(self, record: Record) -> Iterator[None]:
        self.session = Session(self.device(), record)
        self.session.measure_ceilings()
        yield

    def cells(self) -> list[str]:
        return self.chosen.section

    def place(self, cell: str) -> dict[str, str]:
        return dict(section=cell, case="all")

    def measure(self, cell: str, record: Record, until: float) -> None:
        self.session.until = until
        for part in SECTIONS[cell]():
            place = dict(section=cell, case=part.case, direction=part.direction)
            if self.session.left() < 0:
                record.leave(" ".join(place.values()))
                continue
            with record.attempt(**place, provider="all"):
                self.session.run(part)
            gc.collect()


def main() -> int:
    return main_of(Companions)


if __name__ == "__main__":
    sys.exit(main())
