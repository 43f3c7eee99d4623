"""Runs Hopper plans in the emulator and prints, as JSON, how far their results are from float64's.

python -m tests.hopper.emulated CASE ...

A case is JSON: {"problem": its spelling, "pass": "forward", "watched", "fused" or "split", "dlse": whether lse has a gradient,
"wide_keys": whether dk and dv are float32, "launch": fields of the tile that is not the chosen one, "drift": by how much
each key's scores exceed those of the key before, "leaves": outputs whose address is 0, "blocks": how many run side
by side}. A line is {"errors": {name: largest error / largest element}}, or {"failure": ...} where the run ended early.
"""

# ruff: noqa: E402 (kernels are imported once the emulator stands under them)

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from gluon_emulator.machine import Grid, nothing
from tests.hopper.emulator import install

install()

from flashtile.kernels.sm90.backend import BACKEND
from flashtile.kernels.sm90.host.choose_backward import choose_backward
from flashtile.kernels.sm90.host.choose_forward import choose_forward
from flashtile.plan.backend import ROW_STATISTICS, Gradients
from flashtile.plan.buffers import shapes
from flashtile.plan.call import Plan
from flashtile.plan.device import H100
from flashtile.problem.attention import AttentionProblem
from flashtile.reference.attention import attention_reference
from flashtile.torch.execute.bound import TORCH_DTYPES, Bound
from tests.torch.test_statistics import attention_scores

Tensors = dict[str, torch.Tensor]
SMALL = replace(H100, sm_count=Grid.FEW)  # so that a block computes more than one tile


def plan_of(case: dict[str, Any], problem: AttentionProblem) -> Plan:
    """The plan that the case names."""
    overrides = case.get("launch", {})
    if case["pass"] in ("forward", "watched"):
        kept = frozenset(case.get("keeps", ROW_STATISTICS) if case["pass"] == "watched" else ())
        return BACKEND.forward(problem, H100, replace(choose_forward(problem, H100), **overrides), kept)
    chosen = choose_backward(problem, H100, case["pass"] == "split", overrides.get("ungrouped", False))
    launch = replace(chosen, **overrides)
    gradients = Gradients(dlse=case.get("dlse", False), wide_keys=case.get("wide_keys", False))
    return BACKEND.backward(problem, replace(SMALL, sm_count=Grid.FEW), gradients, case["pass"], launch)


def draw(problem: AttentionProblem, drift: float = 0.0) -> Tensors:
    """Random tensors under the names of a plan's inputs."""
    torch.manual_seed(0)
    size, dtype = shapes(problem), TORCH_DTYPES[problem.dtype.value]
    made = {name: torch.randn(size[name]).to(dtype) for name in "qkv"}
    if drift:
        made["q"][..., 0] = 1.0 / problem.scale_value
        made["k"][..., 0] = drift * torch.arange(problem.seqlen_k)[:, None]
    made["dout"], made["dlse"] = torch.randn(size["out"]).to(dtype), torch.randn(size["lse"])
    for i, spec in enumerate(problem.score):
        for j, tensor in enumerate(spec.tensors):
            made[f"score.{i}.{j}"] = torch.rand(tensor.shape) / 4
    return made


def expect(problem: AttentionProblem, tensors: Tensors, dlse: bool) -> Tensors:
    """out, lse and the gradients in float64."""
    inputs = [tensors[name].double().requires_grad_() for name in "qkv"]
    score = [
        spec.kind(*spec.scalars, *(tensors[f"score.{i}.{j}"] for j in range(len(spec.tensors))))
        for i, spec in enumerate(problem.score)
    ]
    out, lse = attention_reference(*inputs, mask=problem.mask, score=score, scale=problem.scale)
    outputs, arriving = [out], [tensors["dout"].double()]
    if dlse:
        outputs, arriving = [out, lse], [*arriving, tensors["dlse"].double()]
    dq, dk, dv = torch.autograd.grad(outputs, inputs, arriving)
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def expect_statistics(problem: AttentionProblem, tensors: Tensors) -> Tensors:
    """Rows' largest scores and entropies in float64."""
    q, k = (tensors[name].double() for name in "qk")
    score = [
        spec.kind(*spec.scalars, *(tensors[f"score.{i}.{j}"] for j in range(len(spec.tensors))))
        for i, spec in enumerate(problem.score)
    ]
    factor = problem.scale_value * problem.head_dim**0.5
    scores = attention_scores(q * factor, k, mask=problem.mask, score=score)
    p = scores.softmax(-1).nan_to_num(0.0)
    return {"peak": scores.amax(-1), "entropy": -torch.where(p > 0.0, p * p.log(), 0.0).sum(-1)}


