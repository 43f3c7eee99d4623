"""What torch.func.vmap makes of attention's operators, and the FLOPs that PyTorch counts of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from flashtile.torch.routes.functional import ATTENTION, BACKWARD, SECOND, TANGENT
from flashtile.torch.routes.library import LIBRARY, NAMESPACE
from flashtile.torch.routes.operator import Maybe
from flashtile.torch.routes.request import read


def _folds(text: str, others: list[Any]) -> bool:
    """Whether mapped calls are one call of a larger batch."""
    return not read(text).varlen and not others


def _fold(tensor: Maybe, axis: int | None, count: int) -> Maybe:
    """(count, batch, ...) as (count * batch, ...)."""
    if tensor is None:
        return None
    tensor = tensor.expand(count, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
    return tensor.flatten(0, 1)


def _unfold(tensor: torch.Tensor, count: int, batch: int) -> torch.Tensor:
    """(count * batch, ...) as (count, batch, ...), whatever is 0."""
    return tensor.unflatten(0, (count, batch))


def _batch_of(tensor: torch.Tensor, axis: int | None) -> int:
    """That of one call."""
    return tensor.shape[1 if axis == 0 else 0]


def _at(tensor: Maybe, axis: int | None, index: int) -> Maybe:
    if tensor is None or axis is None:
        return tensor
    if not tensor.shape[axis]:  # no call at all, whose outputs have shapes
        return tensor.new_zeros((*tensor.shape[:axis], *tensor.shape[axis + 1 :]))
    return tensor.select(axis, index)


def one_by_one(operator: Any, count: int, dims: tuple[Any, ...], args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The operator's outputs for each index of the mapped axes, stacked."""
    results = []
    for i in range(max(count, 1)):
        given = [
            [_at(t, d, i) for t, d in zip(arg, dim, strict=True)] if isinstance(dim, (list, tuple)) else _at(arg, dim, i)
            for arg, dim in zip(args, dims, strict=True)
        ]
        results.append(operator(*given))
    return [torch.stack(made)[:count] for made in zip(*results, strict=True)]


def _map_attention(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    count = info.batch_size
    if not _folds(args[5], args[3]):
        made = one_by_one(ATTENTION, count, in_dims, args)
    else:
        packs = [_fold(t, d, count) for t, d in zip(args[:3], in_dims[:3], strict=True)]
        out, lse, residual = ATTENTION(*packs, *args[3:])
        batch = _batch_of(args[0], in_dims[0])
        residual = _unfold(residual, count, batch) if residual.dim() > 1 else residual.expand(count, 0)
        made = [_unfold(out, count, batch), _unfold(lse, count, batch), residual]
    return tuple(made), (0,) * 3


def _map_backward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    count = info.batch_size
    if not _folds(args[10], args[5]):
        made = one_by_one(BACKWARD, count, in_dims, args)
    else:
        folded = [_fold(t, d, count) for t, d in zip(args[:5], in_dims[:5], strict=True)]
        kept = [_fold(t, d, count) for t, d in zip(args[6:8], in_dims[6:8], strict=True)]
        one, batch = args[8].dim() - (in_dims[8] is not None) == 1, _batch_of(args[2], in_dims[2])
        residual = args[8].flatten() if one else _fold(args[8], in_dims[8], count)
        made = [_unfold(g, count, batch) for g in BACKWARD(*folded, args[5], *kept, residual, *args[9:])]
    return made, [0] * len(made)


torch.library.register_vmap(f"{NAMESPACE}::attention", _map_attention, lib=LIBRARY)
torch.library.register_vmap(f"{NAMESPACE}::attention_backward", _map_backward, lib=LIBRARY)


def map_one_by_one(operator: Any, name: str, outputs: int | None) -> None:
    """vmap runs the operator of that name for one index after another; `outputs`: how many, None for a list of them."""

    def mapped(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        made = one_by_one(operator, info.batch_size, in_dims, args)
        return (made, [0] * len(made)) if outputs is None else (tuple(made), (0,) * outputs)

    torch.library.register_vmap(f"{NAMESPACE}::{name}", mapped, lib=LIBRARY)


map_one_by_one(TANGENT, "attention_tangent", 4)
map_one_by_one(SECOND, "attention_second", None)


@register_flop_formula(ATTENTION.overloadpacket, get_raw=True)
def attention_flops(
    q: torch.Tensor, k: Maybe, v: Maybe, others: list[torch.Tensor], wanted: int, text: str, floats: list[float],
    ints: list[int], **_: Any,
) -> int:  # fmt: skip
    """FLOPs of a forward, on the visible scores alone."""
    packs = tuple(t for t in (q, k, v) if t is not None)
    return read(text).named(packs, others, wanted, floats, ints).problem.flops("forward")


@register_flop_formula(BACKWARD.overloadpacket, get_raw=True)
def attention_backward_flops(dout: Maybe, dlse: Maybe, *given: Any, **_: Any) -> int:
    """FLOPs of a backward, on the visible scores alone."""
    q, k, v, others = given[:4]
    packs = tuple(t for t in (q, k, v) if t is not None)
    return read(given[8]).named(packs, others, given[7], *given[9:]).problem.flops("backward")
