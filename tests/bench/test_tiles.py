"""What no CSV says was run on a GPU is told, tile by tile, for a Triton release."""

from __future__ import annotations

import csv
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.tiles import ATTENTION, PASSES, Meeting, main, meetings, needed, shown_by, tell
from flashtile.fuzz.case import Case
from flashtile.plan.device import named

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
    made = {CASE: [PLAIN, SINK, LSE, replace(PLAIN, columns="128x128")]}
    assert tell(made, shown_by([run], "3.6.0"), "3.6.0") == 0
    said = capsys.readouterr().out
    assert "1 of 3 tiles beside features were run on a GPU under Triton 3.6.0, 2 were not" in said
    assert "1 of 2 tiles at head dims were run on a GPU under Triton 3.6.0, 1 were not" in said


@pytest.mark.parametrize(
    ("meeting", "triton"),
    [
        (replace(PLAIN, tile="block_q=16 block_k=16 warps=4 stages=1"), "3.6.0"),
        (replace(PLAIN, kernel="attention_backward_keys"), "3.6.0"),
        (replace(PLAIN, kind="ieee"), "3.6.0"),
        (PLAIN, "3.7.0"),
    ],
)
def test_a_tile_that_was_never_run_fails(run: Path, meeting: Meeting, triton: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tell({CASE: [PLAIN, meeting]}, shown_by([run], triton), triton) == 1
    assert f"NEVER RUN triton {meeting.kernel} {meeting.tile}" in capsys.readouterr().out


def test_nothing_is_missing_where_all_was_run(run: Path) -> None:
    assert needed({CASE: [LSE]}, shown_by([run], "3.9.0")) == {}
    assert tell({CASE: [LSE]}, shown_by([run], "3.9.0"), "3.9.0") == 0


def test_a_case_is_run_for_what_it_shows_first_and_at_the_widest_head_dims(run: Path) -> None:
    wide = replace(CASE, head_dim=256, head_dim_v=256)
    other = replace(PLAIN, tile="block_q=16 block_k=16 warps=4 stages=1")
    made = {
        replace(CASE, seqlen_q=1): [PLAIN],  # was run
        replace(CASE, seqlen_q=2): [SINK],
        replace(wide, seqlen_q=3): [replace(SINK, columns="256x256")],  # so that the one before has nothing new
        replace(CASE, seqlen_q=4): [replace(PLAIN, kind="fp16")],  # its features were run, not its dtype at these head dims
        replace(CASE, seqlen_q=5): [other],  # a tile that was never run
        replace(CASE, seqlen_q=6): [replace(LSE, mask="full"), PLAIN],
    }
    shown = shown_by([run], "3.6.0")
    assert [case.seqlen_q for case in needed(made, shown)] == [5, 3, 4, 6]
    assert [case.seqlen_q for case in needed(made, set())] == [3, 5, 1, 4, 6]


BEYOND = {
    "triton": {
        "tangent": {"attention_tangent"},
        "second": {"attention_tangent", "attention_second_queries", "attention_second_keys"},
        "statistics": {"attention_statistics", "attention_mass"},
        "entropy": {"attention_entropy_queries", "attention_entropy_keys"},
        "cached": {"decode_forward", "decode_combine"},
    },
    "hopper": {
        "tangent": {"attention_tangent"},
        "second": {"attention_tangent", "attention_second"},
        "statistics": set(),  # the portable kernels do
        "entropy": set(),
        "cached": {"decode_hopper", "decode_combine"},
    },
}


@pytest.mark.usefixtures("hopper_runs")
@pytest.mark.parametrize("backend", BEYOND)
def test_passes_beside_forward_and_backward_are_listed_with_their_tiles(backend: str) -> None:
    assert {ATTENTION, *BEYOND[backend]} == set(PASSES)
    case = Case(4, 528, 528, 24, 24, 64, 64, "bf16", band=":0", upstream="out", backend=backend)
    for which, kernels in BEYOND[backend].items():
        found = meetings("bf16", "causal", "plain", case, named("sm90"), [which])
        assert {meeting.kernel for meeting in found} >= kernels, which
        assert bool(found) == bool(kernels), which
        assert all("block_q=" in meeting.tile and meeting.columns == "64x64" for meeting in found)
    whole = meetings("bf16", "causal", "plain", case, named("sm90"), PASSES)
    assert {meeting.kernel for meeting in whole} >= {"attention_forward", *set[str]().union(*BEYOND[backend].values())}
    dropped = replace(case, dropout=0.1)
    assert meetings("bf16", "causal", "dropout", dropped, named("sm90"), ["cached"]) == []  # a cache has none


@pytest.mark.parametrize("told", [[], ["--list", "sm90", "--known", "a.csv"]])
def test_passes_that_nothing_runs_are_listed_alone(
    told: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tiles", *told, "--passes", "attention", "second"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert (
        "--passes are attention second; without --list, or with --known, it must be attention alone" in capsys.readouterr().err
    )
