"""What a suite's rows are of, in words made from the rows: their shapes, and who stands beside us."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flashtile.bench import report
from flashtile.bench.result import Result, read
from flashtile.problem.attention import AttentionProblem
from tools import companion_tables

PEERS = {
    "sdpa/cudnn": "cuDNN",
    "fa4": "FlashAttention-4",
    "sdpa/flash": "FlashAttention-2",  # the one in PyTorch
    "sdpa/efficient": "PyTorch's efficient attention",
    "sdpa/math": "PyTorch's plain attention",
    "flex": "FlexAttention",
}


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
    """Which head dims have a time beside a peer's on Hopper, and which a forward's beside our own alone."""
    suites = [path for path in sorted(folder.glob("hopper-*.csv")) if path.read_text().startswith("suite,")]
    rows = [row for path in suites for row in measured(read(path))]
    alone = {
        (problem.head_dim, problem.head_dim_v)
        for path in sorted(folder.glob("hopper-forward-*.csv"))
        for row in companion_tables.read(path)
        for problem in [AttentionProblem.parse(row["problem"])]
    } - {(row.head_dim, row.head_dim_v) for row in rows}
    return f"{_depths(rows).removeprefix('head_dim ')}; of {', '.join(str(keys) for keys, _ in sorted(alone))} a forward alone"


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
