"""The signatures of PyTorch's own attentions, and of the Triton tutorial's, against PyTorch and the formula."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from flashtile import InvalidProblem
from flashtile.compat import sdpa
from flashtile.compat.sdpa import scaled_dot_product_attention
from flashtile.compat.triton_tutorial import attention
from tests.compat.formula import attend, visible
from tests.compat.test_flash_attn import agree, close


def heads_first(*shapes: tuple[int, ...], place: torch.device) -> list[torch.Tensor]:
    return [torch.randn(shape).to(place).requires_grad_() for shape in shapes]


def agree_with_torch(packs: list[torch.Tensor], **how: Any) -> None:
    out = scaled_dot_product_attention(*packs[:3], **how)
    with sdpa_kernel(SDPBackend.MATH):
        true = F.scaled_dot_product_attention(*(t.double() for t in packs[:3]), **how)
    agree(packs, out, true)


@pytest.mark.parametrize("how", [{}, {"is_causal": True}, {"scale": 0.4}], ids=str)
@pytest.mark.parametrize("lengths", [(6, 9), (9, 6)])
def test_sdpa(through: str, place: torch.device, how: dict[str, Any], lengths: tuple[int, int]) -> None:
    a, b = lengths
    agree_with_torch(heads_first((2, 4, a, 16), (2, 4, b, 16), (2, 4, b, 8), place=place), **how)


@pytest.mark.parametrize("shape", [(6, 9), (9,), (2, 1, 6, 9), (2, 4, 1, 9), (1, 4, 6, 1)], ids=str)
@pytest.mark.parametrize("boolean", [False, True])
def test_sdpa_mask(through: str, place: torch.device, shape: tuple[int, ...], boolean: bool) -> None:
    packs = heads_first((2, 4, 6, 16), (2, 4, 9, 16), (2, 4, 9, 16), place=place)
    if boolean:
        mask = torch.rand(shape).to(place) < 0.6
        mask[..., 0] = True
        agree_with_torch(packs, attn_mask=mask)
        return
    (bias,) = heads_first(shape, place=place)
    out = scaled_dot_product_attention(*packs, attn_mask=bias)
    true = attend(*(t.transpose(1, 2) for t in packs), bias=bias)[0].transpose(1, 2)
    close(out, true)
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(true, [*packs, bias], dout.double())
    for mine, theirs in zip(torch.autograd.grad(out, [*packs, bias], dout), wanted, strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("shapes", [
    ((1, 4, 6, 16), (2, 4, 9, 16), (2, 4, 9, 16)), ((2, 4, 6, 16), (1, 4, 9, 16), (1, 1, 9, 16)),
    ((2, 4, 6, 16), (2, 1, 9, 16), (1, 4, 9, 16)), ((2, 4, 6, 16), (2, 1, 9, 16), (2, 1, 9, 16)),
    ((2, 1, 6, 16), (2, 4, 9, 16), (2, 4, 9, 16)), ((3, 1, 4, 6, 16), (1, 2, 4, 9, 16), (1, 2, 1, 9, 16)),
    ((4, 6, 16), (1, 9, 16), (1, 9, 16)),
], ids=str)  # fmt: skip
def test_sdpa_broadcasts_axes_of_one(through: str, place: torch.device, shapes: tuple[tuple[int, ...], ...]) -> None:
    """With gradients of the shapes that were given."""
    packs = heads_first(*shapes, place=place)
    agree_with_torch(packs, is_causal=True)
    mask = torch.rand(6, 9).to(place) < 0.6
    mask[..., 0] = True
    agree_with_torch(packs, attn_mask=mask)


def test_sdpa_repeats_one_head_of_keys_or_of_values(place: torch.device) -> None:
    agree_with_torch(heads_first((2, 4, 6, 16), (2, 1, 9, 16), (2, 2, 9, 16), place=place), enable_gqa=True)
    agree_with_torch(heads_first((2, 4, 6, 16), (2, 2, 9, 16), (2, 1, 9, 16), place=place), enable_gqa=True)


def test_sdpa_shapes(through: str, place: torch.device) -> None:
    agree_with_torch(heads_first((6, 16), (9, 16), (9, 16), place=place))
    agree_with_torch(heads_first((3, 6, 16), (3, 9, 16), (3, 9, 16), place=place), is_causal=True)
    packs = heads_first((2, 3, 2, 6, 16), (2, 3, 2, 9, 16), (2, 3, 2, 9, 16), place=place)
    mask = torch.rand(3, 1, 6, 9).to(place) < 0.7
    mask[..., 0] = True
    agree_with_torch(packs, attn_mask=mask)
    grouped = heads_first((2, 4, 6, 16), (2, 2, 6, 16), (2, 2, 6, 16), place=place)
    agree_with_torch(grouped, enable_gqa=True, is_causal=True)
    for bias in (causal_lower_right(6, 9), causal_upper_left(6, 9)):
        some = heads_first((1, 2, 6, 16), (1, 2, 9, 16), (1, 2, 9, 16), place=place)
        seen = visible(6, 9, -1, 0, top_left=bias.variant.name == "UPPER_LEFT")
        true = attend(*(t.transpose(1, 2) for t in some), seen)[0].transpose(1, 2)
        close(scaled_dot_product_attention(*some, attn_mask=bias), true)
    blind = torch.zeros(6, 9, dtype=torch.bool, device=place)
    assert not scaled_dot_product_attention(*heads_first((1, 1, 6, 16), (1, 1, 9, 16), (1, 1, 9, 16), place=place), blind).any()
    dropped = scaled_dot_product_attention(*grouped, dropout_p=0.5, enable_gqa=True)
    assert not torch.equal(dropped, scaled_dot_product_attention(*grouped, enable_gqa=True))
    with pytest.raises(InvalidProblem, match="key has 2 heads and query 4; they must be equal unless enable_gqa is True"):
        scaled_dot_product_attention(*grouped)
    with pytest.raises(InvalidProblem, match="attn_mask is given and is_causal is True"):
        scaled_dot_product_attention(*grouped, mask, is_causal=True, enable_gqa=True)
    with pytest.raises(InvalidProblem, match=r"attn_mask has shape \(5, 9\); it must broadcast to \(2, 4, 6, 6\)"):
        scaled_dot_product_attention(*grouped, torch.ones(5, 9), enable_gqa=True)
    with pytest.raises(InvalidProblem, match=r"attn_mask is torch.int64; it must be a tensor of bool"):
        scaled_dot_product_attention(*grouped, torch.ones(6, 6, dtype=torch.int64), enable_gqa=True)
    with pytest.raises(InvalidProblem, match="attn_mask is for 6 x 9 scores; it must be for 6 x 6"):
        scaled_dot_product_attention(*grouped, causal_lower_right(6, 9), enable_gqa=True)
    with pytest.raises(InvalidProblem, match="as many axes, at least two"):
        scaled_dot_product_attention(grouped[0], grouped[1][0], grouped[2])
    with pytest.raises(InvalidProblem, match=r"have \(2, 3\), \(3, 2\), \(3, 2\) before their heads; they must broadcast"):
        scaled_dot_product_attention(torch.randn(2, 3, 4, 8, 16), *torch.randn(2, 3, 2, 4, 8, 16))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("alike", [False, True])
def test_sdpa_nested(alike: bool, causal: bool, place: torch.device) -> None:
    def nested(lengths: list[int], heads: int) -> torch.Tensor:
        items = [torch.randn(n, heads, 16, device=place) for n in lengths]
        return torch.nested.nested_tensor(items, layout=torch.jagged).transpose(1, 2)

    query = nested([3, 5, 2], 4)
    key = query if alike else nested([4, 5, 7], 2)
    how: dict[str, Any] = dict(is_causal=causal, enable_gqa=not alike)
    out = scaled_dot_product_attention(query, key, key, **how)
    for got, q, k in zip(out.unbind(), query.unbind(), key.unbind(), strict=True):
        close(got, F.scaled_dot_product_attention(q[None].double(), k[None].double(), k[None].double(), **how)[0])
    with sdpa.Override():
        close(F.scaled_dot_product_attention(query, key, key, **how).values(), out.values())
    with pytest.raises(InvalidProblem, match="attn_mask is given and query is nested"):
        scaled_dot_product_attention(query, query, query, torch.zeros(1))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What flashtile is asked in torch's place."""
    ran: list[Any] = []
    original = sdpa.attention
    monkeypatch.setattr(sdpa, "attention", lambda *given, **named: (ran.append(named), original(*given, **named))[1])
    return ran


