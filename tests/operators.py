"""The operators of Triton's interpreter where nothing has to be asked: numpy's, on what the tensors hold.

That is where tensors of one type meet, or a tensor and a number that its type has: numpy broadcasts as Triton does. All
else, errors too, is left to Triton's own operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from triton.language import core
from triton.runtime import interpreter

Operator = Callable[[Any, Any], Any]

SIGNED, UNSIGNED = ("int32", "int64"), ("uint32", "uint64")
ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
BITS = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
COMPARISONS = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal
}  # fmt: skip
REALS = ("fp32", "fp64")
PLAIN = {name: getattr(np, name.replace("fp", "float")) for name in (*SIGNED, *UNSIGNED, *REALS)}
RANGES = {  # of numbers that are taken in a tensor's type, without a sign those of float32 that are not exact
    **dict.fromkeys(SIGNED, (-(2**31), 2**31 - 1)), **dict.fromkeys(UNSIGNED, (0, 2**32 - 1)), "fp32": (2.0**-126, 2.0**127)
}  # fmt: skip
kinds: dict[tuple[Any, ...], Any] = {}  # block types, by element and shape
numbers: dict[tuple[Any, ...], Any] = {}  # by element, Python's type and value


def operators() -> dict[str, Callable[[Operator], Operator]]:
    """What makes a method of tensors, by its name, of Triton's own."""
    made: dict[str, Callable[[Operator], Operator]] = {"__getitem__": _index, "to": _to}
    for computes, elements, answer in (
        (ARITHMETIC, (*SIGNED, *UNSIGNED, "fp16", "fp32", "fp64"), None),
        (BITS, (*SIGNED, *UNSIGNED, "int1"), None),
        (COMPARISONS, (*SIGNED, *UNSIGNED, "fp32", "fp64"), core.int1),
    ):
        for name, compute in computes.items():
            made[f"__{name}__"] = _operator(compute, frozenset(elements), answer)
            made[f"__r{name}__"] = _operator(lambda a, b, compute=compute: compute(b, a), frozenset(elements), answer)
    return made


def _operator(compute: Callable[[Any, Any], Any], elements: frozenset[str], answer: Any) -> Callable[[Operator], Operator]:
    """answer: the element type of what comes of it, where that is not the operands'."""

    def made(own: Operator) -> Operator:
        def operate(self: Any, other: Any) -> Any:
            element, left, block = self.dtype, self.handle.data, _is_block(self)
            if type(other) is core.tensor:
                right, beside, block = other.handle.data, other.dtype, block or _is_block(other)
                if beside.name != element.name:
                    if compute is np.add and element.is_ptr() and beside.name in SIGNED:
                        right = right.astype(np.uint64) * _bytes(element)
                    elif element.name in SIGNED and beside.name in SIGNED:
                        element = core.int64
                    else:
                        return own(self, other)
                elif element.name not in elements:
                    return own(self, other)
            else:
                moves = compute is np.add and element.is_ptr()
                right = _number("int64" if moves else element.name, getattr(other, "value", other))
                if right is None or not (moves or element.name in elements):
                    return own(self, other)
                if moves:
                    right = right.astype(np.uint64) * _bytes(element)
            return _tensor(compute(left, right), answer or element, block)

        return operate

    return made


def _number(element: str, value: Any) -> Any:
    """A number as it stands beside tensors of this element type; None where it is none, or Triton has to be asked."""
    if type(value) is not int and type(value) is not float:
        return None
    key = element, type(value), value
    if key not in numbers:
        least, most = RANGES.get(element, (0, -1))
        if type(value) is int:
            has = element not in REALS and least <= value <= most
        else:  # Triton rounds what a float64 is compared with, and has other types for what float32 has not
            exact = float(np.float32(value)) == value
            has = element in REALS and (exact or (element == "fp32" and least <= abs(value) <= most))
        numbers[key] = PLAIN[element](value) if has else None
    return numbers[key]


def _bytes(pointer: Any) -> np.uint64:
    return np.uint64(max(1, pointer.element_ty.primitive_bitwidth // 8))


def _is_block(tensor: Any) -> bool:
    return tensor.type is not tensor.dtype


def _tensor(data: Any, element: Any, block: bool) -> Any:
    kind = element
    if block:
        key = element.name, data.shape
        if key not in kinds:
            kinds[key] = core.block_type(element, list(data.shape))
        kind = kinds[key]
    return core.tensor(interpreter.TensorHandle(data, element), kind)


def _to(own: Callable[..., Any]) -> Callable[..., Any]:
    """A tensor in another type of numpy's, or in its own."""

    def to(self: Any, dtype: Any, *rest: Any, **more: Any) -> Any:
        if not rest and not more:
            element = getattr(dtype, "value", dtype).scalar
            if element.name == self.dtype.name:
                return self
            if self.dtype.name in PLAIN and element.name in PLAIN:
                return _tensor(self.handle.data.astype(PLAIN[element.name]), element, _is_block(self))
        return own(self, dtype, *rest, **more)

    return to


def _index(own: Operator) -> Operator:
    """A vector as a row or a column."""

    def index(self: Any, slices: Any) -> Any:
        if type(slices) is tuple and len(slices) == 2 and self.type.is_block() and self.handle.data.ndim == 1:
            if slices[1] is None and slices[0] == slice(None):
                return _tensor(self.handle.data[:, None], self.dtype, True)
            if slices[0] is None and slices[1] == slice(None):
                return _tensor(self.handle.data[None, :], self.dtype, True)
        return own(self, slices)

    return index


def quick_where(own: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a choice between two."""

    def where(self: Any, condition: Any, x: Any, y: Any) -> Any:
        tensors = [operand for operand in (x, y) if type(operand) is core.tensor]
        if condition.dtype.name == "int1" and tensors:
            element = tensors[0].dtype
            chosen = [
                _number(element.name, operand) if type(operand) is not core.tensor
                else operand.handle.data if operand.dtype.name == element.name
                else None
                for operand in (x, y)
            ]  # fmt: skip
            if chosen[0] is not None and chosen[1] is not None:
                return _tensor(np.where(condition.handle.data, *chosen), element, any(map(_is_block, (condition, *tensors))))
        return own(self, condition, x, y)

    where.__wrapped__ = own
    return where
