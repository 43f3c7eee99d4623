"""Sinks: what the definition says beside the accuracy of tests/cases.py."""

from __future__ import annotations

import math

import torch

import flashtile
from flashtile import Options
from flashtile.problem.options import Variant


def tensors(place: torch.device, seqlen_q: int = 20, seqlen_k: int = 12) -> list[torch.Tensor]:
    shapes = ((2, seqlen_q, 4, 16), (2, seqlen_k, 2, 16), (2, seqlen_k, 2, 16))
    return [torch.randn(shape, device=place, requires_grad=True) for shape in shapes]


def test_a_query_that_sees_nothing_has_the_sink_for_lse(backend: str, place: torch.device, variant: Variant) -> None:
    q, k, v = tensors(place)
    sink = torch.randn(4, device=place, requires_grad=True)
    options = Options(backend=backend, backward=variant)
    out, lse = flashtile.attention(q, k, v, causal=True, sink=sink, return_lse=True, options=options)
    assert (out[:, :8] == 0).all()
    torch.testing.assert_close(lse[:, :, :8], sink[:, None].expand(2, 4, 8), rtol=1e-6, atol=1e-6)
    dq, dsink = torch.autograd.grad(lse[:, :, :8].sum(), (q, sink))
    assert (dq == 0).all()
    torch.testing.assert_close(dsink, torch.full_like(sink, 2 * 8))


def test_a_sink_of_minus_infinity_is_none(backend: str, place: torch.device, variant: Variant) -> None:
    q, k, v = tensors(place)
    sink = torch.full((4,), -math.inf, device=place, requires_grad=True)
    options = Options(backend=backend, backward=variant)
    results = []
    for given in (sink, None):
        out, lse = flashtile.attention(q, k, v, causal=True, sink=given, return_lse=True, options=options)
        seen = lse[:, :, 8:]
        results.append((out, lse, *torch.autograd.grad(out.sum() + seen.sum(), (q, k, v))))
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_no_keys_at_all(backend: str, place: torch.device) -> None:
    q, k, v = tensors(place, 5, 0)
    sink = torch.randn(4, device=place, requires_grad=True)
    out, lse = flashtile.attention(q, k, v, sink=sink, return_lse=True, options=Options(backend=backend))
    assert (out == 0).all()
    torch.testing.assert_close(lse, sink[:, None].expand(2, 4, 5))
    torch.testing.assert_close(torch.autograd.grad(lse.sum() + out.sum(), sink)[0], torch.full_like(sink, 10))


def test_any_strides(backend: str, place: torch.device) -> None:
    q, k, v = tensors(place)
    options = Options(backend=backend)
    wide = torch.randn(8, device=place)
    outs = [flashtile.attention(q, k, v, sink=sink, options=options) for sink in (wide[::2], wide[::2].clone())]
    assert torch.equal(*outs)
    one = torch.randn(1, device=place)
    outs = [flashtile.attention(q, k, v, sink=sink, options=options) for sink in (one.expand(4), one.expand(4).clone())]
    assert torch.equal(*outs)


def test_another_sink_is_another_result(backend: str, place: torch.device) -> None:
    q, k, v = tensors(place)
    options, sink = Options(backend=backend), torch.randn(4, device=place)
    given = (sink, sink + 1, sink.bfloat16(), None, sink)
    outs = [flashtile.attention(q, k, v, sink=one, options=options) for one in given]
    assert torch.equal(outs[0], outs[4])
    assert all(not torch.equal(outs[0], out) for out in outs[1:4])
