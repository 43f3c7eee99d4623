"""The tiles of the portable passes as rules: whose they are, why, and where that was found. `choose.py` applies them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from flashtile.kernels.device.score import score_bytes
from flashtile.kernels.portable.tile import (
    WHOLE_FRAGMENT,
    Launch,
    Pass,
    Products,
    is_mended,
    padded,
    reads_bytes_and_joins,
    sums_are_long,
)
from flashtile.plan.device import Device
from flashtile.plan.rules import Rule
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.dtype import DType
from flashtile.triton_glue.workarounds import EMPTY_FP32, PIPELINED_CAST, SHORT_PRODUCTS, WRONG_DQ

Kind = Literal["16bit", "float64", "parts", "short", "ieee", "fp32"]
Launches = tuple[Launch, ...]
Tiles = Mapping[tuple[Pass, int], Launches]  # by pass and by the wider head dim of the tile, the best first

COUNTED = "by spills, Triton 3.6.0, not timed"
ALONE = "an H100, docs/lab/tuning.md"


@dataclass(frozen=True)
class Asked:
    """What a tile is chosen for."""

    problem: AttentionProblem
    device: Device
    which: Pass
    products: Products
    watched: bool = False  # a forward that keeps statistics of rows

    @cached_property
    def columns(self) -> int:
        """Of the wider head dim."""
        return max(padded(self.problem))

    @property
    def width(self) -> int:
        """The same as tables count it."""
        return max(self.columns, 64)

    @property
    def narrow(self) -> bool:
        """Whether elements have 16 bits."""
        return self.problem.dtype is not DType.FP32

    @property
    def kind(self) -> Kind:
        """Which tables there are for its products."""
        if self.narrow:
            return "16bit"
        if self.products == "float64":
            return "float64"
        if self.products != "unit":
            return "short" if self.products == "short" else "parts"
        return "ieee" if self.problem.precision == "ieee" else "fp32"

    @property
    def sm90(self) -> bool:
        """Whether products are wgmma's: where tables have tiles of features, they are for these."""
        return self.device.target == "sm90"

    @property
    def split(self) -> bool:
        """Whether operands are there in several forms at once."""
        return not self.narrow and self.problem.precision != "ieee"

    @property
    def drops(self) -> bool:
        return self.problem.dropout is not None

    @property
    def lists(self) -> bool:
        """Whether the mask has lists of blocks."""
        return self.problem.blocks is not None

    @property
    def scattered(self) -> bool:
        """Whether rows are no multiple of 16 elements apart, for all that Triton knows: it loads element by element then."""
        return bool(self.problem.head_dim % 16 or self.problem.head_dim_v % 16)

    @property
    def wider_keys(self) -> bool:
        """Whether keys are wider than values."""
        columns, columns_v = padded(self.problem)
        return columns > columns_v

    @property
    def broadcasts(self) -> bool:
        """Whether a modifier has a tensor with an element for every query or key, or for both."""
        return any(captured.broadcast for spec in self.problem.score for captured in spec.kind.captured)

    @property
    def crowd(self) -> str:
        """What most fills the registers, as SYNCHRONOUS and CDNA name it."""
        if not self.narrow:
            return self.problem.precision
        if self.scattered or self.problem.where:
            return "scattered" if self.scattered else "predicates"
        return "ragged" if self.problem.lengths.ragged and not self.problem.score and not self.drops else "16bit"


@dataclass(frozen=True)
class Table:
    """Tiles of problems of these kinds for which `when` holds.

    settled: they are taken as they are. Otherwise CHANGES follow, and the first that fits into shared memory is taken.
    """

    kinds: tuple[Kind, ...]
    when: Callable[[Asked], bool]
    tiles: Tiles
    because: str
    measured: str
    settled: bool = False

    def of(self, asked: Asked) -> Launches | None:
        """The tiles of such a problem; None where it is not this table's."""
        tiles = self.tiles.get((asked.which, asked.width))
        return tiles if tiles is not None and asked.kind in self.kinds and self.when(asked) else None


def _by_pass(tiles: Mapping[Pass, Mapping[int, Launches]]) -> Tiles:
    return {(which, width): launches for which, widths in tiles.items() for width, launches in widths.items()}


