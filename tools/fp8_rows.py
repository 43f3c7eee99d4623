"""Figures of docs/how-to/fp8.md and of answers, from the rows of benchmarks/fp8.py on an H200."""

from __future__ import annotations

from pathlib import Path

from tools.companion_tables import Row, read

FP8 = {  # rows of benchmarks/fp8.py -> what the page calls them
    "bf16": "bf16", "e4m3 stored": "e4m3 storage", "fp8": "fp8 arithmetic",
    "fp8 with quantisation": "the same, with quantisation",
}  # fmt: skip
MASKS = ("full", "causal")


def _rows(folder: Path) -> dict[tuple[int, str, str], Row]:
    """Forwards of 1 x 16,384 tokens, by head_dim, what ran, and mask."""
    rows = [row for row in read(folder / "fp8-h200.csv") if row["section"] == "speed"]
    return {(int(row["shape"].rpartition("x")[2]), row["what"], row["mask"]): row for row in rows}


def speed(folder: Path) -> str:
    """Times of docs/how-to/fp8.md."""
    rows, both = _rows(folder), "ms | TFLOP/s | of bf16's speed"
    lines = [f"| head_dim | | full, {both} | causal, {both} |", "| --- | --- |" + " --- |" * 6]
    for depth in (64, 128, 256):
        for what, called in FP8.items():
            cells = [rows[depth, what, mask] for mask in MASKS]
            told = [f"{float(row['ms']):.2f} | {row['tflops']} | {float(row['of_bf16']):.2f}" for row in cells]
            lines.append(f"| {depth} | {called} | {' | '.join(told)} |")
    return "\n".join([*lines, ""])


def share(folder: Path, depth: int, what: str = "fp8", aim: float = 1.0) -> str:
    """What one head_dim reaches of bf16's speed, or of an aim in times of it, without a mask and causal."""
    full, causal = (float(_rows(folder)[depth, what, mask]["of_bf16"]) / aim for mask in MASKS)
    return f"{full:.2f} and {causal:.2f}"


def shares(folder: Path) -> str:
    """Without a mask, quantised before the call and in it: a sentence of an answer."""
    before, within = (
        {depth: share(folder, depth, what).split()[0] for depth in (256, 128, 64)} for what in ("fp8", "fp8 with quantisation")
    )
    return ", ".join(f"head_dim {depth} {first} / {within[depth]}" for depth, first in before.items())


def aims(folder: Path) -> str:
    """What forwards of e4m3 have of what they are meant to reach."""

    def told(what: str, aim: float) -> str:
        return ", ".join(f"{share(folder, depth, what, aim)} ({depth})" for depth in (128, 256))

    return f"{told('fp8', 1.35)}; quantised {told('fp8 with quantisation', 1.25)}"
