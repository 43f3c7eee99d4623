"""xformers' function and biases against masks that are written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashtile import InvalidProblem, NotSupported
from flashtile.compat import xformers_bias as xb
from flashtile.compat.xformers import (
    memory_efficient_attention,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
)
from tests.compat.formula import attend, visible
from tests.compat.test_flash_attn import agree, draw

LENGTHS = ((3, 5), (4, 4), (2, 6), (5, 3))  # queries and keys of items
DENSE: dict[str, tuple[Any, tuple[int, int, bool]]] = {
    "none": (None, (-1, -1, False)),
    "lower": (xb.LowerTriangularMask(), (-1, 0, True)),
    "lower-right": (xb.LowerTriangularFromBottomRightMask(), (-1, 0, False)),
    "lower-local": (xb.LowerTriangularFromBottomRightMask().make_local_attention(3), (2, 0, False)),
    "local": (xb.LocalAttentionFromBottomRightMask(2, 1), (2, 1, False)),
}


@pytest.mark.parametrize("name", DENSE)
def test_dense(through: str, place: torch.device, name: str) -> None:
    bias, (left, right, top_left) = DENSE[name]
    for lengths in ((6, 9), (9, 6)):
        packs = draw((2, lengths[0], 2, 16), *[(2, lengths[1], 2, 16)] * 2, place=place)
        out = memory_efficient_attention(*packs, attn_bias=bias, scale=0.3)
        agree(packs, out, attend(*packs, visible(*lengths, left, right, top_left), scale=0.3)[0])


def test_axes_and_tensor_biases(through: str, place: torch.device) -> None:
    packs = draw((4, 6, 16), (4, 9, 16), (4, 9, 8), (4, 6, 9), place=place)
    true = attend(*(t[:, :, None] for t in packs[:3]), bias=packs[3][:, None])[0][:, :, 0]
    agree(packs, memory_efficient_attention(*packs), true)
    q, k, v, bias = draw((2, 6, 2, 3, 16), (2, 9, 2, 1, 16), (2, 9, 2, 1, 16), (2, 2, 3, 6, 9), place=place)
    wide = [t.expand(-1, -1, -1, 3, -1) for t in (k, v)]  # one head of keys for each group
    true = attend(*(t.flatten(2, 3) for t in (q, *wide)), bias=bias.flatten(1, 2))[0].unflatten(2, (2, 3))
    agree([q, k, v, bias], memory_efficient_attention(q, *wide, bias), true)
    packs = draw((1, 6, 2, 16), (1, 9, 2, 16), (1, 9, 2, 16), (1, 1, 6, 9), place=place)
    both = xb.LowerTriangularMask().add_bias(packs[3])
    true = attend(*packs[:3], visible(6, 9, -1, 0, True), bias=packs[3])[0]
    agree(packs, memory_efficient_attention(*packs[:3], attn_bias=both), true)
    plain = memory_efficient_attention(*packs[:3])
    assert not torch.equal(memory_efficient_attention(*packs[:3], p=0.5), plain)


CAUSAL = xb.BlockDiagonalMask.from_seqlens([3, 4, 2, 5], [5, 4, 6, 3])
SAME = xb.BlockDiagonalMask.from_seqlens([3, 4, 2, 5])
ITEMS: dict[str, tuple[Any, tuple[int, int, bool]]] = {
    "diagonal": (CAUSAL, (-1, -1, False)),
    "causal": (CAUSAL.make_causal(), (-1, 0, True)),
    "causal-alike": (SAME.make_causal(), (-1, 0, True)),
    "causal-right": (CAUSAL.make_causal_from_bottomright(), (-1, 0, False)),
    "local": (SAME.make_causal().make_local_attention(2), (1, 0, False)),
    "local-of-items": (CAUSAL.make_causal().make_local_attention(3), (2, 0, True)),
    "local-of-right": (CAUSAL.make_causal_from_bottomright().make_local_attention(3), (2, 0, True)),  # as there
    "local-right": (CAUSAL.make_local_attention_from_bottomright(3), (2, 0, False)),
    "padded": (xb.BlockDiagonalPaddedKeysMask.from_seqlens([3, 4, 2, 5], 7, [5, 4, 6, 3]), (-1, -1, False)),
    "padded-causal": (
        xb.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([3, 4, 2, 5], 7, [5, 4, 6, 3]), (-1, 0, False),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ITEMS)
def test_items(through: str, place: torch.device, name: str) -> None:
    bias, (left, right, top_left) = ITEMS[name]
    alike, step = name in ("causal-alike", "local"), 7 if name.startswith("padded") else None
    lengths = [(n, n) for n, _ in LENGTHS] if alike else LENGTHS
    total_k = 28 if step else sum(n for _, n in lengths)
    packs = draw((1, 14, 2, 16), *[(1, total_k, 2, 16)] * 2, place=place)
    out = memory_efficient_attention(*packs, attn_bias=bias)
    true, first_q, first_k = [], 0, 0
    for n, m in lengths:
        q, k, v = packs[0][:, first_q : first_q + n], *(t[:, first_k : first_k + m] for t in packs[1:])
        true.append(attend(q, k, v, visible(n, m, left, right, top_left))[0])
        first_q, first_k = first_q + n, first_k + (step or m)
    agree(packs, out, torch.cat(true, 1))


def test_tensor_lists(place: torch.device) -> None:
    tensors = [torch.randn(2, 3, 1, 16).to(place), torch.randn(1, 5, 1, 16).to(place)]
    mask, whole = xb.BlockDiagonalMask.from_tensor_list(tensors)
    assert whole.shape == (1, 11, 1, 16)
    assert mask.q_seqinfo.seqstart_py == [0, 3, 6, 11]
    assert mask.q_seqinfo.max_seqlen == 5
    for made, true in zip(mask.split(whole), tensors, strict=True):
        assert torch.equal(made, true)
    assert [t.shape[1] for t in SAME.split(torch.randn(1, 14, 2))] == [3, 4, 2, 5]
    assert mask.to(torch.device(mask.q_seqinfo.seqstart.device.type)) is mask
    assert xb.LowerTriangularMask(device="cuda").to("cpu").band(3, 3) == xb.LowerTriangularMask().band(3, 3)


def test_tensor_lists_of_queries_and_keys(place: torch.device) -> None:
    queries = [torch.randn(2, 3, 2, 16).to(place), torch.randn(1, 5, 2, 16).to(place)]
    keys, values = ([torch.randn(2, 6, 2, 16).to(place), torch.randn(1, 4, 2, 16).to(place)] for _ in range(2))
    mask, q, k, v = xb.BlockDiagonalMask.from_tensor_lists_qkv(queries, keys, values)
    assert v is not None
    assert mask.k_seqinfo.seqstart_py == [0, 6, 12, 16]
    for split, joined, tensors in ((mask.split_queries, q, queries), (mask.split_kv, k, keys), (mask.split_kv, v, values)):
        for made, true in zip(split(joined), tensors, strict=True):
            assert torch.equal(made, true)
    made = mask.split(memory_efficient_attention(q, k, v, attn_bias=mask))
    for out, *one in zip(made, queries, keys, values, strict=True):
        torch.testing.assert_close(out, attend(*one)[0].to(out.dtype))
    assert xb.BlockDiagonalMask.from_tensor_lists_qkv(queries, keys)[3] is None
    assert xb.BlockDiagonalMask.from_seqlens([3, 4], device="cuda").q_seqinfo.seqstart_py == [0, 3, 7]
    assert xb.BlockDiagonalPaddedKeysMask.from_seqlens([3], 4, [2], device="cuda").k_seqinfo.seqstart_py == [0, 4]


def test_masks_of_padded_keys_have_no_other_order() -> None:
    """A causal one of the same places would see the padding; there it has a class of its own, and these names neither."""
    mask = xb.BlockDiagonalPaddedKeysMask.from_seqlens([3, 4], 7, [5, 4])
    for name in ("make_causal", "make_causal_from_bottomright", "from_tensor_list", "split"):
        assert not hasattr(mask, name)


def test_refusals() -> None:
    q, k = torch.randn(1, 6, 2, 16), torch.randn(1, 9, 2, 16)
    with pytest.raises(NotSupported, match="op is given"):
        memory_efficient_attention(q, k, k, op=object())
    with pytest.raises(NotSupported, match=r"output_dtype is torch.float16; out has query's dtype"):
        memory_efficient_attention(q, k, k, output_dtype=torch.float16)
    with pytest.raises(InvalidProblem, match="from three to five"):
        memory_efficient_attention(q[0, 0], k[0, 0], k[0, 0])
    with pytest.raises(InvalidProblem, match=r"attn_bias is a builtins.str; it must be a tensor"):
        memory_efficient_attention(q, k, k, attn_bias="causal")
    with pytest.raises(InvalidProblem, match="query has 6 tokens and the mask's items 14"):
        memory_efficient_attention(q, k, k, attn_bias=CAUSAL)
    with pytest.raises(InvalidProblem, match="query has batch 2 and key 2"):
        memory_efficient_attention(*(t.expand(2, -1, -1, -1) for t in (q, k, k)), attn_bias=CAUSAL)
    with pytest.raises(NotSupported, match="a window counted from the first key"):
        xb.LowerTriangularMask().make_local_attention(3)
    for window in ((-1, 2), (2, -1), (True, 2), (None, 2)):
        with pytest.raises(InvalidProblem, match="it must be an int, at least 0"):
            xb.LocalAttentionFromBottomRightMask(*window)  # pyright: ignore[reportArgumentType]
    for wrong in (torch.randn(2, 14, 2), torch.randn(1, 13, 2)):
        with pytest.raises(InvalidProblem, match=r"it must be \(1, 14, ...\)"):
            SAME.split(wrong)
    with pytest.raises(InvalidProblem, match=r"tensors_k have batches \[2\] and tensors_q \[1\]"):
        xb.BlockDiagonalMask.from_tensor_lists_qkv([q], [k.expand(2, -1, -1, -1)])
    with pytest.raises(InvalidProblem, match=r"seqlens \[\(1, 6\)\] and tensors_k \[\(1, 9\)\]"):
        xb.BlockDiagonalMask.from_tensor_lists_qkv([q], [k], [q])
    for size in (0, True, 2.0):
        with pytest.raises(InvalidProblem, match="it must be a positive int"):
            xb.LowerTriangularFromBottomRightLocalAttentionMask(size)  # pyright: ignore[reportArgumentType]
    for made in (xb.BlockDiagonalMask.from_seqlens, lambda q, k: xb.BlockDiagonalPaddedKeysMask.from_seqlens(q, 8, k)):
        with pytest.raises(InvalidProblem, match="kv_seqlen has 1 items and q_seqlen 2"):
            made([3, 4], [5])
    with pytest.raises(InvalidProblem, match="kv_seqlen holds 9 and kv_padding is 8"):
        xb.BlockDiagonalPaddedKeysMask.from_seqlens([3], 8, [9])


@pytest.mark.parametrize("axes", [3, 4, 5])
def test_out_and_lse_without_gradients(through: str, place: torch.device, axes: int) -> None:
    """The names that give out and lse are xformers' forward alone."""
    heads = {3: (), 4: (4,), 5: (2, 2)}[axes]
    q, k, v = (torch.randn(2, n, *heads, 16).to(place).requires_grad_() for n in (6, 9, 9))
    bias = xb.LowerTriangularMask()
    out, lse = memory_efficient_attention_forward_requires_grad(q, k, v, bias, scale=0.3)
    torch.testing.assert_close(out, memory_efficient_attention_forward(q, k, v, bias, scale=0.3), atol=1e-6, rtol=1e-5)
    assert not out.requires_grad
    scores = 0.3 * torch.einsum("bihd,bjhd->bhij", *(t.detach().double().reshape(2, t.shape[1], -1, 16) for t in (q, k)))
    scores += bias.materialize((6, 9), dtype=torch.float32).to(place)
    assert lse.shape == (2, *heads, 6) if heads else (2, 1, 6)
    torch.testing.assert_close(lse.flatten(1, -2).double(), scores.logsumexp(-1), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(out, memory_efficient_attention(q, k, v, bias, scale=0.3), atol=1e-6, rtol=1e-5)


def test_lse_of_items(place: torch.device) -> None:
    q, k = (torch.randn(1, 9, 2, 16).to(place) for _ in range(2))
    mask = xb.BlockDiagonalMask.from_seqlens([4, 5])
    out, lse = memory_efficient_attention_forward_requires_grad(q, k, k, mask)
    assert out.shape == q.shape
    assert lse.shape == (1, 2, 9)
    for first, last in ((0, 4), (4, 9)):
        scores = torch.einsum("bihd,bjhd->bhij", q[:, first:last], k[:, first:last]) / 4
        torch.testing.assert_close(lse[:, :, first:last], scores.logsumexp(-1), atol=1e-5, rtol=1e-5)
