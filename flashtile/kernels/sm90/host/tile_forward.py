"""Tiles of the Hopper kernels: everything that the compiler must know, as one constexpr, and what a tile costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import e, log2

from flashtile.kernels.device.score import Form, early, form_of
from flashtile.kernels.device.tile import Items, Mask, Modifiers
from flashtile.plan.device import H100
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.dtype import DType

WARPGROUP = 128  # threads that issue one matrix instruction
GROUP_ROWS = 64  # query rows of a consumer warpgroup: the height of its matrix instruction
REGISTERS = 65536  # of an SM, 32 bits wide
WIDEST = 80.0  # scores up to 55: a row's largest exponent is at least 64 - 2 x 80 (see `scores.lowest`)
DEEPEST = 63.0  # no two scores up to 43 are further apart than 2^126
LOST = 1.3e-9  # of a product for each of its columns: the matrix unit cuts sums off towards zero (docs/lab/hopper-checks.md)


@dataclass(frozen=True)
class ForwardLaunch:
    """A tile choice of the forward: what is measured."""

    groups: int = 2  # consumer warpgroups of 64 query rows each
    block_k: int = 128
    stages: int = 2  # key and value tiles under way
    swizzle: int = 2  # heads that go together, for the L2 cache
    resident: bool = False  # as many blocks as SMs, each computing several tiles
    turns: bool = True  # warpgroups take turns: one multiplies while another exponentiates
    staged: bool = True  # out has shared memory of its own, so that the next queries arrive during the epilogue
    loader_warps: int = 4
    apart: bool = False  # a warpgroup's products do not overlap: so three have registers enough, and fill each other's gaps

    @property
    def block_q(self) -> int:
        return self.groups * GROUP_ROWS

    @property
    def num_warps(self) -> int:
        """Of the default role: what a launch calls num_warps."""
        return 4

    def spell(self) -> str:
        words = [f"{self.block_q}x{self.block_k}", f"stages={self.stages}", f"swizzle={self.swizzle}"]
        words += [w for w in ("resident", "turns", "staged", "apart") if getattr(self, w)]
        return " ".join([*words, f"loader_warps={self.loader_warps}"])


@dataclass(frozen=True)
class ForwardMask(Mask):
    """Which scores a forward's tile has, and what that says of a walk over key tiles."""

    narrow: bool  # a tile of scores may meet both bounds of the band
    unseen: bool  # some keys are seen by no query: their values may be NaN
    whole: bool  # lists, none of whose blocks is visible in part (lab/hopper-forward.md, 48)

    @property
    def asks(self) -> bool:
        """Whether hidden keys may lie anywhere, as predicates or lists say."""
        return self.predicate or self.blocks_q > 0

    @property
    def masked(self) -> bool:
        """Whether any key tile may need a mask: of a list without blocks one is visited."""
        return self.left or self.masks_first or self.blocks_q > 0

    @property
    def masks_first(self) -> bool:
        """Whether the first key tiles of a walk may need a mask."""
        return self.right or self.pads_keys or (self.asks and not self.whole)

    @property
    def above(self) -> int:
        """Which bounds the masked tiles at the end of a walk may meet: 1 the upper one, or the last key, 2 the lower one."""
        return 3 if self.left and (self.narrow or self.asks) else 1

    @property
    def below(self) -> int:
        """The same of those at its beginning."""
        return 3 if self.narrow else 2


@dataclass(frozen=True)
class ForwardModifiers(Modifiers):
    """What becomes of scores, and which tensor of it comes ahead."""

    # which of those that add is loaded a key tile ahead; -1 if none (58: a bias 16 loads at a time stalled each step)
    early: int
    brought: bool  # by the copy engine, to shared memory; otherwise into registers (60)


@dataclass(frozen=True)
class Softmax:
    """How exponentials are formed. Numbers are entries of docs/lab/hopper-forward.md."""

    bounded: bool  # scores lie between near bounds: exponents are measured from the first key tile's maximum (20)
    deep: bool  # so far from it that 2^ of some is no normal float32 number
    # from a maximum of before, until sums tell that scores have passed it by far (`retry.py`; 31: 4 to 7 % faster)
    watches: bool
    # then a warp asks in every step whether it is careful, otherwise once a tile (35, 37: 1 to 2 % where it is set)
    votes: bool
    draws_ahead: bool  # dropout's words are drawn a key tile ahead, beside exponentials, not products (45: 64 1.032, 256 1.018)
    mixes: int  # of so many exponentials one is a polynomial; 0 where none is (18: 2 to 7 % beside a soft cap)


