"""flash-attention's rotary embeddings: `flash_attn.layers.rotary`, `flash_attn.ops.triton.rotary`, and `rotary_emb`.

Where those leave a token beyond the tables as it is, these raise, or give NaN (see `flashtile.ops.rotary`).
"""

from __future__ import annotations

from typing import Any

import torch

from flashtile import ops


def apply_rotary(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None, max_seqlen: int | None = None, interleaved: bool = False, inplace: bool = False,
    conjugate: bool = False,
) -> torch.Tensor:  # fmt: skip
    """`flash_attn.ops.triton.rotary.apply_rotary`; max_seqlen is not needed."""
    options = dict(interleaved=interleaved, conjugate=conjugate, offset=seqlen_offsets, cu_seqlens=cu_seqlens, inplace=inplace)
    return ops.rotary(x, None, cos, sin, **options)  # pyright: ignore[reportArgumentType]


def apply_rotary_emb(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False, inplace: bool = False,
    seqlen_offsets: int | torch.Tensor = 0, cu_seqlens: torch.Tensor | None = None, max_seqlen: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """`flash_attn.layers.rotary.apply_rotary_emb`."""
    return apply_rotary(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cos_k: torch.Tensor | None = None,
    sin_k: torch.Tensor | None = None, interleaved: bool = False, seqlen_offsets: int | torch.Tensor = 0,
    num_heads_q: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """qkv (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, heads of q, k and v, head_dim); q and k are written over."""
    if qkv.dim() == 5:
        heads = keys = qkv.shape[3]
        flat = qkv.flatten(2, 3)
    else:
        assert num_heads_q is not None
        heads, keys = num_heads_q, (qkv.shape[2] - num_heads_q) // 2
        flat = qkv
    options: dict[str, Any] = dict(interleaved=interleaved, offset=seqlen_offsets, inplace=True)
    if cos_k is None:
        ops.rotary(flat[:, :, : heads + keys], None, cos, sin, **options)
    else:
        ops.rotary(flat[:, :, :heads], None, cos, sin, **options)
        ops.rotary(flat[:, :, heads : heads + keys], None, cos_k, sin if sin_k is None else sin_k, **options)
    return qkv


def apply_rotary_emb_kv_(
    kv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False, seqlen_offsets: int | torch.Tensor = 0
) -> torch.Tensor:
    """kv (batch, seqlen, 2, heads, head_dim); k is written over."""
    ops.rotary(kv[:, :, 0], None, cos, sin, interleaved=interleaved, offset=seqlen_offsets, inplace=True)
    return kv


def rotary_emb_apply_rotary(
    x1: torch.Tensor, x2: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out1: torch.Tensor, out2: torch.Tensor, conj: bool
) -> None:
    """`rotary_emb.apply_rotary` of version 1: halves that broadcast with cos and sin; out1 and out2 may be x1 and x2."""
    first, second, c, s = (t.float() for t in (x1, x2, cos, sin))
    s = -s if conj else s
    turned = first * c - second * s, first * s + second * c
    out1.copy_(turned[0])
    out2.copy_(turned[1])
