"""Numbers as callers have them: Python's, NumPy's, and tensors and arrays without axes."""

from __future__ import annotations

import sys
from typing import Any

PLAIN = frozenset({int, float, bool, type(None)})


def plain(value: Any) -> Any:
    """The Python number, where the host knows it without waiting for a device; anything else as it is.

    Not of a tensor that has a gradient or a tangent, which would be lost, nor of one while a graph is traced, which has no
    number yet.
    """
    if type(value) in PLAIN or isinstance(value, int) or not is_scalar(value) or _is_compiling():
        return value
    if hasattr(value, "requires_grad") and (value.requires_grad or value.device.type != "cpu" or _has_tangent(value)):
        return value
    try:
        found = value.item()
    except (AttributeError, RuntimeError, TypeError):  # traced otherwise: by JAX, by fake tensors, by torch.func
        return value
    return found if type(found) in PLAIN else value


def plain_pair(window: Any) -> Any:
    """A pair of numbers likewise: itself where both are Python's, or where it is no pair."""
    if not isinstance(window, (tuple, list)) or all(type(n) in PLAIN for n in window):
        return window
    return tuple(map(plain, window)) if any(plain(n) is not n for n in window) else window


def is_scalar(value: Any) -> bool:
    """Whether it has a shape, and no axes."""
    shape = getattr(value, "shape", None)
    return shape is not None and len(shape) == 0


def told(value: object) -> str:
    """The value, or what it is and why its number is not known: torch.compile cannot print a tensor, nor an array of NumPy."""
    if not hasattr(value, "dtype"):
        return repr(value)
    kind = f"a {type(value).__name__}"
    if not is_scalar(value):
        return kind
    if _is_compiling():
        return f"{kind}, whose number is not known while a graph is traced"
    if getattr(value, "requires_grad", False):
        return f"{kind} that requires a gradient"
    if hasattr(value, "requires_grad") and _has_tangent(value):
        return f"{kind} that has a tangent"
    if getattr(getattr(value, "device", None), "type", "cpu") != "cpu":
        return f"{kind} on a device, whose number the host would wait for"
    try:
        return f"{kind}, {value}"
    except RuntimeError:  # of torch.func.vmap, whose tensors have no one number
        return kind


def _has_tangent(tensor: Any) -> bool:
    """Whether forward mode differentiates by this torch.Tensor."""
    forward_ad: Any = sys.modules["torch"].autograd.forward_ad
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def _is_compiling() -> bool:
    torch: Any = sys.modules.get("torch")  # whose tensor it may be; `spec` does not import it
    return torch is not None and torch.compiler.is_compiling()
