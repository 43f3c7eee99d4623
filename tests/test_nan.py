"""Where a NaN goes: docs/limits.md and docs/how-to/padding.md, by every backend."""

from __future__ import annotations

import math

import pytest
import torch

import flashtile
from flashtile import KeyPadding, Options
from flashtile.problem.options import Variant

SEQLEN, BAD = 40, 30


def tensors(place: torch.device, bad: str, row: int) -> list[torch.Tensor]:
    """q, k, v of two items and two heads; NaN in one row of the first item's first head, of those that `bad` names."""
    made = [torch.randn(2, SEQLEN, 2, 16, device=place) for _ in "qkv"]
    for name, tensor in zip("qkv", made, strict=True):
        if name in bad:
            tensor[0, row, 0] = math.nan
    return [tensor.requires_grad_() for tensor in made]


@pytest.mark.parametrize(("bad", "reached"), [("q", [BAD]), ("k", list(range(BAD, SEQLEN)))])
def test_nan_reaches_out_of_the_queries_that_see_it(
    bad: str, reached: list[int], backend: str, place: torch.device, variant: Variant
) -> None:
    q, k, v = tensors(place, bad, BAD)
    out = flashtile.attention(q, k, v, causal=True, options=Options(backend=backend, backward=variant))
    assert out[0, :, 0].isnan().any(-1).nonzero().flatten().tolist() == reached
    for tensor in (out, *torch.autograd.grad(out.sum(), (q, k, v))):
        assert tensor[0, :, 0].isnan().any()
        assert not tensor[0, :, 1].isnan().any()  # the other head
        assert not tensor[1].isnan().any()  # the other item


@pytest.mark.parametrize("bad", ["kv", "qkv"])
def test_nan_in_padding(bad: str, backend: str, place: torch.device, variant: Variant) -> None:
    """By KeyPadding padded queries are computed, and reach dk and dv even with a dout of 0; by seqused nothing is read."""
    q, k, v = tensors(place, bad, SEQLEN - 1)
    keep = torch.arange(SEQLEN, device=place).expand(2, -1) < SEQLEN - 1
    dout = torch.randn(2, SEQLEN, 2, 16, device=place)
    dout[:, SEQLEN - 1] = 0.0
    options = Options(backend=backend, backward=variant)
    out = flashtile.attention(q, k, v, causal=True, mask=KeyPadding(keep), options=options)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    assert not out[:, :-1].isnan().any()
    assert not dq[:, :-1].isnan().any()
    for tensor in (out[:, -1], dq[:, -1], dk, dv):
        assert bool(tensor.isnan().any()) == ("q" in bad)
    out = flashtile.attention(q, k, v, causal=True, seqused_q=keep, seqused_k=keep, options=options)
    for tensor in (out, *torch.autograd.grad(out, (q, k, v), dout)):
        assert not tensor.isnan().any()
