"""flash-attention 1's functions and modules against its documented formula: positions are counted from the first key."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from flashtile import InvalidProblem, NotSupported
from flashtile.compat import blocksparse
from flashtile.compat import flash_attn_1 as fa
from tests.compat.formula import attend, visible
from tests.compat.test_flash_attn import close, draw

ENDS_Q, ENDS_K = (0, 9, 9, 12), (0, 14, 16, 18)  # the last item has more queries than keys


def item_by_item(parts: Any, ends: Any, causal: bool, seen: torch.Tensor | None = None, **rules: Any) -> tuple[Any, Any]:
    """(out (total, ...), lse (batch, heads, longest)) of the formula."""
    outs, longest = [], max(b - a for a, b in pairwise(ends[0]))
    lse = torch.full((len(ends[0]) - 1, parts[0].shape[1], longest), math.inf, dtype=torch.float64, device=parts[0].device)
    for i, ((a, b), (c, d)) in enumerate(zip(pairwise(ends[0]), pairwise(ends[1]), strict=True)):
        mask = visible(b - a, d - c, -1, 0 if causal else -1, top_left=True)
        mask = mask if seen is None else mask & seen[: b - a, : d - c]
        out, sums, _ = attend(parts[0][None, a:b], parts[1][None, c:d], parts[2][None, c:d], mask, **rules)
        outs.append(out[0])
        lse[i, :, : b - a] = sums[0].detach()
    return torch.cat(outs), lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", ["apart", "kv", "qkv"])
def test_unpadded(through: str, place: torch.device, causal: bool, form: str) -> None:
    ends = (ENDS_Q, ENDS_Q if form == "qkv" else ENDS_K)
    cu = [torch.tensor(e, dtype=torch.int32, device=place) for e in ends]
    how: Any = dict(softmax_scale=0.3, causal=causal, return_attn_probs=True)
    if form == "qkv":
        packs = draw((12, 3, 2, 16), place=place)
        parts, made = packs[0].unbind(1), fa.flash_attn_unpadded_qkvpacked_func(*packs, cu[0], 9, 0.0, **how)
    elif form == "kv":
        packs = draw((12, 2, 16), (18, 2, 2, 16), place=place)
        parts = (packs[0], *packs[1].unbind(1))
        made = fa.flash_attn_unpadded_kvpacked_func(*packs, *cu, 9, 14, 0.0, **how)
    else:
        packs = draw((12, 2, 16), (18, 2, 16), (18, 2, 16), place=place)
        parts, made = tuple(packs), fa.flash_attn_unpadded_func(*packs, *cu, 9, 14, 0.0, **how)
    out, lse, _ = made
    true, true_lse = item_by_item(parts, ends, causal, scale=0.3)
    close(out, true)
    close(lse, true_lse)
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(true, packs, dout.double())
    for mine, theirs in zip(torch.autograd.grad(out, packs, dout), wanted, strict=True):
        close(mine, theirs)


def test_items_without_tokens(place: torch.device) -> None:
    none, cu = torch.empty(0, 2, 16, device=place), torch.zeros(3, dtype=torch.int32, device=place)
    out, lse, _ = fa.flash_attn_unpadded_func(none, none, none, cu, cu, 4, 4, 0.0, return_attn_probs=True)
    assert out.shape == none.shape
    assert lse.shape == (2, 2, 4)
    assert (lse == torch.inf).all()


def test_dropout_of_a_top_left_order(through: str, place: torch.device) -> None:
    cu = [torch.tensor(e, dtype=torch.int32, device=place) for e in (ENDS_Q, ENDS_K)]
    packs = draw((12, 2, 16), (18, 2, 16), (18, 2, 16), place=place)
    out, _, signs = fa.flash_attn_unpadded_func(*packs, *cu, 9, 14, 0.4, causal=True, return_attn_probs=True)
    dropped = signs[0, :, :9, :14] < 0
    true, _, _ = attend(*(t[None, :n] for t, n in zip(packs, (9, 14, 14), strict=True)),
                        visible(9, 14, -1, 0, top_left=True), dropped=dropped, p=0.4)  # fmt: skip
    close(out[:9], true[0])
    assert dropped.any()


@pytest.mark.parametrize("probabilities", [False, True])
def test_split(through: str, place: torch.device, probabilities: bool) -> None:
    """The two parts give what the whole gives, in the forward and in the one gradient."""
    ends = torch.tensor([0, 3, 3, 7, 16, 21], dtype=torch.int32, device=place)
    (qkv,) = draw((23, 3, 2, 16), place=place)  # two tokens belong to no item
    made = fa.flash_attn_unpadded_qkvpacked_split_func(
        qkv, ends, 4, 9, 3, 0.0, causal=True, return_attn_probs=probabilities
    )  # fmt: skip
    whole, lse, _ = fa.flash_attn_unpadded_qkvpacked_func(qkv, ends, 9, 0.0, causal=True, return_attn_probs=True)
    out = made[0] if probabilities else made
    close(out, whole)
    if probabilities:
        assert len(made) == 4
        close(made[1], lse)
    dout = torch.randn_like(out)
    close(*(torch.autograd.grad(t, qkv, dout)[0] for t in (out, whole)))
    dropped = fa.flash_attn_unpadded_qkvpacked_split_func(qkv, ends, 4, 9, 3, 0.5)
    assert dropped.isfinite().all()
    assert not torch.equal(dropped, whole)
    with pytest.raises(NotSupported, match="S_dmask is asked for, and dropout"):
        fa.flash_attn_unpadded_qkvpacked_split_func(qkv, ends, 4, 9, 3, 0.5, return_attn_probs=True)


def test_modules(through: str, place: torch.device) -> None:
    qkv = torch.randn(2, 7, 3, 2, 16).to(place)
    keep = torch.arange(7, device=place) < torch.tensor([[5], [7]], device=place)
    module = fa.FlashAttention(softmax_scale=0.2, attention_dropout=0.5).eval()
    out, weights = module(qkv, causal=True)
    assert weights is None
    close(out, attend(*qkv.unbind(2), visible(7, 7, -1, 0), scale=0.2)[0])
    out, _ = module(qkv, keep)
    close(out[0, :5], attend(*(t[:1, :5] for t in qkv.unbind(2)), scale=0.2)[0][0])
    assert not out[0, 5:].any()
    cu = torch.tensor([0, 7, 14], dtype=torch.int32, device=place)
    close(module(qkv.flatten(0, 1), cu_seqlens=cu, max_s=7, causal=True)[0].unflatten(0, (2, 7)), module(qkv, causal=True)[0])
    assert not torch.equal(module.train()(qkv)[0], module.eval()(qkv)[0])
    mha = fa.FlashMHA(32, 2, causal=True).to(place)
    x = torch.randn(2, 7, 32).to(place)
    parts = mha.Wqkv(x).view(2, 7, 3, 2, 16).unbind(2)
    true = attend(*parts, visible(7, 7, -1, 0))[0].flatten(2).float()
    close(mha(x)[0], mha.out_proj(true))
    assert sorted(dict(mha.named_parameters())) == ["Wqkv.bias", "Wqkv.weight", "out_proj.bias", "out_proj.weight"]
    with pytest.raises(NotSupported, match="no weights are stored"):
        mha(x, need_weights=True)
    with pytest.raises(NotSupported, match="batch_first is False"):
        fa.FlashMHA(32, 2, batch_first=False)
    with pytest.raises(InvalidProblem, match="embed_dim is 32 and num_heads 3"):
        fa.FlashMHA(32, 3)
    assert len(fa.unpad_input(x, keep)) == 4


class Layout:
    """A sparsity configuration."""

    def __init__(self, table: torch.Tensor):
        self.table = table

    def make_layout(self, seqlen: int) -> torch.Tensor:
        assert seqlen == 512
        return self.table


def test_blocksparse(through: str, place: torch.device) -> None:
    table = torch.rand(32, 2) < 0.5
    table[0] = torch.tensor([False, False])  # rows that see nothing
    table[1] = True
    lists = blocksparse.convert_blockmask(table, causal=False)
    assert lists.shape == (2, 32)
    for column in range(2):
        rows = table[:, column].nonzero().flatten().tolist()
        assert [int(n) // 4 for n in lists[column] if n >= 0] == rows
        assert lists[column, len(rows) :].eq(-1).all()
    flags = {(int(n) // 4, c): int(n) % 4 for c in range(2) for n in lists[c] if n >= 0}
    assert (flags[1, 0], flags[1, 1]) == (1, 2)  # the first and the last of the row
    assert all(flag == 3 for (row, _), flag in flags.items() if table[row].sum() == 1)

    seen = table.repeat_interleave(16, 0).repeat_interleave(256, 1)
    ends = (0, 270, 300)
    cu = torch.tensor(ends, dtype=torch.int32, device=place)
    (qkv,) = draw((300, 3, 1, 16), place=place)
    for causal in (False, True):
        out, signs, lse = blocksparse.flash_blocksparse_attn_func(
            qkv, cu, table.to(place), 0.0, 270, causal=causal, return_attn_probs=True
        )
        true, true_lse = item_by_item(qkv.unbind(1), (ends, ends), causal, seen)
        close(out, true)
        close(lse, true_lse)
        assert signs.numel() == 0
    dout = torch.randn_like(out)
    close(torch.autograd.grad(out, qkv, dout)[0], torch.autograd.grad(true, qkv, dout.double())[0])
    again = blocksparse.flash_blocksparse_attn_func(qkv, cu, lists.to(place), 0.0, 270, causal=True, convert_mask=False)
    assert torch.equal(again, out)

    module = blocksparse.FlashBlocksparseAttention(Layout(table), max_seq_length=300).to(place).eval()
    assert set(module.state_dict()) == {"layout", "blockmask_converted"}
    close(module(qkv, cu_seqlens=cu, max_s=270, causal=True)[0], out)
    close(module(qkv, cu_seqlens=cu, max_s=270, causal=True, convert_mask=False)[0], out)
    dense = torch.randn(1, 270, 3, 1, 16).to(place)
    true = attend(*dense.unbind(2), seen[:270, :270])[0]
    close(module(dense)[0], true)
    keep = torch.ones(1, 270, dtype=torch.bool, device=place)
    close(module(dense, key_padding_mask=keep)[0], true)
    mha = blocksparse.FlashBlocksparseMHA(16, 1, Layout(table), max_seq_length=300).to(place)
    x = torch.randn(1, 270, 16).to(place)
    parts = mha.Wqkv(x).view(1, 270, 3, 1, 16).unbind(2)
    close(mha(x, x, x)[0], mha.out_proj(attend(*parts, seen[:270, :270])[0].flatten(2).float()))
    with pytest.raises(NotSupported, match="x_ignored_ is another tensor"):
        mha(x, x.clone(), None)
    with pytest.raises(NotSupported, match="attn_mask is given"):
        module(dense, attn_mask=keep)
    with pytest.raises(NotSupported, match="causal is True"):
        blocksparse.convert_blockmask(table, causal=True)
    with pytest.raises(InvalidProblem, match=r"blockmask has shape \(2, 2\); it must be at least \(17, 2\)"):
        blocksparse.flash_blocksparse_attn_func(qkv, cu, table[:2].to(place), 0.0, 270)
    with pytest.raises(InvalidProblem, match="sparsity_config is a dict"):
        blocksparse.FlashBlocksparseAttention({"_target_": "x"})
