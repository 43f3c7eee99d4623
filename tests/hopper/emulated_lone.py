"""Runs Hopper's causal backward beside dropout in the emulator. Prints as JSON 0.0 for dq where exactly queries that see one
key get none, and for dk where exactly the keys that such a query alone sees get none; else infinity.

python -m tests.hopper.emulated_lone CASE ...

A case is JSON: {"lengths": of parts, "parts": "items" or "documents", "head_dim": of all, "backward": its variant, "softcap":
its cap, or none}.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.hopper.emulated_cases import running_on  # installs the emulator

# isort: split

from flashtile import Document, Dropout, Options, Softcap, attention, attention_varlen
from tests.hopper.emulated import SMALL, report


def assess(case: dict[str, Any]) -> dict[str, float]:
    torch.manual_seed(0)
    lengths = torch.tensor(case["lengths"])
    ends, tokens = lengths.cumsum(0), int(lengths.sum())
    q, k, v = (torch.randn(tokens, heads, case["head_dim"]).bfloat16().requires_grad_() for heads in (2, 1, 1))
    given: dict[str, Any] = {"causal": True, "dropout": Dropout(0.3, torch.tensor([3, 4]))}
    given["options"] = Options(backend="hopper", backward=case["backward"])
    if "softcap" in case:
        given["score"] = Softcap(case["softcap"])
    with running_on(SMALL):
        if case["parts"] == "items":
            starts = torch.cat([ends[:1] * 0, ends]).int()
            longest = int(lengths.max())
            given |= {f"cu_seqlens_{n}": starts for n in "qk"} | {f"max_seqlen_{n}": longest for n in "qk"}
            out = attention_varlen(q, k, v, **given)
        else:
            ids = torch.arange(len(lengths)).repeat_interleave(lengths).int()
            out = attention(q[None], k[None], v[None], mask=Document(ids), **given)[0]
        dq, dk = torch.autograd.grad(out, (q, k), torch.randn(out.shape).bfloat16())
    first = torch.zeros(tokens, dtype=torch.bool)
    first[ends - lengths] = True
    none_q, none_k = dq.flatten(1).eq(0.0).all(1), dk.flatten(1).eq(0.0).all(1)
    single = lengths.eq(1).repeat_interleave(lengths)
    return {
        "dq": 0.0 if torch.equal(none_q, first) else float("inf"),
        "dk": 0.0 if torch.equal(none_k, single) else float("inf"),
    }


if __name__ == "__main__":
    report(assess)
