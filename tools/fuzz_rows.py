"""Runs of `flashtile fuzz` on a GPU as rows of benchmarks/results/fuzz-h200.csv, and what the docs say of them.

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
NAME = "fuzz-h200"
DIGITS = 8
STATUS = ("right", "close", "refused", "wrong")
COUNTS = ("seconds", "variants", "cases", *STATUS, "kernels", "new")
COLUMNS: tuple[str, ...] = ("seed", "backends", *COUNTS, "device", "torch", "triton", "date", "commit")


def rows_of(folder: Path) -> list[dict[str, str]]:
    """The rows so far."""
    path = folder / f"{NAME}.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def add(folder: Path, sessions: Sequence[dict[str, Any]], commit: str) -> int:
    """Add sessions to a folder's rows, the oldest first; how many had none."""
    rows, kept = rows_of(folder), folder / f"{NAME}.kernels"
    known = set(kept.read_text().split()) if kept.exists() else set()
    there, before = {(row["date"], row["seed"]) for row in rows}, len(rows)
    for session in sorted(sessions, key=lambda s: s["date"]):
        if (session["date"], str(session["seed"])) in there:
            continue
        kernels = {name[:DIGITS] for name in session["kernels"]}
        device, torch, triton = session["machine"].split(", ")
        counts = {name: session["status"].get(name, 0) for name in STATUS} | {"wrong": len(session["wrong"])}
        counts |= {name: session[name] for name in ("seconds", "variants", "cases")}
        counts |= {"kernels": len(kernels), "new": len(kernels - known)}
        rows.append({
            "seed": str(session["seed"]), "backends": " ".join(name or "chosen" for name in dict.fromkeys(session["backends"])),
            **{name: str(counts[name]) for name in COUNTS}, "device": device, "torch": torch.removeprefix("torch "),
            "triton": triton.removeprefix("triton "), "date": session["date"], "commit": commit,
        })  # fmt: skip
        known |= kernels
    with (folder / f"{NAME}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    names = sorted(known)
    kept.write_text("".join(" ".join(names[at : at + 14]) + "\n" for at in range(0, len(names), 14)))
    return len(rows) - before


def sentence(folder: Path) -> str:
    """What all rows amount to."""
    rows = rows_of(folder)
    total = {name: sum(int(row[name]) for row in rows) for name in COUNTS}
    said = (
        f"On an H200 `flashtile fuzz` drew {total['cases']:,} whole problems in {len(rows)} runs, of {total['new']:,} distinct "
        f"kernels, and judged each against float64 ([rows](benchmarks/others.md#{NAME})). {total['right']:,} were right, and "
        f"{total['close']} a little off but right with most other data. {total['refused']:,} were refused with a reason. "
        f"{total['wrong']} were wrong, and are in the changelog."
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
