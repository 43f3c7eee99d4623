"""Tables of results: rich for the terminal, markdown for the docs. Everything comes from the rows of a CSV."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flashtile.bench.result import BASE, OWN, Result, unique

Row = dict[str, Result]  # of one case and direction, by provider


@dataclass(frozen=True)
class Cell:
    """A place in a table; `best` marks the fastest of its row."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class Grid:
    """A table as text, before it is drawn one way or another."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def grouped(results: Iterable[Result]) -> list[Row]:
    """One row per suite, case and direction, in the order of the CSV."""
    rows: dict[tuple[str, str, str], Row] = {}
    for result in results:
        rows.setdefault((result.suite, result.spelling, result.direction), {})[result.provider] = result
    return list(rows.values())


def label(result: Result) -> str:
    """A case in a few characters: batch, heads, lengths, head_dim."""
    heads = str(result.heads_q) if result.heads_q == result.heads_kv else f"{result.heads_q}/{result.heads_kv}"
    length = str(result.seqlen_q) if result.seqlen_q == result.seqlen_k else f"{result.seqlen_q}x{result.seqlen_k}"
    depth = str(result.head_dim) if result.head_dim == result.head_dim_v else f"{result.head_dim}/{result.head_dim_v}"
    band = "causal" if result.causal else "band" if "band=" in result.spelling else "full"
    return f"B{result.batch} H{heads} S{length} D{depth} {band} {result.dtype}"


def ratio(row: Row) -> float | None:
    """Speed of our fastest provider over the fastest peer's; None where either side has none."""
    own, peer = _fastest(row, "own"), _fastest(row, "peer")
    return None if own is None or peer is None else own / peer


def geometric_mean(values: Sequence[float]) -> float | None:
    """The mean that suits ratios; None of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def speeds(results: Sequence[Result]) -> Grid:
    """TFLOP/s: cases and directions down, providers across, the best bold, and ours over the best peer."""
    rows = grouped(results)
    seen = [r for r in results if r.status not in ("refused", "skipped")]  # who never took part gets no column
    names = providers_of(seen)
    compares = {"own", "peer"} <= {r.side for r in seen}
    unit = "TFLOP/s" if max((r.tflops or 0.0 for r in seen), default=0.0) >= 1 else "GFLOP/s"  # a CPU's
    table: list[tuple[Cell, ...]] = []
    for row in rows:
        first = next(iter(row.values()))
        fastest = max((r.tflops for r in row.values() if r.tflops is not None and r.side != "base"), default=None)
        cells = [Cell(label(first)), Cell(_short(first.direction))]
        for name in names:
            result = row.get(name)
            cells.append(
                Cell("")
                if result is None
                else Cell(_speed(result, unit), result.tflops is not None and result.tflops == fastest)
            )
        table.append((*cells, Cell(_times(ratio(row)))) if compares else tuple(cells))
    header = ("case", "pass", *names, *(["ours / best peer"] if compares else []))
    return Grid(unit, header, tuple(table) if names else ())


def means(results: Sequence[Result]) -> Grid:
    """Geometric means of the speed ratio: our fastest and each of ours against the best peer and every peer, by direction."""
    rows = grouped(results)
    timed = [r for r in results if r.tflops is not None]
    own = providers_of(r for r in timed if r.side == "own")
    peers = providers_of(r for r in timed if r.side == "peer")
    if not (own and peers):
        return Grid("", (), ())
    table: list[tuple[Cell, ...]] = []
    for direction in unique(result.direction for result in results):
        chosen = [row for row in rows if next(iter(row.values())).direction == direction]
        for name in own if len(own) == 1 else ["fastest of ours", *own]:
            cells: list[Cell] = []
            for peer in ["best peer", *peers]:
                found = [r for row in chosen if (r := _against(row, name, peer)) is not None]
                spread = f" ({_digits(min(found))} to {_digits(max(found))}, {len(found)} cases)" if found else ""
                cells.append(Cell(_times(geometric_mean(found)) + spread))
            if any(cell.text for cell in cells):
                table.append((Cell(f"{name}, {_short(direction)}"), *cells))
    return Grid("geometric mean of ours / theirs", ("ours", "best peer", *peers), tuple(table))


def base_ratios(results: Sequence[Result]) -> Grid:
    """Speed of this checkout over the compared commit's, row by row, and their geometric mean."""
    names = [n for n in providers_of(results) if n.startswith(OWN) and BASE + n.removeprefix(OWN) in providers_of(results)]
    found: dict[str, list[float]] = {name: [] for name in names}
    table: list[tuple[Cell, ...]] = []
    for row in grouped(results):
        first = next(iter(row.values()))
        cells: list[Cell] = []
        for name in names:
            value = _against(row, name, BASE + name.removeprefix(OWN))
            if value is not None:
                found[name].append(value)
            cells.append(Cell(_times(value)))
        table.append((Cell(label(first)), Cell(_short(first.direction)), *cells))
    if table and names:
        table.append((Cell("geometric mean"), Cell(""), *(Cell(_times(geometric_mean(found[n]))) for n in names)))
    return Grid("this checkout / base", ("case", "pass", *names), tuple(table) if names else ())


