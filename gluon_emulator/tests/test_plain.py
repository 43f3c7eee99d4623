"""A plain Gluon kernel runs in the emulator, which finds what is wrong with it; in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_kernel_is_right_as_it_stands_and_its_mistakes_are_found() -> None:
    command = [sys.executable, "-m", "gluon_emulator.tests.run"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert found["as it stands"] == "right"
    assert "changed" in found["early"]
    assert "fence" in found["unfenced"]


def test_it_knows_nothing_of_flashtile() -> None:
    texts = [path.read_text() for path in Path(ROOT, "gluon_emulator").glob("*.py")]
    assert len(texts) >= 5
    assert not any("flashtile" in text or "tests.hopper" in text for text in texts)
