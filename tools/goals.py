"""What Hopper's kernels are to reach on an H100, and what they reach there and on an H200: docs/goals.md.

From benchmarks/results/*.csv alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from flashtile.bench import report, result
from tools.companion_tables import Row, read

SUITES = ("fa3-paper", "llmc", "triton-tutorial", "cudnn-cross")
OURS, CUDNN = "flashtile/hopper", "sdpa/cudnn"
ANYWHERE = ("Accuracy", "Pairs of features")  # they are the same on every card of the kind


@dataclass(frozen=True)
class Figure:
    """What was measured beside what is to be reached; `value` is None where no row measures it."""

    what: str
    value: float | None
    goal: float
    commits: frozenset[str]
    at_most: bool = False

    @property
    def reached(self) -> bool:
        return self.value is not None and (self.value <= self.goal if self.at_most else self.value >= self.goal)

    def line(self) -> str:
        bound = f"{'at most' if self.at_most else 'at least'} {_number(self.goal)}"
        said = "not measured" if self.value is None else _number(self.value)
        return f"| {self.what} | {said} | {bound} | {'yes' if self.reached else 'no'} | {' '.join(sorted(self.commits))} |"


@dataclass(frozen=True)
class Section:
    """Goals that one command measures, and the files that it writes."""

    title: str
    command: str
    files: tuple[str, ...]
    figures: tuple[Figure, ...]
    note: str = ""


def sections(folder: Path, card: str) -> Iterator[Section]:
    """The goals, by what measures them, from a card's files in a folder."""
    paths = {suite: folder / f"hopper-{suite}-{card}.csv" for suite in SUITES}
    suites = [row for path in paths.values() for row in report.grouped(_results(path))]
    files = tuple(path.name for path in paths.values())
    bench = f"flashtile bench {' '.join(SUITES)}"
    yield Section("Beside the best of cuDNN and FlashAttention-4", bench, files, tuple(of_the_best(suites)))
    again = folder / f"hopper-beside-cudnn-{card}.csv"
    newest = {_cell(row): row for row in sorted([*suites, *report.grouped(_results(again))], key=_date)}
    asked = (*files, again.name) if again.exists() else files
    older = (row for row in (*suites, *report.grouped(_results(again))) if newest[_cell(row)] is not row)
    yield Section("Beside cuDNN", bench, asked, tuple(beside_cudnn(newest.values())), which_rows(older))
    scripts = (
        ("Shares of the plain problem's FLOP/s", "hopper_forward.py", "hopper-forward", shares),
        ("The same of a backward", "hopper_backward.py", "hopper-backward", shares_backward),
        ("Accuracy", "accuracy.py --backend hopper", "accuracy-hopper", accuracy),
        ("Repeats, sanitizer, first calls", "hopper_checks.py", "hopper-checks", checks),
        ("Host time of an eager call", "host.py", "host", host),
        ("Small problems under CUDA graph replay", "replay.py", "replay", replay),
        ("Pairs of features", "features.py --sections pairs --backend hopper", "pairs-hopper", pairs),
        ("Costs of features", "features.py --sections costs --backend hopper", "features-hopper", costs),
        ("Items of unequal lengths, lists of blocks, poison", "varlen.py", "varlen", unequal),
    )
    for title, command, name, figures in scripts:
        path = folder / f"{name}-{card}.csv"
        rows = read(path) if path.exists() else []
        yield Section(title, f"python benchmarks/{command}", (path.name,), tuple(figures(rows)))


def page(folder: Path) -> str:
    """docs/goals.md."""
    lines = [
        "# Goals",
        "",
        "Written by `make docs` from `benchmarks/results`: what Hopper's kernels are to reach on an H100, what they reach, and",
        "at which commit that was measured. What keeps the rest from it is in [the lab](lab/hopper.md) and, of backwards, in",
        "[its page](lab/hopper-backward.md). Behind it, [what was measured on an H200](#h200), whose arithmetic is an",
        "H100's and whose memory is 1.4 times as fast.",
        "",
        *(line for section in sections(folder, "h100") for line in _lines(section)),
        '<a id="h200"></a>',
        "# On an H200",
        "",
    ]
    for section in sections(folder, "h200"):
        if section.title not in ANYWHERE:
            measured = tuple(figure for figure in section.figures if figure.value is not None)
            lines += _lines(replace(section, figures=measured)) if measured else []
    return "\n".join(lines)


def _lines(section: Section) -> list[str]:
    reached = sum(figure.reached for figure in section.figures)
    return [
        *(f"## {section.title}: {reached} of {len(section.figures)}", ""),
        *(f"`{section.command}`; {', '.join(f'`{name}`' for name in section.files)}", ""),
        *((section.note, "") if section.note else ()),
        *("| what | figure | goal | reached | commit |", "| --- | --- | --- | --- | --- |"),
        *(*(figure.line() for figure in section.figures), ""),
    ]


# -- the figures of a section ---------------------------------------------------------------------------------------


