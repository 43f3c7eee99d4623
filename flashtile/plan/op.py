"""What an op that is not attention brings: its problem, and how each of its two backends plans it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashtile.plan.call import Buffer, HostCall, KernelCall, Plan
from flashtile.plan.device import Device
from flashtile.problem.op import Companion


@dataclass(frozen=True)
class Steps:
    """The calls of one pass, and the scratch that they need."""

    calls: tuple[KernelCall | HostCall, ...]
    scratch: tuple[Buffer, ...] = ()


Host = Callable[[Any, dict[str, Any], tuple[str, ...]], dict[str, Any]]


@dataclass(frozen=True)
class Op:
    """One op. Its functions get the problem first.

    forward(problem, device, made): the steps that make the outputs named in `made`.
    backward(problem, device, wanted, arriving): the steps that make the gradients of the wanted inputs, from those of
        the arriving outputs, of which the first always arrives.
    host_forward, host_backward: the same in PyTorch, as a HostCall does it; without them the other backend is missing.
    kept(problem, wanted): inputs and outputs that the backward reads.
    zeroed(problem): outputs and gradients that start at zero.
    same(problem, wanted): wanted inputs whose gradient is another's, which stands before it: one tensor serves both.
    over(problem): gradients that are written over an input.
    """

    kind: type[Companion]
    forward: Callable[[Any, Device, tuple[str, ...]], Steps]
    backward: Callable[[Any, Device, frozenset[str], frozenset[str]], Steps]
    host_forward: Host
    host_backward: Host
    kept: Callable[[Any, frozenset[str]], tuple[str, ...]]
    zeroed: Callable[[Any], frozenset[str]] = lambda problem: frozenset()
    same: Callable[[Any, frozenset[str]], dict[str, str]] = lambda problem, wanted: {}
    over: Callable[[Any], dict[str, str]] = lambda problem: {}


def plan_forward(op: Op, problem: Companion, device: Device, backend: str, keeps: bool) -> Plan:
    """From the problem's inputs to its outputs: all of them, or without `keeps` the caller's."""
    described, over, zeroed = problem.outputs(), op.over(problem), op.zeroed(problem)
    made = tuple(described) if keeps else problem.public()
    buffers = [Buffer(name, d.shape, d.dtype, "input") for name, d in problem.given]
    for name in made:
        d = described[name]
        buffers.append(Buffer(name, d.shape, d.dtype, "output", zeroed=name in zeroed, over=over.get(name)))
    return _plan(problem, backend, buffers, made, op.host_forward, lambda: op.forward(problem, device, made))


def plan_backward(
    op: Op, problem: Companion, device: Device, backend: str, wanted: frozenset[str], arriving: frozenset[str]
) -> Plan:
    """From what the forward kept and the gradients `d<output>` to `d<input>` of the wanted inputs."""
    known = {**dict(problem.given), **problem.outputs()}
    over, zeroed, same = op.over(problem), op.zeroed(problem), op.same(problem, wanted)
    buffers = [Buffer(name, known[name].shape, known[name].dtype, "input") for name in op.kept(problem, wanted)]
    buffers += [Buffer(f"d{n}", known[n].shape, known[n].dtype, "input") for n in problem.public() if n in arriving]
    made: list[str] = []
    for name, d in problem.given:
        if name in wanted:
            place = f"d{same[name]}" if name in same else over.get(f"d{name}")
            buffers.append(Buffer(f"d{name}", d.shape, d.dtype, "output", zeroed=f"d{name}" in zeroed, over=place))
            made += [] if name in same else [f"d{name}"]
    steps = lambda: op.backward(problem, device, wanted, arriving)  # noqa: E731
    return _plan(problem, backend, buffers, tuple(made), op.host_backward, steps)


def _plan(
    problem: Companion, backend: str, buffers: list[Buffer], made: tuple[str, ...], host: Host, steps: Callable[[], Steps]
) -> Plan:
    if backend == "cpu":
        calls = (HostCall(host, made),) if made else ()
        return Plan(problem, backend, "", tuple(buffers), calls)
    found = steps()
    return Plan(problem, backend, "", (*buffers, *found.scratch), found.calls)
