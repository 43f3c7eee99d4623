"""Attention of keys and values of 8 bits on the CPU: they become float32, times their scales, and the rest follows."""

from __future__ import annotations

from dataclasses import replace

import torch

from flashtile.kernels.cpu import items, ways
from flashtile.plan.buffers import forward_buffers
from flashtile.plan.call import HostCall, Plan
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.dtype import DType
from flashtile.problem.stored import Stored

Tensors = dict[str, torch.Tensor]
KINDS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}


def widened(p: AttentionProblem) -> AttentionProblem:
    """The problem of the numbers that are stored, in float32: over its scale a number is no 16-bit one any more."""
    dtype = DType.FP64 if p.dtype is DType.FP64 else DType.FP32
    return replace(p.dequantised, dtype=dtype)


def numbers(p: AttentionProblem, stored: Stored, tensors: Tensors) -> Tensors:
    """q, k and v as they are multiplied."""
    dtype = torch.float64 if p.dtype is DType.FP64 else torch.float32
    made = {"q": tensors["q"].to(dtype)}
    for name in "kv" if stored.queries is None else "qkv":
        wide = tensors[name].view(KINDS[stored.dtype]).to(dtype)
        if name in stored.scaled:
            scale = tensors[f"{name}_scale"].to(dtype)
            rows = scale if stored.scaled[name] == "token" else _of_rows(p, name, scale, tensors)
            wide = wide * rows[..., None]
        made[name] = wide
    return made


def _of_rows(p: AttentionProblem, name: str, scale: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    """A scale (items, heads) as one of rows; rows of no item have any."""
    if not p.lengths.varlen:
        return scale[:, None]
    cu, span = tensors["cu_seqlens_q" if name == "q" else "cu_seqlens_k"], p.span_q if name == "q" else p.span_k
    if p.batch == 0:
        return scale.new_ones(1, span, scale.shape[1])
    item = torch.searchsorted(cu[1:].contiguous(), torch.arange(span, dtype=torch.int32), right=True)
    return scale[item.clamp(max=p.batch - 1)][None]


def forward(problem: AttentionProblem, tensors: Tensors, outputs: tuple[str, ...]) -> Tensors:
    """out and lse."""
    assert problem.stored is not None
    wide = widened(problem)
    given = {**tensors, **numbers(problem, problem.stored, tensors)}
    module = items if wide.lengths.ragged else ways.forward_way(wide)[0]
    made = module.forward(wide, given, ("out", "lse", "lse_low"))
    return {name: made[name] for name in outputs}


def plan_stored(problem: AttentionProblem) -> Plan:
    """One host call."""
    wide = widened(problem)
    note = "each item by itself" if wide.lengths.ragged else ways.forward_way(wide)[1].removeprefix("cpu: ")
    assert problem.stored is not None
    which = "q, k and v" if problem.multiplies_fp8 else "k and v"
    notes = (f"cpu: {which} of {problem.stored.dtype} widened to fp32; {note}",)
    return Plan(problem, "cpu", "", forward_buffers(problem), (HostCall(forward, ("out", "lse")),), notes)
