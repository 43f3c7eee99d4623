"""Products by the cuBLASLt that PyTorch brings, with what PyTorch does not ask of it: GELU that keeps what it was taken of,
its derivative, and sums of a factor over the product's inner axis, all on the way out of the product.

Matrices are PyTorch's, row by row; cuBLASLt takes them column by column, hence transposed: out^T = right^T left^T. What it
does not take (another device or dtype, rows that are no multiple of 16 bytes, nothing at all) PyTorch computes.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from functools import lru_cache
from threading import Lock
from typing import Any
from weakref import finalize

import torch
import torch.nn.functional as F
from torch import Tensor

from flashtile.memory import Memory

# Of cublasLt.h, where they have names; an epilogue's vector is its bias, its other matrix what GELU is taken of.
COMPUTE_FP32, TYPE_FP32, TYPES = 68, 0, {"float16": 2, "bfloat16": 14}
TRANSPOSED_A, TRANSPOSED_B, EPILOGUE, VECTOR, OTHER, OTHER_STRIDE, OTHER_TYPE, VECTOR_TYPE = 3, 4, 7, 8, 11, 12, 22, 26
LIMIT_BYTES, ALIGNMENTS = 1, (5, 6, 7, 8)
GELU, GELU_OF_BIASED, GELU_DERIVATIVE, SUMS_OF_LEFT = 160, 164, 192, 512
WITH_VECTOR = (GELU_OF_BIASED, SUMS_OF_LEFT)

WORKSPACE_BYTES = 32 * 2**20
ALIGNED, LEAST_ALIGNED = 256, 16  # addresses in bytes: what cuBLASLt takes for granted, and what it needs
Key = tuple[Any, ...]


def activated(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """(act, pre): GELU's tanh form of pre = x weight^T + bias; x (rows, width), weight (hidden, width), bias (hidden,)."""
    pre = x.new_empty(x.shape[0], weight.shape[0])
    if bias is None:
        act = _product(GELU, x, weight.t(), None, pre)
    else:
        act = _product(GELU_OF_BIASED, x, weight.t(), bias.contiguous(), pre)
    if act is None:
        pre = F.linear(x, weight, bias)
        act = F.gelu(pre, approximate="tanh")
    return act, pre


def times_derivative(left: Tensor, right: Tensor, pre: Tensor) -> Tensor:
    """(left right) times the derivative of GELU's tanh form at pre."""
    made = _product(GELU_DERIVATIVE, left, right, None, pre.contiguous())
    if made is None:
        made = torch.ops.aten.gelu_backward(left @ right, pre, approximate="tanh")
    return made


def with_sums(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """(left right, sums of left's rows)."""
    sums = left.new_empty(left.shape[0])
    made = _product(SUMS_OF_LEFT, left, right, sums, None)
    return (left @ right, left.sum(1)) if made is None else (made, sums)


@lru_cache
def library() -> Any:
    """cuBLASLt as PyTorch has loaded it, or None."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
    except OSError:
        return None


def _product(epilogue: int, left: Tensor, right: Tensor, vector: Tensor | None, other: Tensor | None) -> Tensor | None:
    """left right with an epilogue; None where cuBLASLt has no way."""
    dtype = str(left.dtype).removeprefix("torch.")
    if left.device.type != "cuda" or dtype not in TYPES or not (left.numel() and right.numel()) or library() is None:
        return None
    (left, left_transposed), (right, right_transposed) = _dense(left), _dense(right)
    out = left.new_empty(left.shape[0], right.shape[1])
    lengths = left.shape[not left_transposed], right.shape[not right_transposed], out.shape[1]
    addresses = [t.data_ptr() for t in (left, right, out, vector, other) if t is not None]
    if any(n % LEAST_ALIGNED for n in (*addresses, *(length * out.element_size() for length in lengths))):
        return None
    aligned = not any(address % ALIGNED for address in addresses)
    index = left.device.index
    sizes = (right.shape[1], left.shape[0], left.shape[1])
    with torch.cuda.device(index):
        found = _find((index, *sizes, right_transposed, left_transposed, epilogue, TYPES[dtype], aligned))
        if found is None:
            return None
        work = torch.empty(found.workspace_bytes, dtype=torch.uint8, device=left.device)
        found.run(right, left, out, vector, other, work, torch.cuda.current_stream().cuda_stream)
    return out


def _dense(matrix: Tensor) -> tuple[Tensor, bool]:
    """The matrix, copied if neither it nor its transpose is dense, and whether it lies transposed."""
    if matrix.is_contiguous():
        return matrix, False
    return (matrix, True) if matrix.t().is_contiguous() else (matrix.contiguous(), False)


_lock = Lock()
_handles: dict[int, c_void_p] = {}
_found = Memory[Key, "Product | None"](4096, "products of cuBLASLt")


def _find(key: Key) -> Product | None:
    """The way that cuBLASLt's heuristics put first, on the device that is current; None where they know none."""
    index = key[0]
    with _lock:
        if index not in _handles:
            _handles[index] = c_void_p()
            _check("cublasLtCreate", byref(_handles[index]))
        if key not in _found:
            product = Product(_handles[index], key)
            _found[key] = product if product.ways else None
        return _found[key]


class Way(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8), ("workspace_bytes", c_size_t), ("status", c_int), ("waves", c_float),
        ("reserved", c_int * 4),
    )  # fmt: skip


