"""What a training loop shares out: tokens, labels, positions, documents; and their way back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from flashtile.errors import InvalidProblem
from flashtile.torch.context.context import Context
from flashtile.torch.context.layout import check_length, grain, runs


def padded_length(seqlen: int, context: Context) -> int:
    """The least length, at least seqlen, that the ranks can share."""
    part = grain(context.layout, context.ranks)
    return -(-seqlen // part) * part


def position_ids(seqlen: int, context: Context, device: Any = None) -> torch.Tensor:
    """The positions, int64 (seqlen / ranks,), that this rank holds of a whole sequence, in its order; for rotary embeddings.

    Raises InvalidProblem for a length that the ranks cannot share.
    """
    check_length(context.layout, context.ranks, seqlen)
    return held(seqlen, context.layout, context.ranks, context.rank, device)


def held(seqlen: int, layout: str, ranks: int, rank: int, device: Any = None) -> torch.Tensor:
    """The positions that a rank holds."""
    own = [torch.arange(run.start, run.last + 1, run.step, device=device) for run in runs(layout, seqlen, ranks, rank)]
    return torch.cat(own)


def order(seqlen: int, layout: str, ranks: int, device: Any = None) -> torch.Tensor | None:
    """The positions as they come when all ranks' shards are joined; None where that is their own order."""
    if layout == "contiguous" or ranks == 1:
        return None
    return torch.cat([held(seqlen, layout, ranks, rank, device) for rank in range(ranks)])


def shard(tensor: torch.Tensor, context: Context, dim: int = 1, pad: Any = None) -> torch.Tensor:
    """This rank's part of a tensor that every rank has whole, along `dim`; differentiable.

    For tokens, labels and positions alike. Shift labels before, on the whole sequence: a shard's last token is followed by
    another rank's first. pad: what is put at the end first, up to `padded_length`; a label that the loss ignores, say.

    Raises InvalidProblem for a length that the ranks cannot share, without pad.
    """
    seqlen = tensor.shape[dim]
    if pad is not None and (more := padded_length(seqlen, context) - seqlen):
        shape = list(tensor.shape)
        shape[dim] = more
        tensor = torch.cat([tensor, tensor.new_full(shape, pad)], dim)
        seqlen += more
    return tensor.index_select(dim, position_ids(seqlen, context, tensor.device))


def unshard(tensor: torch.Tensor, context: Context, dim: int = 1, seqlen: int | None = None) -> torch.Tensor:
    """The whole of which every rank has a shard along `dim`, on every rank; without a gradient.

    seqlen: its length before `shard` padded it.
    """
    ranks = context.ranks
    check_length(context.layout, ranks, tensor.shape[dim] * ranks)
    whole = gathered(tensor.detach(), context, dim)
    if seqlen is None:
        return whole
    if isinstance(seqlen, bool) or not 0 <= seqlen <= whole.shape[dim]:
        raise InvalidProblem(f"seqlen is {seqlen!r}; it must be from 0 to {whole.shape[dim]}, the padded length.")
    return whole.narrow(dim, 0, seqlen)


def gathered(tensor: torch.Tensor, context: Context, dim: int) -> torch.Tensor:
    """All ranks' shards along `dim`, in the sequence's own order."""
    as_bytes = tensor.dtype is torch.bool
    sent = (tensor.to(torch.uint8) if as_bytes else tensor).contiguous()
    parts = sent.new_empty((context.ranks, *sent.shape))
    gather_into(parts.flatten(0, 1) if sent.dim() else parts, sent, context)
    whole = torch.cat(list(parts), dim)
    at = order(whole.shape[dim], context.layout, context.ranks, tensor.device)
    whole = whole if at is None else torch.empty_like(whole).index_copy_(dim, at, whole)
    return whole.bool() if as_bytes else whole


def gather_into(parts: torch.Tensor, tensor: torch.Tensor, context: Context) -> None:
    """Write all ranks' tensors to `parts`, one after another; under the name that this PyTorch has for it."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(parts, tensor, group=context.group)


def document_ids(cu_seqlens: torch.Tensor, context: Context, seqlen: int | None = None) -> torch.Tensor:
    """Which document each of this rank's tokens is of, int32 (seqlen / ranks,), for `mask=Document(ids)`.

    cu_seqlens: where the whole packed sequence's documents begin, ints (documents + 1,), on every rank. seqlen: the padded
    length; padding behind the last document is a document of its own. Documents may span ranks.
    """
    total = padded_length(int(cu_seqlens[-1]), context) if seqlen is None else seqlen
    at = position_ids(total, context, cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].contiguous().to(torch.int64), at, right=True).to(torch.int32)
