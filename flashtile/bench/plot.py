"""The plot of a CSV, in the manner of the field: TFLOP/s against seqlen, one panel per head_dim, mask and direction."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from flashtile.bench.report import providers_of
from flashtile.bench.result import Result, unique

# Ours in warm colours, peers in cold and grey ones: whom a bar belongs to must be seen before the legend is read.
COLOURS = {
    "own": ("#d62728", "#ff7f0e", "#e377c2", "#bc6c25"),
    "base": ("#f4a6a6", "#ffcf9e", "#f2c6e3", "#dcb38f"),
    "peer": ("#1f77b4", "#2ca02c", "#17becf", "#7f7f7f", "#9467bd", "#8c9eb5", "#4c4c4c", "#b5cf6b"),
}


def draw(results: Sequence[Result], path: Path) -> None:
    """Write the plot; the file's ending says the format. Raises ValueError when nothing was timed."""
    timed = [r for r in results if r.tflops is not None]
    if not timed:
        raise ValueError("no row was timed; there is nothing to plot.")
    columns = _columns(timed)
    panels = [(direction, column) for direction in unique(r.direction for r in timed) for column in columns]
    width = len(columns) if len(columns) <= 3 else 2 if len(columns) == 4 else 3
    height = -(-len(panels) // width)
    colours = _colours(timed)
    figure: Any = Figure(figsize=(4.6 * width + 0.6, 3.4 * height + 1.0), layout="constrained")
    for place, (direction, column) in enumerate(panels, start=1):
        panel = [r for r in timed if r.direction == direction and _column(r) == column]
        if panel:
            _draw_panel(figure.add_subplot(height, width, place), panel, colours, f"{direction}, {column}")
    handles = {name: handle for ax in figure.axes for handle, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    names = [name for name in colours if name in handles]
    figure.legend([handles[n] for n in names], names, loc="outside upper center", ncols=min(len(names), 5 if width > 1 else 3))
    first = timed[0]
    versions = f"torch {first.torch}" + (f", triton {first.triton}" if first.triton else "")
    figure.supxlabel(f"seqlen  ({first.device}, {versions}, {first.date[:10]})", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _draw_panel(axes: Any, panel: Sequence[Result], colours: dict[str, str], title: str) -> None:
    axes.set_title(title, fontsize=10)
    unit, factor = ("TFLOP/s", 1.0) if max(r.tflops or 0.0 for r in panel) >= 1 else ("GFLOP/s", 1e3)  # a CPU's
    axes.set_ylabel(unit)
    ticks = sorted(unique(r.spelling for r in panel), key=lambda s: next(_order(r) for r in panel if r.spelling == s))
    names = [n for n in colours if n in providers_of(panel)]
    width = 0.86 / len(names)
    for k, name in enumerate(names):
        mine = {r.spelling: r for r in panel if r.provider == name}
        places = [i for i, tick in enumerate(ticks) if tick in mine]
        heights = [(mine[ticks[i]].tflops or 0.0) * factor for i in places]
        bars = axes.bar(
            [i + (k - (len(names) - 1) / 2) * width for i in places], heights, width, label=name, color=colours[name]
        )
        axes.bar_label(
            bars, labels=[f"{h:.0f}" if h >= 10 else f"{h:.2g}" for h in heights], fontsize=6, rotation=90, padding=2
        )
    axes.set_xticks(range(len(ticks)), [_tick(next(r for r in panel if r.spelling == t), panel) for t in ticks], fontsize=8)
    axes.margins(y=0.16)
    axes.spines[["top", "right"]].set_visible(False)


def _columns(results: Sequence[Result]) -> Sequence[str]:
    """The columns, suite by suite: causal before full, small head_dim before large."""
    suites = unique(r.suite for r in results)
    ordered = sorted(results, key=lambda r: (suites.index(r.suite), r.dtype, not r.causal, r.head_dim, r.head_dim_v))
    return unique(_column(r) for r in ordered)


def _column(result: Result) -> str:
    """What the panels of one column have in common."""
    depth = str(result.head_dim) if result.head_dim == result.head_dim_v else f"{result.head_dim}/{result.head_dim_v}"
    mask = "causal" if result.causal else "band" if "band=" in result.spelling else "full"
    return f"{result.suite}: head_dim {depth}, {mask}, {result.dtype}"


def _order(result: Result) -> tuple[int, int, int]:
    return result.seqlen_q, result.seqlen_k, result.batch


def _tick(result: Result, panel: Sequence[Result]) -> str:
    """The length of a case, and its batch where cases of a panel differ in nothing else."""
    length = f"{result.seqlen_q}" if result.seqlen_q == result.seqlen_k else f"{result.seqlen_q}x{result.seqlen_k}"
    alike = {r.spelling for r in panel if (r.seqlen_q, r.seqlen_k) == (result.seqlen_q, result.seqlen_k)}
    return f"{length}\nbatch {result.batch}" if len(alike) > 1 else length


def _colours(results: Sequence[Result]) -> dict[str, str]:
    """A colour by provider: ours first, then the base's, then the peers."""
    found: dict[str, str] = {}
    for side in ("own", "base", "peer"):
        for i, name in enumerate(providers_of(r for r in results if r.side == side)):
            found[name] = COLOURS[side][i % len(COLOURS[side])]
    return found