def host_times(results: Sequence[Result]) -> Grid:
    """Host time per call in microseconds: a forward call, and forward and backward together."""
    timed = [r for r in results if r.host_us is not None or r.host_step_us is not None]
    names = providers_of(timed)
    table: list[tuple[Cell, ...]] = []
    for row in grouped(timed):
        first = next(iter(row.values()))
        values = {name: r.host_us if r.host_us is not None else r.host_step_us for name, r in row.items()}
        least = min(v for v in values.values() if v is not None)
        cells = [Cell("" if values.get(n) is None else f"{values[n]:.1f}", values.get(n) == least) for n in names]
        table.append((Cell(label(first)), Cell("fwd" if first.direction == "forward" else "fwd+bwd"), *cells))
    return Grid("host time per call, microseconds", ("case", "pass", *names), tuple(table))


def untimed(results: Sequence[Result]) -> Grid:
    """Who was not timed, and why; the same reason of one provider is told once."""
    kinds: dict[tuple[str, str, str], int] = {}
    for result in results:
        if result.status != "ok":
            key = (result.provider, result.status, result.reason)
            kinds[key] = kinds.get(key, 0) + 1
    rows = tuple((Cell(p), Cell(s), Cell(str(n)), Cell(why)) for (p, s, why), n in kinds.items())
    return Grid("not timed", ("provider", "status", "rows", "reason"), rows)


def grids(results: Sequence[Result]) -> list[Grid]:
    """Every table that has something to say."""
    return [g for g in (speeds(results), means(results), base_ratios(results), host_times(results), untimed(results)) if g.rows]


def show(results: Sequence[Result], console: Console) -> None:
    """Print every table to a terminal."""
    for grid in grids(results):
        table = Table(*grid.header, title=grid.title, title_justify="left")
        table.columns[0].no_wrap = True
        for row in grid.rows:
            table.add_row(*(Text(cell.text, style="bold" if cell.best else "") for cell in row))
        console.print(table)
    console.print(Text(provenance(results)))


def markdown(results: Sequence[Result], chosen: Sequence[Grid] | None = None) -> str:
    """Every table (or those chosen) in markdown, with the machine and versions below."""
    parts: list[str] = []
    for grid in grids(results) if chosen is None else chosen:
        lines = [f"**{grid.title}**", "", _line(grid.header), _line("---" for _ in grid.header)]
        lines += [_line(f"**{c.text}**" if c.best else c.text for c in row) for row in grid.rows]
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, provenance(results)]) + "\n"


def provenance(results: Sequence[Result]) -> str:
    """What the results were measured on, in one line."""
    machines: list[str] = []
    for r in results:
        if not r.device:
            continue
        versions = (
            ("driver", r.driver),
            ("torch", r.torch),
            ("triton", r.triton),
            ("cuDNN", r.cudnn),
            ("flash-attn-4", r.flash_attn),
        )
        named = ", ".join(f"{name} {value}" for name, value in (*versions, ("python", r.python)) if value)
        machines.append(f"{r.device}; {named}; {r.date}" + (f"; commit {r.commit}" if r.commit else ""))
    return "\n".join(unique(machines))


def providers_of(results: Iterable[Result]) -> Sequence[str]:
    """The providers in the order of the CSV."""
    return unique(result.provider for result in results)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _against(row: Row, name: str, other: str) -> float | None:
    """Speed ratio of two providers of a row; "fastest of ours" and "best peer" stand for whichever is fastest there."""
    mine = _fastest(row, "own") if name == "fastest of ours" else _tflops(row, name)
    theirs = _fastest(row, "peer") if other == "best peer" else _tflops(row, other)
    return None if mine is None or theirs is None else mine / theirs


def _tflops(row: Row, name: str) -> float | None:
    return row[name].tflops if name in row else None


def _fastest(row: Row, side: str) -> float | None:
    return max((r.tflops for r in row.values() if r.side == side and r.tflops is not None), default=None)


def _speed(result: Result, unit: str) -> str:
    if result.tflops is None:
        return {"ok": "", "refused": "-", "skipped": "", "wrong": "WRONG", "failed": "FAILED"}[result.status]
    value = result.tflops * (1e3 if unit == "GFLOP/s" else 1)
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _short(direction: str) -> str:
    return {"forward": "fwd", "backward": "bwd"}[direction]


def _times(value: float | None) -> str:
    return "" if value is None else f"{_digits(value)}x"


def _digits(value: float) -> str:
    """Two decimals; of less than a tenth one digit that is not 0."""
    return f"{value:.2f}" if value >= 0.095 else f"{value:.1g}"
