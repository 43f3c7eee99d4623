"""The table of docs/explanation/numerics.md: how far 16-bit and fp32 results are off, from the CSVs of accuracy.py alone."""

from __future__ import annotations

from pathlib import Path
from statistics import median

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
