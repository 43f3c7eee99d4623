"""What kernels call `tl` and `gl`, on PyTorch's CPU tensors: this module stands in for the language itself."""

from __future__ import annotations

import functools
from typing import Any

import torch

from gluon_emulator.machine import WARPGROUP, Barriers, Memory, Scalar, here, nothing, uint32, uint64  # noqa: F401 (kernels read both)

float16, bfloat16, float32, float64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
int8, int16, int32, int64 = torch.int8, torch.int16, torch.int32, torch.int64
uint8, float8e4nv, float8e5 = torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2
tensor = shared_memory_descriptor = object  # annotations
static_range = range = range


class Layout:
    """Stands for every layout: where elements lie among threads makes no difference here."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    @staticmethod
    def get_default_for(*args: Any) -> None:
        return None


BlockedLayout = DistributedLinearLayout = DotOperandLayout = NVMMADistributedLayout = NVMMASharedLayout = Layout
SliceLayout = SwizzledSharedLayout = Layout


class Pointer:
    """An address, or a tile of them: elements from the start of a tensor."""

    class Type:
        """A pointer's type, which knows that of its element."""

        def __init__(self, element_ty: torch.dtype):
            self.element_ty = element_ty

    def __init__(self, flat: torch.Tensor, offset: Any = 0):
        self.flat, self.offset = flat, offset

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.flat, self.offset + offset)

    def to(self, dtype: Any) -> Scalar:
        """Of a tensor without elements 0."""
        return Scalar(self.flat.data_ptr())

    @property
    def dtype(self) -> Pointer.Type:
        return Pointer.Type(self.flat.dtype)

    def places(self, mask: Any = None) -> tuple[torch.Tensor, Any]:
        """(offsets, mask), of one shape; every offset that is used lies inside the tensor."""
        if mask is None and isinstance(self.offset, int):
            offset = int(self.offset)
            assert 0 <= offset < len(self.flat), "an address outside of its tensor"
            return torch.tensor(offset), None
        offset = to_tensor(self.offset)
        if mask is not None:
            offset, mask = torch.broadcast_tensors(offset, to_tensor(mask))
        used = offset if mask is None else offset[mask]
        assert bool(((used >= 0) & (used < len(self.flat))).all()), "an address outside of its tensor"
        return offset, mask


def constexpr(value: Any = None) -> Any:
    return value


def to_tensor(value: Any) -> torch.Tensor:
    """Of numbers Triton forgets the sign of zero, and so does this."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.tensor(value + 0.0 if isinstance(value, float) else value)


def cast(value: Any, dtype: Any) -> Any:
    return (Scalar(value) if type(value) is int else value if type(value) is Scalar else to_tensor(value)).to(dtype)


def program_id(axis: int) -> Scalar:
    return Scalar(here().block.index)


def num_programs(axis: int) -> Scalar:
    return Scalar(here().block.count)


def load(
    pointer: Pointer, mask: Any = None, other: float = 0.0, eviction_policy: str = "", cache_modifier: str = ""
) -> torch.Tensor:  # fmt: skip
    offset, mask = pointer.places(mask)
    if mask is None and offset.dim() == 0 and pointer.flat.dtype in (int32, int64):
        return Scalar(pointer.flat[offset].item())
    if mask is None:
        return pointer.flat[offset]
    result = torch.full(offset.shape, other, dtype=pointer.flat.dtype)
    result[mask] = pointer.flat[offset[mask]]
    return result


def store(pointer: Pointer, value: torch.Tensor, mask: Any = None, eviction_policy: str = "") -> None:
    offset, mask = pointer.places(mask)
    value = to_tensor(value).to(pointer.flat.dtype).broadcast_to(offset.shape)
    if mask is None:
        pointer.flat[offset] = value
    else:
        pointer.flat[offset[mask]] = value[mask]


def atomic_add(pointer: Pointer, value: torch.Tensor, sem: str = "") -> None:
    offset, _ = pointer.places()
    pointer.flat.index_add_(0, offset.reshape(-1), value.reshape(-1))


def allocate_shared_memory(dtype: torch.dtype, shape: list[int], layout: object = None) -> Memory | Barriers:
    """Barriers where 64-bit integers are asked for."""
    if dtype == int64:
        return Barriers(shape[0])
    return Memory(torch.full(shape, nothing(dtype), dtype=dtype))


def warp_specialize(parts: list[Any], num_warps: list[int], num_registers: list[int]) -> None:
    assert len(parts) - 1 == len(num_warps) == len(num_registers)
    here().block.specialise(parts, [WARPGROUP // 32, *num_warps])


def inline_asm_elementwise(asm: str, constraints: str, args: list[Any], **options: Any) -> Any:
    known = {"tanh.approx.f32 $0, $1;": torch.tanh, "rcp.approx.ftz.f32 $0, $1;": torch.reciprocal}
    assert asm in known, f"the emulator does not know {asm}"
    return known[asm](args[0])


def arange(start: int, end: int, layout: object = None) -> torch.Tensor:
    return torch.arange(start, end)


def full(shape: list[int], value: float, dtype: torch.dtype, layout: object = None) -> torch.Tensor:
    return torch.full(shape, float(value) if dtype.is_floating_point else int(value), dtype=dtype)


def zeros(shape: list[int], dtype: torch.dtype, layout: object = None) -> torch.Tensor:
    return full(shape, 0, dtype)


def convert_layout(value: torch.Tensor, layout: object, assert_trivial: bool = False) -> torch.Tensor:
    return value


def cdiv(a: Any, b: Any) -> Any:
    return (a + b - 1) // b


def where(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int) and (isinstance(condition, int) or condition.dim() == 0):
        return Scalar(a if condition else b)
    return torch.where(to_tensor(condition), to_tensor(a), to_tensor(b))


def minimum(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return Scalar(a if int(a) < int(b) else b)
    return torch.minimum(to_tensor(a), to_tensor(b))


class PropagateNan:
    """Whether NaN wins; it always does here."""

    ALL = True


def maximum(a: Any, b: Any, propagate_nan: bool = False) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return Scalar(a if int(a) > int(b) else b)
    return torch.maximum(to_tensor(a), to_tensor(b))


def fma(a: Any, b: Any, c: Any) -> torch.Tensor:
    return a * b + c


def max(value: torch.Tensor, axis: int) -> Any:
    most = value.amax(axis)
    return most if most.dim() or most.is_floating_point() else Scalar(most.item())


def min(value: torch.Tensor, axis: int) -> Any:
    least = value.amin(axis)
    return least if least.dim() or least.is_floating_point() else Scalar(least.item())


def sum(value: torch.Tensor, axis: int | None = None) -> Any:
    total = value.sum(axis, dtype=value.dtype)
    return total if total.dim() or total.is_floating_point() else Scalar(total.item())


def reduce(value: torch.Tensor, axis: int, combine: Any) -> Any:
    return functools.reduce(combine, value.unbind(axis))


def broadcast(a: torch.Tensor, b: torch.Tensor) -> Any:
    return torch.broadcast_tensors(a, b)


def join(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.stack(torch.broadcast_tensors(a, b), -1)


def split(value: torch.Tensor) -> Any:
    return value.unbind(-1)


def reshape(value: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return value.reshape(shape)


def permute(value: torch.Tensor, order: Any) -> torch.Tensor:
    return value.permute(*order)


abs, exp2, log2 = torch.abs, torch.exp2, torch.log2


def multiple_of(value: Any, divisor: Any) -> Any:
    return value
