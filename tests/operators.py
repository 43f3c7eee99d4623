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

from flashtile.triton_glue.interpreter import narrow, widen

Operator = Callable[[Any, Any], Any]
new: Any = object.__new__
Handle, Tensor = interpreter.TensorHandle, core.tensor

SIGNED, UNSIGNED = ("int32", "int64"), ("uint32", "uint64")
ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
DIVISIONS = {"floordiv": lambda a, b: (a - np.fmod(a, b)) // b, "mod": np.fmod}  # as C has them
SHIFTS = {"lshift": np.left_shift, "rshift": np.right_shift}
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
sizes: dict[str, np.uint64] = {}  # of what pointers are to, by their type
moves: dict[tuple[str, int], np.uint64 | None] = {}
numbers: dict[tuple[Any, ...], Any] = {}  # by element, Python's type and value


def operators() -> dict[str, Callable[[Operator], Operator]]:
    """What makes a method of tensors, by its name, of Triton's own."""
    made: dict[str, Callable[[Operator], Operator]] = {"__getitem__": _index, "to": conversion}
    for computes, elements, answer in (
        (ARITHMETIC, (*SIGNED, *UNSIGNED, "fp16", "fp32", "fp64"), None),
        (DIVISIONS, SIGNED, None),
        ({"truediv": np.divide}, REALS, None),
        (BITS, (*SIGNED, *UNSIGNED, "int1"), None),
        (SHIFTS, (*SIGNED, *UNSIGNED), None),
        (COMPARISONS, (*SIGNED, *UNSIGNED, *REALS), core.int1),
    ):
        for name, compute in computes.items():
            made[f"__{name}__"] = operator(compute, frozenset(elements), answer)
            made[f"__r{name}__"] = operator(lambda a, b, compute=compute: compute(b, a), frozenset(elements), answer)
    return {name: maker for name, maker in made.items() if hasattr(core.tensor, name)}


def operator(
    compute: Callable[[Any, Any], Any], elements: frozenset[str], answer: Any = None
) -> Callable[[Operator], Operator]:
    """answer: the element type of what comes of it, where that is not the operands'."""
    adds, truths = compute is np.add, compute in (np.equal, np.not_equal)

    def made(own: Operator) -> Operator:
        def operate(self: Any, other: Any) -> Any:
            element, kind, left = self.dtype, self.type, self.handle.data
            block = kind is not element
            if type(other) is Tensor:
                right, beside = other.handle.data, other.dtype
                block = block or other.type is not beside
                if beside is not element and beside.name != element.name:
                    if adds and element.is_ptr() and beside.name in SIGNED:
                        right = (right.view if beside is core.int64 else right.astype)(np.uint64) * _bytes(element)
                    elif element.name in SIGNED and beside.name in SIGNED and "int64" in elements:
                        element = core.int64
                    elif element.name in REALS and beside.name in REALS and "fp64" in elements:
                        element = core.float64
                    else:
                        return own(self, other)
                elif element.name not in elements:
                    return own(self, other)
            else:
                value = getattr(other, "value", other)
                if element.name in elements:
                    right = number_of(element.name, value)
                elif adds and element.is_ptr():
                    right = _move(element, value)
                elif truths and element.name == "int1" and type(value) is int and 0 <= value <= 1:
                    right = np.bool_(value)
                else:
                    right = None
                if right is None:
                    return own(self, other)
            data = compute(left, right)
            if answer is not None:
                return make_tensor(data, answer, block)
            if not block or element is not self.dtype or data.shape != left.shape or kind is element:
                return make_tensor(data, element, block)
            handle, tensor = new(Handle), new(Tensor)
            handle.data, handle.dtype = data, element
            tensor.handle, tensor.dtype, tensor.type = handle, element, kind
            return tensor

        return operate

    return made


def number_of(element: str, value: Any) -> Any:
    """A number as it stands beside tensors of this element type; None where it is none, or Triton has to be asked."""
    if type(value) is not int and type(value) is not float:
        return None
    key = element, type(value), value
    try:
        return numbers[key]
    except KeyError:
        least, most = RANGES.get(element, (0, -1))
        if type(value) is int:
            has = element not in REALS and least <= value <= most
        else:  # Triton rounds what a float64 is compared with, and has other types for what float32 has not
            exact = float(np.float32(value)) == value
            has = element in REALS and (exact or (element == "fp32" and least <= abs(value) <= most))
        numbers[key] = PLAIN[element](value) if has else None
    return numbers[key]


def _bytes(pointer: Any) -> np.uint64:
    """How far apart elements are."""
    if pointer.name not in sizes:
        sizes[pointer.name] = np.uint64(max(1, pointer.element_ty.primitive_bitwidth // 8))
    return sizes[pointer.name]


def _move(pointer: Any, value: Any) -> np.uint64 | None:
    """What so many elements add to an address."""
    if type(value) is not int:
        return None
    key = pointer.name, value
    if key not in moves:
        number = number_of("int64", value)
        moves[key] = None if number is None else number.astype(np.uint64) * _bytes(pointer)
    return moves[key]


def _is_block(tensor: Any) -> bool:
    return tensor.type is not tensor.dtype


def make_tensor(data: Any, element: Any, block: bool) -> Any:
    """A tensor of this element type that holds the data."""
    handle, tensor = new(Handle), new(Tensor)
    handle.data, handle.dtype = data, element
    tensor.handle, tensor.dtype, tensor.type = handle, element, element
    if block:
        key = element.name, data.shape
        try:
            tensor.type = kinds[key]
        except KeyError:
            tensor.type = kinds[key] = core.block_type(element, list(data.shape))
    return tensor


def conversion(own: Callable[..., Any]) -> Callable[..., Any]:
    """A tensor in another type, in its own, or its bits as another one's."""

    def to(self: Any, dtype: Any, *rest: Any, **more: Any) -> Any:
        element, data = getattr(dtype, "value", dtype).scalar, self.handle.data
        pair = self.dtype.name, element.name
        if not rest and not more:
            if pair[0] == pair[1]:
                return self
            if pair in CONVERSIONS:
                return make_tensor(CONVERSIONS[pair](data), element, _is_block(self))
        elif not rest and pair in SAME_BITS and len(more) == 1 and more.get("bitcast") is True:
            return make_tensor(data.view(PLAIN[pair[1]]), element, _is_block(self))
        return own(self, dtype, *rest, **more)

    return to


def _conversion(name: str) -> Callable[[np.ndarray], np.ndarray]:
    return lambda data: data.astype(PLAIN[name])


SAME_BITS = frozenset((*zip(SIGNED, UNSIGNED, strict=True), *zip(UNSIGNED, SIGNED, strict=True)))
CONVERSIONS: dict[tuple[str, str], Callable[[np.ndarray], np.ndarray]] = {
    **{(a, b): _conversion(b) for a in (*PLAIN, "int1") for b in PLAIN},
    ("fp32", "fp16"): lambda data: data.astype(np.float16), ("fp16", "fp32"): _conversion("fp32"),
    ("fp32", "bf16"): narrow, ("bf16", "fp32"): widen,
}  # fmt: skip


def _index(own: Operator) -> Operator:
    """A vector as a row or a column."""

    def index(self: Any, slices: Any) -> Any:
        if type(slices) is tuple and len(slices) == 2 and self.type.is_block() and self.handle.data.ndim == 1:
            if slices[1] is None and slices[0] == slice(None):
                return make_tensor(self.handle.data[:, None], self.dtype, True)
            if slices[0] is None and slices[1] == slice(None):
                return make_tensor(self.handle.data[None, :], self.dtype, True)
        return own(self, slices)

    return index


def quick_where(own: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a choice between two."""

    def where(self: Any, condition: Any, x: Any, y: Any) -> Any:
        of_x, of_y = type(x) is core.tensor, type(y) is core.tensor
        if condition.dtype.name == "int1" and (of_x or of_y):
            element = x.dtype if of_x else y.dtype
            block = condition.type is not condition.dtype or (of_x and _is_block(x)) or (of_y and _is_block(y))
            left = x.handle.data if of_x else number_of(element.name, x)
            right = number_of(element.name, y) if not of_y else y.handle.data if y.dtype.name == element.name else None
            if left is not None and right is not None:
                return make_tensor(np.where(condition.handle.data, left, right), element, block)
        return own(self, condition, x, y)

    where.__wrapped__ = own
    return where
