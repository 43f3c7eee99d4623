"""flash-attention 1: the functions of its `flash_attn.flash_attn_interface`, and the modules of `flash_attn.flash_attention`.

Its rules: tokens of all items one after another, causal order counted from the first key, lse (batch, heads, max_seqlen_q)
with +inf where there is no query or it sees no key. Beyond it: every head_dim, fp32, bf16.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from flashtile.compat.asked import Asked, blind_rows_positive, longest, refuse
from flashtile.compat.bert_padding import pad_input
from flashtile.compat.bert_padding import unpad_input as unpad_input_2
from flashtile.compat.flash_attn import answer
from flashtile.errors import InvalidProblem
from flashtile.features.masks.top_left import TopLeft
from flashtile.torch.api.layouts import attention_kvpacked, attention_qkvpacked, attention_varlen


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """`flash_attn.bert_padding.unpad_input` of version 1: (tokens, indices, cu_seqlens, max_seqlen)."""
    return unpad_input_2(hidden_states, attention_mask)[:4]


def flash_attn_unpadded_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: Any, max_seqlen_k: Any, dropout_p: float, softmax_scale: float | None = None, causal: bool = False,
    return_attn_probs: bool = False, deterministic: bool = False,
) -> Any:  # fmt: skip
    """out, or (out, lse, S_dmask). q: (total_q, heads, head_dim); k, v: (total_k, heads, head_dim)."""
    asked = _asked(dropout_p, softmax_scale, causal, deterministic, (cu_seqlens_q, cu_seqlens_k))
    most = (longest(max_seqlen_q), longest(max_seqlen_k))
    made = answer(
        asked, return_attn_probs,
        lambda **how: attention_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=most[0], max_seqlen_k=most[1], **how
        ), (q, k), (cu_seqlens_q, cu_seqlens_k), most,
    )  # fmt: skip
    return by_item(made, cu_seqlens_q, most[0]) if return_attn_probs else made


def flash_attn_unpadded_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: Any,
    max_seqlen_k: Any, dropout_p: float, softmax_scale: float | None = None, causal: bool = False,
    return_attn_probs: bool = False, deterministic: bool = False,
) -> Any:  # fmt: skip
    """As `flash_attn_unpadded_func`; kv: (total_k, 2, heads, head_dim)."""
    asked = _asked(dropout_p, softmax_scale, causal, deterministic, (cu_seqlens_q, cu_seqlens_k))
    most = (longest(max_seqlen_q), longest(max_seqlen_k))
    made = answer(
        asked, return_attn_probs,
        lambda **how: attention_kvpacked(
            q, kv, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=most[0], max_seqlen_k=most[1], **how
        ), (q, kv), (cu_seqlens_q, cu_seqlens_k), most,
    )  # fmt: skip
    return by_item(made, cu_seqlens_q, most[0]) if return_attn_probs else made


def flash_attn_unpadded_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: Any, dropout_p: float, softmax_scale: float | None = None,
    causal: bool = False, return_attn_probs: bool = False, deterministic: bool = False,
) -> Any:  # fmt: skip
    """As `flash_attn_unpadded_func`; qkv: (total, 3, heads, head_dim)."""
    asked, most = Asked(softmax_scale, causal, deterministic=deterministic, dropout_p=dropout_p), longest(max_seqlen)
    made = answer(
        asked, return_attn_probs, lambda **how: attention_qkvpacked(qkv, cu_seqlens=cu_seqlens, max_seqlen=most, **how), (qkv,),
        (cu_seqlens, cu_seqlens), (most, most),
    )  # fmt: skip
    return by_item(made, cu_seqlens, most) if return_attn_probs else made


def flash_attn_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, dropout_p: float, max_s: Any, softmax_scale: float | None = None,
    causal: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_unpadded_qkvpacked_func` with other places for its arguments."""
    return flash_attn_unpadded_qkvpacked_func(qkv, cu_seqlens, max_s, dropout_p, softmax_scale, causal, return_attn_probs)


