"""Compiling without a GPU, which needs kernels that are not interpreted, hence processes of their own."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NEWEST = ROOT / ".venv" / "newest-triton"
Compiled = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """`compiled(script, *arguments, packages=None)`: what a script of this folder prints of them, line by line. Workers of one
    session that ask for the same share one process: the second waits for the first.
    """
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
    shared.mkdir(exist_ok=True)

    def run(script: str, *arguments: str, packages: Path | None = None) -> list[dict[str, Any]]:
        place = shared / hashlib.sha256(repr((script, arguments, packages)).encode()).hexdigest()
        with FileLock(f"{place}.lock"):
            if not place.exists():
                path = os.pathsep.join(str(p) for p in (packages, ROOT) if p)
                environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
                command = [sys.executable, "-m", "tests.frontend", str(HERE / script), *arguments]
                done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
                assert done.returncode == 0, done.stderr[-4000:]
                place.write_text(done.stdout)
        return [json.loads(line) for line in place.read_text().splitlines() if line.startswith("{")]

    return run


@pytest.fixture(scope="session")
def whole(request: pytest.FixtureRequest) -> bool:
    """Whether tests marked `whole` are asked for, as `make compile` does."""
    return "whole" in request.config.getoption("markexpr")
