"""Do the tests and the fuzzer notice a bug of one line? Each of `mutations.toml` is put into a copy of the tree by itself.

    .venv/bin/python tools/mutate.py --jobs 16 --output mutations.csv

A bug is looked for by the tests that touch what it changes and, if they miss it, by `flashtile fuzz` for `--budget` seconds.
A test that fails with the bug must pass without it: where it does not, the bug is not judged.

The CSV has a line for each: what caught it ("" for nothing), and after how many seconds. It grows as the run goes, and a run
that finds it goes on where it ends. `--jobs` copies of the tree run beside each other, each with one thread, and with caches
and a temporary folder of its own. Exit code 1 if a bug was missed, could not be judged, or is left.
"""

from __future__ import annotations

import argparse
import csv
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, zip_longest
from pathlib import Path
from typing import NamedTuple

import tomllib

ROOT = Path(__file__).resolve().parent.parent
FUZZ = {  # by the beginning of a path, of which the longest counts: what the fuzzer is told, and whether Triton interprets
    "flashtile/kernels/sm90/": (["--backend", "hopper", "--setup", "tests.fuzz.emulate:install"], "0"),
    "flashtile/kernels/device/": (["--backend", "triton"], "1"),
    "flashtile/kernels/portable/": (["--backend", "triton"], "1"),
    "flashtile/jax/": None,
    "flashtile/": (["--backend", "cpu"], "1"),
}
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "shared", "site", "dist")
COLUMNS = ["file", "old", "new", "caught_by", "seconds"]
BROKEN = "not judged: "  # begins what stands in `caught_by` for a bug of which nobody knows whether it is caught


class Bug(NamedTuple):
    """In `file` the text `old`, which is there once, becomes `new`; `tests`: what pytest is told."""

    file: str
    old: str
    new: str
    tests: str

    @property
    def area(self) -> str:
        return self.file.rsplit("/", 1)[0]

    @property
    def is_jax(self) -> bool:
        return self.file.startswith("flashtile/jax/")


class Outcome(NamedTuple):
    """What a command gave; `code` None where it was ended at its limit."""

    code: int | None
    text: str


def read_bugs() -> list[Bug]:
    """All of them, one of each folder after another, so that a run that is cut short has seen every folder."""
    found = [Bug(**bug) for bug in tomllib.loads(Path(__file__).with_name("mutations.toml").read_text())["bug"]]
    areas = {bug.area: [other for other in found if other.area == bug.area] for bug in found}
    return [bug for bug in chain.from_iterable(zip_longest(*areas.values())) if bug is not None]


class Out(Exception):
    """The time of the whole run is over."""


