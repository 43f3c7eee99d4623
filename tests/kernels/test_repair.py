"""What follows another backend's kernels where a row's scores are large: those rows anew, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from flashtile import dispatch
from flashtile.kernels.portable.backend import BACKEND
from flashtile.kernels.portable.choose import choose
from flashtile.kernels.portable.repair import repairing
from flashtile.plan.backend import Gradients
from flashtile.plan.call import Buffer, HostCall, KernelCall, Plan
from flashtile.plan.device import H100
from flashtile.problem.attention import AttentionProblem
from flashtile.torch.execute.bound import Bound, device_of
from flashtile.torch.execute.replay import pays

PLACE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
SPELLINGS = {
    "plain": "attention(q=1x40x4x16,kv=40x2x16,fp16,score=bias(1x1x40x40:fp32:grad))",
    "sink": "attention(q=2x24x2x16,kv=40x1x16,fp16,band=:0,score=bias(2x1x24x40:fp32:grad),sink=2:fp32:grad,dropout=0.2)",
}


def inputs(p: AttentionProblem, offset: float) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    given = {
        "q": torch.randn(p.batch, p.seqlen_q, p.heads_q, p.head_dim).half(),
        "k": torch.randn(p.batch, p.seqlen_k, p.heads_kv, p.head_dim).half(),
        "v": torch.randn(p.batch, p.seqlen_k, p.heads_kv, p.head_dim).half(),
        "score.0.0": torch.randn(p.score[0].tensors[0].shape),
    }
    given["score.0.0"][0, 0, 5:7] += offset
    if p.sink is not None:
        given["sink"] = torch.randn(p.heads_q) + min(offset, 0.0)
    if p.dropout is not None:
        given["seed"] = torch.tensor([7, 0, 0, 0], dtype=torch.int32)
    if p.lengths.used_q:
        given["seqused_q"] = torch.tensor([p.seqlen_q, p.seqlen_q - 7], dtype=torch.int32)
    return {name: tensor.to(PLACE) for name, tensor in given.items()}


def run(plan: Plan, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return Bound(plan, dict(tensors), PLACE).run(dict(tensors))


GATE = Buffer("gate", (3000,), "int32", "scratch")  # of more words than a program reads at a time


def after(plan: Plan, values: dict[str, torch.Tensor], told: bool, other: Plan | None) -> Plan:
    """A plan that leaves these values in the outputs of `plan`, and says whether a row's scores are large; what follows it."""
    assert other is not None

    def leave(problem: Any, tensors: Any, outputs: tuple[str, ...]) -> dict[str, torch.Tensor]:
        words = torch.zeros(GATE.shape, dtype=torch.int32, device=PLACE)
        words[-1] = told
        return {name: words if name == GATE.name else values[name].clone() for name in outputs}

    outputs = (*(b.name for b in plan.named("output")), GATE.name)
    buffers = (*(b for b in plan.buffers if b.role != "scratch"), GATE)
    return Plan(plan.problem, "host", "", buffers, (HostCall(leave, outputs),)).followed_by(other)


