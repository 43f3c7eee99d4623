"""`attention` of keys and values of 8 bits, and of queries: what is checked, what runs, and gradients straight through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from flashtile.errors import InvalidProblem, NotSupported
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.number import plain
from flashtile.problem.options import DEFAULT, Options
from flashtile.problem.stored import Scaling, Stored
from flashtile.torch.api.quantize import quantised
from flashtile.torch.call.arguments import Arguments, Scaled
from flashtile.torch.call.describe import make_problem
from flashtile.torch.call.inputs import check_arguments, check_tensors, modifiers
from flashtile.torch.call.lengths import Given
from flashtile.torch.call.rows import spread
from flashtile.torch.call.stored import STORED, Maybe, bytes_of, check_kind, check_scale, number_of, scaling_of
from flashtile.torch.execute.packing import APART
from flashtile.torch.execute.plain import is_compiling, is_distributed, is_traced, transforms
from flashtile.torch.routes.derivatives import is_dual_level
from flashtile.torch.routes.eager import attend, prepare_call
from flashtile.torch.routes.traced import attend_traced, autocast

SCALES = ("q_scale", "k_scale", "v_scale")
NARROW = (torch.float16, torch.bfloat16)


class Operand(NamedTuple):
    """q, k or v, (slabs, span, heads, head_dim): of its own dtype, or of 8 bits with a scale, made of `source` if of any."""

    tensor: torch.Tensor
    scale: Maybe = None
    source: Maybe = None


Operands = tuple[Operand, Operand, Operand]


def is_stored(k: Any, options: Any, named: Mapping[str, Any]) -> bool:
    """Whether `attention` is one of 8 bits: by k, by the options, or because there are scales."""
    if getattr(k, "dtype", None) in STORED or (options is not None and getattr(options, "precision", "") == "fp8"):
        return True
    return bool(named) and any(name in named for name in SCALES)


def refuse_statistics(eight: bool) -> None:
    """Raise NotSupported for statistics of 8 bits."""
    if eight:
        reason = "their passes read 16 bits and more; give k and v in q's dtype, times their scales"
        raise NotSupported("statistics of attention of 8 bits", {"flashtile": [reason]})


def attend_stored(packs: Any, given: Given | None, arguments: Arguments, scales: Mapping[str, Any]) -> Any:
    """What `attention`, or `attention_varlen` of (total, heads, head_dim), returns; `scales` by their names."""
    operands, arguments = prepared(packs, given, arguments, scales)
    sources = [o.tensor if o.source is None else o.source for o in operands]
    scaled = [o.scale for o in operands if o.scale is not None]
    if _differentiated([*sources, *scaled, *_captured(arguments, sources[0], given)]):
        _refuse_stored(sources)
        dtype = torch.bfloat16 if sources[0].dtype in STORED else sources[0].dtype
        wide = tuple(_number(o, given, side, dtype) for o, side in zip(operands, "qkk", strict=True))
        return _attend(wide, given, arguments)
    made = _attend(tuple(bytes_of(o.tensor) for o in operands), given, arguments._replace(stored=_scaled(operands)))
    if sources[0].dtype is not torch.float16:
        return made
    return (made[0].to(sources[0].dtype), made[1]) if isinstance(made, tuple) else made.to(sources[0].dtype)


def describe_stored(
    packs: Any, given: Given | None, arguments: Arguments, scales: Mapping[str, Any]
) -> tuple[AttentionProblem, Options]:
    """The problem that `attend_stored` has, and how to run it."""
    operands, arguments = prepared(packs, given, arguments, scales)
    q, k, v = (bytes_of(o.tensor) for o in operands)
    return make_problem(q, k, v, arguments._replace(stored=_scaled(operands)), given)


def prepared(packs: Any, given: Given | None, arguments: Arguments, scales: Mapping[str, Any]) -> tuple[Operands, Arguments]:
    """q, k, v as they are multiplied, and the arguments, of a precision that goes with them.

    Raises InvalidProblem and NotSupported.
    """
    options = DEFAULT if arguments.options is None else arguments.options
    check_arguments(arguments.score, arguments.scale, options, plain(arguments.return_lse))
    for name, tensor in zip("qkv", packs, strict=True):
        check_kind(name, tensor)
    if is_distributed(*packs):
        raise NotSupported("attention of 8 bits of DTensors", {"flashtile": ["call it on each rank's local tensors"]})
    varlen, fp8 = given is not None and given.varlen, options.precision == "fp8"
    q, k, v = (t[None] if varlen else t for t in (*autocast(packs[0]), *packs[1:]))
    _check_dtypes(q, k, v, fp8)
    check_tensors(q, k, v, given, True)
    if given is not None:
        given.check(q)
    items = q.shape[0] if given is None else given.batch(q)
    made: list[Operand] = []
    for name, tensor in zip(SCALES, (q, k, v), strict=True):
        scale = _checked(name, scales.get(name), tensor, items, given)
        if fp8 and tensor.dtype not in STORED:
            made.append(Operand(*quantised(tensor.detach(), given, "q" if name == "q_scale" else "k"), tensor))
        else:
            made.append(Operand(tensor, scale))
    return (made[0], made[1], made[2]), arguments._replace(
        score=modifiers(arguments.score), options=replace(options, precision="tf32x3")
    )


def _checked(name: str, scale: Any, tensor: torch.Tensor, items: int, given: Given | None) -> Maybe:
    """`check_scale`, also of rows that lie one after another; where every row counts a CPU looks at all scales of rows."""
    varlen, rows = given is not None and given.varlen, tuple(tensor.shape[1:3])
    if varlen and isinstance(scale, torch.Tensor) and tuple(scale.shape) == rows != (items, rows[1]):
        scale = scale[None]
    scale = check_scale(name, scale, tensor, items, name[0], f"{name[0]}'s own without head_dim")
    if scale is not None and scale.dim() == 3 and given is None and scale.device.type == "cpu" and not is_traced(scale):
        wrong = ~((scale > 0) & scale.isfinite())
        if bool(wrong.any()):
            raise InvalidProblem(f"{name} holds {float(scale[wrong][0])}; it must be positive and finite.")
    return scale


def _check_dtypes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fp8: bool) -> None:
    """Raise InvalidProblem for dtypes that do not go together."""
    if k.dtype != v.dtype:
        raise InvalidProblem(f"v is {v.dtype} and k is {k.dtype}; they must have one dtype.")
    if fp8:
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.dtype is not torch.float8_e4m3fn and tensor.dtype not in NARROW:
                raise InvalidProblem(
                    f"precision is 'fp8' and {name} is {tensor.dtype}; it must be float8_e4m3fn, or float16 or bfloat16, which "
                    "is then quantised."
                )
        return
    if q.dtype in STORED:
        raise InvalidProblem(f"q is {q.dtype}; it must be float16 or bfloat16, or be given with Options(precision='fp8').")
    if q.dtype not in (*NARROW, torch.float32, torch.float64):
        raise InvalidProblem(f"q is {q.dtype}; it must be float16, bfloat16, float32 or float64.")
    if k.dtype not in STORED and k.dtype != q.dtype:
        raise InvalidProblem(f"k is {k.dtype} and q is {q.dtype}; they must have one dtype, or k and v 8 bits.")


def _scaled(operands: Operands) -> Scaled:
    """What kernels are told of them."""
    how: list[Scaling] = [scaling_of(o.scale) for o in operands]
    q, k, _ = operands
    kind = Stored(STORED[k.tensor.dtype], how[1], how[2], how[0] if q.tensor.dtype in STORED else None)
    return Scaled(kind, tuple(o.scale for o in operands if o.scale is not None))


def _captured(arguments: Arguments, q: torch.Tensor, given: Given | None) -> list[torch.Tensor]:
    """Tensors of the modifiers and the sink."""
    items = q.shape[0] if given is None else given.batch(q)
    found = [t for modifier in arguments.score for t in modifier.tensors(items, q.shape[2])]
    return found if arguments.sink is None else [*found, arguments.sink]


def _differentiated(tensors: list[torch.Tensor]) -> bool:
    """Whether somebody wants a derivative of any order, by any of them."""
    if not is_compiling() and (transforms() or is_dual_level()):
        return True
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _refuse_stored(tensors: list[torch.Tensor]) -> None:
    """Raise NotSupported for one of 8 bits that requires a gradient: 8 bits would hold little of it."""
    for name, tensor in zip("qkv", tensors, strict=True):
        if tensor.dtype in STORED and tensor.requires_grad and torch.is_grad_enabled():
            reason = f"{name} of {tensor.dtype} requires one; detach it, or give 16 bits with Options(precision='fp8')"
            raise NotSupported("a gradient of what is stored in 8 bits", {"flashtile": [reason]})


def _number(operand: Operand, given: Given | None, side: str, dtype: torch.dtype) -> torch.Tensor:
    """What it stands for, in this dtype; with the gradient straight through to its source."""
    tensor, scale, source = operand
    if tensor.dtype not in STORED:
        return tensor
    number = number_of(tensor, None if scale is None else spread(scale, tensor, given, side), dtype)
    if source is None:
        return number
    source = source.to(dtype)
    return number.detach() + (source - source.detach())  # the difference is 0, or NaN where there is none


def _attend(wide: Any, given: Given | None, arguments: Arguments) -> Any:
    """out, or (out, lse), of tensors of four axes, by the way that every call goes."""
    varlen = given is not None and given.varlen
    if is_traced(*wide) or is_dual_level():
        return attend_traced(APART, tuple(t[0] for t in wide) if varlen else wide, given, arguments)
    q, k, v = wide
    call, others = prepare_call(q, k, v, arguments, given)
    made = attend(call, others, *wide)
    if not varlen:
        return made
    return tuple(t.squeeze(0) for t in made) if call.problem.returns_lse else made.squeeze(0)
