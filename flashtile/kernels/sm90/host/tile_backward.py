"""Tiles of the Hopper backward: what the compiler must know, as one constexpr."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashtile.kernels.device.score import Form
from flashtile.kernels.device.tile import Items, Mask, Modifiers
from flashtile.kernels.device.varlen import most_tiles, padded_total
from flashtile.kernels.sm90.host.bias_gradient import paired, stored
from flashtile.kernels.sm90.host.tile_forward import GROUP_ROWS, Narrow, columns_of, copied, has_unseen_keys
from flashtile.problem.attention import AttentionProblem

WAVE = 128  # about a tile for every SM, as the portable kernels have it, of as many query heads
COUNTS = 256  # four of tickets and units, and two flags for each long tile that is helped with, as `helping` has them
SUMS = 196  # of pieces' dk and dv, of all heads, for which there is room
PADDED_ROWS = 128  # rows and dq's sum are padded to this many queries, as `grid.ROWS` says


@dataclass(frozen=True)
class BackwardLaunch:
    """A tile choice of the backward: what is measured."""

    block_q: int = 64
    stages: int = 2  # tiles of queries under way
    stages_dout: int = 2
    parted: bool = False  # dk and dq in one pass over keys, dv in another: registers have no room for dk and dv of wide heads
    swizzle: int = 4  # heads that go together, for the L2 cache
    resident: bool = True  # as many blocks as SMs, which take one tile after another
    helps: bool = False  # blocks of short tiles take the last steps of long ones (`helping`)
    pieces: int = 1  # tickets of a long list (`helping`)
    joined: bool = False  # fewer words between roles: queries and their dout, of as many stages, share theirs
    converts: bool = False  # a warp makes dq of the sum of heads that are done; otherwise a pass behind it does
    interleaves: bool = False  # a tile of grouped heads walks queries once, all heads of its group at each place
    narrow: bool = False  # of 128 columns, products leave out the last quarter where no head dim reaches it
    ungrouped: bool = False  # each query head has tiles of its own; dk and dv of heads that share keys are summed behind

    @property
    def block_k(self) -> int:
        return 2 * GROUP_ROWS

    @property
    def num_warps(self) -> int:
        """Of the default role: what a launch calls num_warps."""
        return 4

    def spell(self) -> str:
        words = [f"{self.block_q}x{self.block_k}", f"stages={self.stages},{self.stages_dout}", f"swizzle={self.swizzle}"]
        words += [f"resident={self.resident}", *[f"pieces={self.pieces}"] * (self.pieces > 1)]
        words += [
            w for w in ("parted", "helps", "joined", "converts", "interleaves", "narrow", "ungrouped") if getattr(self, w)
        ]
        return " ".join(words)


@dataclass(frozen=True)
class BackwardMask(Mask):
    """Which scores a backward's tile has."""

    blanks: bool  # some query or key may see nothing: what lies there may be NaN

    @property
    def any(self) -> bool:
        """Whether scores of a tile that is visited may be hidden."""
        return self.left or self.right or self.pads_keys or self.predicate

    @property
    def gaps(self) -> bool:
        """Whether there are scores whose tile nobody visits."""
        return self.left or self.right or self.blocks_q > 0


@dataclass(frozen=True)
class BackwardModifiers(Modifiers):
    """What becomes of scores, and where the pass adds what. Where `prescale`, probabilities are the portable kernels'."""

    early: int  # which of those that add the copy engine brings to shared memory; -1 if none
    late: bool  # the others add to products that are done, not to what these start from
    folds: bool  # the matrix unit adds delta (docs/lab/hopper-backward.md, 18 and 19)
    folds_level: bool  # and level; a curve is taken of the scores without it
    spares: bool  # a key that has all the weight of a row gets no gradient by its score: see `spared`


@dataclass(frozen=True)
class Outputs:
    """What a pass over keys makes."""

    dk: bool = True
    dv: bool = True
    dq: bool = True  # with dk; otherwise a pass over queries makes it
    ds: bool = False  # the gradient of a tensor that adds to every score is stored: see `stored`
    pairs_ds: bool = False  # two batch entries share it: the second's is added to the first's, a group of heads later (11, 12)
    wide_keys: bool = False  # dk and dv are stored in float32, straight from registers

    @property
    def parted(self) -> bool:
        """Whether dk and dv are made by a pass over keys each."""
        return not (self.dk and self.dv)

    @property
    def sums_dq(self) -> bool:
        """Whether shares of dq are added up."""
        return self.dk and self.dq

    @property
    def copies_dq(self) -> bool:
        """Whether the copy engine adds to dq's sum: where shared memory has room for it (15)."""
        return self.dq and not self.parted