def _everywhere(tiles: Mapping[int, Launches]) -> Tiles:
    passes: tuple[Pass, ...] = ("forward", "keys", "queries", "fused", "pairs")
    return {(which, width): launches for which in passes for width, launches in tiles.items()}


def always(asked: Asked) -> bool:
    """Of every problem of a table's kinds."""
    return True


def is_crowded(asked: Asked) -> bool:
    """Whether a 16-bit problem's predicates or dropout need the room of ROOMY's tiles."""
    p = asked.problem
    if not asked.sm90 or asked.columns < 64 or (asked.columns == 256 and asked.scattered):
        return False  # scattered addresses need that room: lists spill 15.6 KB a thread
    return bool(p.where) or (asked.drops and not p.score and asked.columns == 256)


ROOMY = Table(
    ("16bit",),
    is_crowded,
    {
        ("keys", 64): (Launch(32, 128, 8, 3, 8),),
        ("keys", 128): (Launch(64, 32, 8, 3, 8),),
        ("keys", 256): (Launch(64, 32, 8, 2, 8),),
        ("fused", 64): (Launch(32, 128, 8, 2, 8),),
        ("fused", 128): (Launch(64, 32, 8, 2, 8),),
        ("fused", 256): (Launch(32, 32, 8, 2, 8),),
    },
    "predicates' answers wait in registers beside dk and dv, and of 256 columns dropout's words do: 840 bytes a thread are "
    "spilled at most, 4,232 in the dense problem's tile",
    COUNTED,
    settled=True,
)
EIGHT = Table(
    ("16bit",),
    lambda a: a.sm90 and a.problem.stored is not None,
    {
        ("forward", 64): (Launch(128, 64, 8, 3, 8),),
        ("forward", 128): (Launch(128, 64, 8, 3, 8),),
        ("forward", 256): (Launch(64, 64, 8, 2, 8),),
    },
    "keys and values are of 8 bits: nothing spills but 32 bytes a thread of 256 columns that are converted; the 16-bit tile of "
    "256 columns would spill 836 where e4m3 is multiplied",
    COUNTED,
)
SCATTERED = Table(
    ("16bit",),
    lambda a: a.sm90 and a.scattered and not (a.problem.where or a.problem.score or a.drops),
    {("forward", 64): (Launch(128, 64, 8, 3, 8),)},
    "rows are no multiple of 16 elements apart: 1.41 ms, 1.90 in 64 x 64, and 4 warps would spill 0.7 KB",
    "4 x 4096, 32 heads of 40, causal, an H100",
    settled=True,
)
UNEQUAL = Table(
    ("16bit",),
    lambda a: (
        a.sm90
        and not (a.problem.where or a.problem.score or a.drops or a.scattered)
        and padded(a.problem)[0] > padded(a.problem)[1]
    ),
    {("fused", 256): (Launch(32, 32, 8, 2, 8),)},
    "keys are wider than values: nothing spills, 700 bytes a thread in the tile of equal head dims",
    COUNTED,
    settled=True,
)
BIASED = Table(
    ("16bit",),
    lambda a: a.sm90 and not a.problem.where and score_bytes(a.problem) > 0,
    {
        ("forward", 128): (Launch(128, 64, 8, 3, 8),),
        ("keys", 128): (Launch(32, 64, 4, 2, 8),),
        ("queries", 128): (Launch(64, 32, 4, 3, 8, held=1),),
        ("pairs", 128): (Launch(64, 128, 8, 2),),
    },
    "a tensor has an element for every score: a third stream of tiles in shared memory",
    "2 x 4096, 16 heads, full and causal, an H100, 2026-11-21, docs/lab/tuning.md",
    settled=True,
)
LINED = Table(
    ("16bit",),
    lambda a: a.sm90 and not a.problem.where and not score_bytes(a.problem) and a.broadcasts,
    {("forward", 128): (Launch(64, 64, 4, 2, 8),), ("pairs", 128): (Launch(64, 64, 4, 2),)},
    "a tensor has an element for every query or key",
    "2 x 4096, 16 heads, full and causal, an H100, 2026-11-21, docs/lab/tuning.md",
    settled=True,
)
SCORED = Table(
    ("16bit",),
    lambda a: a.sm90 and not a.problem.where and bool(a.problem.score),
    {("keys", 128): (Launch(32, 64, 4, 3, 8, held=1),), ("queries", 128): (Launch(64, 64, 4, 3, 8, held=1),)},
    "modifiers need registers beside two gradients",
    "2 x 4096, 16 heads, full and causal, an H100, 2026-11-21, docs/lab/tuning.md",
    settled=True,
)
SIXTEEN_BIT = Table(
    ("16bit",),
    always,
    _by_pass(
        {
            "forward": {
                64: (Launch(128, 64, 4, 3, 8), Launch(64, 64, 4, 2, 8)),
                128: (Launch(128, 128, 8, 3, 8), Launch(64, 64, 4, 3, 8), Launch(64, 32, 4, 2, 8), Launch(64, 32, 4, 1, 8)),
                256: (Launch(128, 64, 8, 2, 8), Launch(64, 32, 4, 2, 8), Launch(64, 32, 8, 1, 8), Launch(32, 32, 4, 1, 8)),
                512: (Launch(32, 64, 8, 1, 8), Launch(32, 32, 8, 1, 8), Launch(16, 16, 4, 1, 8)),
            },
            "keys": {
                64: (Launch(32, 128, 4, 3, 8), Launch(32, 64, 4, 2, 8), Launch(32, 32, 4, 2, 8)),
                128: (Launch(32, 64, 4, 3, 8), Launch(32, 64, 4, 2, 8), Launch(16, 64, 4, 1, 8)),
                256: (
                    Launch(64, 32, 8, 2, 8),
                    Launch(32, 32, 4, 1, 8),
                    Launch(16, 32, 4, 1, 8),
                ),  # 4 warps spill 1 KB under a window
                512: (Launch(16, 32, 8, 1, 8), Launch(16, 16, 8, 1, 8)),
            },
            "queries": {
                64: (Launch(128, 64, 4, 3, 8), Launch(64, 64, 4, 2, 8), Launch(64, 32, 4, 2, 8)),
                128: (Launch(128, 64, 8, 3, 1), Launch(64, 32, 4, 2, 8), Launch(64, 16, 4, 1, 8)),
                256: (Launch(128, 32, 8, 3, 8), Launch(32, 32, 4, 1, 8), Launch(32, 16, 4, 1, 8)),
                512: (Launch(32, 32, 8, 1, 8), Launch(32, 16, 8, 1, 8), Launch(16, 16, 4, 1, 8)),
            },
            "fused": {
                64: (Launch(64, 64, 4, 3, 8), Launch(32, 64, 4, 2, 8)),
                128: (Launch(32, 128, 8, 3, 8), Launch(32, 64, 4, 1, 8), Launch(16, 64, 4, 1, 8)),
                256: (
                    Launch(64, 32, 8, 1, 8),
                    Launch(32, 32, 8, 1, 8),
                    Launch(16, 32, 4, 1, 8),
                ),  # 4 warps spill 1.2 KB under a bias
                512: (Launch(16, 32, 8, 1, 8), Launch(16, 16, 8, 1, 8)),
            },
            "pairs": {
                64: (Launch(128, 64, 4, 2), Launch(64, 64, 4, 2), Launch(64, 64, 4, 1)),
                128: (Launch(128, 64, 8, 2), Launch(64, 64, 4, 2), Launch(64, 32, 4, 1)),
                256: (Launch(64, 64, 8, 1), Launch(64, 32, 4, 1), Launch(32, 16, 4, 1)),
                512: (Launch(32, 32, 4, 1), Launch(32, 16, 4, 1), Launch(16, 16, 4, 1)),
            },
        }
    ),
    "16 bits: of tiles in order of preference the first that fits",
    f"the first ones on {ALONE}; others are for 99 KiB and 64 KiB",
)
FLOAT64_NARROW = Table(
    ("float64",),
    lambda a: bool(a.problem.score or a.drops) and a.columns <= 32,
    _by_pass({which: {64: (Launch(16, 32, 4, 1),)} for which in ("keys", "queries", "fused")}),
    "modifiers and dropout take room from float64 tiles of 16 and 32 columns: 32 x 32 spills 2.3 to 2.7 KB a thread, this 0.2",
    COUNTED,
    settled=True,
)
FLOAT64 = Table(
    ("float64",),
    always,
    _everywhere({64: (Launch(32, 32, 4, 1),), 128: (Launch(32, 32, 8, 1),), 256: (Launch(16, 16, 4, 1),)}),
    "products in float64 are small problems': many small tiles, so that all of a GPU has work, of 128 KB at most",
    COUNTED,
    settled=True,
)
PARTS = Table(
    ("parts",),
    always,
    {
        ("keys", 128): (Launch(32, 32, 8, 1, 8), Launch(16, 16, 4, 1, 8)),
        ("queries", 128): (Launch(64, 32, 4, 1, 8), Launch(32, 32, 4, 1, 8), Launch(16, 16, 4, 1, 8)),
    },
    "products of own parts hold two sums at once: in the pass over keys 32 x 64 would spill 3 KB, and take 7.0 ms, not 6.3",
    "an H100",
)
SHORT = Table(
    ("short",),
    always,
    {
        ("forward", 128): (Launch(128, 32, 8, 1, 8), Launch(64, 32, 4, 1, 8)),
        ("keys", 64): (Launch(32, 128, 8, 1, 8), Launch(32, 64, 4, 1, 8)),
        ("keys", 128): (Launch(32, 128, 8, 1, 8), Launch(16, 128, 8, 1, 8)),
        ("queries", 64): (Launch(128, 32, 8, 1, 8), Launch(64, 32, 4, 1, 8)),
    },
    "tf32 in two parts leaves room for wider tiles; at head_dim 64 those of other fp32 products are faster",
    "by spills and instructions per score, an H100, Triton 3.6.0, docs/lab/tuning.md",
)
# Of 128 columns 32 x 32 would spill 11 KB on sm90. Of 256, one stage spills 1 to 4.5 KB on NVIDIA (8.5 with modifiers and
# dropout), two none (1.1, and 2.3 with lists of blocks).
IEEE_QUERIES = Table(
    ("ieee",),
    always,
    {("queries", 128): (Launch(16, 16, 4, 1, 8),), ("queries", 256): (Launch(16, 16, 8, 2, 8),)},
    "the correction of delta stands beside products of scalars",
    COUNTED,
)
IEEE = Table(
    ("ieee",),
    always,
    _everywhere(
        {
            64: (Launch(32, 32, 4, 1, 8),),
            128: (Launch(32, 32, 8, 1, 8), Launch(16, 16, 4, 1, 8)),
            256: (Launch(16, 16, 8, 1, 8),),
        }
    ),
    "without tensor cores every product is unrolled into scalar multiply-adds: only small tiles compile in time",
    "by compile times",
)
FP32 = Table(
    ("parts", "short", "fp32"),
    always,
    _by_pass(
        {
            "forward": {
                64: (Launch(64, 64, 4, 1, 8), Launch(64, 32, 4, 1, 8), Launch(32, 32, 4, 1, 8)),
                128: (Launch(64, 32, 4, 1, 8), Launch(32, 32, 4, 1, 8)),
                256: (Launch(32, 32, 4, 1, 8), Launch(16, 16, 4, 1, 8)),
            },
            "keys": {
                64: (Launch(32, 64, 4, 1, 8), Launch(32, 32, 4, 1, 8)),
                128: (Launch(32, 64, 8, 1, 8), Launch(32, 32, 8, 1, 8), Launch(16, 16, 4, 1, 8)),
                256: (Launch(16, 16, 4, 1, 8),),
            },
            "queries": {
                64: (Launch(64, 64, 4, 1, 8), Launch(32, 32, 4, 1, 8)),
                128: (Launch(128, 32, 8, 1, 8), Launch(64, 32, 4, 1, 8), Launch(32, 32, 4, 1, 8), Launch(16, 16, 4, 1, 8)),
                256: (Launch(16, 16, 4, 1, 8),),
            },
            "fused": {
                64: (Launch(32, 64, 4, 1, 8), Launch(32, 32, 4, 1, 8)),
                128: (Launch(32, 32, 8, 1, 8), Launch(16, 16, 4, 1, 8)),
                256: (Launch(16, 16, 4, 1, 8),),
            },
            "pairs": {
                64: (Launch(64, 32, 4, 1), Launch(32, 32, 4, 1), Launch(16, 16, 4, 1)),
                128: (Launch(32, 32, 4, 1), Launch(16, 16, 4, 1)),
                256: (Launch(16, 16, 4, 1),),
            },
        }
    ),
    "fp32: of tiles in order of preference the first that fits",
    f"the first ones on {ALONE}; others are for 99 KiB and 64 KiB",
)
# The first that holds. A tile that was tuned on the device comes before them (`choose.measured`).
TABLES = (
    EIGHT, ROOMY, SCATTERED, UNEQUAL, BIASED, LINED, SCORED, SIXTEEN_BIT,
    FLOAT64_NARROW, FLOAT64, PARTS, SHORT, IEEE_QUERIES, IEEE, FP32,
)  # fmt: skip

