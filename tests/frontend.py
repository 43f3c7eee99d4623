"""Makes Triton's compiler read kernels in less time: what it reads them as stays the same, text for text (Triton 3.6).

What is saved is what it does anew at each node of a kernel's source: it sets and restores filters of warnings, asks for
the places of sources that no kernel is given here, spells the type of every tuple, asks builtins for their parameters,
and parses a function each time that it is called with other constants. Compile tests run their scripts by this module:
`python -m tests.frontend SCRIPT ARGUMENTS`.
"""

from __future__ import annotations

import ast
import inspect
import math
import runpy
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.compiler import code_generator
from triton.compiler.errors import CompilationError
from triton.language import core
from triton.runtime import jit

TRITON = "3.6."  # the releases whose front end it reads as


def hasten() -> None:
    """Patch the front end of this process; that of other releases is left as slow as it is."""
    if triton.__version__.startswith(TRITON):
        _visits()
        _signatures()
        _sources()
        _tuples()
        _tensors()


def _visits() -> None:
    known: dict[type, Any] = {}
    begin, visit = code_generator.CodeGenerator.__init__, code_generator.CodeGenerator.visit
    translate = code_generator.ast_to_ttir

    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.placeless = knobs.compilation.disable_line_info and not knobs.compilation.front_end_debugging

    def visit_node(self: Any, node: Any) -> Any:
        if node is None:
            return None
        if not self.placeless:
            return visit(self, node)
        kind, last = type(node), self.cur_node
        if kind not in known:
            known[kind] = getattr(type(self), f"visit_{kind.__name__}", type(self).generic_visit)
        self.cur_node = node
        try:
            made = known[kind](self, node)
        except CompilationError:
            raise
        except Exception as error:
            raise CompilationError(self.jit_fn.src, self.cur_node, repr(error)) from None
        self.cur_node = last
        return made

    def quietly(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", PendingDeprecationWarning)
            return translate(*args, **kwargs)

    code_generator.CodeGenerator.__init__, code_generator.CodeGenerator.visit = start, visit_node
    code_generator.ast_to_ttir = quietly
    for module in list(sys.modules.values()):  # who has imported it by name
        if getattr(module, "ast_to_ttir", None) is translate:
            module.ast_to_ttir = quietly  # pyright: ignore[reportAttributeAccessIssue]


def _signatures() -> None:
    asked: dict[Any, inspect.Signature] = {}

    def signature(function: Any) -> inspect.Signature:
        own = getattr(function, "__func__", function)  # of a method that is bound to a tensor: of it is asked what it takes
        if own not in asked:
            asked[own] = inspect.signature(own)
        return asked[own]

    def getcallargs(function: Any, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
        code, names = function.__code__, function.__code__.co_varnames[: function.__code__.co_argcount]
        others = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS) or code.co_kwonlyargcount
        found = dict(zip(names, args, strict=False))
        if not others and len(args) <= len(names) and found.keys().isdisjoint(kwargs):
            defaults = function.__defaults__ or ()
            found = {**dict(zip(names[len(names) - len(defaults) :], defaults, strict=True)), **found, **kwargs}
            if found.keys() == set(names):
                return found
        return inspect.getcallargs(function, *args, **kwargs)

    assert {"signature", "getcallargs"} == set(_names_of(code_generator, "inspect"))
    code_generator.inspect = types.SimpleNamespace(signature=signature, getcallargs=getcallargs)  # pyright: ignore


def _names_of(module: Any, other: str) -> list[str]:
    """What a module takes of another that it imports."""
    tree = ast.parse(inspect.getsource(module))
    found = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name))
    return [n.attr for n in found if n.value.id == other]  # pyright: ignore[reportAttributeAccessIssue]


def _sources() -> None:
    parse, parsed = jit.JITFunction.parse, dict[str, ast.Module]()

    def parse_once(self: Any) -> ast.Module:
        if self._src not in parsed:
            parsed[self._src] = parse(self)
        return parsed[self._src]

    jit.JITFunction.parse = parse_once


def _tuples() -> None:
    kind = core.tuple_type

    def hold(self: Any, args: Any, type: Any = None) -> None:
        self.values, self.known_fields = list(args), None
        self.known_type = type if type is None or isinstance(type, kind) else kind(type)

    def type_of(self: Any) -> Any:
        if self.known_type is None:
            self.known_type = core._type_for_tuple_values(self.values, self.known_fields)
        return self.known_type

    def know(self: Any, type: Any) -> None:
        self.known_type = type

    def put(self: Any, index: Any, value: Any) -> None:
        index = core._unwrap_if_constexpr(index)
        assert isinstance(index, int)
        if self.known_type is not None:
            self.known_fields = self.known_type.fields
        self.values[index], self.known_type = value, None

    def describe(self: Any, types: Any, fields: Any = None) -> None:
        self.types, self.fields = types, fields or [""] * len(types)

    def spell(self: Any) -> str:
        return "[" + ",".join([f"{k}:{v}" for k, v in zip(self.fields, self.types, strict=False)]) + "]"

    core.tuple.__init__, core.tuple.type, core.tuple._setitem = hold, property(type_of, know), put
    core.tuple_type.__init__, core.tuple_type.name = describe, property(spell)


def _tensors() -> None:
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def describe(self: Any, handle: Any, type: Any) -> None:
        shape = tuple(type.shape) if type.is_block() else ()
        if shape not in shapes:
            shapes[shape] = core.constexpr(math.prod(shape)), core.tuple([core.constexpr(n) for n in shape])
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[shape]

    core.tensor.__init__ = describe


def main() -> None:
    hasten()
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
