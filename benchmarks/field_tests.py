"""Runs a sample of another library's own tests against `flashtile.compat`, and counts what passed, failed, was refused.

    python benchmarks/field_tests.py TESTS [--wheels FOLDER] [--budget 220] [--jobs 12] [--seed 0] [--output FOLDER/cases.csv]

TESTS is the folder `tests` of flash-attention, or `hopper` with those of version 3 (2.8.4 is the version whose names we
speak), `tests/cute` of version 4 with its `flash_attn/cute/testing.py`, flashinfer's `tests/attention`, or FlashMLA's `tests`,
renamed to `flash_mla`; all fetched for the run. FOLDER holds wheels that the tests import and this Python lacks (einops,
pytest). `flashtile.compat.install` is all that stands between the tests and us; helpers by which flashinfer compiles its own
kernels are absent, and skip (`field_suites.py`). Test functions are called with values drawn from their own `parametrize`
marks. A draw fixes what kernels are compiled for, and then runs several lengths; a process keeps its draws, so that each kernel
is compiled by one. Writes a line for each case as soon as it is done, and counts.csv beside it at the end; prints counts and
every failure.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.experiment import Experiment, main_of
from benchmarks.field_suites import DRAWS, FLASH_MLA, FLASHINFER, LIBRARIES, VERSION_2, adopt, is_huge, prepare
from benchmarks.record import STARTED, Record, at_least_one, is_lost

LENGTHS = (  # axes that ask for few other kernels, or none
    "seqlen", "seqlen_q,seqlen_k", "swap_sq_sk", "kvpacked", "b", "s_k", "is_varlen", "batch_size", "seq_len", "kv_len",
    "kv_len_0", "kv_len_1", "kv_len_2", "qo_len", "unique_kv_len", "shared_kv_len", "window_left",
)  # fmt: skip
LAST_SECONDS = 15.0  # kept for a last case and the report
SLOWEST_START = 25.0  # seconds; after so long before its deadline a process begins no new draw
Case = tuple[str, str, dict[str, Any]]


def axes_of(test: Any) -> list[tuple[str, list[Any]]]:
    """Names and values of each `parametrize` mark."""
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    return [(mark.args[0].replace(" ", ""), list(mark.args[1])) for mark in marks]


def assigned(axes: list[tuple[str, list[Any]]], values: tuple[Any, ...]) -> dict[str, Any]:
    """Arguments by name."""
    made: dict[str, Any] = {}
    for (names, _), value in zip(axes, values, strict=True):
        some = names.split(",")
        made.update(zip(some, value, strict=True) if len(some) > 1 else [(some[0], value)])
    return made


def draw(file: str, name: str, test: Any, seed: int, counts: tuple[int, int]) -> list[list[Case]]:
    """Draws of a test, each a list of cases; counts: how many, and of each at most so many."""
    dice = random.Random(f"{seed} {file} {name}")
    draws, most = counts
    axes = axes_of(test)
    fixed, free = ([a for a in axes if (a[0] in LENGTHS) is wanted] for wanted in (False, True))
    lengths = list(itertools.product(*(values for _, values in free)))
    made: dict[str, list[Case]] = {}
    for _ in range(4 * draws):
        first = assigned(fixed, tuple(dice.choice(values) for _, values in fixed))
        if len(made) < draws and repr(first) not in made:
            cases = [(file, name, {**first, **assigned(free, values)}) for values in lengths]
            cases = [case for case in cases if not is_huge(case[2])]
            made[repr(first)] = dice.sample(cases, min(most, len(cases)))
    return list(made.values())


def modules(folder: Path, files: list[str]) -> dict[str, Any]:
    """The test files, imported."""
    found: dict[str, Any] = {}
    prepare(folder)
    for file in files:
        spec = importlib.util.spec_from_file_location(file.replace("/", "_").removesuffix(".py"), folder / file)
        assert spec is not None
        assert spec.loader is not None
        found[file] = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = found[file]  # dataclasses look their modules up
        spec.loader.exec_module(found[file])
        adopt(file, found[file])
    return found


def judge(test: Any, arguments: dict[str, Any]) -> tuple[str, str]:
    """(passed, failed, refused or skipped; why)."""
    import pytest
    import torch

    from flashtile import NotSupported

    try:
        test(**arguments)
    except (pytest.skip.Exception, pytest.xfail.Exception) as reason:
        return "skipped", str(reason)
    except NotSupported as reason:
        return "refused", str(reason).splitlines()[-1].strip()
    except torch.cuda.OutOfMemoryError:
        return "out of memory", "processes share the GPU"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        if isinstance(error.__context__, NotSupported):  # the test wanted another error
            return "refused", str(error.__context__).splitlines()[-1].strip()
        where = traceback.extract_tb(error.__traceback__)[-1]
        line = next((t.line for t in reversed(traceback.extract_tb(error.__traceback__)) if "test_" in t.filename), "")
        return "failed", f"{type(error).__name__}: {error} | {line} | {Path(where.filename).name}:{where.lineno}"[:600]
    return "passed", ""


def work(chosen: argparse.Namespace) -> None:
    """One process: its share of all draws, a JSON line for each case. Ends at a case that costs it its GPU context."""
    import torch

    from flashtile.compat import install

    ends = STARTED + chosen.budget - LAST_SECONDS
    for library in LIBRARIES[chosen.tests.name]:
        install(library)
    sys.path.append(str(chosen.tests))  # what tests share
    tests = modules(chosen.tests, chosen.file)
    draws = [
        cases
        for file in chosen.file
        for name, counts in DRAWS[chosen.tests.name][file].items()
        if chosen.only in name
        for cases in draw(file, name, getattr(tests[file], name), chosen.seed, counts)
    ]
    random.Random(chosen.seed).shuffle(draws)
    printed = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the tests print
    with os.fdopen(printed, "w") as lines:
        for cases in draws[chosen.worker :: chosen.jobs]:
            late = time.monotonic() > ends - SLOWEST_START
            for file, name, arguments in cases:
                start = time.monotonic()
                over = late or start > ends
                outcome, why = ("not reached", "") if over else judge(getattr(tests[file], name), arguments)
                shown = {key: str(value) for key, value in arguments.items()}
                seconds = round(time.monotonic() - start, 2)
                row = dict(file=file, test=name, outcome=outcome, why=why, seconds=seconds, arguments=json.dumps(shown))
                lines.write(json.dumps(row) + "\n")
                lines.flush()
                if outcome == "failed" and is_lost(RuntimeError(why)):
                    raise SystemExit("the GPU context is lost")
                if not over and torch.cuda.is_available():
                    torch.cuda.empty_cache()


def report(record: Record, folder: Path) -> None:
    """Writes counts.csv, prints counts and failures."""
    rows = record.rows
    summed = Counter((r["file"], r["test"], r["outcome"], r["why"] if r["outcome"] == "refused" else "") for r in rows)
    counted = Record(folder / "counts.csv", record.budget_s, record.about)
    for key, cases in sorted(summed.items()):
        counted.add(dict(zip(("file", "test", "outcome", "why"), key, strict=True), cases=cases))
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        counts[row["test"]][row["outcome"]] += 1
        counts["all"][row["outcome"]] += 1
    for test, outcomes in counts.items():
        print(f"{test}: " + ", ".join(f"{n} {outcome}" for outcome, n in sorted(outcomes.items())))
    reasons = Counter((r["test"], r["why"]) for r in rows if r["outcome"] in ("refused", "skipped"))
    for (test, why), n in reasons.items():
        print(f"{n} x {test}: {why or 'skipped by the test'}")
    for row in rows:
        if row["outcome"] == "failed":
            print(f"FAILED {row['test']} {row['arguments']}\n    {row['why']}")


def listen(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    """Pass on what a process prints, and at its end None."""
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def collect(lines: queue.SimpleQueue[str | None], processes: int, record: Record) -> None:
    """Write what the processes print, until all have ended or time is up."""
    silent = 0
    while silent < processes and record.left() > 0:
        with suppress(queue.Empty):
            line = lines.get(timeout=max(record.left(), 0.0))
            if line is None:
                silent += 1
            elif (row := json.loads(line))["outcome"] == "not reached":
                record.leave(row["test"])
            else:
                record.add({**row, "failure": row["why"] if row["outcome"] == "failed" else ""})


class FieldTests(Experiment[Path]):
    """One cell: all draws of the tests in a folder, which processes take in shares and print as they come."""

    output, budget_s = "field-tests/cases.csv", 220

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("tests", type=Path, help="folder of tests, by whose name the library is known")
        parser.add_argument("--wheels", type=Path, help="folder of wheels that the tests need")
        parser.add_argument(
            "--file", nargs="+", default=[], choices=sorted({*VERSION_2, *FLASH_MLA, *FLASHINFER}), help="by default all"
        )
        parser.add_argument("--only", default="", help="tests whose names have this in them")
        parser.add_argument("--jobs", type=at_least_one, default=12)
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)

    @classmethod
    def check(cls, chosen: argparse.Namespace, parser: argparse.ArgumentParser) -> int | None:
        if chosen.tests.name not in DRAWS:
            parser.error(f"TESTS is {chosen.tests}; it must be a folder named {', '.join(DRAWS)}")
        chosen.file = [file for file in chosen.file or DRAWS[chosen.tests.name] if file in DRAWS[chosen.tests.name]]
        missing = [file for file in chosen.file if not (chosen.tests / file).exists()]
        wheels = sorted(chosen.wheels.resolve().glob("*.whl")) if chosen.wheels else []
        if missing or (chosen.wheels and not wheels):
            parser.error(f"{chosen.tests} lacks {', '.join(missing)}" if missing else f"{chosen.wheels} has no wheels")
        sys.path += map(str, wheels)
        if chosen.worker is not None:
            work(chosen)
            return 0
        return None

    def about(self) -> dict[str, int]:
        return {"seed": self.chosen.seed}

    def cells(self) -> list[Path]:
        return [self.chosen.tests]

    def place(self, cell: Path) -> dict[str, str]:
        return dict(file="", test="all")

    def measure(self, cell: Path, record: Record, until: float) -> None:
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
        with ExitStack() as stack:
            errors = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(self.chosen.jobs)]
            running = [
                subprocess.Popen([*command, "--worker", str(i)], stdout=subprocess.PIPE, stderr=error, text=True)
                for i, error in enumerate(errors)
            ]
            for process in running:
                threading.Thread(target=listen, args=(process, lines), daemon=True).start()
            collect(lines, len(running), record)
            for i, (process, error) in enumerate(zip(running, errors, strict=True)):
                try:
                    broken = process.wait(10.0 if record.left() > 0 else 0.0)
                except subprocess.TimeoutExpired:
                    process.kill()
                    record.leave(f"what process {i} was at")
                    continue
                if broken:
                    error.seek(0)
                    why = f"ended with {broken}: {error.read()[-1500:]}"
                    record.fail(why, file="", test=f"process {i}", outcome="failed", why=why, arguments="")

    def report(self, record: Record) -> None:
        report(record, self.chosen.output.parent)
        record.count_missing()


def main() -> int:
    return main_of(FieldTests)


if __name__ == "__main__":
    sys.exit(main())
