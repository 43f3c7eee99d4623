"""Which tile the Hopper backward gets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from flashtile.kernels.device.score import Form, form_of
from flashtile.kernels.sm90.host.bias_gradient import paired, stored
from flashtile.kernels.sm90.host.tile_backward import (
    COUNTS,
    BackwardLaunch,
    backward_tiles,
    narrows,
    queries_bytes,
    rotates,
    tiled,
)
from flashtile.kernels.sm90.host.tile_forward import GROUP_ROWS, columns_of
from flashtile.plan.device import Device
from flashtile.plan.rules import Reason, Rule, apply_all, apply_first
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.blocks import BlockSpec
from flashtile.problem.options import Variant

LAB = "an H100, docs/lab/hopper-backward.md"


@dataclass(frozen=True)
class Asked:
    """What a tile is chosen for. split: dq is made by a pass over queries."""

    problem: AttentionProblem
    device: Device
    split: bool

    @cached_property
    def form(self) -> Form:
        return form_of(self.problem)

    @property
    def columns(self) -> int:
        return columns_of(self.problem.head_dim)

    @property
    def columns_v(self) -> int:
        return columns_of(self.problem.head_dim_v)

    @property
    def width(self) -> int:
        """Columns of the wider head dim."""
        return max(self.columns, self.columns_v)

    @property
    def ordered(self) -> bool:
        """Whether shares of dq are added in a fixed order."""
        return self.problem.deterministic and not self.split


@dataclass(frozen=True)
class BackwardTiling:
    """A tile, and why it is that of its width."""

    launch: BackwardLaunch
    because: str
    measured: str = LAB


# By the wider head dim of the tile.
BACKWARD = {
    64: BackwardTiling(BackwardLaunch(block_q=128, joined=True), "of 64 columns tiles have 128 queries, and roles fewer words"),
    128: BackwardTiling(BackwardLaunch(stages=3), "of 128 columns there is room for three stages of queries"),
    256: BackwardTiling(
        BackwardLaunch(stages=1, stages_dout=1, parted=True),
        "of 256 columns registers have no room for dk and dv: a pass over keys makes each",
    ),
}

UNGROUPED = BackwardTiling(
    BackwardLaunch(ungrouped=True),
    "tiles of heads that share keys would be few, or very long: each query head has tiles of its own; dk and dv are summed",
    "an H200, 2026-11-30: 2 x 3000, 20 heads for 4, of 128 columns, 0.973 to 0.823 ms, causal 0.529 to 0.444; not 1 x 2048, 32 "
    "for 8, whose tiles fill one round: 0.288, 0.314",
)


def is_split(problem: AttentionProblem, variant: Variant) -> bool:
    """Whether dq is made by a pass over queries: where it is asked for, and where shares in a fixed order would cost more.

    So it is with wide heads (an H100, 2026-11-23: causal 1.7 times as long as in any order) and with few keys under a causal
    mask, whose gradients of biases the ordered one forms alone; unequal lengths have no order.
    """
    p = problem
    if variant != "auto" or not p.deterministic:
        return variant == "split"
    if max(p.head_dim, p.head_dim_v) > 128 or p.lengths.ragged:
        return True
    return p.band.right is not None and p.seqlen_k <= BRIEF and not any(spec.wants_grad for spec in p.score)


# keys: 16 x 1024 causal, 32 heads of 64, takes 0.583 ms split, 0.631 in order, 4 x 4096 1.667, 1.535 (an H200, 2026-11-25)
BRIEF = 1024


def choose_backward(
    problem: AttentionProblem, device: Device, split: bool = False, ungrouped: bool | None = None
) -> BackwardLaunch:
    """The tile of the passes over keys."""
    return backward_choice(problem, device, split, ungrouped)[0]


def backward_choice(
    problem: AttentionProblem, device: Device, split: bool = False, ungrouped: bool | None = None
) -> tuple[BackwardLaunch, tuple[Reason, ...]]:
    """The tile of the passes over keys, and the rules that fired. ungrouped: instead of what the rule says of it."""
    asked = Asked(problem, device, split)
    if is_ungrouped(problem, device, split) if ungrouped is None else ungrouped:
        launch, fired = backward_choice(tiled(problem, UNGROUPED.launch), device)
        return replace(launch, ungrouped=True), (UNGROUPED, *fired)
    tiling = BACKWARD[asked.width]
    fired = list[Reason]([tiling])
    launch = apply_all(TILES, asked, tiling.launch, fired)
    launch = apply_first(HEADS, asked, launch, fired)
    return apply_all((ORDERED,) if asked.ordered else SHARING, asked, launch, fired), tuple(fired)


def joins(problem: AttentionProblem, form: Form, launch: BackwardLaunch) -> bool:
    """Whether a tile of 128 columns has its words `joined`: where it was measured to gain, and there is room."""
    p, ragged, drops = problem, problem.lengths.ragged, problem.dropout is not None
    told = (form.curved or p.group > 1 or ragged or drops or p.blocks is not None) and not (ragged and drops)
    return told and launch.stages == 3 and not (form.prescale or form.adds or p.where)


def converts(problem: AttentionProblem, form: Form, launch: BackwardLaunch, device: Device) -> bool:
    """Whether a warp of the pass over keys makes dq: where most heads are done long before the last one, there is room for a
    part of the sum, and it was measured to gain (docs/lab/hopper-backward.md).
    """
    p, columns = problem, max(columns_of(problem.head_dim), columns_of(problem.head_dim_v))
    if p.lengths.ragged or p.where or p.blocks is not None or p.band.left is not None or stored(p) is not None:
        return False
    if columns <= 64:
        gains = p.band.right is None
    else:
        simple = not (launch.parted or p.group > 1 or form.adds or form.prescale)
        brief = p.seqlen_k <= FEW_KEYS if p.band.right is None else queries_bytes(p) <= BRIEF_BYTES
        gains = simple and brief and (p.band.right is None or not is_narrow(p, launch))
    return gains and backward_tiles(p, launch) > FEW_TILES * device.sm_count


# keys up to which wider heads gain without a band, too; tiles of a multiprocessor above which problems do
FEW_KEYS, FEW_TILES = 2048, 3


def is_one_wave(problem: AttentionProblem, launch: BackwardLaunch, device: Device) -> bool:
    """Whether every block has one tile, some long and some short, of a problem whose roles find their tiles themselves."""
    p = problem
    if launch.parted or p.lengths.ragged or p.group > 1 or p.score or p.where or p.blocks is not None or p.dropout is not None:
        return False
    causal = p.band.right is not None and p.band.left is None
    tiles = backward_tiles(p, launch)
    return causal and p.seqlen_k > 3 * launch.block_k and tiles <= device.sm_count and tiles <= COUNTS - 4


def is_plain(problem: AttentionProblem) -> bool:
    """Whether nothing but a band stands beside q, k and v."""
    p = problem
    return not (p.score or p.where or p.blocks is not None or p.lengths.ragged or p.sink is not None or p.dropout is not None)


def is_narrow(problem: AttentionProblem, launch: BackwardLaunch) -> bool:
    """Whether products leave a quarter of 128 columns out: of problems that a GPU has run so, without modifiers and lists."""
    p = problem
    return is_plain(p) and narrows(p, launch) and 4 * max(p.head_dim, p.head_dim_v) <= 3 * columns_of(p.head_dim)


CACHED_BYTES = 24 << 20
GROUPED_BYTES = 128 << 20  # the same of grouped heads, whose tiles are long and few
LONG_BYTES = 96 << 20  # the same of causal ones, whose tiles begin apart
LONG_GROUP_BYTES = 64 << 20  # from which on query heads have tiles of their own (`has_long_groups`), up to
MEASURED_GROUP_BYTES = 256 << 20  # 8 heads of 32,768 queries, for their dk and dv take memory as well
BRIEF_BYTES = 12 << 20  # of a causal head beyond which a pass behind makes dq sooner than a warp of this one
LISTED_BYTES = 16 << 20
DOCUMENTS = STAGGERED = 8
MANY_QUERIES = 1024  # beside whose steps the sums of a tile's dk and dv count little


def is_grouped(problem: AttentionProblem, launch: BackwardLaunch) -> bool:
    """Whether a tile of keys reads several heads' queries, and makes all its gradients."""
    return problem.group > 1 and not (launch.parted or problem.lengths.ragged or problem.blocks is not None)


