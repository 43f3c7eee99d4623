"""Runs attention of e4m3 on Hopper's kernels in the emulator, by the public functions, and prints how far off it is, as JSON.

python -m tests.hopper.emulated_stored CASE ...

A case is JSON, as `tests.stored.assess.told` makes them. A line is {"errors": what `assess` finds}, or {"failure": ...}.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from tests.hopper.emulated import SMALL, report  # installs the emulator
from tests.hopper.emulated_cases import running_on

# isort: split

from flashtile.kernels.sm90 import backend
from flashtile.plan.rules import Reason
from tests.stored.assess import assess


def emulated(case: dict[str, Any]) -> dict[str, float]:
    """The errors of a case, on a small device."""
    choice = backend.forward_choice

    def chosen(*asked: Any) -> tuple[Any, tuple[Reason, ...]]:
        launch, fired = choice(*asked)
        return replace(launch, **case["launch"]), fired

    with running_on(SMALL), patch.object(backend, "forward_choice", chosen):
        return assess(case, torch.device("cpu"))


if __name__ == "__main__":
    report(emulated)
