"""The demo, small: in a process of its own, where Triton compiles and nothing is poisoned."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CODE = """
from pathlib import Path
from flashtile.demo.main import run_demo
from flashtile.demo.train import Setup

setup = Setup(steps=3, batch=2, context=64, width=32, layers=1, heads=2)
raise SystemExit(0 if run_demo(setup, Path({output!r}), lengths=(256, 512)) else 1)
"""


def test_demo(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "KINETO_LOG_LEVEL": "99", "OMP_WAIT_POLICY": "PASSIVE"}
    result = subprocess.run(
        [sys.executable, "-c", CODE.format(output=str(tmp_path / "made"))],
        capture_output=True, text=True, env=environment, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    for expected in (
        "3/3",
        "loss at step 3",
        "they agree",
        "step time, median",
        "512",
        "seqlen^",
        "The model writes:",
        "What the figures mean",
        "Both models learned the same",
    ):
        assert expected in result.stdout
    assert (tmp_path / "made" / "demo.png").stat().st_size > 10_000
    assert len((tmp_path / "made" / "sample.txt").read_text()) == 600
