"""Hopper's kernel over a cache: which calls it takes, its tiles, its plans."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashtile.kernels.device.decoding import Packing, combine_call, part_buffers, parts_of
from flashtile.kernels.sm90.host.tile_forward import GROUP_ROWS, LOST
from flashtile.plan.buffers import cached_buffers
from flashtile.plan.call import Descriptor, KernelCall, Plan, Pointer, Strides
from flashtile.plan.device import Device
from flashtile.problem.cache import CachedProblem

STRIP = 64  # columns of a box of the copy engine: 128 bytes of 16-bit numbers
SWIZZLED_ROWS = 8  # after which a swizzle begins anew: no box has fewer
MAX_HEAD_DIM = 128
LOADER_REGISTERS = 40


@dataclass(frozen=True)
class CachedLaunch:
    """A tile choice: keys of a tile, tiles under way, registers of a thread where blocks share a multiprocessor."""

    block_k: int = 64
    stages: int = 3
    registers: int | None = 128

    def spell(self) -> str:
        words = [f"{GROUP_ROWS}x{self.block_k}", f"stages={self.stages}"]
        return " ".join([*words, f"registers={self.registers}"] if self.registers else words)


@dataclass(frozen=True)
class CachedTile:
    """Compile-time part. Plain ints, bools and strings only: Triton keys its cache by their text."""

    block_k: int
    stages: int
    heads: int  # that 64 rows pack
    chunks: int  # tiles that a group of heads takes
    page: int  # rows of a page
    table: bool  # whether pages are looked up
    box: int  # rows that the copy engine moves at a time
    split: int  # keys of a part, 0 for one pass
    parts: int  # of a block
    head_dim: int
    head_dim_v: int
    parts_k: int  # strips of the keys' columns
    parts_v: int
    left: bool
    right: bool
    sink: bool
    block_q: int = GROUP_ROWS  # fewer where parts are added up
    loader_registers: int = LOADER_REGISTERS
    # what functions that are shared with other kernels ask for, and is never so here
    ragged: bool = False
    predicate: bool = False
    wide: bool = False
    exact: bool = False
    prescale: bool = False
    blind: bool = False

    @property
    def rows(self) -> int:
        return GROUP_ROWS

    @property
    def boxes(self) -> int:
        return self.block_k // self.box

    @property
    def columns_v(self) -> int:
        return self.parts_v * STRIP


def candidates(problem: CachedProblem) -> tuple[CachedLaunch, ...]:
    """Tiles, the best known first: 96 KiB of keys and values under way, so that two blocks share a multiprocessor."""
    p = problem.attention
    if max(p.head_dim, p.head_dim_v) <= STRIP:
        return CachedLaunch(128), CachedLaunch(64, 6), CachedLaunch(128, 6, None), CachedLaunch(64, 4)
    return CachedLaunch(), CachedLaunch(64, 6, None), CachedLaunch(128, 3, None), CachedLaunch(32, 6)


def choose_cached(problem: CachedProblem) -> CachedLaunch:
    return candidates(problem)[0]


def make_cached_tile(problem: CachedProblem, launch: CachedLaunch, heads: int, parts: int) -> CachedTile:
    p, pages = problem.attention, problem.pages
    box = min(pages.page_size, launch.block_k) if pages.table else launch.block_k
    return CachedTile(
        launch.block_k, launch.stages, heads, -(-p.group // heads), pages.page_size if pages.table else 1, pages.table, box,
        problem.split, parts, p.head_dim, p.head_dim_v, *(-(-dim // STRIP) for dim in (p.head_dim, p.head_dim_v)),
        p.band.left is not None, p.band.right is not None, p.sink is not None,
    )  # fmt: skip


def refusals(problem: CachedProblem) -> list[str]:
    """Reasons against it."""
    p, pages = problem.attention, problem.pages
    reasons: list[str] = []
    if not p.dtype.is_narrow:
        reasons.append(f"dtype is {p.dtype}; supported are fp16 and bf16")
    if problem.stored is not None:
        reasons.append(f"the cache stores {problem.stored.dtype}; supported are numbers of the queries' dtype")
    if problem.shared:
        reasons.append("values are columns of the keys; supported are keys and values apart")
    if p.lengths.varlen:
        reasons.append("queries lie one after another (cu_seqlens_q); supported is one number of queries for all items")
    if p.where or p.score:
        reasons.append("there are predicates or score modifiers; supported are bands, windows and sinks")
    if pages.first:
        reasons.append("keys begin at first_k; supported are keys from row 0 on")
    size = pages.page_size
    if pages.table and (size < SWIZZLED_ROWS or size & (size - 1)):
        reasons.append(
            f"page_size is {size}; supported are powers of two from {SWIZZLED_ROWS} on, which the copy engine moves as boxes"
        )
    for name in ("head_dim", "head_dim_v"):
        dim = getattr(p, name)
        if dim > MAX_HEAD_DIM or dim % 8:
            reasons.append(f"{name} is {dim}; supported are multiples of 8 up to {MAX_HEAD_DIM}")
    if not problem.addressable:
        reasons.append(
            "the copy engine cannot read the pools where they lie; it needs a dense last axis, and an address and strides of "
            "16 bytes"
        )
    if p.empty:
        reasons.append("there is no score at all")
    return reasons


def plan_cached(problem: CachedProblem, device: Device, name: str, launch: CachedLaunch | None = None) -> Plan:
    """The forward of one launch, or of parts and their sum; `launch` overrides the tile."""
    from flashtile.kernels.sm90.cached.kernel import decode_hopper

    p, pages, split = problem.attention, problem.pages, problem.split
    launch = choose_cached(problem) if launch is None else launch
    heads = min(1 << (p.group - 1).bit_length(), GROUP_ROWS)
    tiles = p.batch * -(-p.seqlen_q // (GROUP_ROWS // heads))
    chunks = -(-p.group // heads)
    parts = parts_of(problem, tiles * p.heads_kv * chunks, device)
    shares = -(-problem.splits // parts)
    tile = make_cached_tile(problem, launch, heads, parts)
    scratch = part_buffers(problem, "fp32") if split else ()
    sink = Pointer("sink") if p.sink is not None else None
    outputs = tuple(Pointer(b.name) for b in scratch) if split else (Pointer("out"), Pointer("lse"), sink)
    table = (Pointer("page_table"), Strides("page_table")) if pages.table else (None, (0, 0))
    forward = KernelCall(
        decode_hopper, (tiles * shares * p.heads_kv * chunks, 1, 1),
        (
            Descriptor("k", (1, 1, tile.box, STRIP)), Descriptor("v", (1, 1, tile.box, STRIP)), Pointer("q"), outputs,
            (Strides("q"), Strides("out"), Strides("sink") if sink else (0,)), table, Pointer("seqused_k"), p.seqlen_q,
            p.heads_kv, pages.capacity, shares, p.band.left or 0, p.band.right or 0,
            (p.group, p.batch, p.scale_value * (1.0 + LOST * p.head_dim)),
        ),
        (("T", tile),), 4, registers=launch.registers,
    )  # fmt: skip
    calls = [forward]
    if split:
        few = max(16, heads) if p.seqlen_q * heads <= 16 else GROUP_ROWS
        packing = Packing(heads, chunks, tile.page, split, parts, True)
        calls.append(combine_call(problem, packing, replace(tile, block_q=few)))
    notes = (
        f"decode tile {launch.spell()}, {heads} heads packed, boxes of {tile.box} rows",
        f"{problem.splits} parts of {split} keys" if split else "one pass",
    )
    return Plan(problem, name, "", (*cached_buffers(problem), *scratch), tuple(calls), notes)
