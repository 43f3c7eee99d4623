"""Modules in processes that begin with PyTorch imported: each is forked from one that has done so, 2 core seconds sooner.

Nothing else is imported there, flashtile and Triton least of all: environment and folder are those of a new process.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Of the C library: what is freed is used again. What it hands back to the system comes anew page by page.
KEEPS = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
SPENT = [0.0]  # core seconds of all that have ended, which the system counts here only when this process ends
_started: list[subprocess.Popen[str]] = []


def run(
    module: str, *arguments: str, environment: Mapping[str, str], cwd: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """`python -m MODULE ARGUMENTS`, its output captured."""
    if not hasattr(os, "fork"):
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)
    with TemporaryDirectory() as folder:
        files = [str(Path(folder) / name) for name in ("out", "err")]
        asked = {"module": module, "arguments": arguments, "environment": dict(environment), "cwd": str(cwd), "files": files}
        told = _ask(json.dumps(asked), timeout)
        SPENT[0] += told["spent"]
        out, err = (Path(file).read_text() for file in files)
    return subprocess.CompletedProcess([module, *arguments], told["code"], out, err)


def _ask(request: str, timeout: float) -> dict[str, Any]:
    if not _started:
        command, environment = [sys.executable, "-m", "tests.forked"], {**os.environ, **KEEPS, "PYTHONPATH": str(ROOT)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        _started.append(subprocess.Popen(command, cwd=ROOT, env=environment, text=True, start_new_session=True, **pipes))
        atexit.register(_end)
    (server,) = _started
    assert server.stdin is not None
    assert server.stdout is not None
    print(request, file=server.stdin, flush=True)
    if not select.select([server.stdout], [], [], timeout)[0]:
        os.killpg(server.pid, signal.SIGKILL)
        _end()
        raise subprocess.TimeoutExpired(request, timeout)
    return json.loads(server.stdout.readline())


def _end() -> None:
    while _started:
        server = _started.pop()
        server.communicate()  # nothing more is asked


def _become(request: dict[str, Any]) -> int:
    """The exit status of the module, which runs in this process."""
    for file, stream in zip(request["files"], (1, 2), strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    sys.path[0] = request["cwd"]
    sys.argv[1:] = request["arguments"]
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    import torch  # noqa: F401

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = _become(json.loads(line))
            threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, status, usage = os.wait4(child, 0)
        told = {"code": os.waitstatus_to_exitcode(status), "spent": usage.ru_utime + usage.ru_stime}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
