"""Tensors as Hopper's bulk copy engine (TMA) addresses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashtile.memory import Memory
from flashtile.plan.call import Buffer, Descriptor
from flashtile.triton_glue.language import tile_layout

ALIGNMENT_BYTES = 16  # of addresses and strides: CUDA driver API, cuTensorMapEncodeTiled
MOST_ADDRESSES = 256  # encodings kept per descriptor, argument lists per plan; the caching allocator hands out few in a loop


def addressable(shape: Sequence[int], strides: Sequence[int], element_bytes: int, address: int = 0) -> bool:
    """Whether the engine can read this tensor where it lies: aligned, the last axis dense, no stride of 0."""
    if address % ALIGNMENT_BYTES or (shape[-1] > 1 and strides[-1] != 1):
        return False
    return all(
        stride > 0 and stride * element_bytes % ALIGNMENT_BYTES == 0
        for size, stride in zip(shape[:-1], strides[:-1], strict=True)
        if size > 1
    )


def staged_strides(shape: Sequence[int], element_bytes: int) -> tuple[int, ...]:
    """Strides of a copy that the engine can read: in order, rows padded to the alignment."""
    multiple = ALIGNMENT_BYTES // element_bytes
    strides, step = [1], -(-shape[-1] // multiple) * multiple
    for size in reversed(shape[1:-1]):
        strides.append(step)
        step *= size
    return tuple(reversed([*strides, step][: len(shape)]))


class DescribedBuffer:
    """One descriptor argument of one launch: everything but the address.

    `first` is what Triton's JIT takes; afterwards `encoded` gives what the compiled kernel takes, made once per address.
    """

    def __init__(self, argument: Descriptor, buffer: Buffer, strides: Sequence[int]):
        self.name, self.block, self.swizzled = argument.name, list(argument.block), argument.swizzled
        self.dtype, shape = buffer.dtype, buffer.shape
        self.shape = [shape[axis] for axis in argument.axes]
        # an axis of one element is never walked: any stride is right, and this one the engine accepts
        self.strides = [strides[axis] if shape[axis] > 1 else ALIGNMENT_BYTES for axis in argument.axes[:-1]] + [1]
        self.known = Memory[int, list[Any]](MOST_ADDRESSES)
        self.encode: Callable[[int], Any] | None = None

    def first(self, tensor: torch.Tensor) -> Any:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        layout = tile_layout(self.block, self.dtype, self.swizzled)
        return TensorDescriptor(tensor, self.shape, self.strides, self.block, layout)

    def prepare(self, metadata: dict[str, Any]) -> None:
        """Take what the compiled kernel says of this descriptor (private to Triton: see DIRECT_LAUNCH)."""
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
        from triton.runtime import driver

        fill = driver.active.utils.fill_tma_descriptor  # pyright: ignore[reportAttributeAccessIssue] (CUDA's has it)
        swizzle, element_bytes = metadata["swizzle"], metadata["elem_size"]
        kind, block = TMA_DTYPE_DEVICE_TO_HOST[metadata["elem_type"]], metadata["block_size"]
        shape, strides = self.shape, self.strides
        self.encode = lambda address: fill(address, swizzle, element_bytes, kind, block, shape, strides, 0)

    def encoded(self, address: int) -> list[Any]:
        """The kernel's arguments for this descriptor: tensor map, shape, strides."""
        found = self.known.get(address)
        if found is None:
            assert self.encode is not None
            found = self.known[address] = [self.encode(address), *self.shape, *self.strides]
        return found
