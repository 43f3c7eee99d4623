"""`attention` of one rank's own tensors, for functions that call it many times: no DTensors, nested tensors or holes."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.torch.call.lengths import given_lengths
from flashtile.torch.execute.packing import APART
from flashtile.torch.execute.plain import is_traced
from flashtile.torch.routes.eager import attend, prepare
from flashtile.torch.routes.traced import attend_traced


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, seqused_q: Any = None, seqused_k: Any = None, **rest: Any
) -> Any:
    """What `flashtile.attention` returns."""
    given = None if seqused_q is None and seqused_k is None else given_lengths(seqused_q=seqused_q, seqused_k=seqused_k)
    if is_traced(q, k, v):
        return attend_traced(APART, (q, k, v), given, **rest)
    call, others = prepare(q, k, v, given=given, **rest)
    return attend(call, others, q, k, v)