def is_ungrouped(problem: AttentionProblem, device: Device, split: bool) -> bool:
    """Whether query heads that share keys have tiles of their own: where those of groups would leave many blocks without one.

    Tiles under a causal mask differ in length: those of a group are chosen for where blocks have more than 1.5 of them. Others
    where their last round is full, or they have so many rounds that it counts little; apart must be 1.2 times as short. And
    where a group's tiles are very long (`has_long_groups`).
    """
    p = problem
    narrow = max(columns_of(p.head_dim), columns_of(p.head_dim_v)) <= 128
    if p.group == 1 or split or p.deterministic or p.seqlen_q < MANY_QUERIES or not (narrow and is_plain(p)):
        return False
    if has_long_groups(p):
        return True
    tiles, blocks = backward_tiles(p, BackwardLaunch()), device.sm_count
    if p.band.right is not None and p.band.left is None and p.seqlen_q == p.seqlen_k:
        return 2 * tiles <= 3 * blocks
    rounds, apart = ceil(tiles / blocks) * p.group, ceil(tiles * p.group / blocks)
    return 5 * rounds >= 6 * apart


def has_long_groups(problem: AttentionProblem) -> bool:
    """Whether tiles of each query head, 128 columns wide, are faster though those of groups are many.

    Their speed over that of a group's on an H200, 2026-11-30, causal (full): 8 heads 2 x 4096 1.082 (1.027), 1 x 8192 1.064,
    1 x 32768 1.035; 4 heads 1 x 16384 1.022 (1.033), but 2 x 8192 0.993, 4 x 2048 0.967 (0.984); 5 heads 1 x 8192 1.003
    (0.997).
    """
    p = problem
    causal = p.band.right is not None and p.band.left is None
    wide = columns_of(p.head_dim) == columns_of(p.head_dim_v) == 128
    alike = p.seqlen_q == p.seqlen_k and (causal or p.band.right is p.band.left is None)
    long = queries_bytes(p) >= LONG_GROUP_BYTES or (p.group >= 8 and p.seqlen_q >= 4096)
    return wide and alike and long and queries_bytes(p) <= MEASURED_GROUP_BYTES


