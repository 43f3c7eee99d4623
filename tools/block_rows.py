"""What lists of blocks gain, from benchmarks/varlen.py's rows on an H100: a table of docs/how-to/block-masks.md, an answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.companion_tables import read

TOKENS = (8192, 32768)
EMPTY = (50, 80, 95)  # percent of the blocks
WAYS = {"fwd": "forward", "bwd": "backward"}


class Gain(NamedTuple):
    """A pass over random blocks: its time without a mask over ours, and FlexAttention's with the same blocks over ours."""

    tokens: int
    empty: int
    way: str
    over_dense: float
    over_flex: float


def gains(folder: Path) -> Iterator[Gain]:
    """By tokens, share of empty blocks and pass."""
    rows = [row for row in read(folder / "varlen-h100.csv") if row["section"] == "blocks" and not row["failure"]]
    ms = {(row["note"], row["name"], row["direction"]): float(row["ms"]) for row in rows}
    for tokens in TOKENS:
        for empty in EMPTY:
            for way in WAYS:
                dense, flex, ours = (
                    ms[f"{tokens} tokens", name, way] for name in ("dense", f"flex {empty}%", f"flashtile {empty}%")
                )
                yield Gain(tokens, empty, way, dense / ours, flex / ours)


def table(folder: Path) -> str:
    """A row for each number of tokens and share of empty blocks."""
    told = {(gain.tokens, gain.empty, gain.way): gain for gain in gains(folder)}
    lines = ["| tokens | empty blocks | by count | forward | backward | FlexAttention's time over ours: forward, backward |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for tokens in TOKENS:
        for empty in EMPTY:
            ways = [told[tokens, empty, way] for way in WAYS]
            lines.append(
                f"| {tokens:,} | {empty} % | {100 / (100 - empty):.0f}x | "
                + " | ".join(f"{gain.over_dense:.1f}x" for gain in ways)
                + f" | {', '.join(f'{gain.over_flex:.2f}' for gain in ways)} |"
            )
    return "\n".join([*lines, ""])


def sentence(folder: Path) -> str:
    """What 80 % of empty blocks gain in the longer sequence, and FlexAttention's range over all rows."""
    every = list(gains(folder))
    longest = [gain for gain in every if (gain.tokens, gain.empty) == (TOKENS[-1], 80)]
    ways = " and ".join(f"{WAYS[gain.way]} {gain.over_dense:.1f}" for gain in longest)
    flex = [gain.over_flex for gain in every]
    return f"{ways} times as fast as without a mask, and {min(flex):.1f} to {max(flex):.1f} times FlexAttention's speed"
