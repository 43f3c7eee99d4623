"""Which tile a pass gets, and how many blocks compute it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from flashtile.kernels.device.score import form_of
from flashtile.kernels.sm90.host.schedule import MOST_QUEUED, busiest, queued, tile_count, tile_lengths
from flashtile.kernels.sm90.host.tile_forward import ForwardLaunch, bounded, cut
from flashtile.memory import remembered
from flashtile.plan.device import Device
from flashtile.problem.attention import AttentionProblem

# Tiles by the wider head dim, or both, each with the microseconds of a key tile on an H100's SM (docs/lab/hopper-forward.md).
# Where there are several, the problem's size decides.
Priced = tuple[ForwardLaunch, float]
Widths = int | tuple[int, int]
FULL: dict[Widths, tuple[Priced, ...]] = {
    64: (
        (ForwardLaunch(groups=3, stages=4, swizzle=8, resident=True, loader_warps=1), 1.45),
        (ForwardLaunch(groups=2, stages=4, swizzle=8, resident=True), 1.15),
    ),
    96: (
        (ForwardLaunch(groups=3, swizzle=1, resident=True, turns=False, loader_warps=1, apart=True), 1.95),
        (ForwardLaunch(swizzle=1, resident=True), 1.4),
    ),
    128: (
        (ForwardLaunch(groups=3, swizzle=1, resident=True, turns=False, loader_warps=1, apart=True), 2.29),
        (ForwardLaunch(swizzle=1, resident=True), 1.6),
    ),
    192: ((ForwardLaunch(block_k=64, swizzle=4), 1.2),),
    (192, 128): ((ForwardLaunch(swizzle=1, resident=True, staged=False), 1.85),),
    256: ((ForwardLaunch(block_k=64, swizzle=1, resident=True, staged=False, turns=False), 1.5),),
}
CAUSAL: dict[Widths, tuple[Priced, ...]] = {
    64: (
        (ForwardLaunch(groups=3, resident=True, loader_warps=1), 1.45),
        (ForwardLaunch(groups=2, resident=True, loader_warps=1), 1.15),
    ),
    96: (
        (ForwardLaunch(resident=True), 1.4),
        (ForwardLaunch(groups=3, turns=False, loader_warps=1, apart=True), 1.95),
    ),
    128: ((ForwardLaunch(resident=True), 1.6),),
    192: ((ForwardLaunch(block_k=64), 1.2),),
    (192, 128): ((ForwardLaunch(resident=True, staged=False), 1.95),),
    256: ((ForwardLaunch(block_k=64, staged=False), 1.5),),
}
# Of the pass over queries that makes dq: three products a key tile. Of 96 and 192 columns the matrix unit's share, and a third.
QUERIES: dict[int, Priced] = {
    64: (ForwardLaunch(stages=3, resident=True, turns=False, staged=False, loader_warps=1), 1.4),
    96: (ForwardLaunch(stages=2, resident=True, turns=False, staged=False, loader_warps=1), 1.8),
    128: (ForwardLaunch(stages=2, resident=True, turns=False, staged=False, loader_warps=1), 2.15),
    192: (ForwardLaunch(block_k=64, stages=2, resident=True, turns=False, staged=False, loader_warps=1), 1.8),
    256: (ForwardLaunch(block_k=64, stages=1, resident=True, turns=False, staged=False, loader_warps=1), 2.4),
}
TILE_US = 1.0  # a query tile's start and end in a resident block
BLOCK_US = 3.5  # the same where every tile has a block of its own
# Keys and values that heads computed together may have: above, the L2 cache (two halves of 25 MB) loses them, unless all of
# them are no more than twice that. Lists of 1 x 8192 at 80 %, 3, 4, 5, 6, 8 heads of 4 MiB: 0.176, 0.173, 0.178, 0.175,
# 0.179 ms; causal 2 x 8192 with 16 and 32 MiB: 0.733, 0.770; 1 x 4096 with 16 and, all of it, 32: 0.108, 0.101 (an H100).
TOGETHER_BYTES = 16 << 20
EVEN = 1.02  # the busiest block's share that is even enough: fewer heads together are kinder to the cache
FILLED = 0.9  # of the blocks have a tile of the heads that go together with lists
LISTED_TILES = 12  # key tiles of a list on average, half as many to half as many again: as good a guess as any
MOST_PLAYED = 40000  # tiles whose schedules are compared; with more every tile gets its own block, and the start is a trifle


def choose_forward(problem: AttentionProblem, device: Device) -> ForwardLaunch:
    """The tile of the forward on a device."""
    return _choose(problem, device.sm_count)


@remembered(1024, "tiles of forwards on sm90")
def _choose(p: AttentionProblem, blocks: int) -> ForwardLaunch:
    full, causal = options(p)
    tiles, schedules = (causal, _causal) if is_causal(p) else (full, _full)
    if p.blocks is not None:
        return _listed(p, *tiles[0], blocks)
    if p.lengths.ragged:  # nobody knows the lengths here, but the longest items come first (64 of 1k: +2 to +5 % by residence)
        together = 16 if _width(p) == 64 else 4 if is_causal(p) else 1  # the last 1.003 and 1.009 of the speed of four
        return replace(tiles[0][0], resident=True, swizzle=min(p.heads_q, together))
    timed = [option for launch, key_us in tiles for option in schedules(p, launch, key_us, blocks)]
    return min(timed, key=lambda option: option[0])[1]


def choose_queries(problem: AttentionProblem, device: Device) -> ForwardLaunch:
    """The tile of the backward's pass over queries."""
    p, (launch, key_us) = problem, QUERIES[_width(problem)]
    if launch.block_k == 128 and _width(p) > 64 and (p.dropout is not None or p.where):  # what 128 keys need beside spills
        launch, key_us = replace(launch, block_k=64, stages=2 * launch.stages), key_us / 2
    if p.blocks is not None:
        return _listed(p, launch, key_us, device.sm_count)
    if p.lengths.ragged:
        return replace(launch, swizzle=min(p.heads_q, 4))
    schedules = _causal if is_causal(p) else _full
    return min(schedules(p, launch, key_us, device.sm_count), key=lambda option: option[0])[1]


