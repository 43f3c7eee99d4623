"""Kernels are compiled without line numbers unless the user wants them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).resolve().parents[2]
CODE = """
from triton import knobs
from flashtile._triton import compiling
before = knobs.compilation.disable_line_info
with compiling("cuda"):
    print(int(knobs.compilation.disable_line_info))
assert knobs.compilation.disable_line_info == before
"""


@pytest.mark.parametrize(("said", "left_out"), [(None, 1), ("0", 0), ("1", 1)])
def test_line_numbers_are_left_out_unless_asked_for(said: str | None, left_out: int) -> None:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_DISABLE_LINE_INFO"}
    chosen = {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    if said is not None:
        chosen["TRITON_DISABLE_LINE_INFO"] = said
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, env={**inherited, **chosen}, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout) == left_out
