"""Plans: pure data that an executor (PyTorch, JAX, C) turns into allocations and launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from flashtile.spec.attention import AttentionProblem

Role = Literal["input", "output", "scratch"]


@dataclass(frozen=True)
class Buffer:
    """A tensor that a plan reads or writes. `like` names the input whose memory order an output follows."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    like: str | None = None
    zeroed: bool = False


@dataclass(frozen=True)
class Pointer:
    """Argument: the address of a buffer; None where `name` is not given to the executor."""

    name: str


@dataclass(frozen=True)
class Strides:
    """Argument: the strides of a buffer in elements, as a tuple."""

    name: str


@dataclass(frozen=True)
class KernelCall:
    """One launch: kernel, grid, arguments in order (numbers, Pointer, Strides, nested tuples), compile-time constants."""

    kernel: Any
    grid: tuple[int, int, int]
    args: tuple[Any, ...]
    constants: tuple[tuple[str, Any], ...] = ()
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class HostCall:
    """One step that PyTorch itself computes: `function(problem, tensors, outputs)` returns the buffers named in `outputs`.

    It allocates them, in any dtype and memory order; the executor converts what is not as its buffer describes.
    """

    function: Callable[[AttentionProblem, dict[str, Any], tuple[str, ...]], dict[str, Any]]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Buffers and calls, in order. `notes` are the lines that `explain` prints."""

    problem: AttentionProblem
    backend: str
    variant: str
    buffers: tuple[Buffer, ...]
    calls: tuple[KernelCall | HostCall, ...]
    notes: tuple[str, ...] = field(default=(), compare=False)

    def named(self, role: Role) -> tuple[Buffer, ...]:
        return tuple(b for b in self.buffers if b.role == role)

    @property
    def scratch_bytes(self) -> int:
        total = 0
        for b in self.named("scratch"):
            size = 4 if b.dtype == "fp32" else 2
            for n in b.shape:
                size *= n
            total += size
        return total
