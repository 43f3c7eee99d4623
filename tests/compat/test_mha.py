"""flash-attention 2's modules against their projections and the formula, and cuDNN's padded shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashtile import InvalidProblem, NotSupported
from flashtile.compat import mha
from flashtile.compat.cudnn import attention_kvpacked_padded
from flashtile.compat.rotary import apply_rotary_emb_torch
from tests.compat.formula import attend, visible
from tests.compat.test_flash_attn import close, draw

SEQLEN = 7


def test_alibi_slopes() -> None:
    assert mha.get_alibi_slopes(8) == [2.0 ** -(i + 1) for i in range(8)]
    close(
        torch.tensor(mha.get_alibi_slopes(12)),
        torch.tensor([2.0 ** -(i + 1) for i in range(8)] + [2 ** -(i + 0.5) for i in range(4)]),
    )


def test_flash_modules(through: str, place: torch.device) -> None:
    (qkv,) = draw((2, SEQLEN, 3, 2, 16), place=place)
    slopes = torch.tensor([0.5, 0.25], dtype=torch.float16)
    module = mha.FlashSelfAttention(True, 0.3, 0.5, (3, -1), slopes, True).to(place).eval()
    assert not module.state_dict()
    true = attend(*qkv.unbind(2), visible(SEQLEN, SEQLEN, 3, 0), scale=0.3, slopes=slopes.to(place, torch.float32))[0]
    close(module(qkv), true)
    cu = torch.tensor([0, SEQLEN, 2 * SEQLEN], dtype=torch.int32, device=place)
    close(module(qkv.flatten(0, 1), cu_seqlens=cu, max_seqlen=SEQLEN), true.flatten(0, 1))
    free = attend(*qkv.unbind(2), visible(SEQLEN, SEQLEN, 3), scale=0.3, slopes=slopes.to(place, torch.float32))[0]
    close(module(qkv, causal=False), free)
    assert not torch.equal(module.train()(qkv), module.eval()(qkv))

    q, kv = draw((2, 5, 4, 16), (2, SEQLEN, 2, 2, 16), place=place)
    cross = mha.FlashCrossAttention(True, None, 0.0, None, (2, -1)).to(place)
    true = attend(q, *kv.unbind(2), visible(5, SEQLEN, 2, 0))[0]
    close(cross(q, kv), true)
    cu_q = torch.tensor([0, 5, 10], dtype=torch.int32, device=place)
    close(cross(q.flatten(0, 1), kv.flatten(0, 1), None, cu_q, 5, cu, SEQLEN), true.flatten(0, 1))
    with pytest.raises(InvalidProblem, match="cu_seqlens is given and cu_seqlens_k is None"):
        cross(q.flatten(0, 1), kv.flatten(0, 1), None, cu_q, 5)


def test_plain_modules(through: str, place: torch.device) -> None:
    keep = torch.tensor([[1, 1, 0, 1, 1, 0, 0], [1] * 7], dtype=torch.bool, device=place)
    (qkv,) = draw((2, SEQLEN, 3, 2, 16), place=place)
    for causal in (False, True):
        seen = visible(SEQLEN, SEQLEN, -1, 0 if causal else -1) & keep.cpu()[:, None, None]
        close(mha.SelfAttention(causal, 0.3)(qkv, key_padding_mask=keep), attend(*qkv.unbind(2), seen, scale=0.3)[0])
        q, kv = draw((2, 3, 4, 16), (2, SEQLEN, 2, 2, 16), place=place)
        last = torch.arange(3)[:, None] + keep.cpu().sum(-1)[:, None, None] - 3
        seen = keep.cpu()[:, None, None] & ((torch.arange(SEQLEN) <= last)[:, None] | (not causal))
        close(mha.CrossAttention(causal)(q, kv, key_padding_mask=keep), attend(q, *kv.unbind(2), seen)[0])
        close(mha.CrossAttention(causal)(q, kv), attend(q, *kv.unbind(2), visible(3, SEQLEN, -1, 0 if causal else -1))[0])
    module = mha.CrossAttention(attention_dropout=0.5)
    assert not torch.equal(module(q, kv), module.eval()(q, kv))


def by_hand(module: mha.MHA, x: torch.Tensor, seen: torch.Tensor | None = None, slopes: Any = None) -> torch.Tensor:
    """Self-attention of the module's projections, by the formula, without rotation or convolution."""
    heads, heads_kv = module.num_heads, module.num_heads_kv
    q, k, v = module.Wqkv(x).unflatten(-1, (heads + 2 * heads_kv, 16)).split((heads, heads_kv, heads_kv), 2)
    return module.out_proj(attend(q, k, v, seen, slopes=slopes)[0].to(x).flatten(2))


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("heads_kv", [None, 2])
def test_mha(through: str, place: torch.device, flash: bool, heads_kv: int | None) -> None:
    x = torch.randn(2, SEQLEN, 64).to(place)
    module = mha.MHA(64, 4, heads_kv, causal=True, use_flash_attn=flash, return_residual=True).to(place)
    out, rest = module(x)
    assert rest is x
    true = by_hand(module, x, visible(SEQLEN, SEQLEN, -1, 0))
    close(out, true)
    weights = list(module.parameters())
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(true, weights, dout)
    for checkpointing in (False, True):
        module.checkpointing = checkpointing
        for mine, theirs in zip(torch.autograd.grad(module(x)[0], weights, dout), wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    assert set(module.state_dict()) == {"Wqkv.weight", "Wqkv.bias", "out_proj.weight", "out_proj.bias"}
    if flash:
        cu = torch.tensor([0, SEQLEN, 2 * SEQLEN], dtype=torch.int32, device=place)
        close(module(x.flatten(0, 1), cu_seqlens=cu, max_seqlen=SEQLEN)[0], true.flatten(0, 1))
        alibi = mha.MHA(64, 4, heads_kv, use_flash_attn=True, use_alibi=True, window_size=(3, 1)).to(place)
        slopes = torch.tensor(mha.get_alibi_slopes(4), device=place)
        close(alibi(x), by_hand(alibi, x, visible(SEQLEN, SEQLEN, 3, 1), slopes))
    else:
        keep = torch.arange(SEQLEN, device=place) < torch.tensor([[5], [SEQLEN]], device=place)
        if heads_kv is None:
            seen = visible(SEQLEN, SEQLEN, -1, 0) & keep.cpu()[:, None, None]
            close(module(x, key_padding_mask=keep)[0], by_hand(module, x, seen))


@pytest.mark.parametrize("use_flash_attn", [False, True])
@pytest.mark.parametrize("heads_kv", [None, 2])
def test_rotary_in_training(through: str, place: torch.device, heads_kv: int | None, use_flash_attn: bool) -> None:
    """Which writes over a part of the projection: gradients are those of one that does not."""
    module = mha.MHA(64, 4, heads_kv, causal=True, rotary_emb_dim=8, use_flash_attn=use_flash_attn).to(place)
    x, weight = torch.randn(2, SEQLEN, 64, device=place), torch.randn(2, SEQLEN, 64, device=place)
    cos, sin = module.rotary_emb.tables(SEQLEN, place, torch.float32)
    q, k, v = module.Wqkv(x).unflatten(-1, (-1, 16)).split((4, *[heads_kv or 4] * 2), -2)
    q, k = (apply_rotary_emb_torch(t, cos[:SEQLEN], sin[:SEQLEN]) for t in (q, k))
    true = module.out_proj(attend(q, k, v, visible(SEQLEN, SEQLEN, -1, 0))[0].float().flatten(-2))
    close(module(x), true)
    grads = [torch.autograd.grad((out * weight).sum(), module.Wqkv.weight)[0] for out in (module(x), true)]
    close(*grads)


@pytest.mark.parametrize("heads_kv", [None, 2])
@pytest.mark.parametrize("rotary", [0, 8])
def test_generation(through: str, place: torch.device, heads_kv: int | None, rotary: int) -> None:
    """A prompt and then token for token give what the whole sequence gives."""
    x = torch.randn(2, 6, 64).to(place)
    module = mha.MHA(64, 4, heads_kv, causal=True, layer_idx=3, rotary_emb_dim=rotary, use_flash_attn=True).to(place).eval()
    with torch.no_grad():
        whole = module(x)
        if rotary == 0:
            close(whole, by_hand(module, x, visible(6, 6, -1, 0)))
        else:
            assert not torch.allclose(whole, by_hand(module, x, visible(6, 6, -1, 0)))
        params = mha.InferenceParams(max_seqlen=8, max_batch_size=2)
        parts = [module(x[:, :4], inference_params=params)]
        for i in (4, 5):
            params.seqlen_offset = i
            parts.append(module(x[:, i : i + 1], inference_params=params))
        close(torch.cat(parts, 1), whole)
        assert params.key_value_memory_dict[3].shape == module.allocate_inference_cache(2, 8).shape
        params.seqlen_offset = 8
        beyond = "positions reach 8" if rotary else "must hold items up to 2 and tokens up to 9"
        with pytest.raises(InvalidProblem, match=beyond):
            module(x[:, :1], inference_params=params)
        params.reset(8, 2)
        close(module(x[:, :4], inference_params=params), whole[:, :4])
        params.lengths_per_sample = torch.tensor([1, 2])
        with pytest.raises(NotSupported, match="lengths_per_sample is given"):
            module(x[:, :1], inference_params=params)


def test_cross_attention_and_convolutions(through: str, place: torch.device) -> None:
    x, other = torch.randn(2, SEQLEN, 64).to(place), torch.randn(2, 5, 64).to(place)
    module = mha.MHA(64, 4, 2, cross_attn=True, use_flash_attn=True).to(place)
    q = module.Wq(x[:, :2]).unflatten(-1, (4, 16))
    kv = module.Wkv(other).unflatten(-1, (2, 2, 16))
    true = module.out_proj(attend(q, *kv.unbind(2))[0].to(x).flatten(2))
    close(module(x, other, mixer_subset=slice(0, 2)), true)
    for heads_kv in (None, 2):
        module = mha.MHA(64, 4, heads_kv, dwconv=True, use_flash_attn=True).to(place)
        shifted = torch.cat([torch.zeros(2, 1, 64, device=place), x[:, :-1]], 1)
        before, after = module(x)[:, 1:3], module(torch.where(torch.arange(SEQLEN, device=place)[:, None] < 5, x, 0.0))[:, 1:3]
        assert not torch.allclose(before, after)  # attention is not causal, the convolution is
        convolved = [m for name, m in module.named_children() if name.startswith("dwconv")]
        for conv in convolved:  # the last tap alone: no convolution; the one before: the token before
            torch.nn.init.zeros_(conv.bias)
            torch.nn.init.zeros_(conv.weight)
            conv.weight.data[:, 0, 2] = 1.0
        close(module(x), by_hand(module, x))
        torch.nn.init.zeros_(module.Wqkv.bias)
        for conv in convolved:
            conv.weight.data[:, 0] = torch.tensor([0.0, 1.0, 0.0], device=place)
        close(module(x), by_hand(module, shifted))


def test_mha_refusals() -> None:
    x = torch.randn(1, 4, 32)
    cu = torch.tensor([0, 4], dtype=torch.int32)
    for arguments, reason in (
        ({"use_alibi": True}, "use_alibi is True and use_flash_attn is False"),
        ({"window_size": (3, 0)}, r"window_size is \(3, 0\) and use_flash_attn is False"),
        ({"cross_attn": True, "rotary_emb_dim": 8}, "positions of two sequences are not rotated"),
    ):
        with pytest.raises(NotSupported, match=reason):
            mha.MHA(32, 2, **arguments)
    with pytest.raises(InvalidProblem, match="num_heads is 4 and num_heads_kv 3"):
        mha.MHA(32, 4, 3)
    params = mha.InferenceParams(8, 1)
    for made, call, reason in (
        ({}, {"x_kv": x}, "it belongs to cross-attention"),
        ({"use_flash_attn": True}, {"key_padding_mask": cu}, "use cu_seqlens"),
        ({}, {"cu_seqlens": cu}, "cu_seqlens is given and use_flash_attn is False"),
        ({"use_flash_attn": True, "rotary_emb_dim": 8}, {"cu_seqlens": cu}, "which would cross its items"),
        ({"dwconv": True}, {"inference_params": params}, "with key_padding_mask, cu_seqlens or convolutions"),
        ({}, {"inference_params": params}, "layer_idx is None"),
    ):
        with pytest.raises(NotSupported, match=reason):
            mha.MHA(32, 2, **made)(x, **call)
    with pytest.raises(TypeError, match="unexpected keyword argument 'unknown'"):
        mha.MHA(32, 2)(x, unknown=1)


def test_cudnn_padded(through: str, place: torch.device) -> None:
    """Any order of shapes; one gradient in kv's layout, 0 where nothing counts, whatever lies there."""
    for batch, seqlen_q, seqlen_kv in ((2, 5, 9), (3, 4, 6), (2, 5, 9)):
        used = torch.tensor([4, 0, seqlen_kv][-batch:], dtype=torch.int32, device=place)
        q, kv = draw((batch, seqlen_q, 2, 16), (batch, seqlen_kv, 2, 2, 16), place=place)
        hidden = torch.arange(seqlen_kv, device=place) >= used[:, None]
        with torch.no_grad():
            kv[hidden] = float("nan")
        for causal in (False, True):
            out = attention_kvpacked_padded(q, kv, used, causal=causal, scale=0.3)
            clean = kv.masked_fill(hidden[..., None, None, None], 0.0)
            true: list[torch.Tensor] = []
            for i, n in enumerate(used.tolist()):
                seen = visible(seqlen_q, n, -1, 0 if causal else -1)
                true.append(attend(q[i : i + 1], *clean[i : i + 1, :n].unbind(2), seen, scale=0.3)[0])
            close(out, torch.cat(true))
            dout = torch.randn_like(out)
            dq, dkv = torch.autograd.grad(out, (q, kv), dout)
            wanted = torch.autograd.grad(torch.cat(true), (q, clean), dout.double())
            close(dq, wanted[0])
            close(dkv, wanted[1])
            assert dkv.stride() == kv.stride()
