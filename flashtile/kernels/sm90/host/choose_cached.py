"""Hopper's kernel over a cache: which calls it takes, and its tiles."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.kernels.device.decoding import PROGRAM_KEYS, group_of
from flashtile.kernels.device.score import Form
from flashtile.kernels.device.tile import Items, Mask, Modifiers
from flashtile.kernels.sm90.host.tile_forward import GROUP_ROWS, Narrow
from flashtile.plan.device import Device
from flashtile.problem.cache import CachedProblem
from flashtile.problem.dtype import DType

STRIP = 64  # columns of a box of the copy engine: 128 bytes of 16-bit numbers
SWIZZLED_ROWS = 8  # after which a swizzle begins anew: no box has fewer
MAX_HEAD_DIM = 128
LATENT_DIMS = (576, 512)  # of keys, and of values that are their first columns: two consumers have 256 of these each
# Rows of queries that products whose rows are keys may have. An H200: of 32, 1 x 8192 takes 21.3 us, 20.4 the other way, and
# over latents 512 numbers of each, and a sum of parts, would not be in a warpgroup's registers.
TURNED_ROWS = (8, 16, 32)
FEW_ROWS = 16  # up to which these are the first choice
LOADER_REGISTERS = 40
CONVERTER_REGISTERS = 56  # where it converts, too
# Programs that a multiprocessor is to have, two of which run at a time. An H200: 64 items of 8,192 keys, 8 heads for 1, take
# 75 us with 256 programs of 2,048 keys, which are added up at once, and 84 with 512 of 1,024.
PROGRAMS = 1.9
LATENT_PROGRAMS = 0.9  # of which one runs at a time: of 64 items of 4,096 keys 128, of 2,048 keys each, for 132 multiprocessors
FULL_ROUNDS = 0.95  # of the places of the last round of programs, and those before it, that are to be taken
WHOLE_ITEMS = 128  # at most, four a lane, of which every block reads the lengths
APART_PAGE = 64  # rows of a page from which on the role that loads 8 bits converts them: 64 x 8192 in e4m3, 396 us beside 433
WIDENED = ("e4m3", "e5m2")  # stored numbers of 8 bits that fp16 is made of
PLAIN = Form(prescale=False, adds=0, curved=False)  # scores are scaled in the exponent, whatever the sign of the scale


@dataclass(frozen=True)
class CachedLaunch:
    """A tile choice: keys of a tile, tiles under way, registers of a thread where blocks share a multiprocessor; places of
    8-bit tiles that who loads has converted, 0 where who multiplies converts them; whether keys are the rows of the products.
    """

    block_k: int = 64
    stages: int = 3
    registers: int | None = 128
    places: int = 0
    turned: bool = False

    def rows_of(self, rows: int) -> int:
        """Rows of the queries' tile, of so many that there are."""
        return next(tile for tile in TURNED_ROWS if rows <= tile) if self.turned else GROUP_ROWS

    def spell(self) -> str:
        words = [f"{self.block_k} keys turned" if self.turned else f"{GROUP_ROWS}x{self.block_k}", f"stages={self.stages}"]
        words += [f"places={self.places}"] if self.places else []
        return " ".join([*words, f"registers={self.registers}"] if self.registers else words)


@dataclass(frozen=True)
class CachedPipeline:
    """What is under way, and who has which registers."""

    stages: int  # key and value tiles under way
    places: int = 0  # of converted ones that wait to be multiplied; 0 where who multiplies converts
    loader_registers: int = LOADER_REGISTERS  # of each thread of the producer
    registers: int = 240  # of each thread of a consumer, where there are two


@dataclass(frozen=True)
class CachedTile(Narrow):
    """Compile-time part. Plain ints, bools and strings only: Triton keys its cache by their text."""

    block_k: int
    heads: int  # that a tile of queries packs
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
    stored: str = ""  # what 8 bits of the cache hold; "" where it holds numbers of the queries' dtype
    k_scale: bool = False  # whether an item's head of stored keys has a scale
    v_scale: bool = False
    lowers: bool = False  # queries are bf16, and multiplied in fp16
    block_q: int = GROUP_ROWS  # rows of queries and heads
    turned: bool = False  # keys are the rows of products
    crosses: bool = False  # a block that writes results may come to keys whose parts are added up by themselves
    latent: bool = False  # values are the first columns of the keys, which have one strip more
    rest_apart: bool = False  # this is a pool of its own
    whole: int = 0  # where not 0, blocks have all keys of an item if lengths are alike; items are so many at most

    @property
    def may_start_empty(self) -> bool:
        """Never so here: what is shared with the forward asks."""
        return False

    @property
    def rows(self) -> int:
        """As what is shared with the forward calls them."""
        return self.block_q

    @property
    def boxes(self) -> int:
        return self.block_k // self.box

    @property
    def columns_v(self) -> int:
        return self.parts_v * STRIP

    @property
    def converts(self) -> bool:
        """Whether tiles of 8 bits become ones of 16."""
        return self.stored != ""

    @property
    def apart(self) -> bool:
        """Whether the role that loads converts them."""
        return self.pipeline.places > 0

    @property
    def places(self) -> int:
        """Tiles that may wait to be multiplied."""
        return self.pipeline.places or (1 if self.converts and not self.turned else self.pipeline.stages)

    @property
    def copied_columns_k(self) -> int:
        """Of a box of keys."""
        return STRIP * self.parts_k if self.stored else STRIP

    @property
    def copied_columns_v(self) -> int:
        return STRIP * self.parts_v if self.stored else STRIP

    @property
    def copied_k(self) -> int:
        """Strips that the copy engine brings: bytes of all columns are one."""
        return 1 if self.stored or self.latent else self.parts_k

    @property
    def first_copied_k(self) -> int:
        """The first of them."""
        return self.parts_v if self.latent and not self.rest_apart else 0

    @property
    def copied_v(self) -> int:
        return 1 if self.stored else self.parts_v


