"""CPU backend: torch's own flash attention where that computes the same thing, tiles in plain torch elsewhere."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import MappingProxyType, ModuleType

from flashtile.kernels.cpu import ways
from flashtile.plan.backend import Direction, Gradients, OfferedPass, Passes
from flashtile.plan.buffers import (
    backward_buffers,
    entropy_buffers,
    forward_buffers,
    second_buffers,
    shapes,
    statistics_buffers,
    tangent_buffers,
)
from flashtile.plan.call import Buffer, HostCall, Plan
from flashtile.plan.device import Device
from flashtile.problem.attention import MAX_HEAD_DIM, AttentionProblem
from flashtile.problem.cache import AppendProblem, CachedProblem
from flashtile.problem.dtype import DType
from flashtile.problem.mask import Predicate
from flashtile.problem.options import Variant
from flashtile.problem.score import Score

EACH = "cpu: each item by itself, by torch's flash attention or tiles"
LOW = "lse_low"  # buffer: what lse is short of, being float32
WIDE = "out_wide"  # buffer: out before it was rounded to 16 bits


def plan_tangent(problem: AttentionProblem, device: Device, direction: Direction) -> Plan:
    """The plan of one host call."""
    from flashtile.kernels.cpu import items, tangent

    function = items.tangent if problem.lengths.ragged else tangent.forward
    call = HostCall(function, ("out", "lse", "tout", "tlse"))
    return Plan(problem, "cpu", "", tangent_buffers(problem, direction), (call,), ("cpu: tangents by tiles",))


def plan_second(problem: AttentionProblem, device: Device, direction: Direction) -> Plan:
    """The plan of one host call; of none where no gradient is wanted."""
    from flashtile.kernels.cpu import items, second

    buffers = second_buffers(problem, direction)
    outputs = tuple(b.name for b in buffers if b.role == "output")
    function = items.second if problem.lengths.ragged else second.backward
    calls = (HostCall(function, outputs),) if outputs else ()
    return Plan(problem, "cpu", "", buffers, calls, ("cpu: second derivatives by tiles",))


def plan_statistics(problem: AttentionProblem, device: Device, direction: Direction) -> Plan:
    """The plan of one host call."""
    from flashtile.kernels.cpu import items, statistics

    buffers = statistics_buffers(problem, direction)
    function = partial(items.statistics if problem.lengths.ragged else statistics.forward, last=direction.last)
    call = HostCall(function, tuple(b.name for b in buffers if b.role == "output"))
    return Plan(problem, "cpu", "", buffers, (call,), ("cpu: statistics by tiles",))


def plan_entropy(problem: AttentionProblem, device: Device, direction: Direction) -> Plan:
    """The plan of one host call."""
    from flashtile.kernels.cpu import items, statistics

    buffers = entropy_buffers(problem, direction)
    function = items.entropy if problem.lengths.ragged else statistics.backward
    call = HostCall(function, tuple(b.name for b in buffers if b.role == "output"))
    return Plan(problem, "cpu", "", buffers, (call,), ("cpu: the entropy's gradient by tiles",))


class CpuBackend:
    """Everything, on the CPU. Its one backward, "split", sums in a fixed order and so is always deterministic."""

    name = "cpu"
    passes: Passes = MappingProxyType(
        {
            "tangent": OfferedPass(plan_tangent),
            "second": OfferedPass(plan_second),
            "statistics": OfferedPass(plan_statistics),
            "entropy": OfferedPass(plan_entropy),
        }
    )

    def unsupported(self, problem: AttentionProblem, device: Device, variant: Variant | None = None) -> list[str]:
        """Reasons why not; empty when it can."""
        reasons: list[str] = []
        if find_spec("torch") is None:
            reasons.append("PyTorch is not installed")
        if device.kind != "cpu":
            reasons.append(f"tensors are on {device.target}; this backend runs on the CPU")
        for name in ("head_dim", "head_dim_v"):
            if getattr(problem, name) > MAX_HEAD_DIM:
                reasons.append(f"{name} is {getattr(problem, name)}; supported up to {MAX_HEAD_DIM}")
        if problem.stored is not None and variant is not None:
            reasons.append("k and v are of 8 bits and have no gradient; a call that wants others computes them of 16-bit ones")
        if variant == "fused":
            reasons.append("backward is 'fused'; the CPU has one backward, 'split'")
        for leaf in problem.leaves:
            if leaf.kind.apply is Predicate.apply:
                reasons.append(f"predicate {leaf.kind.name} has no `apply`, its formula in PyTorch")
        for spec in problem.score:
            if spec.kind.apply is Score.apply:
                reasons.append(f"score modifier {spec.kind.name} has no `apply`, its formula in PyTorch")
        return reasons

    def forward(self, problem: AttentionProblem, device: Device) -> Plan:
        """The plan of one host call."""
        if problem.stored is not None:
            from flashtile.kernels.cpu.stored import plan_stored

            return plan_stored(problem)
        module, note = _forward_way(problem)
        buffers, names = forward_buffers(problem), ["out", "lse"]
        if _keeps_low(problem):
            buffers, names = (*buffers, replace(buffers[-1], name=LOW)), [*names, LOW]
        if _keeps_wide(problem):
            buffers = (*buffers, Buffer(WIDE, shapes(problem)["out"], "fp32", "output", like="q"))
            names.append(WIDE)
        call = HostCall(module.forward, tuple(names), getattr(module, "bind_forward", None))
        optional = frozenset(() if problem.returns_lse else ("lse",))
        return Plan(problem, self.name, "", buffers, (call,), (note,), optional)

    def backward(self, problem: AttentionProblem, device: Device, gradients: Gradients, variant: Variant) -> Plan:
        """The plan of one host call; of none where no gradient is wanted."""
        module, note = _backward_way(problem, gradients.dlse)
        buffers = backward_buffers(problem, gradients)
        if _keeps_low(problem):
            buffers = (Buffer(LOW, shapes(problem)["lse"], "fp32", "input"), *buffers)
        if _keeps_wide(problem):
            buffers = (Buffer(WIDE, shapes(problem)["out"], "fp32", "input"), *buffers)
        outputs = tuple(b.name for b in buffers if b.role == "output")
        function, bind = module.backward, getattr(module, "bind_backward", None)
        if gradients.wide_keys and problem.dtype.is_narrow:
            function, bind = partial(function, wide_keys=True), None
        calls = (HostCall(function, outputs, bind),) if outputs else ()
        return Plan(problem, self.name, "split", buffers, calls, (note,))

    def unsupported_cached(self, problem: CachedProblem | AppendProblem, device: Device) -> list[str]:
        if isinstance(problem, AppendProblem):
            elsewhere = [] if device.kind == "cpu" else [f"tensors are on {device.target}; this backend runs on the CPU"]
            by_lengths = ["rows are found by the items' lengths; supported are slots"] if problem.items is not None else []
            return elsewhere + by_lengths
        p = problem.attention
        return self.unsupported(replace(p, head_dim=p.head_dim_v) if problem.shared else p, device) + problem.remedies

    def cached(self, problem: CachedProblem | AppendProblem, device: Device, general: bool = False) -> Plan:
        from flashtile.kernels.cpu.cached import plan_append, plan_cached

        return plan_append(problem) if isinstance(problem, AppendProblem) else plan_cached(problem)


BACKEND = CpuBackend()


def _forward_way(p: AttentionProblem) -> tuple[ModuleType, str]:
    """The module that computes a problem's forward, and what `explain` says about it."""
    return _each() if p.lengths.ragged else ways.forward_way(p)


def _backward_way(p: AttentionProblem, dlse: bool) -> tuple[ModuleType, str]:
    """The same of its backward."""
    return _each() if p.lengths.ragged else ways.backward_way(p, dlse)


def _each() -> tuple[ModuleType, str]:
    from flashtile.kernels.cpu import items  # which asks `ways` of every item

    return items, EACH


def _keeps_wide(p: AttentionProblem) -> bool:
    """Whether the forward hands the backward its out in float32, for delta, which would compute it again otherwise."""
    return not p.lengths.ragged and ways.keeps_wide(p)


def _keeps_low(p: AttentionProblem) -> bool:
    """Whether the forward hands the backward what lse is short of: where tiles, or strict sums, are float32."""
    return p.dtype is DType.FP32 and (p.lengths.ragged or not ways.delegates(p) or ways.strict(p))
