"""flash-attention 2: the functions of `flash_attn` and `flash_attn.flash_attn_interface`.

Its rules: positions aligned bottom-right, negative windows unbounded, softcap 0 none, lse +inf where a query sees no key.
Beyond it: fp32, softcap with dropout, gradients of lse and of ALiBi's slopes. `flash_attn_with_kvcache` and
`flash_attn_varlen_func` read a `block_table`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashtile.compat.asked import Asked, blind_rows_positive, drawn_rng_state, longest
from flashtile.compat.flash_attn_cache import attend_packed
from flashtile.compat.flash_attn_cache import flash_attn_with_kvcache as flash_attn_with_kvcache
from flashtile.compat.probabilities import dropout_signs
from flashtile.torch.api.attention import attention
from flashtile.torch.api.layouts import attention_kvpacked, attention_qkvpacked, attention_varlen


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """out, or (out, lse, S_dmask). q: (batch, seqlen_q, heads, head_dim); k, v: (batch, seqlen_k, heads_kv, head_dim).

    alibi_slopes: (heads,) or (batch, heads). lse: float32 (batch, heads, seqlen_q). S_dmask: as `dropout_signs` gives, with
    dropout; else empty.
    """
    asked = Asked(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, dropout_p)
    return answer(asked, return_attn_probs, lambda **how: attention(q, k, v, **how), (q, k))


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """As `flash_attn_func`; qkv: (batch, seqlen, 3, heads, head_dim), whose gradient is written as one."""
    asked = Asked(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, dropout_p)
    return answer(asked, return_attn_probs, lambda **how: attention_qkvpacked(qkv, **how), (qkv,))


def flash_attn_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """As `flash_attn_func`; kv: (batch, seqlen_k, 2, heads_kv, head_dim), whose gradient is written as one."""
    asked = Asked(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, dropout_p)
    return answer(asked, return_attn_probs, lambda **how: attention_kvpacked(q, kv, **how), (q, kv))


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: Any, max_seqlen_k: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """As `flash_attn_func`, of items one after another: q (total_q, heads, head_dim), lse (heads, total_q).

    block_table: int32 (batch, columns), of pages k, v (pages, page_size, heads_kv, head_dim); cu_seqlens_k says lengths alone.
    """
    asked = Asked(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, dropout_p)
    most = (max_seqlen_q, max_seqlen_k)
    return answer_varlen(asked, return_attn_probs, (q, k, v), (cu_seqlens_q, cu_seqlens_k), most, block_table)


def answer_varlen(
    asked: Asked, return_attn_probs: bool, tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    starts: tuple[torch.Tensor, torch.Tensor], lengths: tuple[Any, Any], block_table: torch.Tensor | None,
    sink: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """What `flash_attn_varlen_func` returns. tensors: q, k, v; starts: their cu_seqlens; lengths: their longest items."""
    if block_table is not None:
        out, lse = attend_packed(tensors, starts, block_table, asked, "block_table", sink=sink)
        return (out, blind_rows_positive(lse), out.new_empty(0)) if return_attn_probs else out
    most = (longest(lengths[0]), longest(lengths[1]))
    return answer(
        asked, return_attn_probs,
        lambda **how: attention_varlen(*tensors, *starts, max_seqlen_q=most[0], max_seqlen_k=most[1], sink=sink, **how),
        tensors[:2], starts, most,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: Any, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """As `flash_attn_varlen_func`; qkv: (total, 3, heads, head_dim)."""
    asked = Asked(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, dropout_p)
    most = longest(max_seqlen)
    return answer(
        asked, return_attn_probs, lambda **how: attention_qkvpacked(qkv, cu_seqlens=cu_seqlens, max_seqlen=most, **how), (qkv,),
        (cu_seqlens, cu_seqlens), (most, most),
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: Any,
    max_seqlen_k: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """As `flash_attn_varlen_func`; kv: (total_k, 2, heads_kv, head_dim)."""
    asked = Asked(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, dropout_p)
    most = (longest(max_seqlen_q), longest(max_seqlen_k))
    return answer(
        asked, return_attn_probs,
        lambda **how: attention_kvpacked(
            q, kv, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=most[0], max_seqlen_k=most[1], **how
        ), (q, kv), (cu_seqlens_q, cu_seqlens_k), most,
    )  # fmt: skip


def answer(
    asked: Asked, probabilities: bool, run: Callable[..., Any], packs: tuple[torch.Tensor, ...], cu_seqlens: Any = None,
    longest: Any = None,
) -> Any:  # fmt: skip
    """out of `run`, or (out, lse, S_dmask). packs: qkv, or q and kv, or q and k; the others as in `dropout_signs`."""
    if not probabilities:
        return run(**asked.arguments())
    rng_state = drawn_rng_state(packs[0].device) if asked.dropout_p else None
    out, lse = run(return_lse=True, **asked.arguments(rng_state))
    signs = packs[0].new_empty(0)
    if rng_state is not None:
        signs = dropout_signs(*_q_and_k(packs), asked, rng_state, cu_seqlens, longest)
    return out, blind_rows_positive(lse), signs


def _q_and_k(packs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    if len(packs) == 1:
        return packs[0].select(-3, 0), packs[0].select(-3, 1)
    q, k = packs
    return q, k if k.dim() == q.dim() else k.select(-3, 0)