def options(p: AttentionProblem) -> tuple[tuple[Priced, ...], tuple[Priced, ...]]:
    """The tiles that its head dims and features allow: where `is_causal` does not hold, and where it does."""
    # with three warpgroups the random words of dropout spill, up to 1,300 bytes, and predicates 1,900 and, causal, 4,300 (200
    # and 290 with two); blocks of a list have powers of two
    pairs = p.dropout is not None or p.blocks is not None or bool(p.where)
    # the same of wide heads, whose products are apart: what modifiers add and masks of more than one bound spill there, and
    # of items of unequal lengths too many tiles of 192 queries are not full (64 of 1k on average, an H100: 0.99 of the speed)
    form = form_of(p)
    capped = bounded(p, form) and form.adds == 0 and not (p.returns_lse or is_causal(p))
    bare = not (pairs or (p.score and not capped) or p.lengths.ragged or p.mask.left is not None)
    full, causal = (
        tuple(
            (launch, key_us)
            for launch, key_us in tiles[_widths(p)]
            if launch.groups == 2 or (bare if launch.apart else not pairs)
        )
        for tiles in (FULL, CAUSAL)
    )
    return full, causal


def is_causal(p: AttentionProblem) -> bool:
    """Whether later query tiles are longer."""
    return p.band.right is not None


def _width(p: AttentionProblem) -> int:
    return max(columns * parts for columns, parts in (cut(p.head_dim), cut(p.head_dim_v)))


def _widths(p: AttentionProblem) -> Widths:
    """The wider head dim; both where v of 192 columns' heads is narrower, so that 128 keys fit, but no tile of a bias."""
    columns, parts = cut(p.head_dim_v)
    narrow = _width(p) == 192 and columns * parts <= 128 and not p.score
    return (192, 128) if narrow else _width(p)


def _together(p: AttentionProblem) -> int:
    """As many heads as the L2 cache has room for."""
    head_bytes, heads = p.seqlen_k * (p.head_dim + p.head_dim_v) * p.dtype.size_bytes // p.group, p.batch * p.heads_q
    return heads if heads * head_bytes <= 2 * TOGETHER_BYTES else max(min(heads, TOGETHER_BYTES // head_bytes), 1)


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