@pytest.mark.parametrize("offset", [-1e6, 1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_rows_of_large_scores_are_computed_again(spelling: str, offset: float) -> None:
    p, place = AttentionProblem.parse(spelling), device_of(PLACE)
    given = inputs(p, offset)
    plan = BACKEND.forward(p, place)
    right = run(plan, given)
    far = ~(right["lse"].abs() < 1024)
    assert far.any()
    assert not far.all()
    wrong = {"out": right["out"].clone(), "lse": right["lse"].clone()}
    wrong["out"][far.transpose(1, 2)] = torch.nan
    wrong["lse"] += (far & right["lse"].isfinite()) * 70.0  # another rounding, or what it takes for a row that saw nothing
    wrong["lse"][0, 0, 5] = -torch.inf
    made = run(after(plan, wrong, True, BACKEND.repair_forward(p, place, GATE)), given)
    assert torch.equal(made["out"], right["out"])
    assert torch.equal(made["lse"], right["lse"])


def test_other_rows_keep_what_they_have() -> None:
    p, place = AttentionProblem.parse(SPELLINGS["plain"]), device_of(PLACE)
    given = inputs(p, -1e6)
    plan = BACKEND.forward(p, place)
    right = run(plan, given)
    marked = {"out": torch.full_like(right["out"], 3.0), "lse": right["lse"]}
    made = run(after(plan, marked, True, BACKEND.repair_forward(p, place, GATE)), given)
    assert torch.equal(made["out"][0, 5:7], right["out"][0, 5:7])
    others = [i for i in range(40) if i not in (5, 6)]
    assert (made["out"][0, others] == 3.0).all()


# The tiles of queries of items of unlike lengths, two heads together: each program has to make delta of its own tiles.
TOGETHER = "attention(q=2x72x4x16,kv=24x2x16,fp16,used=q,score=bias(1x1x72x24:fp32:grad))"
IN_TURNS = replace(choose(AttentionProblem.parse(TOGETHER), H100, "queries"), swizzle=2)


@pytest.mark.parametrize("offset", [0.0, -1e6, -1e9])
@pytest.mark.parametrize("spelling", [*SPELLINGS.values(), TOGETHER], ids=[*SPELLINGS, "together"])
def test_gradients_are_all_computed_again_or_none(spelling: str, offset: float) -> None:
    p, place = AttentionProblem.parse(spelling), device_of(PLACE)
    given = inputs(p, offset)
    made = run(BACKEND.forward(p, place), given)
    given |= {"out": made["out"], "lse": made["lse"], "dout": torch.randn(made["out"].shape).half().to(PLACE)}
    plan = BACKEND.backward(p, place, Gradients(), "split", {"queries": IN_TURNS} if spelling == TOGETHER else {})
    right = run(plan, given)
    outputs = [b.name for b in plan.named("output")]
    assert {"dq", "dk", "dv", "dscore.0.0"} <= set(outputs)
    marked = {name: torch.full_like(right[name], 3.0) for name in outputs}
    found = run(after(plan, marked, offset != 0.0, repairing(plan, place, False, GATE)), given)
    for name in outputs:
        assert torch.equal(found[name], right[name] if offset else marked[name]), name


def test_hopper_s_plans_of_biases_are_followed_by_repairs(hopper_runs: None) -> None:
    biased = AttentionProblem.parse("attention(q=2x512x4x64,kv=512x4x64,bf16,score=bias(1x1x512x512:fp32))")
    plain = AttentionProblem.parse("attention(q=2x512x4x64,kv=512x4x64,bf16)")
    for p, repaired in ((biased, True), (plain, False)):
        forward, backward = dispatch.plan_forward(p, H100), dispatch.plan_backward(p, H100)
        assert forward.backend == backward.backend == "hopper"
        assert ("lse" in forward.optional) != repaired
        tiles = [dict(c.constants).get("T") for c in forward.calls if isinstance(c, KernelCall)]
        assert any(getattr(tile, "repairs", False) for tile in tiles) == repaired
        names = [c.kernel.fn.__name__ for c in backward.calls if isinstance(c, KernelCall)]
        assert sum(name.startswith("repair_") for name in names) == 2 * repaired


def test_a_long_forward_and_its_repair_are_launched_without_a_graph(hopper_runs: None) -> None:
    spelling = "attention(q=2x{0}x16x128,kv={0}x16x128,bf16,band=:0,score=bias(1x1x{0}x{0}:bf16))"
    long, short = (AttentionProblem.parse(spelling.format(n)) for n in (2048, 1024))
    for p, forward, backward in ((long, False, True), (short, True, True)):
        for plan, paid in ((dispatch.plan_forward(p, H100), forward), (dispatch.plan_backward(p, H100), backward)):
            assert pays(plan, len(plan.calls)) == paid, (p, len(plan.calls))
