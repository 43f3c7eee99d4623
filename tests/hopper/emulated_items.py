"""Runs Hopper's forward that keeps statistics of rows, over items of several lengths, in the emulator; prints errors as JSON.

python -m tests.hopper.emulated_items '{"q": [0, 19, 191, 222], "k": [0, 145, 253, 256], "head_dim": 64, "keeps": ["peak"]}' ...

q and k are where items begin and end. Every other item's queries are five times as large, so that what a tile of queries holds
beyond its item would show.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch

from tests.hopper.emulated import SMALL, error, poisoned, report

# isort: split
import flashtile
from flashtile.kernels.sm90.backend import BACKEND
from flashtile.torch.call.lengths import given_lengths
from flashtile.torch.execute.bound import Bound
from flashtile.torch.routes.eager import prepare


def assess(case: dict[str, Any]) -> dict[str, float]:
    """The errors of out, lse, each item's largest score and each row's entropy, as far as they are kept."""
    generator, d = torch.Generator().manual_seed(0), case["head_dim"]
    q, k, v = (torch.randn(case[s][-1], heads, d, generator=generator).half() for s, heads in (("q", 4), ("k", 2), ("k", 2)))
    for a, b in [*pairwise(case["q"])][1::2]:
        q[a:b] *= 5.0
    cu = {f"cu_seqlens_{s}": torch.tensor(case[s], dtype=torch.int32) for s in "qk"}
    out, truth = flashtile.attention_varlen(
        *(t.double() for t in (q, k, v)), **cu, causal=True, returns=("lse", "max_logit", "entropy")
    )
    call, others = prepare(q[None], k[None], v[None], True, return_lse=True, given=given_lengths(**cu))
    plan = BACKEND.forward(call.problem, SMALL, statistics=frozenset(case["keeps"]))
    tensors = dict(call.tensors((q[None], k[None], v[None]), others))
    with patch.object(torch, "empty_strided", poisoned):
        made = Bound(plan, tensors, torch.device("cpu")).run(tensors)
    found = {"out": error(made["out"][0], out), "lse": error(made["lse"][0], truth.lse)}
    if "peak" in made:
        own = torch.stack([made["peak"][0, :, a:b].amax(-1) for a, b in pairwise(case["q"])])
        found["peak"] = error(own, truth.max_logit)
    if "entropy" in made:
        found["entropy"] = error(made["entropy"][0], truth.entropy)
    return found


if __name__ == "__main__":
    report(assess)
