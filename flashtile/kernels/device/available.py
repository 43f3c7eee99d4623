"""Where Triton kernels run at all."""

from __future__ import annotations

from flashtile.plan.device import Device
from flashtile.triton_glue import language as _triton

NO_TRITON = "Triton is not installed"


def unavailable(device: Device, lacks: str) -> list[str]:
    """Reasons why no Triton kernel runs there; `lacks`: what of bf16 a GPU older than sm80 does not have."""
    reasons: list[str] = []
    if _triton.VERSION is None:
        reasons.append(NO_TRITON)
    if device.kind == "cpu" and not _triton.INTERPRETED:
        reasons.append("tensors are on the CPU; these kernels need a GPU (or TRITON_INTERPRET=1)")
    if device.kind == "cuda" and device.arch < 80:
        reasons.append(f"{device.target} has no bf16 {lacks}; supported from sm80")
    return reasons
