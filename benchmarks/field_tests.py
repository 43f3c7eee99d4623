"""Runs a sample of another library's own tests against `flashtile.compat`, and counts what passed, failed, was refused.

    python benchmarks/field_tests.py TESTS [--wheels FOLDER] [--seconds 200] [--jobs 12] [--seed 0] [--output FOLDER]

TESTS is the folder `tests` of flash-attention, fetched for the run (2.8.4 is the version whose names we speak); FOLDER holds
wheels that the tests import and this Python lacks (einops, pytest). `flashtile.compat.install("flash_attn")` is all that
stands between the tests and us: nothing else is replaced. Test functions are called with values drawn from their own
`parametrize` marks. A draw fixes what kernels are compiled for, and then runs several lengths; a process keeps its draws, so
that each kernel is compiled by one. Writes cases.csv, one line for each case, and counts.csv; prints counts and every failure.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import itertools
import json
import os
import random
import subprocess
import sys
import time
import traceback
from collections import Counter, defaultdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# Of each test how many draws, and at most how many cases of each. (1, 2): 300,000 cases of one refusal need no more.
DRAWS: dict[str, dict[str, tuple[int, int]]] = {
    "test_flash_attn.py": {
        "test_flash_attn_output": (60, 12),
        "test_flash_attn_varlen_output": (44, 12),
        "test_flash_attn_qkvpacked": (24, 8),
        "test_flash_attn_varlen_qkvpacked": (24, 8),
        "test_flash_attn_causal": (16, 10),
        "test_flash_attn_varlen_causal": (14, 10),
        "test_flash_attn_splitkv": (14, 10),
        "test_flash_attn_race_condition": (3, 2),
        "test_flash_attn_bwd_overflow": (6, 5),
        "test_flash_attn_bwd_transpose": (6, 4),
        "test_flash_attn_bwd_varlen_overflow": (6, 1),
        "test_flash_attn_deterministic": (10, 6),
        "test_flash_attn_varlen_deterministic": (10, 6),
        "test_flash_attn_kvcache": (2, 2),
        "test_flash_attn_varlen_paged_kv_num_splits": (2, 1),
        "test_flash_attn_kvcache_paged_block_table_bounds": (2, 1),
        "test_flash_attn_generator_arg_must_be_none": (1, 1),
    },
    "test_rotary.py": {
        "test_rotary_emb_func": (24, 1),
        "test_rotary_emb_qkv": (6, 1),
        "test_rotary_emb_kv": (12, 1),
        "test_rotary_emb_varlen_func": (24, 1),
        "test_compilation_count": (1, 1),
    },
    "losses/test_cross_entropy.py": {"test_cross_entropy_loss": (24, 1)},
    "ops/triton/test_layer_norm.py": {"test_layer_norm": (40, 1), "test_layer_norm_linear": (10, 1)},
    "ops/test_dropout_layer_norm.py": {
        "test_dropout_layer_norm_training": (16, 1),
        "test_dropout_layer_norm_eval": (8, 1),
        "test_dropout_layer_norm_prenorm_training": (16, 1),
        "test_dropout_layer_norm_prenorm_eval": (8, 1),
        "test_dropout_layer_norm_subset_training": (12, 1),
        "test_dropout_layer_norm_subset_prenorm_training": (12, 1),
        "test_dropout_layer_norm_parallel_residual_training": (12, 1),
        "test_dropout_layer_norm_parallel_residual_prenorm_training": (12, 1),
        "test_dropout_layer_norm_randomness": (1, 1),
    },
    "ops/test_fused_dense.py": {"test_fused_linear_bias": (8, 1), "test_fused_mlp": (24, 1)},
}
LENGTHS = ("seqlen", "seqlen_q,seqlen_k", "swap_sq_sk", "kvpacked")  # axes that ask for few other kernels, or none
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


def draw(file: str, name: str, test: Any, seed: int) -> list[list[Case]]:
    """Draws of a test, each a list of cases."""
    dice = random.Random(f"{seed} {file} {name}")
    draws, most = DRAWS[file][name]
    axes = axes_of(test)
    fixed, free = ([a for a in axes if (a[0] in LENGTHS) is wanted] for wanted in (False, True))
    lengths = list(itertools.product(*(values for _, values in free)))
    made: dict[str, list[Case]] = {}
    for _ in range(4 * draws):
        first = assigned(fixed, tuple(dice.choice(values) for _, values in fixed))
        if len(made) < draws and repr(first) not in made:
            chosen = dice.sample(lengths, min(most, len(lengths)))
            made[repr(first)] = [(file, name, {**first, **assigned(free, values)}) for values in chosen]
    return list(made.values())


def modules(folder: Path, files: list[str]) -> dict[str, Any]:
    """The test files, imported."""
    found: dict[str, Any] = {}
    for file in files:
        spec = importlib.util.spec_from_file_location(file.replace("/", "_").removesuffix(".py"), folder / file)
        assert spec is not None
        assert spec.loader is not None
        found[file] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found[file])
    return found


def judge(test: Any, arguments: dict[str, Any]) -> tuple[str, str]:
    """(passed, failed, refused or skipped; why)."""
    import pytest
    import torch

    from flashtile import NotSupported

    try:
        test(**arguments)
    except pytest.skip.Exception as reason:
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


def work(options: argparse.Namespace) -> None:
    """One process: its share of all draws, a JSON line for each case."""
    import torch

    from flashtile.compat import install

    began = time.monotonic()
    install("flash_attn")
    tests = modules(Path(options.tests), options.file)
    draws = [
        cases
        for file in options.file
        for name in DRAWS[file]
        for cases in draw(file, name, getattr(tests[file], name), options.seed)
    ]
    random.Random(options.seed).shuffle(draws)
    printed = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the tests print
    with os.fdopen(printed, "w") as lines:
        for cases in draws[options.worker :: options.jobs]:
            late = time.monotonic() - began > options.seconds - SLOWEST_START
            for file, name, arguments in cases:
                start = time.monotonic()
                over = late or start - began > options.seconds
                outcome, why = ("not reached", "") if over else judge(getattr(tests[file], name), arguments)
                shown = {key: str(value) for key, value in arguments.items()}
                seconds = round(time.monotonic() - start, 2)
                record = dict(file=file, test=name, outcome=outcome, why=why, seconds=seconds, arguments=json.dumps(shown))
                lines.write(json.dumps(record) + "\n")
                lines.flush()
                if not over and torch.cuda.is_available():
                    torch.cuda.empty_cache()


def report(records: list[dict[str, Any]], options: argparse.Namespace) -> int:
    """Writes cases.csv and counts.csv, prints counts and failures; how many failed."""
    import torch

    from flashtile.bench.machine import facts
    from flashtile.bench.revision import commit

    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    about = dict(
        seed=options.seed, **facts(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        commit=commit(Path(__file__).resolve().parent.parent) or options.commit,
    )  # fmt: skip
    summed = Counter((r["file"], r["test"], r["outcome"], r["why"] if r["outcome"] == "refused" else "") for r in records)
    with (folder / "counts.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["file", "test", "outcome", "why", "cases", *about])
        table.writeheader()
        for key, cases in sorted(summed.items()):
            table.writerow(dict(zip(("file", "test", "outcome", "why"), key, strict=True), cases=cases, **about))
    with (folder / "cases.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["file", "test", "outcome", "seconds", "arguments", "why"])
        table.writeheader()
        table.writerows(records)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        counts[record["test"]][record["outcome"]] += 1
        counts["all"][record["outcome"]] += 1
    for test, counted in counts.items():
        print(f"{test}: " + ", ".join(f"{n} {outcome}" for outcome, n in sorted(counted.items())))
    reasons = Counter((r["test"], r["why"]) for r in records if r["outcome"] in ("refused", "skipped"))
    for (test, why), n in reasons.items():
        print(f"{n} x {test}: {why or 'skipped by the test'}")
    failures = [r for r in records if r["outcome"] == "failed"]
    for record in failures:
        print(f"FAILED {record['test']} {record['arguments']}\n    {record['why']}")
    return len(failures)


def main() -> int:
    """0 where nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", help="folder `tests` of flash-attention")
    parser.add_argument("--wheels", help="folder of wheels that the tests need")
    parser.add_argument("--file", nargs="*", default=list(DRAWS), choices=list(DRAWS))
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="field-tests")
    parser.add_argument("--commit", default="", help="the commit of files that were copied without git")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.wheels:
        sys.path += [str(wheel) for wheel in sorted(Path(options.wheels).resolve().glob("*.whl"))]
    if options.worker is not None:
        work(options)
        return 0
    command = [sys.executable, *sys.argv]
    running = [
        subprocess.Popen([*command, "--worker", str(i)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for i in range(options.jobs)
    ]
    records: list[dict[str, Any]] = []
    broken = 0
    for i, process in enumerate(running):
        out, error = process.communicate()
        records += [json.loads(line) for line in out.splitlines()]
        if process.returncode:
            broken += 1
            print(f"process {i} ended with {process.returncode}: {error[-2000:]}")
    return int(bool(report(records, options) or broken))


if __name__ == "__main__":
    sys.exit(main())
