"""Cross-entropy of rows of logits, the loss alone or with its gradient in the same pass.

    x = logit_scale * logits,   lse = log(sum_j exp(x_j)),   share = -(1 - smoothing) x_label - smoothing / classes * sum_j x_j
    loss = lse + share + z_loss * lse^2;   0 in rows whose label is ignore_index

With `shard` the logits are those of the classes from first_class on, of `classes` in all: the outputs are share and lse, of
which a group of shards makes the loss. Online softmax: arXiv 1805.02867.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar

from flashtile._triton import jit, tl
from flashtile.errors import InvalidProblem
from flashtile.kernels.companions.cross_entropy_host import host_backward, host_forward
from flashtile.kernels.lib.exponential import LN2, LOG2E
from flashtile.plan.call import Buffer, KernelCall, Pointer, Strides
from flashtile.plan.companion import Op, Steps
from flashtile.plan.device import Device
from flashtile.spec.companion import FLOATS, Companion, Described
from flashtile.spec.dtype import SIZES_BYTES

REDUCTIONS = ("none", "mean", "sum")


@dataclass(frozen=True)
class CrossEntropy(Companion):
    """logits (rows, columns); labels (rows,), class numbers or ignore_index.

    eager_gradient: the forward makes the gradient too, for a reduced loss. inplace: the gradient is written over the logits.
    """

    reduction: str = "none"
    smoothing: float = 0.0
    z_loss: float = 0.0
    logit_scale: float = 1.0
    ignore_index: int = -100
    shard: bool = False
    first_class: int = 0
    classes: int | None = None
    eager_gradient: bool = False
    inplace: bool = False

    op: ClassVar[str] = "cross_entropy"
    tensors: ClassVar[tuple[str, ...]] = ("logits", "labels")
    differentiable: ClassVar[tuple[str, ...]] = ("logits",)

    def check(self) -> None:
        if not (self.has("logits") and len(self["logits"].shape) == 2 and self["logits"].shape[1] >= 1):
            raise InvalidProblem("logits must be there, with a last axis of at least 1.")
        self.expect_dtype("logits", FLOATS)
        if not self.has("labels"):
            raise InvalidProblem("labels are missing; they must be int32 or int64, one a row.")
        self.expect("labels", (self.rows,), "one a row", ("int32", "int64"))
        if self.reduction not in REDUCTIONS:
            raise InvalidProblem(f"reduction is {self.reduction!r}; it must be one of {', '.join(REDUCTIONS)}.")
        self.expect_number("smoothing", 0.0, 1.0)
        self.expect_number("z_loss", 0.0)
        self.expect_number("logit_scale")
        self.expect_bool("shard", "eager_gradient", "inplace")
        for name in ("ignore_index", "first_class"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidProblem(f"{name} is {value!r}; it must be an int.")
        if self.shard and (self.classes is None or not 0 <= self.first_class <= self.classes - self.columns):
            raise InvalidProblem(
                f"a shard of {self.columns} classes from {self.first_class} on is not one of {self.classes} classes in all."
            )
        if not self.shard and (self.classes is not None or self.first_class):
            raise InvalidProblem("classes and first_class are given; they must be given with shard, and only then.")
        if self.shard and (self.reduction != "none" or self.z_loss):
            raise InvalidProblem("a shard has no loss of its own; reduction must be 'none' and z_loss 0.")
        if self.eager_gradient and self.reduction == "none":
            raise InvalidProblem("eager_gradient is True and reduction 'none'; rows' gradients wait for those of their losses.")

    @property
    def rows(self) -> int:
        return self["logits"].shape[0]

    @property
    def columns(self) -> int:
        return self["logits"].shape[1]

    def outputs(self) -> dict[str, Described]:
        row = Described((self.rows,), "fp32")
        if self.shard:
            return {"share": row, "lse": row}
        made = {"loss": row if self.reduction == "none" else Described((), "fp32"), "lse": row}
        if self.reduction == "mean":
            made["count"] = Described((1,), "fp32")
        if self.eager_gradient:
            made["gradient"] = self["logits"]
        return made

    def public(self) -> tuple[str, ...]:
        return ("share", "lse") if self.shard else ("loss", "lse")

    def constant(self) -> tuple[str, ...]:
        return () if self.shard else ("lse",)


@dataclass(frozen=True)
class Tile:
    """Compile-time part: `block` columns a step, `line` in 16 bytes. `leads`: rows begin amid lines."""

    block: int
    line: int
    columns: int
    leads: bool
    walks: bool  # a program has several rows
    smooth: bool
    loss: bool  # rather than a shard's share
    mean: bool


# -- kernels --------------------------------------------------------------------------------------------------------------


@jit
def aligned(row, strides, T: tl.constexpr):
    """(offset of the 16-byte line that a row begins in, elements before it there)."""
    begin = row.to(tl.int64) * strides[0]
    lead = 0
    LINE: tl.constexpr = T.line
    if T.leads:
        lead = tl.where(strides[1] == 1, begin % LINE, 0).to(tl.int32)
        begin = tl.multiple_of(begin - lead, LINE)
    return begin, lead


@jit
def offsets(T: tl.constexpr):
    """Elements of a step, a line of 16 bytes to a thread."""
    LINE: tl.constexpr = T.line
    LINES: tl.constexpr = T.block // T.line
    return tl.arange(0, LINES)[:, None] * LINE + tl.arange(0, LINE)[None, :]


@jit
def columns_of(step, lead, T: tl.constexpr):
    """The columns of a step."""
    return offsets(T) + (step * T.block - lead)


@jit
def read(logits_ptr, base, step, lead, stride, scale, MASKED: tl.constexpr, POLICY: tl.constexpr, T: tl.constexpr):
    """(columns, which are there, scaled logits in float32, -inf elsewhere) of a step."""
    BLOCK: tl.constexpr = T.block
    column = columns_of(step, lead, T)
    offset = offsets(T)
    at = logits_ptr + (base + tl.cast(step, tl.int64) * BLOCK * stride) + offset * stride
    there = (column >= 0) & (column < T.columns)
    if MASKED:
        if not T.leads:
            there = column < T.columns
        x = tl.load(at, mask=there, other=float("-inf"), eviction_policy=POLICY).to(tl.float32) * scale
        x = tl.where(there, x, float("-inf"))
    else:
        x = tl.load(at, eviction_policy=POLICY).to(tl.float32) * scale
    return column, there, x


@jit
def add_step(state, logits_ptr, base, step, lead, stride, scale, MASKED: tl.constexpr, POLICY: tl.constexpr, T: tl.constexpr):
    """(maximum, sum of exponentials, sum) of each line, after a step; no thread waits for another."""
    top, total, plain = state
    _column, there, x = read(logits_ptr, base, step, lead, stride, scale, MASKED, POLICY, T)
    higher = tl.maximum(top, tl.max(x, 1))
    pivot = tl.where(higher == float("-inf"), 0.0, higher)
    total = total * tl.exp2((top - pivot) * LOG2E) + tl.sum(tl.exp2((x - pivot[:, None]) * LOG2E), 1)
    if T.smooth:
        plain += tl.sum(tl.where(there, x, 0.0), 1)
    return higher, total, plain


@jit
def fold_row(logits_ptr, base, lead, stride, scale, POLICY: tl.constexpr, T: tl.constexpr):
    """(log of the sum of exponentials, sum) of a row."""
    BLOCK: tl.constexpr = T.block
    LINES: tl.constexpr = T.block // T.line
    top = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    state = (top, total, total)
    steps = tl.cdiv(T.columns + lead, BLOCK)
    if T.leads:  # lines at the row's ends hold elements of its neighbours
        state = add_step(state, logits_ptr, base, 0, lead, stride, scale, True, POLICY, T)
        for step in tl.range(1, steps - 1):
            state = add_step(state, logits_ptr, base, step, lead, stride, scale, False, POLICY, T)
        if steps > 1:
            state = add_step(state, logits_ptr, base, steps - 1, lead, stride, scale, True, POLICY, T)
    else:
        for step in tl.range(0, T.columns // BLOCK):
            state = add_step(state, logits_ptr, base, step, lead, stride, scale, False, POLICY, T)
        if T.columns % BLOCK:
            state = add_step(state, logits_ptr, base, T.columns // BLOCK, lead, stride, scale, True, POLICY, T)
    top, total, plain = state
    highest = tl.max(top, 0)
    pivot = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(total * tl.exp2((top - pivot) * LOG2E), 0)
    return pivot + tl.log2(total) * LN2, tl.sum(plain, 0)


@jit
def write_step(
    logits_ptr, target_ptr, base, target_base, step, lead, strides, scale, row, MASKED: tl.constexpr, T: tl.constexpr
):
    """The gradient of a step: row = (lse, label's column, of lse, of the label, of all); 0 where the first of these is 0."""
    BLOCK: tl.constexpr = T.block
    lse, label, along, at_label, at_all = row
    column, there, x = read(logits_ptr, base, step, lead, strides[0][1], scale, MASKED, "evict_first", T)
    grad = along * tl.exp2((x - lse) * LOG2E) + at_all
    grad = tl.where(column == label, grad + at_label, grad) * scale
    grad = tl.where((along == 0.0) & (at_label == 0.0), 0.0, grad)
    offset = offsets(T)
    at = target_ptr + (target_base + tl.cast(step, tl.int64) * BLOCK * strides[1][1]) + offset * strides[1][1]
    value = grad.to(target_ptr.dtype.element_ty)
    if MASKED:
        tl.store(at, value, mask=there, eviction_policy="evict_first")
    else:
        tl.store(at, value, eviction_policy="evict_first")


@jit
def write_steps(logits_ptr, target_ptr, index, first, last, strides, scale, row, T: tl.constexpr):
    """The gradient of steps first <= step < last of a row, from the last on: what was read last L2 still has."""
    base, lead = aligned(index, strides[0], T)
    target_base = index.to(tl.int64) * strides[1][0] - lead * strides[1][1]
    LINE: tl.constexpr = T.line
    if T.leads:
        for done in tl.range(0, last - first):
            step = last - 1 - done
            inner = (step * T.block >= lead) & ((step + 1) * T.block <= T.columns + lead) & (target_base % T.line == 0)
            if inner:
                lines = tl.multiple_of(target_base, LINE)
                write_step(logits_ptr, target_ptr, base, lines, step, lead, strides, scale, row, False, T)
            else:
                write_step(logits_ptr, target_ptr, base, target_base, step, lead, strides, scale, row, True, T)
    else:
        if T.columns % T.block:
            if last > T.columns // T.block:
                write_step(logits_ptr, target_ptr, base, target_base, T.columns // T.block, lead, strides, scale, row, True, T)
        whole = tl.minimum(last, T.columns // T.block)
        for done in tl.range(0, whole - first):
            write_step(logits_ptr, target_ptr, base, target_base, whole - 1 - done, lead, strides, scale, row, False, T)


@jit
def label_of(labels_ptr, row, first_class, ignore_index):
    """(column of the label, whether the row counts)."""
    label = tl.load(labels_ptr + row).to(tl.int64)
    return label - first_class, label != ignore_index


@jit
def row_forward(row, inputs, outputs, strides, smoothing, z_loss, scale, whole, T: tl.constexpr):
    """A row's loss (or share) and lse; with a pointer for it the gradient too, of logits read the second time from L2."""
    logits_ptr, labels_ptr, count_ptr = inputs
    loss_ptr, lse_ptr, gradient_ptr = outputs
    label, counts = label_of(labels_ptr, row, whole[1], whole[2])
    base, lead = aligned(row, strides[0], T)
    if gradient_ptr is not None:
        lse, plain = fold_row(logits_ptr, base, lead, strides[0][1], scale, "evict_last", T)
    else:
        lse, plain = fold_row(logits_ptr, base, lead, strides[0][1], scale, "evict_first", T)
    here = (label >= 0) & (label < T.columns)
    x = tl.load(logits_ptr + row.to(tl.int64) * strides[0][0] + label * strides[0][1], mask=here & counts, other=0.0)
    share = -smoothing[0] * x.to(tl.float32) * scale
    if T.smooth:
        share -= smoothing[1] * plain
    known = (label + whole[1] >= 0) & (label + whole[1] < whole[0])
    share = tl.where(known, share, float("nan"))  # a label that is none of the classes
    loss = share
    if T.loss:
        loss = lse + share + z_loss * lse * lse
    tl.store(loss_ptr + row, tl.where(counts, loss, 0.0))
    tl.store(lse_ptr + row, lse)
    if gradient_ptr is not None:
        weight = tl.where(counts, 1.0, 0.0)
        if T.mean:
            weight = weight / tl.load(count_ptr)
        weight = tl.where(known | (counts == 0), weight, float("nan"))
        of_row = (lse, label, weight * (1.0 + 2.0 * z_loss * lse), -weight * smoothing[0], -weight * smoothing[1])
        of_row = silence(of_row, counts)
        write_steps(logits_ptr, gradient_ptr, row, 0, tl.cdiv(T.columns + lead, T.block), strides, scale, of_row, T)


@jit
def cross_entropy_forward(inputs, outputs, strides, smoothing, z_loss, scale, whole, rows, T: tl.constexpr):
    """Losses (or shares), lse and gradients: of a row or, where programs walk, of every so many.

    whole = (classes in all, first class, ignore_index); smoothing = (1 - smoothing, smoothing / classes).
    """
    if T.walks:
        for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
            row_forward(tl.cast(row, tl.int32), inputs, outputs, strides, smoothing, z_loss, scale, whole, T)
    else:
        row_forward(tl.program_id(0), inputs, outputs, strides, smoothing, z_loss, scale, whole, T)


@jit
def silence(row, counts):
    """What `write_step` takes of a row, all 0 where it does not count, whatever its lse."""
    lse, label, along, at_label, at_all = row
    return lse, label, tl.where(counts, along, 0.0), tl.where(counts, at_label, 0.0), tl.where(counts, at_all, 0.0)


@jit
def cross_entropy_backward(
    inputs, given, dlogits_ptr, strides, smoothing, z_loss, scale, whole, STEPS: tl.constexpr, T: tl.constexpr
):
    """STEPS steps of a row's gradient: from dloss, or from a shard's dshare and dlse."""
    logits_ptr, labels_ptr, count_ptr, lse_ptr = inputs
    dloss_ptr, dlse_ptr = given
    row = tl.program_id(0)
    label, counts = label_of(labels_ptr, row, whole[1], whole[2])
    lse = tl.load(lse_ptr + row)
    dloss = tl.load(dloss_ptr + row * strides[2][0])
    if T.mean:
        dloss = dloss / tl.load(count_ptr)
    along = dloss * (1.0 + 2.0 * z_loss * lse)
    if not T.loss:
        lse = tl.where(lse == float("-inf"), 0.0, lse)  # a shard without any finite logit
        along = tl.zeros_like(dloss)
        if dlse_ptr is not None:
            along += tl.load(dlse_ptr + row * strides[3][0])
    known = (label + whole[1] >= 0) & (label + whole[1] < whole[0])
    dloss = tl.where(known, dloss, float("nan"))
    share_counts = tl.where(counts, dloss, 0.0)
    of_row = (lse, label, along, -share_counts * smoothing[0], -share_counts * smoothing[1])
    if T.loss:
        of_row = silence(of_row, counts)
    first = tl.program_id(1) * STEPS
    _base, lead = aligned(row, strides[0], T)
    last = tl.minimum(first + STEPS, tl.cdiv(T.columns + lead, T.block))
    write_steps(logits_ptr, dlogits_ptr, row, first, last, strides, scale, of_row, T)


@jit
def cross_entropy_count(labels_ptr, count_ptr, rows, ignore_index, BLOCK: tl.constexpr):
    """How many rows count."""
    total = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        label = tl.load(labels_ptr + row, mask=row < rows, other=0).to(tl.int64)
        total += ((label != ignore_index) & (row < rows)).to(tl.int32)
    tl.store(count_ptr, tl.sum(total, 0).to(tl.float32))


@jit
def cross_entropy_reduce(losses_ptr, count_ptr, loss_ptr, rows, BLOCK: tl.constexpr):
    """The sum of the rows' losses, or their mean over those that count."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        total += tl.load(losses_ptr + row, mask=row < rows, other=0.0)
    loss = tl.sum(total, 0)
    if count_ptr is not None:
        loss = loss / tl.load(count_ptr)
    tl.store(loss_ptr, loss)


@jit
def cross_entropy_scale(gradient_ptr, dloss_ptr, count, BLOCK: tl.constexpr):
    """gradient *= dloss, in place; nothing is read or written where that is 1, as at the end of a model."""
    factor = tl.load(dloss_ptr)
    if factor != 1.0:
        for step in tl.range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
            at = tl.cast(step, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(gradient_ptr + at, mask=at < count, other=0.0).to(tl.float32) * factor
            tl.store(gradient_ptr + at, value.to(gradient_ptr.dtype.element_ty), mask=at < count)


# -- plans ----------------------------------------------------------------------------------------------------------------

# Rows longer than this: as many programs as SMs, so that what all have read stays in L2. An H100's holds 26 MB of it: of
# 131,072 classes in 16 bits seven tenths are there the second time (0.84 of the copy ceiling), of 262,144 four (0.73).
L2_ROW_BYTES = 128 * 2**10


@dataclass(frozen=True)
class Launch:
    """Columns a step, warps, and how many programs walk the rows (None: one has one)."""

    block: int
    warps: int
    programs: int | None = None


def line_of(p: CrossEntropy) -> int:
    """Elements in 16 bytes."""
    return 16 // SIZES_BYTES[p["logits"].dtype]


def choose(p: CrossEntropy, device: Device) -> Launch:
    """Four 16-byte loads in flight per thread. With the gradient few threads, so that rows stay in L2 until read again."""
    block = min(max(1 << (p.columns - 1).bit_length(), 256), 8192)
    warps, programs = min(max(block // 1024, 1), 8), None
    if p.eager_gradient and p.columns > 8192:
        block, warps = 16384, 16
        if p["logits"].size_bytes > L2_ROW_BYTES * p.rows:
            warps, programs = 32, device.sm_count
    if p.columns % line_of(p):  # steps at the ends of rows go element by element, each with an address of its own
        block = min(block, 256 * warps)
    return Launch(block, warps, programs)


def tile(p: CrossEntropy, launch: Launch) -> Tile:
    return Tile(
        launch.block, line_of(p), p.columns, p.columns % line_of(p) != 0, launch.programs is not None, p.smoothing != 0.0,
        not p.shard, p.reduction == "mean",
    )  # fmt: skip


def _numbers(p: CrossEntropy) -> tuple[Any, ...]:
    classes = p.columns if p.classes is None else p.classes
    whole = (classes, p.first_class, p.ignore_index)
    return (1.0 - p.smoothing, p.smoothing / classes), p.z_loss, p.logit_scale, whole


def forward(p: CrossEntropy, device: Device, made: tuple[str, ...]) -> Steps:
    """The rows' kernel; around it, for a reduced loss, a count and a sum."""
    launch = choose(p, device)
    mean, reduced = p.reduction == "mean", p.reduction != "none"
    calls: list[KernelCall] = []
    scratch: list[Buffer] = []
    if mean and "count" not in made:
        scratch.append(Buffer("count", (1,), "fp32", "scratch"))
    if mean:
        args = (Pointer("labels"), Pointer("count"), p.rows, p.ignore_index)
        calls.append(KernelCall(cross_entropy_count, (1, 1, 1), args, (("BLOCK", 4096),), 16, 1))
    if reduced:
        scratch.append(Buffer("losses", (p.rows,), "fp32", "scratch"))
    gradient = "gradient" in made
    args = (
        (Pointer("logits"), Pointer("labels"), Pointer("count") if mean else None),
        (Pointer("losses" if reduced else made[0]), Pointer("lse"), Pointer("gradient") if gradient else None),
        (Strides("logits"), Strides("gradient" if gradient else "logits")), *_numbers(p), p.rows,
    )  # fmt: skip
    grid = (min(p.rows, launch.programs or p.rows), 1, 1)
    calls.append(KernelCall(cross_entropy_forward, grid, args, (("T", tile(p, launch)),), launch.warps, 1))
    if reduced:
        args = (Pointer("losses"), Pointer("count") if mean else None, Pointer("loss"), p.rows)
        calls.append(KernelCall(cross_entropy_reduce, (1, 1, 1), args, (("BLOCK", 4096),), 16, 1))
    return Steps(tuple(calls), tuple(scratch))


def backward(p: CrossEntropy, device: Device, wanted: frozenset[str], arriving: frozenset[str]) -> Steps:
    """Steps of rows; or the gradient of the forward times that of the loss."""
    if p.eager_gradient:
        args = (Pointer("dlogits"), Pointer("dloss"), p.rows * p.columns)
        return Steps((KernelCall(cross_entropy_scale, (8 * device.sm_count, 1, 1), args, (("BLOCK", 4096),), 8, 1),))
    block = min(max(1 << (p.columns - 1).bit_length(), 256), 4096)
    launch, steps = Launch(block, max(1, block // 1024)), 4
    first = "dshare" if p.shard else "dloss"
    args = (
        (Pointer("logits"), Pointer("labels"), Pointer("count") if p.reduction == "mean" else None, Pointer("lse")),
        (Pointer(first), Pointer("dlse") if "lse" in arriving else None), Pointer("dlogits"),
        (Strides("logits"), Strides("dlogits"), Strides(first) if p.reduction == "none" else (0,),
         Strides("dlse") if "lse" in arriving else (0,)), *_numbers(p),
    )  # fmt: skip
    grid = (p.rows, ceil((p.columns + (line_of(p) - 1)) / (block * steps)), 1)
    constants = (("STEPS", steps), ("T", tile(p, launch)))
    return Steps((KernelCall(cross_entropy_backward, grid, args, constants, launch.warps, 1),))


def kept(p: CrossEntropy, wanted: frozenset[str]) -> tuple[str, ...]:
    if p.eager_gradient:
        return ("gradient",)
    return ("logits", "labels", *(("count",) if p.reduction == "mean" else ()), "lse")


def over(p: CrossEntropy) -> dict[str, str]:
    if p.eager_gradient:
        return {"dlogits": "gradient", **({"gradient": "logits"} if p.inplace else {})}
    return {"dlogits": "logits"} if p.inplace else {}


CROSS_ENTROPY = Op(CrossEntropy, forward, backward, host_forward, host_backward, kept, over=over)
