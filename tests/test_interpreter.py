"""The interpreter as tests/quicken.py leaves it computes what Triton's own does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from flashtile.triton_glue import language as _triton

if not _triton.INTERPRETED:
    pytest.skip("kernels are compiled here", allow_module_level=True)

import triton
from triton.language import core, semantic, standard
from triton.runtime import interpreter

from tests.functions import TRITONS, functions, reductions
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
FUNCTIONS = functions()
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
    return lambda *arguments, **more: OWN[name](*arguments, **more, _semantic=SEMANTIC)


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
    element = core.float32 if "truediv" in name else core.int32
    assert left_to_own(draw(element, (4, 1), 1), draw(element, (1, 4), 2)).handle.data.shape == (4, 4)


def test_conversions_answer_as_tritons() -> None:
    own = own_method("to")
    quick = METHODS["to"](own)
    for a, b, shape in itertools.product(ELEMENTS[:-1], ELEMENTS[:-1], SHAPES):
        tensor = draw(a, shape, 1)
        for element in (b, core.constexpr(b)):
            assert told(quick, tensor, element) == told(own, tensor, element), (a, b, shape)
            bits = partial(quick, bitcast=True), partial(own, bitcast=True)
            assert told(bits[0], tensor, element) == told(bits[1], tensor, element), (a, b, shape)


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


def language(name: str) -> tuple[Any, Any]:
    """(Triton's own function, what stands for it here)."""
    own = partial(TRITONS[name], _semantic=SEMANTIC)
    return own, FUNCTIONS[name](own)


def pointers(memory: np.ndarray, element: Any, shape: tuple[int, ...], step: int = 1) -> core.tensor:
    """To elements of the memory, from the first on, every `step`-th."""
    places = (np.arange(np.prod(shape, dtype=int)) * step % memory.size).reshape(shape or (1,))
    kind = core.pointer_type(element)
    data = (memory.ctypes.data + places * memory.itemsize).astype(np.uint64)
    return core.tensor(interpreter.TensorHandle(data, kind), core.block_type(kind, list(shape)) if shape else kind)


@pytest.mark.parametrize("step", [1, 3, 0])
@pytest.mark.parametrize("element", ELEMENTS[:-1], ids=str)
def test_memory_is_read_as_tritons_reads_it(element: Any, step: int) -> None:
    own, quick = language("load")
    memory = draw(element, (16, 32), 1).handle.data
    for shape in ((), (1,), (16,), (16, 32)):
        pointer = pointers(memory, element, shape, step)
        masks = [draw(core.int1, s, 1) for s in (shape, (), (1, 32))]
        masks.append(core.tensor(interpreter.TensorHandle(np.ones(shape or (1,), bool), core.int1), masks[0].type))
        assert told(quick, pointer) == told(own, pointer)
        for mask in masks:
            for other in (None, 0, 0.0, -0.0, 1, 2.5, core.constexpr(0.0), draw(element, shape, 3)):
                assert told(quick, pointer, mask, other) == told(own, pointer, mask, other), (shape, mask, other)
    assert told(quick, pointer, None, 0.0) == told(own, pointer, None, 0.0) == "an error"
    for name in (".cg", "evict_last", "no such"):
        for hint in ({"cache_modifier": name}, {"eviction_policy": name}):
            assert told(partial(quick, **hint), pointer) == told(partial(own, **hint), pointer), hint


@pytest.mark.parametrize("step", [1, 3, 0])
@pytest.mark.parametrize("element", ELEMENTS[:-1], ids=str)
def test_memory_is_written_as_tritons_writes_it(element: Any, step: int) -> None:
    own, quick = language("store")
    written: list[Any] = []
    for shape in ((), (16,), (16, 32)):
        values = [draw(other, s, 3) for other in {element, core.float32, core.float64} for s in {shape, (), (1, 32), (1,)}]
        for value, mask in itertools.product((*values, 1, 2.5), (None, *(draw(core.int1, s, 1) for s in (shape, (16, 1))))):
            for store in (own, quick):
                memory = draw(element, (16, 32), 1).handle.data.copy()
                pointer = pointers(memory, element, shape, step)
                how = told(lambda *given, store=store: (store(*given), "done")[1], pointer, value, mask)
                written.append((how, memory.tobytes()))
            assert written[-1] == written[-2], (shape, value, mask)
    assert {how for how, _ in written} == {"done", "an error"}


def test_misaligned_memory_is_read_and_written_too() -> None:
    own, quick = language("load")[0], language("load")[1]
    memory = np.arange(1, 66, dtype=np.uint8)
    pointer = pointers(memory[1:].view(np.int8)[:63], core.int8, (8,), 4)
    kind = core.pointer_type(core.int32)
    pointer = core.tensor(interpreter.TensorHandle(pointer.handle.data, kind), core.block_type(kind, [8]))
    assert told(quick, pointer) == told(own, pointer)
    language("store")[1](pointer, draw(core.int32, (8,), 1))
    assert told(own, pointer)[-1] == draw(core.int32, (8,), 1).handle.data.tobytes()


def test_products_are_tritons() -> None:
    own, quick = language("dot")
    shapes = [
        ((16, 32), (32, 16)),
        ((2, 16, 16), (2, 16, 32)),
        ((2, 2, 16, 16), (2, 2, 16, 16)),
        ((16, 16), (32, 16)),
        ((16, 8), (8, 16)),
    ]
    few = [(core.float32, core.float16), *((element, element) for element in ELEMENTS[:-1])]
    for (element, other), (a, b) in itertools.product(few, shapes):
        left, right = draw(element, a, 1), draw(other, b, 2)
        sums = [None, *(draw(kind, (*a[:-1], b[-1]), 3) for kind in (core.float32, core.int32, core.float64, core.float16))]
        for acc, precision in itertools.product((*sums, draw(core.float32, (16, 64), 3)), ("ieee", "no such")):
            known = told(partial(own, input_precision=precision), left, right, acc)
            for asked in 2 * [partial(quick, input_precision=precision)]:  # the second time it is remembered
                assert told(asked, left, right, acc) == known, (element, other, a, b, acc)


def test_numbers_in_a_row_and_alike_are_tritons() -> None:
    own, quick = language("arange")
    for ends in ((0, 16), (core.constexpr(16), core.constexpr(64)), (0, 12), (16, 0), (0, 16)):
        assert told(quick, *ends) == told(own, *ends)
    own, quick = language("full")
    for shape, number, element in itertools.product(((16,), (16, 32), (), (12,)), NUMBERS, ELEMENTS[:-1]):
        for n in (shape, [core.constexpr(n) for n in shape], core.tuple([core.constexpr(n) for n in shape])):
            for value in (number, core.constexpr(number), draw(element, (), 1)):
                assert told(quick, n, value, element) == told(own, n, value, element), (shape, number, element)


def test_what_is_turned_is_tritons() -> None:
    own, quick = language("trans")
    for element, shape in itertools.product(ELEMENTS, (*SHAPES, (16, 32))):
        tensor = draw(element, shape, 1)
        for dims in ((), (1, 0), ((1, 0),), (0, 2, 1)):
            assert told(quick, tensor, *dims) == told(own, tensor, *dims), (element, shape, dims)


@pytest.mark.parametrize("name", ["minimum", "maximum"])
def test_extremes_are_tritons(name: str) -> None:
    own, quick = language(name)
    for a, b in itertools.product(ELEMENTS[:-1], ELEMENTS[:-1]):
        for x, y in itertools.product(FEW, repeat=2):
            assert told(quick, draw(a, x, 1), draw(b, y, 2)) == told(own, draw(a, x, 1), draw(b, y, 2)), (a, b, x, y)
    nan = {"propagate_nan": core.PropagateNan.ALL}
    for element, shape, number in itertools.product(ELEMENTS[:-1], FEW, NUMBERS):
        for pair in ((draw(element, shape, 3), number), (core.constexpr(number), draw(element, shape, 3)), (number, number)):
            assert told(quick, *pair) == told(own, *pair), (element, shape, number)
            assert told(partial(quick, **nan), *pair) == told(partial(own, **nan), *pair), (element, shape, number)


@pytest.mark.parametrize("name", ["max", "min", "sum"])
def test_reductions_are_tritons(name: str, request: pytest.FixtureRequest) -> None:
    kernel = getattr(standard, name)
    own, scope = kernel.rewrite(), interpreter._patch_lang(kernel.fn)
    request.addfinalizer(scope.restore)
    quick, left_to_own = (reductions()[kernel.fn](other) for other in (own, lambda *_: "left to Triton's own"))
    for element, shape in itertools.product(ELEMENTS[:-1], (*SHAPES, (16, 32), (4, 4, 8))):
        tensor = draw(element, shape, 1)
        for axis in (0, 1, 2, 3, -1, None, core.constexpr(0), core.constexpr(1)):
            assert told(quick, tensor, axis) == told(own, tensor, axis), (element, shape, axis)
        kept = partial(quick, keep_dims=True), partial(own, keep_dims=True)
        assert told(kept[0], tensor, 0) == told(kept[1], tensor, 0), (element, shape)
    nothing = core.tensor(
        interpreter.TensorHandle(np.full((4, 4), np.nan, np.float32), core.float32), draw(core.float32, (4, 4), 1).type
    )
    assert told(quick, nothing, 1) == told(own, nothing, 1) != "an error"
    assert left_to_own(nothing, 1).handle.data.shape == (4,)


def test_casts_are_tritons() -> None:
    own, quick = language("cast")
    for a, b, shape in itertools.product(ELEMENTS[:-1], ELEMENTS[:-1], FEW):
        tensor = draw(a, shape, 1)
        for element, more in itertools.product(
            (b, core.constexpr(b)), ({}, {"bitcast": True}, {"fp_downcast_rounding": "rtz"})
        ):
            assert told(partial(quick, **more), tensor, element) == told(partial(own, **more), tensor, element), (a, b, more)
    for number, element in itertools.product(NUMBERS, ELEMENTS[:-1]):
        assert told(quick, number, element) == told(own, number, element), (number, element)


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