class Product:
    """Descriptions of a product: (device, m, n, k, is a transposed, is b, epilogue, type, are addresses aligned)."""

    def __init__(self, handle: c_void_p, key: Key):
        _, m, n, k, a_transposed, b_transposed, epilogue, kind, aligned = key
        self.handle, self.description = handle, c_void_p()
        _check("cublasLtMatmulDescCreate", byref(self.description), c_int(COMPUTE_FP32), c_int(TYPE_FP32))
        for attribute, value in ((TRANSPOSED_A, a_transposed), (TRANSPOSED_B, b_transposed), (EPILOGUE, epilogue)):
            self.describe(attribute, c_int(value))
        address = c_void_p(ALIGNED if aligned else LEAST_ALIGNED)  # for heuristics, which look at how it is aligned
        if epilogue in WITH_VECTOR:
            self.describe(VECTOR_TYPE, c_int(kind))
            self.describe(VECTOR, address)
        if epilogue != SUMS_OF_LEFT:
            self.describe(OTHER_TYPE, c_int(kind))
            self.describe(OTHER_STRIDE, c_int64(m))
            self.describe(OTHER, address)
        finalize(self, library().cublasLtMatmulDescDestroy, self.description).atexit = False  # CUDA may be gone before
        self.a = _layout(kind, *((k, m) if a_transposed else (m, k)))
        self.b = _layout(kind, *((n, k) if b_transposed else (k, n)))
        self.out = _layout(kind, m, n)
        for layout in (self.a, self.b, self.out):
            finalize(self, library().cublasLtMatrixLayoutDestroy, layout).atexit = False
        preference, way, count = c_void_p(), Way(), c_int()
        _check("cublasLtMatmulPreferenceCreate", byref(preference))
        limits = [(LIMIT_BYTES, c_size_t(WORKSPACE_BYTES))]
        limits += [] if aligned else [(alignment, ctypes.c_uint32(LEAST_ALIGNED)) for alignment in ALIGNMENTS]
        for attribute, value in limits:
            size = c_size_t(ctypes.sizeof(value))
            _check("cublasLtMatmulPreferenceSetAttribute", preference, c_int(attribute), byref(value), size)
        status = library().cublasLtMatmulAlgoGetHeuristic(
            handle, self.description, self.a, self.b, self.out, self.out, preference, c_int(1), byref(way), byref(count)
        )
        _check("cublasLtMatmulPreferenceDestroy", preference)
        self.ways = 0 if status else count.value
        self.way, self.workspace_bytes = way, way.workspace_bytes

    def describe(self, attribute: int, value: Any) -> None:
        size = c_size_t(ctypes.sizeof(value))
        _check("cublasLtMatmulDescSetAttribute", self.description, c_int(attribute), byref(value), size)

    def run(
        self, a: Tensor, b: Tensor, out: Tensor, vector: Tensor | None, other: Tensor | None, work: Tensor, stream: int
    ) -> None:
        """Launch it; the descriptions are one thread's at a time, and read before this returns."""
        one, zero = c_float(1.0), c_float(0.0)
        left, right, made = (c_void_p(t.data_ptr()) for t in (a, b, out))
        with _lock:
            for attribute, tensor in ((VECTOR, vector), (OTHER, other)):
                if tensor is not None:
                    self.describe(attribute, c_void_p(tensor.data_ptr()))
            _check(
                "cublasLtMatmul", self.handle, self.description, byref(one), left, self.a, right, self.b, byref(zero), made,
                self.out, made, self.out, byref(self.way.algorithm), c_void_p(work.data_ptr()),
                c_size_t(self.workspace_bytes), c_void_p(stream),
            )  # fmt: skip


def _layout(kind: int, rows: int, columns: int) -> c_void_p:
    """Of a matrix that lies column by column, without gaps."""
    made = c_void_p()
    _check("cublasLtMatrixLayoutCreate", byref(made), c_int(kind), c_uint64(rows), c_uint64(columns), c_int64(rows))
    return made


def _check(name: str, *arguments: Any) -> None:
    status = getattr(library(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} of cuBLASLt says {status}.")
