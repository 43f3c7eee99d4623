"""Hugging Face diffusers: `register()`, then `model.set_attention_backend("flashtile")`.

Attention as diffusers' `native` backend has it: (batch, seqlen, heads, head_dim), causal order from the first key.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch

from flashtile import distributed
from flashtile.errors import InvalidProblem, NotSupported
from flashtile.features.masks.key_padding import KeyPadding
from flashtile.features.masks.stored import Stored
from flashtile.features.scores.bias import Bias
from flashtile.problem.dropout import Dropout
from flashtile.problem.mask import Band
from flashtile.problem.options import Options
from flashtile.torch.api.attention import attention

NAME = "flashtile"


def register(name: str = NAME, options: Options | None = None) -> None:
    """Make `set_attention_backend(name)` and diffusers' `attention_backend(name)` mean flashtile with these options.

    In this process; nothing is active before one of them is called. Needs diffusers 0.35 or newer, whose list of names is
    closed: name, which must be in lower case, is added to it.
    """
    if name != name.lower():
        raise InvalidProblem(f"name is {name!r}; it must be in lower case: diffusers lowers what it is asked for.")
    theirs: Any = import_module("diffusers.models.attention_dispatch")
    names = theirs.AttentionBackendName
    member = names._value2member_map_.get(name)
    if member is None:
        member = str.__new__(names, name)
        member._name_, member._value_ = name.upper(), name
        names._value2member_map_[name] = names._member_map_[name.upper()] = member
        names._member_names_.append(name.upper())
    registry = theirs._AttentionBackendRegistry
    more = {"supports_context_parallel": True} if hasattr(registry, "_supports_context_parallel") else {}
    registry.register(member, **more)(partial(attention_forward, options=options))


def attention_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    return_lse: bool = False, _parallel_config: Any = None, *, options: Options | None = None,
) -> torch.Tensor:  # fmt: skip
    """out (batch, seqlen_q, heads, head_dim_v). query, key, value: (batch, seqlen, heads, head_dim).

    attn_mask: bool, True where a query sees a key, or numbers that are added to the scores, broadcasting to (batch, heads,
        seqlen_q, seqlen_k); or either of keys alone, (batch, seqlen_k). scale: 1 / sqrt(head_dim) by default.
    enable_gqa: key and value may have fewer heads than query. _parallel_config: with ring and Ulysses degrees query, key and
        value are this rank's shards (`flashtile.distributed`), without masks. Raises NotSupported for return_lse.
    """
    degrees = getattr(_parallel_config, "context_parallel_config", None)
    refused = {
        "return_lse is asked for": return_lse,
        "attn_mask is given beside context parallelism": degrees is not None and attn_mask is not None,
        "ulysses_anything or ring_anything is asked for; lengths and heads must be multiples of the degrees":
            getattr(degrees, "ulysses_anything", False) or getattr(degrees, "ring_anything", False),
    }  # fmt: skip
    reasons = [reason for reason, asked in refused.items() if asked]
    if reasons:
        raise NotSupported("diffusers' attention", {NAME: reasons})
    if key.shape[2] != query.shape[2] and not enable_gqa:
        raise InvalidProblem(
            f"key has {key.shape[2]} heads and query {query.shape[2]}; they must be equal unless enable_gqa is True."
        )
    if attn_mask is not None and is_causal:
        raise InvalidProblem("attn_mask is given and is_causal is True; it must be one of them.")
    mask: Any = Band(right=query.shape[1] - key.shape[1]) if is_causal else None
    score: tuple[Bias, ...] = ()
    if attn_mask is not None:
        seen = attn_mask
        if seen.shape == (query.shape[0], key.shape[1]):
            seen = seen[:, None, None]
        seen = seen[(None,) * (4 - seen.dim())]
        if seen.dtype is not torch.bool:
            score = (Bias(seen),)
        elif seen.shape[1:] == (1, 1, key.shape[1]):
            mask = KeyPadding(seen[:, 0, 0])
        else:
            mask = Stored(seen)
    dropout = Dropout(dropout_p) if dropout_p else None
    if degrees is not None:
        how: dict[str, Any] = {"mask": mask, "scale": scale, "dropout": dropout, "options": options}
        return distributed.attention(query, key, value, context=context_of(degrees), **how)
    return attention(query, key, value, mask=mask, score=score, scale=scale, dropout=dropout, options=options)


def context_of(degrees: Any) -> distributed.Context:
    """The ranks and the method of diffusers' ContextParallelConfig: its shards are contiguous, its mesh is (ring, ulysses)."""
    if degrees.ulysses_degree == 1:
        return distributed.Context(degrees._ring_mesh, "ring", check="first")
    if degrees.ring_degree == 1:
        return distributed.Context(degrees._ulysses_mesh, "ulysses", check="first")
    return distributed.Context(degrees._mesh["ring", "ulysses"], "usp_ring", check="first")
