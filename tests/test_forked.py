"""tests/forked.py: modules run as in a new process, but for PyTorch, which is there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests import forked

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")

SAYS = """
import os, sys
print(__name__, sys.argv[1:], os.getcwd(), sorted(os.environ), sys.path[0] == os.getcwd())
print(*(name for name in ("torch", "triton", "flashtile") if name in sys.modules))
"""


def run(folder: Path, code: str, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    (folder / "said.py").write_text(code)
    return forked.run("said", *arguments, environment={"ONLY": "1"}, cwd=folder, timeout=timeout)


def test_arguments_environment_and_folder_are_a_new_process_s(tmp_path: Path) -> None:
    done = run(tmp_path, SAYS, "a", "b c")
    assert done.stderr == ""
    assert done.stdout == f"__main__ ['a', 'b c'] {tmp_path} ['ONLY'] True\ntorch\n"
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("raise SystemExit", 0, ""), ("raise SystemExit(3)", 3, ""), ("raise SystemExit('no')", 1, "no\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"), ("import os, sys; os.kill(os.getpid(), 9)", -9, ""),
    ],
)  # fmt: skip
def test_what_fails_says_so(tmp_path: Path, code: str, status: int, said: str) -> None:
    done = run(tmp_path, code)
    assert done.returncode == status
    assert done.stderr.endswith(said)
    assert bool(done.stderr) == bool(said)


def test_what_takes_too_long_is_ended_and_the_next_one_runs(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run(tmp_path, "import time; time.sleep(600)", timeout=0.5)
    before = forked.SPENT[0]
    assert run(tmp_path, "print(sum(range(10**6)))").stdout == "499999500000\n"
    assert forked.SPENT[0] > before
