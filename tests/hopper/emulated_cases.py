"""Runs cases of the one case list on Hopper's kernels in the emulator and prints, as JSON, what breaks the accuracy rule.

python -m tests.hopper.emulated_cases NAME ...

A line is {"case": name, "breaches": [...]} of out, lse and the gradients; where the backward is refused, with "refusal": its
reasons, and breaches of out and lse alone unless they are refused as well; where the run ended early, with "failure" instead.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import torch

from tests.hopper.emulated import SMALL, poisoned  # installs the emulator

# isort: split

import flashtile.torch.execute.prepared
from flashtile.errors import NotSupported
from flashtile.kernels.sm90.backend import BACKEND as HOPPER
from flashtile.plan.device import H100, Device
from tests.cases import Case
from tests.hopper.assess import assess
from tests.hopper.cases import CASES_HERE


@contextmanager
def running_on(device: Device) -> Generator[None, None, None]:
    """Calls of the public functions are planned for this device, whose memory holds NaN, and for Hopper's kernels alone:
    the portable ones, which repair what these make of large scores, are tested in tests/kernels/test_repair.py.
    """
    with (
        patch.object(HOPPER, "repairs", None),
        patch.object(torch, "empty_strided", poisoned),
        patch.object(flashtile.torch.execute.prepared, "device_of", lambda _: device),
    ):
        yield


def judged(case: Case, backward: bool) -> list[str]:
    """`assess`, on a small device except where a case is to be one wave."""
    with running_on(H100 if "one-wave" in case.name else SMALL):
        return assess(case, torch.device("cpu"), backward)


def main() -> None:
    torch.set_num_threads(1)
    cases = {case.name: case for case in CASES_HERE}
    for name in sys.argv[1:]:
        found: dict[str, Any] = {"case": name}
        try:
            try:
                found["breaches"] = judged(cases[name], True)
            except NotSupported as refusal:
                found["refusal"] = refusal.reasons["hopper"]
                with suppress(NotSupported):
                    found["breaches"] = judged(cases[name], False)
        except Exception as problem:  # of a role, or of the plan: it belongs to this case alone
            found["failure"] = f"{type(problem).__name__}: {problem}"
            traceback.print_exc()
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
