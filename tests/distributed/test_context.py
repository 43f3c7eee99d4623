"""`flashtile.distributed` on two and four processes over gloo, which are started once and run all cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
LOCAL = {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def together(ranks: int, *command: str, seconds: int = 240) -> list[tuple[int, str]]:
    """(exit status, output) of each rank; `command` is followed by its rank, how many there are, and what is behind "--"."""
    at = command.index("--")
    running = [
        subprocess.Popen(
            [sys.executable, *command[:at], str(rank), str(ranks), *command[at + 1 :]],
            env={**os.environ, **LOCAL}, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=seconds)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, output) for process, output in zip(running, outputs, strict=True)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_compute_what_one_process_does(ranks: int, tmp_path: Path) -> None:
    ended = together(ranks, "-m", "tests.distributed.worker", "--", str(tmp_path))
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    wrong = [f"rank {rank}, {name}: {text}" for rank, of in enumerate(found) for name, text in of.items() if text]
    assert not wrong, "\n".join(wrong)
    assert [len(of) >= (120 if ranks == 2 else 70) for of in found] == [True] * ranks
    assert all(status == 0 for status, _ in ended), "\n".join(output for _, output in ended)


DIES = """
import sys, datetime, torch, torch.distributed as dist
from flashtile.distributed import Context, attention
rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
wait = datetime.timedelta(seconds=5)
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks, timeout=wait)
if rank == 1:
    sys.exit(0)
attention(*(torch.ones(1, 4, 2, 8) for _ in range(3)), context=Context())
"""


def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    (status, output), _ = together(2, "-c", DIES, "--", str(tmp_path), seconds=60)
    assert status != 0
    assert "Error" in output
    assert "all_gather" in output  # the line that waited, in the traceback
