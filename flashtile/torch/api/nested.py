"""Nested tensors of PyTorch, jagged layout: varlen attention of their values."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.errors import InvalidProblem
from flashtile.torch.api.layouts import attention_varlen
from flashtile.torch.call.arguments import Arguments
from flashtile.torch.call.lengths import Given
from flashtile.torch.execute.plain import is_watched


def is_jagged(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_nested and tensor.layout is torch.jagged


def attend_jagged(q: Any, k: Any, v: Any, given: Given | None, arguments: Arguments) -> Any:
    """`attention` of q, k, v (batch, jagged, heads, head_dim); out and lse, (batch, heads, jagged), are nested as q is.

    k and v are nested alike, by the same offsets or, on the CPU, by equal ones. What lies between items of a nested tensor with
    holes is never looked at.
    """
    if given is not None:
        raise InvalidProblem(f"{next(iter(given.tensors))} is given and q is nested; its own lengths count.")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not is_jagged(tensor):
            raise InvalidProblem(f"{name} is dense and q is nested; q, k and v must be nested, in the layout torch.jagged.")
        if tensor.dim() != 4 or tensor._ragged_idx != 1:
            raise InvalidProblem(
                f"{name} has shape {tuple(tensor.shape)} with axis {tensor._ragged_idx} jagged; it must be "
                "(batch, jagged seqlen, heads, head_dim)."
            )
    if tuple(v.shape[:2]) != tuple(k.shape[:2]) and not _alike(k, v):
        raise InvalidProblem(
            f"k has lengths {k.shape[1]} and v has {v.shape[1]}; they must be nested by the same offsets, one tensor: "
            "v = torch.nested.nested_tensor_from_jagged(v.values(), k.offsets(), lengths=k.lengths()). Offsets that are equal "
            "and two tensors are compared on the CPU alone, where nobody waits for a device."
        )
    made = attention_varlen(
        q.values(), k.values(), v.values(), q.offsets().int(), k.offsets().int(), seqused_q=_used(q), seqused_k=_used(k),
        **arguments.named(),
    )  # fmt: skip
    out, lse = made if isinstance(made, tuple) else (made, None)
    out = _nested(out, q)
    return out if lse is None else (out, _nested(lse.transpose(0, 1), q).transpose(1, 2))


def _alike(k: Any, v: Any) -> bool:
    """Whether tensors of offsets, and of lengths, that are two hold the same; known on the CPU, outside of traced graphs."""
    theirs, ours = (v.offsets(), v.lengths()), (k.offsets(), k.lengths())
    if is_watched(*(t for t in (*theirs, *ours) if t is not None)) or k.device.type != "cpu":
        return False
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in zip(theirs, ours, strict=True))


def _used(tensor: Any) -> torch.Tensor | None:
    lengths = tensor.lengths()
    return None if lengths is None else lengths.int()


def _nested(values: torch.Tensor, like: Any) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(values, like.offsets(), lengths=like.lengths())
