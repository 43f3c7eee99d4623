"""CPU backend: torch's own flash attention where that computes the same thing, tiles in plain torch elsewhere."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from types import MappingProxyType, ModuleType

from flashtile.kernels.cpu.region import region_of, tiling_of
from flashtile.plan.backend import Direction, Gradients, Passes
from flashtile.plan.buffers import backward_buffers, forward_buffers, second_buffers, shapes, tangent_buffers
from flashtile.plan.call import Buffer, HostCall, Plan
from flashtile.plan.device import Device
from flashtile.problem.attention import MAX_HEAD_DIM, AttentionProblem
from flashtile.problem.cache import AppendProblem, CachedProblem
from flashtile.problem.dtype import DType
from flashtile.problem.options import Variant
from flashtile.problem.predicate import Predicate
from flashtile.problem.score import Score

DELEGATED = "cpu: delegates to torch's flash attention"
PLAIN_SUMS = ", whose float32 sums are plain PyTorch's (precision 'ieee' has stricter ones)"
EACH = "cpu: each item by itself, by torch's flash attention or tiles"
LOW = "lse_low"  # buffer: what lse is short of, being float32
WIDE = "out_wide"  # buffer: out before it was rounded to 16 bits
LEAST_KEYS = 16  # beside a mask; `delegate.py` says what torch's flash attention makes of fewer


def plan_tangent(problem: AttentionProblem, device: Device, direction: Direction) -> Plan:
    """The plan of one host call."""
    from flashtile.kernels.cpu import items, tangent

    function = items.tangent if problem.lengths.ragged else tangent.forward
    call = HostCall(function, ("tout", "tlse"))
    return Plan(problem, "cpu", "", tangent_buffers(problem, direction), (call,), ("cpu: tangents by tiles",))


def plan_second(problem: AttentionProblem, device: Device, direction: Direction) -> Plan:
    """The plan of one host call; of none where no gradient is wanted."""
    from flashtile.kernels.cpu import items, second

    buffers = second_buffers(problem, direction)
    outputs = tuple(b.name for b in buffers if b.role == "output")
    function = items.second if problem.lengths.ragged else second.backward
    calls = (HostCall(function, outputs),) if outputs else ()
    return Plan(problem, "cpu", "", buffers, calls, ("cpu: second derivatives by tiles",))


class CpuBackend:
    """Everything, on the CPU. Its one backward, "split", sums in a fixed order and so is always deterministic."""

    name = "cpu"
    passes: Passes = MappingProxyType({"tangent": plan_tangent, "second": plan_second})

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
        module, note = forward_way(problem)
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
        module, note = backward_way(problem, gradients.dlse)
        buffers = backward_buffers(problem, gradients)
        if _keeps_low(problem):
            buffers = (Buffer(LOW, shapes(problem)["lse"], "fp32", "input"), *buffers)
        if _keeps_wide(problem):
            buffers = (Buffer(WIDE, shapes(problem)["out"], "fp32", "input"), *buffers)
        outputs = tuple(b.name for b in buffers if b.role == "output")
        calls = (HostCall(module.backward, outputs, getattr(module, "bind_backward", None)),) if outputs else ()
        return Plan(problem, self.name, "split", buffers, calls, (note,))

    def unsupported_cached(self, problem: CachedProblem | AppendProblem, device: Device) -> list[str]:
        if isinstance(problem, AppendProblem):
            return [] if device.kind == "cpu" else [f"tensors are on {device.target}; this backend runs on the CPU"]
        return self.unsupported(problem.attention, device)

    def cached(self, problem: CachedProblem | AppendProblem, device: Device) -> Plan:
        from flashtile.kernels.cpu.cached import plan_append, plan_cached

        return plan_append(problem) if isinstance(problem, AppendProblem) else plan_cached(problem)


BACKEND = CpuBackend()


def delegates(p: AttentionProblem) -> bool:
    """Whether torch's flash attention knows this problem: `delegate.py` says what it does not know."""
    region = region_of(p)
    if p.score or p.where or p.sink is not None or p.dropout is not None or p.dtype is DType.FP64:
        return False
    if p.head_dim != p.head_dim_v or region.rows == 0 or region.keys == 1:  # of one key dq and dk are 0, and tiles make them so
        return False
    return region.full or (region.causal and p.scale_value > 0.0)


