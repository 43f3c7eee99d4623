"""flash-attention 4: the functions of `flash_attn.cute`.

Its rules: windows are numbers, negative ones too, None is unbounded; (out, lse) always, lse None unless it is asked for, -inf
where a query sees no key; the fourth argument is qv. pack_gqa, min_seqlen_k, scheduler_metadata, disable_scheduler_metadata
and num_splits are hints that change no result.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch

from flashtile.compat.asked import longest, options, refuse
from flashtile.compat.flash_attn_3 import flash_attn_combine
from flashtile.compat.flash_attn_cache import saying
from flashtile.errors import InvalidProblem
from flashtile.features.scores.softcap import Softcap
from flashtile.problem.mask import Band
from flashtile.problem.number import plain
from flashtile.torch.api.attention import attention
from flashtile.torch.api.layouts import attention_varlen
from flashtile.torch.cache.attention import attention_cached

Tensor = torch.Tensor | None
__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func", "get_scheduler_metadata"]


class SchedulerMetadata(NamedTuple):
    """What stands for theirs: its fields, in its order, which nobody reads."""

    num_m_blocks_ptr: Tensor = None
    num_splits_dynamic_ptr: Tensor = None
    virtual_batch_idx_ptr: Tensor = None
    num_nheads_in_l2_ptr: Tensor = None
    tile_count_semaphore: Tensor = None
    cu_total_m_blocks: Tensor = None
    cu_total_splits_m_blocks: Tensor = None
    blocks_to_batch_idx: Tensor = None


def get_scheduler_metadata(
    max_seqlen_q: int, max_seqlen_k: int, nheads: int, nheads_kv: int, headdim: int, num_splits: int, *args: Any, **kwargs: Any
) -> SchedulerMetadata:
    """A `scheduler_metadata` that says nothing: nothing is scheduled ahead here."""
    return SchedulerMetadata()


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qv: Tensor = None, gather_kv_indices: Tensor = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Any = (None, None), learnable_sink: Tensor = None,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
    score_mod: Any = None, score_mod_bwd: Any = None, mask_mod: Any = None, aux_tensors: Any = None, aux_scalars: Any = None,
    block_sparse_tensors: Any = None, block_sparse_tensors_bwd: Any = None, return_lse: bool = False,
) -> tuple[torch.Tensor, Tensor]:  # fmt: skip
    """(out, lse). q: (batch, seqlen_q, heads, head_dim); learnable_sink: (heads,), with its gradient."""
    _refuse("flash_attn_func", dict(
        qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod,
        aux_tensors=aux_tensors, aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors,
        block_sparse_tensors_bwd=block_sparse_tensors_bwd,
    ))  # fmt: skip
    how = _arguments(softmax_scale, causal, window_size, learnable_sink, softcap, deterministic)
    made = attention(q, k, v, return_lse=return_lse, **how)
    return made if return_lse else (made, None)


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qv: Tensor = None, cu_seqlens_q: Tensor = None,
    cu_seqlens_k: Tensor = None, max_seqlen_q: Any = None, max_seqlen_k: Any = None, min_seqlen_k: int | None = None,
    seqused_q: Tensor = None, seqused_k: Tensor = None, gather_kv_indices: Tensor = None, page_table: Tensor = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Any = (None, None), learnable_sink: Tensor = None,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
    score_mod: Any = None, score_mod_bwd: Any = None, mask_mod: Any = None, block_sparse_tensors: Any = None,
    aux_tensors: Any = None, aux_scalars: Any = None, return_lse: bool = False, scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None, disable_scheduler_metadata: bool = False,
) -> tuple[torch.Tensor, Tensor]:  # fmt: skip
    """As `flash_attn_func`, of items one after another, (total, heads, head_dim), or padded, (batch, seqlen, heads, head_dim)
    with seqused. Keys may be padded beside queries that are not; with page_table, int32 (batch, columns), they are pages,
    (pages, page_size, heads, head_dim), of any size, and seqlen_k_per_split, a multiple of 128, is where sums are parted.
    """
    name = "flash_attn_varlen_func"
    cached = page_table is not None or (cu_seqlens_q is not None and cu_seqlens_k is None)
    _refuse(name, dict(
        qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors, aux_tensors=aux_tensors, aux_scalars=aux_scalars,
        seqlen_k_per_split=None if cached else seqlen_k_per_split,
    ))  # fmt: skip
    how = _arguments(softmax_scale, causal, window_size, learnable_sink, softcap, deterministic)
    if cached:
        others = (("cu_seqlens_k", cu_seqlens_k), ("seqused_q", seqused_q))
        refuse(name, {f"{called} is given beside keys of a cache; seqused_k is what says how many there are": given is not None
                      for called, given in others})  # fmt: skip
        return _over_a_cache((q, k, v), page_table, cu_seqlens_q, seqused_k, seqlen_k_per_split, return_lse, how)
    refuse(name, {"cu_seqlens_q is None and cu_seqlens_k is not; padded queries have padded keys": cu_seqlens_k is not None
                  and cu_seqlens_q is None})  # fmt: skip
    how |= dict(seqused_q=seqused_q, seqused_k=seqused_k, return_lse=return_lse)
    if cu_seqlens_q is None:
        made = attention(q, k, v, **how)
    else:
        most = dict(max_seqlen_q=longest(max_seqlen_q), max_seqlen_k=longest(max_seqlen_k))
        made = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **most, **how)
    return made if return_lse else (made, None)


def _over_a_cache(
    three: tuple[torch.Tensor, torch.Tensor, torch.Tensor], page_table: Tensor, cu_q: Tensor, used: Tensor, split: Any,
    return_lse: bool, how: dict[str, Any],
) -> tuple[torch.Tensor, Tensor]:  # fmt: skip
    """(out, lse) of queries over pages, or over padded keys, all of them where seqused_k is None."""
    q, k, _ = three
    if used is None:
        batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
        rows = prod(k.shape[1:2]) * (1 if page_table is None else (1, *page_table.shape)[-1])  # axes are counted later
        used = torch.full((batch,), rows, dtype=torch.int32, device=q.device)
    named = {"k_cache": "k", "v_cache": "v", "page_table": "page_table" if page_table is not None else "k"}
    with saying({"split": "seqlen_k_per_split", **named}):
        out, lse = attention_cached(*three, page_table, seqused_k=used, cu_seqlens_q=cu_q, split=split, return_lse=True, **how)
    return out, lse if return_lse else None


def _arguments(scale: Any, causal: bool, window_size: Any, sink: Tensor, softcap: float, deterministic: bool) -> dict[str, Any]:
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise InvalidProblem(f"window_size is {window_size!r}; it must be a pair (left, right).")
    causal = plain(causal)
    if not isinstance(causal, bool):
        raise InvalidProblem(f"causal is {causal!r}; it must be True or False.")
    left, right = window_size[0], 0 if causal else window_size[1]
    if left is not None and right is not None and left + right < 0:  # an empty window is none there
        left, right = None, 0 if causal else None
    score = () if softcap == 0.0 else (Softcap(softcap),)
    return dict(mask=Band(left, right), score=score, scale=scale, sink=sink, options=options(deterministic))


def _refuse(name: str, given: dict[str, Any]) -> None:
    why = {
        "qv": "scores have one product of a query and a key", "gather_kv_indices": "keys are read where they lie",
        "seqlen_k_per_split": "keys are not split", "score_mod": "use flashtile.attention with a score modifier of your own",
        "score_mod_bwd": "use flashtile.attention with a score modifier of your own",
        "mask_mod": "use flashtile.attention with a Predicate of your own",
        "block_sparse_tensors": "use flashtile.attention with flashtile.Blocks",
        "block_sparse_tensors_bwd": "use flashtile.attention with flashtile.Blocks",
    }  # fmt: skip
    reasons = {f"{key} is given; {why.get(key, 'it belongs to functions that cannot be called here')}": value is not None
               for key, value in given.items()}  # fmt: skip
    refuse(name, reasons)
