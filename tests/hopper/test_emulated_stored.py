"""Hopper's forward of e4m3 computes what it should, by a run of its source on the CPU (`emulated_stored`), and on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hopper.emulating import emulate

pytest.importorskip("triton", reason="Triton is not installed")

from tests.stored.assess import GROUPS, assess, excesses

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = [case for group in GROUPS.values() for case in group if not case["launch"]]


@pytest.mark.parametrize("group", GROUPS)
def test_e4m3_is_multiplied(group: str) -> None:
    cases = GROUPS[group]
    results = emulate("emulated_stored", map(json.dumps, cases))
    wrong = [
        f"{case}: {result.get('failure') or excesses(result['errors'])}"
        for case, result in zip(cases, results, strict=True)
        if "failure" in result or excesses(result["errors"])
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("case", SHIPPED, ids=[f"{case['case']['head_dim']}-{case['case']['name']}" for case in SHIPPED])
def test_e4m3_is_multiplied_on_a_gpu(case: dict[str, Any], device: torch.device) -> None:
    assert not excesses(assess(case, device))
