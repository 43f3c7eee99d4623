"""One build of the library, which `benchmarks/builds.py` times beside another one: by public names alone, which any build has.

`main` runs in a process whose PYTHONPATH names the build and whose arguments are cells. It answers every line "CELL PASS CALLS"
by milliseconds a call, and by microseconds of the host until the last call was issued. To "CELL PASS 0" it answers what the
pass makes: for every tensor its norm, and its sum with signs that are the same in every build.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import torch

import flashtile

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# batch, seqlen, heads, head_dim, and what else the call is given; varlen has lengths in the place of a seqlen
SHAPES: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "host": (1, 128, 8, 64, {"causal": True}),
    "host-full": (4, 256, 8, 128, {}),
    "host-softcap": (1, 128, 8, 64, {"causal": True, "score": "softcap"}),
    "host-window": (1, 512, 8, 64, {"window": (128, 0)}),
    "host-varlen": (2, 0, 8, 64, {"causal": True}),
    **{
        f"fa3-paper-{head_dim}-{thousands}k-{mask}": (16 // thousands, 1024 * thousands, 2048 // head_dim, head_dim, how)
        for head_dim in (64, 128, 256)
        for thousands in (1, 4, 16)
        for mask, how in (("causal", {"causal": True}), ("full", {}))
    },
    "varlen": (64, 0, 16, 128, {"causal": True}),
    "costs-softcap": (2, 4096, 16, 128, {"causal": True, "score": "softcap"}),
    "costs-dropout": (2, 4096, 16, 128, {"causal": True, "dropout": 0.1}),
    # lse's rounding is looked for, and mended, where a tensor is added to scores, and in small problems
    "costs-bias": (2, 2048, 16, 128, {"causal": True, "score": "bias"}),
    "costs-bias-portable": (2, 2048, 16, 128, {"causal": True, "score": "bias", "backend": "triton"}),
    "costs-small": (1, 512, 8, 64, {"causal": True}),
    # where a build has the option: beside one without, or beside "fa3-paper-128-4k-causal", it is what the option costs
    "costs-exact-delta": (4, 4096, 16, 128, {"causal": True, "delta": "exact"}),
}


def lengths(count: int) -> list[int]:
    """Lengths of items, lognormal with a mean near 1,024."""
    dice = random.Random(0)
    return [max(1, min(16384, round(dice.lognormvariate(6.4, 1.0)))) for _ in range(count)]


def calls(name: str) -> dict[str, Callable[[], Any]]:
    """The passes of a cell."""
    batch, seqlen, heads, head_dim, how = SHAPES[name]
    how = dict(how)
    torch.manual_seed(0)
    if how.get("score") == "bias":
        how["score"] = (flashtile.Bias(torch.randn((1, 1, seqlen, seqlen), device=DEVICE, dtype=torch.bfloat16)),)
    elif "score" in how:
        how["score"] = (flashtile.Softcap(30.0),)
    if "dropout" in how:
        how["dropout"] = flashtile.Dropout(how["dropout"], seed=torch.tensor([3, 4], device=DEVICE))
    asked = {option: how.pop(option) for option in ("backend", "delta") if option in how}
    known = [field.name for field in fields(flashtile.Options)]
    how["options"] = flashtile.Options(**{option: value for option, value in asked.items() if option in known})
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


def answer(made: Any) -> list[float]:
    """The norm of every tensor of a result, and its sum with signs drawn from a fixed seed."""
    numbers: list[float] = []
    for tensor in made if isinstance(made, tuple) else (made,):
        values = tensor.detach().double().cpu()
        signs = torch.randint(0, 2, values.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
        numbers += [values.norm().item(), (values * signs).sum().item()]
    return numbers


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
        if int(count) == 0:
            torch.manual_seed(1)
            print(*answer(call()), flush=True)
            continue
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
