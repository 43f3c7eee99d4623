"""`flashtile.distributed` on two GPUs over NCCL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_two_gpus_compute_what_one_process_does() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), "SECONDS": "600"}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.distributed.on_gpus"], env=env, cwd=ROOT, text=True, capture_output=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
