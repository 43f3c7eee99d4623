"""Runs a backward and prints of every kernel compiled its name, whether it was on disk, and whether the main thread did it.

Then without a compiler, which must raise, and with one again. See test_launch.py.
"""

from __future__ import annotations

import sys
import threading
from typing import Any
from unittest.mock import patch

import pytest
import triton
from triton import knobs

from flashtile.kernels.sm90.backend import BACKEND
from flashtile.plan.backend import Gradients
from flashtile.plan.call import KernelCall, Plan
from flashtile.plan.device import H100
from flashtile.problem.attention import AttentionProblem
from tests.driver.launches import bound_of, on_card


def main() -> None:
    compiled: list[tuple[str, bool, bool]] = []

    def listen(src: Any, cache_hit: bool, **_: Any) -> None:
        compiled.append((src.name, cache_hit, threading.current_thread() is threading.main_thread()))

    knobs.compilation.listener = listen
    plan = BACKEND.backward(AttentionProblem.parse(sys.argv[1]), H100, Gradients(), "fused")
    (bound, inputs), (broken, _) = bound_of(plan), bound_of(plan)
    with on_card():
        bound.run(dict(inputs))
        bound.run(dict(inputs))
        print(compiled)
        forget(plan)
        with patch.object(triton.compiler, "compile", fail), pytest.raises(RuntimeError, match="no assembler"):
            broken.run(dict(inputs))
        compiled.clear()
        forget(plan)
        broken.run(dict(inputs))
        print(compiled)


def forget(plan: Plan) -> None:
    """Leave what is compiled of a plan on disk alone."""
    for call in plan.calls:
        assert isinstance(call, KernelCall)
        call.kernel.device_caches.clear()


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("no assembler")


if __name__ == "__main__":
    main()
