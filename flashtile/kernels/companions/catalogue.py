"""The ops that are not attention, by name, and which of their two backends runs on a device."""

from __future__ import annotations

from flashtile import _triton
from flashtile.errors import InvalidProblem, NotSupported
from flashtile.kernels.companions.cross_entropy import CROSS_ENTROPY
from flashtile.kernels.companions.norm import NORM
from flashtile.kernels.companions.rotary import ROTARY
from flashtile.kernels.companions.softmax import SOFTMAX
from flashtile.plan.companion import Op
from flashtile.plan.device import Device
from flashtile.spec.companion import Companion

OPS: dict[str, Op] = {op.kind.op: op for op in (NORM, CROSS_ENTROPY, ROTARY, SOFTMAX)}
BACKENDS = ("triton", "cpu")


def unsupported(backend: str, device: Device) -> list[str]:
    """Reasons why a backend runs no companion there; empty when it runs them all."""
    if backend == "cpu":
        return [] if device.kind == "cpu" else [f"tensors are on {device.target}; this backend runs on the CPU"]
    reasons: list[str] = []
    if _triton.VERSION is None:
        reasons.append("Triton is not installed")
    if device.kind == "cpu" and not _triton.INTERPRETED:
        reasons.append("tensors are on the CPU; these kernels need a GPU (or TRITON_INTERPRET=1)")
    if device.kind == "cuda" and device.arch < 80:
        reasons.append(f"{device.target} has no bf16 arithmetic; supported from sm80")
    return reasons


def select(problem: Companion, device: Device, backend: str | None = None) -> str:
    """The first backend that runs companions on this device, or the named one. Raises NotSupported with the reasons."""
    if backend is not None and backend not in BACKENDS:
        raise InvalidProblem(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}, or None.")
    reasons: dict[str, list[str]] = {}
    for candidate in BACKENDS if backend is None else (backend,):
        reasons[candidate] = unsupported(candidate, device)
        if not reasons[candidate]:
            return candidate
    raise NotSupported(f"{problem.spell()} on {device.target}", reasons)
