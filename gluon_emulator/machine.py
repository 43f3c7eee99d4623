"""Hopper blocks on the CPU: roles, barriers, shared memory, bulk copies and products, with everything as late as it may be.

Every role is a thread, and one runs at a time: at each barrier, copy and product the first that can goes on, in an order of
precedence that a seeded die changes now and then. So a run can be repeated, one role may get far ahead of the others, and
roles that all wait for one another are known to be a deadlock at once. What is asynchronous happens at its extremes here:

- a bulk load destroys its tile when it is issued and fills it when somebody waits for its barrier;
- a bulk store reads its tile when it is waited for;
- a product is computed when it is waited for, and its operands must not have changed since it was issued;
- what registers wrote into shared memory must be fenced before the matrix unit or a bulk store reads it;
- so must what they read there before a bulk load overwrites it: a barrier does not wait for loads under way.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

WARPGROUP = 128  # threads of a role that arrives at a named barrier
NEW_ORDER = 0.1  # how often roles get another order of precedence: seldom, so that one may get far ahead of the others
_CURRENT = threading.local()


class Deadlock(Exception):
    """Every role waits."""


class Abandoned(Exception):
    """Another role of the block has failed."""


class Role:
    """A thread of a block: what it waits for, and what it has under way."""

    def __init__(self, block: Block, name: str, warps: int = WARPGROUP // 32):
        self.block, self.name, self.warps = block, name, warps
        self.baton = threading.Lock()  # there is one turn to hand on
        self.baton.acquire()
        self.ready: Callable[[], bool] = lambda: True
        self.waits_for = "its start"
        self.awaited = block.awaited
        self.playing = False  # before, the block does what all roles share
        self.products: list[Product] = []
        self.stores: list[Callable[[], None]] = []
        self.writes: set[tuple[int, int]] = set()  # since its last fence: where each begins and ends
        self.reads: set[tuple[int, int]] = set()

    def fence(self) -> None:
        """Order what registers did with shared memory before what the matrix unit and the copy engine do with it."""
        self.writes.clear()
        self.reads.clear()

    def await_stream(self) -> None:
        """The kernel before is done; of a block for all roles that it has later."""
        self.awaited = True
        if not self.playing:
            self.block.awaited = True

    def check_awaited(self) -> None:
        """Of what the kernel before may have made."""
        assert self.awaited, f"{self.name} has not waited for the kernel before"

    def finish(self) -> None:
        """A role may leave nothing behind."""
        assert not self.products, f"{self.name} ends with {len(self.products)} products under way"
        assert not self.stores, f"{self.name} ends with {len(self.stores)} bulk stores under way"


def here() -> Role:
    """The role that is running."""
    return _CURRENT.role


class Block:
    """One program of a grid."""

    def __init__(self, index: int, grid: Grid):
        self.index, self.grid = index, grid
        self.all_roles: list[Role] = []
        self.barriers: list[Barrier] = []
        self.named: dict[int, NamedBarrier] = {}
        self.awaited = False  # the kernel before

    @property
    def count(self) -> int:
        return self.grid.count

    def specialise(self, parts: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], warps: Sequence[int]) -> None:
        """Have (function, arguments) run as roles of so many warps, side by side, once the block has done all else."""
        for i, ((function, args), count) in enumerate(zip(parts, warps, strict=True)):
            role = Role(self, f"{function.__name__} {i}", count)
            self.all_roles.append(role)
            self.grid.parts.append((role, function, args))

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Let others run, and return when `ready` says so."""
        role = here()
        assert role.playing, f"waits for {what} outside of a role"
        role.ready, role.waits_for = ready, what
        self.grid.proceed()
        role.baton.acquire()
        if self.grid.failure:
            raise Abandoned

    def pause(self) -> None:
        """Let others run first, or not. Before roles begin there is nobody to let."""
        if here().playing:
            self.wait(lambda: True, "its turn")

    def finish(self) -> None:
        """A block may leave nothing behind."""
        for barrier in self.barriers:
            assert not barrier.copies, "the block ends with bulk loads that nobody waited for"


