"""Plans: pure data that an executor (PyTorch, JAX, C) turns into allocations and launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, cast

from flashtile.problem.dtype import SIZES_BYTES

Role = Literal["input", "output", "scratch"]


class Problem(Protocol):
    """What a plan computes: hashable, without tensors."""

    def spell(self) -> str:
        """One canonical string."""
        ...


@dataclass(frozen=True)
class Buffer:
    """A tensor that a plan reads or writes. `like` names the input whose memory order an output follows.

    `over` names the input that an output is written over, or the output before it that is the same tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    like: str | None = None
    zeroed: bool = False
    over: str | None = None


@dataclass(frozen=True)
class Pointer:
    """Argument: the address of a buffer; None where `name` is not given to the executor.

    addressable: the buffer has to lie as the bulk copy engine needs it, for whole vectors are written to it.
    """

    name: str
    addressable: bool = False


@dataclass(frozen=True)
class Strides:
    """Argument: the strides of a buffer in elements, as a tuple; if `broadcast`, None along axes of one element."""

    name: str
    broadcast: bool = False

    def of(self, shape: Sequence[int], strides: Sequence[int]) -> tuple[int | None, ...]:
        """The argument, given the buffer's shape and strides."""
        if not self.broadcast:
            return tuple(strides)
        return tuple(None if size == 1 else stride for size, stride in zip(shape, strides, strict=True))


@dataclass(frozen=True)
class Descriptor:
    """Argument: a buffer as Hopper's bulk copy engine (TMA) sees it, in tiles of `block`.

    `axes` says which axis of the buffer each descriptor axis is: by default (batch, heads, seqlen, head_dim). The
    executor hands the engine what it can address: 16-byte aligned, strides of 16 bytes, the last axis dense; an input
    that is not so is copied first, an output is allocated so.
    `swizzled` tiles lie in shared memory as matrix operands do, others row by row.
    """

    name: str
    block: tuple[int, ...]
    axes: tuple[int, ...] = (0, 2, 1, 3)
    swizzled: bool = True


@dataclass(frozen=True)
class KernelCall:
    """One launch: kernel, grid, arguments in order (numbers, Pointer, Strides, Descriptor, nested tuples), constants.

    Descriptors stand at the top level only.
    """

    kernel: Any
    grid: tuple[int, int, int]
    args: tuple[Any, ...]
    constants: tuple[tuple[str, Any], ...] = ()
    num_warps: int = 4
    num_stages: int = 2
    contracts: bool = True  # the compiler may round a product and a sum once
    registers: int | None = None  # of a thread, at most; otherwise ptxas rather holds few loads under way than exceed 32
    early: bool = False  # it may be launched before the call before it is done: it waits by itself (`lib.stream.await_stream`)

    @property
    def options(self) -> dict[str, Any]:
        """What Triton is told beside the constants."""
        options = dict(num_warps=self.num_warps, num_stages=self.num_stages, enable_fp_fusion=self.contracts)
        return options if self.registers is None else dict(options, maxnreg=self.registers)

    def buffers(self) -> Iterator[str]:
        """Names of the buffers that it reads and writes."""
        return (arg.name for arg in addresses(self.args))


def addresses(args: tuple[Any, ...]) -> Iterator[Pointer | Descriptor]:
    """Those of a call's arguments that are buffers."""
    for arg in args:
        if isinstance(arg, tuple):
            yield from addresses(cast("tuple[Any, ...]", arg))
        elif isinstance(arg, (Pointer, Descriptor)):
            yield arg


@dataclass(frozen=True)
class HostCall:
    """One step that PyTorch itself computes: `function(problem, tensors, outputs)` returns the buffers named in `outputs`.

    It allocates them, in any dtype and memory order; the executor converts what is not as its buffer describes.
    `bind(problem, outputs, inputs)`, where there is one, is the same for all inputs that lie as these do, without what need not
    be asked again at every call: a function of them, which returns the outputs in order, or None for a call that `function`
    must do; or None where there is no such function.
    """

    function: Callable[[Any, dict[str, Any], tuple[str, ...]], dict[str, Any]]
    outputs: tuple[str, ...]
    bind: Callable[[Any, tuple[str, ...], Sequence[Any]], Callable[..., list[Any] | None] | None] | None = None


@dataclass(frozen=True)
class Plan:
    """Buffers and calls, in order. `notes` are the lines that `explain` prints.

    `optional`: outputs that no kernel writes whose address is given as 0, by a caller without use of them. A host call's may
    lie as they come. `spare`: outputs that kernels write in any case, for which such a caller needs no tensor where there is
    scratch, which takes them.
    """

    problem: Problem
    backend: str
    variant: str
    buffers: tuple[Buffer, ...]
    calls: tuple[KernelCall | HostCall, ...]
    notes: tuple[str, ...] = field(default=(), compare=False)
    optional: frozenset[str] = frozenset()
    spare: frozenset[str] = frozenset()

    def followed_by(self, other: Plan | None) -> Plan:
        """This plan, then the other's calls, which read and write the same inputs and outputs; scratch is each one's own."""
        if other is None:
            return self
        mine = {buffer.name: buffer for buffer in self.buffers}
        more = tuple(buffer for buffer in other.buffers if buffer.name not in mine)
        assert all(buffer.role == "scratch" for buffer in more), [b.name for b in more]
        used = {name for call in other.calls if isinstance(call, KernelCall) for name in call.buffers()}
        return replace(self, buffers=(*self.buffers, *more), calls=(*self.calls, *other.calls), optional=self.optional - used)

    @property
    def described(self) -> frozenset[str]:
        """Buffers that some call reads or writes by the bulk copy engine, or as if it did."""
        found = (arg for call in self.calls if isinstance(call, KernelCall) for arg in addresses(call.args))
        return frozenset(arg.name for arg in found if isinstance(arg, Descriptor) or arg.addressable)

    def named(self, role: Role) -> tuple[Buffer, ...]:
        return tuple(b for b in self.buffers if b.role == role)

    @property
    def scratch_bytes(self) -> int:
        total = 0
        for b in self.named("scratch"):
            size = SIZES_BYTES[b.dtype]
            for n in b.shape:
                size *= n
            total += size
        return total
