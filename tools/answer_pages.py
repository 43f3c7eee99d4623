"""docs/answers/*.md and docs/answers.md: lists of questions, and figures in answers, from benchmarks/results."""

from __future__ import annotations

import re
import textwrap
from functools import cache
from pathlib import Path

from flashtile.bench.result import read
from tools import block_rows, decoding_tables, error_table, fp8_rows, front_page, script_tables, shapes

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "answers"
GROUPS = (
    "install", "pytorch", "masks", "replace", "models", "caches", "gpus", "compile", "jax", "c", "speed", "kernels", "numbers",
    "fp8", "project",
)  # fmt: skip
COLUMNS = 100  # of a figure's lines: a word and the marks stand in front of the first one
MARK = re.compile(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", re.DOTALL)


def place(heading: str) -> str:
    """What a heading is called in a link, on a forge and by mkdocs."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def questions(text: str) -> list[str]:
    """The headings of a page's answers, without what is generated."""
    return re.findall(r"^## (.+)$", MARK.sub("", text), re.MULTILINE)


def contents(text: str, page: str = "") -> str:
    """A page's questions, a line each, with links to them."""
    return "".join(f"- [{question}]({page}#{place(question)})\n" for question in questions(text))


def every_question() -> str:
    """All questions by page."""
    parts = list[str]()
    for group in GROUPS:
        text = (FOLDER / f"{group}.md").read_text()
        title = text.partition("\n")[0].removeprefix("# ")
        parts.append(f"\n## {title}\n\n{contents(text, f'answers/{group}.md')}")
    return "".join(parts)


def filled(text: str, results: Path) -> str:
    """A page with its list of questions and the figures that it has marks for. An unknown mark is a KeyError."""
    wrap = textwrap.TextWrapper(COLUMNS, break_on_hyphens=False)
    parts = {name: "\n".join(wrap.wrap(figure)) for name, figure in figures(results).items()}
    parts["contents"] = "\n\n" + (contents(text) or every_question().lstrip()) + "\n"
    return MARK.sub(lambda mark: f"<!-- {mark[1]}:begin -->{parts[mark[1]]}<!-- {mark[1]}:end -->", text)


@cache
def figures(results: Path) -> dict[str, str]:
    """The figures of answers by the names of their marks."""
    fast, slow = (cells_of(table) for table in (front_page.speed(results), front_page.slower(results)))
    step, peers = (cells_of(table) for table in (front_page.step(results), script_tables.jax(results)))
    forward, both = peers["jax.nn/cudnn"]
    norms = fast["LayerNorm and RMSNorm, also fused"]
    return {
        "behind": "; ".join(f"{what}: {speed} of {peer}" for what, speed, peer in front_page.behind(results)),
        "costs": "; ".join(f"{name} {ms}" for (name, mask), (ms, _) in _costs(results).items() if mask == "full"),
        "bias": _bias(results),
        "blocks": block_rows.sentence(results),
        "cpu16": slow["16-bit backward on a CPU"][0],
        "cpu32": slow["fp32 forward and backward on one thread of a CPU; small calls most"][0],
        "cputimes": script_tables.cpu_times(results),
        "decoding": decoding_tables.decoding(results),
        "cross": _ways(fast[front_page.called(results, "hopper-cudnn-cross")]),
        "documents": script_tables.documents(results),
        "depths": shapes.timed_head_dims(results),
        "drafts": decoding_tables.drafts(results),
        "e4m3": decoding_tables.e4m3_caches(results),
        "fp8": fp8_rows.shares(results),
        "fewkeys": shapes.own_shapes(results, few=True),
        "field": front_page.field_tests(results),
        "first": script_tables.first_calls(results),
        "flex": _beside_flex(results),
        "fp32": _ways(fast[front_page.called(results, "fp32-llmc")]),
        "head": script_tables.head(results),
        "large": error_table.large_in_words(),
        "latent": "; ".join(_latent(results)),
        "llama": _both_passes(front_page.models(results), "Llama 3 8B"),
        "models": slow[front_page.MODELS][0],
        "norms": _ways(norms),
        "ownshapes": shapes.own_shapes(results, few=False),
        "pairs": script_tables.pairs(results),
        "peers": f"{forward} times as fast in the forward, {both} times with its backward",
        "portable": slow["the portable kernels, bf16; other GPUs run these"][0],
        "ranks": script_tables.ranks(results),
        "shapes": _ways(fast[front_page.called(results, front_page.FIGURE)]),
        "softcap": slow["softcap, forward, head_dim 64 and 128"][0],
        "steps": ", ".join(f"head_dim {depth} {step[f'{depth}, causal'][-1]}" for depth in (64, 128, 256)),
        "statistics": script_tables.statistics_range(results),
        "trained": script_tables.trained_pairs(results),
        "uneven": decoding_tables.uneven_decoding(results),
        "unequal": _ways(fast[front_page.UNEQUAL]),
        "window": decoding_tables.window_decoding(results),
        "wide": slow[shapes.told(read(results / "hopper-mla-h200.csv"))][0],
    }


def cells_of(table: str) -> dict[str, list[str]]:
    """The rows of a table of markdown: first cell -> the others."""
    return {first: rest for first, *rest in _rows(table)}


def _rows(table: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]


def _ways(cells: list[str]) -> str:
    """Forward and backward of a row of README's table of speed."""
    return f"forward {cells[1]}, backward {cells[2]}"


def _both_passes(table: str, model: str) -> str:
    """What a row of front_page.models says of a forward and a backward together."""
    titles, *_ = _rows(table)
    cells = dict(zip(titles, next(row for row in _rows(table) if row[0] == model), strict=True))
    return ", ".join(f"{cells[title]} {title.removeprefix('both, ')}'s speed" for title in titles if title.startswith("both, "))


def _costs(results: Path) -> dict[tuple[str, str], tuple[str, str]]:
    """(feature, mask) -> our times and FlexAttention's, as docs/features.md has them."""
    return {(name, mask): (ours, flex) for name, mask, ours, flex, _ in _rows(script_tables.costs(results))[2:]}


def _bias(results: Path) -> str:
    """What a learned bias costs: our times with it and without."""
    costs = _costs(results)
    ways = zip(
        ("forward", "both passes"), *(costs[name, "full"][0].split(", ") for name in ("bias, gradient", "plain")), strict=True
    )
    return ", ".join(f"{way} {biased} ms instead of {plain}" for way, biased, plain in ways)


def _beside_flex(results: Path) -> str:
    """FlexAttention's time of a forward and a backward over ours: the least and the most of the features."""
    both = [[float(cell.split(", ")[1]) for cell in cells] for cells in _costs(results).values() if cells[1] != "-"]
    ratios = [flex / ours for ours, flex in both]
    return f"{min(ratios):.1f} to {max(ratios):.1f}"


def _latent(results: Path) -> list[str]:
    """Latent attention's times, the largest batch of each number of heads that was measured at 4,096 keys."""
    rows = [row for row in _rows(script_tables.latent(results))[2:] if row[1] == "64 x 4,096"]
    return [f"{heads} heads, {sizes} keys {us} us ({tflops} TFLOP/s)" for heads, sizes, us, tflops, _ in rows]
