"""Which tile a pass gets, and how many blocks compute it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil

from flashtile.kernels.device.score import form_of
from flashtile.kernels.sm90.host.schedule import MOST_QUEUED, busiest, queued, tile_count, tile_lengths
from flashtile.kernels.sm90.host.tile_forward import ForwardLaunch, bounded, cut, key_parts, value_parts
from flashtile.memory import remembered
from flashtile.plan.device import Device
from flashtile.plan.rules import Reason, Rule, apply_all
from flashtile.problem.attention import AttentionProblem

Widths = int | tuple[int, int]
Priced = tuple[ForwardLaunch, float]  # with the microseconds of a key tile on an H100's SM
LAB = "an H100, docs/lab/hopper-forward.md"


@dataclass(frozen=True)
class ForwardTiling:
    """A tile of problems for which `when` holds, and its price: of several the problem's size decides."""

    launch: ForwardLaunch
    key_us: float  # of a key tile on an H100's SM
    because: str
    when: Callable[[AttentionProblem], bool] = lambda p: True
    measured: str = LAB


def is_single(p: AttentionProblem) -> bool:
    """Whether three warpgroups have registers and blocks enough, each with its own products under way.

    With them the random words of dropout spill, up to 1,300 bytes, and predicates 1,900 and, causal, 4,300 (200 and 290 with
    two); blocks of a list have powers of two.
    """
    return not (p.dropout is not None or p.blocks is not None or p.where)


def is_bare(p: AttentionProblem) -> bool:
    """The same of wide heads, whose products are apart: what modifiers add and masks of more than one bound spill there, and of
    items of unequal lengths too many tiles of 192 queries are not full (64 of 1k on average, an H100: 0.99 of the speed).
    """
    form = form_of(p)
    capped = bounded(p, form) and form.adds == 0 and not (p.returns_lse or is_causal(p))
    return not (not is_single(p) or (p.score and not capped) or p.lengths.ragged or p.mask.left is not None)


