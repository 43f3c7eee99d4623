"""Gradients of q, of new keys and values, of sinks and of what modifiers capture, over keys that lie in a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashtile
from flashtile.reference.cached import cached_plain, cached_reference
from tests.cached.draw import Drawn, draw
from tests.judge import FACTOR, FLOOR_ULP

Rows = list[tuple[int, int, int, tuple[int, ...]]]  # item, page, row, the token of k


def split_off(drawn: Drawn) -> tuple[torch.Tensor, Rows] | None:
    """(rows before the append, the new ones), where a call's queries are as many as its last keys; else None."""
    q, k_cache, _, *table = drawn.tensors
    used, cu = drawn.arguments["seqused_k"].tolist(), drawn.arguments.get("cu_seqlens_q")
    counts = [q.shape[1]] * len(used) if cu is None else (cu[1:] - cu[:-1]).tolist()
    firsts = drawn.arguments["first_k"].tolist() if "first_k" in drawn.arguments else [0] * len(used)
    if any(n - count < first for n, count, first in zip(used, counts, firsts, strict=True)):
        return None
    rows: Rows = []
    for i, (n, count) in enumerate(zip(used, counts, strict=True)):
        for j in range(count):
            row, size = n - count + j, k_cache.shape[1]
            page = int(table[0][i, row // size]) if table else i
            rows.append((i, page, row % size, (i, j) if cu is None else (int(cu[i]) + j,)))
    before = [n - count for n, count in zip(used, counts, strict=True)]
    return torch.tensor(before, dtype=torch.int32, device=q.device), rows


def leaves_of(arguments: dict[str, Any], dtype: torch.dtype | None = None) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The arguments with leaves for what modifiers capture and for the sink, and these."""
    made, leaves = dict(arguments), list[torch.Tensor]()

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        leaves.append(tensor.detach().clone().to(dtype or tensor.dtype).requires_grad_())
        return leaves[-1]

    kinds = {flashtile.Alibi: "slopes", flashtile.Bias: "bias"}
    made["score"] = tuple(type(m)(leaf(getattr(m, kinds[type(m)]))) if type(m) in kinds else m for m in arguments["score"])
    if "sink" in made:
        made["sink"] = leaf(made["sink"])
    return made, leaves


def reference(drawn: Drawn, rows: Rows, wide: bool, arriving: Any) -> list[torch.Tensor]:
    """Gradients of q, the rows of the pools that are new, and the rest, by definition: in float64, or in the inputs' dtype."""
    q, k_cache, v_cache, *table = drawn.tensors
    leaves = [(t.double() if wide else t.clone()).requires_grad_() for t in (q, k_cache, v_cache)]
    arguments, captured = leaves_of(drawn.arguments, torch.float64 if wide else None)
    out, lse = (cached_reference if wide else cached_plain)(*leaves, *table, **arguments)
    grads = [g.to(t.dtype) for g, t in zip(arriving, (out, lse), strict=True)]
    dq, *pools = torch.autograd.grad((out, lse), [*leaves, *captured], grads, allow_unused=True, materialize_grads=True)
    new = [torch.stack([pool[page, row] for _, page, row, _ in rows]) if rows else pool[:0, 0] for pool in pools[:2]]
    return [dq, *new, *pools[2:]]


def check(drawn: Drawn, backend: str) -> bool:
    """Assert the accuracy rule of every gradient; False for calls that append nothing of the kind."""
    found = split_off(drawn)
    if found is None or drawn.tensors[0].numel() == 0:
        return False
    before, rows = found
    q, k_cache, v_cache, *table = drawn.tensors
    new = [q.new_zeros((*q.shape[:-2], *pool.shape[2:])) for pool in (k_cache, v_cache)]
    pools = [k_cache.clone(), v_cache.clone()]
    for _, page, row, token in rows:
        for made, pool in zip(new, pools, strict=True):
            made[token] = pool[page, row]
            pool[page, row] = torch.nan
    q, *new = (t.clone().requires_grad_() for t in (q, *new))
    arguments, captured = leaves_of(drawn.arguments)
    arguments["seqused_k"] = before
    out, lse = flashtile.attention_cached(
        q, *pools, *table, **arguments, append=(new[0], new[1]), return_lse=True, options=flashtile.Options(backend=backend)
    )
    arriving = torch.randn_like(out), torch.randn_like(lse).masked_fill(lse == -torch.inf, 0.0)
    if "cu_seqlens_q" in drawn.arguments:  # queries of no item
        last = int(drawn.arguments["cu_seqlens_q"][-1])
        arriving[0][last:], arriving[1][:, last:] = 0.0, 0.0
    made = torch.autograd.grad((out, lse), [q, *new, *captured], arriving)
    dq, dk, dv = made[:3]
    picked = [torch.stack([g[token] for *_, token in rows]) if rows else g[:0].flatten(0, -3) for g in (dk, dv)]
    exact = reference(drawn, rows, True, arriving)
    plain = reference(drawn, rows, False, arriving)
    for i, (got, want, theirs) in enumerate(zip((dq, *picked, *made[3:]), exact, plain, strict=True)):
        assert got.isfinite().all(), drawn.about
        if got.numel():
            floor = FLOOR_ULP * torch.finfo(got.dtype).eps * max(want.abs().max().item(), 1.0)
            error, other = ((t.double() - want).abs().max().item() for t in (got, theirs))
            assert error <= max(FACTOR * other, floor), f"{drawn.about}: gradient {i} off by {error}, plain by {other}"
    return True


def test_random_gradients_on_the_cpu() -> None:
    assert sum(check(draw(seed), "cpu") for seed in range(3000, 3060)) >= 20


def test_random_gradients_of_the_portable_kernels(device: torch.device) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    assert sum(check(draw(seed, True, device), "triton") for seed in range(3000, 3016)) >= 3


def test_new_rows_are_written_and_rotated_where_gradients_are_wanted() -> None:
    """What a cache holds afterwards does not depend on who wants gradients; theirs pass the rotation."""
    k_cache, v_cache = torch.randn(6, 4, 2, 16), torch.randn(6, 4, 2, 16)
    table, used = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), torch.tensor([5, 2], dtype=torch.int32)
    angle = torch.rand(8, 8)
    q, k, v = (torch.randn(2, 1, 2, 16, requires_grad=True) for _ in "qkv")

    def run(pools: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        turn = (angle.cos(), angle.sin())
        return flashtile.attention_cached(q, *pools, table, seqused_k=used, append=(k, v), rotary=turn, causal=True)

    some, other = ((k_cache.clone(), v_cache.clone()) for _ in range(2))
    with torch.no_grad():
        want = run(other)
    out = run(some)
    torch.testing.assert_close(out, want)
    assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(some, other, strict=True))
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    at = used[:, None]
    turned = flashtile.ops.rotary(q, k, angle.cos(), angle.sin(), positions=at)
    outs: list[torch.Tensor] = []
    for i, n in enumerate(used.tolist()):
        keys = [
            torch.cat([pool[table[i].long()].flatten(0, 1)[:n], new[i]])[None]
            for pool, new in ((k_cache, turned[1]), (v_cache, v))
        ]
        outs.append(flashtile.attention(turned[0][i : i + 1], *keys, causal=True))
    wanted = torch.autograd.grad(torch.cat(outs).square().sum(), (q, k, v))
    for got, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, want)
