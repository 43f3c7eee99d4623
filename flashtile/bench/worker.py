"""The parent's end of a measuring process: start it, ask it, and kill it when it no longer answers."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

BOOT = Path(__file__).with_name("boot.py")

# Seconds until an answer counts as missing. A compiler may take its time, a burst may not (beyond what its calls take).
PATIENCE_S = {"hello": 180.0, "open": 120.0, "compile": 240.0, "prepare": 120.0, "burst": 30.0, "host": 30.0, "close": 30.0}


class WorkerLostError(RuntimeError):
    """The measuring process has died, or was killed because it no longer answered (`hung`); the text says how."""

    def __init__(self, how: str, hung: bool = False):
        super().__init__(how)
        self.hung = hung


class Worker:
    """One measuring process with the flashtile that lies under `library`.

    `base` marks the process that serves the commit compared with: only our own providers take part in it.
    """

    def __init__(self, library: Path, log: Path, also: Path | None = None, base: bool = False):
        self.library, self.log, self.also, self.base = library, log, also, base
        self.patience_s = dict(PATIENCE_S)
        self.greeting: dict[str, Any] = {}
        self.process: subprocess.Popen[str] | None = None
        self.replies: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def start(self) -> None:
        """Start the process and learn its machine and providers. Raises WorkerLostError."""
        self.stop()
        command = [sys.executable, str(BOOT), str(self.library), *([str(self.also)] if self.also else [])]
        # One thread per compiling process: cases are compiled in several processes, and idle pools disturb the timing.
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        with self.log.open("ab") as log:
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=log, text=True, start_new_session=True, env=environment
            )  # fmt: skip
        self.replies = queue.SimpleQueue()
        threading.Thread(target=_pump, args=(self.process, self.replies), daemon=True).start()
        try:
            self.greeting = self.ask("hello")
        except WorkerLostError as loss:
            raise WorkerLostError(f"the measuring process for {self.library} did not start: {loss}", loss.hung) from loss

    def ask(self, verb: str, patience_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        """The reply to a request. Raises WorkerLostError, after which the process is gone."""
        limit = self.patience_s[verb] if patience_s is None else patience_s
        if self.process is None or self.process.stdin is None:
            raise WorkerLostError("is not running")
        try:
            self.process.stdin.write(json.dumps([verb, arguments]) + "\n")
            self.process.stdin.flush()
            line = self.replies.get(timeout=limit)
        except queue.Empty:
            self.stop()
            raise WorkerLostError(f"no answer within {limit:.0f} s, killed", hung=True) from None
        except OSError:
            line = None
        reply = None if line is None else json.loads(line)
        if reply is None or "lost" in reply:
            raise WorkerLostError(self._last_words(None if reply is None else str(reply["lost"])))
        return reply

    def stop(self) -> None:
        """End the process and everything it started."""
        process, self.process = self.process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()

    def _last_words(self, said: str | None) -> str:
        """How the process ended: what it said itself, else the signal or exit status and the end of its log."""
        process = self.process
        if process is None:
            return "was stopped"
        try:
            status = process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            status = None
        self.stop()
        if said is not None:
            return said
        if status is not None and status < 0:
            return f"process died of {signal.Signals(-status).name}"
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return f"process exited with status {status}" + (f": {lines[-1].strip()[:160]}" if lines else "")


def _pump(process: subprocess.Popen[str], replies: queue.SimpleQueue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        replies.put(line)
    process.stdout.close()
    replies.put(None)