def of_the_best(rows: list[report.Row]) -> Iterator[Figure]:
    """Our speed over that of the fastest peer, cell by cell."""
    for direction in ("forward", "backward"):
        chosen = [row for row in rows if _first(row).direction == direction]
        ratios = [r for row in chosen if (r := report.ratio(row)) is not None]
        yield Figure(f"{direction}, geometric mean", report.geometric_mean(ratios), 1.0, _commits(chosen))
        yield Figure(f"{direction}, least of {len(ratios)}", min(ratios, default=None), 0.92, _commits(chosen))
    wide = [row for row in rows if _first(row).direction == "backward" and _first(row).head_dim == 256]
    ratios = [r for row in wide if (r := report.ratio(row)) is not None]
    yield Figure("backward of head_dim 256, geometric mean", report.geometric_mean(ratios), 1.15, _commits(wide))


def beside_cudnn(rows: Iterable[report.Row]) -> Iterator[Figure]:
    """The least of our speeds over cuDNN's, each cell by its newest row."""
    speeds = sorted(_over_cudnn(rows))
    for direction in ("forward", "backward"):
        found = [cell for cell in speeds if cell[1] == direction]
        if not found:
            yield Figure(direction, None, 1.0, frozenset())
        below = [cell for cell in found if cell[0] < 1.0]
        for value, _, cell, commit in below or found[:1]:
            yield Figure(f"{direction}, {'' if below else f'least of {len(found)}: '}{cell}", value, 1.0, frozenset({commit}))


def which_rows(older: Iterable[report.Row]) -> str:
    """Which row a shape is judged by that several files have, and where an older one was behind."""
    below = [f"{direction} of {cell} {_number(value)} at {commit}"
             for value, direction, cell, commit in sorted(_over_cudnn(older)) if value < 1.0]  # fmt: skip
    told = "Each shape by its newest row in these files."
    return f"{told} Behind cuDNN in an older row: {', '.join(below)}." if below else told


def _over_cudnn(rows: Iterable[report.Row]) -> Iterator[tuple[float, str, str, str]]:
    """Our speed over cuDNN's, pass, shape and commit of each row that has both."""
    for row in rows:
        if _first(row).suite in SUITES and all(name in row and row[name].ms for name in (OURS, CUDNN)):
            speed = (row[CUDNN].ms or 0.0) / (row[OURS].ms or 1.0)
            yield speed, _first(row).direction, report.label(_first(row)), row[OURS].commit


def shares(rows: list[Row]) -> Iterator[Figure]:
    by_name = {row["row"]: row for row in rows}
    wanted = [
        f"{what}-{mask}" for what in ("head_dim-96", "head_dim-192-128", "gqa-8", "softcap-128") for mask in ("full", "causal")
    ]
    for name in wanted:
        row = by_name.get(name)
        yield Figure(f"{name}, of {row['base'] if row else 'plain'}", row and float(row["of_base"]), 0.9, _told([row]))
    window, plain = by_name.get("window-1024-16k"), by_name.get("plain-128-1k")
    share = float(window["tflops"]) / float(plain["tflops"]) if window and plain else None
    yield Figure("window-1024-16k, of plain-128-1k", share, 0.9, _told([window, plain]))


def shares_backward(rows: list[Row]) -> Iterator[Figure]:
    tflops = {
        (row["provider"], "band=:0" in row["problem"]): row for row in rows if row["tflops"] and "q=4x4096" in row["problem"]
    }
    for causal in (False, True):
        wide, plain = tflops.get(("192", causal)), tflops.get(("128", causal))
        share = float(wide["tflops"]) / float(plain["tflops"]) if wide and plain else None
        yield Figure(f"192/128, of 128, {_mask(causal)}", share, 0.9, _told([wide, plain] if share else []))


def accuracy(rows: list[Row]) -> Iterator[Figure]:
    yield Figure("random cases", len(rows), 5000, _told(rows))
    yield _none("of these wrong", sum(bool(row["failure"]) for row in rows), rows)


def checks(rows: list[Row]) -> Iterator[Figure]:
    repeats = [row for row in rows if row["section"] == "repeats"]
    whole = [row for row in repeats if int(row["repeats"] or 0) >= 1000]
    differ = sum(
        bool(row["failure"]) or any(int(n or 0) for name, n in row.items() if name.endswith("_differs")) for row in repeats
    )
    yield Figure("configurations of 1,000 repeats", len(whole), 20, _told(whole))
    yield _none(f"of {len(repeats)} configurations failed, or with other bits", differ, repeats)
    for tool in ("memcheck", "racecheck"):
        told = [row for row in rows if row["section"] == "sanitizer" and tool in row["name"]]
        # "handover" tests the tool: see docs/lab/hopper-checks.md
        asked = [row for row in told if not row["name"].startswith("handover")]
        yield _none(f"{tool}: of {len(asked)} programs with findings", sum(bool(row["failure"]) for row in asked), asked)
    first = [row for row in rows if row["section"] == "first"]
    for kind, limit in (("cold", 5.0), ("warm", 0.3)):
        seconds = [float(row[f"{kind}_{part}_s"]) for row in first for part in ("forward", "backward")]
        yield Figure(f"first call, {kind}, seconds", max(seconds, default=None), limit, _told(first), True)


