"""ring-flash-attn 0.1.8: its functions of shards of a sequence, by `flashtile.distributed`.

Its rules: `ring_` has contiguous shards, `zigzag_ring_` a rank's chunk and its mirror, `stripe_` every n-th token; the latter
two are causal alone. `ring_` and `zigzag_ring_` of varlen share out each document by itself, so that cu_seqlens are of a
rank's own tokens; `llama3_` shares out the packed stream. Beyond it: fp32, sums and merges in float32 whatever the inputs,
gradients of lse, windows and ALiBi where documents are not shared out one by one, and refusals that all ranks make together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashtile.compat.asked import Asked, longest, refuse, window_of
from flashtile.errors import InvalidProblem
from flashtile.features.masks.document import Document
from flashtile.torch.context.agree import refused_together
from flashtile.torch.context.attention import attention
from flashtile.torch.context.context import Context
from flashtile.torch.context.shards import check_cu_seqlens
from flashtile.torch.context.varlen import attention_of_items

Functions = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]


def _answer(made: Any, return_attn_probs: bool) -> Any:
    return (*made, None) if return_attn_probs else made


def _family(name: str, layout: Any) -> Functions:
    """The functions of q, k, v apart, of k and v packed, and of all packed, of shards (batch, seqlen / ranks, ...)."""

    def apart(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
        causal: bool = False, window_size: Any = (-1, -1), alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False, return_attn_probs: bool = False, group: Any = None,
    ) -> Any:  # fmt: skip
        """out, or (out, lse, None), of shards. group: a process group; None for all ranks."""
        context = Context(group, "ring", layout)
        with refused_together(context):
            _check_causal(name, layout, causal)
            how = Asked(softmax_scale, causal, window_size, 0.0, alibi_slopes, deterministic, dropout_p).arguments()
        made = attention(q, k, v, context=context, return_lse=return_attn_probs, **how)
        return _answer(made, return_attn_probs)

    def kvpacked(q: torch.Tensor, kv: torch.Tensor, *rest: Any, **named: Any) -> Any:
        """The same; kv: (batch, seqlen / ranks, 2, heads_kv, head_dim)."""
        return apart(q, kv[:, :, 0], kv[:, :, 1], *rest, **named)

    def qkvpacked(qkv: torch.Tensor, *rest: Any, **named: Any) -> Any:
        """The same; qkv: (batch, seqlen / ranks, 3, heads, head_dim)."""
        return apart(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], *rest, **named)

    return _named(name, apart, kvpacked, qkvpacked)


def _varlen_family(name: str, layout: Any) -> Functions:
    """The same of documents that are each shared out by themselves."""

    def apart(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: Any, dropout_p: float = 0.0,
        softmax_scale: float | None = None, causal: bool = False, window_size: Any = (-1, -1),
        alibi_slopes: torch.Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
        group: Any = None,
    ) -> Any:  # fmt: skip
        """out, or (out, lse, None). cu_seqlens: where this rank's parts of documents begin; all ranks' are as long."""
        context, order = Context(group, "ring", layout), None
        with refused_together(context):
            _check_causal(name, layout, causal)
            refuse(f"{name}_func", {
                "window_size beside documents that are each shared out": window_of(window_size) is not None,
                "dropout of packed documents, whose order here is no sequence's": bool(dropout_p),
                "alibi_slopes beside documents that are each shared out": alibi_slopes is not None,
            })  # fmt: skip
            total, starts = q.shape[0], check_cu_seqlens(cu_seqlens)
            if starts.device.type == "cpu" and (
                int(starts[0]) != 0 or int(starts[-1]) != total or bool((starts.diff() < 0).any())
            ):
                raise InvalidProblem(f"cu_seqlens is {starts.tolist()}; it must start with 0, never fall and end with {total}.")
            ids = torch.searchsorted(starts[1:].contiguous(), torch.arange(total, device=q.device), right=True)
            # Joined, ranks' parts have each document's tokens in their order, with others' in between: no more is asked of
            # them. Zigzag wants all first halves in front of all second ones.
            if layout == "zigzag":
                within = torch.arange(total, device=q.device) - starts[ids]
                order = (2 * within >= (starts[1:] - starts[:-1])[ids]).to(torch.int8).argsort(stable=True)
                q, k, v, ids = (t[order] for t in (q, k, v, ids))
            how = Asked(softmax_scale, causal, deterministic=deterministic, dropout_p=dropout_p).arguments()
            how["mask"] = Document(ids.to(torch.int32))
        made = attention(q[None], k[None], v[None], context=context, return_lse=return_attn_probs, **how)
        out, lse = (made[0][0], made[1][0]) if return_attn_probs else (made[0], None)
        if order is not None:
            back = order.argsort()
            out, lse = out[back], None if lse is None else lse[:, back]
        return (out, lse, None) if return_attn_probs else out

    def kvpacked(q: torch.Tensor, kv: torch.Tensor, *rest: Any, **named: Any) -> Any:
        """The same; kv: (total / ranks, 2, heads_kv, head_dim)."""
        return apart(q, kv[:, 0], kv[:, 1], *rest, **named)

    def qkvpacked(qkv: torch.Tensor, *rest: Any, **named: Any) -> Any:
        """The same; qkv: (total / ranks, 3, heads, head_dim)."""
        return apart(qkv[:, 0], qkv[:, 1], qkv[:, 2], *rest, **named)

    return _named(name, apart, kvpacked, qkvpacked)


def _named(name: str, *functions: Callable[..., Any]) -> Any:
    for function, ending in zip(functions, ("func", "kvpacked_func", "qkvpacked_func"), strict=True):
        function.__name__ = function.__qualname__ = f"{name}_{ending}"
    return functions


def _check_causal(name: str, layout: str, causal: Any) -> None:
    if layout != "contiguous" and causal is not True:
        raise InvalidProblem(f"causal is {causal!r}; of {name} it must be True. ring_flash_attn_func takes both.")


ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = _family("ring_flash_attn", "contiguous")
zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func = _family(
    "zigzag_ring_flash_attn", "zigzag"
)
stripe_flash_attn_func, stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func = _family(
    "stripe_flash_attn", "striped"
)
ring_flash_attn_varlen_func, ring_flash_attn_varlen_kvpacked_func, ring_flash_attn_varlen_qkvpacked_func = _varlen_family(
    "ring_flash_attn_varlen", "contiguous"
)
(
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
) = _varlen_family("zigzag_ring_flash_attn_varlen", "zigzag")


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: torch.Tensor, causal: bool, rank: int, world_size: int
) -> tuple[torch.Tensor, torch.Tensor, int, int, slice]:
    """(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice) of a rank's part of the packed stream.

    cu_seqlens: of the whole. local_k_slice: which of the whole's keys the rank's documents need, in causal order up to its end.
    """
    total = int(cu_seqlens[-1])
    if total % world_size:
        raise InvalidProblem(f"cu_seqlens end with {total}; it must be a multiple of world_size, {world_size}.")
    first, end = rank * total // world_size, (rank + 1) * total // world_size
    touched = (cu_seqlens[1:] > first) & (cu_seqlens[:-1] < end) & (cu_seqlens[1:] > cu_seqlens[:-1])
    starts, ends = cu_seqlens[:-1][touched], cu_seqlens[1:][touched]
    last = ends.clamp(max=end) if causal else ends
    begin = int(starts[0]) if len(starts) else first
    stop = int(last[-1]) if len(last) else first
    found = [torch.cat([side[:1], ends_]) - side[:1] for side, ends_ in (
        (starts.clamp(min=first), ends.clamp(max=end)), (starts, last),
    )] if len(starts) else [cu_seqlens.new_zeros(1)] * 2  # fmt: skip
    most = [int(cu.diff().max()) if len(cu) > 1 else 0 for cu in found]
    return found[0], found[1], most[0], most[1], slice(begin, stop)


def llama3_flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: Any, max_seqlen_k: Any, heads_k_stride: int, local_k_slice: slice, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Any = (-1, -1),
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    group: Any = None,
) -> Any:  # fmt: skip
    """out, or (out, lse, None), of what `llama3_flash_attn_prepare_cu_seqlens` gives. heads_k_stride: not used, all at once."""
    context = Context(group, "allgather")
    with refused_together(context):
        how = Asked(softmax_scale, causal, window_size, 0.0, alibi_slopes, deterministic, dropout_p).arguments()
        most = longest(max_seqlen_q), longest(max_seqlen_k)
        if not isinstance(local_k_slice, slice):
            raise InvalidProblem(f"local_k_slice is {local_k_slice!r}; it must be a slice.")
    starts = cu_seqlens_q, cu_seqlens_k
    made = attention_of_items(
        q, k, v, starts, local_k_slice, context=context, max_seqlens=most, return_lse=return_attn_probs, **how
    )
    return _answer(made, return_attn_probs)


def llama3_flash_attn_varlen_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *rest: Any, **named: Any) -> Any:
    """The same; kv: (total / ranks, 2, heads_kv, head_dim)."""
    return llama3_flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], *rest, **named)


def llama3_flash_attn_varlen_qkvpacked_func(qkv: torch.Tensor, *rest: Any, **named: Any) -> Any:
    """The same; qkv: (total / ranks, 3, heads, head_dim)."""
    return llama3_flash_attn_varlen_func(qkv[:, 0], qkv[:, 1], qkv[:, 2], *rest, **named)
