"""Runs Hopper's products in the emulator and prints, as JSON, how far their results are from float64's.

python -m tests.hopper.emulated_product CASE ...

A case is JSON: {"sizes": [m, n, k], "tile": fields of the tile, "sm_count": how many blocks there are at most}.
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


def strips(tile: Memory) -> Memory:
    """The strips of a tile: swizzled memory is row by row here."""
    rows, columns = tile.shape
    return Memory(tile.tensor.view(rows // 8, 8, columns // 64, 64).permute(2, 0, 1, 3).reshape(-1, 8, 64))


def assess(case: dict[str, Any]) -> dict[str, float]:
    """The errors of a case's results."""
    torch.manual_seed(0)
    m, n, k = case["sizes"]
    tile = product.Tile(**case["tile"])
    left, right = torch.randn(m, k).half(), (torch.randn(k, n) / k**0.5).half()
    tensors = {"left": left, "right": right.t().contiguous() if tile.transposed else right}
    exact = {"out": left.double() @ right.double()}
    if tile.ending == "derivative":
        tensors["other"] = torch.randn(m, n).half()
        at = tensors["other"].double().requires_grad_()
        (slope,) = torch.autograd.grad(torch.nn.functional.gelu(at, approximate="tanh").sum(), at)
        exact["out"] *= slope
    if tile.ending == "gelu":
        tensors["bias"] = torch.randn(n).half()
        exact["pre"] = exact["out"] + tensors["bias"].double()
        exact["out"] = torch.nn.functional.gelu(exact["pre"], approximate="tanh")
    if not tile.keeps:
        exact.pop("pre", None)
    buffers = [Buffer(name, tuple(t.shape), "fp16", "input") for name, t in tensors.items()]
    buffers += [Buffer(name, (m, n), "fp16", "output") for name in exact]
    if tile.sums:
        buffers.append(Buffer("partial", (product.parts(m, tile), n), "fp32", "output"))
    given = {b.name: b.name for b in buffers}
    call = product.product_call(product.Names(**given), m, n, k, tile, replace(H100, sm_count=case["sm_count"]))
    plan = Plan(None, "hopper", "", tuple(buffers), (call,))  # pyright: ignore[reportArgumentType]
    with patch.object(torch, "empty_strided", poisoned):
        made = Bound(plan, tensors, torch.device("cpu")).run(tensors)
    found = {name: error(made[name], true) for name, true in exact.items()}
    if tile.sums:
        found["sums"] = error(made["partial"].sum(0), made["out"].double().sum(0))
    return found


def main() -> None:
    torch.set_num_threads(1)
    put(product, strips=strips)
    for text in sys.argv[1:]:
        try:
            found: dict[str, Any] = {"errors": assess(json.loads(text))}
        except Exception as problem:  # of a role, or of the plan: it belongs to this case alone
            found = {"failure": f"{type(problem).__name__}: {problem}"}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
