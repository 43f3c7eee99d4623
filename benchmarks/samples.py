"""Where the cycles of a kernel's steps go: Nsight Compute's samples of warps, by phases of the loops around products.

    python benchmarks/samples.py [--cell NAME ...] [--budget SECONDS] [--output FILE] [--commit HASH] [--keep FOLDER]

Cells are those that `counters.py --list` names; it makes the calls. A row is a phase of a loop with products: before them,
while they are issued, the waits for them, what follows each wait. share: of the loop's samples; a loop of a consumer is
nearly all of that role's time, so that shares are parts of a step. instructions: issued per iteration. why: what warps waited
for there, in parts of the loop's samples. ncu runs a kernel alone, at whatever clock the card then has. --keep leaves what it
says of every instruction.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.counters import CELLS, MOST_S, PROBLEMS, ask, nsight
from benchmarks.experiment import Experiment, main_of
from benchmarks.record import Record, need_gpu

_JUMP = re.compile(r"\bBRA\b.*?(0x[0-9a-f]+)")
Line = dict[str, str]


def kernels(text: str) -> Iterator[tuple[str, list[Line]]]:
    """(name, its instructions) of each kernel in ncu's source page as CSV."""
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith('"Kernel Name"')]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield next(csv.reader([lines[start]]))[1], list(csv.DictReader(lines[start + 1 : end]))


def number(line: Line, column: str) -> int:
    """A count, 0 where ncu leaves it out."""
    return int(float(line.get(column) or 0))


def loops(code: list[Line]) -> Iterator[list[Line]]:
    """The loops that hold products and ran; of those that overlap, for rare paths jump back, too, the shortest."""
    places = {int(line["Address"], 0): i for i, line in enumerate(code)}
    found: list[tuple[int, int]] = []
    for end, line in enumerate(code):
        jump = _JUMP.search(line["Source"])
        start = places.get(int(jump[1], 0), end) if jump else end
        if start < end and any("HGMMA" in inner["Source"] for inner in code[start:end]):
            found.append((start, end))
    kept: list[tuple[int, int]] = []
    for start, end in sorted(found, key=lambda loop: loop[1] - loop[0]):
        if all(end < a or b < start for a, b in kept):
            kept.append((start, end))
    for start, end in sorted(kept):
        if any(number(line, "Instructions Executed") for line in code[start : end + 1]):
            yield code[start : end + 1]


def phases(loop: list[Line]) -> Iterator[tuple[str, list[Line]]]:
    """(name, instructions) of what stands before the products, issues them, waits for some or all of them, or follows that."""
    name, held = "before", list[Line]()
    for line in loop:
        source = line["Source"]
        following = name
        if "HGMMA" in source:
            following = "products"
        elif "WARPGROUP.DEPBAR" in source:
            following = f"wait {source.rsplit(',', 1)[-1].strip()}"
        elif name.startswith("wait"):
            following = name.replace("wait", "after")
        if following != name and held:
            yield name, held
            held = []
        name = following
        held.append(line)
    yield name, held


def rows_of(text: str) -> Iterator[dict[str, Any]]:
    """A row per phase of every loop of every kernel."""
    for kernel, code in kernels(text):
        for count, loop in enumerate(loops(code)):
            iterations = max(number(line, "Instructions Executed") for line in loop)
            samples = max(sum(number(line, "# Samples") for line in loop), 1)
            for phase, lines in phases(loop):
                why: Counter[str] = Counter()
                for line in lines:
                    why.update({key[6:]: number(line, key) for key in line if key.startswith("stall_") and "(" not in key})
                told = " ".join(f"{reason} {hits / samples:.3f}" for reason, hits in why.most_common(4) if hits)
                issued = sum(number(line, "Instructions Executed") for line in lines) / iterations
                share = sum(number(line, "# Samples") for line in lines) / samples
                yield dict(kernel=kernel, loop=count, phase=phase, share=share, instructions=issued, why=told)


def sample(ncu: str, cell: str, record: Record, keep: Path | None) -> None:
    """Add the rows of a cell."""
    with TemporaryDirectory() as folder:
        report = str(Path(folder) / "samples")
        how = ("--clock-control", "none", "--profile-from-start", "off", "--section", "SourceCounters", "-f", "-o", report)
        calls = (sys.executable, str(Path(__file__).resolve().parent / "counters.py"), "--child", cell)
        ask(ncu, *how, *calls, limit_s=min(MOST_S, record.left()))
        said = ask(ncu, "-i", f"{report}.ncu-rep", "--page", "source", "--csv", "--print-source", "sass")
    if keep is not None:
        (keep / f"{cell}.csv").write_text(said)
    for row in rows_of(said):
        record.add(dict(cell=cell, problem=PROBLEMS[CELLS[cell][0]].spell(), **row))
        print(
            f"{cell:26s} {row['loop']} {row['phase']:10s} {row['share']:.3f} {row['instructions']:7.1f} {row['why']}",
            flush=True,
        )


class Samples(Experiment[str]):
    """A cell is a kernel of `counters.CELLS`."""

    output, budget_s, reserve_s = "benchmarks/results/samples-h100.csv", 300, 25.0

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--cell", nargs="+", choices=list(CELLS), default=list(CELLS), metavar="NAME")
        parser.add_argument("--keep", type=Path, help="a folder for what ncu says of every instruction, a CSV a cell")

    @classmethod
    def check(cls, chosen: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        need_gpu(parser)
        chosen.ncu, chosen.version = nsight(parser)

    def about(self) -> dict[str, str]:
        return {"ncu": self.chosen.version}

    def cells(self) -> list[str]:
        return self.chosen.cell

    def place(self, cell: str) -> dict[str, str]:
        return dict(cell=cell)

    def measure(self, cell: str, record: Record, until: float) -> None:
        sample(self.chosen.ncu, cell, record, self.chosen.keep)


def main() -> int:
    return main_of(Samples)


if __name__ == "__main__":
    sys.exit(main())
