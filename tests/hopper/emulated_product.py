"""Runs Hopper's product in the emulator and prints, as JSON, how far their results are from float64's.

python -m tests.hopper.emulated_product CASE ...

A case is JSON: {"sizes": [m, n, k], "tile": fields of the tile, "sums": whether columns are summed, "sm_count": how many blocks
there are at most}.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from tests.hopper.emulated import error, poisoned
from tests.hopper.emulator import replace as put
from tests.hopper.machine import Memory

# isort: split
from flashtile.kernels.hopper import product
from flashtile.plan.call import Buffer, Plan
from flashtile.plan.device import H100
from flashtile.torch.run import Bound


def cut(tile: Memory) -> Memory:
    """The strips of a tile: swizzled memory is row by row here."""
    rows, columns = tile.shape
    return Memory(tile.tensor.view(rows // 16, 16, columns // 64, 64).permute(2, 0, 1, 3).reshape(-1, 16, 64))


def assess(case: dict[str, Any]) -> dict[str, float]:
    """The errors of a case's results."""
    torch.manual_seed(0)
    m, n, k = case["sizes"]
    tile = product.Tile(**case["tile"])
    tensors = {
        "dout": torch.randn(m, k).half(),
        "weight2": (torch.randn(k, n) / k**0.5).half(),
        "pre": torch.randn(m, n).half(),
    }
    at = tensors["pre"].double().requires_grad_()
    (slope,) = torch.autograd.grad(torch.nn.functional.gelu(at, approximate="tanh").sum(), at)
    exact = tensors["dout"].double() @ tensors["weight2"].double() * slope
    buffers = [Buffer(name, tuple(t.shape), "fp16", "input") for name, t in tensors.items()]
    buffers += [Buffer("dpre", (m, n), "fp16", "output"), Buffer("partial", (product.parts(m, tile), n), "fp32", "output")]
    call = product.product_call(m, n, k, tile, case["sums"], replace(H100, sm_count=case["sm_count"]))
    plan = Plan(None, "hopper", "", tuple(buffers), (call,))  # pyright: ignore[reportArgumentType]
    with patch.object(torch, "empty_strided", poisoned):
        made = Bound(plan, tensors, torch.device("cpu")).run(tensors)
    found = {"dpre": error(made["dpre"], exact)}
    if case["sums"]:
        found["sums"] = error(made["partial"].sum(0), made["dpre"].double().sum(0))
    return found


def main() -> None:
    torch.set_num_threads(1)
    put(product, cut=cut)
    for text in sys.argv[1:]:
        try:
            found: dict[str, Any] = {"errors": assess(json.loads(text))}
        except Exception as problem:  # of a role, or of the plan: it belongs to this case alone
            found = {"failure": f"{type(problem).__name__}: {problem}"}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
