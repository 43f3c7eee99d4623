"""ring-flash-attn's names over ranks, beside one process: what its own README says that they compute."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flashtile
from flashtile import InvalidProblem, NotSupported
from flashtile.compat import ring_flash_attn as theirs
from flashtile.distributed import Context, shard
from tests.distributed.cases import SEQLEN, data

LENGTHS = (8, 16, 8)  # each a multiple of twice 4 ranks
STARTS = torch.tensor([0, 8, 24, 32], dtype=torch.int32)


def of_each_document(tensor: torch.Tensor, context: Context, dim: int) -> torch.Tensor:
    """What their varlen functions take: of each document this rank's part."""
    return torch.cat([shard(part, context, dim) for part in tensor.split(LENGTHS, dim)], dim)


def judged(call: Callable[..., Any], expected: Any, whole: list[torch.Tensor], cut: Callable[..., torch.Tensor]) -> None:
    """(out, lse) and gradients of `call`, of parts, are the parts of those of the whole. cut(tensor, lse or not)."""
    weights = [torch.linspace(-1, 1, t.numel()).view_as(t) for t in expected]
    local = [cut(t.detach(), False).requires_grad_() for t in whole]
    out, lse, probabilities = call(*local, causal=True, return_attn_probs=True)
    assert probabilities is None
    found = torch.autograd.grad((out, lse), local, [cut(w, i == 1) for i, w in enumerate(weights)])
    truth = torch.autograd.grad(expected, whole, weights, retain_graph=True)
    torch.testing.assert_close(out, cut(expected[0], False), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, cut(expected[1], True), rtol=1e-5, atol=1e-5)
    for mine, of_all in zip(found, truth, strict=True):
        torch.testing.assert_close(mine, cut(of_all, False), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(call(*local, causal=True), out)


def names_of_ring_flash_attn() -> None:
    d, rank, ranks = data(torch.float32, 4), dist.get_rank(), dist.get_world_size()
    whole = [t.clone().requires_grad_() for t in (d.q, d.k, d.v)]
    expected = flashtile.attention(*whole, causal=True, return_lse=True)
    for name, layout in (("ring_", "contiguous"), ("zigzag_ring_", "zigzag"), ("stripe_", "striped")):
        context = Context(layout=layout)  # pyright: ignore[reportArgumentType]
        judged(getattr(theirs, f"{name}flash_attn_func"), expected, whole, lambda t, lse, c=context: shard(t, c, 1 + lse))
    packed = [t[0].detach().requires_grad_() for t in whole]
    expected = flashtile.attention_varlen(*packed, STARTS, causal=True, return_lse=True)
    own = STARTS // ranks
    for name, layout in (("ring_", "contiguous"), ("zigzag_ring_", "zigzag")):
        context = Context(layout=layout)  # pyright: ignore[reportArgumentType]
        call = getattr(theirs, f"{name}flash_attn_varlen_func")
        judged(lambda q, k, v, f=call, **how: f(q, k, v, own, 16 // ranks, **how), expected, packed,
               lambda t, lse, c=context: of_each_document(t, c, int(lse)))  # fmt: skip
    for causal, starts in ((True, STARTS), (True, torch.tensor([0, 3, 3, 20, 32], dtype=torch.int32)), (False, STARTS)):
        expected = flashtile.attention_varlen(*packed, starts, causal=causal, return_lse=True)
        *lengths, keys = theirs.llama3_flash_attn_prepare_cu_seqlens(starts, causal, rank, ranks)
        assert lengths[2] == max(b - a for a, b in pairwise(lengths[0].tolist()))
        call = lambda q, k, v, causal=True, n=lengths, s=keys, c=causal, **how: (  # noqa: E731
            theirs.llama3_flash_attn_varlen_func(q, k, v, *n, 1, s, causal=c, **how)
        )
        judged(call, expected, packed, lambda t, lse: shard(t, Context(), int(lse)))
    q = torch.randn(1, SEQLEN // ranks, 8, 16)
    together = theirs.zigzag_ring_flash_attn_qkvpacked_func(torch.stack([q, q, q], 2), causal=True)
    apart = theirs.zigzag_ring_flash_attn_kvpacked_func(q, torch.stack([q, q], 2), 0.0, None, True)
    torch.testing.assert_close(together, apart)
    with pytest.raises(InvalidProblem, match=r"cu_seqlens is \[0, 3\]; it must start with 0, never fall and end with"):
        theirs.ring_flash_attn_varlen_func(q[0], q[0], q[0], torch.tensor([0, 3]), 4)
    odd = rank == 1  # what one rank is told wrong is refused on all
    laws: list[tuple[Callable[[], Any], str]] = [
        (lambda: theirs.stripe_flash_attn_func(q, q, q, causal=not odd), "causal is False; of stripe_flash_attn"),
        (lambda: theirs.ring_flash_attn_func(q, q, q, window_size=3 if odd else (3, 0)), "window_size is 3"),
        (lambda: theirs.zigzag_ring_flash_attn_varlen_func(q[0], q[0], q[0], "1" if odd else own, 4, causal=True),
         "cu_seqlens is a str"),
        (lambda: theirs.llama3_flash_attn_varlen_func(q[0], q[0], q[0], own, own, 32, 32, 1, 3 if odd else slice(own[-1])),  # pyright: ignore[reportArgumentType]
         "local_k_slice is 3"),
    ]  # fmt: skip
    for call, words in laws:
        with pytest.raises(InvalidProblem, match=words if odd else f"rank 1 refuses the call. InvalidProblem: {words}"):
            call()
    with pytest.raises(InvalidProblem, match="causal is False; of stripe_flash_attn it must be True"):
        theirs.stripe_flash_attn_func(q, q, q)
    whole, context = data(torch.float32, 8), Context()
    torch.manual_seed(7)
    dropped = theirs.ring_flash_attn_func(*(shard(t, context) for t in (whole.q, whole.k, whole.v)), 0.5)  # pyright: ignore[reportCallIssue]
    torch.manual_seed(7)
    of_one = flashtile.attention(whole.q, whole.k, whole.v, dropout=flashtile.Dropout(0.5))
    torch.testing.assert_close(dropped, shard(of_one, context), rtol=1e-5, atol=1e-5)
    with pytest.raises(NotSupported, match="dropout of packed documents"):
        theirs.ring_flash_attn_varlen_func(q[0], q[0], q[0], own, 4, 0.1)
    with pytest.raises(NotSupported, match="window_size beside documents"):
        theirs.ring_flash_attn_varlen_func(q[0], q[0], q[0], own, 4, window_size=(3, 0))
