"""Hopper's kernels emulated in a process of its own, where Triton's interpreter is off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def emulate(script: str, cases: Iterable[str], timeout: float = 300) -> list[dict[str, Any]]:
    """What a script of this folder says of each case, a line of JSON each."""
    command = [sys.executable, "-m", f"tests.hopper.{script}", *cases]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
