"""Runs of `flashtile fuzz` as rows of benchmarks/results/fuzz-h200.csv and fuzz-cpu.csv, and what the docs say of them.

    python tools/fuzz_rows.py --commit HASH SUMMARY ...

adds the sessions of files that `flashtile fuzz --summary` wrote, and passes over those that have a row. `kernels`: how many
distinct ones a run launched; `new`: how many of them no row before had, so that their sum is how many there were in all.
Kernels' names, eight digits of Triton's hash of source and options, stand in fuzz-h200.kernels.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
NAMES = {"NVIDIA H200": "fuzz-h200"}  # of files, by device
ON_CPU = "fuzz-cpu"  # whatever CPU it is
DIGITS = 8
STATUS = ("right", "close", "refused", "wrong")
COUNTS = ("seconds", "variants", "cases", *STATUS, "kernels", "new")
COLUMNS: tuple[str, ...] = ("seed", "backends", *COUNTS, "device", "torch", "triton", "date", "commit")


def rows_of(folder: Path, name: str) -> list[dict[str, str]]:
    """The rows so far of a file."""
    path = folder / f"{name}.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def add(folder: Path, sessions: Sequence[dict[str, Any]], commit: str) -> int:
    """Add sessions to the rows of their devices' files, the oldest first; how many had none."""
    files: dict[str, list[dict[str, Any]]] = {}
    for session in sorted(sessions, key=lambda s: s["date"]):
        device = session["machine"].rsplit(", ", 2)[0]
        if session["kernels"] and device not in NAMES:
            raise SystemExit(f"{device} has compiled kernels and no file of rows; name one in NAMES.")
        files.setdefault(NAMES.get(device, ON_CPU), []).append(session)
    return sum(_add(folder, name, own, commit) for name, own in files.items())


def _add(folder: Path, name: str, sessions: Sequence[dict[str, Any]], commit: str) -> int:
    rows, kept = rows_of(folder, name), folder / f"{name}.kernels"
    known = set(kept.read_text().split()) if kept.exists() else set()
    there, before = {(row["date"], row["seed"]) for row in rows}, len(rows)
    for session in sessions:
        if (session["date"], str(session["seed"])) in there:
            continue
        kernels = {name[:DIGITS] for name in session["kernels"]}
        device, torch, triton = session["machine"].rsplit(", ", 2)
        counts = {name: session["status"].get(name, 0) for name in STATUS} | {"wrong": len(session["wrong"])}
        counts |= {name: session[name] for name in ("seconds", "variants", "cases")}
        counts |= {"kernels": len(kernels), "new": len(kernels - known)}
        rows.append({
            "seed": str(session["seed"]), "backends": " ".join(name or "chosen" for name in dict.fromkeys(session["backends"])),
            **{name: str(counts[name]) for name in COUNTS}, "device": device, "torch": torch.removeprefix("torch "),
            "triton": triton.removeprefix("triton "), "date": session["date"], "commit": commit,
        })  # fmt: skip
        known |= kernels
    with (folder / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    names = sorted(known)
    if names:
        kept.write_text("".join(" ".join(names[at : at + 14]) + "\n" for at in range(0, len(names), 14)))
    return len(rows) - before


def sentence(folder: Path) -> str:
    """What all rows amount to, on a GPU and on a CPU."""
    said = list[str]()
    for name, where in ((NAMES["NVIDIA H200"], "On an H200"), (ON_CPU, "On a CPU")):
        rows = rows_of(folder, name)
        total = {name: sum(int(row[name]) for row in rows) for name in COUNTS}
        runs = f"{len(rows)} run{'s' * (len(rows) != 1)}"
        runs += f", of {total['new']:,} distinct kernels," if total["new"] else ""
        told = (
            f"{where} `flashtile fuzz` drew {total['cases']:,} whole problems in {runs} and judged each that runs against "
            f"float64 ([rows](benchmarks/others.md#{name})). {total['right']:,} were right, and {total['close']} a little off "
            f"but right with most other data. {total['refused']:,} were refused with a reason. {total['wrong']} were wrong"
            f"{', and are in the [changelog](../CHANGELOG.md#fixed)' if total['wrong'] else ''}."
        )
        asked = dict[str, int]()  # by the backends that runs named: how many they refused
        for row in rows:
            asked[row["backends"]] = asked.get(row["backends"], 0) + int(row["refused"])
        if len(asked) > 1:
            each = ", ".join(f"{number:,} in runs of {_backends(names)}" for names, number in asked.items())
            told += (
                " A run asks for backends by name, in turn, and one that is named refuses what another would run. So were "
                f"refused {each} ([why](benchmarks/others.md#{name}))."
            )
        said += [fill(told, 120, break_on_hyphens=False)] if rows else []
    return "\n\n".join(said)


def _backends(names: str) -> str:
    """A cell of the column `backends` in words."""
    told = [{"chosen": "the planner's choice"}.get(name, f"`{name}`") for name in names.split()]
    return " and ".join(", ".join(told).rsplit(", ", 1))


def tiles(folder: Path) -> str:
    """What `benchmarks/tiles.py` has run."""
    with (folder / "tiles-h200.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    was = {status: sum(row["status"] == status for row in rows) for status in STATUS}
    said = (
        "`benchmarks/tiles.py` asks the planner for tiles beside features. An H200 ran "
        f"{len(rows):,} of their meetings in forwards, backwards and what computes rows of large scores again "
        f"(`benchmarks/results/tiles-h200.csv`): {was['right']:,} were right, {was['close']} a little off but right with most "
        f"other data, {was['wrong']} wrong. With `--passes` it lists those of tangents, second derivatives, statistics, the "
        "entropy's gradient and caches. No GPU has run that list whole: their kernels ran in tests, benchmarks and drawn "
        "calls. Caches of 8 bits are not in it."
    )
    return fill(said, 120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("summary", nargs="+", type=Path)
    parser.add_argument("--commit", required=True)
    given = parser.parse_args()
    sessions = [session for path in given.summary for session in json.loads(path.read_text())["sessions"]]
    print(f"{add(RESULTS, sessions, given.commit)} rows more. {sentence(RESULTS)}")


if __name__ == "__main__":
    main()
