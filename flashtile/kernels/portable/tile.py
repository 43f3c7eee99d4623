"""Tile: everything that the compiler must know, as one constexpr."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flashtile.kernels.device.score import Form, adds_elements, captures, form_of, sums_per_head
from flashtile.kernels.device.small import is_small
from flashtile.kernels.device.tile import Items, Mask, Modifiers
from flashtile.plan.device import Device
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.dtype import DType
from flashtile.triton_glue.language import INTERPRETED

# pairs: gradients of broadcast tensors; behind it the passes beyond first derivatives (`directed.py`)
Pass = Literal["forward", "keys", "queries", "fused", "pairs", "tangent", "second_queries", "second_keys"]
OVER_KEYS = frozenset({"keys", "fused", "second_keys"})  # whose programs have a tile of keys
DIRECTED = frozenset({"tangent", "second_queries", "second_keys"})
Products = Literal["unit", "cut", "short", "aligned", "float64"]
Correction = Literal["", "after", "before"]

# How a precision is multiplied. Float32-grade error on matrix units takes three tf32 products or six bf16 ones. The six
# keep 24 bits instead of 22, exist on AMD too, and their operands need no transposition through registers: on an H100
# (6 x 4096, 12 heads of 64, causal) keys 4.9 ms instead of 6.0, queries 3.3 instead of 3.6, fused 7.2 instead of 9.5.
# The interpreter multiplies exactly, whatever it is told, and knows the tf32 names only.
PRODUCTS = {"tf32x3": "tf32x3" if INTERPRETED else "bf16x6", "tf32": "tf32", "ieee": "ieee"}
PRODUCTS["fp8"] = PRODUCTS["tf32x3"]  # which says nothing of operands that are not fp32


WAVE = 256  # about as many tiles as a GPU computes at a time: if fewer go together, long ones of the last heads begin late


@dataclass(frozen=True)
class Launch:
    """A tile choice: what `tune` measures and the tuned files hold.

    held: how many of the two resident operands of a backward pass wait in registers instead of shared memory (`hold`).
    upright: a second derivative's pass over keys has scores of queries by keys, so that a thread holds few rows' fields.
    """

    block_q: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 2
    swizzle: int = 1
    products: Products = "unit"  # how an fp32 problem multiplies; `choose` decides
    held: int = 0
    upright: bool = False

    def spell(self) -> str:
        tail = (f" {self.products}" if self.products != "unit" else "") + (f" held={self.held}" if self.held else "")
        tail += " upright" if self.upright else ""
        return f"{self.block_q}x{self.block_k} warps={self.num_warps} stages={self.num_stages} swizzle={self.swizzle}{tail}"


@dataclass(frozen=True)
class Schedule:
    """In which order programs take tiles."""

    swizzle: int  # heads that go together, for the L2 cache
    last_first: bool  # under a bound on the right the longest tiles start first
    wave: int  # tiles that go together at least


@dataclass(frozen=True)
class Tile:
    """Compile-time part of a kernel call: its shape, and by subject what else the compiler must know (`device/tile.py`)."""

    block_q: int
    block_k: int
    head_dim: int
    head_dim_v: int
    columns: int  # head_dim, padded to what a tile can have
    columns_v: int
    mask: Mask
    items: Items
    modifiers: Modifiers
    schedule: Schedule
    grouped: bool  # several query heads share a key/value head
    exact: bool  # float32's grade: the backward gets each row's maximum and sum instead of lse
    precision: str  # input_precision of tl.dot
    score_precision: str  # that of q k^T
    products: str  # as in Launch
    offset: bool  # a backward pass below it, where the problem `mends_lse`: it gets lse, and what its rounding lacks
    narrow: bool  # in float64, with scores that depend on loads of less than 32 bits
    makes_lse: bool
    lone: bool  # a backward pass where no query sees more than one key and there is no sink, unless delta is mended
    adds_dq: bool  # the pass over keys adds its share of dq
    correction: Correction = ""  # of delta, by the pass over queries
    lonely: bool = False  # a pass whose delta was corrected, below float32's grade, and whose queries may be left one key
    held: int = 0  # as in Launch
    upright: bool = False  # as in Launch
    slots: int = 0  # places for per-head sums of captured gradients, a power of two or 0
    moves: str = ""  # of "qkv" those with a tangent, "b" where a captured tensor has one; in a directed pass
    arrives: str = ""  # of "g" dout and "t" its tangent those that there are; in one of second derivatives
    halves_rounding: bool = False  # a directed pass of a small problem below float32's grade: two parts of what it rounds
    stored: str = ""  # what k and v are, as `problem.stored.Stored` has it, "" for numbers of q's dtype; a forward alone
    scaled: str = ""  # of "qkv" those with a scale of each head, of "QKV" those with one of each row
    native: bool = False  # Triton makes fp16 of what is stored well on this GPU
    fp8: bool = False  # q is stored too, and all are multiplied so
    centers: bool = False  # a forward that takes what values average to off them, and adds it to out (`centers_values`)
    statistics: str = ""  # a forward that keeps rows' "peak", "entropy" or both
    keeps_rest: bool = False  # of dk and dv what rounding takes off them is added up too (`sums_are_long`)
    repairs: bool = False  # a forward of rows whose lse, of another forward, is large or missing, and of no others (`repair`)

    @property
    def q_head(self) -> bool:
        return "q" in self.scaled

    @property
    def k_head(self) -> bool:
        return "k" in self.scaled

    @property
    def v_head(self) -> bool:
        return "v" in self.scaled

    @property
    def q_rows(self) -> bool:
        return "Q" in self.scaled

    @property
    def k_rows(self) -> bool:
        return "K" in self.scaled

    @property
    def v_rows(self) -> bool:
        return "V" in self.scaled

    @property
    def moves_q(self) -> bool:
        return "q" in self.moves

    @property
    def moves_k(self) -> bool:
        return "k" in self.moves

    @property
    def moves_v(self) -> bool:
        return "v" in self.moves

    @property
    def bends(self) -> bool:
        """Scores have tangents."""
        return self.moves not in ("", "v")

    @property
    def finds_entropy(self) -> bool:
        return "entropy" in self.statistics

    @property
    def may_be_lone(self) -> bool:
        """A row with one key alone is looked out for: its key's tangent and the row's are sums of another order."""
        return not self.modifiers.sink

    @property
    def has_dout(self) -> bool:
        return "g" in self.arrives

    @property
    def has_tdout(self) -> bool:
        return "t" in self.arrives

    @property
    def wide(self) -> bool:
        """Everything is computed in float64."""
        return self.products == "float64"

    @property
    def corrects(self) -> bool:
        """The pass over queries finds what delta is off by, and corrects what it formed of it."""
        return self.correction == "after"

    @property
    def twice(self) -> bool:
        """The pass over queries walks the keys twice: first it finds what delta is off by, then it forms gradients."""
        return self.correction == "before"

    @property
    def noise(self) -> float:
        """What is smaller, of dp - delta, is rounding and counts as 0; 0 where delta is not known so well.

        In units of delta where `wide`, else of the sum of the magnitudes that delta adds up.
        """
        return 2.0**-40 if self.wide else 2.0**-20 if self.lonely else 0.0

    @property
    def apart(self) -> bool:
        """What is known of queries lies in rows of its own; otherwise lse and delta alternate (`rows.py`)."""
        return self.exact or self.offset or self.lonely

    @property
    def parts(self) -> bool:
        """Operands are multiplied in bf16 parts (lib/product.py)."""
        return self.products in ("cut", "short", "aligned")

    @property
    def cut(self) -> bool:
        """The parts are the bits of a number; otherwise its highest part is aligned to its row."""
        return self.products in ("cut", "short")

    @property
    def short(self) -> bool:
        """Products are of the first two parts; only scores that lse is made of are of all three."""
        return self.products == "short"

    @property
    def width(self) -> int:
        return max(self.slots, 1)


def padded(problem: AttentionProblem) -> tuple[int, int]:
    """(columns, columns_v) of a tile for these head dims: powers of two, at least the matrix units' depth.

    That is 16; in fp32 it is 32, and of v 64 beside 64 (triton_glue/workarounds.py: NARROW_FP32, NARROW_VALUES).
    """
    fp32 = problem.dtype is DType.FP32 or problem.multiplies_fp8  # whose instructions have 32 terms
    columns, columns_v = (max(32 if fp32 else 16, 1 << (n - 1).bit_length()) for n in (problem.head_dim, problem.head_dim_v))
    return columns, max(columns_v, 64) if problem.dtype is DType.FP32 and columns == 64 else columns_v


LONGEST_SUM = 128  # columns of a head: beyond, the matrix units' truncation is a bias that no number of elements evens out


def products(problem: AttentionProblem, device: Device, which: Pass) -> Products:
    """How a pass forms the products of an fp32 problem; "unit" says that Triton chooses (PRODUCTS), as in every other dtype.

    With few elements luck decides whether the largest error is 1.5 x plain PyTorch's, and a captured tensor's gradient that
    is one sum per head is few elements whatever the problem: these are float64 throughout, where there are matrix units for it,
    "ieee" too, whose products are float32 otherwise.
    Else aligned parts keep errors of few terms to a rounding (lib/product.py). From 1,024 x 1,024 on the largest of many
    errors stays below that by itself, and parts that are cut are fastest where operands are read from shared memory, up to
    LONGEST_SUM.

    tf32 on sm90: three products of two parts, "short". One TF32 product has half the rate of a bf16 one there and takes
    operands in one layout only: it was no faster than "cut" (8 x 1024, 12 heads of 64, causal, H100: 0.269 ms, 0.249).
    """
    if problem.dtype is not DType.FP32:
        return "unit"
    if which in DIRECTED:
        return "float64" if is_small(problem) and device.multiplies_float64 and problem.precision != "tf32" else "unit"
    if problem.precision == "tf32":
        return "short" if device.target == "sm90" else "unit"
    if (is_small(problem) or (which == "queries" and sums_per_head(problem))) and device.multiplies_float64:
        return "float64"
    if problem.precision == "ieee":
        return "unit"
    if max(problem.head_dim, problem.head_dim_v) > LONGEST_SUM or min(problem.span_q, problem.span_k) < 1024:
        return "aligned"
    return "cut" if device.target == "sm90" else "unit"


def correction_of(problem: AttentionProblem, launch: Launch) -> Correction:
    """When the pass over queries corrects delta: after it has formed gradients, or before, by one more walk over the keys.

    Before: elements of captured tensors, which are added up in memory; small float64 problems whose masks may leave every
    query one key, at run time alone: plain PyTorch's dq and dk are 0 there; and small problems below float32's grade: where few
    keys decide a row, out is rounded by more than dp and delta differ by. Of large ones what is summed over a whole head is
    corrected, and nothing else, unless `exact_delta` asks for all of it.
    """
    mended = is_mended(problem)
    if not mended and (problem.lone or not (problem.float32_grade or sums_per_head(problem))):
        return ""
    uneven = bool(problem.where) or problem.lengths.ragged
    exactly = uneven and is_small(problem) and launch.products == "float64"
    return "before" if mended or exactly or adds_elements(problem.score) else "after"


def is_mended(problem: AttentionProblem) -> bool:
    """Whether delta is corrected before all else, though float32's grade is not asked for."""
    return problem.exact_delta or (is_small(problem) and not problem.float32_grade)


