"""xformers' `memory_efficient_attention`, with its bias classes and by flashtile alone."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.compat.asked import options, refuse
from flashtile.compat.xformers_bias import AttentionBias, ItemsMask, LowerTriangularMaskWithTensorBias
from flashtile.compat.xformers_items import _GappySeqInfo, _UsedInfo
from flashtile.compat.xformers_paged import Paged
from flashtile.errors import InvalidProblem, renamed
from flashtile.features.scores.bias import Bias
from flashtile.problem.dropout import Dropout
from flashtile.torch.api.attention import attention
from flashtile.torch.api.layouts import attention_varlen
from flashtile.torch.cache.attention import attention_cached
from flashtile.torch.call.stored import check_tensor
from flashtile.torch.execute.plain import joined


def memory_efficient_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_bias: Any = None, p: float = 0.0,
    scale: float | None = None, *, op: Any = None, output_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """out (batch, seqlen_q, heads, head_dim_v), or as query has its axes.

    query: (batch, seqlen_q, heads, head_dim), (batch, seqlen_q, head_dim) of one head, or (batch, seqlen_q, groups, heads,
        head_dim), whose keys may be one per group, expanded.
    attn_bias: a tensor (batch or 1, heads or 1, seqlen_q or 1, seqlen_k or 1) that is added to the scores, with its gradient,
        or a bias of `xformers_bias`. p: dropout. op: which of xformers' kernels; None alone.
    """
    return _attend("memory_efficient_attention", query, key, value, attn_bias, p, scale, op, output_dtype)[0]


def memory_efficient_attention_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_bias: Any = None, p: float = 0.0,
    scale: float | None = None, *, op: Any = None, output_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """out of `memory_efficient_attention`, without gradients."""
    with torch.no_grad():
        return _attend("memory_efficient_attention_forward", query, key, value, attn_bias, p, scale, op, output_dtype)[0]


def memory_efficient_attention_forward_requires_grad(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_bias: Any = None, p: float = 0.0,
    scale: float | None = None, *, op: Any = None, output_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out, lse) of `memory_efficient_attention`, without gradients. lse, float32: (batch, heads, seqlen_q), or (batch, groups,
    heads, seqlen_q) of queries with groups, a natural logarithm, -inf where a query sees no key.
    """
    name = "memory_efficient_attention_forward_requires_grad"
    with torch.no_grad():
        out, lse = _attend(name, query, key, value, attn_bias, p, scale, op, output_dtype, return_lse=True)
    return out, lse.unflatten(1, query.shape[2:4]) if query.dim() == 5 else lse


def _attend(
    name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_bias: Any, p: float, scale: float | None,
    op: Any, output_dtype: torch.dtype | None, return_lse: bool = False,
) -> tuple[torch.Tensor, Any]:  # fmt: skip
    """(out as query has its axes, lse (batch, heads, seqlen_q) or None)."""
    for called, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(called, tensor)
    refuse(name, {
        "op is given; it names one of xformers' kernels": op is not None,
        f"output_dtype is {output_dtype}; out has query's dtype": output_dtype not in (None, query.dtype),
        "attn_bias is one of pages, of which there is no lse": return_lse and isinstance(attn_bias, Paged),
    })  # fmt: skip
    if query.dim() not in (3, 4, 5) or not query.dim() == key.dim() == value.dim():
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        raise InvalidProblem(f"query, key and value have shapes {shapes}; they must have as many axes, from three to five.")
    how: dict[str, Any] = dict(scale=scale, dropout=Dropout(p) if p else None, options=options())
    shape = (*query.shape[:-1], value.shape[-1])
    if isinstance(attn_bias, Paged):
        return _paged(query, key, value, attn_bias, how).reshape(shape), None
    how["return_lse"] = return_lse
    q, k, v = (_four(t) for t in (query, key, value))
    if isinstance(attn_bias, ItemsMask):
        items: Any = _items(q, k, v, attn_bias, how)
        made: Any = tuple(t[None] for t in items) if return_lse else items[None]
    else:
        made = attention(q, k, v, **how, **_mask(attn_bias, query.dim(), q.shape[1], k.shape[1]))
    out, lse = made if return_lse else (made, None)
    return out.reshape(shape), lse


def _four(tensor: torch.Tensor) -> torch.Tensor:
    """(batch, seqlen, heads, head_dim); groups of heads become heads."""
    return tensor.unsqueeze(2) if tensor.dim() == 3 else tensor.flatten(2, -2)


