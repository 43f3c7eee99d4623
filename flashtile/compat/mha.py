"""flash-attention 2's modules: `flash_attn.modules.mha`, and `InferenceParams` of `flash_attn.utils.generation`.

Beyond them: fp32 and the CPU. In generation all items of the cache have one length: `lengths_per_sample` is refused, and
`flashtile.attention_cached` takes a length for each item.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from flashtile.compat.asked import Asked, options, refuse
from flashtile.compat.flash_attn import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flashtile.compat.flash_attn_1 import head_dim_of
from flashtile.compat.rotary import RotaryEmbedding
from flashtile.errors import InvalidProblem
from flashtile.features.masks.key_padding import KeyPadding
from flashtile.features.masks.stored import Stored
from flashtile.problem.dropout import Dropout
from flashtile.torch.api.layouts import attention_kvpacked, attention_qkvpacked
from flashtile.torch.execute.inference_safe import lasting


@dataclass
class InferenceParams:
    """How far a generation is, and what its layers have cached: kv (batch, max_seqlen, 2, heads_kv, head_dim) by layer_idx."""

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[Any, torch.Tensor] = field(default_factory=dict)
    lengths_per_sample: torch.Tensor | None = None

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        """Begin another generation in the same memory."""
        self.max_seqlen, self.max_batch_size, self.seqlen_offset = max_seqlen, max_batch_size, 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()


def get_alibi_slopes(nheads: int) -> list[float]:
    """ALiBi's slopes: a geometric sequence for a power of two, else that of the one below and every other of the one above."""
    whole = 2 ** math.floor(math.log2(nheads))
    slopes = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    return slopes + [2 ** (-4 * (2 * i + 1) / whole) for i in range(nheads - whole)]


class _Flash(torch.nn.Module):
    alibi_slopes: torch.Tensor | None

    def __init__(self, softmax_scale: Any, p: float, window_size: Any, alibi_slopes: torch.Tensor | None, deterministic: bool):
        super().__init__()
        self.softmax_scale, self.window_size, self.deterministic = softmax_scale, window_size, deterministic
        self.drop = torch.nn.Dropout(p)
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)

    def arguments(self, causal: bool) -> dict[str, Any]:
        """The tail of arguments of flash-attention's functions."""
        return dict(
            dropout_p=self.drop.p if self.training else 0.0, softmax_scale=self.softmax_scale, causal=causal,
            window_size=self.window_size, alibi_slopes=None if self.alibi_slopes is None else self.alibi_slopes.float(),
            deterministic=self.deterministic,
        )  # fmt: skip


class FlashSelfAttention(_Flash):
    """Attention of packed q, k and v; dropout in training alone."""

    def __init__(
        self, causal: bool = False, softmax_scale: float | None = None, attention_dropout: float = 0.0,
        window_size: Any = (-1, -1), alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    ):  # fmt: skip
        super().__init__(softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic)
        self.causal = causal

    def forward(
        self, qkv: torch.Tensor, causal: bool | None = None, cu_seqlens: torch.Tensor | None = None, max_seqlen: Any = None
    ) -> torch.Tensor:
        """qkv: (batch, seqlen, 3, heads, head_dim), or with cu_seqlens (total, 3, heads, head_dim). causal overrides."""
        how = self.arguments(self.causal if causal is None else causal)
        if cu_seqlens is None:
            return flash_attn_qkvpacked_func(qkv, **how)
        return flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, **how)


class FlashCrossAttention(_Flash):
    """Attention of q and packed k and v; its constructor has alibi_slopes before window_size, unlike `FlashSelfAttention`."""

    def __init__(
        self, causal: bool = False, softmax_scale: float | None = None, attention_dropout: float = 0.0,
        alibi_slopes: torch.Tensor | None = None, window_size: Any = (-1, -1), deterministic: bool = False,
    ):  # fmt: skip
        super().__init__(softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic)
        self.causal = causal

    def forward(
        self, q: torch.Tensor, kv: torch.Tensor, causal: bool | None = None, cu_seqlens: torch.Tensor | None = None,
        max_seqlen: Any = None, cu_seqlens_k: torch.Tensor | None = None, max_seqlen_k: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        """q: (batch, seqlen_q, heads, head_dim); kv: (batch, seqlen_k, 2, heads_kv, head_dim); (total, ...) with cu_seqlens."""
        how = self.arguments(self.causal if causal is None else causal)
        if cu_seqlens is None:
            return flash_attn_kvpacked_func(q, kv, **how)
        if cu_seqlens_k is None:
            raise InvalidProblem("cu_seqlens is given and cu_seqlens_k is None; it must be given too.")
        return flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, **how)


