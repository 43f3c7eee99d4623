"""Markdown of what `benchmarks/companions.py` measured, from its CSV alone."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import geometric_mean

OURS = "flashtile"
Row = Mapping[str, str]
Cell = dict[str, Row]  # of one op, shape and direction, by provider


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def cells(rows: Iterable[Row]) -> list[Cell]:
    """What was timed beside what, in the order of the CSV; without the ceilings."""
    found: dict[tuple[str, str], Cell] = {}
    for row in rows:
        if row["ms"]:
            found.setdefault((row["case"], row["direction"]), {})[row["provider"]] = row
    return list(found.values())


def ratio(cell: Cell) -> float | None:
    """Our speed over that of the fastest other library; None where there is none. A bare product is no library."""
    peers = [float(row["ms"]) for name, row in cell.items() if not name.startswith(OURS) and name != "gemm"]
    return min(peers) / float(cell[OURS]["ms"]) if peers and OURS in cell else None


def summary(rows: Iterable[Row]) -> str:
    """A line per op and direction: how near to the copy ceiling (or to bare products), and how fast beside the others."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells(rows):
        first = next(iter(cell.values()))
        if OURS in cell:
            groups.setdefault((first["case"].partition(" ")[0], first["direction"]), []).append(cell)
    lines = [
        "| op | pass | of the copy ceiling | of bare products | over the fastest other |",
        "| --- | --- | --- | --- | --- |",
    ]
    for (op, direction), group in groups.items():
        shares = [(float(c[OURS]["of_copy"]), _shape(c)) for c in group if c[OURS]["of_copy"]]
        products = [(float(c["gemm"]["ms"]) / float(c[OURS]["ms"]), _shape(c)) for c in group if "gemm" in c]
        ratios = [(r, _shape(c)) for c in group if (r := ratio(c)) is not None]
        mean = f"{geometric_mean(r for r, _ in ratios):.2f}x ({_range(ratios)})" if ratios else ""
        lines.append(f"| {op} | {direction} | {_range(shares)} | {_range(products)} | {mean} |")
    return "\n".join(lines)


def table(rows: Iterable[Row]) -> str:
    """Every cell, with all providers' times."""
    found = cells(rows)
    names = list(dict.fromkeys(name for cell in found for name in cell))
    lines = [
        "| case | pass | " + " | ".join(f"{name}, ms" for name in names) + " | of the copy ceiling | over the fastest other |",
        "| --- | --- |" + " --- |" * (len(names) + 2),
    ]
    for cell in found:
        first, times = next(iter(cell.values())), [cell[name]["ms"] if name in cell else "" for name in names]
        share, over = cell[OURS]["of_copy"] if OURS in cell else "FAILED", ratio(cell)
        lines.append(f"| {first['case']} | {first['direction']} | {' | '.join(times)} | {share} | "
                     f"{'' if over is None else f'{over:.2f}x'} |")  # fmt: skip
    return "\n".join(lines)


def provenance(rows: Iterable[Row]) -> str:
    """The machines of the rows, one a line."""
    told = (
        f"{row['device']}; driver {row['driver']}, torch {row['torch']}, triton {row['triton']}, python {row['python']}; "
        f"{row['date']}; commit {row['commit']}"
        for row in rows
    )
    return "\n".join(dict.fromkeys(told))


def _shape(cell: Cell) -> str:
    return next(iter(cell.values()))["case"].partition(" ")[2]


def _range(found: list[tuple[float, str]]) -> str:
    """Least (and where) to most."""
    if not found:
        return ""
    (least, where), (most, _) = min(found), max(found)
    return f"{least:.2f} at {where} to {most:.2f}" if len(found) > 1 else f"{least:.2f}"
