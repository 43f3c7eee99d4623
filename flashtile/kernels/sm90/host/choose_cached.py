"""Hopper's kernel over a cache: which calls it takes, and its tiles."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.kernels.device.decoding import group_of
from flashtile.kernels.device.score import Form
from flashtile.kernels.device.tile import Items, Mask, Modifiers
from flashtile.kernels.sm90.host.tile_forward import GROUP_ROWS, Narrow
from flashtile.problem.cache import CachedProblem

STRIP = 64  # columns of a box of the copy engine: 128 bytes of 16-bit numbers
SWIZZLED_ROWS = 8  # after which a swizzle begins anew: no box has fewer
MAX_HEAD_DIM = 128
LOADER_REGISTERS = 40
PLAIN = Form(prescale=False, adds=0, curved=False)  # scores are scaled in the exponent, whatever the sign of the scale


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
class CachedPipeline:
    """What is under way, and who has which registers."""

    stages: int  # key and value tiles under way
    loader_registers: int = LOADER_REGISTERS  # of each thread of the producer


@dataclass(frozen=True)
class CachedTile(Narrow):
    """Compile-time part. Plain ints, bools and strings only: Triton keys its cache by their text."""

    block_k: int
    heads: int  # that 64 rows pack
    chunks: int  # tiles that a group of heads takes
    page: int  # rows of a page
    table: bool  # whether pages are looked up
    box: int  # rows that the copy engine moves at a time
    split: int  # keys of a part, 0 for one pass
    parts: int  # of a block
    folds: bool  # a block adds its parts up: they are as many as are added up first (`device/decoding.py`), or all
    direct: bool  # they are all, and what is written is the result
    head_dim: int
    head_dim_v: int
    parts_k: int  # strips of the keys' columns
    parts_v: int
    mask: Mask
    items: Items
    modifiers: Modifiers
    pipeline: CachedPipeline
    block_q: int = GROUP_ROWS  # fewer where the sum of parts has fewer

    @property
    def may_start_empty(self) -> bool:
        """Never so here: what is shared with the forward asks."""
        return False

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
    direct = bool(problem.split) and parts >= problem.splits
    folds = direct or (bool(problem.split) and parts == group_of(problem.split))
    box = min(pages.page_size, launch.block_k) if pages.table else launch.block_k
    return CachedTile(
        launch.block_k, heads, -(-p.group // heads), pages.page_size if pages.table else 1, pages.table, box,
        problem.split, parts, folds, direct, p.head_dim, p.head_dim_v, -(-p.head_dim // STRIP), -(-p.head_dim_v // STRIP),
        Mask.of(p, pads_keys=False), Items.of(p), Modifiers.of(p, PLAIN), CachedPipeline(launch.stages),
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
