"""Runs attention of e4m3 on Hopper's kernels in the emulator, by the public functions, and prints how far off it is, as JSON.

python -m tests.hopper.emulated_stored CASE ...

A case is JSON: the arguments of a `StoredCase` under "stored" and of its `Case` under "case", and under "launch" fields of the
tile that is not the chosen one. A line is {"errors": {"out": relative RMS beside float64, "lse": largest error, "padding":
infinity where NaN in padding shows}}, or {"failure": ...}.
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
from tests.cases import Case
from tests.stored.cases import StoredCase

CPU = torch.device("cpu")


def assess(told: dict[str, Any]) -> dict[str, float]:
    """The errors of a case."""
    fields = {name: tuple(x) if isinstance(x, list) else x for name, x in told["case"].items()}
    case = StoredCase(Case(**fields), fp8=True, **told.get("stored", {}))
    choice = backend.forward_choice

    def chosen(*asked: Any) -> tuple[Any, tuple[Reason, ...]]:
        launch, fired = choice(*asked)
        return replace(launch, **told.get("launch", {})), fired

    with running_on(SMALL), patch.object(backend, "forward_choice", chosen):
        inputs, scales, others = case.tensors(CPU)
        options = case.options("hopper")
        out, lse = case.call(case.case.function, inputs, scales, others, return_lse=True, options=options)
        truth, _ = case.expected(CPU)
        found = {"out": error(out.double(), truth["out"]), "lse": farthest(lse.double(), truth["lse"])}
        hidden = unseen_keys(case.case)
        if hidden:
            for tensor in inputs[1:]:
                for rows in hidden:
                    tensor.view(torch.uint8)[rows] = 0x7F  # NaN
            again = case.call(case.case.function, inputs, scales, others, return_lse=True, options=options)
            same = torch.equal(again[0], out) and torch.equal(again[1], lse)
            found["padding"] = 0.0 if same else float("inf")
    return found


def unseen_keys(case: Case) -> list[Any]:
    """Places in the keys that no query sees."""
    if case.used_k is not None:
        firsts = case.cu_k[:-1] if case.cu_k is not None else [0] * len(case.used_k)
        ends = case.cu_k[1:] if case.cu_k is not None else [case.seqlen_k] * len(case.used_k)
        return [
            slice(first + used, end) if case.cu_k is not None else (i, slice(used, None))
            for i, (first, used, end) in enumerate(zip(firsts, case.used_k, ends, strict=True))
        ]
    if case.causal and case.seqlen_q < case.seqlen_k and case.window is not None:
        return [(slice(None), slice(0, max(case.seqlen_k - case.seqlen_q - case.window[0], 0)))]
    return []


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative RMS; infinity where it is no number."""
    off = (found - exact).norm() / exact.norm().clamp(min=1e-30)
    return float(off.nan_to_num(nan=float("inf")))


def farthest(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error; infinity unless the same rows saw nothing."""
    blind = exact == -torch.inf
    if not torch.equal(found == -torch.inf, blind):
        return float("inf")
    return float((found - exact)[~blind].abs().amax().nan_to_num(nan=float("inf"))) if not blind.all() else 0.0


if __name__ == "__main__":
    report(assess)