def mends_lse(problem: AttentionProblem) -> bool:
    """Whether a backward below float32's grade finds what the rounding of lse lacks: where scores may share a large offset by
    a tensor that is added, and where the pass over queries walks the keys first anyway.
    """
    return problem.shares_offset or is_mended(problem)


def centers_values(problem: AttentionProblem, launch: Launch) -> bool:
    """Whether a forward takes a mean off the values before it adds them up: where they have a large one, roundings of the sum
    are of its size, and delta, which is made of out, has them.

    Where values are cut into parts, in registers: it is one operation more beside ten. A product that reads them from shared
    memory as they are would need 250 registers ("ieee", 64 columns, sm90: 112 without). Predicates say at run time alone
    which keys count. Backwards of wider heads are split, unless asked for otherwise: they correct delta.
    """
    alike = problem.dropout is None and problem.stored is None and not problem.where
    return problem.float32_grade and alike and launch.products in ("cut", "aligned") and problem.head_dim_v <= LONGEST_SUM


def sums_are_long(problem: AttentionProblem, launch: Launch, which: Pass) -> bool:
    """Whether a pass forms dk and dv, or their tangents, one sum over all query heads of a group, that would be rounded more
    than plain PyTorch's: it adds up each head by itself, and then the heads.
    """
    if which not in OVER_KEYS or not problem.float32_grade or launch.products == "float64":
        return False
    roundings = 2 if launch.products == "aligned" or which in DIRECTED else 1  # of the sum, by a tile of queries
    return 2 * roundings * problem.group >= launch.block_q


