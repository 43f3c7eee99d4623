"""Runs Hopper's second derivatives in the emulator and prints, as JSON, how far its results are from float64's.

python -m tests.hopper.emulated_second CASE ...

A case is JSON: {"problem": its spelling, "arrives": gradients that do beside dout, "tile": fields of the tile that is not the
chosen one}.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from tests.hopper.emulated import SMALL, draw, error, poisoned, report

# isort: split
from flashtile.kernels.sm90.second.plan import plan_keys, sums_dq
from flashtile.kernels.sm90.second.tile import SecondTile
from flashtile.plan.backend import Direction
from flashtile.problem.attention import AttentionProblem
from flashtile.reference.attention import attention_reference
from flashtile.torch.execute.bound import Bound


def assess(case: dict[str, Any]) -> dict[str, float]:
    """The errors of the tangents of out, lse, dq, dk and dv."""
    problem, given = AttentionProblem.parse(case["problem"]), ["dout", *case.get("arrives", [])]
    tensors, generator = draw(problem), torch.Generator().manual_seed(1)
    for name in ("q", "k", "v", "dout", "dlse"):
        tensors[f"t{name}"] = torch.randn(tensors[name].shape, generator=generator).to(tensors[name].dtype)
    inputs = tuple(tensors[name].double() for name in "qkv")
    arriving = tuple(tensors[n].double() if n in given else torch.zeros_like(tensors[n]).double() for n in ("dout", "dlse"))
    along = tuple(tensors[n].double() for n in ("tq", "tk", "tv"))
    along += tuple(tensors[n].double() if n in given else torch.zeros_like(tensors[n]).double() for n in ("tdout", "tdlse"))

    def attend(*x: torch.Tensor) -> Any:
        return attention_reference(*x, mask=problem.mask, score=[], scale=problem.scale)

    def gradients(*x: torch.Tensor) -> Any:
        made: Any = torch.func.vjp(attend, *x[:3])
        return (*made[0], *made[1](x[3:]))

    made: Any = torch.func.jvp(gradients, (*inputs, *arriving), along)
    exact = dict(zip(("tout", "tlse", "dq", "dk", "dv"), made[1], strict=True))
    direction = Direction(frozenset("qkv"), frozenset(given), frozenset({"q", "k", "v", "out", "lse"}))
    assert sums_dq(problem, direction)
    tile = replace(SecondTile.of(problem, 1 + ("tdout" in given)), **case.get("tile", {}))
    plan = plan_keys(problem, SMALL, direction, tile)
    inputs_of = {b.name: tensors[b.name] for b in plan.named("input")}
    with patch.object(torch, "empty_strided", poisoned):
        found = Bound(plan, inputs_of, torch.device("cpu")).run(dict(inputs_of))
    return {name: error(found[name], truth) for name, truth in exact.items()}


if __name__ == "__main__":
    report(assess)
