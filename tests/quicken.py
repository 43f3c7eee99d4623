"""Makes Triton's interpreter spend its time on the arithmetic: nothing that it computes changes.

Everything here is bookkeeping that it does again at every operation (Triton 3.6): it searches triton.language for builtins at
each call of a `@jit` function, spells the type of every tuple, checks and names the shape of every block, builds the table
of numpy's types at every look into it, and forms the terms of an overflow check that without debug=True it leaves out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from triton.language import core, semantic
from triton.runtime import interpreter


def quicken() -> None:
    """Patch the interpreter of this process."""
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    _calls()
    _tuples()
    _types()
    _shapes()


def _calls() -> None:
    patched: set[str] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__ not in patched:
            patched.add(self.fn.__module__)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

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

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind is int or kind is core.tensor or kind is core.dtype:
            return value
        return value.value if kind is core.constexpr else unwrap(value)

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
            known[key] = {**self.__dict__, "of_tensor": {"numel": core.constexpr(self.numel), "shape": sizes}}
        self.__dict__.update(known[key])

    def describe_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.__dict__.update(type.of_tensor if type.is_block() else scalar)

    def alike(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if a.is_block() and b.is_block() and a.shape.values == b.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    core.block_type.__init__, core.tensor.__init__ = describe_block, describe_tensor
    semantic.TritonSemantic.broadcast_impl_value = alike
