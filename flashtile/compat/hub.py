"""What a kernel of a hub offers transformers: flash-attention 2's functions, which here take a sink per head too."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.compat.asked import Asked
from flashtile.compat.flash_attn import answer, answer_varlen
from flashtile.torch.api.attention import attention


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, s_aux: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """As `flash_attn.flash_attn_func`. s_aux: (heads,), logits that join the softmax, with their gradient."""
    asked = Asked(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, dropout_p)
    return answer(asked, return_attn_probs, lambda **how: attention(q, k, v, sink=s_aux, **how), (q, k))


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: Any, max_seqlen_k: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: torch.Tensor | None = None, s_aux: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """As `flash_attn.flash_attn_varlen_func`. s_aux: as in `flash_attn_func`."""
    asked = Asked(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, dropout_p)
    most = (max_seqlen_q, max_seqlen_k)
    return answer_varlen(asked, return_attn_probs, (q, k, v), (cu_seqlens_q, cu_seqlens_k), most, block_table, s_aux)
