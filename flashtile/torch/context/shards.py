"""What a training loop shares out: tokens, labels, positions, documents; and their way back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from flashtile.errors import InvalidProblem
from flashtile.torch.call.lengths import Given
from flashtile.torch.context.agree import agree, numbers_in, refused_together
from flashtile.torch.context.context import Context
from flashtile.torch.context.documents import Documents
from flashtile.torch.context.layout import check_length, grain, runs
from flashtile.torch.execute.eagerly import eagerly
from flashtile.torch.execute.plain import is_traced


def padded_length(seqlen: int, context: Context) -> int:
    """The least length, at least seqlen, that the ranks can share."""
    _check_seqlen("seqlen", seqlen)
    part = grain(context.layout, context.ranks)
    return -(-seqlen // part) * part


def position_ids(seqlen: int, context: Context, device: Any = None, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
    """The positions, int64 (seqlen / ranks,), that this rank holds of a whole sequence, in its order; for rotary embeddings.

    cu_seqlens: where the whole's packed documents begin, ints (documents + 1,): positions are then counted in each of them.
    Layout "documents" needs them. Raises InvalidProblem for a length that the ranks cannot share.
    """
    _check_seqlen("seqlen", seqlen)
    starts = None if cu_seqlens is None else _starts(cu_seqlens, seqlen)
    at = _tokens(seqlen, context, device, starts)
    return at if starts is None else at - starts[torch.searchsorted(starts[1:], at, right=True)]


def _tokens(seqlen: int, context: Context, device: Any, starts: torch.Tensor | None) -> torch.Tensor:
    """Which of the whole's tokens this rank holds, in its order. starts: as `_starts` returns them."""
    check_length(context.layout, context.ranks, seqlen)
    at = held(seqlen, context.layout, context.ranks, context.rank, device if starts is None else starts.device)
    return at if context.layout != "documents" else _documents(seqlen, context, starts).tokens().at[at]


def _documents(seqlen: int, context: Context, starts: torch.Tensor | None) -> Documents:
    if starts is None:
        raise InvalidProblem("cu_seqlens is None; layout 'documents' needs where the whole's documents begin, as ints.")
    return Documents.of(starts, seqlen, context.ranks)


def held(seqlen: int, layout: str, ranks: int, rank: int, device: Any = None) -> torch.Tensor:
    """The positions that a rank holds."""
    own = runs(layout, seqlen, ranks, rank)
    return torch.cat([torch.arange(run.count, device=device) * run.step + run.start for run in own])


def order(seqlen: int, layout: str, ranks: int, device: Any = None) -> torch.Tensor | None:
    """The positions as they come when all ranks' shards are joined; None where that is their own order."""
    if layout == "contiguous" or ranks == 1:
        return None
    return torch.cat([held(seqlen, layout, ranks, rank, device) for rank in range(ranks)])


def shard(
    tensor: torch.Tensor, context: Context, dim: int = 1, pad: Any = None, cu_seqlens: torch.Tensor | None = None
) -> torch.Tensor:
    """This rank's part of a tensor that every rank has whole, along `dim`; differentiable.

    For tokens, labels and positions alike. Shift labels before, on the whole sequence: a shard's last token is followed by
    another rank's first. pad: what is put at the end first, up to `padded_length`; a label that the loss ignores, say.
    cu_seqlens: where the whole's packed documents begin, ints (documents + 1,); layout "documents" alone asks.

    Raises InvalidProblem for a length that the ranks cannot share, without pad.
    """
    _check_dim(tensor, dim)
    seqlen = tensor.shape[dim]
    if pad is not None and (more := padded_length(seqlen, context) - seqlen):
        shape = list(tensor.shape)
        shape[dim] = more
        tensor = torch.cat([tensor, tensor.new_full(shape, pad)], dim)
        seqlen += more
    starts = _asked_starts(cu_seqlens, seqlen, context)
    return tensor.index_select(dim, _tokens(seqlen, context, tensor.device, starts).to(tensor.device))


