"""flash-attention 3: the functions of its module `flash_attn_interface`.

Its rules: those of version 2, but lse -inf where a query sees no key, and return_attn_probs gives (out, lse). attention_chunk:
a query sees keys of its own chunk alone. pack_gqa and num_splits are hints that change no result. q, k and v in e4m3 are
multiplied so, times their descales; out is bfloat16.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from flashtile.compat.asked import Asked, longest, refuse
from flashtile.compat.descale import attend_descaled
from flashtile.compat.flash_attn_cache import Cache, Descales, Fresh, attend
from flashtile.compat.flash_attn_passes import backward_pass
from flashtile.errors import InvalidProblem
from flashtile.features.masks.chunked import Chunked
from flashtile.problem.mask import Band
from flashtile.problem.number import plain, told
from flashtile.torch.api.attention import attention
from flashtile.torch.api.layouts import attention_qkvpacked, attention_varlen
from flashtile.torch.call.lengths import given_lengths

Tensor = torch.Tensor | None


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None = None, causal: bool = False,
    qv: Tensor = None, q_descale: Tensor = None, k_descale: Tensor = None, v_descale: Tensor = None,
    window_size: Any = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """out, or (out, lse). q: (batch, seqlen_q, heads, head_dim); lse: (batch, heads, seqlen_q). v's head_dim may be another."""
    _refuse("flash_attn_func", qv, sm_margin)
    asked = Asked(softmax_scale, causal, window_size, softcap, None, deterministic, mask=chunks(attention_chunk))
    how = dict(return_lse=return_attn_probs, **asked.arguments())
    return attend_descaled(attention, (q, k, v), (q_descale, k_descale, v_descale), how)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor, softmax_scale: float | None = None, causal: bool = False, q_descale: Tensor = None,
    k_descale: Tensor = None, v_descale: Tensor = None, window_size: Any = (-1, -1), attention_chunk: int = 0,
    softcap: float = 0.0, deterministic: bool = False, num_heads_q: int | None = None, sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """As `flash_attn_func`; qkv: (batch, seqlen, 3, heads, head_dim), or with num_heads_q (batch, seqlen, heads of q, k and v,
    head_dim).
    """
    _refuse("flash_attn_qkvpacked_func", None, sm_margin)
    asked = Asked(softmax_scale, causal, window_size, softcap, None, deterministic, mask=chunks(attention_chunk))
    how = dict(return_lse=return_attn_probs, **asked.arguments())
    if qkv.dtype is torch.float8_e4m3fn:
        heads_kv = 0 if num_heads_q is None else (qkv.shape[2] - num_heads_q) // 2
        three = qkv.unbind(2) if num_heads_q is None else qkv.split((num_heads_q, heads_kv, heads_kv), 2)
        return attend_descaled(attention, tuple(three), (q_descale, k_descale, v_descale), how)
    packed = partial(attention_qkvpacked, heads_q=num_heads_q)
    return attend_descaled(lambda qkv, _, **given: packed(qkv, **given), (qkv, None), (q_descale, k_descale, v_descale), how)


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: Any, max_seqlen_k: Any, seqused_q: Tensor = None, seqused_k: Tensor = None,
    softmax_scale: float | None = None, causal: bool = False, qv: Tensor = None, q_descale: Tensor = None,
    k_descale: Tensor = None, v_descale: Tensor = None, window_size: Any = (-1, -1), attention_chunk: int = 0,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """As `flash_attn_func`, of items one after another: q (total_q, heads, head_dim), lse (heads, total_q)."""
    _refuse("flash_attn_varlen_func", qv, sm_margin)
    asked = Asked(softmax_scale, causal, window_size, softcap, None, deterministic, mask=chunks(attention_chunk))
    how = dict(
        max_seqlen_q=longest(max_seqlen_q), max_seqlen_k=longest(max_seqlen_k), seqused_q=seqused_q, seqused_k=seqused_k,
        return_lse=return_attn_probs, **asked.arguments(),
    )  # fmt: skip
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k)
    return attend_descaled(attention_varlen, tensors, (q_descale, k_descale, v_descale), how)