@dataclass(frozen=True)
class BackwardSchedule:
    """In which order blocks take tiles and steps. Numbers are entries of docs/lab/hopper-backward.md."""

    deterministic: bool  # shares of dq are added in one order ("Deterministic")
    swizzle: int  # heads that go together, for the L2 cache
    last_first: bool  # the last key tile starts first: see `BackwardWalk.turn` and `split_tiles`; otherwise the longest does
    resident: bool  # as many blocks as SMs, which take one tile after another
    helps: bool  # blocks of short tiles take the last steps of long ones: see `split_tiles` ("One wave")
    pieces: int  # in which long tiles are taken, where any are: see `split_tiles` ("Long lists in pieces")
    wave: int  # tiles that go together at least, as the portable kernels have it; 0: no more than swizzle says
    rotates: bool  # a key tile begins with queries of its own, and ends with those before them: see `rotates`
    interleaves: bool  # of grouped heads, no lists, in any order: all heads at each place (40; `producer.load_group`)


@dataclass(frozen=True)
class BackwardPipeline:
    """What is under way. Numbers are entries of docs/lab/hopper-backward.md."""

    stages: int  # of queries
    stages_dout: int
    joined: bool  # dout has no channel of its own, and other words stand one behind another (4, 20: 1 to 4 % at 64 columns)
    converts: bool  # dq is made of the sum by a warp of this pass: see `dq_convert` ("dq in the pass that adds")


