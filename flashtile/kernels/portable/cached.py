"""The portable backend's plans of attention over a cache."""

from __future__ import annotations

from dataclasses import replace

from flashtile.kernels.device.decoding import Packing, combine_call, group_of, part_buffers, parts_of
from flashtile.kernels.device.mask import predicates
from flashtile.kernels.device.score import chain
from flashtile.kernels.portable.decode import decode_forward
from flashtile.kernels.portable.stored import converts
from flashtile.kernels.portable.tile import Launch, Products, form_in, make_tile, products
from flashtile.plan.arguments import mask_args, score_args
from flashtile.plan.buffers import cached_buffers
from flashtile.plan.call import KernelCall, Plan, Pointer, Strides
from flashtile.plan.device import Device
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.cache import CachedProblem
from flashtile.problem.dtype import DType

MOST_HEADS = 64  # that one tile packs
ROOM_BYTES = 16 << 10  # of shared memory, beside the stages
BIG_BYTES = 160 << 10  # of shared memory, from which on 64 rows of 576 columns fit
WIDEST = 576  # columns of keys whose first ones are the values


def products_of(p: AttentionProblem, device: Device) -> Products:
    """How scores and values are multiplied: by the dtype alone, for a choice by sizes would make bits depend on the batch."""
    if p.dtype is not DType.FP32 or p.precision != "tf32x3":
        return products(p, device, "forward")
    return "float64" if device.multiplies_float64 else "aligned"


def narrow(problem: CachedProblem) -> AttentionProblem:
    """The problem as tiles have it: where values are columns of the keys, with these columns alone."""
    p = problem.attention
    return replace(p, head_dim=p.head_dim_v) if problem.shared else p


def lowers(problem: CachedProblem) -> bool:
    """Whether bf16 queries are multiplied in fp16, which fp8 becomes by half of the instructions: not where rows of values have
    scales, for what such a row holds may be beyond fp16.
    """
    stored = problem.stored
    return problem.attention.dtype is DType.BF16 and stored is not None and stored.dtype != "int8" and stored.v_scale != "token"


def heads_packed(problem: CachedProblem, device: Device) -> int:
    """Query heads of a group that one tile packs, a power of two."""
    return min(1 << (problem.attention.group - 1).bit_length(), 16 if has_few_rows(problem, device) else MOST_HEADS)


def has_few_rows(problem: CachedProblem, device: Device) -> bool:
    """Whether no tile has more than 16 rows: wide keys that hold the values, where shared memory has no room for 64 rows of
    576, or, compiled for sm90, the conversion of 8 bits has no registers (spills of 300 bytes).
    """
    deep = problem.shared and problem.attention.head_dim_v > 256
    return deep and (device.smem_bytes < BIG_BYTES or problem.stored is not None)


def launch_of(problem: CachedProblem, device: Device, heads: int) -> Launch:
    """The tile: the best known."""
    return candidates(problem, device, heads)[0]


def candidates(problem: CachedProblem, device: Device, heads: int) -> tuple[Launch, ...]:
    """Tiles that fit, the best known first: 16 rows where all queries of a group fit, 64 else; of 16 bits and such few rows as
    many keys under way as fit.

    On an H200 (16 rows, head_dim 128, 1 to 64 items of 4k to 64k keys) 128 keys, 8 warps, 3 stages take 4 % more than the best
    tile for contiguous caches (mean; 10 % at most), 64, 8, 5 for pages of 16 and 64 (4 %; 21 %). Those of caches of 8 bits
    and of values that are columns of the keys are guesses until they are measured: `benchmarks/cached.py --tiles`.
    """
    p = narrow(problem)
    made = products_of(p, device)
    wide, fp32 = max(p.head_dim, p.head_dim_v), p.dtype is DType.FP32
    rows = 16 if not p.lengths.varlen and p.seqlen_q * heads <= 16 else 64
    if has_few_rows(problem, device):
        rows = 16
    if fp32:
        rows = min(rows, max(16, heads)) if wide <= 128 else max(16, heads)
    rows, keys = max(rows, heads), (32 if wide <= 64 else 16) if fp32 else (64 if wide <= 128 else 32)
    if fp32:
        return (Launch(rows, keys, 4, 1, products=made),)
    deep = problem.shared and wide > 256
    if (wide > 128 and not deep) or (rows > 16 and not deep and problem.stored is None):
        return (Launch(rows, keys, 4, 2, products=made),)
    paged = "paged" if problem.pages.table else "contiguous"
    kind = ("mla" if problem.stored is None else "mla stored") if deep else "plain" if problem.stored is None else "stored"
    tiles = [Launch(rows, *tile, products=made) for tile in TILES[kind, rows > 16, paged]]
    room = device.smem_bytes - (0 if deep else ROOM_BYTES)
    fit = [tile for tile in tiles if tile_bytes(problem, tile) <= room and problem.split % tile.block_k == 0]
    return tuple(fit) or (Launch(rows, 32 if deep else 64, 8, 2, products=made),)


