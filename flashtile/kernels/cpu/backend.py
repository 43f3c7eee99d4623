"""CPU backend: torch's own flash attention where that computes the same thing, tiles in plain torch elsewhere."""

from __future__ import annotations

from types import ModuleType

from flashtile.kernels.cpu.region import region_of, tiling_of
from flashtile.plan.backend import Gradients
from flashtile.plan.buffers import backward_buffers, forward_buffers
from flashtile.plan.call import HostCall, Plan
from flashtile.plan.device import Device
from flashtile.spec.attention import MAX_HEAD_DIM, AttentionProblem
from flashtile.spec.dtype import DType
from flashtile.spec.options import Variant
from flashtile.spec.score import Score


class CpuBackend:
    """Everything, on the CPU. Its one backward, "split", sums in a fixed order and so is always deterministic."""

    name = "cpu"

    def unsupported(self, problem: AttentionProblem, device: Device, variant: Variant = "auto") -> list[str]:
        """Reasons why not; empty when it can."""
        reasons: list[str] = []
        if device.kind != "cpu":
            reasons.append(f"tensors are on {device.target}; this backend runs on the CPU")
        for name in ("head_dim", "head_dim_v"):
            if getattr(problem, name) > MAX_HEAD_DIM:
                reasons.append(f"{name} is {getattr(problem, name)}; supported up to {MAX_HEAD_DIM}")
        if variant == "fused":
            reasons.append("backward is 'fused'; the CPU has one backward, 'split'")
        for spec in problem.score:
            if spec.kind.apply is Score.apply:
                reasons.append(f"score modifier {spec.kind.name} has no `apply`, its formula in PyTorch")
        return reasons

    def forward(self, problem: AttentionProblem, device: Device) -> Plan:
        """The plan of one host call."""
        module, note = _way(problem, delegates(problem))
        call = HostCall(module.forward, ("out", "lse"))
        return Plan(problem, self.name, "", forward_buffers(problem), (call,), (note,))

    def backward(self, problem: AttentionProblem, device: Device, gradients: Gradients, variant: Variant) -> Plan:
        """The plan of one host call; of none where no gradient is wanted."""
        module, note = _way(problem, delegates(problem) and not gradients.dlse)
        buffers = backward_buffers(problem, gradients)
        outputs = tuple(b.name for b in buffers if b.role == "output")
        calls = (HostCall(module.backward, outputs),) if outputs else ()
        return Plan(problem, self.name, "split", buffers, calls, (note,))


BACKEND = CpuBackend()


def delegates(p: AttentionProblem) -> bool:
    """Whether torch's flash attention computes this problem's forward, and its backward unless lse has a gradient."""
    region = region_of(p)
    if p.score or p.head_dim != p.head_dim_v or region.rows == 0:
        return False
    return region.full or (region.causal and p.scale_value > 0.0)


def _way(p: AttentionProblem, delegated: bool) -> tuple[ModuleType, str]:
    """The module that computes a problem, and what `explain` says about it."""
    if delegated:
        from flashtile.kernels.cpu import delegate

        widened = "" if p.dtype is DType.FP32 else f", {p.dtype} widened to fp32"
        return delegate, f"cpu: delegates to torch's flash attention{widened}"
    from flashtile.kernels.cpu import tiled

    region = region_of(p)
    tile = f"tile {tiling_of(p, region).spell()}" if region.rows else "no query sees a key"
    return tiled, f"cpu: tiled online softmax, {tile}"
