"""Which of a variant's cases bring a kernel that was not there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from flashtile.cli import app
from flashtile.errors import InvalidProblem
from flashtile.fuzz import check as checks
from flashtile.fuzz.case import Case
from flashtile.fuzz.check import Result
from flashtile.fuzz.main import Request
from flashtile.fuzz.pool import Event, Order, judge
from tests.fuzz.test_fuzz import ROOT


class Counted:
    """Stands for `Unmet`: brings every second case."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def brings(self, case: Case) -> bool:
        self.asked.append(case.spell())
        return len(self.asked) % 2 == 0


def test_cases_that_bring_no_kernel_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Event] = []
    unmet = Counted()
    monkeypatch.setattr(checks, "settled", lambda case, device: Result("right"))
    judge(Order(0, "cpu", cases=4), 0, "cpu", found.append, unmet)  # pyright: ignore[reportArgumentType]
    assert len(unmet.asked) == 4
    assert [event.case for event in found if event.kind == "done"] == unmet.asked[1::2]


def test_which_cases_bring_a_kernel() -> None:
    """One does whose strides are no multiples of 16, or whose tile is another; of other data, or refused, it does not."""
    code = """
from dataclasses import replace
from flashtile.fuzz.case import Case
from flashtile.fuzz.planned import Unmet
from flashtile.plan.device import H100
first = Case(seqlen_q=64, seqlen_k=64, backend="triton")
more = replace(first, seed=1), replace(first, head_dim=600), replace(first, seqlen_k=67), replace(first, dtype="fp16")
tile = replace(first, tile="forward:32x32x4x2x1x1")
unmet = Unmet(H100)
print([unmet.brings(case) for case in (first, *more, tile, tile)])
"""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[True, False, False, True, True, True, False]\n"


def test_kernels_need_a_gpu() -> None:
    for backends in (("cpu",), ("triton", "cpu"), ("triton",)[: not torch.cuda.is_available()] or ("cpu",)):
        with pytest.raises(InvalidProblem, match="cases"):
            Request(1.0, backends=backends, cases=0)
    assert CliRunner().invoke(app, ["fuzz", "--cases", "0", "--backend", "cpu"]).exit_code == 2
