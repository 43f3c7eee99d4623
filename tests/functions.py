"""The functions of triton.language where nothing has to be asked, as operators.py has the operators.

That is where tensors are of plain types and alike in shape. All else, errors too, is left to Triton's own function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton.language import core, standard
from triton.runtime import interpreter

from tests.operators import REALS, SIGNED, UNSIGNED, conversion, make_tensor, number_of, operator

Function = Callable[..., Any]

PLAIN = frozenset((*SIGNED, *UNSIGNED, *REALS, "int8", "uint8", "int16", "uint16", "fp16", "bf16", "fp8e4nv", "fp8e5"))
LOADED, BYTE = PLAIN | {"int1"}, np.dtype(np.int8)
HINTS = {"cache_modifier": ("", ".cg"), "eviction_policy": ("", "evict_first", "evict_last")}  # of no meaning to numbers
ADDRESSES = 2**47  # of a process
LOWEST = 4096


def functions() -> dict[str, Callable[[Function], Function]]:
    """What makes a function of triton.language, by its name, of Triton's own."""
    return {
        "load": _load, "store": _store, "dot": _dot, "arange": _arange, "full": _full, "trans": _trans, "cast": _cast,
        "minimum": _extreme(np.minimum), "maximum": _extreme(np.maximum),
    }  # fmt: skip