def poisoned(shape: Any, strides: Any, **options: Any) -> torch.Tensor:
    """Uninitialised memory that shows in every result."""
    made = EMPTY_STRIDED(shape, strides, **options)
    return made.fill_(nothing(made.dtype))


EMPTY_STRIDED = torch.empty_strided


def assess(case: dict[str, Any]) -> dict[str, Any]:
    """The errors of a case's results."""
    with patch.object(Grid, "FEW", case.get("blocks", Grid.FEW)):
        return _assess(case)


def _assess(case: dict[str, Any]) -> dict[str, Any]:
    problem = AttentionProblem.parse(case["problem"])
    tensors = draw(problem, case.get("drift", 0.0))
    exact = expect(problem, tensors, case.get("dlse", False))
    if case["pass"] == "watched":
        exact |= expect_statistics(problem, tensors)
    tensors["out"], tensors["lse"] = exact["out"].to(tensors["q"].dtype).contiguous(), exact["lse"].float().contiguous()
    plan = plan_of(case, problem)
    inputs = {buffer.name: tensors[buffer.name] for buffer in plan.named("input")}
    bound, leaves = Bound(plan, inputs, torch.device("cpu")), frozenset(case.get("leaves", ()))
    assert leaves <= plan.optional
    bound.allocations = [(n, (0, *shape[1:]) if n in leaves else shape, *rest) for n, shape, *rest in bound.allocations]
    with patch.object(torch, "empty_strided", poisoned):
        results = bound.run(inputs)
    found = {b.name: error(results[b.name], exact[b.name]) for b in plan.named("output") if b.name not in leaves}
    return found | (rounded(problem, case, inputs, results) if case.get("wide_keys") else {})


def rounded(problem: AttentionProblem, case: dict[str, Any], inputs: Tensors, wide: Tensors) -> dict[str, Any]:
    """0.0 for each of dk and dv that is float32 and, rounded, has the bits of a plan that rounds it; else infinity."""
    given = {name: inputs[name] for name in ("q", "k", "v", "out", "lse", "dout", "dlse") if name in inputs}
    given |= {name: t for name, t in inputs.items() if name.startswith("score.")}
    plan = plan_of({**case, "wide_keys": False}, problem)
    narrow = Bound(plan, given, torch.device("cpu")).run(dict(given))
    alike = {
        name: wide[name].dtype is torch.float32 and torch.equal(wide[name].to(narrow[name].dtype), narrow[name])
        for name in ("dk", "dv")
    }
    return {f"{name} rounded": 0.0 if same else float("inf") for name, same in alike.items()}


def error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error in units of the largest element; where nothing is seen, lse must be -inf. NaN is infinitely wrong."""
    unseen = exact == -torch.inf
    if not torch.equal(result == -torch.inf, unseen):
        return float("inf")
    if unseen.all():
        return 0.0
    off, size = (result.double() - exact)[~unseen].abs(), exact[~unseen].abs()
    return float((off.max() / size.max().clamp(min=torch.finfo(torch.float16).tiny)).nan_to_num(nan=float("inf")))


def report(assess: Callable[[dict[str, Any]], dict[str, float]]) -> None:
    """Print what `assess` makes of each case on the command line."""
    torch.set_num_threads(1)
    for text in sys.argv[1:]:
        try:
            found: dict[str, Any] = {"errors": assess(json.loads(text))}
        except Exception as problem:  # of a role, or of the plan: it belongs to this case alone
            found = {"failure": f"{type(problem).__name__}: {problem}"}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    report(assess)