def interleaves(problem: AttentionProblem, launch: BackwardLaunch) -> bool:
    """Whether tiles of grouped heads walk their queries once for all heads of a group (docs/lab/hopper-backward.md)."""
    if not is_grouped(problem, launch) or paired(problem):  # a second entry's ds is brought back head by head
        return False
    return problem.band.right is None or queries_bytes(problem) > GROUPED_BYTES


def is_long(problem: AttentionProblem) -> bool:
    """Whether the cache does not hold a plain causal head's queries, but four heads together gain all the same."""
    p = problem
    causal = p.band.right is not None and p.band.left is None and p.group == 1 and not p.deterministic
    wide = max(columns_of(p.head_dim), columns_of(p.head_dim_v)) == 128
    return is_plain(p) and causal and wide and CACHED_BYTES < queries_bytes(p) <= LONG_BYTES


def _is_staggered(asked: Asked, launch: BackwardLaunch) -> bool:
    """Whether tiles of grouped heads begin apart, 128 columns wide."""
    return asked.problem.band.right is not None and asked.columns == 128 and is_grouped(asked.problem, launch)


def is_of_documents(problem: AttentionProblem) -> bool:
    """Whether lists are those of documents, whose tiles read and add to few of a head's queries."""
    return problem.blocks is not None and any(leaf.kind.name == "document" for leaf in problem.leaves)