class Run:
    """Copies of the tree, of which each runs one bug at a time, until `within` seconds are over."""

    def __init__(self, folder: Path, asked: argparse.Namespace) -> None:
        self.asked, self.end = asked, time.monotonic() + asked.within
        self.trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(asked.jobs):
            tree = folder / str(number) / "tree"
            shutil.copytree(ROOT, tree, ignore=NOT_COPIED, symlinks=True)
            (tree.parent / "temporary").mkdir()
            self.trees.put(tree)

    def judge(self, bug: Bug) -> list[str]:
        """The CSV's line of a bug."""
        tree, start = self.trees.get(), time.monotonic()
        file = tree / bug.file
        before = file.read_text() if file.exists() else ""
        try:
            if before.count(bug.old) != 1:
                caught = f"{BROKEN}the file holds the text {before.count(bug.old)} times"
            else:
                file.write_text(before.replace(bug.old, bug.new))
                caught = self.caught_by_tests(bug, tree)
                if caught:
                    file.write_text(before)
                    fails = self.caught_by_tests(bug, tree, only=caught)
                    caught = f"{BROKEN}{fails} without the bug" if fails else caught
                else:
                    caught = self.caught_by_fuzzer(bug, tree)
        finally:
            if before:
                file.write_text(before)
            self.trees.put(tree)
        return [bug.file, bug.old, bug.new, caught, f"{time.monotonic() - start:.0f}"]

    def caught_by_tests(self, bug: Bug, tree: Path, only: str = "") -> str:
        """The first test that fails, "time" where they hang, "" where all pass. only: of them, what a call returned."""
        paths, _, chosen = bug.tests.partition(" -k ")
        python = self.asked.jax_python if bug.is_jax else sys.executable
        command = [python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        command += [only] if "::" in only else [*paths.split(), *["-k", chosen] * bool(chosen)]
        more = {}
        if bug.is_jax:  # as test_jax.sh has it
            command, more = [*command, "--confcutdir=tests/jax"], {"TRITON_INTERPRET": "0"}
        done = self.run(command, tree, self.asked.limit, **more)
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.text, re.MULTILINE)
        return "" if done.code == 0 else "time" if done.code is None else failed.group(1) if failed else f"pytest {done.code}"

    def caught_by_fuzzer(self, bug: Bug, tree: Path) -> str:
        """The case that the fuzzer found, "" for none."""
        told = FUZZ[max((start for start in FUZZ if bug.file.startswith(start)), key=len)]
        if told is None or not self.asked.budget:
            return ""
        options, interpreted = told
        command = [sys.executable, "-m", "flashtile", "fuzz", "--jobs", "1", "--budget", str(self.asked.budget), *options]
        done = self.run(command, tree, self.asked.budget + self.asked.limit, TRITON_INTERPRET=interpreted)
        case = re.search(r'--repeat "([^"]*)"', done.text)
        found = "time" if done.code is None else case.group(1) if case else done.text[-200:]
        return "" if done.code == 0 else f"fuzz: {found}"

    def run(self, command: list[str], tree: Path, limit_s: float, **more: str) -> Outcome:
        """What a command gives in a tree: no cache and no temporary file of it is seen by another."""
        own = {"TMPDIR": "temporary", "TRITON_CACHE_DIR": "triton", "XDG_CACHE_HOME": "cache"}
        path = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {name: str(tree.parent / path) for name, path in own.items()} | more
        shutil.rmtree(tree.parent / "triton", ignore_errors=True)
        left_s = self.end - time.monotonic()
        if left_s <= 0:
            raise Out
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(command, cwd=tree, env=environment, start_new_session=True, **pipes)
        try:
            text, _ = process.communicate(timeout=min(limit_s, left_s))
            return Outcome(process.returncode, text)
        except subprocess.TimeoutExpired:
            if left_s < limit_s:
                raise Out from None
            return Outcome(None, "")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()

    def each(self, do: Callable[[Bug], None], bugs: Iterable[Bug]) -> None:
        """`do` each, `--jobs` of them beside each other; those that the time does not reach are left out."""

        def within(bug: Bug) -> None:
            with suppress(Out):
                do(bug)

        with ThreadPoolExecutor(self.asked.jobs) as pool:
            list(pool.map(within, bugs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="bugs of files whose path holds this")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds of the fuzzer for what tests miss; 0 for none")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds of the tests of one bug; to hang is to be caught")
    parser.add_argument("--within", type=float, default=float("inf"), help="seconds of the run; what is not done then is left")
    parser.add_argument("--jobs", type=int, default=1, help="bugs beside each other, of a core each")
    jax = ROOT / ".venv-jax/bin/python"
    parser.add_argument("--jax-python", default=str(jax if jax.exists() else sys.executable), help="the Python that has JAX")
    parser.add_argument("--output", type=Path, default=Path("mutations.csv"))
    asked = parser.parse_args()
    bugs = [bug for bug in read_bugs() if asked.only in bug.file]
    done: dict[tuple[str, ...], str] = {}
    if asked.output.exists():
        with asked.output.open(newline="") as file:
            lines = [line for line in csv.DictReader(file) if not line["caught_by"].startswith(BROKEN)]
        done = {(line["file"], line["old"], line["new"]): line["caught_by"] for line in lines}
    with asked.output.open("a", newline="") as file, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        writer, one_at_a_time = csv.writer(file), threading.Lock()
        if file.tell() == 0:
            writer.writerow(COLUMNS)
        run = Run(Path(folder), asked)

        def judge(bug: Bug) -> None:
            row = run.judge(bug)
            with one_at_a_time:
                done[bug[:3]] = row[3]
                writer.writerow(row)
                file.flush()
                print(" | ".join([bug.file, bug.new.strip(), row[3] or "MISSED", row[-1] + " s"]), flush=True)

        run.each(judge, [bug for bug in bugs if bug[:3] not in done])
    of_these = [done[bug[:3]] for bug in bugs if bug[:3] in done]
    broken, missed = sum(caught.startswith(BROKEN) for caught in of_these), of_these.count("")
    caught, left_out = len(of_these) - broken - missed, len(bugs) - len(of_these)
    print(f"{len(bugs)} bugs: {caught} caught, {missed} missed, {broken} not judged, {left_out} left")
    raise SystemExit(0 if caught == len(bugs) else 1)


if __name__ == "__main__":
    main()