def _flash_attn_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_new: Tensor = None, v_new: Tensor = None, qv: Tensor = None,
    out_: Tensor = None, cu_seqlens_q: Tensor = None, cu_seqlens_k: Tensor = None, cu_seqlens_k_new: Tensor = None,
    seqused_q: Tensor = None, seqused_k: Tensor = None, max_seqlen_q: Any = None, max_seqlen_k: Any = None,
    page_table: Tensor = None, kv_batch_idx: Tensor = None, leftpad_k: Tensor = None, rotary_cos: Tensor = None,
    rotary_sin: Tensor = None, seqlens_rotary: Tensor = None, q_descale: Tensor = None, k_descale: Tensor = None,
    v_descale: Tensor = None, softmax_scale: float | None = None, causal: bool = False, window_size_left: int = -1,
    window_size_right: int = -1, attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True,
    scheduler_metadata: Tensor = None, num_splits: int = 1, pack_gqa: bool | None = None, sm_margin: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out, lse, two empty tensors), without a graph; dense, or with both cu_seqlens of items one after another."""
    name = "_flash_attn_forward"
    _refuse(name, qv, sm_margin)
    descales = q_descale, k_descale, v_descale
    cached = dict(
        k_new=k_new, v_new=v_new, cu_seqlens_k_new=cu_seqlens_k_new, page_table=page_table, kv_batch_idx=kv_batch_idx,
        leftpad_k=leftpad_k, rotary_cos=rotary_cos, rotary_sin=rotary_sin, seqlens_rotary=seqlens_rotary,
        scheduler_metadata=scheduler_metadata,
    )  # fmt: skip
    refuse(name, {f"{key} is given; flash_attn_with_kvcache is what reads a cache": value is not None
                  for key, value in cached.items()})  # fmt: skip
    _refuse_mixed(name, cu_seqlens_q, cu_seqlens_k)
    window = window_size_left, window_size_right
    asked = Asked(softmax_scale, causal, window, softcap, mask=chunks(attention_chunk))
    how: Any = dict(seqused_q=seqused_q, seqused_k=seqused_k, return_lse=True, **asked.arguments())
    with torch.no_grad():
        if cu_seqlens_q is None:
            out, lse = attend_descaled(attention, (q, k, v), descales, how)
        else:
            most = dict(max_seqlen_q=longest(max_seqlen_q), max_seqlen_k=longest(max_seqlen_k))
            out, lse = attend_descaled(attention_varlen, (q, k, v, cu_seqlens_q, cu_seqlens_k), descales, {**most, **how})
        return (out if out_ is None else out_.copy_(out)), lse, lse.new_empty(0), lse.new_empty(0)


def _flash_attn_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, softmax_lse: torch.Tensor,
    cu_seqlens_q: Tensor = None, cu_seqlens_k: Tensor = None, sequed_q: Tensor = None, sequed_k: Tensor = None,
    max_seqlen_q: Any = None, max_seqlen_k: Any = None, dq: Tensor = None, dk: Tensor = None, dv: Tensor = None,
    softmax_scale: float | None = None, is_causal: bool = False, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, deterministic: bool = False, sm_margin: int = 0,
) -> torch.Tensor:  # fmt: skip
    """sum(dout * out), float32 and as lse lies, after writing the gradients to dq, dk and dv where given."""
    _refuse("_flash_attn_backward", None, sm_margin)
    _refuse_mixed("_flash_attn_backward", cu_seqlens_q, cu_seqlens_k)
    asked = Asked(softmax_scale, is_causal, (window_size_left, window_size_right), softcap, None, deterministic)
    given = given_lengths(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=sequed_q, seqused_k=sequed_k,
        max_seqlen_q=longest(max_seqlen_q) if cu_seqlens_q is not None else None,
        max_seqlen_k=longest(max_seqlen_k) if cu_seqlens_q is not None else None,
    )  # fmt: skip
    return backward_pass(dout, (q, k, v), (out, softmax_lse), (dq, dk, dv), asked, None, given)


def flash_attn_combine(
    out_partial: torch.Tensor, lse_partial: torch.Tensor, out: Tensor = None, out_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of attention to all keys, from that to each part of them; in plain PyTorch.

    out_partial: (parts, batch, seqlen, heads, head_dim_v) or (parts, total, heads, head_dim_v), float32; lse_partial: the same
    without the last axis; parts of weight 0, such as one without keys, may hold anything. out is written to where it is given;
    else it has out_dtype, by default out_partial's.
    """
    if out_partial.shape[:-1] != lse_partial.shape:
        raise InvalidProblem(
            f"lse_partial has shape {tuple(lse_partial.shape)}; it must be {tuple(out_partial.shape[:-1])}, as out_partial but "
            "for its last axis."
        )
    lse = lse_partial.logsumexp(0)
    weight = torch.where(lse == -torch.inf, 0.0, (lse_partial - lse).exp())[..., None]
    made = (out_partial.where(weight != 0.0, 0.0) * weight).sum(0).to(out_dtype or out_partial.dtype)
    return (made if out is None else out.copy_(made)), lse


