"""`attention` of the Triton tutorial "Fused Attention", and of the code that was copied from it."""

from __future__ import annotations

import torch

from flashtile.compat.asked import options, top_left
from flashtile.torch.api.attention import attention as ours


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, sm_scale: float, warp_specialize: bool = True
) -> torch.Tensor:
    """out (batch, heads, seqlen_q, head_dim), laid out as q, k and v are; causal order is counted from the first key.

    warp_specialize: a hint that changes no result; kernels choose by what was measured.
    """
    mask = top_left(causal, q.shape[2], k.shape[2])
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return ours(q, k, v, mask=mask, scale=sm_scale, options=options()).transpose(1, 2)
