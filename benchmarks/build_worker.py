"""One build of the library, which `benchmarks/builds.py` times beside another one: by public names alone, which any build has.

`main` runs in a process whose PYTHONPATH names the build and whose arguments are cells. It answers every line "CELL PASS CALLS"
by milliseconds a call, and by microseconds of the host until the last call was issued.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import flashtile

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# batch, seqlen, heads, head_dim, and what else the call is given; varlen has lengths in the place of a seqlen
SHAPES: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "host": (1, 128, 8, 64, {"causal": True}),
    "fa3-paper-1k": (16, 1024, 16, 128, {"causal": True}),
    "fa3-paper-16k": (1, 16384, 16, 128, {"causal": True}),
    "fa3-paper-64-full": (4, 4096, 32, 64, {}),
    "varlen": (64, 0, 16, 128, {"causal": True}),
    "costs-softcap": (2, 4096, 16, 128, {"causal": True, "score": "softcap"}),
    "costs-dropout": (2, 4096, 16, 128, {"causal": True, "dropout_p": 0.1}),
}


def lengths(count: int) -> list[int]:
    """Lengths of items, lognormal with a mean near 1,024."""
    dice = random.Random(0)
    return [max(1, min(16384, round(dice.lognormvariate(6.4, 1.0)))) for _ in range(count)]


def calls(name: str) -> dict[str, Callable[[], Any]]:
    """The passes of a cell."""
    batch, seqlen, heads, head_dim, how = SHAPES[name]
    how = dict(how)
    if "score" in how:
        how["score"] = flashtile.Softcap(30.0)
    torch.manual_seed(0)
    attend = partial(flashtile.attention, **how)
    shape = (batch, seqlen, heads, head_dim)
    if not seqlen:
        ends = torch.tensor([0, *lengths(batch)], device=DEVICE).cumsum(0).to(torch.int32)
        longest, shape = max(lengths(batch)), (int(ends[-1]), heads, head_dim)
        attend = partial(flashtile.attention_varlen, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest,
                         max_seqlen_k=longest, **how)  # fmt: skip
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    dout = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)

    def forward() -> Any:
        with torch.no_grad():
            return attend(q, k, v)

    out: list[torch.Tensor] = []

    def backward() -> Any:
        if not out:
            out.append(attend(q, k, v))
        return torch.autograd.grad(out[0], (q, k, v), dout, retain_graph=True)

    def both() -> Any:
        return torch.autograd.grad(attend(q, k, v), (q, k, v), dout)

    return {"forward": forward, "backward": backward, "both": both}


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def main() -> int:
    passes: dict[str, dict[str, Callable[[], Any]]] = {}
    for name in sys.argv[1:]:
        passes[name] = calls(name)
        for call in passes[name].values():
            call()
    wait()
    print("ready", flashtile.__file__, flush=True)
    for line in sys.stdin:
        name, which, count = line.split()
        call = passes[name][which]
        for _ in range(3):
            call()
        wait()
        begun = time.perf_counter()
        for _ in range(int(count)):
            call()
        issued = time.perf_counter() - begun
        wait()
        print((time.perf_counter() - begun) / int(count) * 1e3, issued / int(count) * 1e6, flush=True)
    return 0