# Where matrix instructions take all operands from registers (sm80, sm86, sm120), before the others. With 64 x 32 the pass over
# queries would not fit into sm86's shared memory either.
SYNCHRONOUS: dict[tuple[str, Pass, int], Launches] = {
    ("16bit", "forward", 256): (Launch(64, 64, 8, 2, 8), Launch(64, 32, 8, 2, 8)),
    ("ragged", "forward", 256): (Launch(64, 64, 8, 2, 8), Launch(64, 32, 8, 2, 8)),
    ("16bit", "fused", 256): (Launch(32, 32, 8, 1, 8),),
    ("ragged", "fused", 256): (Launch(32, 32, 8, 1, 8),),
    ("ragged", "fused", 64): (Launch(64, 64, 4, 2, 8),),  # under Triton 3.9.0 three stages spill 568 bytes, two 500
    ("tf32x3", "queries", 128): (Launch(32, 32, 4, 1, 8),),
    ("tf32", "fused", 256): (Launch(16, 16, 8, 1, 8),),
    ("scattered", "queries", 64): (Launch(64, 32, 4, 2, 8),),
    ("predicates", "fused", 64): (Launch(32, 64, 8, 2, 8),),
}
CDNA: dict[tuple[str, Pass, int], Launches] = {
    ("tf32x3", "keys", 128): (Launch(16, 32, 4, 1, 8),),
    ("16bit", "fused", 512): (Launch(16, 16, 4, 1, 8),),
}
# None is 64 x 16: see WRONG_DQ.
TWICE: dict[int, Launch] = {64: Launch(64, 32, 4, 2, 8), 256: Launch(32, 16, 4, 1, 8), 512: Launch(16, 32, 8, 1, 8)}


