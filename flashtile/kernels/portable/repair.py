"""Repairs: these kernels after those of a backend whose scores are not to be relied on where a row's are large.

Such a backend adds a tensor to scores within its products, whose sums then lose what the offset is rounded by. Its plan runs as
it is; behind it stand the launches of this file. A forward's looks at lse, and computes tiles anew where some row's is large,
or is said to have seen nothing. A backward's first launch looks at lse; where some row's is large the others compute all
gradients anew. Elsewhere they end at once. They begin early (`device/stream.py`), those of many tiles in as many programs as
run at a time. An H200, 2 x 2048, 16 heads of 128, causal: beside the forward's 74 us these took 6 while a launch of its own
looked at lse and two programs a multiprocessor waited behind it, beside the backward's 205 us 9 while every tile had one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from flashtile.kernels.device.exponential import FAR
from flashtile.kernels.device.stream import await_stream
from flashtile.kernels.device.sums import sum_partials
from flashtile.kernels.device.varlen import slab, tile_of
from flashtile.kernels.portable.backward import (
    attention_backward_keys,
    attention_backward_queries,
    tile_of_keys,
    tile_of_queries,
)
from flashtile.kernels.portable.broadcast import attention_backward_broadcast, broadcast_tile, sum_shared
from flashtile.kernels.portable.forward import attention_forward, forward_tile
from flashtile.kernels.portable.rows import attention_delta
from flashtile.plan.call import Buffer, Descriptor, KernelCall, Plan, Pointer, Strides
from flashtile.plan.device import Device
from flashtile.triton_glue.language import PLAIN_INTEGERS, constexpr, jit, tl

PARTS = constexpr(64)  # of all rows: each program of the backward reads as many words
GATE = "repair.gate"


@jit(do_not_specialize=["count"])
def attention_far(lse_ptr, gate_ptr, count, BLOCK: tl.constexpr):
    """gate[i] = 1 where one of the i-th part of `count` rows has an lse beyond FAR, else 0. One program a part."""
    await_stream()
    part = tl.cdiv(count, tl.num_programs(0))
    first = tl.program_id(0) * part
    end = tl.minimum(first + part, count)
    far = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(first, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        distance = tl.abs(tl.load(lse_ptr + at, mask=at < end, other=0.0))
        far = far | ((distance > FAR) & (distance < float("inf"))).to(tl.int32)
    tl.store(gate_ptr + tl.program_id(0), tl.max(far))


@jit
def is_far(gate_ptr):
    """Whether any part has such a row. Said by a kernel that begins early, before all else."""
    await_stream()
    return tl.max(tl.load(gate_ptr + tl.arange(0, PARTS))) > 0


@jit
def far_rows(number, tiles, lse_ptr, seqlen_q, seqlen_k, heads, schedule_ptr, T: tl.constexpr):
    """Which rows of a query tile have an lse beyond FAR, or one that is not finite, as one whose every score overflowed."""
    BLOCK_Q: tl.constexpr = T.block_q
    tile, head, item, _ = tile_of(number, tiles, schedule_ptr, seqlen_q, seqlen_q, seqlen_k, heads, BLOCK_Q, False, T)
    index = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    rows = lse_ptr + (slab(item, T) * heads + head).to(tl.int64) * seqlen_q + item.first_q + index
    return ((tl.abs(tl.load(rows, mask=index < item.q, other=0.0)) < FAR) == 0).to(tl.int32)


@jit(do_not_specialize=PLAIN_INTEGERS)
def repair_forward(in_ptrs, out_ptrs, strides, seqlen_q, seqlen_k, heads, group, left, right, scale, score_args,
                   region, T: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """`attention_forward` of the tiles that have such rows; region = (the forward's, how many tiles there are).

    A program looks at all its tiles first, several loads under way: nearly always that is all there is to do.
    """
    BLOCK_Q: tl.constexpr = T.block_q
    await_stream()
    first, tiles, step = tl.program_id(0), region[1], tl.num_programs(0)
    far = tl.zeros([BLOCK_Q], tl.int32)
    for number in tl.range(first, tiles, step, loop_unroll_factor=4):
        far = far | far_rows(number, tiles, out_ptrs[1], seqlen_q, seqlen_k, heads, region[0][0], T)
    if tl.max(far) > 0:
        for number in tl.range(first, tiles, step):
            if tl.max(far_rows(number, tiles, out_ptrs[1], seqlen_q, seqlen_k, heads, region[0][0], T)) > 0:
                forward_tile(number, tiles, in_ptrs, out_ptrs, strides, seqlen_q, seqlen_k, heads, group, left, right, scale,
                             score_args, region[0], T, SCORE, MASK)  # fmt: skip


@jit(do_not_specialize=PLAIN_INTEGERS)
def repair_delta(in_ptrs, rows_ptr, strides, seqlen_q, seqlen_k, heads, schedule_ptr, T: tl.constexpr):
    """`attention_delta`, where the gate says so; here and below the gate stands behind what was the last argument: a pair."""
    if is_far(schedule_ptr[1]):
        attention_delta(in_ptrs, rows_ptr, strides, seqlen_q, seqlen_k, heads, schedule_ptr[0], T)


@jit(do_not_specialize=PLAIN_INTEGERS)
def repair_queries(in_ptrs, strides, seqlen_q, seqlen_k, heads, group, left, right, scale, score_args, grad_args, region,
                   T: tl.constexpr, SCORE: tl.constexpr, CAPTURED: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    if is_far(region[1][0]):
        for number in tl.range(tl.program_id(0), region[1][1], tl.num_programs(0)):
            tile_of_queries(number, region[1][1], in_ptrs, strides, seqlen_q, seqlen_k, heads, group, left, right, scale,
                            score_args, grad_args, region[0], T, SCORE, CAPTURED, MASK)  # fmt: skip


@jit(do_not_specialize=PLAIN_INTEGERS)
def repair_keys(in_ptrs, grad_ptrs, strides, seqlen_q, seqlen_k, heads, group, left, right, scale, score_args, region,
                T: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    if is_far(region[1][0]):
        for number in tl.range(tl.program_id(0), region[1][1], tl.num_programs(0)):
            tile_of_keys(number, region[1][1], in_ptrs, grad_ptrs, strides, seqlen_q, seqlen_k, heads, group, left, right,
                         scale, score_args, region[0], T, SCORE, MASK)  # fmt: skip


@jit(do_not_specialize=[*PLAIN_INTEGERS, "batches"])
def repair_broadcast(ptrs, strides, seqlen_q, seqlen_k, heads, group, left, right, scale, score_args, region, batches,
                     T: tl.constexpr, SCORE: tl.constexpr, CAPTURED: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    if is_far(region[1][0]):
        for number in tl.range(tl.program_id(0), region[1][1], tl.num_programs(0)):
            broadcast_tile(number, ptrs, strides, seqlen_q, seqlen_k, heads, group, left, right, scale, score_args, region[0],
                           batches, T, SCORE, CAPTURED, MASK)  # fmt: skip


@jit(do_not_specialize=["count", "heads"])
def repair_sums(source_ptr, schedule_ptr, target_ptr, count, heads, BLOCK: tl.constexpr):
    if is_far(schedule_ptr[1]):
        sum_partials(source_ptr, schedule_ptr[0], target_ptr, count, heads, BLOCK)


@jit
def repair_shared(source_ptr, target_ptr, shared, length, BLOCK: tl.constexpr):
    if is_far(target_ptr[1]):
        sum_shared(source_ptr, target_ptr[0], shared, length, BLOCK)


# The gated kernel of each, which argument the gate joins, or of a forward, which looks at lse itself, how many tiles there are,
# and whether few programs take as many tiles as there are.
GATED: Mapping[Any, tuple[Any, str, bool]] = {
    attention_forward: (repair_forward, "region", True),
    attention_delta: (repair_delta, "schedule_ptr", False),
    attention_backward_queries: (repair_queries, "region", True),
    attention_backward_keys: (repair_keys, "region", True),
    attention_backward_broadcast: (repair_broadcast, "region", True),
    sum_partials: (repair_sums, "schedule_ptr", False),
    sum_shared: (repair_shared, "target_ptr", False),
}


def repairing(plan: Plan, device: Device, forward: bool) -> Plan:
    """A plan of these kernels, as it follows another's: nothing but a look at lse where all is well."""
    programs = device.sm_count if forward else 2 * device.sm_count  # at a time: the forward's fill a multiprocessor each
    calls = tuple(_gated(call, programs, forward) for call in plan.calls if isinstance(call, KernelCall))
    if forward:
        return _renamed(replace(plan, calls=calls))
    rows = next(b.shape for b in plan.buffers if b.name == "lse")
    args = (Pointer("lse"), Pointer(GATE), prod(rows))
    look = KernelCall(attention_far, (PARTS.value, 1, 1), args, (("BLOCK", 1024),), early=True)
    gate = Buffer(GATE, (PARTS.value,), "int32", "scratch")
    return _renamed(replace(plan, calls=(look, *calls), buffers=(*plan.buffers, gate)))


def _gated(call: KernelCall, programs: int, forward: bool) -> KernelCall:
    """The call behind the gate, or a forward's; those that list the tiles of items of unlike lengths have none."""
    if call.kernel not in GATED:
        return call
    kernel, name, few = GATED[call.kernel]
    at, tiles = call.kernel.arg_names.index(name), call.grid[0]
    joined = tiles if forward else (Pointer(GATE), tiles) if few else Pointer(GATE)
    args = (*call.args[:at], (call.args[at], joined), *call.args[at + 1 :])
    constants = tuple((n, replace(v, repairs=True) if n == "T" and forward else v) for n, v in call.constants)
    grid = (min(tiles, programs), 1, 1) if few else call.grid
    return replace(call, kernel=kernel, args=args, constants=constants, grid=grid, early=True)


def _renamed(plan: Plan) -> Plan:
    """The plan, whose scratch has names of its own."""
    scratch = {b.name for b in plan.buffers if b.role == "scratch"}

    def name(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return tuple(name(a) for a in arg)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        if isinstance(arg, (Pointer, Strides, Descriptor)) and arg.name in scratch and arg.name != GATE:
            return replace(arg, name=f"repair.{arg.name}")
        return arg

    buffers = tuple(replace(b, name=f"repair.{b.name}") if b.name in scratch - {GATE} else b for b in plan.buffers)
    calls = tuple(replace(call, args=name(call.args)) for call in plan.calls if isinstance(call, KernelCall))
    return replace(plan, buffers=buffers, calls=calls)
