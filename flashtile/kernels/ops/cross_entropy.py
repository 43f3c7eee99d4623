"""Cross-entropy of rows of logits, the loss alone or with its gradient in the same pass.

    x = logit_scale * logits,   lse = log(sum_j exp(x_j)),   share = -(1 - smoothing) x_label - smoothing / classes * sum_j x_j
    loss = lse + share + z_loss * lse^2;   0 in rows whose label is ignore_index

With a softcap x = softcap * tanh(logit_scale * logits / softcap). With weights of classes w

    share = -(1 - smoothing) w_label x_label - smoothing / classes * sum_j w_j x_j
    loss = ((1 - smoothing) w_label + smoothing / classes * sum_j w_j) lse + share + z_loss * lse^2

and a mean divides by the sum of w_label of the rows that count, but what z_loss adds by their number.

With `shard` the logits are those of the classes from first_class on, of `classes` in all: the outputs are share and lse, of
which a group of shards makes the loss. Online softmax: arXiv 1805.02867.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from flashtile.kernels.device.exchange import MOST_PROGRAMS, talk
from flashtile.kernels.ops.cross_entropy_host import host_backward, host_forward
from flashtile.kernels.ops.cross_entropy_kernels import (
    LossTile,
    cross_entropy_backward,
    cross_entropy_forward,
)
from flashtile.kernels.ops.cross_entropy_problem import CrossEntropy
from flashtile.kernels.ops.cross_entropy_sums import (
    cross_entropy_count,
    cross_entropy_reduce,
    cross_entropy_scale,
    cross_entropy_weigh,
)
from flashtile.plan.call import Buffer, KernelCall, Pointer, Strides
from flashtile.plan.device import Device
from flashtile.plan.op import Op, Steps
from flashtile.problem.dtype import SIZES_BYTES


@dataclass(frozen=True)
class LossLaunch:
    """Columns a step, warps; how many programs share a row, and how many such groups walk the rows (None: a row has one)."""

    block: int
    warps: int
    pieces: int = 1
    groups: int | None = None


def line_of(p: CrossEntropy) -> int:
    """Elements in 16 bytes."""
    return 16 // SIZES_BYTES[p["logits"].dtype]


def choose(p: CrossEntropy, device: Device) -> LossLaunch:
    """Four 16-byte loads in flight per thread.

    With the gradient rows should stay in L2 until they are read again, of which an H100 has 50 MB. bf16, of the copy ceiling on
    2n bytes there: 32,768 classes 0.97 with 16 warps (with 8, in more programs at once, 0.81), 50,257 0.95 with 32 (16: 0.77).
    Longer rows are walked by one program an SM: 131,072 0.89; by two together where they are longer still: 262,144 0.85.
    """
    block = min(max(1 << (p.columns - 1).bit_length(), 256), 8192)
    warps, row_bytes = min(max(block // 1024, 1), 8), p.columns * SIZES_BYTES[p["logits"].dtype]
    if not p.eager_gradient or p.columns <= 8192:
        return LossLaunch(block, warps if p.columns <= 8192 else 16)
    if row_bytes <= 128 * 2**10:
        return LossLaunch(16384, 16 if row_bytes <= 64 * 2**10 else 32)
    pieces = min(ceil(row_bytes / (256 * 2**10)), MOST_PROGRAMS) if talk(device) else 1
    return LossLaunch(16384, 32, pieces, max(1, device.sm_count // pieces))


def tile(p: CrossEntropy, launch: LossLaunch, steps: int | None = None) -> LossTile:
    """steps: of a program; by default a piece's share of a row's."""
    if steps is None:
        steps = ceil(ceil(p.columns / launch.block) / launch.pieces)
    return LossTile(
        launch.block, line_of(p), p.columns, p.columns % line_of(p) != 0, launch.pieces, steps,
        launch.groups is not None, p.smoothing != 0.0, not p.shard, p.reduction == "mean",
        p["logits"].dtype == "fp32", p.wide, p.softcap is not None, p.has("weight"), p.has("weight") and p.smoothing != 0.0,
    )  # fmt: skip


def _numbers(p: CrossEntropy) -> tuple[Any, ...]:
    whole = (p.every, p.first_class, p.ignore_index)
    scale = (p.logit_scale,) if p.softcap is None else (p.logit_scale, p.softcap)
    return (1.0 - p.smoothing, p.smoothing / p.every), p.z_loss, scale, whole


def forward(p: CrossEntropy, device: Device, made: tuple[str, ...]) -> Steps:
    """The rows' kernel; around it, for a reduced loss, a count and a sum; before it, with weights, those of the labels."""
    launch = choose(p, device)
    mean, reduced, gradient = p.reduction == "mean", p.reduction != "none", "gradient" in made
    weighs, before = p.has("weight"), p.counts and (gradient or p.has("weight"))
    calls: list[KernelCall] = []
    scratch: list[Buffer] = []
    if p.counts and "count" not in made:
        scratch.append(Buffer("count", p.outputs()["count"].shape, "fp32", "scratch"))
    if before and weighs:
        args = (Pointer("labels"), Pointer("weight"), Pointer("count"), p.rows, p.every, p.ignore_index)
        calls.append(KernelCall(cross_entropy_weigh, (1, 1, 1), args, (("BLOCK", 4096),), 16, 1))
    elif before:
        args = (Pointer("labels"), Pointer("count"), p.rows, p.ignore_index)
        calls.append(KernelCall(cross_entropy_count, (1, 1, 1), args, (("BLOCK", 4096),), 16, 1))
    if reduced:
        scratch.append(Buffer("losses", (p.rows,), "fp32", "scratch"))
    if launch.pieces > 1:
        scratch.append(Buffer("words", (p.rows, launch.pieces), "int64", "scratch", zeroed=True))
    args = (
        (Pointer("logits"), Pointer("labels"), Pointer("count") if before else None, Pointer("weight") if weighs else None),
        (Pointer("losses" if reduced else made[0]), Pointer("lse"), Pointer("gradient") if gradient else None,
         Pointer("words") if launch.pieces > 1 else None),
        (Strides("logits"), Strides("gradient" if gradient else "logits")), *_numbers(p), p.rows,
    )  # fmt: skip
    grid = (min(p.rows, launch.groups or p.rows) * launch.pieces, 1, 1)
    calls.append(KernelCall(cross_entropy_forward, grid, args, (("T", tile(p, launch)),), launch.warps, 1))
    if reduced:
        args = (
            Pointer("losses"), Pointer("labels"), Pointer("count") if mean else None, Pointer("loss"), p.rows, p.ignore_index,
        )  # fmt: skip
        constants = (("COUNTS", mean and not before), ("BLOCK", 4096))
        calls.append(KernelCall(cross_entropy_reduce, (1, 1, 1), args, constants, 16, 1))
    return Steps(tuple(calls), tuple(scratch))


