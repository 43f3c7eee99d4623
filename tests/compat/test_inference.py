"""What other libraries' names keep from call to call: a call under inference_mode comes first, and training after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask

from flashtile.compat import xformers_bias as xb
from flashtile.compat.flex import flex_attention
from flashtile.compat.mha import MHA, InferenceParams
from flashtile.compat.rotary import RotaryEmbedding
from flashtile.compat.xformers import memory_efficient_attention


def flex() -> tuple[Callable[..., Any], list[torch.Tensor]]:
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 40, 40, device="cpu")
    return lambda *given: flex_attention(*given, block_mask=mask), [torch.randn(1, 2, 40, 8) for _ in "qkv"]


def items() -> tuple[Callable[..., Any], list[torch.Tensor]]:
    mask = xb.BlockDiagonalMask.from_seqlens([3, 5])
    tensors = [torch.randn(1, 8, 2, 8) for _ in "qkv"]
    return lambda *given: torch.cat(mask.split(memory_efficient_attention(*given, attn_bias=mask)), 1), tensors


def padded_items() -> tuple[Callable[..., Any], list[torch.Tensor]]:
    mask = xb.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([3, 5], 6, [4, 6])
    q, k, v = (torch.randn(1, n, 2, 8) for n in (8, 12, 12))
    return lambda *given: memory_efficient_attention(*given, attn_bias=mask), [q, k, v]


def rotary() -> tuple[Callable[..., Any], list[torch.Tensor]]:
    module = RotaryEmbedding(8, scale_base=512.0)
    return lambda qkv: module(qkv.clone()), [torch.randn(2, 5, 3, 2, 8)]


def mha() -> tuple[Callable[..., Any], list[torch.Tensor]]:
    return MHA(32, 2, causal=True, rotary_emb_dim=8), [torch.randn(2, 5, 32)]


@pytest.mark.parametrize("make", [flex, items, padded_items, rotary, mha])
def test_training_after_inference(make: Callable[[], tuple[Callable[..., Any], list[torch.Tensor]]]) -> None:
    function, tensors = make()
    with torch.inference_mode():
        before = function(*tensors)
    out = function(*(t.requires_grad_() for t in tensors))
    assert torch.equal(out, before)
    out.sum().backward()
    assert all(t.grad is not None for t in tensors)


@pytest.mark.parametrize("first", ["compiled", "fake"])
@pytest.mark.parametrize("make", [items, padded_items, rotary, mha])
def test_training_after_graphs_and_fake_tensors(
    make: Callable[[], tuple[Callable[..., Any], list[torch.Tensor]]], first: str
) -> None:
    torch._dynamo.reset()
    function, tensors = make()
    if first == "compiled":
        with torch.inference_mode():
            torch.compile(function, backend="aot_eager", fullgraph=True)(*tensors)
    else:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            function(*map(mode.from_tensor, tensors))
    out = function(*(t.requires_grad_() for t in tensors))
    assert torch.equal(out, make()[0](*tensors)) or make is mha  # whose weights are drawn
    out.sum().backward()
    assert all(t.grad is not None for t in tensors)


def test_a_generation_goes_on_outside_of_inference_mode() -> None:
    module, x = MHA(32, 2, causal=True, layer_idx=0), torch.randn(2, 5, 32)
    params = InferenceParams(5, 2)
    with torch.inference_mode():
        parts = [module(x[:, :3], inference_params=params)]
    params.seqlen_offset = 3
    with torch.no_grad():
        parts.append(module(x[:, 3:], inference_params=params))
        torch.testing.assert_close(torch.cat(parts, 1), module(x))