def may_leave_one(problem: AttentionProblem) -> bool:
    """Whether every query may have one key that counts, if not by its band in general then by what is known at run time."""
    return problem.lone or problem.lengths.ragged or bool(problem.where or problem.score)


def tells_sizes(problem: AttentionProblem) -> bool:
    """Whether a backward knows, of each query, the sum of the magnitudes that delta adds up."""
    return is_mended(problem) and (problem.exact_delta or may_leave_one(problem))


def forms_captured(problem: AttentionProblem, which: Pass) -> bool:
    """Whether a pass forms gradients of captured tensors."""
    return which == "pairs" or (which == "queries" and bool(captures(problem.score)))


BYTES = frozenset({"bool", "int8", "uint8"})  # dtypes of 8 bits
NARROW = BYTES | {"fp16", "bf16"}


def form_in(problem: AttentionProblem, which: Pass) -> Form:
    """How a pass applies modifiers; directed ones know what each of them makes of a scaled score."""
    if which in DIRECTED and problem.score:
        return Form(prescale=True)
    whole = problem.shares_offset if which in ("forward", *DIRECTED) else mends_lse(problem)
    return Form(prescale=True) if whole else form_of(problem, forms_captured(problem, which))


def narrow_loads(problem: AttentionProblem) -> set[str]:
    """Dtypes of less than 32 bits that scores depend on: those of captured tensors and of predicates."""
    captured = [tensor.dtype for score in problem.score for tensor in score.tensors]
    asked = [dtype for leaf in problem.leaves for _, dtype in leaf.tensors]
    return {*captured, *asked} & NARROW


