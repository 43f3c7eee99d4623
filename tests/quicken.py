"""Makes Triton's interpreter spend its time on the arithmetic: nothing that it computes changes.

Everything here is bookkeeping that it does again at every operation (Triton 3.6): it searches triton.language for builtins
at each launch and each call of a `@jit` function, spells the type of every tuple, checks and names the shape of every
block, builds the table of numpy's types at every look into it, forms the terms of an overflow check that without debug=True
it leaves out, looks for a common type of operands that have one, and makes the same blocks of the same numbers. What is
left of an operator is tests/operators.py, of a function tests/functions.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from triton.language import core, semantic
from triton.runtime import interpreter

from tests.functions import functions, reductions
from tests.operators import make_tensor, operators, quick_where

TRITON = "3.6."  # the releases whose interpreter it answers as; newer ones know -0.0


def quicken() -> None:
    """Patch the interpreter of this process."""
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    _calls()
    _tuples()
    _types()
    _shapes()
    _builtins()
    _operands()
    _casts()
    _handles()


def _calls() -> None:
    patched: set[str] = set()
    quick = reductions()

    def begin(self: Any) -> Any:
        if self.fn.__module__ not in patched:
            patched.add(self.fn.__module__)
            interpreter._patch_lang(self.fn)
        self.function = quick.get(self.fn, lambda own: own)(self.rewrite())
        return self.function

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            function = self.function
        except AttributeError:
            function = begin(self)
        return function(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


def _tuples() -> None:
    def hold(self: Any, args: Any, type: Any = None) -> None:
        self.values = list(args)
        self.known_type = type if type is None or isinstance(type, core.tuple_type) else core.tuple_type(type)

    def type_of(self: Any) -> Any:
        if self.known_type is None:
            self.known_type = core._type_for_tuple_values(self.values)
        return self.known_type

    def know(self: Any, type: Any) -> None:
        self.known_type = type

    core.tuple.__init__, core.tuple.type = hold, property(type_of, know)


def _types() -> None:
    find, equal, unwrap = interpreter._get_np_dtype, core.dtype.__eq__, core._unwrap_if_constexpr
    found: dict[str, Any] = {}

    def numpy_type(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, core.block_type) else dtype
        if element.name not in found:
            found[element.name] = find(element)
        return found[element.name]

    def same(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    wraps: dict[type, bool] = {}

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind not in wraps:
            wraps[kind] = issubclass(kind, (list, tuple, core.tuple, core.constexpr))
        return unwrap(value) if wraps[kind] else value

    interpreter._get_np_dtype, core.dtype.__eq__, core._unwrap_if_constexpr = numpy_type, same, unwrapped


def _shapes() -> None:
    describe, broadcast = core.block_type.__init__, semantic.TritonSemantic.broadcast_impl_value
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    scalar = {"numel": core.constexpr(1), "shape": core.tuple([])}

    def describe_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(n, "value", n) for n in shape))
        if key not in known:
            describe(self, element_ty, shape)
            sizes = core.tuple([core.constexpr(n) for n in self.shape])
            of_tensor = {"numel": core.constexpr(self.numel), "shape": sizes}
            known[key] = {**self.__dict__, "of_tensor": of_tensor, "of_other_elements": {element_ty.name: self}}
        self.__dict__.update(known[key])

    def with_element_ty(self: Any, element_ty: Any) -> Any:
        if element_ty.name not in self.of_other_elements:
            self.of_other_elements[element_ty.name] = core.block_type(element_ty, self.shape)
        return self.of_other_elements[element_ty.name]

    def describe_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar

    def described(name: str) -> property:
        return property(lambda self: (self.type.of_tensor if self.type.is_block() else scalar)[name])

    def filled(self: Any, value: Any, like: Any) -> Any:
        block = np.empty(like.handle.data.shape, value.handle.data.dtype)
        block[...] = value.handle.data
        return self.tensor(interpreter.TensorHandle(block, value.dtype), like.type.with_element_ty(value.dtype))

    def alike(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if a.is_block():
            if not b.is_block():
                return lhs, filled(self, rhs, lhs)
            return (lhs, rhs) if a.shape.values == b.shape.values else broadcast(self, lhs, rhs)
        return (filled(self, lhs, rhs), rhs) if b.is_block() else (lhs, rhs)

    core.block_type.__init__, core.tensor.__init__ = describe_block, describe_tensor
    core.tensor.shape, core.tensor.numel = described("shape"), described("numel")
    core.block_type.with_element_ty = with_element_ty
    semantic.TritonSemantic.broadcast_impl_value = alike


def _builtins() -> None:
    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantics = semantic.TritonSemantic(builder)
        function = getattr(member, "__wrapped__", member)  # without the check that a kernel calls it

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantics
            return function(*args, **kwargs)

        quick = of_tensors if obj is core.tensor else of_language if member is own.get(name) else {}
        scope.set_attr(obj, name, quick[name](call) if name in quick else call)

    of_tensors, of_language, convert = operators(), functions(), semantic.TritonSemantic.to_tensor
    own = {name: getattr(core, name) for name in of_language}  # before any of them is patched

    numbers: dict[tuple[type, Any], Any] = {}

    def to_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
        kind = type(x)
        if kind is core.tensor or (kind is core.tuple and not check_type):
            return x
        if kind is int or kind is bool or (kind is float and (x > 0 or x < 0)):  # zeros have signs, and NaN equals nothing
            key = kind, x
            if key not in numbers:
                numbers[key] = convert(self, x, check_type)
            return make_tensor(numbers[key].handle.data, numbers[key].dtype, False)
        return convert(self, x, check_type)

    patched: dict[Any, list[tuple[str, Any]]] = {}

    def patch_all(obj: Any, builder: Any, scope: Any) -> None:
        """Each builtin of `obj` that is not patched yet, with what was made for it at first."""
        if obj not in patched:
            patch_builtins(obj, builder, scope)
            patched[obj] = [(name, getattr(obj, name)) for where, name, _ in scope._changes if where is obj]
        for name, value in patched[obj]:
            if getattr(obj, name) is not value:
                scope.set_attr(obj, name, value)

    patch_builtins = interpreter._patch_builtin
    interpreter._patch_attr, interpreter._patch_builtin = patch, patch_all
    semantic.TritonSemantic.to_tensor = to_tensor
    semantic.TritonSemantic.where = quick_where(semantic.TritonSemantic.where)


def _operands() -> None:
    check, widened = semantic.TritonSemantic.binary_op_type_checking_impl, ("fp16", "bf16")
    known: dict[tuple[Any, ...], Any] = {}

    def operands(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False, arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        """Both in one type and one shape: at once where they are, and of a number the block that was made of it before."""
        of_lhs, of_rhs = type(lhs), type(rhs)
        if of_lhs is core.tensor and of_rhs is core.tensor:
            a, b = lhs.dtype, rhs.dtype
            if a.name == b.name and a.__class__ is core.dtype and not (div_or_mod and a.name in widened):
                return self.broadcast_impl_value(lhs, rhs)
        elif of_lhs is core.tensor and (of_rhs is int or of_rhs is float) and lhs.dtype.__class__ is core.dtype:
            kind = lhs.type
            key = kind.name, of_rhs, rhs, arithmetic_check, div_or_mod
            if key in known:
                return lhs, known[key]
            left, right = check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
            if left is lhs:
                known[key] = right
            return left, right
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    semantic.TritonSemantic.binary_op_type_checking_impl = operands


def _casts() -> None:
    cast = semantic.TritonSemantic.cast
    integers = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    wide = ["fp32", "fp64"]
    # all of which end in one and the same function, after a search for them
    direct = {(a, b) for a in ("int1", *integers, *wide) for b in (*integers, *wide, "fp16")}
    direct |= {("fp32", "bf16"), ("bf16", "fp32"), ("fp16", "fp32")}

    def cast_once(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        a, b = input.dtype, dst_ty.scalar
        if a is b or a.name == b.name:
            return input
        if fp_downcast_rounding is not None or (a.name, b.name) not in direct:
            return cast(self, input, dst_ty, fp_downcast_rounding)
        kind = input.type.with_element_ty(b)
        return self.tensor(self.builder.cast_impl(input.handle, kind), kind)

    semantic.TritonSemantic.cast = cast_once


def _handles() -> None:
    compute = interpreter.InterpreterBuilder.binary_op

    def hold(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype = data, dtype
        if attr:
            self.attr = attr

    def set_attr(self: Any, key: Any, value: Any) -> None:
        self.attr = {**self.attr, key: value}

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        output = op(lhs.data, rhs.data)
        if output.dtype is lhs.data.dtype:
            return interpreter.TensorHandle(output, lhs.dtype.scalar)
        return compute(self, lhs, rhs, op)

    interpreter.TensorHandle.__init__, interpreter.TensorHandle.set_attr = hold, set_attr
    interpreter.TensorHandle.attr = {}  # of all that have none
    interpreter.InterpreterBuilder.binary_op = binary_op
