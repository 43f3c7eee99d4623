"""The interpreter as tests/quicken.py leaves it computes what Triton's own does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from flashtile.triton_glue import language as _triton

if not _triton.INTERPRETED:
    pytest.skip("kernels are compiled here", allow_module_level=True)

import triton
from triton.language import core, semantic
from triton.runtime import interpreter

from tests.operators import operators, quick_where
from tests.quicken import TRITON

if not triton.__version__.startswith(TRITON):
    pytest.skip(f"tests/quicken.py changes no interpreter but that of Triton {TRITON}*", allow_module_level=True)

SEMANTIC = semantic.TritonSemantic(interpreter.interpreter_builder)
ELEMENTS = (
    core.int1, core.int8, core.int32, core.int64, core.uint32, core.uint64, core.float16, core.bfloat16, core.float32,
    core.float64, core.pointer_type(core.float32),
)  # fmt: skip
FEW: tuple[tuple[int, ...], ...] = ((), (16, 1), (1, 16))
SHAPES = (*FEW, (1,), (16,), (16, 16), (2, 16, 16))
NUMBERS = (
    0, 1, -1, 3, 2**31 - 1, 2**31, 2**32, -(2**31) - 1, 2**40, True, 0.0, -0.0, 0.5, 0.1, -2.5, 1e-40, 1e300, float("inf"),
    float("-inf"), float("nan"),
)  # fmt: skip
METHODS = operators()
OWN = {name: getattr(member, "__wrapped__", member) for name in METHODS for member in [getattr(core.tensor, name)]}


def draw(element: Any, shape: tuple[int, ...], seed: int) -> core.tensor:
    """Any bits, or of reals the numbers above, from the `seed`-th on."""
    bits = np.random.default_rng(seed).integers(0, 256, (*(shape or (1,)), 8), dtype=np.uint8)
    numpy_type = interpreter._get_np_dtype(element)
    data = bits[..., 0] > 127 if numpy_type == np.bool_ else bits.view(np.uint64)[..., 0].astype(numpy_type)
    if element.is_floating() and element is not core.bfloat16:
        data = np.resize(np.roll(np.array([n for n in NUMBERS if type(n) is float]), -seed).astype(numpy_type), data.shape)
    return core.tensor(interpreter.TensorHandle(data, element), core.block_type(element, list(shape)) if shape else element)


def told(function: Any, *arguments: Any) -> Any:
    """What comes of it: the type and the bits, or that it is refused. (Triton's own truths hold bits of the type compared.)"""
    try:
        made = function(*arguments)
    except Exception:
        return "an error"
    if type(made) is not core.tensor:
        return made
    data, held = made.handle.data, "" if made.dtype is core.int1 else made.handle.dtype.name
    return str(made.type), held, [int(n) for n in made.shape], data.dtype, data.shape, data.tobytes()


@pytest.fixture(autouse=True)
def _language() -> Iterator[None]:
    """The language as a kernel finds it."""
    scope = interpreter._LangPatchScope()
    interpreter._patch_lang_core(triton.language, scope)
    yield
    scope.restore()


def own_method(name: str) -> Any:
    return lambda *arguments: OWN[name](*arguments, _semantic=SEMANTIC)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("__getitem__", "to")])
def test_operators_answer_as_tritons(name: str) -> None:
    own = own_method(name)
    quick, left_to_own = METHODS[name](own), METHODS[name](lambda *_: "left to Triton's own")
    for a, b in itertools.product(ELEMENTS, ELEMENTS):
        for x, y in itertools.product(SHAPES if a is b else FEW, repeat=2):
            left, right = draw(a, x, 1), draw(b, y, 2)
            assert told(quick, left, right) == told(own, left, right), (a, b, x, y)
    for element, shape, number in itertools.product(ELEMENTS, FEW[:2], NUMBERS):
        left = draw(element, shape, 3)
        for value in (number, core.constexpr(number)):
            assert told(quick, left, value) == told(own, left, value), (element, shape, number)
    assert left_to_own(draw(core.int32, (4, 1), 1), draw(core.int32, (1, 4), 2)).handle.data.shape == (4, 4)


def test_conversions_answer_as_tritons() -> None:
    own = own_method("to")
    quick = METHODS["to"](own)
    for a, b, shape in itertools.product(ELEMENTS[:-1], ELEMENTS[:-1], SHAPES):
        tensor = draw(a, shape, 1)
        for element in (b, core.constexpr(b)):
            assert told(quick, tensor, element) == told(own, tensor, element), (a, b, shape)


def test_rows_and_columns_are_tritons() -> None:
    own = own_method("__getitem__")
    quick, whole = METHODS["__getitem__"](own), slice(None)
    for element, shape in itertools.product(ELEMENTS, SHAPES):
        for slices in ((whole, None), (None, whole), (whole, None, whole), None, (whole, whole), (1, None), (whole, slice(1))):
            tensor = draw(element, shape, 1)
            assert told(quick, tensor, slices) == told(own, tensor, slices), (element, shape, slices)


def test_choices_are_tritons() -> None:
    own = semantic.TritonSemantic.where
    own = getattr(own, "__wrapped__", own)
    quick = quick_where(own)
    for a, b in itertools.product(ELEMENTS, ELEMENTS):
        for shape, x, y in itertools.product(SHAPES if a is b is core.float32 else FEW, repeat=3):
            given = SEMANTIC, draw(core.int1, shape, 1), draw(a, x, 2), draw(b, y, 3)
            assert told(quick, *given) == told(own, *given), (shape, a, x, b, y)
    for shape, x, element, number in itertools.product(FEW[:2], FEW[:2], ELEMENTS, NUMBERS):
        condition, tensor = draw(core.int1, shape, 1), draw(element, x, 2)
        for choice in ((tensor, number), (number, tensor)):
            given = SEMANTIC, condition, *choice
            assert told(quick, *given) == told(own, *given), (shape, element, x, number)


def test_float64_and_bfloat16_become_each_other() -> None:
    """Triton's own interpreter takes bfloat16's bits for an integer."""
    numbers = [1.0, -2.5, 3.0078125, 0.0, 1e30, 1.00390625 + 2.0**-20, -1e-30, 7.0]
    doubles = torch.tensor(numbers, dtype=torch.float64)
    wide = core.tensor(interpreter.TensorHandle(doubles.numpy(), core.float64), core.block_type(core.float64, [8]))
    narrow = wide.to(core.bfloat16, _semantic=SEMANTIC)
    bits = torch.from_numpy(narrow.handle.data.astype("int32")).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(bits, doubles.to(torch.bfloat16))
    back = narrow.to(core.float64, _semantic=SEMANTIC)
    assert torch.equal(torch.from_numpy(back.handle.data), doubles.to(torch.bfloat16).double())