def host(rows: list[Row]) -> Iterator[Figure]:
    times = {(row["provider"], row["what"]): row for row in rows}
    for what in ("forward", "forward+backward"):
        ours, theirs = times.get(("flashtile", what)), times.get(("sdpa/flash", what))
        share = float(ours["host_us"]) / float(theirs["host_us"]) if ours and theirs else None
        yield Figure(f"{what}, of SDPA flash's", share, 1.2, _told([ours, theirs]), True)


def replay(rows: list[Row]) -> Iterator[Figure]:
    for what in ("forward", "step"):
        ours = [row for row in rows if row["provider"] == "flashtile" and row["pass"] == what]
        least = min((float(row["of_best"]) for row in ours), default=None)
        yield Figure(f"{what}, least of {len(ours)} problems, of the best", least, 0.9, _told(ours))


def pairs(rows: list[Row]) -> Iterator[Figure]:
    cases = [row for row in rows if row["section"] == "pairs"]
    yield Figure("cases that cover every pair", len(cases), 1000, _told(cases))
    yield _none("of these wrong", sum(bool(row["failure"]) for row in cases), cases)


def costs(rows: list[Row]) -> Iterator[Figure]:
    """Time of a call over that of the same without the feature."""
    limits = {"bias": 1.35, "bias, gradient": 1.6, "dropout": 1.2, "sink": 1.02, "softcap": 1.15}
    found = {(row["name"], row["causal"] == "True"): row for row in rows if row["section"] == "costs"}
    for causal in (False, True):
        for name, limit in limits.items():
            row = found.get((name, causal))
            for what, column in (("forward", "forward_ratio"), ("with backward", "both_ratio")):
                if (name, what) != ("bias, gradient", "forward"):  # which has none
                    yield Figure(f"{name}, {what}, {_mask(causal)}", row and float(row[column]), limit, _told([row]), True)


def unequal(rows: list[Row]) -> Iterator[Figure]:
    for mask in ("causal", "full"):
        for direction in ("fwd", "bwd"):
            timed = {row["name"]: row for row in rows if row["section"] == "varlen" and row["direction"] == direction}
            ours = timed.get(f"{OURS} varlen, {mask}")
            others = [row for name, row in timed.items() if name.endswith(f", {mask}") and not name.startswith(OURS)]
            best = min((float(row["ms"]) for row in others), default=None)
            what = f"varlen, {direction}, {mask}"
            yield Figure(f"{what}: of the dense FLOP/s", ours and float(ours["ratio"]), 0.85, _told([ours]))
            yield Figure(f"{what}: of the best other", best / float(ours["ms"]) if ours and best else None, 1.1, _told([ours]))
    blocks = {(row["note"], row["name"], row["direction"]): row for row in rows if row["section"] == "blocks"}
    for (tokens, name, direction), row in blocks.items():
        flex = blocks.get((tokens, name.replace("flashtile", "flex"), direction))
        if name.startswith("flashtile") and "%" in name and " 0%" not in name:
            what = f"{name.partition(' ')[2]} hidden, {tokens}, {direction}"
            yield Figure(f"{what}: of the ideal speed-up", float(row["ratio"]), 0.85, _told([row]))
            times = float(flex["ms"]) / float(row["ms"]) if flex else None
            yield Figure(f"{what}: of FlexAttention", times, 1.2, _told([row, flex]))
    built = next((row for row in rows if row["section"] == "build" and not row["failure"]), None)
    what = "lists of 64k x 64k from a document predicate"
    yield Figure(f"{what}, ms", built and float(built["ms"]), 20, _told([built]), True)
    yield Figure(f"{what}, MB", built and float(built["ratio"]) * 2**20 / 1e6, 64, _told([built]), True)
    poison = [row for row in rows if row["section"] == "poison"]
    cases = sum(int(row["of"].rpartition(" ")[2]) for row in poison)
    yield Figure("cases beside NaN", cases if poison else None, 500, _told(poison))
    yield _none("of these with other bits", sum(int(row["ratio"]) for row in poison), poison)


# -- rows -----------------------------------------------------------------------------------------------------------


def _results(path: Path) -> list[result.Result]:
    return result.read(path) if path.exists() else []


def _first(row: report.Row) -> result.Result:
    return next(iter(row.values()))


def _cell(row: report.Row) -> tuple[str, str]:
    return _first(row).spelling, _first(row).direction


def _date(row: report.Row) -> str:
    return max(each.date for each in row.values())


def _commits(rows: Iterable[report.Row]) -> frozenset[str]:
    return frozenset(each.commit for row in rows for each in row.values())


def _told(rows: Iterable[Row | None]) -> frozenset[str]:
    return frozenset(row["commit"] for row in rows if row)


def _none(what: str, count: int, rows: list[Row]) -> Figure:
    """Of these rows none may be so."""
    return Figure(what, count if rows else None, 0, _told(rows), True)


def _mask(causal: bool) -> str:
    return "causal" if causal else "full"


def _number(value: float) -> str:
    return f"{value:,d}" if isinstance(value, int) else f"{value:.3f}"