# (keys, warps, stages), the best first, by kind, whether there are more than 16 rows, and how keys lie. An H200, 2026-11-29,
# us: 64 items of 8,192 keys, 32/8 heads, e4m3 450 (561 with 128, 8, 4), pages of 64 626 (651 with 128, 8, 7); absorbed MLA, 64
# items of 4,096 keys, pages of 64, 16 heads 158 (218 with 32, 8, 9), 128 heads 431 (464 with 32, 8, 3). Those of e4m3 with more
# than 16 rows and of MLA without pages are guesses.
TILES: dict[tuple[str, bool, str], tuple[tuple[int, int, int], ...]] = {
    ("plain", False, "contiguous"): ((128, 8, 3), (128, 8, 2), (64, 8, 5), (64, 8, 2)),
    ("plain", False, "paged"): ((64, 8, 5), (64, 8, 9), (128, 8, 5), (128, 4, 5), (64, 8, 2)),
    ("stored", False, "contiguous"): ((128, 4, 4), (256, 8, 3), (128, 8, 4), (64, 8, 6), (64, 8, 2)),
    ("stored", False, "paged"): ((128, 8, 5), (128, 4, 7), (128, 8, 7), (64, 8, 9), (64, 8, 5)),
    ("stored", True, "contiguous"): ((64, 4, 3), (64, 8, 3), (128, 8, 3), (64, 4, 2)),
    ("stored", True, "paged"): ((64, 4, 3), (64, 8, 5), (128, 8, 5), (64, 4, 2)),
    ("mla", False, "contiguous"): ((32, 8, 4), (64, 8, 3), (32, 8, 5), (32, 8, 2)),
    ("mla", False, "paged"): ((64, 8, 5), (32, 8, 9), (32, 8, 7), (32, 8, 3)),
    ("mla", True, "contiguous"): ((32, 8, 2), (32, 8, 3), (16, 8, 4), (16, 8, 2)),
    ("mla", True, "paged"): ((32, 8, 5), (32, 8, 3), (16, 8, 5), (16, 8, 3)),
    ("mla stored", False, "contiguous"): ((64, 8, 3), (32, 8, 5), (64, 8, 2), (32, 8, 2)),
    ("mla stored", False, "paged"): ((32, 8, 9), (64, 8, 7), (32, 8, 5), (32, 8, 3)),
}


