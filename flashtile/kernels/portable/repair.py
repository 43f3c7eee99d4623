"""Repairs: these kernels after those of a backend whose scores are not to be relied on where a row's are large.

Such a backend adds a tensor to scores within its products, whose sums then lose what the offset is rounded by. Its plan runs as
it is, and tells in words, the gate, where some row's lse is large, or where a forward's row saw nothing. Behind it stand the
launches of this file: a forward's computes those rows anew, a backward's all gradients. Elsewhere they end at once. They begin
early (`device/stream.py`), those of many tiles in few programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flashtile.kernels.device.exponential import FAR
from flashtile.kernels.device.grid import Sizes
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
from flashtile.kernels.portable.rows import attention_delta, tile_of_delta
from flashtile.plan.call import Buffer, Descriptor, KernelCall, Plan, Pointer, Strides
from flashtile.plan.device import Device
from flashtile.triton_glue.language import PLAIN_INTEGERS, constexpr, jit, tl

WORDS = constexpr(2048)  # that a program reads at a time


@jit
def is_far(gate):
    """Whether some word is not 0. gate = (words, how many). Said by a kernel that begins early, before all else."""
    await_stream()
    far = tl.zeros([WORDS], tl.int32)
    for start in tl.range(0, gate[1], WORDS):
        at = start + tl.arange(0, WORDS)
        far = far | tl.load(gate[0] + at, mask=at < gate[1], other=0)
    return tl.max(far) > 0


@jit(do_not_specialize=PLAIN_INTEGERS)
def repair_forward(in_ptrs, out_ptrs, strides, seqlen_q, seqlen_k, heads, group, left, right, scale, score_args,
                   region, T: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """`attention_forward` of the tiles that have such rows; region = (the forward's, (`is_far`'s, tiles there are))."""
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
    """region[1] = (gate, tiles, and where `attention_delta` has no launch, or else None, its rows_ptr, in_ptrs and strides: a
    program reads the rows of its own queries alone).
    """
    if is_far(region[1][0]):
        for number in tl.range(tl.program_id(0), region[1][1], tl.num_programs(0)):
            if region[1][2] is not None:
                tile_of_delta(number, region[1][1], region[1][3], region[1][2], region[1][4], seqlen_q, seqlen_k, heads,
                              region[0][0], T)  # fmt: skip
                tl.debug_barrier()
            tile_of_queries((number, region[1][1]), in_ptrs, strides, Sizes(seqlen_q, seqlen_k, heads, group),
                            (left, right, region[0][1]), scale, (score_args, grad_args), region[0], T, SCORE, CAPTURED,
                            MASK)  # fmt: skip


@jit(do_not_specialize=PLAIN_INTEGERS)
def repair_keys(in_ptrs, grad_ptrs, strides, seqlen_q, seqlen_k, heads, group, left, right, scale, score_args, region,
                T: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    if is_far(region[1][0]):
        for number in tl.range(tl.program_id(0), region[1][1], tl.num_programs(0)):
            tile_of_keys((number, region[1][1]), in_ptrs, grad_ptrs, strides, Sizes(seqlen_q, seqlen_k, heads, group),
                         (left, right, region[0][1]), scale, score_args, region[0], T, SCORE, MASK)  # fmt: skip


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
    attention_backward_queries: (repair_queries, "region", True),
    attention_backward_keys: (repair_keys, "region", True),
    attention_backward_broadcast: (repair_broadcast, "region", True),
    sum_partials: (repair_sums, "schedule_ptr", False),
    sum_shared: (repair_shared, "target_ptr", False),
}
READERS = {attention_backward_queries, attention_backward_keys, attention_backward_broadcast}  # of delta, by tiles of queries


def repairing(plan: Plan, device: Device, forward: bool, gate: Buffer) -> Plan:
    """A plan of these kernels, as it follows another's, whose scratch the gate is."""
    calls = [call for call in plan.calls if isinstance(call, KernelCall)]
    delta = None if forward else _joined(calls)
    kept = (call for call in calls if call is not delta)
    return _renamed(replace(plan, calls=tuple(_gated(call, 2 * device.sm_count, forward, gate, delta) for call in kept)))


def _joined(calls: list[KernelCall]) -> KernelCall | None:
    """The launch of a backward that makes delta, where the pass over queries may do it."""
    by = {call.kernel: call for call in calls}
    rows = {kernel: dict(call.constants)["T"].block_q for kernel, call in by.items() if kernel in READERS}
    mine = rows.get(attention_backward_queries)
    return None if mine is None or any(mine % others for others in rows.values()) else by[attention_delta]


def _gated(call: KernelCall, programs: int, forward: bool, gate: Buffer, delta: KernelCall | None) -> KernelCall:
    """The call behind the gate; those that list the tiles of items of unlike lengths have none. delta: what has no launch."""
    if call.kernel not in GATED:
        return call
    kernel, name, few = GATED[call.kernel]
    at, constants = call.kernel.arg_names.index(name), dict(call.constants)
    told: tuple[Any, ...] = Pointer(gate.name), *gate.shape
    if few:
        told = told, call.grid[0]
    if kernel is repair_queries:
        told = *told, *((delta.args[1], delta.args[0], delta.args[2]) if delta else (None, None, None))
    args = (*call.args[:at], (call.args[at], told), *call.args[at + 1 :])
    if forward:
        constants["T"] = replace(constants["T"], repairs=True)
    grid = (min(call.grid[0], programs), 1, 1) if few else call.grid
    return replace(call, kernel=kernel, args=args, constants=tuple(constants.items()), grid=grid, early=True)


def _renamed(plan: Plan) -> Plan:
    """The plan, whose scratch has names of its own."""
    scratch = {b.name for b in plan.buffers if b.role == "scratch"}

    def name(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return tuple(name(a) for a in arg)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        if isinstance(arg, (Pointer, Strides, Descriptor)) and arg.name in scratch:
            return replace(arg, name=f"repair.{arg.name}")
        return arg

    buffers = tuple(replace(b, name=f"repair.{b.name}") if b.name in scratch else b for b in plan.buffers)
    calls = tuple(replace(call, args=name(call.args)) for call in plan.calls if isinstance(call, KernelCall))
    return replace(plan, buffers=buffers, calls=calls)
