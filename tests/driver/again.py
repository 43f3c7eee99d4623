"""Runs calls over a cache several times as if on an H100, and prints of each whether those that are known launch with the
tensors of the first; then what a call takes of the host, in microseconds, where launches cost nothing.

See test_host.py.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from tests.driver.card import pretend

# isort: split

import flashtile
from flashtile import append_to_cache, attention, attention_cached
from flashtile.integrations.transformers import Mask, attention_forward
from flashtile.problem.mask import CAUSAL
from flashtile.torch.cache import operator
from flashtile.torch.cache.known import Known
from flashtile.torch.execute.bound import Bound
from flashtile.torch.execute.replay import Replay

HEADS, KV, DIM, ROWS, PAGE, BATCH = 8, 2, 64, 256, 64, 2
ROUNDS, CALLS = 60, 25
spared: list[str] = []  # outputs for which scratch served
Call = Callable[[], Any]


def calls_of() -> tuple[dict[str, Call], dict[str, Call]]:
    """(calls of `attention_cached`, of `append_to_cache`), and the dense call beside which they are timed."""
    normal = lambda *shape: torch.randn(shape).bfloat16()  # noqa: E731
    q, k, v = normal(BATCH, 1, HEADS, DIM), normal(BATCH, ROWS, KV, DIM), normal(BATCH, ROWS, KV, DIM)
    used, first = torch.tensor([200, 100], dtype=torch.int32), torch.tensor([3, 0], dtype=torch.int32)
    table = torch.arange(BATCH * ROWS // PAGE, dtype=torch.int32).view(BATCH, -1)
    pages = [pool.view(-1, PAGE, KV, DIM) for pool in (k, v)]
    new, packed = (normal(BATCH, 1, KV, DIM), normal(BATCH, 1, KV, DIM)), normal(5, HEADS, DIM)
    starts = torch.tensor([0, 4, 5], dtype=torch.int32)
    eight, scale, sink = [t.to(torch.float8_e4m3fn) for t in pages], torch.ones(KV), torch.zeros(HEADS)
    latent, wide = normal(8, PAGE, 1, 192), normal(BATCH, 1, HEADS, 192)
    (front, behind), (values, rest) = ([x.contiguous() for x in t.split((128, 64), -1)] for t in (wide, latent))
    made, layer, heads_first = torch.empty_like(packed), torch.nn.Module(), [t.transpose(1, 2) for t in (q, k, v)]
    step = Mask((BATCH, 1, 1, ROWS), CAUSAL, used=used)
    cached: dict[str, Call] = {
        "contiguous": lambda: attention_cached(q, k, v, seqused_k=used, causal=True),
        "pages": lambda: attention_cached(q, *pages, table, seqused_k=used, causal=True, return_lse=True),
        "first_k, sinks, a window": lambda: attention_cached(
            q, *pages, table, seqused_k=used, first_k=first, sink=sink, window=(99, 0), split=128
        ),
        "packed": lambda: attention_cached(packed, *pages, table, seqused_k=used, cu_seqlens_q=starts, causal=True),
        "8 bits": lambda: attention_cached(q, *eight, table, seqused_k=used, k_scale=scale, v_scale=scale, split=128),
        "latent": lambda: attention_cached(wide, latent, latent[..., :128], table, seqused_k=used),
        "latent in two": lambda: attention_cached(behind, rest, values, table, seqused_k=used, qv=front),
        "append": lambda: attention_cached(q, *pages, table, seqused_k=used, append=new, causal=True),
        "out": lambda: attention_cached(packed, *pages, table, seqused_k=used, cu_seqlens_q=starts, causal=True, out=made),
        "transformers": lambda: attention_forward(layer, *heads_first, step, scaling=0.1, use_cache=True)[0],
    }  # fmt: skip
    slots = torch.tensor([[7], [300]])
    appends: dict[str, Call] = {
        "append by lengths": lambda: append_to_cache(*new, *pages, table, seqused_k=used),
        "append by slots": lambda: append_to_cache(*new, *pages, slots=slots),
        "append of 8 bits": lambda: append_to_cache(*new, *eight, table, seqused_k=used, k_scale=scale, v_scale=scale),
    }
    return cached, appends


def launched(call: Call) -> list[dict[str, int]]:
    """Of every plan that a call runs, its inputs by name: where they lie."""
    ran: list[dict[str, int]] = []
    run, direct = Bound.run, Replay.direct

    def by_name(self: Bound, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        ran.append({name: tensors[name].data_ptr() for name in self.inputs})
        return run(self, tensors)

    def by_place(self: Replay, inputs: Any, addresses: Any, whole: bool = True, into: Any = None) -> list[Any]:
        names = [name for name in self.names if name not in self.made]
        assert [t.data_ptr() for t in inputs] == list(addresses)
        ran.append(dict(zip(names, addresses, strict=True)))
        made = direct(self, inputs, addresses, whole, into)
        assert into is None or made[0] is into[1]
        if None in made:  # a spare output, which lies behind all else in the scratch
            places, met = list(self.known.items())[-1]
            ((name, offset),) = self.spare.items()
            assert max(self.offsets.values()) < offset < self.scratch_bytes
            assert any(str(places[-1] + offset) in str(args) for _, args in met.launches), name
            spared.append(name)
        return made

    with patch.object(Bound, "run", by_name), patch.object(Replay, "direct", by_place):
        made = call()
    if isinstance(made, tuple):
        assert [str(t.dtype) for t in made] == ["torch.bfloat16", "torch.float32"]
    return ran


def never(*given: Any) -> None:
    raise AssertionError("out is laid out anew: a launch more")


def least_us(calls: dict[str, Call]) -> dict[str, float]:
    """Microseconds of each call in the quickest of many rounds, in turn, so that all meet what else the machine does."""
    least = dict.fromkeys(calls, math.inf)
    for _ in range(ROUNDS):
        for name, call in calls.items():
            begun = time.perf_counter()
            for _ in range(CALLS):
                call()
            least[name] = min(least[name], (time.perf_counter() - begun) / CALLS * 1e6)
    return least


def main() -> None:
    cached, appends = calls_of()
    dense = [torch.randn(1, 128, 8, 64).bfloat16() for _ in "qkv"]
    pretend()
    known: list[int] = []
    run: Any = Known.run
    counted = patch.object(Known, "run", lambda *given: known.append(1) or run(*given))
    with torch.no_grad(), counted, patch.object(operator, "laid", never):
        for name, call in {**cached, **appends}.items():
            known.clear()
            first, second, third = (launched(call) for _ in range(3))
            new = {"append": ["seqused_k"], "latent in two": ["q"]}.get(name, [])  # lengths with the new rows, queries with qv
            alike = [{n: a for n, a in one.items() if n not in new} for one in first]
            for other in (second, third):
                assert [{n: one[n] for n in mine} for one, mine in zip(other, alike, strict=True)] == alike, name
                assert [one.keys() for one in other] == [one.keys() for one in first], name
            print(name, len(known), [len(one) for one in third], len(spared), sep="|")
            spared.clear()
    for written in ("LAUNCHES", "EARLY"):  # from now on nothing is
        del os.environ[written]
    with torch.no_grad():
        for name, least in least_us({"dense": lambda: attention(*dense, causal=True), **cached, **appends}).items():
            print(name, least, sep="|")
    print(*flashtile.cache_info(), sep="|")


if __name__ == "__main__":
    main()