def _is_synchronous(asked: Asked) -> bool:
    return asked.products == "unit" and asked.device.kind == "cuda" and not 90 <= asked.device.arch < 120


def _crowds(asked: Asked) -> bool:
    p = asked.problem
    more = p.score or p.where or asked.drops or asked.scattered
    return bool(more) or asked.device.kind == "hip" or (asked.split and asked.device.target != "sm90")


def _crowds_twice(asked: Asked) -> bool:
    asks = asked.problem.where and asked.device.kind == "cuda"
    return bool(asks or (asked.split and asked.drops)) and asked.device.target != "sm90"


def _keeps_rests(asked: Asked, tile: Launch) -> bool:
    return sums_are_long(asked.problem, replace(tile, products=asked.products), asked.which)


def _walked_twice(asked: Asked) -> Launch:
    """Scattered rows take 32 queries: with 64 Triton 3.9.0 spills 1.1 KB."""
    tile = TWICE[asked.width]
    return replace(tile, block_q=32, num_stages=1) if asked.scattered else tile


# All that hold, in order, on the tiles of a table that is not settled.
CHANGES: tuple[Rule[Asked, Launches], ...] = (
    Rule(
        lambda a, tiles: len(tiles) > 1 and _crowds(a),
        lambda _, tiles: tiles[1:],
        "the widest tile would spill: modifiers, predicates, random words and scattered addresses need registers, CDNA has "
        "fewer per accumulator, and without wgmma all forms of an operand wait in them",
        COUNTED,
    ),
    Rule(
        lambda a, tiles: len(tiles) > 1 and _crowds_twice(a),
        lambda _, tiles: tiles[1:],
        "two such things at once: the next tile would spill, too",
        COUNTED,
    ),
    Rule(
        lambda a, tiles: len(tiles) > 1 and a.width == 64 and _keeps_rests(a, tiles[0]),
        lambda _, tiles: tiles[1:],
        "sums of many heads have rests beside them: 32 x 64 of 64 columns would spill 2.3 KB and take 0.93 ms, not 0.47",
        "an H200, docs/lab/tuning.md",
    ),
    Rule(
        lambda a, _: _is_synchronous(a) and (a.crowd, a.which, a.width) in SYNCHRONOUS,
        lambda a, tiles: (*SYNCHRONOUS[a.crowd, a.which, a.width], *tiles),
        "matrix instructions take all operands from registers",
        f"{COUNTED}, docs/lab/tuning.md",
    ),
    Rule(
        lambda a, _: a.device.kind == "hip" and (a.crowd, a.which, a.width) in CDNA,
        lambda a, _: CDNA[a.crowd, a.which, a.width],
        "CDNA's accumulators: 32 x 32 under 8 warps spills 2.4 to 3.1 KB a thread, 16 x 16 524 bytes, this nothing",
        "by spills, gfx942, Triton 3.6.0, not timed",
    ),
    Rule(
        lambda a, _: a.narrow and a.which == "queries" and a.width == 256 and a.device.target == "sm100",
        lambda _, tiles: tuple(replace(tile, num_stages=min(tile.num_stages, 2)) for tile in tiles),
        "three stages do not fit",
        "compiled for sm100",
    ),
    Rule(
        lambda a, _: a.narrow and a.which == "queries" and a.width in TWICE and is_mended(a.problem),
        lambda a, tiles: (_walked_twice(a), *tiles),
        "the pass walks the keys twice: with modifiers and predicates 64 x 64 of 64 columns spills 1.6 KB a thread, 32 x 32 of "
        f"512 4.1 KB, this 0.3 at most; {WRONG_DQ.because}",
        "by spills, sm90, Triton 3.6.0, not timed",
    ),
    Rule(
        lambda a, _: not a.narrow and 100 <= a.device.arch < 120,
        lambda _, tiles: tuple(tile for tile in tiles if max(tile.block_q, tile.block_k) <= 32) or tiles[-1:],
        EMPTY_FP32.because,
        EMPTY_FP32.measured,
    ),
)


