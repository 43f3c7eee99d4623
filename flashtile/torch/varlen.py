"""attention_varlen: the public PyTorch function for sequences that lie one after another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import torch

from flashtile.errors import InvalidProblem
from flashtile.torch.attention import attend, prepare
from flashtile.torch.lengths import given_lengths

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Unpack

    from flashtile.spec.mask import Band
    from flashtile.spec.options import Options
    from flashtile.spec.score import Score


def in_order(
    causal: Any = False, window: Any = None, mask: Any = None, score: Any = (), scale: Any = None, return_lse: Any = False,
    options: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    """`Arguments` as `prepare` takes them; Python refuses a name that is none of them."""
    return causal, window, mask, score, scale, options, return_lse


class Arguments(TypedDict, total=False):
    """What every form of `attention` takes by name, with the meaning that it has there."""

    causal: bool
    window: tuple[int | None, int | None] | None
    mask: Band | None
    score: Sequence[Score]
    scale: float | None
    return_lse: bool
    options: Options | None


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    **arguments: Unpack[Arguments],
) -> Any:
    """`attention` of sequences of any lengths, packed one after another; differentiable in everything.

    q: (total_q, heads_q, head_dim); k: (total_k, heads_kv, head_dim); v: (total_k, heads_kv, head_dim_v).
    cu_seqlens_q, cu_seqlens_k: where items start, int32 (batch + 1,): item i has the tokens cu_seqlens[i] <= t <
        cu_seqlens[i + 1], none where both are equal, and starts with 0. cu_seqlens_k is cu_seqlens_q by default.
    max_seqlen_q, max_seqlen_k: no item is longer, as far as the caller knows; a hint, which `explain` counts by.
    seqused_q, seqused_k: how many of an item's tokens count, int32 (batch,); all by default.
    arguments: those of `attention`, with the same meaning, each item by itself.

    Returns out (total_q, heads_q, head_dim_v) or (out, lse) with lse float32 (heads_q, total_q). Tokens of no item, past
    cu_seqlens[-1], and those beyond seqused are never looked at; out is 0 there, lse -inf, and gradients are 0.
    The host does not wait for the device, whatever is given. Raises InvalidProblem and NotSupported as `attention` does;
    what the tensors of lengths hold is checked on the CPU alone.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if isinstance(tensor, torch.Tensor) and tensor.dim() != 3:
            raise InvalidProblem(f"{name} has shape {tuple(tensor.shape)}; it must be (total, heads, head_dim).")
    if cu_seqlens_q is None:
        raise InvalidProblem("cu_seqlens_q is None; it must be a torch.Tensor.")
    given = given_lengths(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    q, k, v = (t.unsqueeze(0) if isinstance(t, torch.Tensor) else t for t in (q, k, v))
    call, others = prepare(q, k, v, *in_order(**arguments), given=given)
    out, lse = attend(call, others, q, k, v)
    return (out.squeeze(0), lse.squeeze(0)) if call.problem.returns_lse else out.squeeze(0)
