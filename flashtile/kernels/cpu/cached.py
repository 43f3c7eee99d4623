"""Attention over a cache on the CPU: an item's pages are gathered, and what follows is attention of items one after another."""

from __future__ import annotations

from dataclasses import replace

import torch

from flashtile.kernels.cpu import items
from flashtile.plan.buffers import append_buffers, cached_buffers
from flashtile.plan.call import HostCall, Plan
from flashtile.problem.cache import AppendProblem, CachedProblem, Pages
from flashtile.problem.dtype import DType
from flashtile.problem.lengths import Lengths
from flashtile.problem.stored import LARGEST

Tensors = dict[str, torch.Tensor]
STORED = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
TORCH = {DType.FP16: torch.float16, DType.BF16: torch.bfloat16, DType.FP32: torch.float32, DType.FP64: torch.float64}
FEW_ROWS = 512  # of an item; float64 takes up to twice the time of a call of 400 keys
LEAST_SCALE = 2.0**-126  # of a token: one over it is finite


def item_rows(pages: Pages, tensors: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of every item, (page, row) of each of its keys. Entries of the table behind its length are not looked at."""
    ends = tensors["seqused_k"].tolist()
    firsts = tensors["first_k"].tolist() if pages.first else [0] * len(ends)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for i, (first, end) in enumerate(zip(firsts, ends, strict=True)):
        position = torch.arange(max(first, 0), max(min(end, pages.capacity), max(first, 0)))
        if pages.table:
            found.append((tensors["page_table"][i, position // pages.page_size].long(), position % pages.page_size))
        else:
            found.append((torch.full_like(position, i), position))
    return found


def computed_in(problem: CachedProblem) -> DType:
    """The dtype of an item's numbers. Of few queries every rounding shows: fp32 ones of caches that are not long are computed
    in float64, or the largest error is 2.2 times plain PyTorch's now and then (one of 300 random calls). Of 8 bits a number
    over its scale is no 16-bit one any more.
    """
    p = problem.attention
    if p.dtype is DType.FP32 and p.precision != "tf32" and problem.pages.capacity <= FEW_ROWS:
        return DType.FP64
    return DType.FP32 if problem.stored is not None and p.dtype.is_narrow else p.dtype


def forward(problem: CachedProblem, tensors: Tensors, outputs: tuple[str, ...]) -> Tensors:
    """out and lse. Every item is computed by itself, so that its bits do not depend on its batch; `split` changes nothing."""
    p, q = problem.attention, tensors["q"]
    rows = item_rows(problem.pages, tensors)
    page, row = (torch.cat([pair[axis] for pair in rows]) if rows else torch.zeros(0, dtype=torch.long) for axis in (0, 1))
    count = torch.tensor([0, *(len(pair[0]) for pair in rows)]).cumsum(0)
    packed = p.lengths.varlen
    cu_q = tensors["cu_seqlens_q"] if packed else torch.arange(p.batch + 1) * p.span_q
    lengths = Lengths(p.slabs * p.span_q, int(count[-1]))
    flat = replace(p, lengths=lengths)
    keys = {"k": tensors["k"][page, row]}
    keys["v"] = keys["k"][..., : p.head_dim_v] if problem.one_pool else tensors["v"][page, row]
    wide = computed_in(problem)
    flat = replace(flat, dtype=wide)
    q = q.to(TORCH[wide])
    if problem.stored is not None:
        item = torch.arange(p.batch).repeat_interleave(count.diff())
        for side, rows_of in keys.items():
            number, scale = rows_of.view(STORED[problem.stored.dtype]).to(torch.float32), tensors.get(f"{side}_scale")
            number = number.to(torch.promote_types(number.dtype, TORCH[p.dtype]))
            if scale is not None:
                token = getattr(problem.stored, f"{side}_scale") == "token"
                number = number * (scale[page, row] if token else scale[item])[:, :, None]
            keys[side] = number
    if problem.apart:
        keys["k"] = torch.cat([keys["v"], keys["k"]], -1)
    keys = {side: t.to(q.dtype) for side, t in keys.items()}
    given = {name: tensor for name, tensor in tensors.items() if name.startswith(("score.", "mask.", "sink"))}
    given |= {"k": keys["k"][None], "v": keys["v"][None], "q": q.reshape(1, -1, *q.shape[2:])}
    given |= {"cu_seqlens_q": cu_q, "cu_seqlens_k": count}
    # Of a few queries every rounding shows: at float32's grade torch's own sums err by 1.5 x plain PyTorch's now and then.
    made = items.forward(flat, given, ("out", "lse", "lse_low"), tiles=p.float32_grade)
    if packed:
        return {name: made[name] for name in outputs}
    out = made["out"].view(p.batch, p.span_q, p.heads_q, p.head_dim_v)
    lse = made["lse"].view(p.heads_q, p.batch, p.span_q).transpose(0, 1)
    return {"out": out, "lse": lse}


def plan_cached(problem: CachedProblem) -> Plan:
    """One host call."""
    call = HostCall(forward, ("out", "lse"))
    return Plan(problem, "cpu", "", cached_buffers(problem), (call,), ("cpu: pages gathered, then item by item",))


def append(p: AppendProblem, tensors: Tensors, outputs: tuple[str, ...]) -> Tensors:
    """The pools, written over."""
    slots = tensors["slots"].reshape(-1)
    there = (slots >= 0) & (slots < p.pages * p.page_size)
    page, row = slots[there] // p.page_size, slots[there] % p.page_size
    for name in p.sides:
        x = tensors[name].reshape(-1, *tensors[name].shape[2:])[there]
        if p.stored is not None:
            most, scaling = LARGEST[p.stored.dtype], p.scaling(name)
            x = x.to(torch.float32)
            if scaling == "token":
                top = x.nan_to_num(0.0, torch.inf).abs().amax(-1)
                scale = torch.where(top > 0, top / most, 1.0).clamp(min=LEAST_SCALE)
                tensors[f"{name}_scale"][page, row] = scale
                x = x / scale[..., None]
            elif scaling:
                x = x / tensors[f"{name}_scale"].reshape(-1, p.heads_kv)[there][..., None]
            x = x.clamp(-most, most)
            x = (x.round().nan_to_num(0.0) if p.stored.dtype == "int8" else x).to(STORED[p.stored.dtype])
            x = x.view(tensors[f"{name}_cache"].dtype)
        tensors[f"{name}_cache"][page, row] = x
    return {b.name: tensors[b.over] for b in append_buffers(p) if b.over is not None}


def plan_append(p: AppendProblem) -> Plan:
    """One host call."""
    outputs = tuple(b.name for b in append_buffers(p) if b.over is not None)
    return Plan(p, "cpu", "", append_buffers(p), (HostCall(append, outputs),), ("cpu: append",))
