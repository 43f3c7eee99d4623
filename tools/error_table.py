"""How far results are off: a table of docs/explanation/numerics.md, from the CSVs of accuracy.py alone, and, of large scores in
16 bits, one of docs/limits.md, from the bounds that the fuzzer allows."""

from __future__ import annotations

from math import ceil, exp
from pathlib import Path
from statistics import median

from flashtile.fuzz.rounding import ROUNDINGS, STEP
from tools.companion_tables import read

FILES = {
    "accuracy-hopper-h100": ("Hopper's, an H100", ("bf16", "fp16")),
    "accuracy-h200": ("portable, an H200", ("bf16", "fp16", "fp32")),
}
TENSORS = ("out", "dq", "dk", "dv")


def table(folder: Path) -> str:
    """A row per kernels, dtype and tensor: its largest errors, and each over plain PyTorch's or the floor."""
    lines = [
        "| kernels | dtype | tensor | cases | largest error: median, most | by the rule: median, most "
        "| mean error beside plain PyTorch's |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for stem, (kernels, dtypes) in FILES.items():
        rows = read(folder / f"{stem}.csv")
        for dtype in dtypes:
            for name in TENSORS:
                mine = [row for row in rows if row["dtype"] == dtype and row[f"{name}_error"]]
                errors, ratios, means = (
                    [float(row[f"{name}_{what}"]) for row in mine] for what in ("error", "ratio", "mean_ratio")
                )
                lines.append(
                    f"| {kernels} | {dtype} | {name} | {len(mine):,} | {median(errors):.1e}, {max(errors):.1e} | "
                    f"{median(ratios):.2f}, {max(ratios):.2f} | {median(means):.2f} |"
                )
        told = {(row["date"][:10], row["commit"]) for row in rows}
        lines.append(f"| {kernels} | measured | | {len(rows):,} | {', '.join(sorted({day for day, _ in told}))} | "
                     f"commit {', '.join(sorted({commit for _, commit in told}))} | |")  # fmt: skip
    return "\n".join([*lines, ""])


POWERS = (3, 4, 5, 6)
HEAD_DIMS = (64, 128)


def factor(size: float, head_dim: int = 0) -> float:
    """The most that a row's probabilities may be multiplied by in a 16-bit backward, where |lse| is so large.

    head_dim: that of Hopper's own kernels, whose sums start from -lse; 0 for the portable ones. The products of a score have
    one sign here, so that their magnitudes add up to the score.
    """
    started = ceil(head_dim / STEP) * 2.0**-23 * 2 * size
    return exp(ROUNDINGS * 2.0**-24 * size + started)


def _told(value: float) -> str:
    """With the first two digits of what is beyond 1."""
    return f"{value:.1f}" if value >= 1.95 else f"{value:.{max(1, 1 - int(f'{value - 1:.0e}'.partition('e')[2]))}f}"


def large() -> str:
    """The bounds by the size of lse and by kernels."""
    lines = ["| scores, lse | portable kernels | " + " | ".join(f"Hopper's, head_dim {d}" for d in HEAD_DIMS) + " |"]
    lines.append("| --- | --- |" + " --- |" * len(HEAD_DIMS))
    for power in POWERS:
        lines.append(f"| 10^{power} | " + " | ".join(_told(factor(10.0**power, d)) for d in (0, *HEAD_DIMS)) + " |")
    return "\n".join([*lines, ""])


def large_in_words() -> str:
    """The same of an answer: portable kernels, then Hopper's of the widest head_dim."""
    sizes = [10.0**power for power in POWERS[:3]]
    ways = ((0, "portable kernels"), (HEAD_DIMS[-1], f"Hopper's (head_dim {HEAD_DIMS[-1]})"))
    return "; ".join(f"{name} {', '.join(_told(factor(size, d)) for size in sizes)}" for d, name in ways)
