"""What the host does: kernels that are launched with a grid, and tensors behind descriptors."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import torch

from gluon_emulator import language
from gluon_emulator.machine import Grid

DICE = random.Random(0)  # of the order in which roles run


class TensorDescriptor:
    """Of Gluon's host side: a tensor, and the block that a bulk copy moves."""

    def __init__(self, base: torch.Tensor, shape: list[int], strides: list[int], block_shape: list[int], layout: object = None):
        self.base, self.shape, self.strides, self.block_shape, self.layout = base, shape, strides, block_shape, layout

    @staticmethod
    def from_tensor(tensor: torch.Tensor, block_shape: list[int], layout: object = None) -> TensorDescriptor:
        return TensorDescriptor(tensor, [*tensor.shape], [*tensor.stride()], block_shape, layout)


class Kernel:
    """What `@jit` makes of a function: other kernels call it, the host launches it with a grid."""

    def __init__(self, function: Callable[..., Any]):
        self.fn, self.__name__ = function, function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(
            *args: Any, num_warps: int = 4, num_stages: int = 1, enable_fp_fusion: bool = True, maxnreg: int | None = None,
            **constants: Any,
        ) -> None:  # fmt: skip
            assert set(grid[1:]) <= {1}, f"the grid is {grid}; this emulator has grids of one axis"
            Grid(grid[0], DICE).run(lambda: self.fn(*(argument(a) for a in args), **constants))

        return launch


class Described:
    """A tensor behind a descriptor."""

    layout = None

    def __init__(self, descriptor: Any):
        base = descriptor.base
        self.tensor = base.as_strided(descriptor.shape, descriptor.strides, base.storage_offset())
        self.shape = [language.Scalar(n) for n in descriptor.shape]
        self.block, self.dtype = descriptor.block_shape, base.dtype
        self.block_type = SimpleNamespace(nbytes=torch.Size(self.block).numel() * base.element_size())

    def check(self) -> None:
        """What a hook may have against a look at this tensor now."""

    def overlap(self, coordinates: list[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Where a block at these coordinates and the tensor meet: (in the tensor, in the block)."""
        assert len(coordinates) == len(self.block) == self.tensor.dim()
        self.check()
        outside, inside = [], []
        for start, size, length in zip((int(c) for c in coordinates), self.tensor.shape, self.block, strict=True):
            low, high = max(start, 0), max(min(start + length, size), max(start, 0))
            outside.append(slice(low, high))
            inside.append(slice(low - start, high - start))
        return tuple(outside), tuple(inside)


def argument(value: Any) -> Any:
    """A launch's argument as the kernel sees it: addresses and integers become pointers and scalars."""
    if isinstance(value, tuple):
        return tuple(argument(v) for v in value)
    if isinstance(value, torch.Tensor):
        count = value.untyped_storage().nbytes() // value.element_size() - value.storage_offset()
        return language.Pointer(value.as_strided((count,), (1,), value.storage_offset()))
    if hasattr(value, "block_shape"):
        return Described(value)
    return language.Scalar(value) if isinstance(value, int) else value


def jit(function: Any = None, **options: Any) -> Any:
    return Kernel(function) if function is not None else Kernel


def unchanged(value: Any) -> Any:
    return value
