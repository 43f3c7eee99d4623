"""A mask of numbers keeps its own in every front end, whatever dtype q has; one of integers is never added."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flashtile
from flashtile import Bias
from flashtile.compat.flex import flex_attention
from flashtile.compat.sdpa import Override, scaled_dot_product_attention
from flashtile.compat.xformers import memory_efficient_attention

N = 320
Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]


def heads_last(function: Any) -> Call:
    """The function of (batch, seqlen, heads, head_dim) as one of (batch, heads, seqlen, head_dim)."""
    return lambda q, k, v, mask: function(*(t.transpose(1, 2) for t in (q, k, v)), mask).transpose(1, 2)


def overridden(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
    with Override():
        return F.scaled_dot_product_attention(q, k, v, mask)


def registered(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    from flashtile.integrations import sdpa

    sdpa.register()
    activate_flash_attention_impl("flashtile")
    try:
        return F.scaled_dot_product_attention(q, k, v, mask)
    finally:
        restore_flash_attention_impl()


def transformers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
    forward = import_module("flashtile.integrations.transformers").attention_forward
    return forward(torch.nn.Module(), q, k, v, mask)[0].transpose(1, 2)


def position_bias(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
    forward = import_module("flashtile.integrations.transformers").attention_forward
    return forward(torch.nn.Module(), q, k, v, None, position_bias=mask, is_causal=False)[0].transpose(1, 2)


def diffusers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
    return heads_last(import_module("flashtile.integrations.diffusers").attention_forward)(q, k, v, mask)


def flexed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
    return flex_attention(q, k, v, lambda score, b, h, i, j: score + mask[b, h, i, j])


def module(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
    layer = flashtile.nn.Attention(16, 1, bias=False, score=(Bias(mask),)).to(q.dtype)
    with torch.no_grad():
        layer.in_proj_weight.copy_(torch.eye(16).repeat(3, 1))
        layer.out_proj.weight.copy_(torch.eye(16))
        return layer(q[:, 0])[:, None]


FRONTS: dict[str, Call] = {
    "attention": heads_last(lambda q, k, v, mask: flashtile.attention(q, k, v, score=(Bias(mask),))),
    "compiled": heads_last(
        lambda q, k, v, mask: torch.compile(flashtile.attention, backend="eager")(q, k, v, score=(Bias(mask),))
    ),
    "compat.sdpa": scaled_dot_product_attention,
    "Override": overridden,
    "integrations.sdpa": registered,
    "transformers": transformers,
    "transformers' position_bias": position_bias,
    "diffusers": diffusers,
    "xformers": heads_last(memory_efficient_attention),
    "flex": flexed,
    "nn.Attention": module,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("front", FRONTS)
def test_a_float32_mask_keeps_its_numbers(front: str, dtype: torch.dtype) -> None:
    """ALiBi by key alone, as BLOOM, MPT and Falcon write it: up to 80, where bfloat16's numbers are 0.5 apart."""
    torch.manual_seed(0)
    q = torch.randn(1, 1, N, 16).to(dtype)
    bias = 0.25 * torch.arange(N, dtype=torch.float32).expand(1, 1, N, N)
    hidden = torch.finfo(torch.float32).min if dtype is torch.bfloat16 else -1e4
    mask = torch.where(torch.ones(N, N).tril().bool(), bias, hidden)
    exact = torch.softmax(q.double() @ q.double().mT / 4 + mask.double(), -1) @ q.double()
    theirs = (F.scaled_dot_product_attention(q, q, q, mask).double() - exact).abs().max()
    ours = (FRONTS[front](q, q, q, mask).double() - exact).abs().max()
    assert ours <= 2 * theirs + 1e-3


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("front", [name for name in FRONTS if name not in ("flex", "compiled")])
def test_a_mask_of_integers_is_not_added(front: str, dtype: torch.dtype) -> None:
    q, seen = torch.randn(1, 1, 8, 16), torch.ones(8, 8).tril()[None, None]
    with pytest.raises((ValueError, RuntimeError), match=r"[iI]nt|it must be float16, bfloat16 or float32|bool"):
        FRONTS[front](q, q, q, seen.to(dtype))
