"""While Triton compiles, and no longer, there are no line numbers, unless the user wants them, and Python's collector waits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import gc, sys
from triton import knobs
from flashtile.triton_glue.language import compiling
if sys.argv[1] == "waits":
    gc.disable()
before, collects = knobs.compilation.disable_line_info, gc.isenabled()
try:
    with compiling("cuda"), compiling("cuda"):
        print(int(knobs.compilation.disable_line_info), int(gc.isenabled()))
        raise RuntimeError
except RuntimeError:
    pass
assert knobs.compilation.disable_line_info == before
assert gc.isenabled() == collects
"""


def inside(said: str | None, collector: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_DISABLE_LINE_INFO"}
    chosen = {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    if said is not None:
        chosen["TRITON_DISABLE_LINE_INFO"] = said
    command = [sys.executable, "-c", CODE, collector]
    done = subprocess.run(command, env={**inherited, **chosen}, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


@pytest.mark.parametrize(("said", "left_out"), [(None, 1), ("0", 0), ("1", 1)])
def test_line_numbers_are_left_out_unless_asked_for(said: str | None, left_out: int) -> None:
    assert inside(said, "collects") == f"{left_out} 0"


def test_a_collector_that_was_off_stays_off() -> None:
    assert inside(None, "waits") == "1 0"
