"""One row of the CSV. Tables and plots are made from these rows alone."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

from flashtile.bench.cases import Direction, field_flops, is_causal
from flashtile.problem.attention import AttentionProblem

OWN = "flashtile/"  # providers of this checkout
BASE = "base/"  # the same of the commit that is compared with

Status = Literal["ok", "wrong", "refused", "failed", "skipped"]


@dataclass(frozen=True)
class Result:
    """One provider on one case in one direction; the fields are the columns.

    ms is the median of the rounds, ms_low and ms_high its extremes. error is the relative error norm of out, or the
    largest of dq, dk, dv. host_us is the host time of a forward call (forward rows), host_step_us that of forward and
    backward together (backward rows). status: "ok", "wrong" (never timed), "refused" (cannot run it), "failed"
    (raised, crashed, hung), "skipped" (the budget was used up); reason says more.
    """

    suite: str
    spelling: str
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: str
    causal: bool
    direction: Direction
    provider: str
    status: Status
    reason: str = ""
    ms: float | None = None
    ms_low: float | None = None
    ms_high: float | None = None
    tflops: float | None = None
    error: float | None = None
    host_us: float | None = None
    host_step_us: float | None = None
    device: str = ""
    driver: str = ""
    torch: str = ""
    triton: str = ""
    cudnn: str = ""
    flash_attn: str = ""
    python: str = ""
    date: str = ""
    commit: str = ""

    @property
    def side(self) -> Literal["own", "base", "peer"]:
        """Whose it is: this checkout's, the compared commit's, or somebody else's."""
        return "own" if self.provider.startswith(OWN) else "base" if self.provider.startswith(BASE) else "peer"

    @property
    def problem(self) -> AttentionProblem:
        """What was computed."""
        return AttentionProblem.parse(self.spelling)


COLUMNS = tuple(field.name for field in fields(Result))


def describe(suite: str, problem: AttentionProblem) -> dict[str, Any]:
    """The columns that say what was computed."""
    shape = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")
    sizes = {name: getattr(problem, name) for name in shape}
    return {"suite": suite, "spelling": problem.spell(), **sizes, "dtype": problem.dtype.value, "causal": is_causal(problem)}


def speed(problem: AttentionProblem, direction: Direction, ms: float) -> float:
    """TFLOP/s, with FLOPs as the field counts them."""
    return field_flops(problem, direction) / ms * 1e-9


class Writer:
    """A CSV that grows row by row, so that an interrupted run leaves what it had; what a file held goes with the first rows."""

    def __init__(self, path: Path):
        self.path = path
        self.began = False

    def add(self, results: Iterable[Result]) -> None:
        """Append rows."""
        rows = [[_write(getattr(result, name)) for name in COLUMNS] for result in results]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a" if self.began else "w", newline="") as file:
            csv.writer(file).writerows(rows if self.began else [COLUMNS, *rows])
        self.began = True


def read(path: Path) -> list[Result]:
    """The rows of a CSV. Raises ValueError if it is not one of ours."""
    try:
        with path.open(newline="") as file:
            rows = csv.DictReader(file)
            missing = set(COLUMNS) - set(rows.fieldnames or ())
            kinds = get_type_hints(Result)
            whole = [row for row in rows if not missing]
            if any(row[name] is None for row in whole for name in COLUMNS):
                raise ValueError("a row was cut off.")
            found = [Result(**{name: _read(kinds[name], row[name]) for name in COLUMNS}) for row in whole]
    except (ValueError, csv.Error) as error:  # no text, no numbers, or a row that was cut off
        raise ValueError(f"{path} cannot be read as a CSV written by flashtile bench.") from error
    if missing:
        raise ValueError(f"{path} lacks the columns {', '.join(sorted(missing))}; it must be written by flashtile bench.")
    return found


def unique(values: Iterable[str]) -> Sequence[str]:
    """The values in the order of their first appearance."""
    return list(dict.fromkeys(values))


def _write(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _read(kind: Any, text: str) -> Any:
    if kind is bool:
        return text == "yes"
    if kind is int:
        return int(text)
    if kind == float | None:
        return float(text) if text else None
    return text
