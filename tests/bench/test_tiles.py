"""What no CSV says was run on a GPU is told, tile by tile, for a Triton release."""

from __future__ import annotations

import csv
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.tiles import Meeting, never_run, tell_never_run
from flashtile.fuzz.case import Case

PLAIN = Meeting("triton", "attention_forward", "block_q=64 block_k=32 warps=4 stages=2", "bf16", "64x64", "causal", "plain")
SINK, LSE = replace(PLAIN, features="sink"), replace(PLAIN, features="lse")
CASE = Case(2, 19, 37, 4, 2, 64, 64, "bf16")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A file of a GPU's runs under Triton 3.6.0: a right one, a wrong one, and a right one under another Triton."""
    rows = [(PLAIN, "right", "3.6.0"), (SINK, "wrong", "3.6.0"), (LSE, "right", "3.9.0")]
    with (tmp_path / "tiles.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["section", *asdict(PLAIN), "status", "triton"])
        writer.writeheader()
        for meeting, status, triton in rows:
            writer.writerow({"section": "tiles", **asdict(meeting), "status": status, "triton": triton})
    return tmp_path / "tiles.csv"


def test_what_was_not_run_right_under_this_triton_is_missing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = never_run({CASE: [PLAIN, SINK, LSE]}, [run], "3.6.0")
    assert missing == {CASE: [SINK, LSE]}
    assert tell_never_run(missing, "3.6.0") == 1
    said = capsys.readouterr().out
    assert (
        "NEVER RUN triton attention_forward block_q=64 block_k=32 warps=4 stages=2 bf16 64x64: sink (causal), lse (causal)"
        in said
    )
    assert "2 meetings in 1 cases were never run on a GPU under Triton 3.6.0" in said


def test_nothing_is_missing_where_all_was_run(run: Path) -> None:
    assert tell_never_run(never_run({CASE: [LSE]}, [run], "3.9.0"), "3.9.0") == 0
