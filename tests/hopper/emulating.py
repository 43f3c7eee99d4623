"""Hopper's kernels emulated in a process of its own, where Triton's interpreter is off."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests import forked

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *arguments: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """A script of this folder."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    return forked.run(f"tests.hopper.{script}", *arguments, environment=environment, cwd=ROOT, timeout=timeout)


def emulate(script: str, cases: Iterable[str], timeout: float = 300) -> list[dict[str, Any]]:
    """What a script of this folder says of each case, a line of JSON each."""
    done = run(script, *cases, timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
