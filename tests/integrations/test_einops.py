"""einops around a call: one graph, whatever way heads are taken apart."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("einops", reason="einops is not installed")

import einops

import flashtile
from flashtile import Options

CPU = Options(backend="cpu")


def apart(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    q, k, v = einops.rearrange(x @ weight, "b s (parts h d) -> parts b s h d", parts=3, h=4)
    out = flashtile.attention(q, k, v, causal=True, options=CPU)
    return einops.rearrange(out, "b s h d -> b s (h d)")


def packed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    qkv = einops.rearrange(x @ weight, "b s (parts h d) -> b s parts h d", parts=3, h=4)
    return einops.rearrange(flashtile.attention_qkvpacked(qkv, causal=True, options=CPU), "b s h d -> b s (h d)")


def heads_first(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In torch's own order of axes, which flashtile reads by its strides."""
    q, k, v = (einops.rearrange(t, "b s (h d) -> b h s d", h=4).contiguous() for t in (x @ weight).chunk(3, -1))
    q, k, v = (einops.rearrange(t, "b h s d -> b s h d") for t in (q, k, v))
    return flashtile.attention(q, k, v, causal=True, options=CPU).flatten(2)


@pytest.mark.parametrize("function", [apart, packed, heads_first], ids=lambda f: f.__name__)
def test_rearranged_calls_are_one_graph(function) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    x, weight = torch.randn(2, 9, 32, requires_grad=True), torch.randn(32, 96, requires_grad=True)
    results = []
    for attend in (compiled, function, apart):
        out = attend(x, weight)
        results.append([out, *torch.autograd.grad(out.square().sum(), (x, weight))])
    for got in results[:2]:
        for a, b in zip(got, results[2], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
