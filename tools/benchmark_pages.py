"""docs/benchmarks/*.md, every row of every file of times, a page a subject and device; docs/benchmarks.md lists them."""

from __future__ import annotations

import re
from pathlib import Path

from flashtile.bench import report
from flashtile.bench.result import read
from tools import companion_tables, script_tables

SUBJECTS = {  # page -> its title, and which files stand there: the first whose pattern fits; the last takes what is left
    "hopper-h100": ("Hopper's kernels on an H100", r"hopper-(?!forward-|backward-).*-h100"),
    "hopper-h200": ("Hopper's kernels on an H200", r"hopper-(?!forward-|backward-).*-h200|own-shapes-"),
    "portable": ("The portable kernels, and fp32", r"(fa3-paper|llmc|fp32-llmc)-"),
    "shares": ("Costs of features", r"features|hopper-"),
    "lengths": ("Unequal lengths, lists of blocks", r"varlen-"),
    "caches": (
        "Key/value caches",
        r"cached-(hopper-cells|hopper-latent|hopper-peers|hopper-turned|role|queries|host|repeats)-|padded-|generation-|stored-|field-tests-caches-",
    ),
    "caches-log": ("Key/value caches: variants and older rows", r"cached-|decode-"),
    "fp8": ("Eight bits", r"fp8-"),
    "cpu": ("CPUs", r"cpu-"),
    "derivatives": ("Tangents, double backwards, statistics", r"derivatives-"),
    "ranks": ("Sequences that GPUs share", r"context-"),
    "jax": ("JAX", r"jax-"),
    "ops": ("Norms, losses, rotary embeddings", r"companions-"),
    "others": ("Whole models, host time, exported C, checks", r""),
}
# Result files of `flashtile bench`, without the device, that a page shows a plot of.
SHOWN = (
    "hopper-fa3-paper",
    "hopper-cudnn-cross",
    "hopper-llmc",
    "hopper-triton-tutorial",
    "hopper-mla",
    "hopper-models",
    "fp32-llmc",
)
COMPANIONS = "companions-h100"


def is_bench(file: Path) -> bool:
    """Whether the file was written by `flashtile bench`."""
    return file.read_text().startswith("suite,")


def is_shown(stem: str) -> bool:
    return stem.rpartition("-")[0] in SHOWN


def subject(stem: str) -> str:
    """The page on which a file's rows stand."""
    return next(page for page, (_, pattern) in SUBJECTS.items() if re.match(pattern, stem))


def stems(results: Path) -> dict[str, list[str]]:
    """The files of each page, those of suites first."""
    found: dict[str, list[str]] = {page: [] for page in SUBJECTS}
    for stem in (*(file.stem for file in sorted(filter(is_bench, results.glob("*.csv")))), COMPANIONS, *script_tables.FILES):
        found[subject(stem)].append(stem)
    return found


def pages(results: Path) -> dict[str, str]:
    """The list, and the pages that it lists, by their names in docs."""
    lines = [
        "# Benchmarks",
        "",
        "Written by `make docs` from `benchmarks/results`; TFLOP/s as FlashAttention counts them. A page says of each of its",
        "files what its rows are and of which device, day and commit. [How to repeat them](how-to/benchmarks.md).",
        "",
        "| page | devices | files |",
        "| --- | --- | --- |",
    ]
    told = dict[str, str]()
    for page, own in stems(results).items():
        title = SUBJECTS[page][0]
        devices = {row["device"] for stem in own for row in companion_tables.read(results / f"{stem}.csv")} - {""}
        links = (f'<a id="{stem}"></a>[{stem}](benchmarks/{page}.md#{stem})' for stem in own)
        lines.append(f"| [{title}](benchmarks/{page}.md) | {', '.join(sorted(devices))} | {', '.join(links)} |")
        parts = [f"# Benchmarks: {title}", "", script_tables.contents(results, own), ""]
        parts += [part for stem in own for part in (f"## {stem}", "", section(results, stem), "")]
        told[f"benchmarks/{page}.md"] = moved("\n".join(parts), page)
    return {"benchmarks.md": "\n".join([*lines, ""]), **told}


def section(results: Path, stem: str) -> str:
    """What a file's rows are, and all of them."""
    file = results / f"{stem}.csv"
    if stem == COMPANIONS:
        rows = companion_tables.read(file)
        told = (script_tables.note(results, stem), companion_tables.summary(rows), companion_tables.table(rows))
        return "\n\n".join([*told, companion_tables.provenance(rows)])
    if not is_bench(file):
        return script_tables.section(file)
    plot = [f"![{stem}](../{stem}.png)"] if is_shown(stem) else []
    return "\n\n".join([script_tables.note(results, stem), report.markdown(read(file)), *plot])


def moved(text: str, page: str) -> str:
    """The text with links to files' rows and to pages of docs that are right on this page."""

    def link(found: re.Match[str]) -> str:
        other = subject(found[1])
        return found[0] if other == page else f"]({other}.md#{found[1]})"

    return re.sub(r"\]\((goals|limits)\.md", r"](../\1.md", re.sub(r"\]\(#([\w-]+)\)", link, text))
