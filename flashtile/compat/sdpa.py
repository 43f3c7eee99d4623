"""`torch.nn.functional.scaled_dot_product_attention`: its signature and rules, by flashtile alone.

Called by name, or in the place of torch's own while `Override()` is entered.
"""

from __future__ import annotations

import math
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import TorchFunctionMode

from flashtile.compat.asked import options, top_left
from flashtile.errors import InvalidProblem
from flashtile.features.masks.stored import Stored
from flashtile.features.masks.top_left import TopLeft
from flashtile.features.scores.bias import Bias
from flashtile.problem.dropout import Dropout
from flashtile.problem.mask import CAUSAL
from flashtile.torch.api.attention import attention
from flashtile.torch.api.nested import is_jagged


def scaled_dot_product_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """out (..., heads, seqlen_q, head_dim_v). query: (..., heads, seqlen_q, head_dim); two axes are one head of one item.

    Axes before seqlen that are 1 in some of query, key and value broadcast to those of the others, as in torch.
    query, key and value may also be nested, (batch, heads, jagged seqlen, head_dim), without an attn_mask.
    attn_mask: bool, True where a query sees a key, or a number that is added to the score, broadcasting to (..., heads,
        seqlen_q, seqlen_k), with its gradient; or `torch.nn.attention.bias.causal_lower_right` and its like.
    is_causal: in an order counted from the first key. enable_gqa: key and value may have fewer heads than query.
    A query that sees no key gives 0.
    """
    if min(query.dim(), key.dim(), value.dim()) < 2 or not query.dim() == key.dim() == value.dim():
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        raise InvalidProblem(f"query, key and value have shapes {shapes}; they must have as many axes, at least two.")
    query, key, value = _broadcast(query, key, value)
    if query.dim() > 2 and key.shape[-3] not in (1, query.shape[-3]) and not enable_gqa:
        raise InvalidProblem(
            f"key has {key.shape[-3]} heads and query {query.shape[-3]}; they must be equal unless enable_gqa is True."
        )
    if attn_mask is not None and is_causal:
        raise InvalidProblem("attn_mask is given and is_causal is True; it must be one of them.")
    leading, seqlens = query.shape[:-2], (query.shape[-2], key.shape[-2])
    how: dict[str, Any] = dict(scale=scale, dropout=Dropout(dropout_p) if dropout_p else None, options=options())
    if is_jagged(query):
        if attn_mask is not None:
            raise InvalidProblem("attn_mask is given and query is nested; it must be None.")
        mask = None if not is_causal else CAUSAL if seqlens[0] == seqlens[1] else TopLeft()
        return attention(*(t.transpose(1, 2) for t in (query, key, value)), mask=mask, **how).transpose(1, 2)
    mask, score = _mask(attn_mask, is_causal, leading, *seqlens)
    q, k, v = (_four(t).transpose(1, 2) for t in (query, key, value))
    out = attention(q, k, v, mask=mask, score=score, **how)
    return out.transpose(1, 2).reshape(*leading, seqlens[0], value.shape[-1])


class Override(TorchFunctionMode):
    """While it is entered, torch's scaled_dot_product_attention is flashtile's, for whoever calls it in this thread.

    Of float64, which is not computed here, it stays torch's own.

    `with Override(): model(x)`; under `torch.compile` too, around the compiled function or within it. Of torch's own modules
    that is what `torch.nn.MultiheadAttention` calls unless it is to return weights.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _OURS.get(func, func)(*args, **(kwargs or {}))


def _ours_or_theirs(query: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    """Within the mode, whose functions do not come to it again."""
    function = F.scaled_dot_product_attention if query.dtype is torch.float64 else scaled_dot_product_attention
    return function(query, *rest, **named)


def _with_ours(function: Any) -> Any:
    """A function of torch.nn.functional that calls ours: what it calls itself, a mode does not see."""
    names = {
        **vars(F),
        "scaled_dot_product_attention": _ours_or_theirs,
        "has_torch_function": lambda tensors: False,
    }
    del names["__name__"]  # torch.compile would look names up in the module of that name
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


_OURS = {
    F.scaled_dot_product_attention: _ours_or_theirs,
    F.multi_head_attention_forward: _with_ours(F.multi_head_attention_forward),
}


def _broadcast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """query, key and value with the same axes before the heads, and as many heads as the others where one has one head."""
    if tensors[0].dim() < 3 or tensors[0].is_nested:
        return tensors
    before = [t.shape[:-3] for t in tensors]
    if not before[0] == before[1] == before[2]:
        try:
            whole = torch.broadcast_shapes(*before)
        except RuntimeError:
            axes = ", ".join(str(tuple(shape)) for shape in before)
            raise InvalidProblem(f"query, key and value have {axes} before their heads; they must broadcast.") from None
        tensors = tuple(t.expand(*whole, *t.shape[-3:]) for t in tensors)
    query, key, value = tensors
    many = max(key.shape[-3], value.shape[-3])  # one head of both serves all queries as it is
    key, value = _heads(key, many), _heads(value, many)
    return _heads(query, many), key, value


def _heads(tensor: torch.Tensor, many: int) -> torch.Tensor:
    return tensor.expand(*tensor.shape[:-3], many, *tensor.shape[-2:]) if tensor.shape[-3] == 1 else tensor


def _four(tensor: torch.Tensor) -> torch.Tensor:
    """(batch, heads, seqlen, head_dim): axes before the heads are one batch."""
    if tensor.dim() < 4:
        return tensor[(None,) * (4 - tensor.dim())]
    return tensor if tensor.dim() == 4 else tensor.flatten(0, -4)


def _mask(attn_mask: Any, is_causal: bool, leading: torch.Size, seqlen_q: int, seqlen_k: int) -> tuple[Any, tuple[Any, ...]]:
    if isinstance(attn_mask, CausalBias):
        lower = attn_mask.variant == CausalVariant.LOWER_RIGHT
        if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != (seqlen_q, seqlen_k):
            made = f"{attn_mask.seq_len_q} x {attn_mask.seq_len_kv}"
            raise InvalidProblem(f"attn_mask is for {made} scores; it must be for {seqlen_q} x {seqlen_k}.")
        return (CAUSAL if lower else top_left(True, seqlen_q, seqlen_k)), ()
    if attn_mask is None:
        return top_left(is_causal, seqlen_q, seqlen_k), ()
    if not isinstance(attn_mask, torch.Tensor) or not (attn_mask.dtype is torch.bool or attn_mask.is_floating_point()):
        kind = attn_mask.dtype if isinstance(attn_mask, torch.Tensor) else type(attn_mask).__name__
        raise InvalidProblem(f"attn_mask is {kind}; it must be a tensor of bool or floating point.")
    shape = (*leading, seqlen_q, seqlen_k)
    try:
        whole = attn_mask.expand(shape)
    except RuntimeError:
        raise InvalidProblem(f"attn_mask has shape {tuple(attn_mask.shape)}; it must broadcast to {shape}.") from None
    # As it is where it has four axes at most, so that what it lacks stays an axis of size 1, and so does its gradient.
    few = attn_mask if len(shape) <= 4 else whole.reshape(math.prod(leading[:-1]), *shape[-3:])
    few = few[(None,) * (4 - few.dim())]
    if attn_mask.dtype is torch.bool:
        return Stored(few), ()
    return None, (Bias(few),)
