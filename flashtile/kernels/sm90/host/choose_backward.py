"""Which tile the Hopper backward gets."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from flashtile.kernels.device.score import Form, form_of
from flashtile.kernels.sm90.host.bias_gradient import paired, stored
from flashtile.kernels.sm90.host.tile_backward import COUNTS, BackwardLaunch, backward_tiles, queries_bytes, rotates
from flashtile.kernels.sm90.host.tile_forward import GROUP_ROWS, columns_of
from flashtile.plan.device import Device
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.options import Variant

# By the wider head dim of the tile; the reasons are in docs/lab/hopper-backward.md.
BACKWARD = {
    64: BackwardLaunch(block_q=128, joined=True),
    128: BackwardLaunch(stages=3),
    256: BackwardLaunch(stages=1, stages_dout=1, parted=True),
}


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


def choose_backward(problem: AttentionProblem, device: Device, split: bool = False) -> BackwardLaunch:
    launch = BACKWARD[max(columns_of(problem.head_dim), columns_of(problem.head_dim_v))]
    form = form_of(problem)
    asks = problem.where and (form.curved or problem.blocks is None)
    busy = problem.dropout is not None or form.prescale or form.adds or asks
    if busy and launch.block_q > GROUP_ROWS:  # what each score of 128 queries needs besides spills in the loop
        launch = replace(launch, block_q=GROUP_ROWS)
    if problem.blocks is not None:
        launch = replace(launch, block_q=max(min(launch.block_q, problem.blocks.block_q), GROUP_ROWS))
    if launch.parted and columns_of(problem.head_dim_v) < columns_of(problem.head_dim):  # room for more
        launch = replace(launch, stages=2, stages_dout=2)
    if joins(problem, form, launch):
        launch = replace(launch, stages_dout=launch.stages, joined=True)
    if paired(problem) and not problem.deterministic:  # room for what a second entry's gradient is added to
        launch = replace(launch, stages=2)
    launch = replace(launch, swizzle=heads_abreast(problem, launch, split))
    if problem.deterministic and not split:
        return ordered(launch, problem, device)
    if not split:
        launch = replace(launch, pieces=pieces_of(problem, launch))
    helps = not split and is_one_wave(problem, launch, device)
    joined = launch.joined and not helps  # which spills where it helps: 0.95 of the speed
    if split or not converts(problem, form, launch, device):
        return replace(launch, helps=helps, joined=joined)
    if joined and columns_of(problem.head_dim) == 128:  # room for a part of the sum
        launch = replace(launch, stages=2, stages_dout=2)
    return replace(launch, joined=joined, converts=True)


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
        gains = simple and (p.band.right is not None or p.seqlen_k <= FEW_KEYS)
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


# Of 1 x 16384 x 16 x 128 (17 MB) four heads together take 0.96 of the time of one by one, of 1 x 32768 (34 MB) 1.20; with
# lists at 80 and 95 % sparsity there 1.16 and 1.36. head_dim 256 at 16384 (34 MB), limited by its additions: 0.98 (an H100,
# 2026-11-22).
CACHED_BYTES = 24 << 20
# The same of as many heads as go together with lists, whose tiles read other queries each: 1 x 8192 x 16 x 128 (8 MiB a head)
# at 80 % by four 0.551 ms, by two 0.541, one by one 0.558; 95 % diagonal 0.262, 0.250, 0.253 (an H100, 2026-11-27).
LISTED_BYTES = 16 << 20
# And heads of documents, whose tiles read and add to few of a head's queries: 1 x 8192 of 128 by two, four, eight 0.505, 0.480,
# 0.469 ms, causal 0.368, 0.358, 0.370; of 64 0.658, 0.657, 0.629, causal 0.507, 0.508, 0.494; of 256 by one, four, eight 0.878,
# 0.772, 0.698 (an H100, 2026-11-27).
DOCUMENTS = 8


def heads_abreast(problem: AttentionProblem, launch: BackwardLaunch, split: bool) -> int:
    """How many heads go together."""
    p, each = problem, queries_bytes(problem)
    if p.blocks is not None and any(leaf.kind.name == "document" for leaf in p.leaves):
        return DOCUMENTS if p.band.right is None else max(min(DOCUMENTS, 2 * LISTED_BYTES // max(each, 1)), 1)
    if p.blocks is not None:
        return max(min(launch.swizzle, LISTED_BYTES // max(each, 1)), 1)
    if each > CACHED_BYTES and not (p.lengths.ragged or launch.parted):
        return 1
    if p.lengths.ragged and p.band.right is not None:
        return 1  # 64 items of 1k causal 1.012 of the speed of four, full 0.93
    return 2 if rotates(p, split) else launch.swizzle


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
    """The same with as many heads at a time as fill the device: tiles end in the order in which the next ones have to begin.

    Resident blocks would wait for their turns: 6.2 ms instead of 1.6 for 4 x 4096 causal, 32 heads of 64, on an H100.
    """
    return replace(launch, swizzle=max(1, device.sm_count // ceil(problem.seqlen_k / launch.block_k)), resident=False)
