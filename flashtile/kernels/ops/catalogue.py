"""The ops that are not attention, by name, and which of their two backends runs on a device."""

from __future__ import annotations

from typing import Any

from flashtile.errors import InvalidProblem, NotSupported
from flashtile.kernels.device.available import unavailable
from flashtile.kernels.ops.cross_entropy import CROSS_ENTROPY
from flashtile.kernels.ops.dense import DENSE
from flashtile.kernels.ops.norm import NORM
from flashtile.kernels.ops.rotary import ROTARY
from flashtile.kernels.ops.softmax import SOFTMAX
from flashtile.plan.device import Device
from flashtile.plan.op import Op
from flashtile.problem.op import Companion

OPS: dict[str, Op] = {op.kind.op: op for op in (NORM, CROSS_ENTROPY, ROTARY, SOFTMAX, DENSE)}
BACKENDS = ("triton", "cpu")


def unsupported(backend: str, device: Device) -> list[str]:
    """Reasons why a backend runs no companion there; empty when it runs them all."""
    if backend == "cpu":
        return [] if device.kind == "cpu" else [f"tensors are on {device.target}; this backend runs on the CPU"]
    return unavailable(device, "arithmetic")


def check_backend(backend: Any) -> None:
    """Raise InvalidProblem unless it is the name of one, or None."""
    if backend is not None and backend not in BACKENDS:
        raise InvalidProblem(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}, or None.")


def select(problem: Companion, device: Device, backend: str | None = None) -> str:
    """The first backend that runs companions on this device, or the named one. Raises NotSupported with the reasons."""
    check_backend(backend)
    reasons: dict[str, list[str]] = {}
    for candidate in BACKENDS if backend is None else (backend,):
        reasons[candidate] = unsupported(candidate, device)
        if not reasons[candidate]:
            return candidate
    raise NotSupported(f"{problem.spell()} on {device.target}", reasons)
