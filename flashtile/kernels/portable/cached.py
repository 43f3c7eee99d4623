"""The portable backend's plans of attention over a cache."""

from __future__ import annotations

from flashtile.kernels.device.mask import predicates
from flashtile.kernels.device.score import chain
from flashtile.kernels.portable.decode import Packing, decode_combine, decode_forward
from flashtile.kernels.portable.tile import Launch, Products, form_in, make_tile, products
from flashtile.plan.arguments import mask_args, score_args
from flashtile.plan.buffers import cached_buffers
from flashtile.plan.call import Buffer, KernelCall, Plan, Pointer, Strides
from flashtile.plan.device import Device
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.cache import CachedProblem
from flashtile.problem.dtype import DType

MOST_HEADS = 64  # that one tile packs


def products_of(p: AttentionProblem, device: Device) -> Products:
    """How scores and values are multiplied: by the dtype alone, for a choice by sizes would make bits depend on the batch."""
    if p.dtype is not DType.FP32 or p.precision != "tf32x3":
        return products(p, device, "forward")
    return "float64" if device.multiplies_float64 else "aligned"


def launch_of(p: AttentionProblem, device: Device, heads: int) -> Launch:
    """The tile: 16 rows where all queries of a group fit, 64 else. Not measured yet."""
    rows = 16 if not p.lengths.varlen and p.seqlen_q * heads <= 16 else 64
    wide = max(p.head_dim, p.head_dim_v)
    fp32 = p.dtype is DType.FP32
    if fp32:
        rows = min(rows, max(16, heads)) if wide <= 128 else max(16, heads)
    keys = (32 if wide <= 64 else 16) if fp32 else (64 if wide <= 128 else 32)
    return Launch(max(rows, heads), keys, 4, 1 if fp32 else 2, products=products_of(p, device))


def plan_cached(problem: CachedProblem, device: Device) -> Plan:
    """The forward of one launch, or of parts and their sum."""
    p, pages, split = problem.attention, problem.pages, problem.split
    heads = min(1 << (p.group - 1).bit_length(), MOST_HEADS)
    chunks = -(-p.group // heads)
    launch = launch_of(p, device, heads)
    tokens = launch.block_q // heads
    tiles = p.span_q // tokens + p.batch + 1 if p.lengths.varlen else p.batch * -(-p.span_q // tokens)
    tile = make_tile(p, launch, "forward")
    sink = Pointer("sink") if p.sink is not None else None
    table = Pointer("page_table") if pages.table else None
    sink_strides = Strides("sink") if sink is not None else (0,)
    strides = (
        *(Strides(n) for n in "qkv"),
        Strides("page_table") if table is not None else (0, 0),
        Strides("out"),
        sink_strides,
    )
    lengths = (
        Pointer("cu_seqlens_q") if p.lengths.varlen else None, Pointer("seqused_k"),
        Pointer("first_k") if pages.first else None,
    )  # fmt: skip
    ends = (Pointer("out"), Pointer("lse"))
    scratch: tuple[Buffer, ...] = ()
    if split:
        dtype, rows = "fp64" if tile.wide else "fp32", (problem.splits, p.slabs * p.span_q, p.heads_q)
        scratch = (Buffer("acc", (*rows, p.head_dim_v), dtype, "scratch"), Buffer("top", rows, dtype, "scratch"),
                   Buffer("total", rows, dtype, "scratch"))  # fmt: skip
    parts = tuple(Pointer(b.name) for b in scratch)
    packing = ("PACK", Packing(heads, chunks, pages.page_size if pages.table else 1, split))
    band = (p.band.left or 0, p.band.right or 0)
    forward = KernelCall(
        decode_forward, (tiles, p.heads_kv * chunks, problem.splits),
        ((Pointer("q"), Pointer("k"), Pointer("v"), table, sink), parts or ends, strides, lengths, p.span_q, p.batch, p.group,
         pages.capacity, pages.pages, *band, (score_args(p), mask_args(p), p.scale_value)),
        (packing, ("T", tile), ("SCORE", chain(p, device, form_in(p, "forward"))), ("MASK", predicates(p))),
        launch.num_warps, launch.num_stages, not (p.float32_grade and p.score),
    )  # fmt: skip
    calls = [forward]
    if split:
        warps = 8 if tile.wide and tile.columns_v > 128 else 4  # of 4 warps sm80's sum spills there
        calls.append(KernelCall(
            decode_combine, (tiles, p.heads_kv * chunks, 1),
            (parts, ends, sink, (Strides("out"), sink_strides), lengths, p.span_q, p.batch, p.group, pages.capacity),
            (packing, ("T", tile)), warps, 1,
        ))  # fmt: skip
    notes = (
        f"decode tile {launch.spell()}, {heads} heads packed",
        f"{problem.splits} parts of {split} keys" if split else "one pass",
    )
    return Plan(problem, "triton", "", (*cached_buffers(problem), *scratch), tuple(calls), notes)
