"""`flashtile.distributed` on two and four processes over gloo, which one process forks and which run all cases."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
LOCAL = {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="ranks are forked")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[int]], str]:
    """The folder that the ranks wrote to, how each ended, and what they said."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.distributed.worker", str(folder)]
    running = subprocess.Popen(
        command, env={**os.environ, **LOCAL}, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        said = running.communicate(timeout=400)[0]
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)  # its ranks, too
    assert running.returncode == 0, said
    return folder, json.loads((folder / "statuses.json").read_text()), said


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_compute_what_one_process_does(ranks: int, ended: Any) -> None:
    folder, statuses, said = ended
    found = [json.loads((folder / str(ranks) / f"{rank}.json").read_text()) for rank in range(ranks)]
    wrong = [f"rank {rank}, {name}: {text}" for rank, of in enumerate(found) for name, text in of.items() if text]
    assert not wrong, "\n".join(wrong)
    assert [len(of) >= (170 if ranks == 2 else 70) for of in found] == [True] * ranks, [len(of) for of in found]
    assert statuses[str(ranks)] == [0] * ranks, said


def test_a_rank_that_dies_ends_the_others(ended: Any) -> None:
    folder, statuses, _ = ended
    output = (folder / "dies.txt").read_text()
    assert statuses["dying"] == [1, 0]
    assert "Error" in output
    assert "all_gather" in output  # the line that waited, in the traceback