THREE = "three warpgroups take turns, and share each key tile"
APART = "three warpgroups, each of whose products are apart, fill each other's gaps"
TURNS = "two warpgroups take turns: one multiplies while the other exponentiates"
FITS_64 = "of 192 columns 64 keys fit, in two stages"
FITS_128 = "values are narrower than keys of 192 columns, so that 128 keys fit"
NO_ROOM = "of 256 columns 64 keys fit, in two stages, and out takes the place of queries"
APART_ROLES = ForwardLaunch(groups=3, swizzle=1, turns=False, loader_warps=1, apart=True)
# By the wider head dim, or both.
FULL: dict[Widths, tuple[ForwardTiling, ...]] = {
    64: (
        ForwardTiling(ForwardLaunch(groups=3, stages=4, swizzle=8, resident=True, loader_warps=1), 1.45, THREE, is_single),
        ForwardTiling(ForwardLaunch(groups=2, stages=4, swizzle=8, resident=True), 1.15, TURNS),
    ),
    96: (
        ForwardTiling(replace(APART_ROLES, resident=True), 1.95, APART, is_bare),
        ForwardTiling(ForwardLaunch(swizzle=1, resident=True), 1.4, TURNS),
    ),
    128: (
        ForwardTiling(replace(APART_ROLES, resident=True), 2.29, APART, is_bare),
        ForwardTiling(ForwardLaunch(swizzle=1, resident=True), 1.6, TURNS),
    ),
    192: (ForwardTiling(ForwardLaunch(block_k=64, swizzle=4), 1.2, FITS_64),),
    (192, 128): (
        ForwardTiling(ForwardLaunch(swizzle=1, resident=True, staged=False), 1.85, FITS_128),
    ),
    256: (
        ForwardTiling(
            ForwardLaunch(block_k=64, swizzle=1, resident=True, staged=False, turns=False), 1.5,
            NO_ROOM,
        ),
    ),
}  # fmt: skip
CAUSAL: dict[Widths, tuple[ForwardTiling, ...]] = {
    64: (
        ForwardTiling(ForwardLaunch(groups=3, resident=True, loader_warps=1), 1.45, THREE, is_single),
        ForwardTiling(ForwardLaunch(groups=2, resident=True, loader_warps=1), 1.15, TURNS),
    ),
    96: (
        ForwardTiling(ForwardLaunch(resident=True), 1.4, TURNS),
        ForwardTiling(replace(APART_ROLES, swizzle=2), 1.95, APART, is_bare),
    ),
    128: (ForwardTiling(ForwardLaunch(resident=True), 1.6, TURNS),),
    192: (ForwardTiling(ForwardLaunch(block_k=64), 1.2, FITS_64),),
    (192, 128): (
        ForwardTiling(ForwardLaunch(resident=True, staged=False), 1.95, FITS_128),
    ),
    256: (
        ForwardTiling(ForwardLaunch(block_k=64, staged=False), 1.5, NO_ROOM),
    ),
}  # fmt: skip
# Of the pass over queries that makes dq: three products a key tile. Of 96 and 192 columns the matrix unit's share, and a third.
QUERIES: dict[int, ForwardTiling] = {
    width: ForwardTiling(
        ForwardLaunch(block_k=keys, stages=stages, resident=True, turns=False, staged=False, loader_warps=1), key_us,
        f"dq's pass over queries, of {width} columns, has stages of {keys} keys: {stages}",
    )
    for width, keys, stages, key_us in (
        (64, 128, 3, 1.4), (96, 128, 2, 1.8), (128, 128, 2, 2.15), (192, 64, 2, 1.8), (256, 64, 1, 2.4),
    )
}  # fmt: skip
# Of forward mode, by the wider head dim and whether keys or values move, too. Prices are the matrix unit's share, and a third.
TANGENTS: dict[tuple[int, bool], ForwardTiling] = {
    (width, more): ForwardTiling(
        ForwardLaunch(block_k=keys, stages=stages, resident=True, staged=False, loader_warps=1, apart=True), key_us,
        f"forward mode, of {width} columns, has stages of {keys} keys: {stages}", measured="reckoned",
    )
    for width, more, keys, stages, key_us in (
        (64, False, 128, 3, 1.5), (64, True, 128, 2, 2.2), (128, False, 64, 3, 1.5), (128, True, 64, 2, 2.2),
    )
}  # fmt: skip
STORED = "of bytes, whose products are begun anew for every key tile: three warpgroups fill each other's gaps"
STORED_WIDE = "of bytes and 256 columns two warpgroups have registers for accumulators, and each half's product beside them"
STORED_SHAPED = "of bytes, with modifiers, which three warpgroups have no registers for"
TIMED = "an H200, 2026-11-29: 1 x 16384, full"
# Of q, k and v in e4m3, by the wider head dim.
FP8: dict[int, tuple[ForwardTiling, ...]] = {
    width: (
        ForwardTiling(replace(APART_ROLES, stages=stages, resident=True), key_us, STORED, lambda p: not p.score, TIMED),
        ForwardTiling(
            replace(APART_ROLES, groups=2, stages=stages, resident=True), key_us * 0.7, STORED_SHAPED, lambda p: bool(p.score),
            TIMED,
        ),
    )
    for width, stages, key_us in ((64, 4, 1.42), (128, 4, 1.65))
} | {256: (ForwardTiling(replace(APART_ROLES, groups=2, resident=True), 1.73, STORED_WIDE, measured=TIMED),)}  # fmt: skip
TILE_US = 1.0  # a query tile's start and end in a resident block
BLOCK_US = 3.5  # the same where every tile has a block of its own
# Keys and values that heads computed together may have: above, the L2 cache (two halves of 25 MB) loses them, unless all of
# them are no more than twice that. Lists of 1 x 8192 at 80 %, 3, 4, 5, 6, 8 heads of 4 MiB: 0.176, 0.173, 0.178, 0.175,
# 0.179 ms; causal 2 x 8192 with 16 and 32 MiB: 0.733, 0.770; 1 x 4096 with 16 and, all of it, 32: 0.108, 0.101 (an H100).
TOGETHER_BYTES = 16 << 20
# What all heads of e4m3 may have, of 128 columns. An H200, 2026-11-29: causal 1 x 16384, 16 heads of 4 MiB, all of them at once
# 1.095 ms, by four 1.232, and by four where every tile has a block of its own 1.138.
TOGETHER_FP8_BYTES = 64 << 20
EVEN = 1.02  # the busiest block's share that is even enough: fewer heads together are kinder to the cache
FILLED = 0.9  # of the blocks have a tile of the heads that go together with lists
LISTED_TILES = 12  # key tiles of a list on average, half as many to half as many again: as good a guess as any
MOST_PLAYED = 40000  # tiles whose schedules are compared; with more every tile gets its own block, and the start is a trifle


