"""What q, k and v and the arguments beside them must be, whoever runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashtile.errors import InvalidProblem
from flashtile.problem.number import plain, told
from flashtile.problem.options import Options
from flashtile.problem.score import Score
from flashtile.torch.call.lengths import Given
from flashtile.torch.call.stored import check_kind, check_resolved
from flashtile.torch.execute.bound import DTYPE_NAMES, DTYPES, check_device


def modifiers(score: Any) -> Any:
    """The score modifiers of a call, which may be one without a sequence around it."""
    return (score,) if isinstance(score, Score) else score


def check_arguments(score: Any, scale: Any, options: Any, return_lse: Any = False) -> None:
    """Raise InvalidProblem for arguments of `attention` that have no meaning, whatever the tensors are."""
    if not isinstance(options, Options):
        raise InvalidProblem(f"options is a {type(options).__name__}; it must be a flashtile.Options.")
    if scale is not None and not _is_number(scale):
        remedy = " A scale that is learned, or traced, multiplies q: attention(q * scale, k, v, scale=1.0)."
        raise InvalidProblem(f"scale is {told(scale)}; it must be a number or None.{remedy if hasattr(scale, 'shape') else ''}")
    if not isinstance(plain(return_lse), bool):
        raise InvalidProblem(f"return_lse is {told(return_lse)}; it must be True or False.")
    score = modifiers(score)
    if not isinstance(score, (tuple, list)):
        remedy = " A tensor that is added goes in as Bias(tensor)." if getattr(score, "shape", ()) else ""
        if callable(score):
            score, remedy = getattr(score, "__name__", score), " A score_mod goes into flashtile.compat.flex.flex_attention."
        raise InvalidProblem(
            f"score is {told(score)}; it must be a sequence of score modifiers, such as (Softcap(30.0),).{remedy}"
        )
    for modifier in score:
        if not isinstance(modifier, Score):
            raise InvalidProblem(
                f"score holds a {type(modifier).__name__}; it must hold score modifiers, such as Softcap(30.0)."
            )


def check_modifier(modifier: Score, scalars: Sequence[Any], tensors: Sequence[Any], q: torch.Tensor) -> None:
    """Raise InvalidProblem unless kernels beside q can read what a modifier captures."""
    exact = [captured.exact for captured in modifier.captured]
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise InvalidProblem(f"{modifier.name} captures a {type(tensor).__name__}; it must be a torch.Tensor.")
        _check_captured(f"{modifier.name}'s tensor", tensor, q, i < len(exact) and exact[i])
    for number in scalars:
        if not _is_number(number):
            raise InvalidProblem(f"{modifier.name} has the scalar {told(number)}; it must be a number.")


def check_sink(sink: Any, q: torch.Tensor) -> None:
    """Raise InvalidProblem unless kernels beside q can read it."""
    if not isinstance(sink, torch.Tensor):
        raise InvalidProblem(f"sink is a {type(sink).__name__}; it must be a torch.Tensor or None.")
    _check_captured("sink", sink, q)


def _check_captured(name: str, tensor: torch.Tensor, q: torch.Tensor, exact: bool = False) -> None:
    check_kind(name, tensor)
    real = tensor.dtype in DTYPES and (tensor.dtype is not torch.float64 or q.dtype is torch.float64)
    if not real and (not exact or tensor.requires_grad or tensor.dtype not in DTYPE_NAMES):
        wide = ", or float64 beside such a q"
        others = ", or without a gradient float64, bool, uint8, int8, int32 or int64" if exact else ""
        raise InvalidProblem(f"{name} is {tensor.dtype}; it must be float16, bfloat16 or float32{wide}{others}.")
    if tensor.device != q.device:
        raise InvalidProblem(f"{name} is on {tensor.device} and q is on {q.device}; they must be on one device.")


def _is_number(value: Any) -> bool:
    """Whether it is one; while a graph is traced its symbols are."""
    value = plain(value)
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)


def check_tensors(q: Any, k: Any, v: Any, given: Given | None, stored: bool = False) -> None:
    """Raise InvalidProblem unless these are tensors that fit together; of varlen (1, total, heads, head_dim).

    stored: some are bytes, of whose dtypes `torch/call/stored.py` has seen to it.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise InvalidProblem(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor.")
        if tensor.layout is not torch.strided:
            raise InvalidProblem(f"{name} has layout {tensor.layout}; it must be strided.")
        if tensor.is_nested:
            raise InvalidProblem(f"{name} is a nested tensor; it must be a dense one, or a nested one of layout torch.jagged.")
        check_resolved(name, tensor)
        if tensor.dim() != 4:
            size = "(total, heads, head_dim)" if given is not None and given.varlen else "(batch, seqlen, heads, head_dim)"
            shape = tuple(tensor.shape[given is not None and given.varlen :])
            raise InvalidProblem(f"{name} has shape {shape}; it must be {size}.")
        if not stored and tensor.dtype not in DTYPES:
            raise InvalidProblem(f"{name} is {tensor.dtype}; it must be float16, bfloat16, float32 or float64.")
        check_device(name, tensor.device)
        if not stored and tensor.dtype != q.dtype:
            raise InvalidProblem(f"{name} is {tensor.dtype} and q is {q.dtype}; q, k and v must have one dtype.")
        if tensor.device != q.device:
            raise InvalidProblem(f"{name} is on {tensor.device} and q is on {q.device}; q, k and v must be on one device.")
        if tensor.shape[0] != q.shape[0]:
            raise InvalidProblem(f"{name} has batch {tensor.shape[0]} and q has {q.shape[0]}; they must be equal.")
    if k.shape[3] != q.shape[3]:
        raise InvalidProblem(f"k has head_dim {k.shape[3]} and q has {q.shape[3]}; they must be equal.")
    for axis, name in ((1, "seqlen"), (2, "heads")):
        if v.shape[axis] != k.shape[axis]:
            raise InvalidProblem(f"v has {name} {v.shape[axis]} and k has {k.shape[axis]}; they must be equal.")