@eagerly
def unshard(
    tensor: torch.Tensor, context: Context, dim: int = 1, seqlen: int | None = None, cu_seqlens: torch.Tensor | None = None
) -> torch.Tensor:
    """The whole of which every rank has a shard along `dim`, on every rank; without a gradient.

    seqlen: its length before `shard` padded it. cu_seqlens: as `shard` was given them. Raises InvalidProblem, on every rank,
    where ranks call otherwise.
    """
    with refused_together(context):
        _check_dim(tensor, dim)
        told = {"tensor": f"{tensor.dtype} {tuple(tensor.shape)}", "dim": str(dim), "seqlen": str(seqlen)}
        padded = tensor.shape[dim] * context.ranks
        check_length(context.layout, context.ranks, padded)
        if seqlen is not None:
            _check_seqlen("seqlen", seqlen)
            if seqlen > padded:
                raise InvalidProblem(f"seqlen is {seqlen}; it must be from 0 to {padded}, the padded length.")
        asked = _asked_starts(cu_seqlens, padded, context)
        documents = _documents(padded, context, asked) if context.layout == "documents" else None
        starts = None if documents is None else documents.starts
        told["cu_seqlens"] = "not asked" if starts is None else f"{len(starts)} ints"
    agree(context, told, values=lambda: numbers_in({"what cu_seqlens holds": starts}))
    whole = gathered(tensor.detach(), context, dim)
    if documents is not None:
        whole = whole.index_select(dim, documents.tokens().inverse.to(whole.device))
    return whole if seqlen is None else whole.narrow(dim, 0, seqlen)


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
    """Write all ranks' tensors to `parts`, one after another. By the name that this PyTorch has for it."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(parts, tensor, group=context.group)


def document_ids(cu_seqlens: torch.Tensor, context: Context, seqlen: int | None = None) -> torch.Tensor:
    """Which document each of this rank's tokens is of, int32 (seqlen / ranks,), for `mask=Document(ids)`.

    cu_seqlens: where the whole packed sequence's documents begin, ints (documents + 1,), on every rank. seqlen: the padded
    length; padding behind the last document is a document of its own. Documents may span ranks.
    """
    starts = _starts(cu_seqlens, seqlen)
    total = padded_length(int(starts[-1]), context) if seqlen is None else seqlen
    at = _tokens(total, context, cu_seqlens.device, starts)
    return torch.searchsorted(starts[1:], at, right=True).to(torch.int32)


def check_cu_seqlens(cu_seqlens: Any) -> torch.Tensor:
    """The same as int64. Raises InvalidProblem for what says no documents' beginnings."""
    if not isinstance(cu_seqlens, torch.Tensor):
        raise InvalidProblem(f"cu_seqlens is a {type(cu_seqlens).__name__}; it must be a torch.Tensor.")
    if cu_seqlens.dim() != 1 or not len(cu_seqlens) or cu_seqlens.is_floating_point() or cu_seqlens.dtype is torch.bool:
        said = f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        raise InvalidProblem(f"cu_seqlens is {said}; it must be ints (documents + 1,).")
    return cu_seqlens.to(torch.int64).contiguous()


def _starts(cu_seqlens: Any, total: int | None) -> torch.Tensor:
    """The same, of `total` tokens, if that is known. On the CPU, where looking costs nothing, InvalidProblem for numbers that
    cannot be.
    """
    starts = check_cu_seqlens(cu_seqlens)
    if starts.device.type == "cpu" and not is_traced(starts):
        Given({"cu_seqlens_q": starts}, alike=True).check_values({"q": int(starts[-1]) if total is None else total})
    return starts


def _asked_starts(cu_seqlens: Any, total: int, context: Context) -> torch.Tensor | None:
    """The same, if they are given and the layout asks."""
    return None if cu_seqlens is None or context.layout != "documents" else _starts(cu_seqlens, total)


def _check_dim(tensor: Any, dim: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidProblem(f"tensor is a {type(tensor).__name__}; it must be a torch.Tensor.")
    if isinstance(dim, bool) or not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
        raise InvalidProblem(f"dim is {dim!r} and the tensor has {tensor.dim()} axes; it must be one of them.")


def _check_seqlen(name: str, seqlen: Any) -> None:
    if isinstance(seqlen, bool) or not isinstance(seqlen, int) or seqlen < 0:
        raise InvalidProblem(f"{name} is {seqlen!r}; it must be an int, at least 0.")