@dataclass(frozen=True)
class BackwardTile(Narrow):
    """Compile-time part of the passes over keys: their shape, and by subject what else the compiler must know."""

    block_q: int
    head_dim: int
    head_dim_v: int
    columns: int  # head_dim, padded to what a tile can have
    columns_v: int
    group: int  # query heads per key/value head, of whose keys a tile makes the whole gradients
    shares: int  # query heads per key/value head, of whose keys each has a tile of its own ("ungrouped"); then group is 1
    narrow: bool  # products of 128 columns leave out a quarter that is padding, as those of parted ones do (43)
    mask: BackwardMask
    items: Items
    modifiers: BackwardModifiers
    outputs: Outputs
    schedule: BackwardSchedule
    pipeline: BackwardPipeline

    @property
    def block_k(self) -> int:
        return 2 * GROUP_ROWS

    @property
    def singly(self) -> bool:
        """Whether consumers' threads arrive at words between roles each by itself (`channel.Channel`): where it gained."""
        return self.columns == 64 and not self.items.ragged

    @property
    def divided(self) -> int:
        """How many tiles, of all heads, are taken in pieces at most because their lists are long."""
        pieces = self.schedule.pieces
        return min(SUMS // (pieces - 1), (COUNTS - 4) // 2) if pieces > 1 and self.mask.blocks_q > 0 else 0

    @property
    def makes(self) -> set[str]:
        """The gradients, by the names of their tensors."""
        return {*("k" if self.outputs.dk else ""), *("v" if self.outputs.dv else ""), *("q" if self.outputs.sums_dq else "")}

    @property
    def parts(self) -> tuple[BackwardTile, ...]:
        """The passes over keys. That of dv also clears the sum to which the other adds dq."""
        if not self.outputs.parted:
            return (self,)
        outputs, pipeline = replace(self.outputs, dk=False, dv=True), replace(self.pipeline, stages=2, stages_dout=2)
        return replace(self, outputs=outputs, pipeline=pipeline), self

    @property
    def splits(self) -> bool:
        """Whether steps that need no mask are a loop of their own, behind those that do: it hardly pays elsewhere."""
        mask, modifiers = self.mask, self.modifiers
        others = mask.left or mask.predicate or modifiers.prescale or modifiers.curved or modifiers.dropout
        return self.items.ragged and self.group == 1 and not others

    @property
    def tells(self) -> bool:
        """Whether the loader tells the other roles tiles and steps: where they would lack registers to find them."""
        return (
            self.group > 1
            or self.items.ragged
            or self.mask.predicate
            or self.mask.blocks_q > 0
            or self.modifiers.count > 0
            or self.modifiers.dropout
        )

    @property
    def adds_first(self) -> bool:
        """Whether products of keys and queries start from what modifiers add."""
        return self.modifiers.early >= 0 or (self.modifiers.adds > 0 and not (self.modifiers.prescale or self.modifiers.late))

    @property
    def begins_early(self) -> bool:
        """Whether keys, values and queries come while the pass before ends, which waited for all that made them.

        Beside curves of 128 queries consumers would spill more (docs/lab/hopper-backward.md).
        """
        return not (self.items.ragged or self.mask.blocks_q > 0 or (self.modifiers.curved and self.block_q > GROUP_ROWS))

    @property
    def takes_late(self) -> bool:
        """Whether a block takes its next ticket where a tile ends, so that no tile waits behind a long one.

        Where tiles are equally long, or consumers would spill more (docs/lab/hopper-backward.md), it takes it where one begins.
        """
        spills = self.mask.predicate or (self.items.ragged and self.block_q > GROUP_ROWS)
        return (self.mask.gaps or self.items.ragged) and not spills

    @property
    def told_steps(self) -> int:
        """How many steps the loader's words are kept, where it tells: see `visit.tell_step`."""
        return 1 << (self.pipeline.stages + 1).bit_length()

    @property
    def douts_first(self) -> bool:
        """Whether a step begins with dout, and lets go of its queries as soon as it can: there is room for those of one.

        Not where modifiers add to what products of queries start from, which nothing may write to beside another product.
        """
        return self.outputs.dk and self.pipeline.stages == 1 and not self.adds_first

    @property
    def reports(self) -> bool:
        """Whether consumers, who add to dq's sum themselves, tell the next block that they have."""
        return self.schedule.deterministic and self.outputs.sums_dq and not self.outputs.copies_dq

    @property
    def sways(self) -> bool:
        """Whether every other wave of tiles walks its queries from the last one on (docs/lab/hopper-backward.md)."""
        return self.outputs.parted and self.mask.right and not (self.mask.left or self.tells or self.schedule.deterministic)

    @property
    def helpers(self) -> int:
        """Roles of one warp where the copy engine adds: who loads, who add, and who stores ds or makes dq."""
        return 3 + (self.outputs.ds or self.pipeline.converts)

    @property
    def clears(self) -> bool:
        """Whether the sum of dq is cleared before: the copy engine stores the first share of a part instead of adding it."""
        return self.outputs.parted

    @property
    def locked(self) -> bool:
        """Whether every part of dq's sum has a lock: see `order`."""
        return self.outputs.dq and (self.schedule.deterministic or not self.clears)

    @property
    def columns_dq(self) -> int:
        """Columns of a part of dq: each consumer makes half of the columns or of the queries, from all keys."""
        return self.columns // 2 if self.block_q == 64 else self.columns

    @property
    def columns_added(self) -> int:
        """Columns of dq that are added to the sum at a time, and read of it."""
        return self.columns_dq // 2 if self.cut and self.outputs.copies_dq else self.columns_dq

    @property
    def cut(self) -> bool:
        """Whether a quarter of the columns of queries and keys is padding, which products leave out."""
        return (self.outputs.parted or self.narrow) and 4 * self.head_dim <= 3 * self.columns

    @property
    def cut_v(self) -> bool:
        """The same of values; where T.outputs.parted for products of their rows alone."""
        return (self.outputs.parted or self.narrow) and 4 * self.head_dim_v <= 3 * self.columns_v

    @property
    def pieces_v(self) -> bool:
        """Whether dv, too, is in two pieces."""
        return self.cut_v and not self.outputs.parted

    @property
    def columns_stored(self) -> int:
        """Columns of dk that are stored at a time."""
        if self.outputs.wide_keys:
            return 32  # the copy engine's row of float32; it stores none
        return self.columns // (4 if self.cut else 2 if self.outputs.parted else 1)

    @property
    def columns_v_stored(self) -> int:
        """Columns of dv that are stored at a time."""
        if self.outputs.wide_keys:
            return 32
        return self.columns_v // (4 if self.pieces_v else 2 if self.outputs.parted else 1)

    @property
    def counts(self) -> int:
        """Counts that are cleared before: of tickets and units, and what helpers report."""
        return COUNTS if self.schedule.pieces > 1 else 4 if self.pipeline.converts else 2


def rotates(problem: AttentionProblem, split: bool) -> bool:
    """T.schedule.rotates: no two tiles of a head add to one part of dq's sum at a time, so that fewer heads have to go
    together.

    Of plain problems without a band, under which tiles begin apart anyway. An H100, 2026-11-27, head_dim 128, the speed of two
    heads (four, eight) over that of four whose tiles all begin with the first query: 1 x 16384 1.012 (1.002, 0.973), 64 items
    of 1k 1.015 (1.001, 0.987), 4 x 4096 1.000, 16 x 1024 1.001. 64 and 256 columns, by four, 0.996 and 1.000: not there.
    """
    p = problem
    apart = p.band.left is not None or p.band.right is not None or p.blocks is not None or p.deterministic
    plain = not (p.score or p.where or p.group > 1 or p.dropout is not None or p.sink is not None)
    return plain and not (split or apart) and max(columns_of(p.head_dim), columns_of(p.head_dim_v)) == 128


ABREAST = 132 * 64  # keys of the tiles that are under way at a time


def queries_bytes(problem: AttentionProblem) -> int:
    """What the key tiles of a head read and add to: q, dout and the sum of dq.

    Of a window over grouped heads what the tiles do that are under way, since later ones do not come back to it. An H200,
    2026-11-30, 32 heads for 8, 1,024 keys: as if of a whole head 1 x 65536 6.92 ms, so 5.27; 1 x 131072 14.21, 10.56.
    """
    p, seen = problem, problem.seqlen_q
    if p.group > 1 and p.blocks is None and p.band.left is not None and p.band.right is not None:
        seen = min(seen, p.band.left + p.band.right + ABREAST)
    return seen * p.group * (6 * columns_of(p.head_dim) + 2 * columns_of(p.head_dim_v))


def make_backward_tile(problem: AttentionProblem, launch: BackwardLaunch, form: Form, split: bool = False) -> BackwardTile:
    p = tiled(problem, launch)
    deterministic = p.deterministic and not split  # without shares of dq every order is fixed
    folds = not (form.prescale or p.dropout is not None or launch.parted)
    brought = -1 if form.prescale or form.curved or launch.parted else copied(p, form)
    return BackwardTile(
        block_q=launch.block_q,
        head_dim=p.head_dim,
        head_dim_v=p.head_dim_v,
        columns=columns_of(p.head_dim),
        columns_v=columns_of(p.head_dim_v),
        group=p.group,
        shares=problem.group // p.group,
        narrow=launch.narrow and narrows(p, launch),
        mask=BackwardMask.of(p, p.lengths.ragged or p.seqlen_k % launch.block_k != 0, blanks=unseen(p)),
        items=Items.of(p),
        modifiers=BackwardModifiers.of(
            p,
            form,
            early=brought,
            late=loads(p, form, brought),
            folds=folds,
            folds_level=folds and not form.curved,
            spares=p.dropout is not None,
        ),
        outputs=Outputs(dv=not launch.parted, dq=not split, ds=stored(p) is not None, pairs_ds=paired(p) and launch.resident),
        schedule=BackwardSchedule(
            deterministic=deterministic,
            swizzle=launch.swizzle,
            last_first=launch.helps or (deterministic and p.band.right is not None and p.blocks is None),
            resident=launch.resident,
            helps=launch.helps,
            pieces=2 if launch.helps else launch.pieces,
            wave=0 if deterministic else WAVE // p.group,
            rotates=rotates(p, split),
            interleaves=launch.interleaves and p.group > 1 and not paired(p),
        ),
        pipeline=BackwardPipeline(
            stages=launch.stages,
            stages_dout=launch.stages_dout,
            joined=launch.joined and launch.stages == launch.stages_dout,
            converts=launch.converts,
        ),
    )


def narrows(problem: AttentionProblem, launch: BackwardLaunch) -> bool:
    """Whether a tile may be `narrow`: of 128 columns, whose sums nobody gives away in pieces."""
    both = columns_of(problem.head_dim), columns_of(problem.head_dim_v)
    return both == (128, 128) and not launch.helps and launch.pieces == 1


def loads(problem: AttentionProblem, form: Form, brought: int) -> bool:
    """T.modifiers.late: whether one that adds, other than T.modifiers.early, loads for every score: it does so while products
    are under way.
    """
    return any(
        captured.index is not None or (captured.broadcast and 1 not in tensor.shape[2:])
        for i, spec in enumerate(problem.score[: form.adds])
        for captured, tensor in zip(spec.kind.captured, spec.tensors, strict=True)
        if i != brought
    )


def backward_tiles(problem: AttentionProblem, launch: BackwardLaunch) -> int:
    """Key tiles of all heads; where items differ in length the most that there can be, with lists those of whole blocks."""
    p = tiled(problem, launch)
    if p.blocks is not None:
        return p.blocks.columns(p.seqlen_k) * (p.blocks.block_k // launch.block_k) * p.batch * p.heads_kv
    return most_tiles(p.span_k, p.batch, launch.block_k, p.lengths.varlen) * p.heads_kv


def tiled(problem: AttentionProblem, launch: BackwardLaunch) -> AttentionProblem:
    """The problem as tiles see it: with keys of every query head, where these have tiles of their own."""
    return replace(problem, heads_kv=problem.heads_q) if launch.ungrouped else problem


def padded_queries(problem: AttentionProblem) -> int:
    """Queries of a head in the buffers that pad each item to PADDED_ROWS."""
    return padded_total(problem.span_q, problem.batch, problem.lengths.varlen)


def unseen(problem: AttentionProblem) -> bool:
    """Whether some query or key may see nothing: what lies there may be NaN, and the products would spread it."""
    p = problem
    blind = (p.band.right is not None and p.shift + p.band.right < 0) or (p.band.left is not None and p.band.left < 0)
    return has_unseen_keys(p) or blind or bool(p.where)
