"""Do the tests and the fuzzer notice a bug of one line? Each of `mutations.toml` is put into a copy of the tree by itself.

    .venv/bin/python tools/mutate.py --output mutations.csv

A bug is looked for by the tests that touch what it changes and, if they miss it, by `flashtile fuzz` for `--budget` seconds.
The CSV has a line for each: what caught it, and after how many seconds. Exit code 1 if one was missed.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import chain, zip_longest
from pathlib import Path
from typing import NamedTuple

import tomllib

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 900  # of the tests of one bug: one that hangs is caught, too
FUZZ = {  # by the beginning of a path, of which the longest counts: what the fuzzer is told, and whether Triton interprets
    "flashtile/kernels/sm90/": (["--backend", "hopper", "--setup", "tests.fuzz.emulate:install"], "0"),
    "flashtile/kernels/device/": (["--backend", "triton"], "1"),
    "flashtile/kernels/portable/": (["--backend", "triton"], "1"),
    "flashtile/jax/": None,
    "flashtile/": (["--backend", "cpu"], "1"),
}


class Bug(NamedTuple):
    """In `file` the text `old`, which is there once, becomes `new`; `tests`: what pytest is told."""

    file: str
    old: str
    new: str
    tests: str

    @property
    def area(self) -> str:
        return self.file.rsplit("/", 1)[0]

    def change(self, tree: Path) -> str:
        """Put it into a tree; the file as it was."""
        before = (tree / self.file).read_text()
        if before.count(self.old) != 1:
            raise SystemExit(f"{self.file} holds {self.old!r} {before.count(self.old)} times; it must be once.")
        (tree / self.file).write_text(before.replace(self.old, self.new))
        return before


def read_bugs() -> list[Bug]:
    """All of them, one of each folder after another, so that a run that is cut short has seen every folder."""
    found = [Bug(**bug) for bug in tomllib.loads(Path(__file__).with_name("mutations.toml").read_text())["bug"]]
    areas = {bug.area: [other for other in found if other.area == bug.area] for bug in found}
    return [bug for bug in chain.from_iterable(zip_longest(*areas.values())) if bug is not None]


def copied(to: Path) -> Path:
    """The files of this checkout that git knows, in another folder."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name)
    return to


def caught_by_tests(bug: Bug, tree: Path, python: str) -> str:
    """The first test that fails, "time" where they hang, "" where all pass."""
    paths, _, chosen = bug.tests.partition(" -k ")
    command = [python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *paths.split(), *(["-k", chosen] * bool(chosen))]
    more = {}
    if bug.file.startswith("flashtile/jax/"):  # as test_jax.sh has it
        command, more = [*command, "--confcutdir=tests/jax"], {"TRITON_INTERPRET": "0"}
    try:
        done = run(command, tree, LIMIT_S, **more)
    except subprocess.TimeoutExpired:
        return "time"
    if done.returncode not in (0, 1, 2):
        raise SystemExit(f"{' '.join(command)} gave {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return "" if done.returncode == 0 else failed.group(1) if failed else f"pytest {done.returncode}"


def caught_by_fuzzer(bug: Bug, tree: Path, budget_s: float) -> str:
    """The case that the fuzzer found, "" for none."""
    told = FUZZ[max((start for start in FUZZ if bug.file.startswith(start)), key=len)]
    if told is None or not budget_s:
        return ""
    options, interpreted = told
    command = [sys.executable, "-m", "flashtile", "fuzz", "--jobs", "1", "--budget", str(budget_s), *options]
    try:
        done = run(command, tree, budget_s + LIMIT_S, TRITON_INTERPRET=interpreted)
    except subprocess.TimeoutExpired:
        return "fuzz: time"
    case = re.search(r'--repeat "([^"]*)"', done.stdout)
    return "" if done.returncode == 0 else f"fuzz: {case.group(1) if case else done.stdout[-200:]}"


def run(command: list[str], tree: Path, limit_s: float, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **more}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False, timeout=limit_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="bugs of files whose path holds this")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds of the fuzzer for what tests miss; 0 for none")
    parser.add_argument("--within", type=float, default=float("inf"), help="begin no bug after so many seconds")
    parser.add_argument("--jax-python", default=str(ROOT / ".venv-jax/bin/python"), help="the Python that has JAX")
    parser.add_argument("--output", type=Path, default=Path("mutations.csv"))
    asked = parser.parse_args()
    begun, missed = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder, asked.output.open("w", newline="") as file:
        tree, lines = copied(Path(folder)), csv.writer(file)
        lines.writerow(["file", "old", "new", "caught_by", "seconds"])
        for bug in read_bugs():
            if asked.only not in bug.file or time.monotonic() - begun > asked.within:
                continue
            before, start = bug.change(tree), time.monotonic()
            python = asked.jax_python if bug.file.startswith("flashtile/jax/") else sys.executable
            caught = caught_by_tests(bug, tree, python) or caught_by_fuzzer(bug, tree, asked.budget)
            (tree / bug.file).write_text(before)
            missed += not caught
            row = [bug.file, bug.old, bug.new, caught, f"{time.monotonic() - start:.0f}"]
            lines.writerow(row)
            file.flush()
            print(" | ".join([bug.file, bug.new.strip(), caught or "MISSED", row[-1] + " s"]), flush=True)
    raise SystemExit(1 if missed else 0)


if __name__ == "__main__":
    main()
