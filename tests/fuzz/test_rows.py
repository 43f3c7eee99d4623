"""Counts of `flashtile fuzz`, run by run."""

from __future__ import annotations

from pathlib import Path

from tools import fuzz_rows


def test_runs_add_up_in_rows(tmp_path: Path) -> None:
    """A kernel is new once, whichever run had it; a run has one row, however often it is added."""
    run = {
        "machine": "NVIDIA H200, torch 2.11.0, triton 3.6.0", "backends": ["hopper", "", "hopper"], "seconds": 9, "cases": 8,
        "variants": 2, "status": {"right": 5, "refused": 2, "wrong": 1}, "wrong": [{}], "seed": 1, "date": "2026-11-30",
        "kernels": ["01234567a", "01234568b"],
    }  # fmt: skip
    later = {**run, "date": "2026-12-01", "kernels": ["01234568b", "01234569c", "0123456ad"]}
    assert fuzz_rows.add(tmp_path, [later, run], "abc") == 2
    assert fuzz_rows.add(tmp_path, [run, {**run, "seed": 2}], "abd") == 1
    rows = fuzz_rows.rows_of(tmp_path, "fuzz-h200")
    assert [(row["kernels"], row["new"], row["commit"]) for row in rows] == [
        ("2", "2", "abc"),
        ("3", "2", "abc"),
        ("2", "0", "abd"),
    ]
    assert (tmp_path / "fuzz-h200.kernels").read_text().split() == ["01234567", "01234568", "01234569", "0123456a"]
    assert rows[0]["backends"] == "hopper chosen"
    said = fuzz_rows.sentence(tmp_path).replace("\n", " ")
    assert "24 whole problems in 3 runs, of 4 distinct kernels" in said
    assert "15 were right, and 0 a little off but right with most other data. 6 were refused with a reason. 3 were" in said
    assert "in runs of" not in said, "all runs asked for the same backends"
    assert fuzz_rows.add(tmp_path, [run | {"seed": 3, "backends": ["triton", "hopper", ""]}], "abe") == 1
    said = fuzz_rows.sentence(tmp_path).replace("\n", " ")
    other = "`triton`, `hopper` and the planner's choice"
    assert f"So were refused 6 in runs of `hopper` and the planner's choice, 2 in runs of {other} ([why]" in said


def test_runs_on_a_cpu_have_a_file_of_their_own(tmp_path: Path) -> None:
    """Whatever it is called; there are no kernels."""
    run = {
        "machine": "A CPU, of 8 cores, torch 2.13.0+cpu, triton 3.6.0", "backends": ["cpu"], "seconds": 9, "cases": 8,
        "variants": 2, "status": {"right": 6, "refused": 2}, "wrong": [], "seed": 1, "date": "2026-11-30", "kernels": [],
    }  # fmt: skip
    assert (
        fuzz_rows.add(tmp_path, [run, run | {"machine": "NVIDIA H200, torch 2.11.0, triton 3.6.0", "kernels": ["ab"]}], "abc")
        == 2
    )
    (row,) = fuzz_rows.rows_of(tmp_path, "fuzz-cpu")
    assert (row["device"], row["torch"], row["triton"], row["right"]) == ("A CPU, of 8 cores", "2.13.0+cpu", "3.6.0", "6")
    assert not (tmp_path / "fuzz-cpu.kernels").exists()
    said = fuzz_rows.sentence(tmp_path).replace("\n", " ")
    assert "On a CPU `flashtile fuzz` drew 8 whole problems in 1 run and judged" in said
    assert said.endswith(
        "6 were right, and 0 a little off but right with most other data. 2 were refused with a reason. 0 were wrong."
    )
    assert "On an H200 `flashtile fuzz` drew 8 whole problems in 1 run, of 1 distinct kernels, and judged" in said