# The fewest terms of a product where `reads_bytes_and_joins`: triton_glue/workarounds.py, SHORT_PRODUCTS.
WHOLE_FRAGMENT = 32


def reads_bytes_and_joins(problem: AttentionProblem, device: Device, products: Products) -> bool:
    """Whether probabilities depend on loads of 8 bits, and on dropout's words, which are joined, in products of mma.sync."""
    if device.kind != "cuda" or problem.dropout is None or products == "float64" or problem.precision == "ieee":
        return False
    return not narrow_loads(problem).isdisjoint(BYTES)


def make_tile(problem: AttentionProblem, launch: Launch, which: Pass, slots: int = 0, correction: Correction = "",
              moves: str = "", arrives: str = "") -> Tile:  # fmt: skip
    """The constexpr of one kernel call. Under a causal bound the longest tiles start first."""
    lengths = problem.lengths
    columns, columns_v = padded(problem)
    form = form_in(problem, which)
    grouped, backward = which in OVER_KEYS and problem.group > 1, which not in {"forward"} | DIRECTED
    return Tile(
        block_q=launch.block_q,
        block_k=launch.block_k,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        columns=columns,
        columns_v=columns_v,
        mask=Mask.of(
            problem,
            (which in OVER_KEYS | {"pairs"} or bool(problem.score or problem.where))
            and (lengths.ragged or problem.seqlen_k % launch.block_k != 0),
        ),
        items=Items.of(problem),
        modifiers=Modifiers.of(problem, form),
        schedule=Schedule(
            swizzle=launch.swizzle,
            last_first=problem.band.right is not None and which not in OVER_KEYS | {"pairs"},
            # Tiles of keys read the queries of a whole group of heads: the L2 cache has no room for more of these.
            wave=0 if grouped else WAVE,
        ),
        grouped=grouped,
        exact=problem.float32_grade,
        keeps_rest=sums_are_long(problem, launch, which),
        offset=backward and mends_lse(problem),
        precision=PRODUCTS[problem.precision],
        # With one tf32 product lse would be off by 5e-4, and probabilities with it.
        score_precision=PRODUCTS["tf32x3" if problem.precision == "tf32" else problem.precision],
        products=launch.products,
        narrow=launch.products == "float64" and bool(narrow_loads(problem)),
        makes_lse=which in ("forward", "tangent"),
        lone=backward and problem.lone and not is_mended(problem),
        adds_dq=which == "fused",
        correction=correction,
        lonely=backward and tells_sizes(problem),
        held=launch.held,
        upright=launch.upright,
        centers=which == "forward" and centers_values(problem, launch),
        moves=moves,
        arrives=arrives,
        halves_rounding=which in DIRECTED and problem.dtype.is_narrow and is_small(problem),
        stored="" if problem.stored is None else problem.stored.dtype,
        scaled="".join(
            side.upper() if how == "token" else side
            for side, how in ({} if problem.stored is None else problem.stored.scaled).items()
        ),
        fp8=problem.multiplies_fp8,
        slots=1 << (slots - 1).bit_length() if slots else 0,
    )
