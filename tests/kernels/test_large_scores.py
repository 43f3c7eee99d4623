"""Rows whose scores share one large offset: softmax's answer, forward and backward, in 16 bits."""

from __future__ import annotations

import pytest
import torch

import flashtile
from flashtile import Bias, Document, Dropout, Options
from tests.judge import FACTOR

LEAST = torch.finfo(torch.float32).min
OFFSETS = [-1e4, -1e6, -1e9, 1e9, LEAST]
HOPPER = pytest.param("hopper", "auto", marks=[pytest.mark.gpu, pytest.mark.sm90])
FORMS = [("cpu", "auto"), ("triton", "split"), ("triton", "fused"), HOPPER]


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, exact: bool) -> torch.Tensor:
    """Softmax of what float32 holds of score + bias; if exact, all else in float64."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    score = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    if exact:
        rounded = (score.detach().float() + bias.float()).double()
        score = score + (rounded - score.detach())
        return torch.einsum("bhij,bjhd->bihd", score.softmax(-1), v)
    return torch.einsum("bhij,bjhd->bihd", (score + bias).softmax(-1).to(v.dtype), v)


def gradients(out: torch.Tensor, leaves: list[torch.Tensor], dout: torch.Tensor) -> list[torch.Tensor]:
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]


def device_for(backend: str) -> str:
    return "cuda" if torch.cuda.is_available() and backend != "cpu" else "cpu"


@pytest.mark.parametrize("offset", OFFSETS, ids=lambda x: f"{x:.0e}")
@pytest.mark.parametrize(("backend", "backward"), FORMS, ids=["cpu", "split", "fused", "hopper"])
@pytest.mark.parametrize(("dtype", "seqlen"), [(torch.bfloat16, 40), (torch.float16, 40), (torch.float16, 200)])
def test_a_row_s_offset_changes_nothing_but_its_rounding(
    backend: str, backward: str, dtype: torch.dtype, seqlen: int, offset: float
) -> None:
    torch.manual_seed(0)
    place, head_dim = device_for(backend), 128 if backend == "hopper" else 16
    q, k, v = (torch.randn(1, seqlen, heads, head_dim, device=place).to(dtype) for heads in (4, 2, 2))
    bias = torch.zeros(1, 1, seqlen, seqlen, device=place)
    bias[:, :, 3:9] = offset
    dout = torch.randn(q.shape, device=place).to(dtype)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    options = Options(backend=backend, backward=backward)  # pyright: ignore[reportArgumentType]
    made = gradients(flashtile.attention(*leaves, score=(Bias(bias),), options=options), leaves, dout)
    doubles = [x.double().requires_grad_() for x in (q, k, v)]
    exact = gradients(plain(*doubles, bias, True), doubles, dout)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    theirs = gradients(plain(*leaves, bias, False), leaves, dout)
    for name, mine, true, other in zip(("out", "dq", "dk", "dv"), made, exact, theirs, strict=True):
        largest = true.abs().max().item()
        error, allowed = ((x.double() - true).abs().max().item() / largest for x in (mine, other))
        assert error <= max(FACTOR * allowed, 2 * torch.finfo(dtype).eps), (name, error, allowed)


@pytest.mark.parametrize("offset", OFFSETS, ids=lambda x: f"{x:.0e}")
@pytest.mark.parametrize("tiles", ["one tile", "small_tiles"])
def test_a_cpu_s_products_in_16_bits_do_not_lose_the_sum(
    narrow: bool, tiles: str, offset: float, request: pytest.FixtureRequest
) -> None:
    """lse alone has lost it; a tile of whole rows, or a walk over the keys, finds it again."""
    if tiles == "small_tiles":
        request.getfixturevalue(tiles)
    for dtype in (torch.bfloat16, torch.float16):
        test_a_row_s_offset_changes_nothing_but_its_rounding("cpu", "auto", dtype, 40, offset)


@pytest.mark.parametrize("small", [True, False], ids=["small", "exact"])
@pytest.mark.parametrize(("backend", "backward"), FORMS[:3], ids=["cpu", "split", "fused"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_a_million_are_softmax_s_backward_too(
    backend: str, backward: str, dtype: torch.dtype, small: bool, request: pytest.FixtureRequest
) -> None:
    """lse, one float32, has lost log(sum): a pass that walks the keys first finds it again."""
    if not small:
        request.getfixturevalue("nothing_small")
    torch.manual_seed(0)
    place = device_for(backend)
    q, k, v, dout = (torch.randn(2, 24, heads, 16, device=place) for heads in (4, 2, 2, 4))
    q, k = (x.round().clamp(-1, 1) * 512 for x in (q, k))  # scores are exact: multiples of 2^18
    q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    options = Options(backend=backend, backward=backward, delta="rounded" if small else "exact")  # pyright: ignore
    made = gradients(flashtile.attention(*leaves, scale=1.0, options=options), leaves, dout)
    bias = torch.zeros(1, 1, 24, 24, device=place, dtype=torch.float64)
    doubles = [x.double().requires_grad_() for x in (4.0 * q, k, v)]  # `plain` scales by 1 / 4
    exact = gradients(plain(*doubles, bias, False), doubles, dout)
    exact[1] *= 4.0
    for name, mine, true in zip(("out", "dq", "dk", "dv"), made, exact, strict=True):
        error, largest = (mine.double() - true).abs().max().item(), true.abs().max().item()
        assert error <= 2 * torch.finfo(dtype).eps * largest, (name, error, largest)


@pytest.mark.parametrize(("backend", "backward"), FORMS, ids=["cpu", "split", "fused", "hopper"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("nothing_small")
def test_one_key_gives_its_value_whatever_its_score(backend: str, backward: str, dtype: torch.dtype) -> None:
    """A GPU subtracts a rounded maximum of 10^6, so that its weight is not 1; delta is dp all the same, unmended."""
    torch.manual_seed(0)
    place = device_for(backend)
    q, k, v, dout = (torch.randn(1, 100, heads, 64, device=place) for heads in (4, 2, 2, 4))
    q, k = (x.round().clamp(-1, 1) * 128 for x in (q, k))
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    ids = torch.arange(100, device=place)[None].int()
    options = Options(backend=backend, backward=backward)  # pyright: ignore[reportArgumentType]
    out = flashtile.attention(*leaves, mask=Document(ids), scale=16.0, options=options)
    dq, dk, _ = torch.autograd.grad(out, leaves, dout.to(dtype))
    value = leaves[2].repeat_interleave(2, 2)
    assert torch.equal(out, value)
    products = (dout.abs() * value.float().abs()).sum(-1).max().item()
    assert max(dq.abs().max().item(), dk.abs().max().item()) <= 2.0**-17 * products * 128 * 16


def test_a_row_that_minus_infinity_hides_gives_zero() -> None:
    for backend in ("cpu", "triton"):
        q, k, v = (torch.randn(1, 20, 2, 16, device=device_for(backend)).half().requires_grad_() for _ in range(3))
        bias = torch.zeros(1, 1, 20, 20, device=q.device)
        bias[:, :, 4] = -torch.inf
        out = flashtile.attention(q, k, v, score=(Bias(bias),), options=Options(backend=backend))
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        assert not out[:, 4].any()
        assert not dq[:, 4].any()
        assert all(x.isfinite().all() for x in (out, dq, dk, dv))


def test_a_bias_and_dropout_beside_an_offset_learn() -> None:
    """The gradient of the bias itself, a sink and dropout: both backends agree with each other."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 24, 2, 16).half() for _ in range(3)] + [torch.randn(1, 2, 24, 24), torch.randn(2)]
    inputs[3][:, :, 5] -= 1e6
    found = []
    for backend in ("cpu", "triton"):
        q, k, v, bias, sink = leaves = [x.to(device_for(backend)).requires_grad_() for x in inputs]
        how = dict(score=(Bias(bias),), sink=sink, dropout=Dropout(0.2, seed=3), options=Options(backend=backend))
        out = flashtile.attention(q, k, v, **how)  # pyright: ignore[reportArgumentType]
        found.append([x.cpu() for x in torch.autograd.grad(out.float().square().sum(), leaves)])
    for a, b in zip(*found, strict=True):
        assert torch.isfinite(b).all()
        assert (a.double() - b.double()).abs().max() <= 1e-2 * a.abs().max()
