"""Tiles worth measuring for a pass: priced in shared memory and registers before anything is compiled."""

from __future__ import annotations

from dataclasses import replace
from itertools import product as combinations

from flashtile.kernels.device.score import score_bytes
from flashtile.kernels.portable.tile import WHOLE_FRAGMENT, Launch, Pass, padded, products, reads_bytes_and_joins
from flashtile.plan.device import Device
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.dtype import DType

# Accumulators and score tiles, in 32-bit registers per thread. Of 255, addresses and softmax state take the rest; tiles
# above this spilled kilobytes when compiled for sm90 (Triton 3.6.0).
MOST_REGISTERS = 208
MOST_HELD = 224  # with operands that wait in registers, which ptxas fits more tightly than accumulators


def shared_bytes(problem: AttentionProblem, launch: Launch, which: Pass) -> int:
    """Shared memory of a tile: the resident operands once, the streamed ones per stage, and ds where it is shared.

    A bias is streamed too, in one stage less: it goes to registers before its stage is filled again.
    """
    (d, dv), size = padded(problem), problem.dtype.size_bytes
    rows, columns = launch.block_q, launch.block_k
    biased = score_bytes(problem) * rows * columns * max(launch.num_stages - 1, 1)
    scratch = 0
    if launch.products == "float64":
        size = 8
    elif launch.products in ("cut", "aligned") or (launch.products == "short" and which == "forward"):
        # Three bf16 parts, and room to bring a streamed tile from the layout of loads to that of its parts (seen in
        # compiled kernels: Triton 3.6.0 takes it in the pass over keys alone)
        size, scratch = 6, 4 * rows * max(d, dv) if which in ("keys", "fused") else 0
    if which == "forward":
        size = 1 if problem.multiplies_fp8 else size
        return size * (rows * d + launch.num_stages * columns * (d + dv)) + biased
    if which == "queries":
        if max(d, dv) > 256:  # a streamed tile goes from the layout of loads to that of operands (seen in compiled kernels)
            scratch = size * columns * max(d, dv)
        return size * (rows * (d + dv) + launch.num_stages * columns * (d + dv)) + scratch + biased
    if which == "pairs":
        return size * launch.num_stages * (rows + columns) * (d + dv) + biased
    resident = columns * (d + dv) + launch.num_stages * rows * (d + dv)
    if max(d, dv) > 256:  # likewise
        scratch += size * rows * max(d, dv)
    return size * (resident + (rows * columns if which == "fused" else 0)) + scratch + biased


def registers(problem: AttentionProblem, launch: Launch, which: Pass) -> int:
    """32-bit registers per thread for accumulators and score tiles alone."""
    d, dv = padded(problem)
    rows, columns = launch.block_q, launch.block_k
    scores = rows * columns
    words = {
        "forward": rows * dv + scores,
        "queries": rows * d + 2 * scores,
        "keys": columns * (d + dv) + 2 * scores,
        "fused": columns * (d + dv) + 2 * scores,
        "pairs": 3 * scores,
    }[which]
    return words // (32 * launch.num_warps)


def held_registers(problem: AttentionProblem, launch: Launch, which: Pass) -> int:
    """32-bit registers per thread for one resident operand of a backward pass, where it waits in registers."""
    d, dv = padded(problem)
    return (launch.block_q if which == "queries" else launch.block_k) * max(d, dv) // (64 * launch.num_warps)


def candidates(problem: AttentionProblem, device: Device, which: Pass) -> list[Launch]:
    """Launches that fit the device, in a fixed order."""
    wide = problem.dtype is DType.FP32
    blocks = (16, 32, 64, 128)
    chosen: list[Launch] = []
    for block_q, block_k, warps, stages in combinations(blocks, blocks, (4, 8), (1, 2) if wide else (2, 3)):
        launch = Launch(block_q, block_k, warps, stages, products=products(problem, device, which))
        resident = block_k if which in ("keys", "fused") else block_q
        streamed = block_q if which in ("keys", "fused") else block_k
        if resident < (4 if wide else 8) * warps or streamed < (16 if wide else 32):
            continue
        summed = min(resident, streamed) if which == "fused" else streamed
        if which != "pairs" and summed < WHOLE_FRAGMENT and reads_bytes_and_joins(problem, device, launch.products):
            continue
        if warps == 8 and streamed == 16:  # triton_glue/workarounds.py: STREAMED_16
            continue
        if shared_bytes(problem, launch, which) > device.smem_bytes or registers(problem, launch, which) > MOST_REGISTERS:
            continue
        if registers(problem, launch, which) < 40:  # too little work per thread to hide latency
            continue
        chosen.append(launch)
        if device.target == "sm90" and not wide and which in ("keys", "queries", "fused"):  # wgmma reads registers
            free = MOST_HELD - registers(problem, launch, which)
            chosen += [replace(launch, held=n) for n in (1, 2) if n * held_registers(problem, launch, which) <= free]
    return chosen
