"""What pages say of the speed of a cache, from the rows of benchmarks/cached.py alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean

from tools.companion_tables import Row, read


def e4m3_caches(folder: Path) -> str:
    """How much faster than from bf16 a large cache of e4m3 decodes, by where it lies: a sentence of several pages."""
    ratios = dict[str, str]()
    for row in sorted(read(folder / "cached-hopper-turned-h200.csv"), key=lambda row: row["date"]):  # the newest row stays
        cell = (row["model"], row["batch"], row["keys"], row["queries"], row["lengths"])
        if cell == ("llama3-8b", "64", "8192", "1", "") and (
            place := re.fullmatch(r"flashtile/(contiguous|16|64)/e4m3", row["provider"])
        ):
            ratios[place[1]] = f"{float(row['of_bf16']):.2f}"
    return f"{ratios['contiguous']} from one contiguous cache, {ratios['16']} from pages of 16, {ratios['64']} from pages of 64"


def decoding_rows(folder: Path, lengths: str = "") -> list[Row]:
    """Ours of one query over a cache beside the best of SDPA's kernels, by the library's own choice of a tile, the newest of
    each cell: items of such lengths, equal ones by default."""
    found = dict[tuple[str, ...], Row]()
    for row in sorted(beside_sdpa(folder), key=lambda row: row["date"]):
        ours = re.fullmatch(r"flashtile/(contiguous|\d+)", row["provider"])
        if ours and row["of_best"] and row["queries"] == "1" and row["lengths"] == lengths:
            found[tuple(row[name] for name in ("model", "batch", "keys", "window", "provider"))] = row
    return list(found.values())


def beside_sdpa(folder: Path) -> list[Row]:
    """Rows whose `of_best` is beside SDPA's kernels: of rotations with others `of_sdpa`, of variants those that were kept."""
    kept = " ahead=0"
    short = [row for row in read(folder / "cached-hopper-short-h200.csv") if row["provider"].endswith(kept)]
    return [
        *read(folder / "cached-hopper-turned-h200.csv"),
        *({**row, "provider": row["provider"].removesuffix(kept)} for row in short),
        *({**row, "of_best": row["of_sdpa"]} for row in read(folder / "cached-hopper-peers-h200.csv")),
    ]


def uneven_decoding(folder: Path) -> str:
    """The same where items' lengths differ: a few words of docs/limits.md."""
    of_best = {(row["model"], row["provider"]): float(row["of_best"]) for row in decoding_rows(folder, "lognormal")}
    return f"{of_best['llama3-8b', 'flashtile/contiguous']:.2f}"


def window_decoding(folder: Path) -> str:
    """The same beside a window: a few words of docs/limits.md."""
    of_best = {(row["model"], row["window"], row["provider"]): float(row["of_best"]) for row in decoding_rows(folder)}
    return f"{of_best['gemma3-27b', '1024', 'flashtile/contiguous']:.2f}"


def rotation(folder: Path) -> dict[str, list[Row]]:
    """Ours over contiguous caches beside all peers that there are, by the kind of a cell."""
    found = dict[str, list[Row]]()
    for row in read(folder / "cached-hopper-peers-h200.csv"):
        if row["provider"] == "flashtile/contiguous":
            kind = row["model"] if row["model"].startswith("mla") else row["lengths"]
            found.setdefault(kind or ("several" if row["queries"] != "1" else "one"), []).append(row)
    return found


def of_best(rows: Sequence[Row]) -> str:
    """The mean, and the least and the most."""
    ratios = [float(row["of_best"]) for row in rows]
    return f"{geometric_mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def rotated(folder: Path) -> str:
    """What this is of whoever is fastest: a few words of docs/limits.md."""
    told = rotation(folder)
    (uneven,), (long,) = told["lognormal"], told["one-long"]
    return (
        f"{of_best(told['one'])} of one query and equal lengths, {float(uneven['of_best']):.2f} of lognormal ones, "
        f"{float(long['of_best']):.2f} where one item is 16 times as long; {of_best(told['several'])} of 2 to 8 queries, where "
        f"FlashAttention-4 is fastest; latents of 16 heads {of_best(told['mla-16'])}, of 128 {of_best(told['mla-128'])}, where "
        "flashinfer is"
    )


def drafts(folder: Path) -> str:
    """Four queries of each of 64 items over a contiguous cache, the newest row: a few words of docs/limits.md."""
    every = [row for row in beside_sdpa(folder) if row["lengths"] == "" and row["of_best"]]
    asked = [row for row in every if (row["queries"], row["batch"], row["provider"]) == ("4", "64", "flashtile/contiguous")]
    row = max(asked, key=lambda row: row["date"])
    return f"{float(row['us']):.0f} us, {float(row['of_best']):.1f} times SDPA's best speed"


def decoding(folder: Path) -> str:
    """One query over a cache beside the best of SDPA's kernels: a sentence of docs/limits.md."""
    rows = decoding_rows(folder)
    one, pages = (of_best([r for r in rows if r["provider"] == f"flashtile/{kind}"]) for kind in ("contiguous", "16"))
    return f"{one} for a contiguous cache, {pages} for pages of 16"
