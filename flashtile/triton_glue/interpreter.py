"""Mends bfloat16, fma and integers in Triton's interpreter, in which kernels run on a CPU where TRITON_INTERPRET is 1.

The interpreter holds bfloat16 as its 16 bits in numpy's uint16. Its `tl.dot` multiplies those integers, and its
conversion from float32 cuts the low bits off where hardware rounds to nearest even (Triton 3.6 and 3.9), and float64 becomes
the integer that is its value, whose bits mean something else. Its fused
multiply-add rounds the product too, which in `kernels/device/exponential.py` costs several units in the last place.
Its numbers are arrays of one element, which numpy 2.4 and newer make no integers of.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def widen(bits: np.ndarray) -> np.ndarray:
    """The float32 values of bfloat16 bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """The bfloat16 bits of float32 or float64 values, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def factor(tensor: Any) -> Any:
    """A factor of a product as numpy multiplies it: bfloat16 as float32."""
    return interpreter.TensorHandle(widen(tensor.data), tl.float32) if tensor.dtype.scalar == tl.bfloat16 else tensor


def mend() -> None:
    """Patch the interpreter of this process, for everybody's kernels."""
    builder: Any = interpreter.InterpreterBuilder
    convert, multiply = builder.cast_impl, builder.create_dot

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        kinds = src.dtype.scalar, dst_type.scalar
        if kinds in ((tl.bfloat16, tl.float32), (tl.bfloat16, tl.float64)):
            values = widen(src.data)
            return interpreter.TensorHandle(values if kinds[1] == tl.float32 else values.astype(np.float64), kinds[1])
        if kinds in ((tl.float32, tl.bfloat16), (tl.float64, tl.bfloat16)):
            return interpreter.TensorHandle(narrow(src.data), tl.bfloat16)
        return convert(self, src, dst_type)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, factor(a), factor(b), *rest)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor  # pyright: ignore[reportPrivateUsage]
    builder.cast_impl, builder.create_dot, builder.create_fma = cast_impl, create_dot, create_fma
