"""Runs Hopper's product in the emulator and prints, as JSON, how far its results are from float64's.

python -m tests.hopper.emulated_product CASE ...

A case is JSON: {"sizes": [m, n, k], "tile": fields of the tile, "ending": the tile's, "more": whether the derivative's
columns are summed, GELU has a bias and what it is taken of is stored, "sm_count": how many blocks there are at most}.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.functional import gelu

from tests.hopper.emulated import error, poisoned, report

# isort: split
from flashtile.kernels.ops import sm90_gemm as product
from flashtile.plan.call import Buffer, Plan
from flashtile.plan.device import H100
from flashtile.torch.execute.bound import Bound


def assess(case: dict[str, Any]) -> dict[str, float]:
    """The errors of a case's results."""
    torch.manual_seed(0)
    m, n, k = case["sizes"]
    device, fields = replace(H100, sm_count=case["sm_count"]), case["tile"]
    if case["ending"] == "gelu":
        tile = replace(product.TILES["gelu"], **fields)
        tensors = {
            "x": torch.randn(m, k).half(),
            "weight1": (torch.randn(n, k) / k**0.5).half(),
            "bias1": torch.randn(n).half(),
        }
        pre = tensors["x"].double() @ tensors["weight1"].double().t()
        pre += tensors["bias1"].double() if case["more"] else 0.0
        exact = {"act": gelu(pre, approximate="tanh")} | ({"pre": pre} if case["more"] else {})
        call = product.gelu_call(m, n, "act", case["more"], case["more"], tile, device)
    else:
        tile = replace(product.TILES["derivative"], **fields)
        tensors = {"dout": torch.randn(m, k), "weight2": torch.randn(k, n) / k**0.5, "pre": torch.randn(m, n)}
        tensors = {name: t.half() for name, t in tensors.items()}
        at = tensors["pre"].double().requires_grad_()
        (slope,) = torch.autograd.grad(gelu(at, approximate="tanh").sum(), at)
        exact = {"dpre": tensors["dout"].double() @ tensors["weight2"].double() * slope}
        call = product.derivative_call(m, n, k, tile, case["more"], device)
    buffers = [Buffer(name, tuple(t.shape), "fp16", "input") for name, t in tensors.items()]
    buffers += [Buffer(name, (m, n), "fp16", "output") for name in exact]
    buffers.append(Buffer("partial", (product.parts(m, tile), n), "fp32", "output"))
    plan = Plan(None, "hopper", "", tuple(buffers), (call,))  # pyright: ignore[reportArgumentType]
    with patch.object(torch, "empty_strided", poisoned):
        made = Bound(plan, tensors, torch.device("cpu")).run(tensors)
    found = {name: error(made[name], true) for name, true in exact.items()}
    if case["more"] and "dpre" in made:
        found["sums"] = error(made["partial"].sum(0), made["dpre"].double().sum(0))
    return found


if __name__ == "__main__":
    report(assess)
