"""Repairs: these kernels after those of a backend whose scores are not to be relied on where a row's are large.

Such a backend adds a tensor to scores within its products, whose sums then lose what the offset is rounded by. Its plan runs as
it is; behind it stand the launches of this file. One looks at lse. Where some row's is large, or where a forward says that it
saw nothing, the forward's other launch computes those rows anew, and the backward's all gradients. Elsewhere they end at once.
They begin early (`lib/stream.py`), those of many tiles in few programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from flashtile.kernels.device.exponential import FAR
from flashtile.kernels.device.grid import Sizes
from flashtile.kernels.device.stream import await_stream
from flashtile.kernels.device.sums import sum_partials
from flashtile.kernels.device.varlen import slab, tile_of
from flashtile.kernels.portable.backward import attention_backward_keys, attention_backward_queries
from flashtile.kernels.portable.broadcast import attention_backward_broadcast, broadcast_tile, sum_shared
from flashtile.kernels.portable.forward import attention_forward, forward_tile
from flashtile.kernels.portable.rows import attention_delta
from flashtile.plan.call import Buffer, Descriptor, KernelCall, Plan, Pointer, Strides
from flashtile.plan.device import Device
from flashtile.triton_glue.language import PLAIN_INTEGERS, constexpr, jit, tl

PARTS = constexpr(64)  # of all rows: each program of the backward reads as many words
GATE = "repair.gate"


@jit(do_not_specialize=["count"])
def attention_far(lse_ptr, gate_ptr, count, FORWARD: tl.constexpr, BLOCK: tl.constexpr):
    """gate[i] = 1 where one of the i-th part of `count` rows has an lse beyond FAR, else 0. One program a part.

    FORWARD: or one that is not finite, as that of a row whose every score overflowed.
    """
    await_stream()
    part = tl.cdiv(count, tl.num_programs(0))
    first = tl.program_id(0) * part
    end = tl.minimum(first + part, count)
    far = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(first, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        distance = tl.abs(tl.load(lse_ptr + at, mask=at < end, other=0.0))
        if FORWARD:
            far = far | ((distance < FAR) == 0).to(tl.int32)
        else:
            far = far | ((distance > FAR) & (distance < float("inf"))).to(tl.int32)
    tl.store(gate_ptr + tl.program_id(0), tl.max(far))


@jit
def is_far(gate_ptr):
    """Whether any part has such a row. Said by a kernel that begins early, before all else."""
    await_stream()
    return tl.max(tl.load(gate_ptr + tl.arange(0, PARTS))) > 0


@jit(do_not_specialize=PLAIN_INTEGERS)
def repair_forward(in_ptrs, out_ptrs, strides, seqlen_q, seqlen_k, heads, group, left, right, scale, score_args,
                   region, T: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """`attention_forward` of the tiles that have such rows; region = (the forward's, (gate, how many tiles there are))."""
    BLOCK_Q: tl.constexpr = T.block_q
    if is_far(region[1][0]):
        for number in tl.range(tl.program_id(0), region[1][1], tl.num_programs(0)):
            tile, head, item, _ = tile_of(
                number, region[1][1], region[0][0], seqlen_q, seqlen_q, seqlen_k, heads, BLOCK_Q, False, T
            )
            index = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
            head_rows = (slab(item, T) * heads + head).to(tl.int64) * seqlen_q
            lse = tl.load(out_ptrs[1] + head_rows + item.first_q + index, mask=index < item.q, other=0.0)
            if tl.max(((tl.abs(lse) < FAR) == 0).to(tl.int32)) > 0:
                forward_tile((number, region[1][1]), in_ptrs, out_ptrs, strides, Sizes(seqlen_q, seqlen_k, heads, group),
                             (left, right, region[0][1]), scale, score_args, region[0], T, SCORE, MASK)  # fmt: skip


@jit(do_not_specialize=PLAIN_INTEGERS)
def repair_delta(in_ptrs, rows_ptr, strides, seqlen_q, seqlen_k, heads, schedule_ptr, T: tl.constexpr):
    """`attention_delta`, where the gate says so; here and below the gate stands behind what was the last argument: a pair."""
    if is_far(schedule_ptr[1]):
        attention_delta(in_ptrs, rows_ptr, strides, seqlen_q, seqlen_k, heads, schedule_ptr[0], T)


@jit(do_not_specialize=PLAIN_INTEGERS)
def repair_queries(in_ptrs, strides, seqlen_q, seqlen_k, heads, group, left, right, scale, score_args, grad_args, region,
                   T: tl.constexpr, SCORE: tl.constexpr, CAPTURED: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    if is_far(region[1]):
        attention_backward_queries(in_ptrs, strides, seqlen_q, seqlen_k, heads, group, left, right, scale, score_args,
                                   grad_args, region[0], T, SCORE, CAPTURED, MASK)  # fmt: skip


@jit(do_not_specialize=PLAIN_INTEGERS)
def repair_keys(in_ptrs, grad_ptrs, strides, seqlen_q, seqlen_k, heads, group, left, right, scale, score_args, region,
                T: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    if is_far(region[1]):
        attention_backward_keys(in_ptrs, grad_ptrs, strides, seqlen_q, seqlen_k, heads, group, left, right, scale, score_args,
                                region[0], T, SCORE, MASK)  # fmt: skip


@jit(do_not_specialize=[*PLAIN_INTEGERS, "batches"])
def repair_broadcast(ptrs, strides, seqlen_q, seqlen_k, heads, group, left, right, scale, score_args, region, batches,
                     T: tl.constexpr, SCORE: tl.constexpr, CAPTURED: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    if is_far(region[1][0]):
        for number in tl.range(tl.program_id(0), region[1][1], tl.num_programs(0)):
            broadcast_tile(number, ptrs, strides, Sizes(seqlen_q, seqlen_k, heads, group), (batches, region[0][0]),
                           (left, right, region[0][1]), scale, score_args, T, SCORE, CAPTURED, MASK)  # fmt: skip


@jit(do_not_specialize=["count", "heads"])
def repair_sums(source_ptr, schedule_ptr, target_ptr, count, heads, BLOCK: tl.constexpr):
    if is_far(schedule_ptr[1]):
        sum_partials(source_ptr, schedule_ptr[0], target_ptr, count, heads, BLOCK)


@jit
def repair_shared(source_ptr, target_ptr, shared, length, BLOCK: tl.constexpr):
    if is_far(target_ptr[1]):
        sum_shared(source_ptr, target_ptr[0], shared, length, BLOCK)


# The gated kernel of each, which argument the gate joins, and whether it takes as many numbers as there are in few programs.
GATED: Mapping[Any, tuple[Any, str, bool]] = {
    attention_forward: (repair_forward, "region", True),
    attention_delta: (repair_delta, "schedule_ptr", False),
    attention_backward_queries: (repair_queries, "region", False),
    attention_backward_keys: (repair_keys, "region", False),
    attention_backward_broadcast: (repair_broadcast, "region", True),
    sum_partials: (repair_sums, "schedule_ptr", False),
    sum_shared: (repair_shared, "target_ptr", False),
}


def repairing(plan: Plan, device: Device, forward: bool) -> Plan:
    """A plan of these kernels, as it follows another's: nothing but a look at lse where all is well."""
    rows = next(b.shape for b in plan.buffers if b.name == "lse")
    constants = (("FORWARD", forward), ("BLOCK", 1024))
    look = KernelCall(attention_far, (PARTS.value, 1, 1), (Pointer("lse"), Pointer(GATE), prod(rows)), constants, early=True)
    calls = [_gated(call, 2 * device.sm_count, forward) for call in plan.calls if isinstance(call, KernelCall)]
    gate = Buffer(GATE, (PARTS.value,), "int32", "scratch")
    return _renamed(replace(plan, calls=(look, *calls), buffers=(*plan.buffers, gate)))


def _gated(call: KernelCall, programs: int, forward: bool) -> KernelCall:
    """The call behind the gate; those that list the tiles of items of unlike lengths have none."""
    if call.kernel not in GATED:
        return call
    kernel, name, few = GATED[call.kernel]
    at, gate = call.kernel.arg_names.index(name), Pointer(GATE)
    args = (*call.args[:at], (call.args[at], (gate, call.grid[0]) if few else gate), *call.args[at + 1 :])
    constants = tuple((n, replace(v, repairs=True) if n == "T" and forward else v) for n, v in call.constants)
    grid = (min(call.grid[0], programs), 1, 1) if few else call.grid
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