def flash_attn_unpadded_qkvpacked_split_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen0: Any, max_seqlen1: Any, batch_size0: int, dropout_p: float,
    softmax_scale: float | None = None, causal: bool = False, return_attn_probs: bool = False, deterministic: bool = False,
) -> Any:  # fmt: skip
    """out, or (out, lse, S_dmask0, S_dmask1): the first batch_size0 items, no longer than max_seqlen0, run on the current
    stream and the others on one of their own, at the same time; so do their backwards. The host does not wait.
    """
    asked = Asked(softmax_scale, causal, deterministic=deterministic, dropout_p=dropout_p)
    first = cu_seqlens[: batch_size0 + 1]
    # The other items begin with one that holds the first ones' tokens, and uses none of them.
    others = torch.cat([cu_seqlens[:1], cu_seqlens[batch_size0:]])
    used = others.diff()
    used[0] = 0
    most = (longest(max_seqlen0), longest(max_seqlen1))

    def run(cu: torch.Tensor, seqused: torch.Tensor | None, most: Any) -> Any:
        how: Any = dict(cu_seqlens=cu, seqused=seqused, max_seqlen=most if seqused is None else None)
        return answer(asked, return_attn_probs, lambda **more: attention_qkvpacked(qkv, **how, **more), (qkv,), (cu, cu), most)

    if return_attn_probs and dropout_p:
        refuse(
            "flash_attn_unpadded_qkvpacked_split_func", {"S_dmask is asked for, and dropout; it is made of whole batches": True}
        )
    side = torch.cuda.Stream(qkv.device) if qkv.is_cuda else None
    if side is None:
        later = run(others, used, most[1])
        made = run(first, None, most[0])
    else:
        current = torch.cuda.current_stream(qkv.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            later = run(others, used, most[1])
        made = run(first, None, most[0])
        current.wait_stream(side)
        for tensor in (qkv, others, used):
            tensor.record_stream(side)
        for tensor in later if return_attn_probs else (later,):
            tensor.record_stream(current)
    if not return_attn_probs:
        return made + later  # each is 0 where the other one's tokens are
    lse = torch.minimum(made[1], later[1])
    whole = by_item((made[0] + later[0], lse, made[2]), cu_seqlens, max(most))
    return (*whole, later[2])


def _asked(dropout_p: float, scale: Any, causal: bool, deterministic: bool, cu_seqlens: tuple[Any, Any]) -> Asked:
    alike = cu_seqlens[0] is cu_seqlens[1]  # else nobody on the host knows
    mask = TopLeft() if causal and not alike else None
    return Asked(scale, causal and alike, deterministic=deterministic, dropout_p=dropout_p, mask=mask)


def by_item(made: tuple[torch.Tensor, ...], cu_seqlens: torch.Tensor, most: int) -> tuple[torch.Tensor, ...]:
    """The same with lse (batch, heads, max_seqlen), from (heads, total)."""
    row = torch.arange(most, device=cu_seqlens.device)
    place = cu_seqlens[:-1, None] + row
    within = row < cu_seqlens.diff()[:, None]
    padded = F.pad(made[1], (0, 1), value=-torch.inf)
    lse = padded[:, place.where(within, padded.shape[1] - 1)].transpose(0, 1)
    return made[0], blind_rows_positive(lse), *made[2:]


class FlashAttention(torch.nn.Module):
    """`flash_attn.flash_attention.FlashAttention`: self-attention of packed q, k and v; dropout in training alone."""

    def __init__(self, softmax_scale: float | None = None, attention_dropout: float = 0.0):
        super().__init__()
        self.softmax_scale, self.dropout_p = softmax_scale, attention_dropout

    def forward(
        self, qkv: torch.Tensor, key_padding_mask: torch.Tensor | None = None, causal: bool = False,
        cu_seqlens: torch.Tensor | None = None, max_s: Any = None, need_weights: bool = False,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """(out, None). qkv: (batch, seqlen, 3, heads, head_dim), or with cu_seqlens (total, 3, heads, head_dim).

        key_padding_mask: (batch, seqlen), True for a token; the others take no part, and out is 0 there.
        """
        refuse_weights(need_weights)
        p = self.dropout_p if self.training else 0.0
        if cu_seqlens is not None:
            return flash_attn_unpadded_qkvpacked_func(qkv, cu_seqlens, max_s, p, self.softmax_scale, causal), None
        if key_padding_mask is None:
            return attention_qkvpacked(qkv, **Asked(self.softmax_scale, causal, dropout_p=p).arguments()), None
        tokens, indices, cu_seqlens, max_s = unpad_input(qkv, key_padding_mask)
        out = flash_attn_unpadded_qkvpacked_func(tokens, cu_seqlens, max_s, p, self.softmax_scale, causal)
        return pad_input(out, indices, *qkv.shape[:2]), None


class FlashMHA(torch.nn.Module):
    """`flash_attn.flash_attention.FlashMHA`: one projection to q, k and v, `FlashAttention`, one projection out."""

    def __init__(
        self, embed_dim: int, num_heads: int, bias: bool = True, batch_first: bool = True, attention_dropout: float = 0.0,
        causal: bool = False, device: Any = None, dtype: Any = None,
    ):  # fmt: skip
        super().__init__()
        refuse("FlashMHA", {"batch_first is False; batches come first": not batch_first})
        self.embed_dim, self.num_heads, self.causal = embed_dim, num_heads, causal
        self.head_dim = head_dim_of(embed_dim, num_heads)
        self.Wqkv = torch.nn.Linear(embed_dim, 3 * embed_dim, bias, device, dtype)
        self.inner_attn = FlashAttention(attention_dropout=attention_dropout)
        self.out_proj = torch.nn.Linear(embed_dim, embed_dim, bias, device, dtype)

    def forward(
        self, x: torch.Tensor, key_padding_mask: torch.Tensor | None = None, need_weights: bool = False
    ) -> tuple[torch.Tensor, None]:
        """(out, None); x: (batch, seqlen, embed_dim)."""
        qkv = self.Wqkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))
        out, weights = self.inner_attn(qkv, key_padding_mask, self.causal, need_weights=need_weights)
        return self.out_proj(out.flatten(-2)), weights


def head_dim_of(embed_dim: int, num_heads: int) -> int:
    """embed_dim / num_heads. Raises InvalidProblem where it is no whole number."""
    if embed_dim % num_heads:
        raise InvalidProblem(f"embed_dim is {embed_dim} and num_heads {num_heads}; it must be a multiple of it.")
    return embed_dim // num_heads


def refuse_weights(need_weights: bool) -> None:
    """Raise NotSupported where the attention's weights are wanted."""
    refuse("need_weights", {"need_weights is True; no weights are stored": need_weights})
