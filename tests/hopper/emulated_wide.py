"""Runs items of unlike lengths on Hopper's kernels in the emulator, whose dk and dv are float32, and rounded, and prints as
JSON 0.0 for each of dk and dv whose float32 numbers have the other's bits when rounded, else infinity.

python -m tests.hopper.emulated_wide CASE ...

A case is JSON: {"lengths": arguments of `attention` by name, as lists of ints, "head_dim": of q, k and v}.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.hopper.emulated_cases import running_on  # installs the emulator

# isort: split

from flashtile import Band, Options
from flashtile.torch.routes.local import prepared
from tests.hopper.emulated import SMALL, report

TOKENS = 300


def assess(case: dict[str, Any]) -> dict[str, float]:
    torch.manual_seed(0)
    lengths = {name: torch.tensor(numbers, dtype=torch.int32) for name, numbers in case["lengths"].items()}
    batch = len(lengths["seqused_k"]) if "seqused_k" in lengths else 1
    given = [torch.randn(batch, TOKENS, heads, case["head_dim"]).half() for heads in (2, 1, 1)]
    with running_on(SMALL):
        options = Options(backend="hopper", backward="fused")
        call, others = prepared(*given, mask=Band(right=0), options=options, **lengths)
        kept = call.forward(tuple(given), others)
        saved, needs = (*given, *others, *kept), (True,) * 3 + (False,) * len(others)
        dout = torch.randn(kept[0].shape).half()
        (_, *wide), (_, *narrow) = (call.gradients(saved, dout, None, needs, wide_keys=wide) for wide in (True, False))
    pairs = zip(("dk", "dv"), wide, narrow, strict=False)
    return {name: 0.0 if _rounds_to(mine, rounded) else float("inf") for name, mine, rounded in pairs}


def _rounds_to(wide: torch.Tensor | None, narrow: torch.Tensor | None) -> bool:
    assert wide is not None
    assert narrow is not None
    return wide.dtype is torch.float32 and bool(wide.isfinite().all()) and torch.equal(wide.half(), narrow)


if __name__ == "__main__":
    report(assess)
