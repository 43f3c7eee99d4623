"""What a suite's rows are of, in words made from the rows: their shapes, and who stands beside us."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flashtile.bench import report
from flashtile.bench.result import Result, read

PEERS = {
    "sdpa/cudnn": "cuDNN",
    "fa4": "FlashAttention-4",
    "sdpa/flash": "FlashAttention-2",  # the one in PyTorch
    "sdpa/efficient": "PyTorch's efficient attention",
    "sdpa/math": "PyTorch's plain attention",
    "flex": "FlexAttention",
}
MODELS = {  # of the suite "models" of flashtile/bench/cases.py, in its order -> whose attention it is
    "attention(q=2x8192x32x128,kv=8192x8x128,bf16,band=:0)": "Llama 3 8B",
    "attention(q=1x8192x64x128,kv=8192x8x128,bf16,band=:0)": "Llama 3 70B",
    "attention(q=2x4096x64x128,kv=4096x8x128,bf16,band=:0)": "Qwen3 32B",
    "attention(q=1x8192x32x128,kv=8192x16x128,bf16,band=:0)": "Gemma 3 27B",
    "attention(q=2x4096x64x64,kv=4096x8x64,bf16,band=:0)": "GPT-OSS 120B",
    "attention(q=1x4096x128x192,kv=4096x128x128,bf16,band=:0)": "DeepSeek V3",
    "attention(q=1x32768x24x128,kv=32768x24x128,bf16)": "a video DiT",
    "attention(q=64x577x16x64,kv=577x16x64,bf16)": "ViT-L",
}
OWN_SHAPES = "own-shapes-h200"


def legend(results: Sequence[Result]) -> str:
    """Whose attention the rows of the suite "models" are, and which were not timed, and why."""
    first = {row.spelling: row for row in results}
    timed = {row.spelling for row in measured(results)}
    whose = ", ".join(f"{MODELS[spelling]} `{report.label(first[spelling])}`" for spelling in first if spelling in timed)
    left = " and ".join(f"{MODELS[spelling]} `{report.label(first[spelling])}`" for spelling in first if spelling not in timed)
    why = " and ".join(dict.fromkeys(row.reason for row in results if row.spelling not in timed))
    return f"{whose}. Empty rows were not timed ({why}): {left}" if left else whose


def told(results: Sequence[Result]) -> str:
    """Head dims, lengths, dtypes and masks of the rows that have a time."""
    rows = measured(results)
    dtypes = ", ".join(dict.fromkeys(row.dtype for row in rows))
    masks = [mask for mask, causal in (("full", False), ("causal", True)) if any(row.causal == causal for row in rows)]
    return f"{_depths(rows)}; {_lengths(rows)}; {dtypes}, {' and '.join(masks)}"


def peers(results: Sequence[Result]) -> str:
    """Whoever else has a time in these rows, in the order of the CSV."""
    return ", ".join(PEERS[name] for name in report.providers_of(row for row in measured(results) if row.side == "peer"))


def measured(results: Sequence[Result]) -> list[Result]:
    return [row for row in results if row.tflops is not None]


def timed_head_dims(folder: Path) -> str:
    """Which head dims the suites of Hopper's kernels have times of."""
    suites = [path for path in sorted(folder.glob("hopper-*.csv")) if path.read_text().startswith("suite,")]
    return _depths([row for path in suites for row in measured(read(path))]).removeprefix("head_dim ")


def own_shapes(folder: Path, few: bool) -> str:
    """Our speed over the fastest peer's in shapes that no suite has, up to head_dim 256: of `few` keys, or of many."""
    found: dict[str, list[float]] = {}
    depths = set[int]()
    for row in _own_rows(folder):
        first = next(iter(row.values()))
        if (first.seqlen_k < first.seqlen_q) == few and first.head_dim <= 256:
            found.setdefault(first.direction, []).append(report.ratio(row) or 0.0)
            depths.add(first.head_dim)
    if not found:
        return "not measured"
    told = ", ".join(f"{way} {_span_of(ratios)}" for way, ratios in found.items())
    return f"head_dim {', '.join(map(str, sorted(depths)))}: {told}"


def own_table(folder: Path) -> str:
    """The same by shape, with our TFLOP/s and who is the fastest peer: a table of docs/limits.md."""
    cells: dict[tuple[int, str, str], dict[str, str]] = {}
    for row in _own_rows(folder):
        first = next(iter(row.values()))
        ours, theirs = (
            max((r for r in row.values() if r.side == side), key=lambda r: r.tflops or 0.0) for side in ("own", "peer")
        )
        told = f"{ours.tflops:.0f}, {report.ratio(row):.2f}x {PEERS[theirs.provider]}"
        cells.setdefault((first.head_dim, report.label(first), first.spelling), {})[first.direction] = told
    lines = ["| head_dim | shape | forward | backward |", "| --- | --- | --- | --- |"]
    for (depth, label, _), of in sorted(cells.items()):
        lines.append(f"| {depth} | `{label}` | {of.get('forward', '-')} | {of.get('backward', '-')} |")
    return "\n".join([*lines, ""])


def _own_rows(folder: Path) -> list[report.Row]:
    """The rows of these shapes in which both sides have a time."""
    rows = report.grouped(measured(read(folder / f"{OWN_SHAPES}.csv")))
    return [row for row in rows if report.ratio(row) is not None]


def _span_of(ratios: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{ratio:.2f}x" for ratio in (min(ratios), max(ratios))))


def _depths(rows: Sequence[Result]) -> str:
    depths = sorted({(row.head_dim, row.head_dim_v) for row in rows})
    apart = [f"{keys} with values of {values}" for keys, values in depths if keys != values]
    return "head_dim " + ", ".join([*(str(keys) for keys, values in depths if keys == values), *apart])


def _lengths(rows: Sequence[Result]) -> str:
    queries, keys = {row.seqlen_q for row in rows}, {row.seqlen_k for row in rows}
    if all(row.seqlen_q == row.seqlen_k for row in rows):
        return f"{_span(keys)} tokens"
    return f"{_span(queries)} queries, {_span(keys)} keys"


def _span(lengths: set[int]) -> str:
    return " to ".join(dict.fromkeys(short(length) for length in (min(lengths), max(lengths))))


def short(length: int) -> str:
    """16384 as 16k; 1536 as 1,536."""
    return f"{length // 1024}k" if length % 1024 == 0 else f"{length:,}"
