"""What becomes a C function: one direction of a problem, as a plan for sizes that come at run time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from flashtile.errors import InvalidProblem, NotSupported
from flashtile.plan.call import Buffer, KernelCall, Plan, Strides
from flashtile.plan.device import Device
from flashtile.plan.size import Guard, Size, Trace, evaluate, fixed, walk
from flashtile.problem.attention import AttentionProblem

Sizes = Mapping[str, int]
LARGEST = (2 - 2**-23) * 2.0**127  # of float32, as which kernels take numbers


@dataclass(frozen=True)
class Laid:
    """A buffer of a plan and the strides, in elements, that it lies with."""

    buffer: Buffer
    strides: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.buffer.name

    @property
    def elements(self) -> int:
        count = 1
        for n in self.buffer.shape:
            count *= n
        return count


@dataclass(frozen=True)
class Steps:
    """A plan with every stride in its place: what is given, what is made, what is launched."""

    laid: tuple[Laid, ...]
    calls: tuple[KernelCall, ...]


@dataclass(frozen=True)
class Entry:
    """One C function.

    sizes: the names of those that the caller gives, each at least 1. derived: of those that the run-time finds, in order.
    plan(sizes, device): the plan, of Sizes or of integers alike. strides(buffer, sizes): those of a buffer of such a plan.
    broadcast(name): which axes of a captured tensor have one element whatever the sizes.
    samples(device): sizes, derived ones too, at which plans are made; `explore` adds those that their guards ask for.
    complete(sizes, device): sizes that a caller gives with all that the run-time may find for the derived ones; none where
        no problem has them.
    derive: C statements that fill in the derived sizes.
    shown: expressions of derived sizes, and what the header says instead. note: more lines for the header.
    """

    name: str
    spelling: str
    direction: str
    sizes: tuple[str, ...]
    derived: tuple[str, ...]
    plan: Callable[[Sizes, Device], Plan]
    strides: Callable[[Buffer, Sizes], tuple[int, ...]]
    broadcast: Callable[[str], tuple[bool, ...]]
    samples: Callable[[Device], list[dict[str, int]]]
    complete: Callable[[Sizes, Device], list[dict[str, int]]]
    derive: str
    schedule: AttentionProblem | None = None  # the problem whose tile is chosen at run time
    shown: tuple[tuple[str, str], ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Path:
    """A plan of expressions, and the guards under which it is the one that these sizes get.

    limits: what must hold besides, for kernels take most numbers in 32 bits.
    """

    guards: tuple[Guard, ...]
    limits: tuple[Guard, ...]
    backend: str
    steps: Steps

    def fits(self, sizes: Sizes) -> bool:
        return all(guard.met(sizes) for guard in self.guards)


def steps_of(entry: Entry, plan: Plan, sizes: Sizes) -> Steps:
    """The plan's buffers and calls. Raises NotSupported for what only Python computes, InvalidProblem for numbers too large."""
    laid = {b.name: Laid(b, entry.strides(b, sizes)) for b in plan.buffers}

    def resolve(arg: Any) -> Any:
        if isinstance(arg, Strides):
            strides = laid[arg.name].strides
            if not arg.broadcast:
                return strides
            return tuple(None if one else s for one, s in zip(entry.broadcast(arg.name), strides, strict=True))
        if isinstance(arg, float) and abs(arg) > LARGEST:
            raise InvalidProblem(f"{entry.spelling} asks its kernels for {arg:g}; their numbers end at {LARGEST:g}.")
        return tuple(map(resolve, arg)) if isinstance(arg, tuple) else arg

    calls: list[KernelCall] = []
    for call in plan.calls:
        if not isinstance(call, KernelCall):
            raise NotSupported(entry.spelling, {plan.backend: [f"{call.function.__name__} is a step that PyTorch computes"]})
        constants = tuple((name, _fixed_fields(value)) for name, value in call.constants)
        calls.append(replace(call, args=resolve(call.args), constants=constants))
    return Steps(tuple(laid.values()), tuple(calls))


def _fixed_fields(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        known = {f.name: getattr(value, f.name) for f in fields(value)}
        sizes = {name: fixed(v) for name, v in known.items() if isinstance(v, Size)}
        return replace(value, **sizes) if sizes else value
    return walk(value, fixed) if type(value) is tuple else fixed(value) if isinstance(value, Size) else value


def at(steps: Steps, sizes: Sizes) -> Steps:
    """The same steps in numbers."""

    def number(value: int) -> int:
        return evaluate(value, sizes)

    laid = tuple(
        Laid(replace(one.buffer, shape=walk(one.buffer.shape, number)), walk(one.strides, number)) for one in steps.laid
    )
    calls = tuple(replace(c, grid=walk(c.grid, number), args=walk(c.args, number)) for c in steps.calls)
    return Steps(laid, calls)


def trace(entry: Entry, device: Device, sizes: Sizes) -> Path | None:
    """The plan that these sizes get, as expressions; None where its numbers take more than 32 bits."""
    tracer = Trace()
    unknown = {name: tracer.size(name, sizes[name]) for name in (*entry.sizes, *entry.derived)}
    plan = entry.plan(unknown, device)
    steps = steps_of(entry, plan, unknown)
    guards = tuple(tracer.guards)
    numbers: list[int] = []
    for call in steps.calls:
        walk((call.args, call.grid), numbers.append)
    if not all(-(2**31) <= number < 2**31 for number in numbers):
        return None
    return Path(guards, tuple(tracer.guards)[len(guards) :], plan.backend, steps)


def explore(entry: Entry, device: Device) -> list[Path]:
    """Every plan that there is: those of the samples, and of sizes at which a guard of one of them comes out otherwise.

    Each is checked against the plans that are made of numbers.
    """
    known = _Known()
    pending, seen = entry.samples(device), set[tuple[int, ...]]()
    for sizes in pending:  # which grows
        if (numbers := tuple(sizes.values())) in seen:
            continue
        seen.add(numbers)
        path = known.find(sizes)
        if path is None:
            path = trace(entry, device, sizes)
            if path is None:
                continue
            known.add(path)
            others = (other for guard in path.guards for name in entry.sizes for other in guard.turned(sizes, name))
            pending += [sizes for other in others for sizes in entry.complete(other, device)]
        if at(path.steps, sizes) != steps_of(entry, entry.plan(sizes, device), sizes):
            raise AssertionError(f"{entry.name}: the plan of expressions is another one at {sizes}.")
    return known.paths


class _Known:
    """Paths, found by their guards: planning code that met the same guards with the same outcomes meets the same one next."""

    def __init__(self) -> None:
        self.paths: list[Path] = []
        self.root = _Fork()

    def add(self, path: Path) -> None:
        fork = self.root
        for guard in path.guards:
            fork.guard = fork.guard or replace(guard, holds=True)
            assert fork.guard == replace(guard, holds=True), "planning is not repeatable"
            fork = fork.ways.setdefault(guard.holds, _Fork())
        fork.path = path
        self.paths.append(path)

    def find(self, sizes: Sizes) -> Path | None:
        fork: _Fork | None = self.root
        while fork is not None and fork.guard is not None:
            fork = fork.ways.get(fork.guard.met(sizes))
        return fork and fork.path


@dataclass
class _Fork:
    """What is asked behind some outcomes, and where each answer leads; or the path where they end."""

    guard: Guard | None = None
    ways: dict[bool, _Fork] = field(default_factory=dict[bool, "_Fork"])
    path: Path | None = None