def test_override_is_torchs_function_while_it_is_entered(calls: list[Any]) -> None:
    """For modules too, which call it where nobody sees; gradients flow within and afterwards."""
    layer, x = torch.nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True), torch.randn(2, 9, 32)
    hidden = torch.nn.Transformer.generate_square_subsequent_mask(9)
    expected = layer(x, src_mask=hidden, is_causal=True)
    wanted = torch.autograd.grad(expected.square().sum(), list(layer.parameters()))
    assert not calls
    with sdpa.Override():
        out = layer(x, src_mask=hidden, is_causal=True)
        within = torch.autograd.grad(out.square().sum(), list(layer.parameters()), retain_graph=True)
    assert len(calls) == 1
    afterwards = torch.autograd.grad(out.square().sum(), list(layer.parameters()))
    torch.testing.assert_close(layer(x, src_mask=hidden, is_causal=True), expected)
    assert len(calls) == 1
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    for a, b, c in zip(within, afterwards, wanted, strict=True):
        torch.testing.assert_close(a, c, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(b, c, rtol=1e-3, atol=1e-4)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with sdpa.Override():
        torch.testing.assert_close(compiled(x, src_mask=hidden, is_causal=True), expected, rtol=1e-4, atol=1e-5)
    assert len(calls) == 2
    with sdpa.Override(), pytest.raises(InvalidProblem, match="unless enable_gqa is True"):
        F.scaled_dot_product_attention(torch.randn(2, 4, 9, 8), *torch.randn(2, 2, 2, 9, 8))


@pytest.mark.parametrize("inside", [False, True])
def test_override_under_compile_is_one_graph(calls: list[Any], inside: bool) -> None:
    graphs: list[set[str]] = []

    def remember(graph: Any, example: Any) -> Any:
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return graph.forward

    def attend(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    def overridden(q: torch.Tensor) -> torch.Tensor:
        with sdpa.Override():
            return attend(q)

    torch._dynamo.reset()
    q = torch.randn(2, 4, 9, 16, requires_grad=True)
    compiled = torch.compile(overridden if inside else attend, backend=remember, fullgraph=True)
    with nullcontext() if inside else sdpa.Override():
        got = compiled(q)
        (dq,) = torch.autograd.grad(got.square().sum(), q)
    expected = attend(q)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dq, torch.autograd.grad(expected.square().sum(), q)[0], rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1
    assert "flashtile.attention.default" in graphs[0]
    if not inside:  # what was compiled within is not what runs without
        torch.testing.assert_close(compiled(q), expected)
        assert "flashtile.attention.default" not in graphs[1]


@pytest.mark.parametrize("causal", [False, True])
def test_triton_tutorial(through: str, place: torch.device, causal: bool) -> None:
    packs = heads_first((2, 3, 6, 16), (2, 3, 9, 16), (2, 3, 9, 16), place=place)
    out = attention(*packs, causal, 0.5)
    true = attend(*(t.transpose(1, 2) for t in packs), visible(6, 9, -1, 0 if causal else -1, top_left=True), scale=0.5)[0]
    close(out, true.transpose(1, 2))
    assert out.is_contiguous()
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(true.transpose(1, 2), packs, dout.double())
    for mine, theirs in zip(torch.autograd.grad(out, packs, dout), wanted, strict=True):
        close(mine, theirs)
    with pytest.raises(InvalidProblem, match="causal is 1"):
        attention(*packs, 1, 0.5)  # pyright: ignore[reportArgumentType]
