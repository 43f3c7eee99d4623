"""`attention` of one rank's own tensors, for functions that call it many times: no DTensors, nested tensors or holes."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.torch.call.arguments import Arguments
from flashtile.torch.call.lengths import Given, given_lengths
from flashtile.torch.call.sharded import over_ranks
from flashtile.torch.execute.packing import APART
from flashtile.torch.execute.plain import is_traced
from flashtile.torch.execute.prepared import PreparedCall
from flashtile.torch.routes.eager import attend, prepare
from flashtile.torch.routes.traced import attend_traced

LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_q", "seqused_k")


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Any:
    """What `flashtile.attention` returns; with cu_seqlens_q what `attention_varlen` does, of (1, total, heads, head_dim)."""
    if is_traced(q, k, v):
        given = _taken(arguments)
        with over_ranks():
            if given is None or not given.varlen:
                return attend_traced(APART, (q, k, v), given, Arguments(**arguments))
            made = attend_traced(APART, (q[0], k[0], v[0]), given, Arguments(**arguments))
        return tuple(t[None] for t in made) if isinstance(made, tuple) else made[None]
    call, others = prepared(q, k, v, **arguments)
    return attend(call, others, q, k, v)


def prepared(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any
) -> tuple[PreparedCall, tuple[torch.Tensor, ...]]:
    """What `attend` takes of the same arguments, where nobody traces."""
    given = _taken(arguments)
    return prepare(q, k, v, given=given, **arguments)


def _taken(arguments: dict[str, Any]) -> Given | None:
    """What arguments say of lengths, taken out of them."""
    return given_lengths(**{name: arguments.pop(name) for name in LENGTHS if name in arguments})