def candidates(problem: CachedProblem) -> tuple[CachedLaunch, ...]:
    """Tiles, the best known first."""
    p = problem.attention
    narrow = max(p.head_dim, p.head_dim_v) <= STRIP
    turned, others = turned_tiles(problem, narrow) if may_turn(problem) else (), other_tiles(problem, narrow)
    return (*turned, *others) if rows_of(problem) <= FEW_ROWS else (*others, *turned)


def turned_tiles(problem: CachedProblem, narrow: bool) -> tuple[CachedLaunch, ...]:
    """Those whose rows are keys: 64 KiB of keys and values under way, so that three blocks share a multiprocessor; beside a
    window 48 of narrow ones of 16 bits.
    """
    if problem.shared:
        return (CachedLaunch(64, 2, None, turned=True),)
    if problem.stored is None:
        two, three = CachedLaunch(64, 2, turned=True), CachedLaunch(64, 3, turned=True)
        if not narrow:
            return two, three
        # 64 x 8192, 64 heads for 8, an H200: 128 keys 251.5 us, 64 keys 253.6 (four stages 253.8, two 256.2).
        long = CachedLaunch(128, 2, turned=True)
        return (long, three, two) if problem.attention.band.left is None else (three, two, long)
    more = CachedLaunch(64, 6, turned=True) if narrow else CachedLaunch(128, 2, turned=True)
    return CachedLaunch(128 if narrow else 64, 4, turned=True), more, CachedLaunch(64, 3, 96, turned=True)


def other_tiles(problem: CachedProblem, narrow: bool) -> tuple[CachedLaunch, ...]:
    """Those of 64 rows of queries: 96 KiB of keys and values under way, so that two blocks share a multiprocessor. Of 8 bits
    32 KiB, beside 64 of what they become, or where who multiplies converts 64 beside 32; those of narrow ones are guesses.
    """
    pages = problem.pages
    if problem.shared:  # queries of 72 KiB and two tiles of as many are all that shared memory holds
        return (CachedLaunch(64, 2, None),)
    if problem.stored is not None:
        apart, together = CachedLaunch(64, 2, places=2), CachedLaunch(64, 4)
        if narrow:
            apart, together = CachedLaunch(128, 2, places=2), CachedLaunch(128)
        best = (together, apart) if pages.table and pages.page_size < APART_PAGE else (apart, together)
        return (*best, CachedLaunch(2 * STRIP if narrow else STRIP, 4, None, 2))
    if narrow:
        return CachedLaunch(128), CachedLaunch(64, 6), CachedLaunch(128, 6, None), CachedLaunch(64, 4)
    return CachedLaunch(), CachedLaunch(64, 6, None), CachedLaunch(128, 3, None), CachedLaunch(32, 6)


def choose_cached(problem: CachedProblem) -> CachedLaunch:
    return candidates(problem)[0]


def heads_of(problem: CachedProblem) -> int:
    """Heads that a tile packs."""
    return min(1 << (problem.attention.group - 1).bit_length(), GROUP_ROWS)


def rows_of(problem: CachedProblem) -> int:
    """Rows of queries, each with the heads that are packed."""
    return heads_of(problem) * problem.attention.seqlen_q


def may_turn(problem: CachedProblem) -> bool:
    """Whether queries are few enough for products whose rows are keys."""
    plain = problem.stored is None and not problem.shared
    return rows_of(problem) <= (TURNED_ROWS[-1] if plain else FEW_ROWS)