def _within_blocks(asked: Asked, launch: Launch) -> Launch:
    blocks = asked.problem.blocks
    assert blocks is not None
    return replace(launch, block_q=min(launch.block_q, blocks.block_q), block_k=min(launch.block_k, blocks.block_k))


def with_whole_fragments(asked: Asked, launch: Launch) -> Launch:
    """The launch, whose products of probabilities have WHOLE_FRAGMENT terms or more."""
    which = asked.which
    block_q, block_k = max(launch.block_q, WHOLE_FRAGMENT), max(launch.block_k, WHOLE_FRAGMENT)
    if which == "queries" and launch.block_k < block_k and asked.columns == 256 and asked.narrow:
        return replace(launch, block_q=16, block_k=block_k)  # 32 queries spill 1.1 KB on sm100, 0.9 on sm90, 16 none
    if which in ("forward", "queries"):
        return replace(launch, block_k=block_k)
    if which == "keys":
        return replace(launch, block_q=block_q)
    if which == "fused" and (block_q, block_k) != (launch.block_q, launch.block_k):
        return replace(launch, block_q=block_q, block_k=block_k, num_warps=8)  # in 4 warps dk, dv and dq's share spill 5.6 KB
    return launch


# Of the tile that was taken, in this order.
LAST: tuple[Rule[Asked, Launch], ...] = (
    Rule(
        lambda a, launch: reads_bytes_and_joins(a.problem, a.device, launch.products),
        with_whole_fragments,
        SHORT_PRODUCTS.because,
        SHORT_PRODUCTS.measured,
    ),
    Rule(
        lambda a, _: a.lists,
        _within_blocks,
        "tiles are no larger than a block of the mask's lists",
        "by what kernels can walk",
    ),
    Rule(
        lambda a, launch: (
            a.problem.blocks is not None
            and a.device.kind == "hip"
            and a.which == "fused"
            and launch.block_q == launch.block_k == 32
        ),
        lambda _, launch: replace(launch, num_stages=1),
        PIPELINED_CAST.because,
        PIPELINED_CAST.measured,
    ),
    Rule(
        lambda a, _: a.watched and a.device.kind == "cuda" and a.device.arch >= 100,
        lambda _, launch: replace(launch, num_warps=8),
        "rows' statistics need registers: 128 x 64 in 4 warps spills 1 KB a thread",
        "by spills, sm100, Triton 3.6.0, not timed",
    ),
)
