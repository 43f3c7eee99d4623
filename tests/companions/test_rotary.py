"""The public rotary: what the case list does not say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashtile import InvalidProblem, ops
from flashtile.kernels.ops.catalogue import BACKENDS


def tables(length: int, half: int, place: Any = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.arange(length, device=place)[:, None] / 100.0 ** (torch.arange(half, device=place) / half)
    return angle.cos(), angle.sin()


def rotate_half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As transformers writes it: x (batch, seqlen, heads, head_dim) by tables (..., seqlen, head_dim / 2)."""
    cos, sin = (torch.cat([t, t], -1).unsqueeze(-2) for t in (cos, sin))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_rotate_half(backend: str, place: torch.device) -> None:
    q, k = torch.randn(2, 7, 4, 16, device=place), torch.randn(2, 7, 2, 16, device=place)
    cos, sin = tables(20, 8, place)
    made = ops.rotary(q, k, cos, sin, offset=3, backend=backend)
    for got, x in zip(made, (q, k), strict=True):
        torch.testing.assert_close(got, rotate_half(x, cos[3:10], sin[3:10]))
    back = ops.rotary(*made, cos, sin, offset=3, conjugate=True, backend=backend)
    torch.testing.assert_close(back, (q, k))


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_in_every_form(backend: str, place: torch.device) -> None:
    q = torch.randn(3, 6, 2, 8, device=place)
    cos, sin = tables(40, 4, place)
    begins = torch.tensor([0, 7, 30], device=place, dtype=torch.int32)
    expected = torch.stack(
        [ops.rotary(q[i : i + 1], None, cos, sin, offset=int(b), backend=backend)[0] for i, b in enumerate(begins)]
    )
    positions = begins[:, None] + torch.arange(6, device=place)
    assert torch.equal(ops.rotary(q, None, cos, sin, offset=begins, backend=backend), expected)
    assert torch.equal(ops.rotary(q, None, cos, sin, positions=positions, backend=backend), expected)
    packed = torch.cat([q[0, :6], q[1, :2], q[2, :5]])
    cu_seqlens = torch.tensor([0, 6, 8, 8, 13], device=place, dtype=torch.int32)
    offset = begins[[0, 1, 1, 2]]
    made = ops.rotary(packed, packed[:, :1], cos, sin, cu_seqlens=cu_seqlens, offset=offset, backend=backend)
    assert torch.equal(made[0], torch.cat([expected[0, :6], expected[1, :2], expected[2, :5]]))
    assert torch.equal(made[1], made[0][:, :1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_position_beyond_the_tables_is_seen(backend: str, place: torch.device) -> None:
    q, (cos, sin) = torch.randn(1, 4, 2, 8, device=place), tables(10, 4, place)
    with pytest.raises(InvalidProblem, match="positions reach 10; cos and sin have 10 rows"):
        ops.rotary(q, None, cos, sin, offset=7, backend=backend)
    positions = torch.tensor([[9, 10, -1, 0]], device=place)
    out = ops.rotary(q, None, cos, sin, positions=positions, backend=backend)
    assert out.isnan().any(-1).any(-1).tolist() == [[False, True, True, False]]
    assert ops.rotary(q, None, cos[:0], sin[:0], positions=positions, backend=backend).isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_are_written_over(backend: str, place: torch.device) -> None:
    """q and k of one projection, and of sequences one after another: autograd knows no Function that writes over two views."""
    cos, sin = (torch.randn(5, 4, device=place) for _ in range(2))
    packed, cu_seqlens = torch.randn(2, 5, 3, 2, 8, device=place, requires_grad=True), torch.tensor([0, 2, 5], device=place)
    for select, lengths in ((lambda t: t, None), (lambda t: t[0], cu_seqlens)):
        x, given = select(packed) * 1.0, select(packed)
        q, k, v = given.unbind(-3)
        made = ops.rotary(x.select(-3, 0), x.select(-3, 1), cos, sin, cu_seqlens=lengths, inplace=True, backend=backend)
        true = torch.stack([*ops.rotary(q, k, cos, sin, cu_seqlens=lengths, backend=backend), v], -3)
        assert torch.equal(x, true)
        assert torch.equal(torch.stack(made, -3), true.narrow(-3, 0, 2))
        weight = torch.randn_like(true)
        grads = [torch.autograd.grad((t * weight).sum(), packed)[0] for t in (x, true)]
        assert torch.equal(*grads)
    before = x.detach().clone()
    with pytest.raises(InvalidProblem, match="k has shape"):
        ops.rotary(x[None, :, 0], x[None, 1:, 1], cos, sin, inplace=True, backend=backend)
    assert torch.equal(x, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_autograd_would_refuse_is_not_written_over(backend: str, place: torch.device) -> None:
    cos, sin = (torch.randn(5, 4, device=place) for _ in range(2))
    packed = torch.randn(2, 5, 3, 2, 8, device=place, requires_grad=True)
    before = packed.detach().clone()
    for q, k in (
        (packed[:, :, 0], None),
        (before.clone()[:, :, 0], packed.unbind(2)[1]),
        (before[:, :, 0].requires_grad_(), None),
    ):
        with pytest.raises(InvalidProblem, match="is a leaf of autograd's"):
            ops.rotary(q, k, cos, sin, inplace=True, backend=backend)
    assert torch.equal(packed.detach(), before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_of_several_views_is_not_written_over(backend: str, place: torch.device) -> None:
    """Autograd refuses that, and says so only after it is done; where it wants no gradient of them it does not mind."""
    cos, sin = (torch.randn(5, 4, device=place) for _ in range(2))
    packed = torch.randn(2, 5, 3, 2, 8, device=place, requires_grad=True) * 1.0
    before = packed.detach().clone()
    for q, k in (packed.unbind(2)[:2], (packed.split(1, 2)[0][:, :, 0], None), (before.clone()[:, :, 0], packed.unbind(2)[1])):
        with pytest.raises(InvalidProblem, match="is a view that autograd lets nobody write over, such as one of several"):
            ops.rotary(q, k, cos, sin, inplace=True, backend=backend)
    assert torch.equal(packed, before)
    q = before.unbind(2)[0]
    expected = ops.rotary(q, None, cos, sin, backend=backend)
    assert torch.equal(ops.rotary(q, None, cos, sin, inplace=True, backend=backend), expected)
    assert torch.equal(before[:, :, 0], expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_written_over_is_noticed(backend: str, place: torch.device) -> None:
    """By a backward that kept it, also where nobody wants a gradient of it."""
    cos, sin = (torch.randn(5, 4, device=place) for _ in range(2))
    for learns in (False, True):
        weight, q, k = (torch.randn(2, 5, 2, 8, device=place, requires_grad=True) for _ in range(3))
        for i in range(2):
            given = [t * 1.0 if learns else t.detach().clone() for t in (q, k)]
            product = weight * given[i]
            ops.rotary(given[0], given[1], cos, sin, inplace=True, backend=backend)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_that_arrives_is_not_touched(backend: str, place: torch.device) -> None:
    """Also in place, also where it is shared or has stride 0."""
    leaf, (cos, sin) = torch.randn(1, 4, 2, 8, device=place, requires_grad=True), tables(10, 4, place)
    expected = torch.autograd.grad(rotate_half(leaf, cos[:4], sin[:4]).sum(), leaf)[0]
    for inplace in (False, True):
        x = leaf * 1.0
        out = ops.rotary(x, None, cos, sin, inplace=inplace, backend=backend)
        assert (out.data_ptr() == x.data_ptr()) == inplace
        dout = torch.ones_like(out)
        (grad,) = torch.autograd.grad(out, leaf, dout)
        assert (dout == 1).all()
        torch.testing.assert_close(grad, expected)
    torch.testing.assert_close(torch.autograd.grad(ops.rotary(leaf, None, cos, sin, backend=backend).sum(), leaf)[0], expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled(backend: str, place: torch.device) -> None:
    cos, sin = tables(30, 6, place)

    def function(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> Any:
        return ops.rotary(q * 2, k, cos, sin, positions=positions, interleaved=True, backend=backend)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for seqlen in (4, 9):
        q = torch.randn(2, seqlen, 3, 16, device=place, requires_grad=True)
        k = torch.randn(2, seqlen, 2, 16, device=place)
        positions = torch.randint(30, (2, seqlen), device=place)
        made = [f(q, k, positions) for f in (function, compiled)]
        torch.testing.assert_close(*made)
        torch.testing.assert_close(*(torch.autograd.grad(m[0].square().sum(), q)[0] for m in made))


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "q-list": ({"q": [1.0]}, "q is a list; it must be a torch.Tensor"),
    "q-rank": ({"q": t(2, 5, 8)}, r"q has shape \(2, 5, 8\); it must be \(batch, seqlen, heads, head_dim\)"),
    "q-packed": ({"cu_seqlens": t(3, dtype=torch.int32)}, r"q has shape \(2, 5, 3, 8\); it must be \(total, heads, head_dim\)"),
    "q-int": ({"q": t(2, 5, 3, 8, dtype=torch.int32)}, "q is int32; it must be fp16 or bf16 or fp32"),
    "k-seqlen": ({"k": t(2, 4, 1, 8)}, r"k has shape \(2, 4, 1, 8\); it must be that of q \(2, 5, 3, 8\) but for its heads"),
    "cos-wide": ({"cos": t(9, 5), "sin": t(9, 5)}, "cos has 5 columns; they must be 1 to 4, half of head_dim 8"),
    "cos-rank": ({"cos": t(9)}, r"cos has shape \(9,\); it must be \(length, rotary_dim / 2\)"),
    "sin-shape": ({"sin": t(8, 4)}, "sin is 8x4:fp32; it must have the shape and dtype of cos, 9x4:fp32"),
    "cos-grad": ({"cos": t(9, 4).requires_grad_()}, "^cos requires a gradient, which it does not have; detach it"),
    "short": ({"offset": 5}, "positions reach 9; cos and sin have 9 rows, one for each"),
    "offset-negative": ({"offset": -1}, "offset is -1; it must be an int of at least 0"),
    "offset-float": ({"offset": 1.0}, "offset is 1.0; it must be an int of at least 0"),
    "offset-shape": ({"offset": t(2, 5, dtype=torch.int64)}, r"offset is torch.int64 of shape \(2, 5\); it must be ints"),
    "offset-twice": ({"offset": 1, "positions": t(2, 5, dtype=torch.int64)}, "offset is 1 and positions are given"),
    "positions-shape": ({"positions": t(2, 4, dtype=torch.int64)}, r"positions has shape \(2, 4\); it must be \(batch, seq"),
    "positions-float": ({"positions": t(2, 5)}, "positions is fp32; it must be int32 or int64"),
    "interleaved": ({"interleaved": 1}, "interleaved is 1; it must be True or False"),
    "inplace": ({"inplace": 1}, "inplace is 1; it must be True or False"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    arguments, message = BAD[name]
    given = {"q": t(2, 5, 3, 8), "k": None, "cos": t(9, 4), "sin": t(9, 4), **arguments}
    with pytest.raises(InvalidProblem, match=message):
        ops.rotary(**given)
