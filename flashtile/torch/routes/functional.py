"""The operators under torch.func: grad, vjp, vmap, and these of each other."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.errors import NotSupported
from flashtile.torch.routes.derivatives import ReverseMode
from flashtile.torch.routes.library import LIBRARY, NAMESPACE
from flashtile.torch.routes.operator import ATTENTION, BACKWARD, Maybe
from flashtile.torch.routes.request import read

Asked = tuple[int, str, list[float], list[int]]


class _Frozen:
    """What an operator is asked besides tensors: one value to those who take arguments apart."""

    def __init__(self, *asked: Any):
        self.asked = asked


def requires_grad_below(tensor: torch.Tensor) -> bool:
    """Whether any of the tensors that the transforms have wrapped in one another requires a gradient."""
    inside: Any = torch._C
    inside = inside._functorch
    while inside.is_functorch_wrapped_tensor(tensor):
        tensor = inside.get_unwrapped(tensor)
        if tensor.requires_grad:
            return True
    return False


def attend_transformed(q: torch.Tensor, k: Maybe, v: Maybe, others: list[torch.Tensor], *asked: Any) -> Any:
    """(out, lse, residual), as the operator gives them."""
    return _Attention.apply(_Frozen(*asked), q, k, v, *others)


class _Attention(ReverseMode):
    """The operator, in the form that torch.func differentiates."""

    generate_vmap_rule = True

    @staticmethod
    def forward(frozen: _Frozen, q: torch.Tensor, k: Maybe, v: Maybe, *others: torch.Tensor) -> Any:
        return ATTENTION(q, k, v, list(others), *frozen.asked)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        frozen, *given = inputs
        ctx.frozen, ctx.there = frozen, [t is not None for t in given]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(t for t in given if t is not None), *output)

    @staticmethod
    def backward(ctx: Any, *arriving: Maybe) -> Any:
        dout, dlse, _ = arriving
        if dout is None and dlse is None:
            return (None,) * (1 + len(ctx.there))
        saved = iter(ctx.saved_tensors)
        given = [next(saved) if there else None for there in ctx.there]
        made = iter(_Backward.apply(ctx.frozen, dout, dlse, *saved, *given))
        index, grads = 0, []
        for there in ctx.there:
            grads.append(next(made) if there and ctx.frozen.asked[0] >> index & 1 else None)
            index += there
        return None, *grads


class _Backward(ReverseMode):
    """The operator of the gradients, which have none."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        frozen: _Frozen, dout: Maybe, dlse: Maybe, out: torch.Tensor, lse: torch.Tensor, residual: torch.Tensor,
        q: torch.Tensor, k: Maybe, v: Maybe, *others: torch.Tensor,
    ) -> Any:  # fmt: skip
        return tuple(BACKWARD(dout, dlse, q, k, v, list(others), out, lse, residual, *frozen.asked))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Maybe) -> Any:
        raise NotSupported("the second derivative of attention", {"torch.func": ["gradients of gradients are not implemented"]})


# -- vmap -----------------------------------------------------------------------------------------------------------------


def _folds(text: str, others: list[Any]) -> bool:
    """Whether mapped calls are one call of a larger batch."""
    return not read(text).varlen and not others


def _fold(tensor: Maybe, axis: int | None, count: int) -> Maybe:
    """(count, batch, ...) as (count * batch, ...)."""
    if tensor is None:
        return None
    tensor = tensor.expand(count, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
    return tensor.flatten(0, 1)


def _at(tensor: Maybe, axis: int | None, index: int) -> Maybe:
    return tensor if tensor is None or axis is None else tensor.select(axis, index)


def one_by_one(operator: Any, count: int, dims: tuple[Any, ...], args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The operator's outputs for each index of the mapped axes, stacked."""
    results = []
    for i in range(count):
        given = [
            [_at(t, d, i) for t, d in zip(arg, dim, strict=True)] if isinstance(dim, (list, tuple)) else _at(arg, dim, i)
            for arg, dim in zip(args, dims, strict=True)
        ]
        results.append(operator(*given))
    return [torch.stack(made) for made in zip(*results, strict=True)]


def _map_attention(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    count = info.batch_size
    if not _folds(args[5], args[3]):
        made = one_by_one(ATTENTION, count, in_dims, args)
    else:
        packs = [_fold(t, d, count) for t, d in zip(args[:3], in_dims[:3], strict=True)]
        out, lse, residual = ATTENTION(*packs, *args[3:])
        residual = residual.unflatten(0, (count, -1)) if residual.numel() else residual.expand(count, 0)
        made = [out.unflatten(0, (count, -1)), lse.unflatten(0, (count, -1)), residual]
    return tuple(made), (0,) * 3


def _map_backward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    count = info.batch_size
    if not _folds(args[10], args[5]):
        made = one_by_one(BACKWARD, count, in_dims, args)
    else:
        folded = [_fold(t, d, count) for t, d in zip(args[:5], in_dims[:5], strict=True)]
        kept = [_fold(t, d, count) for t, d in zip(args[6:8], in_dims[6:8], strict=True)]
        residual = args[8].flatten() if args[8].numel() == 0 else _fold(args[8], in_dims[8], count)
        made = [g.unflatten(0, (count, -1)) for g in BACKWARD(*folded, args[5], *kept, residual, *args[9:])]
    return made, [0] * len(made)


torch.library.register_vmap(f"{NAMESPACE}::attention", _map_attention, lib=LIBRARY)
torch.library.register_vmap(f"{NAMESPACE}::attention_backward", _map_backward, lib=LIBRARY)