def choose_forward(problem: AttentionProblem, device: Device) -> ForwardLaunch:
    """The tile of the forward on a device."""
    return forward_choice(problem, device)[0]


def choose_queries(problem: AttentionProblem, device: Device) -> ForwardLaunch:
    """The tile of the backward's pass over queries."""
    return queries_choice(problem, device)[0]


def forward_choice(problem: AttentionProblem, device: Device) -> tuple[ForwardLaunch, tuple[Reason, ...]]:
    """The tile of the forward on a device, and the rules that fired."""
    return _choose(problem, device.sm_count)


@remembered(1024, "tiles of forwards on sm90")
def _choose(p: AttentionProblem, blocks: int) -> tuple[ForwardLaunch, tuple[Reason, ...]]:
    full, causal = tilings(p)
    tiles = causal if is_causal(p) else full
    first = tiles[0]
    if p.blocks is not None:
        return _listed(p, first.launch, first.key_us, blocks), (first, LISTED)
    if p.lengths.ragged:
        together = 16 if _width(p) == 64 else 4 if is_causal(p) else 1
        return replace(first.launch, resident=True, swizzle=min(p.heads_q, together)), (first, UNEVEN)
    return _cheapest(p, tiles, blocks)


def queries_choice(problem: AttentionProblem, device: Device) -> tuple[ForwardLaunch, tuple[Reason, ...]]:
    """The tile of the backward's pass over queries, and the rules that fired."""
    p, tiling = problem, QUERIES[_width(problem)]
    fired = list[Reason]([tiling])
    launch, key_us = apply_all((HALF_KEYS,), p, (tiling.launch, tiling.key_us), fired)
    if p.blocks is not None:
        return _listed(p, launch, key_us, device.sm_count), (*fired, LISTED)
    if p.lengths.ragged:
        return replace(launch, swizzle=min(p.heads_q, 4)), (*fired, UNEVEN)
    found, (_, *more) = _cheapest(p, (replace(tiling, launch=launch, key_us=key_us),), device.sm_count)
    return found, (*fired, *more)


def tangent_choice(
    problem: AttentionProblem, device: Device, moved: frozenset[str]
) -> tuple[ForwardLaunch, tuple[Reason, ...]]:
    """The tile of a tangent, and the rules that fired."""
    return _cheapest(problem, (TANGENTS[_width(problem), moved != {"q"}],), device.sm_count)


# What 128 keys need besides spills.
HALF_KEYS: Rule[AttentionProblem, Priced] = Rule(
    lambda p, tile: tile[0].block_k == 128 and _width(p) > 64 and (p.dropout is not None or bool(p.where)),
    lambda _, tile: (replace(tile[0], block_k=64, stages=2 * tile[0].stages), tile[1] / 2),
    "random words and predicates' answers of 128 keys spill",
    "compiled for sm90",
)


@dataclass(frozen=True)
class Order:
    """Why tiles are shared as they are."""

    because: str
    measured: str


PRICED = "by the prices of tiles on an H100, played through for these sizes"
LISTED = Order(
    "nobody knows how long lists are, but the longest come first: blocks stay, and as few heads go together as give nearly "
    "every block a tile, or up to twice as many, whatever comes out most even",
    "an H100, docs/lab/hopper-forward.md",
)
UNEVEN = Order(
    "nobody knows the items' lengths, but the longest come first: blocks stay, and some heads go together",
    "64 items of 1k, an H100: 2 to 5 % by blocks that stay; one head together where full, 1.003 and 1.009 of the speed of four",
)


def _cheapest(p: AttentionProblem, tiles: tuple[ForwardTiling, ...], blocks: int) -> tuple[ForwardLaunch, tuple[Reason, ...]]:
    """The tile and its schedule that take the least time, played through."""
    schedules = _causal if is_causal(p) else _full
    timed = [(us, launch, tiling) for tiling in tiles for us, launch in schedules(p, tiling.launch, tiling.key_us, blocks)]
    us, launch, tiling = min(timed, key=lambda option: option[0])
    if len(timed) == 1:
        return launch, (tiling,)
    return launch, (tiling, Order(f"the cheapest of {len(timed)} ways to share tiles: {us:.4g} us on {blocks} blocks", PRICED))