def takes_mask(p: AttentionProblem) -> bool:
    """Whether torch's flash attention computes this 16-bit forward, if with a float32 mask: `masked.py` and `scored.py`."""
    region = region_of(p)
    if not p.dtype.is_narrow or p.where or p.sink is not None or p.dropout is not None:
        return False
    return p.head_dim == p.head_dim_v and region.rows > 0 and region.keys >= LEAST_KEYS


def _keeps_wide(p: AttentionProblem) -> bool:
    """Whether the forward hands the backward its out in float32, for delta, which would compute it again otherwise."""
    from flashtile.kernels.cpu.products import widens

    return not p.lengths.ragged and delegates(p) and widens(p)


def _keeps_low(p: AttentionProblem) -> bool:
    """Whether the forward hands the backward what lse is short of: where tiles, or strict sums, are float32."""
    return p.dtype is DType.FP32 and (p.lengths.ragged or not delegates(p) or _strict(p))


def forward_way(p: AttentionProblem) -> tuple[ModuleType, str]:
    """The module that computes a problem's forward, and what `explain` says about it."""
    from flashtile.kernels.cpu import delegate, items, masked, scored

    if p.lengths.ragged:
        return items, EACH
    otherwise = f"{', lse mended' * p.returns_lse}, and tiles where scores may be above {delegate.MOST_SCORE:.0f} or not finite"
    if not delegates(p):
        if takes_mask(p) and all(spec.kind.by_distance for spec in p.score) and (_mends(p) or not p.returns_lse):
            return masked, f"{DELEGATED} in {p.dtype} with an additive mask{otherwise}"
        if takes_mask(p) and scored.delegates_strips(p) and _mends(p) and not p.returns_lse:
            return scored, f"{DELEGATED} in {p.dtype} with a mask of scores{otherwise}"
        return _tiled(p)
    if p.dtype is DType.FP32:
        if not _strict(p):
            return delegate, f"{DELEGATED}{PLAIN_SUMS}"
        return delegate, f"{DELEGATED} in fp64" if _few_keys(p) else f"{DELEGATED}, rows that few keys decide again"
    if not _keeps_wide(p) and (not p.returns_lse or _mends(p)):
        return delegate, f"{DELEGATED} in {p.dtype}{otherwise}"
    return delegate, f"{DELEGATED}, {p.dtype} widened to fp32"


def backward_way(p: AttentionProblem, dlse: bool) -> tuple[ModuleType, str]:
    """The same of its backward."""
    from flashtile.kernels.cpu import delegate, items, peaked

    if p.lengths.ragged:
        return items, EACH
    if p.dtype is DType.FP32 and delegates(p):
        if not (dlse or _strict(p)):
            return delegate, f"{DELEGATED}{PLAIN_SUMS}, and tiles for items where scores are large"
        if not _few_keys(p):
            return peaked, _tiled(p)[1]
        return _tiled(p) if dlse else (delegate, f"{DELEGATED} in fp64")
    if not delegates(p) or dlse or _narrow(p) or region_of(p).keys < LEAST_KEYS:
        return _tiled(p)
    return delegate, f"{DELEGATED}, both passes, {p.dtype} widened to fp32, and tiles for items where scores are large"


def _tiled(p: AttentionProblem) -> tuple[ModuleType, str]:
    from flashtile.kernels.cpu import tiled

    region = region_of(p)
    about = f"tile {tiling_of(p, region).spell()}{_arithmetic(p)}" if region.rows else "no query sees a key"
    return tiled, f"cpu: tiled online softmax, {about}"


def _strict(p: AttentionProblem) -> bool:
    from flashtile.kernels.cpu.products import strict

    return strict(p)


def _few_keys(p: AttentionProblem) -> bool:
    from flashtile.kernels.cpu.products import FEW_KEYS

    return region_of(p).keys <= FEW_KEYS


def _narrow(p: AttentionProblem) -> bool:
    from flashtile.kernels.cpu.products import product_dtype, score_dtype

    return product_dtype(p) is not score_dtype(p)


def _mends(p: AttentionProblem) -> bool:
    from flashtile.kernels.cpu.products import mends

    return mends(p)


def _arithmetic(p: AttentionProblem) -> str:
    import torch

    from flashtile.kernels.cpu.products import score_dtype

    if _narrow(p):
        return f", products with probabilities in {p.dtype}"
    return ", in fp64" if score_dtype(p) is torch.float64 else ""