@dataclass(frozen=True)
class ForwardSchedule:
    """In which order, and how much of, what is to be computed. Numbers are entries of docs/lab/hopper-forward.md."""

    once: bool  # one key tile is all there is: no loops, and no step that could have to be done again (38: 1 to 8 %)
    last_first: bool  # under a bound on the right the longest tiles start first
    zigzag: bool  # turns go to and fro over the resident blocks, so that long tiles and short ones meet
    skips: bool  # a warpgroup passes over key tiles that only others of its block see (3: causal 4 to 6 %; 115)
    turns: bool  # warpgroups take turns: one multiplies while another exponentiates (12: 1 to 3 %)
    # a warpgroup adds the values of one key tile before it multiplies the next one's keys (72: three have registers)
    apart: bool
    halves: bool  # of the first and last key tile no more is multiplied than the half that a warpgroup sees (85: 1 to 5 %)


@dataclass(frozen=True)
class ForwardPipeline:
    """What is under way, and who has which registers. Numbers are entries of docs/lab/hopper-forward.md."""

    stages: int  # key and value tiles under way (8)
    staged: bool  # out has shared memory of its own, so that the next queries arrive during the epilogue
    loader_warps: int  # of the producer: one takes tickets where items differ in length, or saves registers (11)
    loader_registers: int  # of each of its threads
    registers: int  # of each thread of a consumer
    singly: bool  # threads let go of keys and values each by itself: their warpgroup need not meet (`channel.Channel`; 35)


@dataclass(frozen=True)
class ForwardStored:
    """Whether q, k, v and probabilities are multiplied as e4m3, and which of q, k and v have scales that products bear, of each
    item's head.
    """

    fp8: bool
    q_head: bool
    k_head: bool
    v_head: bool

    @classmethod
    def of(cls, problem: AttentionProblem) -> ForwardStored:
        scaled = {} if problem.stored is None else problem.stored.scaled
        return cls(problem.multiplies_fp8, *(scaled.get(name) == "head" for name in "qkv"))

    @property
    def scales(self) -> bool:
        """Whether scores are scaled by it."""
        return self.q_head or self.k_head


class Narrow:
    """What device functions that the portable kernels share ask of a tile, and is never so of 16 bits on Hopper."""

    @property
    def exact(self) -> bool:
        """float32's grade."""
        return False

    @property
    def offset(self) -> bool:
        """Where a row's scores are large the portable kernels follow."""
        return False

    @property
    def wide(self) -> bool:
        """float64."""
        return False

    @property
    def finds_entropy(self) -> bool:
        """A row's state has more where it is true."""
        return False


@dataclass(frozen=True)
class ForwardTile(Narrow):
    """Compile-time part of the forward: its shape, and by subject what else the compiler must know (`device/tile.py`)."""

    groups: int  # consumer warpgroups of GROUP_ROWS queries
    block_k: int  # keys
    columns: int  # head_dim is cut into `parts` of so many columns (a power of two)
    parts: int
    columns_v: int
    parts_v: int
    head_dim: int
    head_dim_v: int
    mask: ForwardMask
    items: Items
    modifiers: ForwardModifiers
    softmax: Softmax
    schedule: ForwardSchedule
    pipeline: ForwardPipeline
    stored: ForwardStored
    statistics: str = ""  # of rows that are kept: "peak", "entropy" or both
    tells_far: bool = False  # of rows whose lse is large or missing: another backend's kernels follow

    @property
    def finds_entropy(self) -> bool:
        return "entropy" in self.statistics

    @property
    def block_q(self) -> int:
        return self.groups * GROUP_ROWS

    @property
    def rows(self) -> int:
        return GROUP_ROWS

    @property
    def regained(self) -> float:
        """What a product starts from, in parts of what it shall add: that is there whole whenever the sum is cut off.

        1.6 and 1.7 times as much is lost as of a product (`arguments.product_scale`), at 128 and 256 columns on an H100.
        """
        return 1.0 + 1.65 * LOST * self.head_dim

    @property
    def raised(self) -> float:
        """By what `arguments.product_scale` exceeds the scale."""
        return 1.0 + LOST * self.head_dim

    @property
    def pieces(self) -> int:
        """Accumulators: of three parts the first two have one (tile widths are powers of two)."""
        return 2 if self.parts_v > 1 else 1

    @property
    def may_start_empty(self) -> bool:
        """Whether a row may have seen nothing before a tile without a mask (`work.walk`): a modifier may add -inf."""
        hides = self.mask.asks and not self.mask.whole
        return hides or self.modifiers.prescale or self.modifiers.adds > 0

    @property
    def asks_narrow(self) -> bool:
        """Whether predicates are asked for 64 keys at a time, where that was measured to gain (docs/lab/hopper-forward.md)."""
        return self.mask.right or (self.mask.blocks_q > 0 and self.columns_v == 128)


