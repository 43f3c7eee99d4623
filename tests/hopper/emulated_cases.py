"""Runs cases of the one case list on Hopper's kernels in the emulator and prints, as JSON, what breaks the accuracy rule.

python -m tests.hopper.emulated_cases FORWARD|BACKWARD NAME ...

A line is {"case": name, "breaches": [...]}, {"case": name, "refusal": reasons} or, where the run ended early, {"case": name,
"failure": ...}. FORWARD: out and
lse alone.
"""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from tests.hopper.emulated import poisoned  # installs the emulator

# isort: split

import flashtile.torch.attention
from flashtile.errors import NotSupported
from flashtile.plan.device import H100
from tests.cases import Case
from tests.hopper.cases import CASES_HERE
from tests.judge import breaches, expected, run


def assess(case: Case, backward: bool) -> list[str]:
    """What is wrong with a case's results."""
    tensors = case.tensors(torch.device("cpu"))
    compute = (lambda tensors: run("hopper", case, tensors)) if backward else (lambda tensors: forward(case, tensors))
    with patch.object(torch, "empty_strided", poisoned), patch.object(flashtile.torch.attention, "device_of", lambda _: H100):
        result = compute(tensors)
        if case.lengths(torch.device("cpu")):
            dirty = compute(soiled(case, tensors))
            leaks = [name for name in result if not torch.equal(result[name], dirty[name])]
            if leaks:
                return [f"what lies outside of the items leaks into {', '.join(leaks)}"]
    truth, plain = expected(case, tensors)
    kept = {name: truth[name] for name in result}
    return list(breaches(case, result, kept, plain))


def soiled(case: Case, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors with NaN in every row that counts for no item."""
    made = {name: tensor.clone() for name, tensor in tensors.items()}
    for names, span, cu, used in (
        (("q", "dout", "dlse"), case.seqlen_q, case.cu_q, case.used_q), (("k", "v"), case.seqlen_k, case.cu_k, case.used_k),
    ):  # fmt: skip
        for item in range(case.items):
            first, end = (0, span) if cu is None else cu[item : item + 2]
            end_used = end if used is None else first + used[item]
            for name in names:
                rows = made[name] if cu is not None else made[name][item]
                rows = rows.transpose(0, 1) if name == "dlse" else rows
                rows[end_used:end] = torch.nan
                if cu is not None:
                    rows[cu[-1] :] = torch.nan
    return made


def forward(case: Case, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """out and lse."""
    place, how = torch.device("cpu"), case.given(tensors)
    options = replace(case, backward="auto").options("hopper")
    how |= {**case.masks(place), **case.lengths(place), "options": options, "return_lse": True}
    out, lse = case.function(*(tensors[name] for name in "qkv"), **how)
    return {"out": out, "lse": lse}


def main() -> None:
    torch.set_num_threads(1)
    cases: dict[str, Case] = {case.name: case for case in CASES_HERE}
    for name in sys.argv[2:]:
        found: dict[str, Any] = {"case": name}
        try:
            found["breaches"] = assess(cases[name], sys.argv[1] == "BACKWARD")
        except NotSupported as refusal:
            found["refusal"] = refusal.reasons["hopper"]
        except Exception as problem:  # of a role, or of the plan: it belongs to this case alone
            found["failure"] = f"{type(problem).__name__}: {problem}"
            traceback.print_exc()
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