def _abreast(heads: int, problem: AttentionProblem, most_bytes: int) -> int:
    """So many heads, or as many as have their queries within these bytes, but one at least."""
    return max(min(heads, most_bytes // max(queries_bytes(problem), 1)), 1)


# predicates that show every key to about as many queries
ALIKE = {"document", "within", "dilated", "key_padding"}


def pieces_of(problem: AttentionProblem, launch: BackwardLaunch) -> int:
    """Tickets, of four steps at least, of a list far longer than the mean; 1 where lists are much alike.

    Eight, and of few heads, whose long lists are few, sixteen (docs/lab/hopper-backward.md).
    """
    kinds, p = {leaf.kind.name for leaf in problem.leaves}, problem
    if p.blocks is None or stored(p) is not None or launch.parted or (kinds and kinds <= ALIKE):
        return 1
    most, steps = 16 if p.batch * p.heads_kv <= 8 else 8, p.seqlen_q * p.group // launch.block_q
    return min(most, 1 << max(steps // 4, 1).bit_length() - 1)


def ordered(launch: BackwardLaunch, problem: AttentionProblem, device: Device) -> BackwardLaunch:
    """The same with as many heads at a time as fill the device: tiles end in the order in which the next ones have to begin."""
    return replace(launch, swizzle=max(1, device.sm_count // ceil(problem.seqlen_k / launch.block_k)), resident=False)


def _is_busy(asked: Asked) -> bool:
    """Whether each score of 128 queries needs something besides."""
    p, form = asked.problem, asked.form
    asks = p.where and (form.curved or p.blocks is None)
    return bool(p.dropout is not None or form.prescale or form.adds or asks)


def _within_blocks(blocks: BlockSpec | None, launch: BackwardLaunch) -> BackwardLaunch:
    return launch if blocks is None else replace(launch, block_q=max(min(launch.block_q, blocks.block_q), GROUP_ROWS))


Rules = tuple[Rule[Asked, BackwardLaunch], ...]
# All that hold, in order.
TILES: Rules = (
    Rule(
        lambda a, launch: _is_busy(a) and launch.block_q > GROUP_ROWS,
        lambda _, launch: replace(launch, block_q=GROUP_ROWS),
        "what each score of 128 queries needs besides spills in the loop",
        "compiled for sm90",
    ),
    Rule(
        lambda a, _: a.problem.blocks is not None,
        lambda a, launch: _within_blocks(a.problem.blocks, launch),
        "tiles are no larger than a block of the mask's lists",
        "by what kernels can walk",
    ),
    Rule(
        lambda a, launch: launch.parted and a.columns_v < a.columns,
        lambda _, launch: replace(launch, stages=2, stages_dout=2),
        "values are narrower than keys: there is room for a second stage",
        "by shared memory",
    ),
    Rule(
        lambda a, launch: joins(a.problem, a.form, launch),
        lambda _, launch: replace(launch, stages_dout=launch.stages, joined=True),
        "roles with more to say share words, and there is room for as many stages of dout as of queries",
        LAB,
    ),
    Rule(
        lambda a, _: paired(a.problem) and not a.problem.deterministic,
        lambda _, launch: replace(launch, stages=2),
        "two batch entries share a bias: there has to be room for what the second one's gradient is added to",
        "by shared memory",
    ),
)
# The first that holds says how many heads go together.
HEADS: Rules = (
    Rule(
        lambda a, _: is_of_documents(a.problem) and a.problem.band.right is None,
        lambda _, launch: replace(launch, swizzle=DOCUMENTS),
        "tiles of documents read and add to few of a head's queries",
        "an H100, 2026-11-27: 1 x 8192 of 128 columns by two, four, eight heads 0.505, 0.480, 0.469 ms; of 64 0.658, 0.657, "
        "0.629; of 256 by one, four, eight 0.878, 0.772, 0.698",
    ),
    Rule(
        lambda a, _: is_of_documents(a.problem),
        lambda a, launch: replace(launch, swizzle=_abreast(DOCUMENTS, a.problem, 2 * LISTED_BYTES)),
        "tiles of causal documents read and add to few of a head's queries",
        "an H100, 2026-11-27: 1 x 8192 of 128 columns by two, four, eight heads 0.368, 0.358, 0.370 ms; of 64 0.507, 0.508, "
        "0.494",
    ),
    Rule(
        lambda a, _: a.problem.blocks is not None,
        lambda a, launch: replace(launch, swizzle=_abreast(launch.swizzle, a.problem, LISTED_BYTES)),
        "tiles of lists read other queries each: as many heads go together as the cache has room for",
        "an H100, 2026-11-27: 1 x 8192 x 16 x 128 (8 MiB a head) at 80 % by four 0.551 ms, by two 0.541, one by one 0.558; 95 "
        "% diagonal 0.262, 0.250, 0.253",
    ),
    Rule(
        lambda a, launch: _is_staggered(a, launch) and queries_bytes(a.problem) <= GROUPED_BYTES,
        lambda _, launch: replace(launch, swizzle=STAGGERED),
        "causal tiles of grouped heads are long and few: eight heads go together, so that no block is left with a long one",
        "an H200, 2026-11-29: by four, by eight 1 x 8192, 64 heads for 8, 5.319, 4.949 ms, 2 x 4096 2.868, 2.724, 1 x 4096, 32 "
        "for 8, 0.664, 0.638, 1 x 16384, 16 for 4, 4.666, 4.587, 1 x 8192, 40 for 8, 3.071, 3.054; 64 columns 0.983 to 1.030",
    ),
    Rule(
        lambda a, launch: CACHED_BYTES < queries_bytes(a.problem) <= GROUPED_BYTES and is_grouped(a.problem, launch),
        lambda _, launch: launch,
        "tiles of grouped heads are long and few: heads go together, so that no block is left with a long one",
        "an H200, 2026-11-29: causal 1 x 8192, 40 heads for 8, 128 columns, by four 1.20 of the speed of one by one, 64 for 8 "
        "1.16; 64 columns 1.22, 32 for 4 1.46; 1 x 16384, 16 for 4, 1.00",
    ),
    Rule(
        lambda a, _: not a.split and is_long(a.problem),
        lambda _, launch: launch,
        "long causal tiles: heads go together, so that few blocks are left with a long one at the end",
        "an H200, 2026-11-30: 1 x 32768 x 16 x 128, where a warp of this pass makes dq 18.06 ms by one, 16.75 by four heads; "
        "where a pass behind it does 16.77, 16.40; 1 x 65536 x 8 x 128 36.10, 33.92, by two 34.71",
    ),
    Rule(
        lambda a, launch: queries_bytes(a.problem) > CACHED_BYTES and not (a.problem.lengths.ragged or launch.parted),
        lambda _, launch: replace(launch, swizzle=1),
        "the cache has no room for the queries of more heads than one",
        "an H100, 2026-11-22: of 1 x 16384 x 16 x 128 (17 MB) four heads together take 0.96 of the time of one by one, of "
        "1 x 32768 (34 MB) 1.20; of 256 columns at 16384 (34 MB), limited by its additions, 0.98",
    ),
    Rule(
        lambda a, _: a.problem.lengths.ragged and a.problem.band.right is not None,
        lambda _, launch: replace(launch, swizzle=1),
        "items differ in length under a causal mask",
        "64 items of 1k, an H100: one head 1.012 of the speed of four, full 0.93",
    ),
    Rule(
        lambda a, _: rotates(a.problem, a.split),
        lambda _, launch: replace(launch, swizzle=2),
        "no two tiles of a head add to one part of dq's sum at a time: fewer heads have to go together",
        "an H100, 2026-11-27: 1 x 16384 1.012 of the speed, 64 items of 1k 1.015",
    ),
)
# Tiles in a fixed order.
ORDERED: Rule[Asked, BackwardLaunch] = Rule(
    lambda _, __: True,
    lambda a, launch: ordered(launch, a.problem, a.device),
    "dq is added up in a fixed order: as many heads at a time as fill the device, and no block stays to wait for its turn",
    "4 x 4096 causal, 32 heads of 64, an H100: 1.6 ms, 6.2 where blocks stay",
)
# Tiles in any order. All that hold, in order.
SHARING: Rules = (
    Rule(
        lambda a, launch: not a.split and interleaves(a.problem, launch),
        lambda _, launch: replace(launch, interleaves=True),
        "tiles of grouped heads, which begin together, walk their queries once for all heads: the cache still holds them",
        "an H200, 2026-11-29: full 2 x 3000, 20 heads for 4, 1.12 of the speed, 1 x 8192, 40 for 8, 1.18, 4 x 2048, 32 for 8, "
        "1.07; 64 columns 1.02 to 1.05; causal 0.95 to 1.00, but 1 x 32768, 64 for 8, 1.03",
    ),
    Rule(
        lambda a, _: not a.split,
        lambda a, launch: replace(launch, pieces=pieces_of(a.problem, launch)),
        "lists differ in length: the longest are taken in pieces",
        LAB,
    ),
    Rule(
        lambda a, launch: not a.split and is_one_wave(a.problem, launch, a.device),
        lambda _, launch: replace(launch, helps=True, joined=False),
        "every block has one tile: those of short ones take the last steps of long ones, which spills where words are joined",
        "an H100: 0.95 of the speed with joined words",
    ),
    Rule(
        lambda a, launch: not a.split and converts(a.problem, a.form, launch, a.device),
        lambda a, launch: replace(_with_room(a, launch), converts=True),
        "most heads are done long before the last one, and there is room: a warp of this pass makes dq",
        f"{LAB}; an H200, 2026-11-30: causal 1 x 16384 x 16 x 128 gains 1.015 without, 4 x 4096 x 16 x 96 1.016",
    ),
    Rule(
        lambda a, launch: not a.split and is_narrow(a.problem, launch),
        lambda _, launch: replace(launch, narrow=True),
        "a quarter of 128 columns is padding: products and additions to dq leave it out",
        "an H200, 2026-11-30: 4 x 4096, 16 heads of 96, causal 1.069 and full 1.075 of the speed, of 80 1.050 and 1.079",
    ),
    Rule(
        lambda a, launch: (
            launch.narrow and launch.stages == 3 and not launch.converts and a.problem.band.left is a.problem.band.right is None
        ),
        lambda _, launch: replace(launch, joined=True, stages_dout=launch.stages),
        "of three quarters of 128 columns, without a mask, there is room for as many stages of dout as of queries",
        "an H200, 2026-11-30: 4 x 4096, 16 heads of 96, full 1.033 of the speed",
    ),
)


def _with_room(asked: Asked, launch: BackwardLaunch) -> BackwardLaunch:
    """The same with room for a part of dq's sum."""
    return replace(launch, stages=2, stages_dout=2) if launch.joined and asked.columns == 128 else launch