def columns_of(head_dim: int) -> int:
    """Columns of a tile: a power of two, 64 at least; what lies beyond head_dim is zero."""
    return max(64, 1 << (head_dim - 1).bit_length())


def cut(head_dim: int) -> tuple[int, int]:
    """(columns, parts) of a head dim. Tile widths are powers of two: 96 and 192 become thirds, others 64, 128 or 256."""
    if 128 < head_dim <= 192:
        return 64, 3
    if 64 < head_dim <= 96:
        return 32, 3
    return columns_of(head_dim), 1


def key_parts(p: AttentionProblem) -> tuple[int, int]:
    """`cut` of head_dim; of bytes one part, whatever its width."""
    return (columns_of(p.head_dim), 1) if p.multiplies_fp8 else cut(p.head_dim)


def value_parts(p: AttentionProblem) -> tuple[int, int]:
    """`cut` of head_dim_v; of bytes two parts, of 128 columns at most, whose products have room beside all accumulators.

    Of 64 columns a part, both products are under way at once, and the first is added up meanwhile.
    """
    columns = columns_of(p.head_dim_v)
    return (max(columns // 2, 64), min(columns // 64, 2)) if p.multiplies_fp8 else cut(p.head_dim_v)


def forward_form(p: AttentionProblem) -> Form:
    """`form_of`; but sums of e4m3 are cut off, and nothing is added to scores there."""
    form = form_of(p)
    return Form(prescale=True) if p.multiplies_fp8 and form.adds else form


def make_forward_tile(problem: AttentionProblem, launch: ForwardLaunch, form: Form) -> ForwardTile:
    """The constexpr of one kernel call. Under a causal bound the longest tiles start first."""
    p = problem
    band = p.band
    columns, parts = key_parts(p)
    columns_v, parts_v = value_parts(p)
    once = sees_once(p, launch)
    watched = watches(p, form) and not once
    return ForwardTile(
        groups=launch.groups,
        block_k=launch.block_k,
        columns=columns,
        parts=parts,
        columns_v=columns_v,
        parts_v=parts_v,
        head_dim=p.head_dim,
        head_dim_v=p.head_dim_v,
        mask=ForwardMask.of(
            p,
            p.lengths.ragged or p.seqlen_k % launch.block_k != 0,
            narrow=band.left is not None and band.left + min(band.right or 0, 0) < launch.block_q + launch.block_k,
            unseen=has_unseen_keys(p) and not p.multiplies_fp8,  # `values.py` leaves them out
            whole=has_whole_blocks(p),
        ),
        items=Items.of(p),
        modifiers=ForwardModifiers.of(p, form, early=loads_ahead(p, launch, form), brought=brought(p, launch, form)),
        softmax=Softmax(
            bounded=bounded(p, form),
            deep=not bounded(p, form, DEEPEST),
            watches=watched,
            votes=watched and (p.dropout is not None or columns * parts == 64),  # measured: elsewhere slower
            draws_ahead=p.dropout is not None and watched and parts == 1 and columns != 128,  # there products hide more
            mixes=mixes(p, form),
        ),
        schedule=ForwardSchedule(
            once=once,
            last_first=band.right is not None,
            zigzag=launch.resident and (band.right is not None or p.blocks is not None),
            skips=skips(p, launch) and not once,
            turns=launch.turns and launch.groups > 1,
            apart=launch.apart,
            halves=sees_halves(p, launch, form),
        ),
        pipeline=ForwardPipeline(
            stages=launch.stages,
            staged=has_out_tiles(p, launch),
            loader_warps=1 if p.lengths.ragged else launch.loader_warps,  # one warp takes a ticket
            loader_registers=24,
            registers=consumer_registers(launch),
            singly=columns == 32 or (columns == 128 and bounded(p, form) and band.right is None),  # measured to gain there
        ),
        stored=ForwardStored.of(p),
    )


def make_watched_tile(problem: AttentionProblem, launch: ForwardLaunch, form: Form, statistics: str) -> ForwardTile:
    """That of a forward that keeps statistics of rows: it looks for every maximum, whatever would do without.

    But entropies of 128 columns alone need none. An H200, 1 x 16384, 16 heads of 128, full and causal: 1.12 and 1.08 of the
    forward, 1.18 and 1.15 with maxima; of 64 columns 1.20 of 1.21 (docs/lab/tuning.md, 45).
    """
    made = replace(make_forward_tile(problem, launch, form), statistics=statistics)
    if made.softmax.watches and made.columns * made.parts == 128 and statistics == "entropy":
        return made
    softmax = replace(made.softmax, bounded=False, deep=True, watches=False, votes=False, draws_ahead=False, mixes=0)
    pipeline = replace(made.pipeline, singly=made.columns == 32)
    return replace(made, softmax=softmax, pipeline=pipeline)


def make_queries_tile(problem: AttentionProblem, launch: ForwardLaunch, form: Form) -> ForwardTile:
    """That of a pass over queries that makes dq: probabilities come from lse, and dq takes the place of its queries."""
    made = make_forward_tile(problem, launch, form)
    return replace(
        made,
        modifiers=replace(made.modifiers, sink=False, early=-1, brought=False),
        softmax=replace(made.softmax, bounded=False, watches=False, votes=False, draws_ahead=False, mixes=0),
        schedule=replace(made.schedule, once=False, halves=False),
        pipeline=replace(made.pipeline, staged=False, singly=False),
    )


def bounded(problem: AttentionProblem, form: Form, widest: float = WIDEST) -> bool:
    """T.softmax.bounded: where a last curve has bounds, and bfloat16 has exponents enough for whatever lies between them."""
    curve = problem.score[-1].kind.curve if form.curved else None
    if curve is None or curve.largest is None or problem.dtype is not DType.BF16 or problem.multiplies_fp8:
        return False
    return curve.largest(problem.score[-1].scalars) * log2(e) <= widest


def mixes(problem: AttentionProblem, form: Form) -> int:
    """T.softmax.mixes: where the slow unit is the bottleneck, which of 128 columns without maxima and bounds it hardly is."""
    p, (columns, parts) = problem, cut(problem.head_dim)
    if not form.curved or p.returns_lse or columns * parts > 128 or p.multiplies_fp8:
        return 0
    return 8 if columns * parts == 128 and p.band.right is None and bounded(p, form) else 4


def sees_halves(problem: AttentionProblem, launch: ForwardLaunch, form: Form) -> bool:
    """T.schedule.halves: where the mask is a band, nothing is added or drawn for every score of a tile, and walks are short.

    Of 16k keys under a causal mask, walks of 64 tiles on average, and of 192 columns it gains nothing
    (docs/lab/hopper-forward.md).
    """
    p, band = problem, problem.band
    plain = not (form.prescale or form.adds or p.where or p.blocks is not None or p.dropout is not None or launch.apart)
    short = band.left is not None or p.lengths.ragged or p.seqlen_k <= SHORT
    masked = band.left is not None or band.right is not None or p.lengths.ragged or p.seqlen_k % launch.block_k > 0
    columns, parts = cut(p.head_dim)
    return plain and short and masked and columns * parts <= 128 and launch.block_k == 2 * GROUP_ROWS


SHORT = 4096  # keys


def skips(problem: AttentionProblem, launch: ForwardLaunch) -> bool:
    """T.schedule.skips: key tiles that only other warpgroups' queries see or, where items end within a block, all of them.

    The latter by two warpgroups alone. An H100, 2026-11-27, 64 items of 1k: head_dim 128 1.012 and, causal, 1.006 of the speed
    (with one head together instead of four where full), 64 by three warpgroups 0.998.
    """
    p = problem
    banded = p.band.left is not None or p.band.right is not None
    ends = p.lengths.ragged and launch.groups == 2
    if p.multiplies_fp8 and p.lengths.ragged and p.band.left is not None and max(p.head_dim, p.head_dim_v) > 128:
        return False  # the accumulators leave no registers for it: 60 spills a key tile (compiled for sm90)
    return p.blocks is None and (ends or (banded and launch.block_q > launch.block_k))


def has_whole_blocks(problem: AttentionProblem) -> bool:
    """T.mask.whole: lists count blocks at a ragged end, and those that a band or a predicate cuts, as visible in part."""
    p = problem
    if p.blocks is None or p.where or p.band.left is not None or p.band.right is not None:
        return False
    return p.seqlen_q % p.blocks.block_q == 0 and p.seqlen_k % p.blocks.block_k == 0


def sees_once(problem: AttentionProblem, launch: ForwardLaunch) -> bool:
    """T.schedule.once. Of items of unequal lengths none is known here, and lists are walked through whatever they name."""
    return not problem.lengths.ragged and problem.blocks is None and problem.seqlen_k <= launch.block_k


def watches(problem: AttentionProblem, form: Form) -> bool:
    """T.softmax.watches: not beside curves, nor where a modifier may well rise along the keys, as ALiBi does towards the query.

    A bias of 64 columns takes the registers for it.
    """
    if problem.multiplies_fp8:  # e4m3 has no room for probabilities above 1
        return False
    columns, parts = cut(problem.head_dim)
    biased = form.adds == 1 and early(problem, form) is not None and columns * parts > 64
    return (form.adds == 0 or biased) and not (form.prescale or form.curved)


def copied(problem: AttentionProblem, form: Form) -> int:
    """Which modifier's tensor the copy engine can bring, 16 bits for every score; -1 if none.

    Not where items differ in length: beyond their queries it may hold NaN.
    """
    p, which = problem, early(problem, form)
    if which is None or p.lengths.ragged or p.seqlen_k % COPIED_KEYS or 1 in p.score[which].tensors[0].shape[2:]:
        return -1
    return which


COPIED_KEYS = 8  # the copy engine wants strides of 16 bytes


def brought(problem: AttentionProblem, launch: ForwardLaunch, form: Form) -> bool:
    """T.modifiers.brought: where shared memory has room for a tile of scores."""
    room = H100.smem_bytes - tile_bytes(problem, launch)
    return copied(problem, form) >= 0 and room >= bias_bytes(launch)


def loads_ahead(problem: AttentionProblem, launch: ForwardLaunch, form: Form) -> int:
    """T.modifiers.early. What is on its way takes up to 32 registers, which none of three warpgroups has: 78 spills a key
    tile.
    """
    which = early(problem, form) if launch.groups == 2 or brought(problem, launch, form) else None
    return -1 if which is None else which


def has_unseen_keys(problem: AttentionProblem) -> bool:
    """Whether some key may be hidden from every query."""
    p, band = problem, problem.band
    if p.lengths.ragged:
        return True
    first = 0 if band.left is None else p.shift - band.left
    end = p.seqlen_k if band.right is None else p.seqlen_q - 1 + p.shift + band.right + 1
    return first > 0 or end < p.seqlen_k


def consumer_registers(launch: ForwardLaunch) -> int:
    """Registers per consumer thread: what the loader leaves, a multiple of 8 (setmaxnreg), at most 240.

    The hardware hands them out by whole warpgroups; a loader of one warp counts as one of four.
    """
    loader = 24 * WARPGROUP
    return min((REGISTERS - loader) // (launch.groups * WARPGROUP) // 8 * 8, 240)


def has_out_tiles(problem: AttentionProblem, launch: ForwardLaunch) -> bool:
    """T.pipeline.staged: where a launch asks for it, or the queries' tiles are too small for out."""
    (columns, parts), (columns_v, parts_v) = key_parts(problem), value_parts(problem)
    return launch.staged or columns_v * parts_v > columns * parts


def tile_bytes(problem: AttentionProblem, launch: ForwardLaunch) -> int:
    """Shared memory of queries and out once, keys and values per stage; barriers and roles take under 1 KiB."""
    d, dv = (columns * parts for columns, parts in (key_parts(problem), value_parts(problem)))
    size = 1 if problem.multiplies_fp8 else problem.dtype.size_bytes
    out = launch.block_q * dv * problem.dtype.size_bytes if has_out_tiles(problem, launch) else 0
    return (launch.block_q * d + launch.stages * launch.block_k * (d + dv)) * size + out + 1024


def bias_bytes(launch: ForwardLaunch) -> int:
    """Shared memory of what the copy engine brings for a tile of scores."""
    return launch.block_q * launch.block_k * 2


def forward_shared_bytes(problem: AttentionProblem, launch: ForwardLaunch) -> int:
    """Shared memory of a tile."""
    form, bias = forward_form(problem), 0
    if brought(problem, launch, form):
        bias = bias_bytes(launch)
    elif loads_ahead(problem, launch, form) >= 0:
        bias = 2048 * launch.groups  # what `scores.spread` goes through
    return tile_bytes(problem, launch) + bias
