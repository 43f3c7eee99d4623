"""Attention as users of cuDNN's frontend asked for it: padded keys and values in one tensor, whatever its lengths.

One call in the place of a graph that is built, cached by shape and fed with stacked gradients.
"""

from __future__ import annotations

import torch

from flashtile.compat.asked import options
from flashtile.torch.api.layouts import attention_kvpacked


def attention_kvpacked_padded(
    q: torch.Tensor, kv: torch.Tensor, seqlens_kv: torch.Tensor, *, causal: bool = False, scale: float | None = None,
    deterministic: bool = False,
) -> torch.Tensor:  # fmt: skip
    """out (batch, seqlen_q, heads, head_dim); the gradient of kv is one tensor, laid out as kv, 0 where keys do not count.

    q: (batch, seqlen_q, heads, head_dim); kv: (batch, seqlen_kv, 2, heads_kv, head_dim), of which the first seqlens_kv[b] of
    item b count, int32 (batch,); the others are never looked at. Nothing is concatenated, and nothing is kept from one call
    for another but its plan. causal: the last query sees the last key that counts.
    """
    return attention_kvpacked(q, kv, seqused_k=seqlens_kv, causal=causal, scale=scale, options=options(deterministic))