def tilings(p: AttentionProblem) -> tuple[tuple[ForwardTiling, ...], tuple[ForwardTiling, ...]]:
    """The tiles that its head dims and features allow: where `is_causal` does not hold, and where it does."""
    if p.multiplies_fp8:
        found = tuple(tiling for tiling in FP8[_width(p)] if tiling.when(p))
        return found, found
    full, causal = (tuple(tiling for tiling in tiles[_widths(p)] if tiling.when(p)) for tiles in (FULL, CAUSAL))
    return full, causal


def options(p: AttentionProblem) -> tuple[tuple[Priced, ...], tuple[Priced, ...]]:
    """The same as launches with their prices."""
    full, causal = (tuple((tiling.launch, tiling.key_us) for tiling in tiles) for tiles in tilings(p))
    return full, causal


def is_causal(p: AttentionProblem) -> bool:
    """Whether later query tiles are longer."""
    return p.band.right is not None


def _width(p: AttentionProblem) -> int:
    return max(columns * parts for columns, parts in (key_parts(p), value_parts(p)))


def _widths(p: AttentionProblem) -> Widths:
    """The wider head dim; both where v of 192 columns' heads is narrower, so that 128 keys fit, but no tile of a bias."""
    columns, parts = cut(p.head_dim_v)
    narrow = _width(p) == 192 and columns * parts <= 128 and not p.score
    return (192, 128) if narrow else _width(p)


def _together(p: AttentionProblem) -> int:
    """As many heads as the L2 cache has room for."""
    size = 1 if p.multiplies_fp8 else p.dtype.size_bytes
    head_bytes, heads = p.seqlen_k * (p.head_dim + p.head_dim_v) * size // p.group, p.batch * p.heads_q
    whole = TOGETHER_FP8_BYTES if p.multiplies_fp8 and _width(p) == 128 else 2 * TOGETHER_BYTES
    return heads if heads * head_bytes <= whole else max(min(heads, TOGETHER_BYTES // head_bytes), 1)


def _listed(p: AttentionProblem, launch: ForwardLaunch, key_us: float, blocks: int) -> ForwardLaunch:
    """As few heads together as have a tile for nearly every block, or up to twice as many, whatever comes out most even.

    Nobody knows here how long the lists are, but the longest come first: they are played through as if of LISTED_TILES.
    """
    tiles, heads = -(-p.seqlen_q // launch.block_q), p.batch * p.heads_q
    together = max(min(ceil(FILLED * blocks / max(tiles, 1)), _together(p)), 1)
    if tiles * heads <= MOST_QUEUED:
        times = [LISTED_TILES * key_us * (0.5 + (i + 0.5) / tiles) + TILE_US for i in range(tiles)]
        candidates = range(together, max(min(2 * together, heads), together) + 1)
        together = min(candidates, key=lambda n: busiest(times, heads, n, blocks, listed=True))
    return replace(launch, resident=True, swizzle=together)


def _full(p: AttentionProblem, launch: ForwardLaunch, key_us: float, blocks: int) -> Iterator[tuple[float, ForwardLaunch]]:
    """(microseconds, launch): all tiles take as long, so rounds count."""
    rounds = -(-tile_count(p, launch) // blocks)
    yield rounds * (max(tile_lengths(p, launch.block_q, launch.block_k)) * key_us + TILE_US), launch


def _causal(p: AttentionProblem, launch: ForwardLaunch, key_us: float, blocks: int) -> Iterator[tuple[float, ForwardLaunch]]:
    """(microseconds, launch) for each schedule of a tile."""
    heads, times = p.batch * p.heads_q, [n * key_us for n in tile_lengths(p, launch.block_q, launch.block_k)]
    together = _together(p)
    alone = replace(launch, resident=False, swizzle=8 if together >= 8 else 4)
    yield queued([time + BLOCK_US for time in times], heads, alone.swizzle, blocks), alone
    if not launch.resident or len(times) * heads > MOST_PLAYED:
        return
    times = [time + TILE_US for time in times]
    for swizzle in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192):
        if swizzle > together:
            break
        end = busiest(times, heads, swizzle, blocks)
        yield end, replace(launch, swizzle=swizzle)
        if end < EVEN * sum(times) * heads / blocks:
            break


def forward_grid(problem: AttentionProblem, launch: ForwardLaunch, device: Device) -> tuple[int, int, int]:
    """Blocks of the forward: one for each tile of queries, or, where they are resident, as many as the device has SMs."""
    tiles = tile_count(problem, launch)
    return (min(tiles, device.sm_count) if launch.resident else tiles, 1, 1)
