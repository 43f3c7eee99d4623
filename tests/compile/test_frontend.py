"""What tests/frontend.py has made quicker reads kernels as Triton itself does."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.compile.conftest import HERE, ROOT

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.parametrize("which", ["few", pytest.param("all", marks=pytest.mark.whole)])
def test_kernels_are_read_as_triton_reads_them(which: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(HERE / "frontend_code.py"), which]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(row["backend"], row["target"]) for row in rows} == {("triton", "sm90"), ("hopper", "sm90"), ("triton", "gfx942")}
    assert any("placed" in row["own"] for row in rows)
    for row in rows:
        assert row["own"] == row["quick"], row
        assert len(set(row["own"].values())) == len(row["own"]), row
