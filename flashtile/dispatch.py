"""Which backend runs a problem, and why the others do not."""

from __future__ import annotations

from flashtile.errors import InvalidProblem, NotSupported
from flashtile.kernels.cpu.backend import BACKEND as CPU
from flashtile.kernels.portable.backend import BACKEND as TRITON
from flashtile.kernels.sm90.backend import BACKEND as HOPPER
from flashtile.memory import remembered
from flashtile.plan.backend import PASSES, Backend, Direction, Gradients
from flashtile.plan.call import Plan
from flashtile.plan.device import Device
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.cache import AppendProblem, CachedProblem
from flashtile.problem.options import Variant

ALL = Gradients()
BACKENDS: tuple[Backend, ...] = (HOPPER, TRITON, CPU)
HOPPER.repairs = TRITON


def backend_named(name: str) -> Backend:
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    raise InvalidProblem(f"backend is {name!r}; it must be one of {', '.join(b.name for b in BACKENDS)}.")


@remembered(4096, "backends")
def select(problem: AttentionProblem, device: Device, backend: str | None = None, variant: Variant | None = None) -> Backend:
    """The first backend that runs the problem's forward, or with a variant its backward, or the named one.

    Raises NotSupported with everybody's reasons.
    """
    return first_of(BACKENDS if backend is None else (backend_named(backend),), problem, device, variant)


def first_of(backends: tuple[Backend, ...], problem: AttentionProblem, device: Device, variant: Variant | None) -> Backend:
    """As `select`, of these backends, and remembering nothing: for sizes that are not known too. Raises NotSupported."""
    reasons: dict[str, list[str]] = {}
    for backend in backends:
        reasons[backend.name] = backend.unsupported(problem, device, variant)
        if not reasons[backend.name]:
            return backend
    raise NotSupported(f"{problem.spell()} on {device.target}", reasons)


@remembered(4096, "plans of forwards")
def plan_forward(problem: AttentionProblem, device: Device, backend: str | None = None) -> Plan:
    return select(problem, device, backend).forward(problem, device)


@remembered(4096, "plans of backwards")
def plan_backward(
    problem: AttentionProblem,
    device: Device,
    gradients: Gradients = ALL,
    backend: str | None = None,
    variant: Variant = "auto",
) -> Plan:
    return select(problem, device, backend, variant).backward(problem, device, gradients, variant)


@remembered(4096, "plans of other passes")
def plan_pass(name: str, problem: AttentionProblem, device: Device, direction: Direction, backend: str | None = None) -> Plan:
    """The first backend's plan of one of PASSES, or the named one's. Raises NotSupported with everybody's reasons."""
    (what, missing), reasons = PASSES[name], dict[str, list[str]]()
    for candidate in BACKENDS if backend is None else (backend_named(backend),):
        offered = candidate.passes.get(name)
        found = candidate.unsupported(problem, device)
        reasons[candidate.name] = found + (offered.unsupported(problem, device, direction) if offered else [missing])
        if offered and not reasons[candidate.name]:
            return offered.plan(problem, device, direction)
    raise NotSupported(f"{what} of {problem.spell()} on {device.target}", reasons)


@remembered(4096, "plans of forwards with statistics")
def plan_watched(problem: AttentionProblem, device: Device, wanted: frozenset[str], backend: str | None = None) -> Plan | None:
    """The plan of the forward, by the backend that runs it, which keeps these statistics; None where it cannot."""
    chosen, direction = select(problem, device, backend), Direction(wanted=wanted)
    offered = chosen.passes.get("watched")
    if offered is None or offered.unsupported(problem, device, direction):
        return None
    return offered.plan(problem, device, direction)


@remembered(4096, "plans over caches")
def plan_cached(problem: CachedProblem | AppendProblem, device: Device, backend: str | None = None) -> Plan:
    """The first backend's plan of attention over a cache, or of an append, or the named one's.

    Raises NotSupported with everybody's reasons.
    """
    candidates = BACKENDS if backend is None else (backend_named(backend),)
    return first_cached(candidates, problem, device, problem).cached(problem, device)


def first_cached(
    backends: tuple[Backend, ...], problem: CachedProblem | AppendProblem, device: Device, asked: CachedProblem | AppendProblem
) -> Backend:
    """The first of these that runs it, remembering nothing: for sizes that are not known too.

    Raises NotSupported, which names the problem that was `asked` for.
    """
    reasons: dict[str, list[str]] = {}
    for backend in backends:
        reasons[backend.name] = backend.unsupported_cached(problem, device)
        if not reasons[backend.name]:
            return backend
    raise NotSupported(f"{asked.spell()} on {device.target}", reasons)