def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: Tensor = None, v: Tensor = None, qv: Tensor = None,
    rotary_cos: Tensor = None, rotary_sin: Tensor = None, cache_seqlens: Any = None, cache_batch_idx: Tensor = None,
    cache_leftpad: Tensor = None, page_table: Tensor = None, cu_seqlens_q: Tensor = None, cu_seqlens_k_new: Tensor = None,
    max_seqlen_q: int | None = None, rotary_seqlens: Tensor = None, q_descale: Tensor = None, k_descale: Tensor = None,
    v_descale: Tensor = None, softmax_scale: float | None = None, causal: bool = False, window_size: Any = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True, scheduler_metadata: Any = None,
    num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0, return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """out, or (out, lse, two empty tensors); k, v are written into the cache, in place, as version 2's function does.

    q: (batch, seqlen_q, heads, head_dim), or with cu_seqlens_q (total_q, heads, head_dim); k, v with cu_seqlens_k_new alike.
    cache_batch_idx names rows of page_table where there is one. rotary_seqlens: positions begin there, not at cache_seqlens.
    scheduler_metadata, max_seqlen_q, pack_gqa and num_splits are hints; num_splits=1 is one pass. A cache may be e4m3, beside
    q of 16 bits or e4m3, whose out is bfloat16; q_descale, k_descale, v_descale: float32 (batch, heads_kv). qv, as q but with
    head_dim_v columns, is multiplied with the values: scores are softmax_scale * (q k^T + qv v^T), by default of both widths.
    """
    _refuse("flash_attn_with_kvcache", None, sm_margin)
    cache = Cache(k_cache, v_cache, page_table, "page_table", cache_seqlens, cache_batch_idx, cache_leftpad)
    fresh = Fresh(k, v, rotary_cos, rotary_sin, rotary_interleaved, cu_seqlens_k_new, rotary_seqlens)
    asked = Asked(softmax_scale, causal, window_size, softcap, mask=chunks(attention_chunk))
    descales = Descales(q_descale, k_descale, v_descale)
    made = attend(q, cache, fresh, asked, num_splits, return_softmax_lse, cu_seqlens_q, descales, qv)
    return (*made, made[1].new_empty(0), made[1].new_empty(0)) if return_softmax_lse else made


def get_scheduler_metadata(
    batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int, headdim: int,
    cache_seqlens: torch.Tensor, *args: Any, **kwargs: Any,
) -> torch.Tensor:  # fmt: skip
    """An int32 tensor for `scheduler_metadata`, of zeros: nothing is scheduled ahead here, and nobody reads it."""
    return torch.zeros(4 * -(-batch_size // 4), dtype=torch.int32, device=cache_seqlens.device)


def _refuse_mixed(name: str, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    refuse(name, {"one of cu_seqlens_q and cu_seqlens_k is None; queries and keys must lie alike":
                  (cu_seqlens_q is None) != (cu_seqlens_k is None)})  # fmt: skip


def chunks(attention_chunk: Any) -> Any:
    """attention_chunk as one of our masks; 0 is none."""
    size = plain(attention_chunk)
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise InvalidProblem(f"attention_chunk is {told(attention_chunk)}; it must be an int from 0 on.")
    return Chunked(size) & Band(left=size - 1, right=size - 1) if size else None


def _refuse(name: str, qv: Any, sm_margin: int) -> None:
    refuse(name, {
        "qv is given; flash_attn_with_kvcache takes it": qv is not None,
        f"sm_margin is {sm_margin}; kernels use every multiprocessor": sm_margin != 0,
    })  # fmt: skip
