"""Calls of a context whose ranks agree once, which later calls alike find ready."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashtile
from flashtile import Bias, InvalidProblem
from flashtile.distributed import Context, attention, attention_varlen, shard
from flashtile.torch.context.known import KNOWN
from tests.distributed.cases import data


def calls_known_again_are_as_the_first() -> None:
    """Each kind twice: the second finds what the first made ready. A call between two alike that differs is another kind."""
    KNOWN.clear()
    d = data(torch.float32, 4)
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("zigzag", {}), ("zigzag", {"causal": True}), ("zigzag", {"causal": True, "window": (3, 0)}),
        ("zigzag", {"causal": True, "scale": 0.3}),
        ("contiguous", {"causal": True, "window": (3, 0)}), ("zigzag", {"causal": True, "score": (flashtile.Softcap(2.0),)}),
        ("zigzag", {"causal": True, "score": (flashtile.Softcap(3.0),)}), ("zigzag", {"causal": True, "sink": d.sink}),
        ("zigzag", {"causal": True, "score": (Bias(d.bias[:, :, :1]),)}),
        ("zigzag", {"causal": True, "options": flashtile.Options(deterministic=True)}),
    ]  # fmt: skip
    for turn in range(3):
        for layout, how in kinds:
            context = Context(method="allgather", layout=layout, check="first")  # pyright: ignore[reportArgumentType]
            whole = [t.clone().requires_grad_() for t in (d.q, d.k, d.v)]
            more = [t + turn for t in whole]  # other numbers
            made = flashtile.attention(*more, return_lse=turn != 2, **how)
            expected = [*((made,) if turn == 2 else made)]
            expected += torch.autograd.grad(expected[0], whole, d.dout)
            local = [shard(t.detach(), context).requires_grad_() for t in more]
            made = attention(*local, context=context, return_lse=turn != 2, **how)
            found = [*((made,) if turn == 2 else made)]
            found += torch.autograd.grad(found[0], local, shard(d.dout, context))
            for i, (a, b) in enumerate(zip(found, expected, strict=True)):
                torch.testing.assert_close(a, shard(b, context, 2 if i == 1 and turn != 2 else 1), rtol=1e-5, atol=1e-5)
    ready = [known for known in KNOWN.values() if known.ready is not None]
    assert (
        len(KNOWN) == len(ready) == 2 * (len(kinds) - 2)
    )  # with lse and without; but for a sink and a bias, which are tensors
    context = Context(method="allgather", check="first")
    packed = [shard(t[0], context, 0) for t in (d.q, d.k, d.v)]
    starts = torch.tensor([0, 9, d.q.shape[1]], dtype=torch.int32)
    for at in (starts, starts + torch.tensor([0, 4, 0], dtype=torch.int32)):  # known again, of other documents
        made = attention_varlen(*packed, at, context=context, causal=True)
        expected = flashtile.attention_varlen(d.q[0], d.k[0], d.v[0], at, causal=True)
        torch.testing.assert_close(made, shard(expected, context, 0), rtol=1e-5, atol=1e-5)
    with pytest.raises(InvalidProblem, match="cu_seqlens_q is "):
        attention_varlen(*packed, starts + 1, context=context, causal=True)
