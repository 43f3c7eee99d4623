"""Runs Hopper's forward mode in the emulator and prints, as JSON, how far its results are from float64's.

python -m tests.hopper.emulated_tangent CASE ...

A case is JSON: {"problem": its spelling, "moves": the inputs that have a tangent, "launch": fields of the tile that is not the
chosen one, "offset": what the scores of a row have in common in their tangents, "unseen": whether keys that nobody sees hold
NaN, "arrives": gradients that do, where it is the first pass of a second derivative: then FIELDS are judged}.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from tests.hopper.emulated import SMALL, draw, error, poisoned, report

# isort: split
from flashtile.kernels.device.direction import FIELDS
from flashtile.kernels.sm90.host.choose_forward import tangent_choice
from flashtile.kernels.sm90.tangent.kernel import attention_tangent
from flashtile.kernels.sm90.tangent.plan import plan_second, plan_tangent
from flashtile.plan.backend import Direction
from flashtile.plan.buffers import second_buffers
from flashtile.plan.call import Buffer, KernelCall, Plan
from flashtile.problem.attention import AttentionProblem
from flashtile.reference.attention import attention_reference, visible
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
    if "arrives" in case:
        return first_pass(problem, tensors, exact, moves, case["arrives"])
    given = {buffer.name: tensors[buffer.name] for buffer in plan.named("input")}
    with patch.object(torch, "empty_strided", poisoned):
        found = Bound(plan, given, torch.device("cpu")).run(dict(given))
    return {name: error(found[name], truth) for name, truth in exact.items()}


def first_pass(
    problem: AttentionProblem, tensors: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], moves: frozenset[str],
    arrives: list[str],
) -> dict[str, float]:  # fmt: skip
    """The errors of what a second derivative wants of rows, and of the tangents of out and lse."""
    torch.manual_seed(2)
    arriving = {
        n: torch.randn(exact[n[-3:]].shape).to(tensors["q"].dtype if n.endswith("out") else torch.float32) for n in arrives
    }
    direction = Direction(moves, frozenset(arrives), frozenset({"q", "k", "v", "out", "lse"}))
    fields = Buffer("rows", (problem.slabs, problem.heads_q, problem.span_q, int(FIELDS)), "fp32", "output")
    calls = (KernelCall(attention_tangent, (1, 1, 1), ()),)  # whatever: it is another one's
    plan = Plan(problem, "triton", "", (*second_buffers(problem, direction), fields), calls)
    plan = plan_second(problem, SMALL, direction, plan)
    made = ("rows", "tout", "tlse")
    plan = replace(plan, buffers=tuple(b for b in plan.buffers if b.role == "input" or b.name in made))
    given = {b.name: (tensors | arriving)[b.name] for b in plan.named("input")}
    with patch.object(torch, "empty_strided", poisoned):
        found = Bound(plan, given, torch.device("cpu")).run(dict(given))
    delta, tdelta = torch.zeros_like(exact["lse"]), torch.zeros_like(exact["lse"])
    if "dout" in arriving:
        delta += (exact["out"] * arriving["dout"].double()).sum(-1).transpose(1, 2)
        tdelta += (exact["tout"] * arriving["dout"].double()).sum(-1).transpose(1, 2)
    if "tdout" in arriving:
        tdelta += (exact["out"] * arriving["tdout"].double()).sum(-1).transpose(1, 2)
    delta, tdelta = (
        delta - arriving.get("dlse", torch.zeros(1)).double(),
        tdelta - arriving.get("tdlse", torch.zeros(1)).double(),
    )
    level, seen = exact["lse"] / math.log(2), exact["lse"] > -torch.inf
    wanted = {0: level.where(seen, torch.tensor(torch.inf)), 1: tdelta, 2: exact["tlse"], 6: delta}
    lone = visible(problem.band, problem.seqlen_q, problem.seqlen_k, torch.device("cpu")).sum(-1) == 1
    wanted[4] = torch.full_like(level, problem.scale_value)
    wanted[2], wanted[4] = wanted[2].masked_fill(lone, 0.0), wanted[4].masked_fill(lone, 0.0)
    assert torch.equal(found["rows"][..., 0] == torch.inf, ~seen)
    errors = {
        f"field {i}": error(found["rows"][..., i].where(seen, 0.0), truth.where(seen, 0.0)) for i, truth in wanted.items()
    }
    return errors | {name: error(found[name], exact[name]) for name in ("tout", "tlse")}


if __name__ == "__main__":
    report(assess)
