"""Blocks joined with other masks by `&` and `|`, and beside lengths that differ."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import flashtile
from flashtile import Band, Dilated, Document, InvalidProblem, KeyPadding, Options, Prefix, Stored
from flashtile.features.masks.block_table import BlockTable
from flashtile.problem.blocks import BlockSpec
from flashtile.problem.options import Variant
from flashtile.torch.api.blocks import Blocks
from tests.cases import Case
from tests.torch.test_masks import dense


@pytest.mark.parametrize("function", [operator.and_, operator.or_])
@pytest.mark.parametrize("seqlens", [(200, 700), (192, 512), (0, 300)])
def test_blocks_of_unlike_sizes_join(function: Callable[..., Any], seqlens: tuple[int, int]) -> None:
    """To blocks as large as the larger ones, which no part beyond the scores makes whole."""
    n, m = seqlens
    table = torch.rand(-(-n // 16), -(-m // 256)) < 0.7
    table[:8, 0], table[8:, 1] = True, False
    one = Blocks.from_block_mask(table, n, m, block_size=(16, 256))
    other = Blocks.build(Band(left=400, right=150), n, m, block_size=(64, 64), device="cpu")
    joined = function(one, other)
    assert joined.spec == BlockSpec(128, 256)
    q, k = torch.randn(1, n, 1, 16), torch.randn(1, m, 1, 16)
    case = Case("joined", seqlen_q=n, seqlen_k=m, heads_q=1)
    keep = dense(joined, case, torch.device("cpu"))[0, 0]
    wanted = dense(Stored(table.repeat_interleave(16, 0).repeat_interleave(256, 1)[None, None, :n, :m]), case, q.device)[0, 0]
    assert torch.equal(keep, function(wanted, dense(Band(left=400, right=150), case, q.device)[0, 0]))
    for i, line in enumerate(joined.state[0, 0].tolist()):
        for j, state in enumerate(line):
            block = keep[i * 128 : (i + 1) * 128, j * 256 : (j + 1) * 256]
            assert state >= int(block.any())
            assert state < 2 or (block.all() and block.numel() == 128 * 256)
    assert seqlens != (192, 512) or joined.state[0, 0, 0, 0] == 2 or joined.state[0, 0, 1, 1] == 0
    assert flashtile.attention(q, k, k, mask=joined).shape == q.shape


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("function", [operator.and_, operator.or_])
def test_joining_with_blocks_gives_blocks(function: Callable[..., Any], swap: bool) -> None:
    """Also where the other mask differs from item to item, or head to head, and the blocks do not."""
    ids, keep = (torch.arange(200) // 70).to(torch.int32), torch.rand(2, 200) < 0.6
    listed = Blocks.build(Document(ids), 200, 200)
    q, k, v = (torch.randn(2, 200, 2, 8) for _ in range(3))
    prefix, stored = Prefix(torch.tensor([9, 140], dtype=torch.int32)), Stored(torch.rand(1, 2, 200, 200) < 0.5)
    each = Dilated(3) | KeyPadding(keep) & Band(right=0)
    # by how many items and heads each differs
    others = (Dilated(3), 1, 1), (Band(right=0), 1, 1), (KeyPadding(keep), 2, 1), (prefix, 2, 1), (stored, 1, 2), (each, 2, 1)
    for other, items, heads in others:
        joined = function(other, listed) if swap else function(listed, other)
        assert isinstance(joined, Blocks)
        some = [x[:items, :, :heads] for x in (q, k, v)]
        mine = flashtile.attention(*some, mask=joined)
        torch.testing.assert_close(mine, flashtile.attention(*some, mask=function(Document(ids), other)))
        joined = function(other, joined)
        assert isinstance(joined, Blocks)
    three = Blocks.build(Document(ids), 200, 200, batch=3)
    with pytest.raises(InvalidProblem, match="its first axis must be the batch, 3"):
        function(KeyPadding(keep), three)
    table = BlockTable(torch.rand(2, 2, 2, 2) < 0.5, 128, 128)
    assert function(listed, table).state.shape == (2, 2, 2, 2)
    with pytest.raises(InvalidProblem, match=r"block table has shape \(2, 2, 2, 2\); it must be .*, for \(3, 1\) or 1"):
        function(three, table)
    with pytest.raises(InvalidProblem, match=r"\(batch, heads\) meet blocks for \(\d, 1\); they must be alike, or 1"):
        function(three, Blocks.build(KeyPadding(keep), 200, 200, batch=2))
    with pytest.raises(InvalidProblem, match="its first axis must be the batch, 1"):
        function(listed, KeyPadding(keep) & KeyPadding(keep[:1].expand(3, -1)))


def test_items_of_unequal_lengths_ask_the_mask_itself(backend: str, place: torch.device, variant: Variant) -> None:
    """Lists are made for one length: of a call without them nothing says otherwise than the mask does."""
    ids = (torch.arange(40, device=place) // 9).to(torch.int32)
    keep = torch.rand(1, 1, 40, 40, device=place) < 0.7
    flex = create_block_mask(lambda b, h, q, k: keep[0, 0, q, k], None, None, 40, 40, device=str(place))
    used, cu = (torch.tensor(n, dtype=torch.int32, device=place) for n in ([40, 23], [0, 0, 17, 38]))
    q, k, v = (torch.randn(2, 40, 2, 16, device=place, requires_grad=True) for _ in range(3))
    options = Options(backend=backend, backward=variant)
    for blocks, mask in (
        (Blocks.build(Document(ids), 40, 40), Document(ids)),
        (Blocks.build(Document(ids), 40, 40) & Band(left=12), Document(ids) & Band(left=12)),
        (Blocks.build(Band(right=3), 40, 40, device=place), Band(right=3)),
        (Blocks.from_flex(flex), Stored(keep)),
    ):
        made = []
        for some in (blocks, mask):
            padded = flashtile.attention(q, k, v, causal=True, mask=some, seqused_k=used, options=options)
            items = flashtile.attention_varlen(q[0], k[0], v[0], cu, mask=some, options=options)
            grads = torch.autograd.grad(padded.square().sum() + items.square().sum(), (q, k, v))
            made.append((padded, items, *grads))
        for mine, other in zip(*made, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    with pytest.raises(InvalidProblem, match="blocks are for 40 x 40 scores; they must be for 2 x 2"):
        flashtile.attention_varlen(q[0, :2], k[0, :2], v[0, :2], cu[:2], mask=blocks, options=options)


def test_a_compiled_call_asks_it_too() -> None:
    q, used = torch.randn(2, 40, 2, 16), torch.tensor([40, 23], dtype=torch.int32)
    blocks = Blocks.build(Document((torch.arange(40) // 9).to(torch.int32)), 40, 40)

    def attend(q: torch.Tensor, used: torch.Tensor) -> Any:
        return flashtile.attention(q, q, q, mask=blocks, seqused_k=used)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, used), attend(q, used))
