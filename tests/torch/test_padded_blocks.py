"""`Blocks.padded`, and `nn.Attention` with blocks: padding that each call has anew makes no list anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashtile
from flashtile import Blocks, Document, InvalidProblem, KeyPadding, Options
from flashtile.features.masks.block_table import BlockTable
from flashtile.nn import Attention
from flashtile.problem.options import Variant
from flashtile.torch.api import blocks as module
from flashtile.torch.api.blocks import Blocks as BlocksOfTorch
from tests.backends import OF_KERNELS

CPU = Options(backend="cpu")
IDS = (torch.arange(96) // 40).to(torch.int32)
TABLE = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 1]], dtype=torch.bool)


def kept(place: torch.device | str = "cpu", seed: int = 0) -> torch.Tensor:
    """Of two items: holes, and at the end of one a whole block of padding."""
    keep = torch.rand((2, 96), generator=torch.Generator().manual_seed(seed)) < 0.7
    keep[seed % 2, 64:] = False
    return keep.to(place)


def listed(place: torch.device | str = "cpu") -> BlocksOfTorch:
    return BlocksOfTorch.build(Document(IDS.to(place)), 96, 96, block_size=(32, 32))


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on no block is found and no list made."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("blocks are made anew")

    for name in ("state_of", "_lists_of"):
        monkeypatch.setattr(module, name, refuse)


@pytest.mark.parametrize("kind", ["document", "table"])
@pytest.mark.parametrize(("backend", "variant"), [("cpu", "split"), *OF_KERNELS])
def test_padded_is_the_mask_beside_key_padding(backend: str, place: torch.device, variant: Variant, kind: str) -> None:
    """A table's blocks are whole or hidden, and a kernel that walks its lists asks for nothing more."""
    mask = Document(IDS.to(place)) if kind == "document" else BlockTable(TABLE[None, None].to(place), 32, 32)
    padded, keep = BlocksOfTorch.build(mask, 96, 96, block_size=(32, 32)).padded(kept(place)), kept(place)
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn((2, 96, 2, 16), generator=generator).to(place).requires_grad_() for _ in range(3)]
    weight, found = torch.randn((2, 96, 2, 16), generator=generator).to(place), []
    for some in (padded, mask & KeyPadding(keep)):
        options = Options(backend=backend, backward=variant)
        out, lse = flashtile.attention(*inputs, mask=some, return_lse=True, options=options)
        loss = (out * weight).sum() + lse.masked_fill(lse == -torch.inf, 0.0).sum()
        found.append((out, lse, *torch.autograd.grad(loss, inputs)))
    for mine, plain in zip(*found, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-5)


def test_padded_makes_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = listed()
    before = {name: tensor.clone() for name, tensor in mask.lists.items()}
    forbid(monkeypatch)
    padded = mask.padded(kept())
    twice = padded.padded(kept(seed=1))
    assert padded.density == twice.density == mask.density
    assert padded.lists is twice.lists
    assert all(torch.equal(mask.lists[name], tensor) for name, tensor in before.items())
    for side in "qk":
        counts = padded.lists[f"blocks.count_{side}"]
        assert counts.dtype is torch.int32
        assert torch.equal(counts[..., 0], before[f"blocks.count_{side}"].sum(-1))
        assert not counts[..., 1].any()


def test_joining_padded_blocks() -> None:
    """What is joined to them knows that they may hold less than they list."""
    q, k, v = (torch.randn(2, 96, 2, 8) for _ in range(3))
    plain, padded = Document(IDS) & KeyPadding(kept()), listed().padded(kept())
    band = flashtile.Band(left=20)
    for mine, other in ((padded & band, plain & band), (padded | band, plain | band), (padded & listed(), plain)):
        assert isinstance(mine, BlocksOfTorch)
        torch.testing.assert_close(flashtile.attention(q, k, v, mask=mine), flashtile.attention(q, k, v, mask=other))


@pytest.mark.parametrize("window", [None, (30, 5)])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_makes_blocks_once(
    monkeypatch: pytest.MonkeyPatch, causal: bool, window: tuple[int | None, int | None] | None
) -> None:
    """Not in forwards, whatever else hides keys; and padding that a tensor holds now counts, not what it held before."""
    torch.manual_seed(0)
    attention = Attention(32, 4, mask=listed(), causal=causal, window=window, options=CPU)
    plain = Attention(32, 4, mask=Document(IDS), causal=causal, window=window, options=CPU)
    plain.load_state_dict(attention.state_dict())
    forbid(monkeypatch)
    x, keep = torch.randn(2, 96, 32), kept()
    for padding_mask in (None, keep, kept(seed=1)[:1], None):
        torch.testing.assert_close(attention(x, padding_mask=padding_mask), plain(x, padding_mask=padding_mask))
    keep.copy_(kept(seed=1))
    torch.testing.assert_close(attention(x, padding_mask=keep), plain(x, padding_mask=keep))
    keep.data.logical_not_()  # which autograd does not count
    torch.testing.assert_close(attention(x, padding_mask=keep), plain(x, padding_mask=keep))


def test_padded_blocks_in_inference_mode_and_compiled() -> None:
    torch._dynamo.reset()
    attention, x, keep = Attention(32, 4, mask=listed(), causal=True, options=CPU), torch.randn(2, 96, 32), kept()
    with torch.inference_mode():
        before = attention(x, padding_mask=keep)
    torch.testing.assert_close(attention(x, padding_mask=keep), before)
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    for padding_mask in (keep, kept(seed=1)):
        mine = attention(x, padding_mask=padding_mask)
        torch.testing.assert_close(compiled(x, padding_mask=padding_mask), mine)
    mine.sum().backward()


def test_blocks_of_other_lengths_are_refused() -> None:
    attention = Attention(32, 4, mask=Blocks.build(Document(IDS), 96, 96), options=CPU)
    with pytest.raises(InvalidProblem, match="blocks are for 96 x 96 scores; they must be for 90 x 90"):
        attention(torch.randn(2, 90, 32), padding_mask=kept()[:, :90])
