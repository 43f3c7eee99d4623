"""What a Python function reads beyond its arguments, so that what was recorded of it may serve the next call.

A fingerprint is equal where the function would do the same again. There is one only of functions that read nothing but tensors,
plain values, torch's and math's functions, and other such functions; of objects and lists nobody can tell whether they changed.
"""

from __future__ import annotations

import dis
import math
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device)
_BUILTINS = (abs, all, any, bool, complex, enumerate, float, int, isinstance, len, max, min, pow, range, round, sum, tuple, zip)
# What writes beyond the function, and attributes of torch that hold a state.
_WRITES = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "IMPORT_NAME")
_STATES = {
    "backends",
    "compiler",
    "cuda",
    "random",
    "seed",
    "initial_seed",
    "_C",
    "_dynamo",
    "grad",
    "__dict__",
    "data",
    "_version",
}
_DEEPEST = 8  # functions that read functions


def fingerprint(function: Any) -> tuple[list[Any], list[Any]] | None:
    """(what to compare, the objects whose identity is in it, which must be kept with it); None where nobody can tell."""
    marks, kept = [torch.get_default_dtype(), torch.is_inference_mode_enabled()], list[Any]()
    return (marks, kept) if _marks_function(function, marks, kept, 0) else None


@lru_cache(256)
def _globals_of(code: CodeType) -> tuple[str, ...] | None:
    """The global names that a code reads, those of functions within it too; None where it does more than read."""
    found, outer = list[str](), set(code.co_freevars)
    waiting = [code]
    while waiting:
        part = waiting.pop()
        waiting += [constant for constant in part.co_consts if isinstance(constant, CodeType)]
        for step in dis.get_instructions(part):
            if step.opname in _WRITES or (step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in outer):
                return None
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                found.append(step.argval)
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and _is_state(str(step.argval)):
                return None
    return tuple(dict.fromkeys(found))


def _is_state(attribute: str) -> bool:
    return attribute in _STATES or attribute.startswith(("get_", "set_", "current_"))


def _marks_function(function: Any, marks: list[Any], kept: list[Any], depth: int) -> bool:
    if type(function) is not FunctionType or function.__dict__ or depth > _DEEPEST:
        return False
    names = _globals_of(function.__code__)
    if names is None:
        return False
    kept.append(function.__code__)
    marks.append(id(function.__code__))
    values: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    try:
        values += [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a variable that has no value yet
        return False
    for name in names:
        if name in function.__globals__:
            values.append(function.__globals__[name])
        else:
            builtins = function.__globals__["__builtins__"]
            held = builtins if isinstance(builtins, dict) else vars(builtins)
            values.append(held.get(name, object()))
    return all(_marks_value(value, marks, kept, depth) for value in values)


def _marks_value(value: Any, marks: list[Any], kept: list[Any], depth: int) -> bool:
    kind = type(value)
    if kind in _PLAIN:
        marks += (kind, repr(value) if kind in (float, complex) else value)
    elif kind in (torch.Tensor, torch.nn.Parameter):
        # a tensor that others computed would keep alive what it was computed of
        if value.grad_fn is not None or value.__dict__ or value.layout is not torch.strided:
            return False
        marks += (id(value), value.data_ptr(), value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
        kept.append(value)
    elif kind is tuple:
        marks += (tuple, len(value))
        return all(_marks_value(item, marks, kept, depth) for item in value)
    elif _stays(value):
        marks.append(id(value))
        kept.append(value)
    else:
        return _marks_function(value, marks, kept, depth + 1)
    return True


def _stays(value: Any) -> bool:
    """Whether it is torch or math, a function of theirs, or one of Python's own that holds no state."""
    if type(value) is ModuleType:
        return value is math or _is_torchs(value.__name__)
    if any(value is known for known in _BUILTINS):
        return True
    if type(value) not in (FunctionType, BuiltinFunctionType):
        return False
    return value.__module__ == "math" or _is_torchs(value.__module__)


def _is_torchs(name: str | None) -> bool:
    return name is not None and (name == "torch" or name.startswith("torch."))
