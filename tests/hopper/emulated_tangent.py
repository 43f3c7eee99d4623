"""Runs Hopper's forward mode in the emulator and prints, as JSON, how far its results are from float64's.

python -m tests.hopper.emulated_tangent CASE ...

A case is JSON: {"problem": its spelling, "moves": the inputs that have a tangent, "launch": fields of the tile that is not the
chosen one, "offset": what the scores of a row have in common in their tangents, "unseen": whether keys that nobody sees hold
NaN}.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from tests.hopper.emulated import SMALL, draw, error, poisoned, report

# isort: split
from flashtile.kernels.sm90.host.choose_forward import tangent_choice
from flashtile.kernels.sm90.tangent.plan import plan_tangent
from flashtile.plan.backend import Direction
from flashtile.problem.attention import AttentionProblem
from flashtile.reference.attention import attention_reference
from flashtile.torch.execute.bound import Bound


def assess(case: dict[str, Any]) -> dict[str, float]:
    """The errors of out, lse and their tangents; where a row sees nothing the tangents are 0."""
    problem, moves = AttentionProblem.parse(case["problem"]), frozenset(case["moves"])
    tensors, generator = draw(problem), torch.Generator().manual_seed(1)
    for name in sorted(moves):
        tensors[f"t{name}"] = torch.randn(tensors[name].shape, generator=generator).to(tensors[name].dtype)
    if "offset" in case:
        tensors["q"][..., 0], tensors["k"][..., 0], tensors["tk"][..., 0] = 1.0, 0.0, case["offset"]
    inputs = tuple(tensors[name].double() for name in "qkv")
    along = tuple(tensors[f"t{n}"].double() if n in moves else torch.zeros_like(x) for n, x in zip("qkv", inputs, strict=True))
    made: Any = torch.func.jvp(
        lambda *x: attention_reference(*x, mask=problem.mask, score=[], scale=problem.scale), inputs, along
    )
    (out, lse), (tout, tlse) = made
    exact = {"out": out, "lse": lse, "tout": tout.nan_to_num(), "tlse": tlse.masked_fill(lse == -torch.inf, 0.0)}
    if case.get("unseen"):
        band, last = problem.band, problem.seqlen_q - 1 + problem.shift
        for name in ("k", "v", "tk", "tv"):
            tensors[name][:, : max(problem.shift - (problem.shift if band.left is None else band.left), 0)] = torch.nan
            tensors[name][:, last + 1 + (problem.seqlen_k if band.right is None else band.right) :] = torch.nan
    launch = replace(tangent_choice(problem, SMALL, moves)[0], **case.get("launch", {}))
    plan = plan_tangent(problem, SMALL, Direction(moves), launch)
    given = {buffer.name: tensors[buffer.name] for buffer in plan.named("input")}
    with patch.object(torch, "empty_strided", poisoned):
        found = Bound(plan, given, torch.device("cpu")).run(dict(given))
    return {name: error(found[name], truth) for name, truth in exact.items()}


if __name__ == "__main__":
    report(assess)
