"""LayerNorm and RMSNorm, with dropout, residual addition, row and column scales, subsets of rows and a second branch.

    h = colscale * drop(rowscale * scale * x) + drop(x1) + residual        (rounded to residual_dtype)
    out = (h - mean(h)) * rstd * weight + bias,  out1 the same with weight1, bias1;   an RMSNorm has no mean

LayerNorm: arXiv 1607.06450; RMSNorm: arXiv 1910.07467. Options and their order as in flash-attention's dropout_layer_norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from flashtile.kernels.device.columns import column_sums
from flashtile.kernels.device.exchange import MOST_PROGRAMS, talk
from flashtile.kernels.device.number import SHORT
from flashtile.kernels.ops.norm_kernels import (
    NormTile,
    norm_backward,
    norm_backward_sums,
    norm_forward,
)
from flashtile.kernels.ops.norm_problem import PARAMETERS, Norm
from flashtile.plan.call import Buffer, KernelCall, Pointer, Strides
from flashtile.plan.device import Device
from flashtile.plan.op import Op, Steps
from flashtile.problem.dropout import threshold
from flashtile.problem.dtype import SIZES_BYTES


@dataclass(frozen=True)
class NormLaunch:
    """How rows are cut: `block` columns a step, `rows` at a time; a backward walks them with so many programs per SM."""

    rows: int
    block: int
    warps: int
    per_sm: int = 1
    stages: int = 1
    holds: bool = True


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def choose_forward(p: Norm) -> NormLaunch:
    """Two to four 16-byte loads in flight per thread; a row that registers do not hold is walked in steps."""
    block = max(_power(p.hidden), 16)
    block = min(block, 32768)  # hidden 65536, rms, an H100: 0.99 of the copy ceiling, with 16384 0.86
    warps = min(max(block // 512, 4), 16) if block <= 16384 else 32
    return NormLaunch(max(1, min(4096 // block, 16)), block, warps)


STRIP = 8192  # columns of a row that is too long for one program


def strips_talk(p: Norm, device: Device) -> bool:
    """Whether the programs of a row's strips wait for one another.

    Two strips pay where the second is not short, and where whole rows leave too few registers: not for an RMSNorm alone, whose
    hidden 16384 on an H100 reaches 0.74 of the copy ceiling, whole 0.92.
    """
    light = p.kind == "rms" and not p.mixes and p.hidden <= 2 * STRIP
    return talk(device) and 1.75 * STRIP < p.hidden <= STRIP * MOST_PROGRAMS and not light


def choose_backward(p: Norm, device: Device, arriving: frozenset[str]) -> NormLaunch:
    """Two to four 16-byte loads of h and of dout per thread, beside its sums of the parameters' gradients.

    The next rows are on their way into shared memory, as far as that holds them. Rows that are too long for registers, or too
    wide for two sums beside them, are cut into strips whose programs tell one another their sums. Of the copy ceiling of an
    H100: hidden 16384 in two strips 0.88 (layer), whole 0.84; with dropout 0.89 and 0.68; 65536 in eight 0.87 (rms 0.92), by a
    pass for the sums before it 0.56.
    """
    block = STRIP if strips_talk(p, device) else min(max(_power(p.hidden), 16), 2 * STRIP)
    warps, rows, holds = min(max(block // 512, 4), 16), max(1, min(2048 // block, 16)), block <= STRIP
    per_sm, most = max(1, 8 // warps), 3
    if strips_talk(p, device):
        warps, most = 16 if p.has("weight1") or p.has("colscale") else 8, 2
    known = p.outputs()
    widths = [SIZES_BYTES[p.stored], *(SIZES_BYTES[known[name].dtype] for name in arriving)]
    widths += [] if holds else [SIZES_BYTES[p[n].dtype] for n in ("weight", "weight1") if p.has(n)]
    widths += [SIZES_BYTES[p[n].dtype] for n in ("x", "colscale") if p.has("colscale")]
    room = (
        device.smem_bytes // per_sm - 2048 - (4 * block if strips_talk(p, device) else 0)
    )  # some of a row's wait for the next
    ahead = min(most, room // (rows * block * sum(widths)))
    return NormLaunch(rows, block, warps, per_sm, 1 + max(ahead, 0), holds)


def tile(p: Norm, launch: NormLaunch) -> NormTile:
    chunks = ceil(p.hidden / launch.block)
    return NormTile(
        launch.rows, launch.block, p.hidden, chunks, launch.stages, launch.holds, p.kind == "layer",
        p.mixes, p.scale != 1.0, p.drops, p.zero_centered, p.stored, p["x"].dtype == "fp32",
        p["x"].dtype == "fp32" and p.hidden <= SHORT, "evict_last" if chunks > 1 else "",
    )  # fmt: skip


def _pointers(names: tuple[str, ...], present: Any) -> tuple[Pointer | None, ...]:
    return tuple(Pointer(name) if name in present else None for name in names)


def _strides(names: tuple[str, ...], present: Any) -> tuple[Any, ...]:
    return tuple(Strides(name) if name in present else (0, 0) for name in names)


def _drop(p: Norm) -> tuple[int, float]:
    """Words below the first are dropped; what is kept is multiplied by the second."""
    return threshold(p.dropout_p), 1.0 / (1.0 - p.dropout_p) if p.dropout_p < 1.0 else 0.0


def forward(p: Norm, device: Device, made: tuple[str, ...]) -> Steps:
    """One kernel."""
    launch = choose_forward(p)
    inputs = tuple(name for name, _ in p.given)
    args = (
        _pointers(("x", "residual", "x1", "rowscale", "colscale", "x_subset", "seed"), inputs),
        _pointers(("weight", "bias", "weight1", "bias1", "out_subset"), inputs),
        _pointers(("out", "out1", "h"), made), _pointers(("mean", "rstd"), made),
        _strides(("x", "residual", "x1"), inputs), p.rows, p.eps, p.scale, _drop(p),
    )  # fmt: skip
    grid = (ceil(p.rows / launch.rows), 1, 1)
    return Steps((KernelCall(norm_forward, grid, args, (("T", tile(p, launch)),), launch.warps, 1),))


def backward(p: Norm, device: Device, wanted: frozenset[str], arriving: frozenset[str]) -> Steps:
    """The rows' kernel, before it their sums where a row has several strips, after it the parameters'."""
    launch = choose_backward(p, device, arriving)
    constants, warps = (("T", tile(p, launch)),), launch.warps
    inputs, h = kept(p, wanted), "h" if p.mixes else "x"
    sums = tuple(name for name in PARAMETERS if name in wanted)
    slots = tuple(sums.index(name) if name in sums else None for name in PARAMETERS)
    strips = ceil(p.hidden / launch.block)
    together = strips > 1 and strips_talk(p, device)
    programs = max(1, min(device.sm_count * launch.per_sm // (strips if together else 1), ceil(p.rows / launch.rows)))
    scratch: list[Buffer] = []
    present = (*inputs, *(f"d{n}" for n in arriving))
    given = (h, "dout", "dout1", "dh", "mean" if p.kind == "layer" else "", "rstd")
    weights = _pointers(("weight", "weight1", "out_subset"), inputs)
    strides = _strides((h, "dout", "dout1", "dh", "x"), present)
    calls: list[KernelCall] = []
    if together:
        scratch.append(Buffer("words", (p.rows, strips), "int64", "scratch", zeroed=True))
    elif strips > 1:
        scratch.append(Buffer("sums", (2, p.rows), "fp32", "scratch"))
        args = (_pointers(given, present), weights, Pointer("sums"), strides, p.rows)
        calls.append(KernelCall(norm_backward_sums, (ceil(p.rows / launch.rows), 1, 1), args, constants, warps, 1))
    if sums:
        scratch.append(Buffer("partial", (len(sums), programs, p.hidden), "fp32", "scratch"))
    made = [f"d{name}" for name in wanted if name not in same(p, wanted)]
    args = (
        _pointers(given, present), weights, _pointers(("x", "rowscale", "colscale", "x_subset", "seed"), inputs),
        _pointers(("dx", "dresidual", "dx1"), made), _pointers(("sums", "partial", "words"), [b.name for b in scratch]),
        strides, p.rows, p.scale, _drop(p),
    )  # fmt: skip
    calls.append(KernelCall(norm_backward, (strips, programs, 1), args, (*constants, ("SLOTS", slots)), warps, 1))
    if sums:
        calls.append(column_sums("partial", tuple(f"d{name}" for name in sums), programs, p.hidden))
    return Steps(tuple(calls), tuple(scratch))


def kept(p: Norm, wanted: frozenset[str]) -> tuple[str, ...]:
    """What the backward reads."""
    names = ["h" if p.mixes else "x", *(("mean",) if p.kind == "layer" else ()), "rstd"]
    names += [n for n in ("weight", "weight1", "rowscale", "colscale", "x_subset", "out_subset", "seed") if p.has(n)]
    if "colscale" in wanted and "x" not in names:
        names.append("x")
    return tuple(names)


def same(p: Norm, wanted: frozenset[str]) -> dict[str, str]:
    """Gradients that are one tensor: dresidual is dx where nothing is dropped or scaled."""
    plain = not (p.drops or p.has("rowscale") or p.has("colscale") or p.has("x_subset") or p.scale != 1.0)
    if plain and {"x", "residual"} <= wanted and p["x"].dtype == p["residual"].dtype:
        return {"residual": "x"}
    return {}


def zeroed(p: Norm) -> frozenset[str]:
    """Tensors that subsets leave rows of unwritten."""
    return frozenset((("dx",) if p.has("x_subset") else ()) + (("out", "out1") if p.has("out_subset") else ()))


def host_forward(p: Norm, tensors: dict[str, Any], outputs: tuple[str, ...]) -> dict[str, Any]:
    from flashtile.kernels.ops import norm_host

    return norm_host.forward(p, tensors, outputs)


def host_backward(p: Norm, tensors: dict[str, Any], outputs: tuple[str, ...]) -> dict[str, Any]:
    from flashtile.kernels.ops import norm_host

    return norm_host.backward(p, tensors, outputs)


NORM = Op(Norm, forward, backward, host_forward, host_backward, kept, zeroed, same)