@cache
def memory(kind: np.dtype[Any]) -> np.ndarray:
    """All memory of the process from LOWEST on, as numbers of this kind, of which one begins at each address."""
    interface = {"shape": (ADDRESSES,), "strides": (1,), "typestr": kind.str, "data": (LOWEST, False), "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def _places(pointer: Any, mask: Any, more: dict[str, Any], kinds: frozenset[str] = PLAIN) -> tuple[Any, Any, Any] | None:
    """(element, place in memory of each, which of them, or None for all), where that is plain."""
    if type(pointer) is not core.tensor or pointer.dtype.__class__ is not core.pointer_type:
        return None
    element = pointer.dtype.element_ty
    if element.__class__ is not core.dtype or element.name not in kinds:
        return None
    for name, value in more.items():
        if getattr(value, "value", value) not in HINTS.get(name, ()):
            return None
    places = pointer.handle.data.view(np.int64) - LOWEST
    if mask is None:
        return element, places, None
    if type(mask) is not core.tensor or mask.dtype.name != "int1" or mask.handle.data.dtype != np.bool_:
        return None
    seen = _spread(mask, pointer)
    return seen if seen is None else (element, places, None if seen.all() else seen)


def _spread(tensor: Any, pointer: Any) -> np.ndarray | None:
    """What a tensor holds, for each of the pointers; None where Triton refuses it or wants more pointers."""
    data, shape, is_block = tensor.handle.data, pointer.handle.data.shape, pointer.type is not pointer.dtype
    if not is_block and tensor.type is not tensor.dtype:
        return None
    if data.shape != shape:
        if not is_block or data.ndim != len(shape) != 1 or np.broadcast_shapes(data.shape, shape) != shape:
            return None
        data = np.broadcast_to(data, shape)
    return data


def _is_zero(number: Any) -> bool:
    return type(number) in (int, float) and number == 0 and math.copysign(1.0, number) > 0


def _load(own: Function) -> Function:
    def load(pointer: Any, mask: Any = None, other: Any = None, *rest: Any, **more: Any) -> Any:
        found = None if rest or (mask is None and other is not None) else _places(pointer, mask, more, LOADED)
        if found is None:
            return own(pointer, mask, other, *rest, **more)
        element, places, seen = found
        truths = element.name == "int1"  # a byte each
        held = memory(BYTE if truths else interpreter._get_np_dtype(element))
        filled = 0 if other is None or _is_zero(getattr(other, "value", other)) else _filling(other, element, pointer)
        if filled is None:
            return own(pointer, mask, other, **more)
        if seen is None:
            data = held[places]
        else:
            data = np.empty(places.shape, held.dtype)
            data[...] = filled
            data[seen] = held[places[seen]]
        if truths:
            data = data != 0
        return make_tensor(data, element, pointer.type is not pointer.dtype)

    return load


def _filling(other: Any, element: Any, pointer: Any) -> Any:
    """What is there instead, as numpy takes it; None where Triton has to be asked."""
    if element.name == "int1":
        return None
    if type(other) is core.tensor:
        return _spread(other, pointer) if other.dtype.name == element.name else None
    number = getattr(other, "value", other)
    return None if number == 0 else number_of(element.name, number)


def _store(own: Function) -> Function:
    def store(pointer: Any, value: Any, mask: Any = None, *rest: Any, **more: Any) -> Any:
        found = _places(pointer, mask, more) if type(value) is core.tensor and not rest else None
        if found is None or not (found[0].name == value.dtype.name or {found[0].name, value.dtype.name} <= {*REALS}):
            return own(pointer, value, mask, *rest, **more)
        (element, places, seen), data = found, _spread(value, pointer)
        if data is None:
            return own(pointer, value, mask, **more)
        held = memory(interpreter._get_np_dtype(element))
        if seen is None:
            held[places] = data
        else:
            held[places[seen]] = data[seen]
        return None

    return store


def _dot(own: Function) -> Function:
    known: dict[tuple[Any, ...], tuple[Any, Any]] = {}  # of such operands: the product's type, and a sum to begin with

    def dot(input: Any, other: Any, acc: Any = None, **more: Any) -> Any:
        if type(input) is not core.tensor or type(other) is not core.tensor or type(acc) not in (core.tensor, type(None)):
            return own(input, other, acc, **more)
        options = tuple((name, getattr(value, "value", value)) for name, value in more.items())
        key = input.type.name, other.type.name, acc if acc is None else acc.type.name, options
        if key not in known:
            made = own(input, other, acc, **more)
            if len(made.type.shape) < 4:
                zeros = interpreter.TensorHandle(np.zeros_like(made.handle.data), made.dtype)
                known[key] = made.type, zeros
            return made
        kind, zeros = known[key]
        begun = zeros if acc is None else acc.handle
        builder = interpreter.interpreter_builder
        return core.tensor(builder.create_dot(input.handle, other.handle, begun, None, 0), kind)

    return dot


def _cast(own: Function) -> Function:
    of_tensor = conversion(own)
    return lambda input, *how, **more: (of_tensor if type(input) is core.tensor else own)(input, *how, **more)


def _arange(own: Function) -> Function:
    known: dict[tuple[int, int], np.ndarray] = {}

    def arange(start: Any, end: Any) -> Any:
        key = getattr(start, "value", start), getattr(end, "value", end)
        if key not in known:
            known[key] = _kept(own(start, end))
        return make_tensor(known[key], core.int32, True)

    return arange


def _full(own: Function) -> Function:
    known: dict[tuple[Any, ...], np.ndarray] = {}

    def full(shape: Any, value: Any, dtype: Any) -> Any:
        number, element = getattr(value, "value", value), getattr(dtype, "value", dtype)
        if type(number) not in (int, float) or (number == 0 and not _is_zero(number)) or element.name not in PLAIN:
            return own(shape, value, dtype)
        if not shape:
            return own(shape, value, dtype)
        key = (*(getattr(n, "value", n) for n in shape), type(number), number, element.name)
        if key not in known:
            known[key] = _kept(own(shape, value, dtype))
        return make_tensor(known[key], element, True)

    return full


def _kept(tensor: Any) -> np.ndarray:
    """What it holds, for others to hold too."""
    tensor.handle.data.flags.writeable = False
    return tensor.handle.data


def _trans(own: Function) -> Function:
    def trans(input: Any, *dims: Any) -> Any:
        if dims or input.handle.data.ndim != 2 or not input.type.is_block():
            return own(input, *dims)
        return make_tensor(input.handle.data.T, input.dtype, True)

    return trans


def _extreme(compute: Callable[[Any, Any], Any]) -> Callable[[Function], Function]:
    elements = frozenset((*SIGNED, *UNSIGNED, "fp32", "fp64"))

    def made(own: Function) -> Function:
        of_two = operator(compute, elements)(own)
        turned = operator(lambda a, b: compute(b, a), elements)(lambda y, x: own(x, y))

        def extreme(x: Any, y: Any, *rest: Any, **more: Any) -> Any:
            if rest or more:
                return own(x, y, *rest, **more)
            if type(x) is core.tensor:
                return of_two(x, y)
            return turned(y, x) if type(y) is core.tensor else own(x, y)

        return extreme

    return made


def reductions() -> dict[Any, Callable[[Function], Function]]:
    """The same for the functions of triton.language that are kernels' own: what they are of, and what makes one of it."""
    by_numpy = {standard.max: np.fmax, standard.min: np.fmin, standard.sum: np.add}
    return {kernel.fn: _reduction(compute) for kernel, compute in by_numpy.items()}


def _reduction(compute: Any) -> Callable[[Function], Function]:
    elements = frozenset((*SIGNED, *UNSIGNED, *REALS))

    def made(own: Function) -> Function:
        def reduction(input: Any, axis: Any = None, *rest: Any, **more: Any) -> Any:
            along = getattr(axis, "value", axis)
            if not rest and not more and type(along) is int and type(input) is core.tensor and input.dtype.name in elements:
                data = input.handle.data
                if input.type is not input.dtype and 0 <= along < data.ndim:
                    left = compute.reduce(data, along)
                    if data.ndim == 1:
                        return make_tensor(np.array([left], data.dtype), input.dtype, False)
                    return make_tensor(left.astype(data.dtype, copy=False), input.dtype, True)
            return own(input, axis, *rest, **more)

        return reduction

    return made


# Triton's own: taken as this file is imported, for a kernel that runs later leaves others in their places.
TRITONS = {name: getattr(getattr(core, name), "__wrapped__", getattr(core, name)) for name in functions()}