def tile_bytes(problem: CachedProblem, tile: Launch) -> int:
    """Shared memory of a tile, as Triton 3.6.0 has it: where pages are looked up a load takes two steps, and of s stages
    (s - 2) / 2 wait; else s - 1. Beside wide rows, which may not stay in registers, lie the queries, and of 64 rows once more
    the values.
    """
    p = problem.attention
    buffers = max(1, (tile.num_stages - 1) // 2 if problem.pages.table else tile.num_stages - 1)
    row = p.head_dim if problem.shared else p.head_dim + p.head_dim_v
    size = buffers * tile.block_k * row * (p.dtype.size_bytes if problem.stored is None else 1)
    if problem.shared and p.head_dim_v > 256:
        size += 2 * (tile.block_q * p.head_dim + (tile.block_k * p.head_dim_v if tile.block_q > 16 else 0)) + (3 << 10)
    return size


def refusals(problem: CachedProblem, device: Device) -> list[str]:
    """Reasons against values that are columns of keys."""
    p = problem.attention
    dims = f"head_dim is {p.head_dim} and head_dim_v {p.head_dim_v}"
    if p.head_dim > WIDEST:
        return [f"head_dim is {p.head_dim}; supported up to {WIDEST} where values are columns of keys"]
    if p.dtype is DType.FP32 and p.head_dim_v > 256:
        return [f"{dims}; fp32, whose operands are multiplied in parts, is supported up to 256"]
    tile = launch_of(problem, device, heads_packed(problem, device))
    size = tile_bytes(problem, tile)
    if device.kind == "cuda" and size > device.smem_bytes:
        return [f"{dims}; a tile needs {size / 1024:.0f} KiB of shared memory, {device.target} has "
                f"{device.smem_bytes // 1024} KiB"]  # fmt: skip
    return []


def plan_cached(problem: CachedProblem, device: Device) -> Plan:
    """The forward of one launch, or of parts and their sum."""
    p, pages, split, stored = problem.attention, problem.pages, problem.split, problem.stored
    heads = heads_packed(problem, device)
    chunks = -(-p.group // heads)
    launch = launch_of(problem, device, heads)
    tokens = launch.block_q // heads
    tiles = p.span_q // tokens + p.batch + 1 if p.lengths.varlen else p.batch * -(-p.span_q // tokens)
    tile = make_tile(narrow(problem), launch, "forward")
    sink = Pointer("sink") if p.sink is not None else None
    table = Pointer("page_table") if pages.table else None
    scaled = ("", "") if stored is None else (stored.k_scale, stored.v_scale)
    scales = tuple(Pointer(f"{side}_scale") if how else None for side, how in zip("kv", scaled, strict=True))
    sink_strides = Strides("sink") if sink is not None else (0,)
    main, other = ("v", "k") if problem.apart else ("k", None if problem.one_pool else "v")
    strides = (
        Strides("q"),
        Strides(main),
        Strides(other) if other else (0, 0, 0, 0),
        Strides("page_table") if table is not None else (0, 0),
        Strides("out"),
        sink_strides,
        *((0, 0) if scale is None else Strides(scale.name) for scale in scales),
    )
    lengths = (
        Pointer("cu_seqlens_q") if p.lengths.varlen else None, Pointer("seqused_k"),
        Pointer("first_k") if pages.first else None,
    )  # fmt: skip
    ends = (Pointer("out"), Pointer("lse"))
    scratch = part_buffers(problem, problem.splits, "fp64" if tile.wide else "fp32") if split else ()
    partial = tuple(Pointer(b.name) for b in scratch)
    early = bool(split) and device.kind == "cuda" and device.arch >= 90
    # A part that ends within the loop goes to memory by way of shared memory: of 64 rows of 512 numbers 128 KiB.
    parts = 1 if problem.shared and launch.block_q > 16 else parts_of(problem, tiles * p.heads_kv * chunks, device)
    rest = p.head_dim - p.head_dim_v if problem.shared else 0
    packing = Packing(
        heads, chunks, pages.page_size if pages.table else 1, split, parts, early,
        "" if stored is None else stored.dtype, *scaled, stored is not None and converts(stored, device),
        lowers(problem), problem.shared, problem.apart, rest,
        max(16, 1 << (rest - 1).bit_length()) if rest else 0,
    )  # fmt: skip
    band = (p.band.left or 0, p.band.right or 0)
    forward = KernelCall(
        decode_forward, (tiles, p.heads_kv * chunks, -(-problem.splits // parts)),
        ((Pointer("q"), Pointer(main), Pointer(other) if other else None, table, sink, *scales), partial or ends, strides,
         lengths, p.span_q, p.batch, p.group, pages.capacity, pages.pages, *band,
         (score_args(p), mask_args(p), p.scale_value)),
        (("PACK", packing), ("T", tile), ("SCORE", chain(p, device, form_in(p, "forward"))), ("MASK", predicates(p))),
        launch.num_warps, launch.num_stages, not (p.float32_grade and p.score),
    )  # fmt: skip
    calls = [forward]
    if split:
        calls.append(combine_call(problem, packing, tile, group_of(split), device))
    notes = (
        f"decode tile {launch.spell()}, {heads} heads packed",
        f"{problem.splits} parts of {split} keys" if split else "one pass",
    )
    buffers = (*cached_buffers(problem), *scratch)
    return Plan(problem, "triton", "", buffers, tuple(calls), notes, spare=frozenset({"lse"}))
