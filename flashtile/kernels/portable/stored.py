"""What the portable kernels read of 8 bits, and multiply."""

from __future__ import annotations

from flashtile.plan.device import Device
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.options import Variant
from flashtile.problem.stored import Stored
from flashtile.triton_glue.language import INTERPRETED

FIRST_FP8 = 89  # Ada, the first of NVIDIA's with products of e4m3


def converts(stored: Stored, device: Device) -> bool:
    """Whether Triton makes fp16 of fp8 well: of e4m3 not before Ada."""
    return device.kind == "cuda" and not INTERPRETED and (device.arch >= FIRST_FP8 or stored.dtype != "e4m3")


def stored_refusals(p: AttentionProblem, stored: Stored, device: Device, variant: Variant | None) -> list[str]:
    """Reasons against a problem of 8 bits."""
    if variant is not None:
        return ["k and v are of 8 bits and have no gradient; a call that wants others computes them of 16-bit ones"]
    reasons: list[str] = []
    if not p.dtype.is_narrow:
        reasons.append(f"q is {p.dtype} and k and v are of 8 bits; supported beside them are fp16 and bf16")
    if p.multiplies_fp8:
        if device.kind != "cpu" and not (device.kind == "cuda" and device.arch >= FIRST_FP8):
            reasons.append(f"precision is 'fp8'; {device.target} has no products of e4m3, sm89, sm90 and newer have")
        if stored.v_scale == "token":
            reasons.append(
                "v_scale is one of each token and products of e4m3 take one of each head; quantise v again with v_scale of "
                f"shape ({p.batch}, {p.heads_kv}), or leave precision='fp8' out and give q in 16 bits"
            )
    return reasons
