"""Two builds of the library beside each other: processes of either in turns, on one GPU.

    python -m benchmarks builds --base FOLDER [--cells host varlen ...] [--starts 5] [--rounds 12] [--budget SECONDS]

FOLDER is another checkout, the base. Each cell's kernels are compiled first, all at once. Before a cell is timed, both builds
must have made the same of the same inputs. Each build runs in several processes, for where memory lies differs from start to
start, and time with it: `starts` of them, which take turns. A process stands for the median of its rounds. Cells whose names
begin with `host` are time of the host, in more and shorter rounds: what else a machine does only adds to it, so there the
quietest tenth stands for all. `of_base` is the median of this build's processes over that of the base's; `spread` how far the
base's processes lie apart, the larger half of them over the smaller.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.build_worker import SHAPES
from benchmarks.experiment import Experiment, main_of
from benchmarks.record import Record, at_least_one

ROOT = Path(__file__).resolve().parent.parent
WORKER = ROOT / "benchmarks" / "build_worker.py"
BURST_MS = 10.0  # of calls that are timed at once
HOST_CALLS = 50
HOST_ROUNDS = 12  # of the host, for each round of the device
SAME = 0.02  # of a tensor's norm, by which what two builds make of 16-bit inputs may differ


class Build:
    """A process that has loaded one build."""

    def __init__(self, root: Path, cells: list[str]):
        command = [sys.executable, "-P", "-c", WORKER.read_text() + "\nsys.exit(main())\n", *cells]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        self.process = subprocess.Popen(
            command, env=environment, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.root = root

    def begin(self) -> None:
        """Wait until it has called everything once."""
        assert self.process.stdout is not None
        said = self.process.stdout.readline().split()
        if not said or not Path(said[1]).resolve().is_relative_to(self.root):
            raise RuntimeError(f"the build in {self.root} does not run: it said {' '.join(said)!r}")

    def ask(self, cell: str, which: str, calls: int) -> None:
        """Send the worker a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{cell} {which} {calls}\n")
        self.process.stdin.flush()

    def hear(self) -> list[float]:
        """What it answers."""
        assert self.process.stdout is not None
        return [float(number) for number in self.process.stdout.readline().split()]

    def time(self, cell: str, which: str, calls: int) -> tuple[float, float]:
        """Milliseconds of a call, and microseconds of the host."""
        self.ask(cell, which, calls)
        ms, host_us = self.hear()
        return ms, host_us

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def compare(this: list[float], base: list[float]) -> None:
    """Raise ArithmeticError unless two builds have made the same tensors."""
    if len(this) != len(base) or not base:
        raise ArithmeticError(f"this build makes {len(this) // 2} tensors, the base {len(base) // 2}")
    for at in range(0, len(base), 2):
        for name, one, other in zip(("norm", "signed sum"), this[at : at + 2], base[at : at + 2], strict=True):
            if not abs(one - other) <= SAME * base[at]:  # NaN is wrong too
                raise ArithmeticError(f"tensor {at // 2}: this build makes a {name} of {one:g}, the base {other:g}")


def quiet(times: list[float]) -> float:
    """The mean of the least tenth."""
    return mean(sorted(times)[: max(1, len(times) // 10)])


def stand_for(processes: list[list[float]], host: bool) -> tuple[float, float]:
    """(what the rounds of a build's processes amount to, how far the processes lie apart)."""
    ordered = sorted(quiet(times) if host else median(times) for times in processes)
    half = (len(ordered) + 1) // 2
    return median(ordered), median(ordered[-half:]) / median(ordered[:half])


class Builds(Experiment[tuple[str, str]]):
    """A cell is a problem and a pass."""

    output, budget_s, gpu = "bench-output/builds.csv", 240, False  # a CPU compares builds too
    builds: dict[str, list[Build]]  # processes of each

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--base", type=Path, required=True, help="another checkout")
        parser.add_argument("--cells", nargs="+", choices=list(SHAPES), default=list(SHAPES))
        parser.add_argument("--rounds", type=at_least_one, default=12, help="of each process")
        parser.add_argument("--starts", type=at_least_one, default=5, help="processes of each build")

    @classmethod
    def check(cls, chosen: argparse.Namespace, parser: argparse.ArgumentParser) -> int | None:
        if not (chosen.base / "flashtile" / "__init__.py").exists():
            parser.error(f"--base {chosen.base} is no checkout of the library")
        return None

    def device(self) -> torch.device:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    def cells(self) -> list[tuple[str, str]]:
        passes = {
            cell: ("forward", "both") if cell.startswith("host") else ("forward", "backward") for cell in self.chosen.cells
        }
        return [(cell, which) for cell, some in passes.items() for which in some]

    def place(self, cell: tuple[str, str]) -> dict[str, Any]:
        return {"cell": cell[0], "pass": cell[1]}

    @contextmanager
    def begin(self, record: Record) -> Iterator[None]:
        roots = {"this": ROOT, "base": self.chosen.base.resolve()}
        if self.device().type == "cuda":
            ahead = [Build(root, [cell]) for cell in self.chosen.cells for root in roots.values()]
            try:
                for build in ahead:
                    build.begin()
            finally:
                for build in ahead:
                    build.end()
        self.builds = {
            name: [Build(root, self.chosen.cells) for _ in range(self.chosen.starts)] for name, root in roots.items()
        }
        processes = [build for builds in self.builds.values() for build in builds]
        try:
            for build in processes:
                build.begin()
            yield
        finally:
            for build in processes:
                build.end()

    def measure(self, cell: tuple[str, str], record: Record, until: float) -> None:
        pairs = list(zip(*self.builds.values(), strict=True))
        for build in (build for pair in pairs for build in pair):
            build.ask(*cell, 0)  # all at once: each adds its tensors up on the host, which takes seconds
        for this, base in [(this.hear(), base.hear()) for this, base in pairs]:  # all are heard, whatever the first are
            compare(this, base)
        host, cpu = cell[0].startswith("host"), self.device().type == "cpu"
        calls = HOST_CALLS if host else max(1, round(BURST_MS / self.builds["base"][0].time(*cell, 2)[0]))
        calls, rounds = (1, self.chosen.rounds) if cpu else (calls, self.chosen.rounds * (HOST_ROUNDS if host else 1))
        times: dict[str, list[list[float]]] = {name: [[] for _ in builds] for name, builds in self.builds.items()}
        for turn in range(rounds):
            for at in range(self.chosen.starts):
                for name in list(self.builds) if (turn + at) % 2 == 0 else reversed(list(self.builds)):
                    times[name][at].append(self.builds[name][at].time(*cell, calls)[host])
        (this, _), (base, spread) = (stand_for(times[name], host) for name in ("this", "base"))
        row = dict(
            **self.place(cell), unit="host_us" if host else "ms", this=round(this, 4), base=round(base, 4),
            of_base=round(this / base, 4), spread=round(spread, 4), starts=self.chosen.starts, rounds=rounds,
            calls=calls,
        )  # fmt: skip
        record.add(row)
        print(*row.values(), flush=True)


def main() -> int:
    return main_of(Builds)


if __name__ == "__main__":
    sys.exit(main())
