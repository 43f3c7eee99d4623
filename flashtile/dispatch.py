"""Which backend runs a problem, and why the others do not."""

from __future__ import annotations

from collections.abc import Callable

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

AnyProblem = AttentionProblem | CachedProblem | AppendProblem
ALL = Gradients()
BACKENDS: tuple[Backend, ...] = (HOPPER, TRITON, CPU)
HOPPER.repairs = TRITON


def backend_named(name: str) -> Backend:
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    raise InvalidProblem(f"backend is {name!r}; it must be one of {', '.join(b.name for b in BACKENDS)}.")


def first_of(
    backends: tuple[Backend, ...], against: Callable[[Backend], list[str]], asked: AnyProblem, device: Device, what: str = ""
) -> Backend:
    """The first of these against which there is no reason. It remembers nothing, so that sizes may be unknown.

    Raises NotSupported with everybody's reasons, which names the problem that was `asked` for and `what` of it.
    """
    reasons: dict[str, list[str]] = {}
    for backend in backends:
        reasons[backend.name] = against(backend)
        if not reasons[backend.name]:
            return backend
    raise NotSupported(f"{what}{asked.spell()} on {device.target}", reasons)


def _candidates(backend: str | None) -> tuple[Backend, ...]:
    return BACKENDS if backend is None else (backend_named(backend),)


@remembered(4096, "backends")
def select(problem: AttentionProblem, device: Device, backend: str | None = None, variant: Variant | None = None) -> Backend:
    """The first backend that runs the problem's forward, or with a variant its backward, or the named one.

    Raises NotSupported with everybody's reasons.
    """
    return first_of(_candidates(backend), lambda each: each.unsupported(problem, device, variant), problem, device)


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
    what, missing = PASSES[name]

    def against(each: Backend) -> list[str]:
        offered = each.passes.get(name)
        return each.unsupported(problem, device) + (offered.unsupported(problem, device, direction) if offered else [missing])

    return first_of(_candidates(backend), against, problem, device, f"{what} of ").passes[name].plan(problem, device, direction)


@remembered(4096, "plans of forwards with statistics")
def plan_watched(problem: AttentionProblem, device: Device, wanted: frozenset[str], backend: str | None = None) -> Plan | None:
    """The plan of the forward, by the backend that runs it, which keeps these statistics of rows beside out.

    None where it cannot, or where dropout makes another p of what out is made of: then a pass behind it, "statistics", does.
    """
    chosen, direction = select(problem, device, backend), Direction(wanted=wanted)
    offered = chosen.passes.get("watched")
    if problem.dropout is not None or offered is None or offered.unsupported(problem, device, direction):
        return None
    return offered.plan(problem, device, direction)


@remembered(4096, "plans over caches")
def plan_cached(problem: CachedProblem | AppendProblem, device: Device, backend: str | None = None) -> Plan:
    """The first backend's plan of attention over a cache, or of an append, or the named one's.

    Raises NotSupported with everybody's reasons.
    """
    return first_of(_candidates(backend), lambda each: each.unsupported_cached(problem, device), problem, device).cached(
        problem, device
    )