class SelfAttention(torch.nn.Module):
    """Attention of packed q, k and v with padded keys; a query that sees no key gives 0."""

    def __init__(self, causal: bool = False, softmax_scale: float | None = None, attention_dropout: float = 0.0):
        super().__init__()
        self.causal, self.softmax_scale, self.drop = causal, softmax_scale, torch.nn.Dropout(attention_dropout)

    def forward(
        self, qkv: torch.Tensor, causal: bool | None = None, key_padding_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """qkv: (batch, seqlen, 3, heads, head_dim); key_padding_mask: bool (batch, seqlen), True for a key that counts."""
        mask = None if key_padding_mask is None else KeyPadding(key_padding_mask)
        p = self.drop.p if self.training else 0.0
        asked = Asked(self.softmax_scale, self.causal if causal is None else causal, dropout_p=p, mask=mask)
        return attention_qkvpacked(qkv, **asked.arguments())


class CrossAttention(SelfAttention):
    """Attention of q and packed k and v with padded keys; a query that sees no key gives 0."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, q: torch.Tensor, kv: torch.Tensor, causal: bool | None = None, key_padding_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """q: (batch, seqlen_q, heads, head_dim); kv: (batch, seqlen_k, 2, heads_kv, head_dim); key_padding_mask: bool (batch,
        seqlen_k). A causal order aligns the last query with as many keys as count.
        """
        causal = self.causal if causal is None else causal
        mask: Any = None
        if key_padding_mask is not None:
            mask = KeyPadding(key_padding_mask)
            if causal:
                key, row = (torch.arange(n, device=q.device) for n in (kv.shape[1], q.shape[1]))
                last = row + key_padding_mask.sum(-1, keepdim=True) - q.shape[1]
                mask = mask & Stored((key <= last[..., None])[:, None])
        p = self.drop.p if self.training else 0.0
        how: Any = dict(scale=self.softmax_scale, dropout=Dropout(p) if p else None, options=options())
        return attention_kvpacked(q, kv, causal=causal and key_padding_mask is None, mask=mask, **how)


class MHA(torch.nn.Module):
    """Multi-head attention with its projections, as `flash_attn.modules.mha.MHA`: the same arguments and parameter names.

    fused_bias_fc changes nothing here.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, num_heads_kv: int | None = None, cross_attn: bool = False,
        qkv_proj_bias: bool = True, out_proj_bias: bool = True, dropout: float = 0.0, softmax_scale: float | None = None,
        causal: bool = False, layer_idx: int | None = None, dwconv: bool = False, rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0, rotary_emb_scale_base: float | None = None, rotary_emb_interleaved: bool = False,
        use_alibi: bool = False, window_size: Any = (-1, -1), fused_bias_fc: bool = False, use_flash_attn: bool = False,
        return_residual: bool = False, checkpointing: bool = False, device: Any = None, dtype: Any = None,
    ):  # fmt: skip
        super().__init__()
        refuse("MHA", {
            "use_alibi is True and use_flash_attn is False; it goes with flash attention": use_alibi and not use_flash_attn,
            f"window_size is {window_size} and use_flash_attn is False; it goes with flash attention":
                tuple(window_size) != (-1, -1) and not use_flash_attn,
            "cross_attn is True and rotary_emb_dim is not 0; positions of two sequences are not rotated":
                cross_attn and rotary_emb_dim > 0,
        })  # fmt: skip
        self.embed_dim, self.num_heads, self.cross_attn, self.causal = embed_dim, num_heads, cross_attn, causal
        self.num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        self.layer_idx, self.dwconv, self.rotary_emb_dim = layer_idx, dwconv, rotary_emb_dim
        self.use_flash_attn, self.return_residual, self.checkpointing = use_flash_attn, return_residual, checkpointing
        self.head_dim = head_dim_of(embed_dim, num_heads)
        if num_heads % self.num_heads_kv:
            raise InvalidProblem(f"num_heads is {num_heads} and num_heads_kv {self.num_heads_kv}; it must be a multiple of it.")
        self.grouped = cross_attn or self.num_heads_kv != num_heads
        kv_dim = 2 * self.head_dim * self.num_heads_kv
        make: Any = dict(device=device, dtype=dtype)
        if rotary_emb_dim > 0:
            self.rotary_emb = RotaryEmbedding(
                rotary_emb_dim, rotary_emb_base, rotary_emb_interleaved, rotary_emb_scale_base, device
            )
        if cross_attn:
            self.Wq = torch.nn.Linear(embed_dim, embed_dim, qkv_proj_bias, **make)
            self.Wkv = torch.nn.Linear(embed_dim, kv_dim, qkv_proj_bias, **make)
        else:
            self.Wqkv = torch.nn.Linear(embed_dim, embed_dim + kv_dim, qkv_proj_bias, **make)
        if dwconv:
            names = {"dwconv_q": embed_dim, "dwconv_kv": kv_dim} if self.grouped else {"dwconv_qkv": embed_dim + kv_dim}
            for name, size in names.items():
                self.add_module(name, torch.nn.Conv1d(size, size, 3, padding=2, groups=size, **make))
        inner: Any = dict(causal=causal, softmax_scale=softmax_scale, attention_dropout=dropout)
        if use_flash_attn:
            slopes = torch.tensor(get_alibi_slopes(num_heads), device=device) if use_alibi else None
            inner |= dict(alibi_slopes=slopes, window_size=window_size)
        self.inner_attn = (FlashSelfAttention if use_flash_attn else SelfAttention)(**inner)
        self.inner_cross_attn = (FlashCrossAttention if use_flash_attn else CrossAttention)(**inner)
        self.out_proj = torch.nn.Linear(embed_dim, embed_dim, out_proj_bias, **make)

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An empty cache, (batch_size, max_seqlen, 2, heads_kv, head_dim)."""
        weight = self.out_proj.weight
        size = (batch_size, max_seqlen, 2, self.num_heads_kv, self.head_dim)
        return torch.empty(size, dtype=weight.dtype if dtype is None else dtype, device=weight.device)

    def forward(
        self, x: torch.Tensor, x_kv: torch.Tensor | None = None, key_padding_mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None, max_seqlen: Any = None, mixer_subset: Any = None,
        inference_params: InferenceParams | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """out, or with return_residual (out, x). x: (batch, seqlen, embed_dim), or with cu_seqlens (total, embed_dim).

        x_kv: where keys and values come from, in cross-attention, by default x; mixer_subset: the index of those queries of x
        that are asked there. key_padding_mask: without flash attention, bool (batch, seqlen), True for a key that counts.
        kwargs go to the inner attention.
        """
        self._refuse(x_kv, key_padding_mask, cu_seqlens, mixer_subset, inference_params)
        how = (
            dict(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
            if self.use_flash_attn
            else dict(key_padding_mask=key_padding_mask)
        )
        offset, most = (0, None) if inference_params is None else (inference_params.seqlen_offset, inference_params.max_seqlen)
        if self.grouped:
            q, kv = self._projected(x, x_kv, mixer_subset)
            if self.rotary_emb_dim > 0:
                q, kv = self.rotary_emb(q, kv, seqlen_offset=offset, max_seqlen=most)
            packs: tuple[torch.Tensor, ...] = (q, kv)
        else:
            qkv = self._convolved("dwconv_qkv", self.Wqkv(x)).unflatten(-1, (3, self.num_heads, self.head_dim))
            if self.rotary_emb_dim > 0:
                qkv = self.rotary_emb(qkv, seqlen_offset=offset, max_seqlen=most)
            packs = (qkv,)
        if inference_params is not None:
            q, kv = (packs[0], packs[-1]) if self.grouped else (packs[0][:, :, 0], packs[0][:, :, 1:])
            context = self.inner_cross_attn(q, self._cached(kv, inference_params), **kwargs)
        else:
            inner = self.inner_cross_attn if self.grouped else self.inner_attn
            if self.use_flash_attn and self.grouped and not self.cross_attn and cu_seqlens is not None:
                how |= dict(cu_seqlens_k=cu_seqlens, max_seqlen_k=max_seqlen)
            run: Any = (lambda *a, **k: checkpoint(inner, *a, use_reentrant=False, **k)) if self.checkpointing else inner
            context = run(*packs, **{**how, **kwargs})
        out = self.out_proj(context.flatten(-2))
        return (out, x) if self.return_residual else out

    def _refuse(self, x_kv: Any, padding: Any, cu_seqlens: Any, subset: Any, inference: InferenceParams | None) -> None:
        refuse("MHA", {
            "x_kv or mixer_subset is given; it belongs to cross-attention":
                not self.cross_attn and (x_kv is not None or subset is not None),
            "key_padding_mask is given and use_flash_attn is True; use cu_seqlens": padding is not None and self.use_flash_attn,
            "cu_seqlens is given and use_flash_attn is False": cu_seqlens is not None and not self.use_flash_attn,
            "cu_seqlens is given, with convolutions or rotary positions, which would cross its items":
                cu_seqlens is not None and (self.dwconv or self.rotary_emb_dim > 0),
            "inference_params is given, with key_padding_mask, cu_seqlens or convolutions":
                inference is not None and (padding is not None or cu_seqlens is not None or self.dwconv),
            "lengths_per_sample is given; MHA's cache has one length for all items, use flashtile.attention_cached":
                inference is not None and inference.lengths_per_sample is not None,
            "layer_idx is None; the cache is kept by it": inference is not None and self.layer_idx is None,
        })  # fmt: skip

    def _projected(self, x: torch.Tensor, x_kv: torch.Tensor | None, subset: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """q (..., heads, head_dim) and kv (..., 2, heads_kv, head_dim)."""
        if self.cross_attn:
            q, kv = self.Wq(x if subset is None else x[:, subset]), self.Wkv(x if x_kv is None else x_kv)
        else:
            qkv = self.Wqkv(x)
            q, kv = qkv[..., : self.embed_dim], qkv[..., self.embed_dim :]  # not split, whose parts nothing may write over
        q, kv = self._convolved("dwconv_q", q), self._convolved("dwconv_kv", kv)
        heads, heads_kv = (self.num_heads, self.head_dim), (2, self.num_heads_kv, self.head_dim)
        return q.unflatten(-1, heads), kv.unflatten(-1, heads_kv)

    def _convolved(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Each channel with its two predecessors."""
        return getattr(self, name)(x.transpose(1, 2))[..., :-2].transpose(1, 2).contiguous() if self.dwconv else x

    def _cached(self, kv: torch.Tensor, inference: InferenceParams) -> torch.Tensor:
        """All keys and values so far: kv is written behind those of the cache, which is made where there is none."""
        cache = inference.key_value_memory_dict.get(self.layer_idx)
        if cache is None:
            size = (inference.max_batch_size, inference.max_seqlen, *kv.shape[2:])
            cache = inference.key_value_memory_dict[self.layer_idx] = lasting(kv.new_empty)(size)
        first, start = inference.batch_size_offset, inference.seqlen_offset
        items, end = slice(first, first + kv.shape[0]), start + kv.shape[1]
        if items.stop > cache.shape[0] or end > cache.shape[1]:
            raise InvalidProblem(f"the cache has shape {tuple(cache.shape)}; it must hold items up to {items.stop} and tokens "
                                 f"up to {end}.")  # fmt: skip
        cache[items, start:end] = kv
        return cache[items, :end]