class Grid:
    """A launch: a FEW blocks side by side, as on a small GPU; more of them one after another, so that who waits for a later one
    never goes on.
    """

    FEW = 3

    def __init__(self, count: int, dice: random.Random):
        self.count, self.dice = count, dice
        self.parts: list[tuple[Role, Callable[..., None], tuple[Any, ...]]] = []  # of blocks that have begun
        self.running: list[Role] = []
        self.failure: BaseException | None = None

    def run(self, program: Callable[[], None]) -> None:
        blocks = [Block(index, self) for index in range(self.count)]
        for together in [blocks] if self.count <= self.FEW else [[block] for block in blocks]:
            for block in together:
                _CURRENT.role = Role(block, "block")
                program()
                here().finish()
            self._play_all()
            for block in together:
                block.finish()

    def _play_all(self) -> None:
        """Run the roles of all blocks that have begun to their end."""
        threads = [threading.Thread(target=self._play, args=part, daemon=True) for part in self.parts]
        self.running = [role for role, *_ in self.parts]
        self.parts.clear()
        for thread in threads:
            thread.start()
        self.proceed()
        for thread in threads:
            thread.join()
        if self.failure:
            raise self.failure

    def _play(self, role: Role, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        _CURRENT.role = role
        role.playing = True
        role.baton.acquire()
        try:
            if not self.failure:
                with torch.no_grad():  # a thread's own setting
                    function(*args)
                role.finish()
        except Abandoned:
            pass
        except BaseException as error:  # whatever went wrong in a role went wrong in the launch
            self.failure = self.failure or error
        self.running.remove(role)
        self.proceed()

    def proceed(self) -> None:
        """Hand the turn to the first role that can go on."""
        if self.dice.random() < NEW_ORDER:
            self.dice.shuffle(self.running)
        able = next((role for role in self.running if self.failure or role.ready()), None)
        if able is None and self.running:
            waiting = "; ".join(f"{role.name} waits for {role.waits_for}" for role in self.running)
            self.failure = Deadlock(f"block {self.running[0].block.index} of {self.count}: {waiting}")
            able = self.running[0]
        if able is not None:
            able.baton.release()


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all announced bytes are there."""

    def __init__(self) -> None:
        self.block = here().block
        self.block.barriers.append(self)
        self.count = self.missing = self.bytes = self.phase = 0
        self.copies: list[tuple[int, Callable[[], None]]] = []  # (bytes, what fills the tile)

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def arrive(self, count: int, nbytes: int = 0) -> None:
        """Arrivals, and bytes that are announced with them."""
        self.bytes += nbytes
        self.missing -= count
        assert self.missing >= 0, "a barrier got more arrivals than it counts"
        self._turn()
        self.block.pause()

    def wait(self, parity: int) -> None:
        """Until the phase of this parity has ended."""
        self.block.wait(lambda: self._passes(parity), f"a barrier's phase {parity} ({self.missing} of {self.count} missing)")
        if self.phase == parity:
            for nbytes, fill in self.copies:
                fill()
                self.bytes -= nbytes
            self.copies.clear()
            self._turn()
        assert self.phase != parity

    def _passes(self, parity: int) -> bool:
        """Whether the phase has ended, or ends when the loads under way arrive."""
        return self.phase != parity or (self.missing == 0 and self.bytes == sum(nbytes for nbytes, _ in self.copies))

    def _turn(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            self.phase ^= 1
            self.missing = self.count


class Barriers:
    """Shared memory that holds barriers."""

    def __init__(self, count: int):
        self.barriers = [Barrier() for _ in range(count)]

    def index(self, i: Any) -> Barrier:
        return self.barriers[int(i)]


class NamedBarrier:
    """A hardware barrier: opens whenever `threads` have arrived."""

    def __init__(self) -> None:
        self.arrived = self.opened = 0

    def arrive(self, threads: int) -> int:
        """The opening that this arrival belongs to."""
        mine = self.opened
        self.arrived += 32 * here().warps
        if self.arrived == threads:
            self.arrived, self.opened = 0, self.opened + 1
        return mine


class Memory:
    """A tile in shared memory, or a view of one."""

    layout = None

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    def index(self, i: Any) -> Memory:
        place = int(i)
        assert 0 <= place < self.tensor.shape[0]
        return Memory(self.tensor.select(0, place))

    def reshape(self, shape: list[int]) -> Memory:
        return Memory(self.tensor.view(shape))

    def permute(self, order: Sequence[int]) -> Memory:
        return Memory(self.tensor.permute(*order))

    def slice(self, start: int, length: int, dim: int = 0) -> Memory:
        return Memory(self.tensor.narrow(dim, start, length))

    def load(self, layout: object = None) -> torch.Tensor:
        here().reads.add(_extent(self.tensor))
        return self.tensor.clone()

    def store(self, value: torch.Tensor) -> None:
        assert value.dtype == self.dtype
        assert value.shape == self.shape
        self.tensor.copy_(value)
        here().writes.add(_extent(self.tensor))

    def extent(self) -> tuple[int, int]:
        return _extent(self.tensor)

    def check_fenced(self) -> None:
        """Before the matrix unit or the bulk copy engine reads: they do not see what registers wrote without a fence."""
        self._check("reads", "wrote", lambda role: role.writes)

    def check_read(self) -> None:
        """Before a bulk load overwrites it: somebody's registers may still be on their way."""
        self._check("overwrites", "read", lambda role: role.reads)

    def _check(self, does: str, did: str, places: Callable[[Role], Iterable[tuple[int, int]]]) -> None:
        first, end = self.extent()
        for role in here().block.all_roles:
            for low, high in places(role):
                assert high <= first or end <= low, f"{here().name} {does} what {role.name} {did} and has not fenced"


class Abreast(Memory):
    """Tiles of a buffer as one tile of all their columns; what it shows is a copy, what is stored goes into the tiles."""

    def __init__(self, tiles: torch.Tensor, turned: bool = False):
        self.tiles, self.turned = tiles, turned

    @property
    def tensor(self) -> torch.Tensor:
        wide = torch.cat(list(self.tiles), 1)
        return wide.T if self.turned else wide

    def permute(self, order: Sequence[int]) -> Memory:
        assert tuple(order) == (1, 0)
        return Abreast(self.tiles, not self.turned)

    def slice(self, start: int, length: int, dim: int = 0) -> Memory:
        assert dim == 0
        assert not self.turned
        return Abreast(self.tiles[:, start : start + length])

    def store(self, value: torch.Tensor) -> None:
        for tile, columns in zip(self.tiles, value.chunk(len(self.tiles), 1), strict=True):
            Memory(tile).store(columns)

    def extent(self) -> tuple[int, int]:
        return _extent(self.tiles)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first element and behind the last."""
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()


uint32, uint64 = object(), object()  # both are 64-bit integers here, of which as many bits are kept


def extend_tensors() -> None:
    """Give torch's tensors, in this process, what kernels ask of theirs: a type with a layout, conversions of bits."""
    convert, add = torch.Tensor.to, torch.Tensor.add

    def to(self: torch.Tensor, *given: Any, bitcast: bool = False, **more: Any) -> torch.Tensor:
        dtype = given[0] if given else None
        if dtype is uint32:
            return convert(self, torch.int64) & 0xFFFFFFFF
        if bitcast and self.dtype.itemsize == dtype.itemsize:
            return self.view(dtype)
        return convert(self, torch.int64, *given[1:], **more) if dtype is uint64 else convert(self, *given, **more)

    torch.Tensor.to = to  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.type = SimpleNamespace(layout=None)  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.__iadd__ = add  # a name is bound anew: who holds the old value keeps it


class Scalar(int):
    """An integer in a register, as torch would compute with it; what it is compared with gives a tensor of one bit."""

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        if dtype is uint32:
            return Scalar(self & 0xFFFFFFFF)
        if dtype is uint64 or dtype in (torch.int64, torch.int32):
            return Scalar(self)
        return torch.tensor(int(self), dtype=dtype)

    def __neg__(self) -> Scalar:
        return Scalar(-int(self))

    def __truediv__(self, other: Any) -> Any:
        return self.to(torch.float32) / other


def _scalar(own: Callable[[int, Any], Any]) -> Callable[[Scalar, Any], Any]:
    def operate(self: Scalar, other: Any) -> Any:
        value = own(self, other)
        return value if value is NotImplemented else Scalar(value)

    return operate


for _name in ("add", "sub", "mul", "floordiv", "mod", "lshift", "rshift", "and", "or", "xor"):
    for _form in (f"__{_name}__", f"__r{_name}__"):
        setattr(Scalar, _form, _scalar(getattr(int, _form)))
_TRUTHS = [torch.tensor(truth) for truth in (False, True)]


def _comparison(own: Callable[[int, Any], Any]) -> Callable[[Scalar, Any], Any]:
    def compare(self: Scalar, other: Any) -> Any:
        truth = own(self, other)
        return truth if truth is NotImplemented else _TRUTHS[truth]

    return compare


for _name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"):
    setattr(Scalar, _name, _comparison(getattr(int, _name)))
Scalar.__hash__ = int.__hash__  # pyright: ignore[reportAttributeAccessIssue] (lost with __eq__)


class Product:
    """A product of the matrix unit under way."""

    def __init__(self, a: Memory | torch.Tensor, b: Memory, start: Product | torch.Tensor, use_acc: bool):
        self.start = start if use_acc else None
        self.operands = a, b
        self.issued = [_bits(x).clone() for x in self.operands]
        assert a.dtype == b.dtype
        assert a.shape[1] == b.shape[0]
        assert start.shape == (a.shape[0], b.shape[1])
        for operand in self.operands:
            if isinstance(operand, Memory):
                operand.check_fenced()
        self.shape = start.shape
        self.result: torch.Tensor | None = None

    def finish(self) -> None:
        for operand, before in zip(self.operands, self.issued, strict=True):
            assert torch.equal(_bits(operand), before), "an operand changed while its product was under way"
        a, b = (x.tensor if isinstance(x, Memory) else x for x in self.operands)
        start = self.start.value if isinstance(self.start, Product) else self.start
        if a.element_size() == 1:
            self.result = _cut_off_sums(a.double(), b.double(), start)
            return
        self.result = (a.double() @ b.double()).float()  # on every CPU the same
        if start is not None:
            self.result = self.result + start

    @property
    def value(self) -> torch.Tensor:
        assert self.result is not None, "a product is used before it was waited for"
        return self.result


def nothing(dtype: torch.dtype) -> float:
    """What memory holds that nothing wrote: NaN, also as a byte of e4m3 or e5m2."""
    return float("nan") if dtype.is_floating_point else 255 if dtype is torch.uint8 else -9


def _cut_off_sums(a: torch.Tensor, b: torch.Tensor, start: torch.Tensor | None) -> torch.Tensor:
    """A product of 8-bit operands: of every 32 terms the unit's sum, and what that is added to, keep 13 bits of fraction."""
    total = torch.zeros(a.shape[0], b.shape[1]) if start is None else start
    for first in range(0, a.shape[1], 32):
        total = (total.double() + a[:, first : first + 32] @ b[first : first + 32]).float()
        total = (total.view(torch.int32) & ~0x3FF).view(torch.float32)
    return total


def _bits(operand: Memory | torch.Tensor) -> torch.Tensor:
    """An operand as integers, which compare where NaN does not."""
    tensor = operand.tensor if isinstance(operand, Memory) else operand
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.uint8)
