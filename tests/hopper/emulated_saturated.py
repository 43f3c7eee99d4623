"""Runs Hopper's kernels in the emulator on rows of large scores. Exponents are measured from a key of the tile that is
visited first, and another one has all the weight. Prints as JSON 0.0 for out where it is that key's value, to the bit, and for
dq and dk where they are what float32 sums of dp and delta differ by, and no more; else infinity.

python -m tests.hopper.emulated_saturated CASE ...

A case is JSON: {"dtype": a torch dtype's name, "head_dim": of all, "sink": whether there is one, "used": keys, or none}. Or
{"offset": a number, "row": a query's}: 0.0 for each pass that tells of a row of so large scores, or that there is none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from tests.hopper.emulated_cases import running_on  # installs the emulator

# isort: split

from flashtile import Options, attention
from flashtile.kernels.sm90.backend import BACKEND, GATE
from flashtile.plan.backend import Gradients
from flashtile.plan.call import Plan
from flashtile.problem.attention import AttentionProblem
from flashtile.torch.execute.bound import Bound
from tests.hopper.emulated import SMALL, draw, expect, poisoned, report

QUERIES, KEYS = 130, 390
BEST, FIRST = 5, 290  # the last key tile is visited first


def assess(case: dict[str, Any]) -> dict[str, float]:
    torch.manual_seed(0)
    dtype = getattr(torch, case["dtype"])
    q, k, v = (torch.randn(1, n, 1, case["head_dim"]).to(dtype) for n in (QUERIES, KEYS, KEYS))
    q[..., 0], k[..., 0], q[..., 1:] = torch.rand(1, QUERIES, 1) + 1.0, 0.0, q[..., 1:] / 16.0
    k[:, BEST, :, 0], k[:, FIRST, :, 0] = 4096.0, 4080.0  # 2^23 to 2^46 apart
    leaves = [x.requires_grad_() for x in (q, k, v)]
    given: dict[str, Any] = {"scale": 1.0, "options": Options(backend="hopper")}
    if case.get("sink"):
        given["sink"] = torch.zeros(1)
    if "used" in case:
        given["seqused_k"] = torch.tensor([case["used"]], dtype=torch.int32)
    with running_on(SMALL):
        out = attention(*leaves, **given)
        dout = torch.randn(out.shape).to(dtype)
        dq, dk = torch.autograd.grad(out, leaves[:2], dout)
    of_one = 2.0**-20 * (dout.float().abs() @ v[0, BEST].float().abs().T).amax().item()
    return {
        "out": 0.0 if torch.equal(out, v[:, BEST : BEST + 1].expand_as(out)) else float("inf"),
        "dq": 0.0 if dq.abs().max() <= of_one * k.abs().max() else float("inf"),
        "dk": 0.0 if dk.abs().max() <= of_one * q.abs().max() * QUERIES else float("inf"),
    }


class NothingBehind:
    """Repairs without launches: what tells them is there nevertheless."""

    def repair_forward(self, problem: AttentionProblem, *_: Any) -> Plan:
        return Plan(problem, "triton", "", (), ())

    repair_backward = repair_forward


BIASED = AttentionProblem.parse("attention(q=1x300x2x64,kv=200x1x64,fp16,score=bias(1x1x300x200:fp16))")


def tells(case: dict[str, Any]) -> dict[str, float]:
    tensors = draw(BIASED)
    tensors["score.0.0"] = tensors["score.0.0"].half()
    tensors["score.0.0"][0, 0, case["row"]] += case["offset"]
    made = expect(BIASED, tensors, False)
    tensors |= {"out": made["out"].half().contiguous(), "lse": made["lse"].float().contiguous()}
    with patch.object(BACKEND, "repairs", NothingBehind()):
        plans = BACKEND.forward(BIASED, SMALL), BACKEND.backward(BIASED, SMALL, Gradients(), "auto")
    found: dict[str, float] = {}
    for name, plan in zip(("forward", "backward"), plans, strict=True):
        buffers = tuple(replace(b, role="output") if b.name == GATE else b for b in plan.buffers)
        given = {b.name: tensors[b.name] for b in plan.named("input")}
        with patch.object(torch, "empty_strided", poisoned):
            words = Bound(replace(plan, buffers=buffers), given, torch.device("cpu")).run(given)[GATE]
        right = ((words == 0) | (words == 1)).all() and words.any() == (case["offset"] != 0.0)
        found[name] = 0.0 if right else float("inf")
    return found


if __name__ == "__main__":
    report(lambda case: tells(case) if "offset" in case else assess(case))
