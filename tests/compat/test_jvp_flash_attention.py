"""jvp_flash_attention's names, against its documented meaning written out in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import flashtile.compat
from flashtile import InvalidProblem, NotSupported
from flashtile.compat.jvp_flash_attention import MASK_CONST, JVPAttn, attention


def meaning(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: Any = None, causal: bool = False, sm_scale: Any = None
):
    """softmax(sm_scale q k^T + what is added) v, nothing left of what is hidden."""
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if sm_scale is None else sm_scale)
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = torch.where(attn_mask == MASK_CONST, -torch.inf, scores + attn_mask)
    weights = scores.exp()  # softmax(-1) of torch 2.13 has a tangent that cannot be differentiated
    return weights / weights.sum(-1, keepdim=True) @ v


def given(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, 32, 16, generator=generator, dtype=torch.float64) for _ in range(6)]


def masks() -> dict[str, dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    bools = torch.rand(2, 3, 32, 32, generator=generator) > 0.3
    numbers = torch.randn(2, 3, 32, 32, generator=generator, dtype=torch.float64).masked_fill(~bools, MASK_CONST)
    return {
        "plain": {}, "causal": dict(causal=True), "scale": dict(sm_scale=0.5), "bool": dict(attn_mask=bools),
        "numbers": dict(attn_mask=numbers), "one head's": dict(attn_mask=bools[:, :1]),
    }  # fmt: skip


@pytest.mark.parametrize("name", masks())
def test_out_tangent_and_what_goes_back(name: str) -> None:
    how, (q, k, v, *moved) = masks()[name], given()
    truth = torch.func.jvp(lambda *x: meaning(*x, **how), (q, k, v), tuple(moved))
    for function in (attention, JVPAttn.fwd, JVPAttn.fwd_dual):
        torch.testing.assert_close(function(q, k, v, **how), truth[0])
        torch.testing.assert_close(torch.func.jvp(lambda *x, f=function: f(*x, **how), (q, k, v), tuple(moved)), truth)

    def loss(function: Any) -> torch.Tensor:
        leaf = q.clone().requires_grad_()
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(t, m) for t, m in zip((leaf, k, v), moved, strict=True)]
            out, tangent = forward_ad.unpack_dual(function(*duals, **how))
            assert tangent is not None
            return torch.autograd.grad(out.sum() + tangent.square().sum(), leaf)[0]

    torch.testing.assert_close(loss(JVPAttn.fwd_dual), loss(meaning))


def test_install_gives_its_modules() -> None:
    flashtile.compat.install("jvp_flash_attention")
    try:
        import jvp_flash_attention  # pyright: ignore[reportMissingImports]
        from jvp_flash_attention.jvp_attention import JVPAttn as Theirs  # pyright: ignore[reportMissingImports]

        assert (Theirs, jvp_flash_attention.__version__) == (JVPAttn, "0.14.0")
    finally:
        flashtile.compat.uninstall("jvp_flash_attention")


def test_errors_name_the_argument() -> None:
    q, k, v = given()[:3]
    with pytest.raises(NotSupported, match=r"dropout_p is 0\.1"):
        attention(q, k, v, dropout_p=0.1)
    with pytest.raises(InvalidProblem, match="causal is True and attn_mask is given"):
        attention(q, k, v, torch.ones(32, 32, dtype=torch.bool), causal=True)
    with pytest.raises(InvalidProblem, match=r"attn_mask is torch\.float32; it must be a tensor of bool or of q's dtype"):
        attention(q, k, v, torch.ones(32, 32))
    with pytest.raises(InvalidProblem, match=r"attn_mask has shape \(3, 5\)"):
        attention(q, k, v, torch.ones(3, 5, dtype=torch.bool))
    with pytest.raises(InvalidProblem, match="attn_mask has inf or NaN"):
        attention(q, k, v, torch.full((32, 32), -torch.inf, dtype=torch.float64))
    with pytest.raises(InvalidProblem, match=r"q is \(3, 32, 16\)"):
        attention(q[0], k, v)
