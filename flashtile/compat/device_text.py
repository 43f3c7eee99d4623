"""Operators on scalars in Triton: a line of text for each, and the device functions that these lines call."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flashtile.torch.api.recording import Node
from flashtile.triton_glue.language import jit, tl

WORKS_ON = {
    torch.float32: "tl.float32", torch.float16: "tl.float32", torch.bfloat16: "tl.float32", torch.float64: "tl.float64",
    torch.int64: "tl.int64", torch.int32: "tl.int32", torch.int16: "tl.int16", torch.int8: "tl.int8", torch.uint8: "tl.uint8",
    torch.bool: "tl.int1",
}  # fmt: skip
NARROW = {torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16"}


@jit
def floor_divided(a, b):
    """Integers."""
    quotient = a // b  # towards 0
    return tl.where((quotient * b != a) & ((a < 0) != (b < 0)), quotient - 1, quotient)


@jit
def floor_remainder(a, b):
    """Of the divisor's sign, of integers or floats."""
    rest = a % b  # of the dividend's sign
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@jit
def truncated(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@jit
def rounded(x):
    """To the nearest integer, halves to the even one."""
    low = tl.floor(x)
    ahead = x - low
    odd = low - 2.0 * tl.floor(low * 0.5)
    return tl.where((ahead > 0.5) | ((ahead == 0.5) & (odd == 1.0)), low + 1.0, low)


@jit
def log_one_plus(x):
    more = 1.0 + x
    near = more == 1.0
    return tl.where(near, x, tl.log(more) * (x / tl.where(near, 1.0, more - 1.0)))


@jit
def exp_minus_one(x):
    more = tl.exp(x)
    near = more == 1.0
    return tl.where(near, x, tl.where(tl.abs(x) < 0.5, (more - 1.0) * (x / tl.where(near, 1.0, tl.log(more))), more - 1.0))


@jit
def larger(a, b):
    """NaN where either is."""
    return tl.where((a > b) | (a != a), a, b)


@jit
def smaller(a, b):
    return tl.where((a < b) | (a != a), a, b)


class Unwritten(Exception):
    """There is no Triton for an operator."""


@dataclass
class Line:
    """A node with its arguments, as expressions of the dtypes that it asks for."""

    node: Node
    names: dict[int, str]  # of its arguments, by id

    def dtype_of(self, value: Any) -> torch.dtype | None:
        return value.dtype if isinstance(value, Node) else None

    def common(self, *values: Any) -> torch.dtype:
        """What torch computes in, of tensors and plain numbers."""
        known = [d for v in values if (d := self.dtype_of(v)) is not None]
        made = known[0]
        for other in known[1:]:
            made = torch.promote_types(made, other)
        plain = [v for v in values if not isinstance(v, Node) and v is not None]
        if any(isinstance(v, float) for v in plain) and not made.is_floating_point:
            return torch.get_default_dtype()
        if made == torch.bool and any(not isinstance(v, bool) for v in plain):
            return torch.int64
        return made

    def of(self, value: Any, dtype: torch.dtype) -> str:
        if isinstance(value, Node):
            return cast(self.names[id(value)], value.dtype, dtype)
        return number(value, dtype)


def number(value: Any, dtype: torch.dtype) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        text = f'float("{value}")'
    elif dtype.is_floating_point:
        text = repr(float(value))
    else:
        text = repr(int(value))
    return f"tl.cast({text}, {WORKS_ON[dtype]})" if dtype != torch.bool else f"(tl.cast({text}, tl.int32) != 0)"


def cast(text: str, before: torch.dtype | None, dtype: torch.dtype) -> str:
    """An expression of another dtype; 16-bit floats are rounded, and kept in 32 bits."""
    if before == dtype or (before in NARROW and dtype == torch.float32):
        return text
    if dtype == torch.bool:
        return f"({text} != 0)"
    if dtype in NARROW:
        return f"tl.cast(tl.cast({text}, {NARROW[dtype]}), tl.float32)"
    return f"tl.cast({text}, {WORKS_ON[dtype]})"


def _unary(text: str) -> Callable[[Line], str]:
    """Of one number, floating where the result is."""
    return lambda line: text.format(line.of(line.node.args[0], _result(line)))


def _binary(text: str) -> Callable[[Line], str]:
    def write(line: Line) -> str:
        first, second = line.node.args[:2]
        dtype = _result(line)
        other = line.of(second, dtype)
        alpha = line.node.kwargs.get("alpha", line.node.args[2] if len(line.node.args) > 2 else 1)
        if alpha != 1:
            other = f"({other} * {number(alpha, dtype)})"
        return text.format(line.of(first, dtype), other)

    return write


def _result(line: Line) -> torch.dtype:
    assert line.node.dtype is not None
    return line.node.dtype


def _compared(text: str) -> Callable[[Line], str]:
    def write(line: Line) -> str:
        dtype = line.common(*line.node.args[:2])
        return text.format(*(line.of(a, dtype) for a in line.node.args[:2]))

    return write


def _logical(text: str) -> Callable[[Line], str]:
    return lambda line: text.format(*(line.of(a, torch.bool) for a in line.node.args))


def _divided(line: Line) -> str:
    mode = line.node.kwargs.get("rounding_mode")
    first, second = line.node.args[:2]
    dtype = _result(line)
    a, b = line.of(first, dtype), line.of(second, dtype)
    if mode is None:
        return f"{a} / {b}"
    if mode == "floor":
        return f"tl.floor({a} / {b})" if dtype.is_floating_point else f"floor_divided({a}, {b})"
    return f"truncated({a} / {b})" if dtype.is_floating_point else f"{a} // {b}"


def _floor_divided(line: Line) -> str:
    dtype = _result(line)
    a, b = (line.of(v, dtype) for v in line.node.args[:2])
    if dtype.is_floating_point:
        return f"tl.floor(({a} - floor_remainder({a}, {b})) / {b} + 0.5)"
    return f"floor_divided({a}, {b})"


def _chosen(line: Line) -> str:
    condition, first, second = line.node.args
    return f"tl.where({line.of(condition, torch.bool)}, {line.of(first, _result(line))}, {line.of(second, _result(line))})"


def _filled(line: Line) -> str:
    given, mask, value = line.node.args
    return f"tl.where({line.of(mask, torch.bool)}, {line.of(value, _result(line))}, {line.of(given, _result(line))})"


def _clamped(line: Line) -> str:
    bounds = dict(zip(("min", "max"), line.node.args[1:], strict=False)) | line.node.kwargs
    text = line.of(line.node.args[0], _result(line))
    for name, function in (("min", "larger"), ("max", "smaller")):
        if bounds.get(name) is not None:
            text = f"{function}({text}, {line.of(bounds[name], _result(line))})"
    return text


def _powered(line: Line) -> str:
    base, exponent = line.node.args
    dtype = _result(line)
    if isinstance(exponent, (Node, torch.Tensor)):
        raise Unwritten
    x = line.of(base, dtype)
    if exponent == 0.5 and dtype.is_floating_point:
        return f"tl.sqrt({x})"
    if float(exponent) != int(exponent) or not 0 <= abs(exponent) <= 8 or (exponent < 0 and not dtype.is_floating_point):
        raise Unwritten
    product = " * ".join([f"({x})"] * abs(int(exponent))) or number(1, dtype)
    return product if exponent >= 0 else f"{number(1, dtype)} / ({product})"


def _raised(line: Line) -> str:
    """A number to the power of a tensor."""
    base, exponent = line.node.args
    if isinstance(base, Node) or base <= 0 or not _result(line).is_floating_point:
        raise Unwritten
    return f"tl.exp2({line.of(exponent, _result(line))} * {number(math.log2(base), _result(line))})"


def _same(line: Line) -> str:
    return line.of(line.node.args[0], _result(line))


def _full(line: Line) -> str:
    value = {"zeros_like": 0, "new_zeros": 0, "zeros": 0, "ones_like": 1, "new_ones": 1, "ones": 1}.get(line.node.name)
    if value is None:
        value = line.node.args[{"scalar_tensor": 0, "new_full": 2}.get(line.node.name, 1)]
    return line.of(value, _result(line))


def _signed(line: Line) -> str:
    x, one, zero = (line.of(line.node.args[0], _result(line)), number(1, _result(line)), number(0, _result(line)))
    return f"tl.where({x} > 0, {one}, tl.where({x} < 0, {one} * -1, {zero} * {x}))"


def _tanh_backward(line: Line) -> str:
    grad, out = (line.of(a, _result(line)) for a in line.node.args)
    return f"{grad} * (1.0 - {out} * {out})"


def _sigmoid_backward(line: Line) -> str:
    grad, out = (line.of(a, _result(line)) for a in line.node.args)
    return f"{grad} * ((1.0 - {out}) * {out})"


def _threshold_backward(line: Line) -> str:
    grad, given, threshold = line.node.args
    dtype = _result(line)
    return f"tl.where({line.of(given, dtype)} <= {number(threshold, dtype)}, {number(0, dtype)}, {line.of(grad, dtype)})"


def _not(line: Line) -> str:
    x = line.of(line.node.args[0], _result(line))
    return f"({x} == 0)" if _result(line) == torch.bool else f"~{x}"


# Of each operator on scalars its text. Where an argument is NaN the result is as torch's.
POINTWISE: dict[str, Callable[[Line], str]] = {
    "add": _binary("{} + {}"), "sub": _binary("{} - {}"), "rsub": _binary("{1} - {0}"), "mul": _binary("{} * {}"),
    "div": _divided, "floor_divide": _floor_divided, "remainder": _binary("floor_remainder({}, {})"),
    "fmod": _binary("({}) % ({})"), "neg": _unary("-({})"), "abs": _unary("tl.abs({})"), "exp": _unary("tl.exp({})"),
    "exp2": _unary("tl.exp2({})"), "expm1": _unary("exp_minus_one({})"), "log": _unary("tl.log({})"),
    "log2": _unary("tl.log2({})"), "log1p": _unary("log_one_plus({})"), "sqrt": _unary("tl.sqrt({})"),
    "rsqrt": _unary("1.0 / tl.sqrt({})"), "reciprocal": _unary("1.0 / ({})"), "sin": _unary("tl.sin({})"),
    "cos": _unary("tl.cos({})"), "erf": _unary("tl.erf({})"), "tanh": _unary("tanh({})"),
    "sigmoid": _unary("1.0 / (1.0 + tl.exp(-({})))"), "relu": _unary("larger({0}, ({0}) * 0)"),
    "floor": _unary("tl.floor({})"), "ceil": _unary("tl.ceil({})"), "trunc": _unary("truncated({})"),
    "round": _unary("rounded({})"), "sgn": _signed, "sign": _signed, "maximum": _binary("larger({}, {})"),
    "minimum": _binary("smaller({}, {})"), "clamp": _clamped, "clamp_min": _clamped,
    "clamp_max": lambda line: f"smaller({line.of(line.node.args[0], _result(line))}, "
                              f"{line.of(line.node.args[1], _result(line))})",
    "where": _chosen, "masked_fill": _filled, "pow": lambda line: (_raised if not isinstance(line.node.args[0], Node)
                                                                     else _powered)(line),
    "eq": _compared("({} == {})"), "ne": _compared("({} != {})"), "lt": _compared("({} < {})"), "le": _compared("({} <= {})"),
    "gt": _compared("({} > {})"), "ge": _compared("({} >= {})"), "logical_and": _logical("({} & {})"),
    "logical_or": _logical("({} | {})"), "logical_xor": _logical("({} ^ {})"), "logical_not": _logical("({} == 0)"),
    "bitwise_and": _binary("({} & {})"), "bitwise_or": _binary("({} | {})"), "bitwise_xor": _binary("({} ^ {})"),
    "bitwise_not": _not, "isnan": lambda line: "({0} != {0})".format(line.of(line.node.args[0], line.common(*line.node.args))),
    "copy": lambda line: line.of(line.node.args[1], _result(line)),
    "_to_copy": _same, "clone": _same, "detach": _same, "alias": _same,
    "zeros_like": _full, "ones_like": _full, "full_like": _full, "new_zeros": _full, "new_ones": _full, "new_full": _full,
    "zeros": _full, "ones": _full, "full": _full, "scalar_tensor": _full, "tanh_backward": _tanh_backward,
    "sigmoid_backward": _sigmoid_backward, "threshold_backward": _threshold_backward,
}  # fmt: skip