def _mask(bias: Any, axes: int, seqlen_q: int, seqlen_k: int) -> dict[str, Any]:
    """Arguments of `attention`."""
    if bias is None:
        return {}
    if isinstance(bias, torch.Tensor):
        wide = bias[:, None] if axes == 3 and bias.dim() == 3 else bias.flatten(1, 2) if bias.dim() == 5 else bias
        return {"score": (Bias(wide),)}
    if not isinstance(bias, AttentionBias):
        kind = f"{type(bias).__module__}.{type(bias).__qualname__}"
        raise InvalidProblem(f"attn_bias is a {kind}; it must be a tensor, None or a bias of flashtile.compat.xformers_bias.")
    made: dict[str, Any] = {"mask": bias.band(seqlen_q, seqlen_k)}
    if isinstance(bias, LowerTriangularMaskWithTensorBias):
        made |= _mask(bias._bias, axes, seqlen_q, seqlen_k)
    return made


def _paged(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: Paged, how: dict[str, Any]) -> torch.Tensor:
    """out of queries (1, total, ...) over keys (1, pages * page_size, ...), a group's heads of which may be expanded."""
    dropout = how.pop("dropout")
    refuse(
        "memory_efficient_attention",
        {f"p is {dropout and dropout.p}; attention over pages has no dropout": dropout is not None},
    )
    q, size, info = _four(query), bias.page_size, bias.q_seqinfo
    if q.shape[0] != 1 or q.shape[1] != info.total:
        raise InvalidProblem(f"query has shape {tuple(query.shape)}; it must be (1, {info.total}, ...), the mask's queries.")
    pools: list[torch.Tensor] = []
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape[0] != 1 or tensor.shape[1] % size:
            raise InvalidProblem(f"{name} has shape {tuple(tensor.shape)}; it must be (1, pages * {size}, ...).")
        grouped = tensor.dim() == 5 and (tensor.shape[3] == 1 or not tensor.stride(3))
        pools.append((tensor[:, :, :, 0] if grouped else _four(tensor))[0].unflatten(0, (-1, size)))
    table = bias.block_tables.to(q.device, torch.int32)
    first = None if bias.first is None else bias.k_seqinfo.tensor(bias.first, q.device)[:-1]
    given: dict[str, Any] = dict(
        seqused_k=bias.k_seqinfo.tensor("seqlen", q.device), first_k=first, mask=bias.band(0, 0), **how
    )
    try:
        if info.max_seqlen == info.min_seqlen > 0 and not info.is_shown:
            return attention_cached(q[0].unflatten(0, (-1, info.max_seqlen)), pools[0], pools[1], table, **given)
        return attention_cached(q[0], pools[0], pools[1], table, cu_seqlens_q=info.tensor("seqstart", q.device), **given)
    except InvalidProblem as error:
        raise renamed(error, {"page_table": "block_tables", "k_cache": "key", "v_cache": "value", "q": "query"}) from None


def _items(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: ItemsMask, how: dict[str, Any]) -> Any:
    """What `attention_varlen` gives."""
    if q.shape[0] != 1 or k.shape[0] != 1:
        raise InvalidProblem(f"query has batch {q.shape[0]} and key {k.shape[0]}; with a block-diagonal mask both must be 1.")
    for name, tensor, info in (("query", q, bias.q_seqinfo), ("key", k, bias.k_seqinfo)):
        if tensor.shape[1] != info.total:
            raise InvalidProblem(f"{name} has {tensor.shape[1]} tokens and the mask's items {info.total}; they must be equal.")
    q_info, k_info, used = bias.q_seqinfo, bias.k_seqinfo, None
    if isinstance(k_info, _GappySeqInfo) and not k_info.is_sorted:
        k, v = (joined([t[:, a:b] for a, b in k_info.intervals()], 1) for t in (k, v))
        k_info = k_info.joined
    starts_q = q_info.tensor("seqstart", q.device)
    starts_k = starts_q if k_info is q_info else k_info.tensor("seqstart", q.device)
    if isinstance(k_info, _UsedInfo):
        used = k_info.tensor("seqlen", q.device)
        if first := k_info.seqstart_py[0]:  # read where they lie, from the first item's first key on
            k, v, starts_k = k[:, first:], v[:, first:], starts_k - first
    most = dict(max_seqlen_q=q_info.widest, max_seqlen_k=k_info.widest)
    return attention_varlen(q[0], k[0], v[0], starts_q, starts_k, seqused_k=used, mask=bias.mask(), **most, **how)