def backward(p: CrossEntropy, device: Device, wanted: frozenset[str], arriving: frozenset[str]) -> Steps:
    """Steps of rows; or the gradient of the forward times that of the loss."""
    if p.eager_gradient:
        args = (Pointer("dlogits"), Pointer("dloss"), p.rows * p.columns)
        return Steps((KernelCall(cross_entropy_scale, (8 * device.sm_count, 1, 1), args, (("BLOCK", 4096),), 8, 1),))
    block = min(max(1 << (p.columns - 1).bit_length(), 256), 4096)
    launch, steps = LossLaunch(block, max(1, block // 1024)), 4
    first = "dshare" if p.shard else "dloss"
    args = (
        (Pointer("logits"), Pointer("labels"), Pointer("count") if p.counts else None,
         Pointer("weight") if p.has("weight") else None, Pointer("lse")),
        (Pointer(first), Pointer("dlse") if "lse" in arriving else None), Pointer("dlogits"),
        (Strides("logits"), Strides("dlogits"), Strides(first) if p.reduction == "none" else (0,),
         Strides("dlse") if "lse" in arriving else (0,)), *_numbers(p),
    )  # fmt: skip
    grid = (p.rows, ceil(p.columns / (block * steps)), 1)
    constants = (("T", tile(p, launch, steps)),)
    return Steps((KernelCall(cross_entropy_backward, grid, args, constants, launch.warps, 1),))


def kept(p: CrossEntropy, wanted: frozenset[str]) -> tuple[str, ...]:
    if p.eager_gradient:
        return ("gradient",)
    return ("logits", "labels", *(("weight",) if p.has("weight") else ()), *(("count",) if p.counts else ()), "lse")


def over(p: CrossEntropy) -> dict[str, str]:
    if p.eager_gradient:
        return {"dlogits": "gradient", **({"gradient": "logits"} if p.inplace else {})}
    return {"dlogits": "logits"} if p.inplace else {}


CROSS_ENTROPY = Op(CrossEntropy, forward, backward, host_forward, host_backward, kept, over=over)
