"""Runs Hopper's kernels in the emulator on rows of large scores. Exponents are measured from a key of the tile that is
visited first, and another one has all the weight. Prints as JSON 0.0 for out where it is that key's value, to the bit, and for
dq and dk where they are what float32 sums of dp and delta differ by, and no more; else infinity.

python -m tests.hopper.emulated_saturated CASE ...

A case is JSON: {"dtype": a torch dtype's name, "head_dim": of all, "sink": whether there is one, "used": keys, or none}.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.hopper.emulated_cases import running_on  # installs the emulator

# isort: split

from flashtile import Options, attention
from tests.hopper.emulated import SMALL, report

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


if __name__ == "__main__":
    report(assess)
