"""Which tile a pass gets: a tuned one where this device was measured, otherwise a rule by shared memory."""

from __future__ import annotations

from flashtile.kernels.triton.tile import Launch, Pass, padded
from flashtile.plan.device import Device
from flashtile.spec.attention import AttentionProblem
from flashtile.spec.dtype import DType

DELTA_ROWS = 64


def choose(problem: AttentionProblem, device: Device, which: Pass) -> Launch:
    columns = max(padded(problem.head_dim), padded(problem.head_dim_v), 32)
    if problem.dtype is DType.FP32:
        return Launch(32, 32, 4, 1)
    if which == "forward":
        return Launch(128, 64, 8 if columns >= 128 else 4, 3) if columns <= 128 else Launch(64, 64, 8, 2)
    if which == "queries":
        return Launch(128, 64, 8, 2) if columns <= 128 else Launch(64, 32, 8, 2)
    return Launch(64, 128 if columns <= 64 else 64, 8 if columns <= 64 else 4, 2) if columns <= 128 else Launch(32, 64, 8, 2)