def make_cached_tile(problem: CachedProblem, launch: CachedLaunch, heads: int, parts: int) -> CachedTile:
    p, pages = problem.attention, problem.pages
    direct = bool(problem.split) and parts >= problem.splits
    folds = direct or (bool(problem.split) and parts == group_of(problem.split))
    if problem.shared and not launch.turned:  # accumulators leave no registers for the sum of another part
        direct = folds = problem.splits == 1
    box = min(pages.page_size, launch.block_k) if pages.table else launch.block_k
    stored = problem.stored
    kept = () if stored is None else (stored.dtype, bool(stored.k_scale), bool(stored.v_scale), p.dtype is DType.BF16)
    pipeline = CachedPipeline(launch.stages, launch.places, CONVERTER_REGISTERS if launch.places else LOADER_REGISTERS)
    if problem.shared and not launch.turned:
        pipeline = CachedPipeline(launch.stages, 0, 24)
    return CachedTile(
        launch.block_k, heads, -(-p.group // heads), pages.page_size if pages.table else 1, pages.table, box,
        problem.split, parts, folds, direct, p.head_dim, p.head_dim_v, -(-p.head_dim // STRIP), -(-p.head_dim_v // STRIP),
        Mask.of(p, pads_keys=False), Items.of(p), Modifiers.of(p, PLAIN), pipeline, *kept,
        block_q=launch.rows_of(heads * p.seqlen_q), turned=launch.turned, latent=problem.shared, rest_apart=problem.apart,
    )  # fmt: skip


def may_be_whole(problem: CachedProblem, tile: CachedTile, programs: int, device: Device) -> bool:
    """Whether a block has all keys of an item where items' lengths are alike, which blocks see themselves: it writes the
    result, so that no parts are. Only of several items without a window, whose `programs` keep all multiprocessors busy to
    the end, more than one each.
    """
    p, rounds = problem.attention, -(-programs // device.sm_count)
    if not tile.turned or tile.latent or tile.direct or not tile.folds or p.band.left is not None:
        return False
    return 1 < p.batch <= WHOLE_ITEMS and rounds > 1 and programs >= FULL_ROUNDS * rounds * device.sm_count


def crosses(problem: CachedProblem, launch: CachedLaunch, reach: int | None, programs: int, device: Device) -> bool:
    """Whether a block goes through all that its queries see and writes the result, in place of parts: of few keys, where
    such blocks are enough, and registers have room for a third accumulator.
    """
    if reach is None or not launch.turned or problem.shared or not problem.split:
        return False
    return reach <= PROGRAM_KEYS and 10 * programs >= round(10 * PROGRAMS) * device.sm_count


def refusals(problem: CachedProblem) -> list[str]:
    """Reasons against it."""
    p, pages = problem.attention, problem.pages
    reasons: list[str] = []
    if not p.dtype.is_narrow:
        reasons.append(f"dtype is {p.dtype}; supported are fp16 and bf16")
    stored = problem.stored
    if stored is not None and stored.dtype not in WIDENED:
        reasons.append(f"the cache stores {stored.dtype}; supported are {', '.join(WIDENED)} and the queries' dtype")
    if stored is not None and "token" in (stored.k_scale, stored.v_scale):
        reasons.append("rows of the cache have scales of their own; supported are scales of an item's head, or none")
    if problem.shared and (stored is not None or (p.head_dim, p.head_dim_v) != LATENT_DIMS):
        kept = "" if stored is None else f" of {stored.dtype}"
        reasons.append(
            f"values are the first {p.head_dim_v} of the {p.head_dim} columns of the keys{kept}; supported are "
            f"{LATENT_DIMS[1]} of {LATENT_DIMS[0]}, of the queries' dtype, or keys and values apart"
        )
    if p.lengths.varlen:
        reasons.append("queries lie one after another (cu_seqlens_q); supported is one number of queries for all items")
    if p.where or p.score:
        reasons.append("there are predicates or score modifiers; supported are bands, windows and sinks")
    if pages.first and pages.table:
        reasons.append("keys begin at first_k in a table of pages; supported are keys from row 0 on, or a contiguous cache")
    size = pages.page_size
    if pages.table and (size < SWIZZLED_ROWS or size & (size - 1)):
        reasons.append(
            f"page_size is {size}; supported are powers of two from {SWIZZLED_ROWS} on, which the copy engine moves as boxes"
        )
    step = 8 if stored is None else 16
    for name in () if problem.shared else ("head_dim", "head_dim_v"):
        dim = getattr(p, name)
        if dim > MAX_HEAD_DIM or dim % step:
            reasons.append(f"{name} is {dim}; supported are multiples of {step} up to {MAX_HEAD_DIM}")
    if not problem.addressable:
        reasons.append(
            "the copy engine cannot read the pools where they lie; it needs a dense last axis, and an address and strides of "
            "16 bytes"
        )
    if p.empty:
        reasons.append("there is no score at all")
    return reasons
