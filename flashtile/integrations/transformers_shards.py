"""transformers' models whose sequences are packed, and said so by positions alone; and those whose sequences ranks share."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.distributed import Context, attention, attention_varlen, shard
from flashtile.errors import InvalidProblem, NotSupported
from flashtile.features.masks.document import Document
from flashtile.problem.mask import FULL, Band
from flashtile.torch.context.agree import agree, refused_together
from flashtile.torch.context.shards import gathered, order
from flashtile.torch.execute.eagerly import eagerly


def packed_starts(positions: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """Where the sequences of all rows, one after another, begin, int32 (sequences + 1,); None where each row is one.

    positions: ints (batch or 1, seqlen), which rise within a sequence. Their numbers are read: on a GPU the host waits.
    """
    if not (isinstance(positions, torch.Tensor) and positions.dim() == 2 and q.shape[1] == k.shape[1] > 1):
        return None
    batch, seqlen = q.shape[:2]
    if positions.shape[1] != seqlen or positions.shape[0] not in (1, batch) or torch.compiler.is_compiling():
        return None
    first = _begins(positions).expand(batch, seqlen)
    if not bool(first[:, 1:].any()):
        return None
    return _starts(first)


def _begins(positions: torch.Tensor) -> torch.Tensor:
    """Of each position of (rows, seqlen) whether a sequence begins there."""
    first = torch.ones_like(positions, dtype=torch.bool)
    first[:, 1:] = positions[:, 1:] <= positions[:, :-1]
    return first


def _starts(first: torch.Tensor) -> torch.Tensor:
    """Where they begin in all rows, one after another, and where the last one ends, int32."""
    starts = first.flatten().nonzero()[:, 0]
    return torch.cat([starts, starts.new_tensor([first.numel()])]).to(torch.int32)


@eagerly
def attend_shards(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: Any, context: Context, arguments: dict[str, Any],
    beside: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    """out (batch, seqlen / ranks, heads, head_dim_v) of this rank's shards: packed sequences apart, as positions say.

    positions: ints (batch or 1, seqlen / ranks), of the whole (`flashtile.distributed.position_ids`); None of a model that
    tells its attention none. arguments: of `attention`. beside: by name what must be None, for it is told of the shard alone.
    """
    with refused_together(context):
        reasons = [f"{name}, which says nothing of other ranks' shards" for name, x in beside.items() if x is not None]
        if q.shape[1] != k.shape[1]:
            reasons.append("keys of a cache beside a context")
        if reasons:
            raise NotSupported("attention over ranks", {"torch": reasons})
        if positions is not None and (positions.dim() != 2 or positions.shape[1] != q.shape[1]):
            raise InvalidProblem(
                f"position_ids have shape {tuple(positions.shape)}; beside a context it must be (batch, {q.shape[1]})."
            )
    agree(context, {"position_ids": "None" if positions is None else f"{positions.dtype} {tuple(positions.shape)}"})
    if positions is None:
        return attention(q, k, v, context=context, **arguments)
    whole = gathered(positions, context, 1)
    _check_whole(whole, context)
    first = _begins(whole)
    if not bool(first[:, 1:].any()):
        return attention(q, k, v, context=context, **arguments)
    mask = arguments.pop("mask", None) or FULL
    if q.shape[0] == 1 and isinstance(mask, Band):
        return attention_varlen(q[0], k[0], v[0], _starts(first[:1]), context=context, mask=mask, **arguments)[None]
    ids = shard(first.cumsum(1).to(torch.int32), context).expand(q.shape[:2])
    return attention(q, k, v, context=context, mask=Document(ids) & mask, **arguments)


def _check_whole(positions: torch.Tensor, context: Context) -> None:
    """Raise InvalidProblem where every rank has counted its own tokens: what a model does that is given no position_ids."""
    seqlen = positions.shape[1]
    alone = torch.arange(seqlen // context.ranks, device=positions.device).repeat(context.ranks)
    at = order(seqlen, context.layout, context.ranks, positions.device)
    alone = alone if at is None else torch.empty_like(alone).index_copy_(0, at, alone)
    if context.ranks > 1 and bool((positions == alone).all()):
        raise InvalidProblem(
            "position_ids begin at 0 on every rank; they must be the whole's, flashtile.distributed.position_ids(seqlen, "
            "context). Sequences that each fit on one rank need no context."
        )
