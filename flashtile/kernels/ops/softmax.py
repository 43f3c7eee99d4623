"""Softmax of scaled scores under a mask, a triangle, or both; of a triangle no more is read than it holds.

y = softmax(where(mask, fill, scale * x)) along the last axis;   0 in a row whose maximum is `fill`: it sees nothing
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar

from flashtile.errors import InvalidProblem
from flashtile.kernels.device.exponential import exp, finite
from flashtile.kernels.device.number import quotient
from flashtile.plan.call import KernelCall, Pointer, Strides
from flashtile.plan.device import Device
from flashtile.plan.op import Op, Steps
from flashtile.problem.op import FLOATS, Companion, Described
from flashtile.triton_glue.language import jit, tl


@dataclass(frozen=True)
class Softmax(Companion):
    """x (batch, heads, rows, columns); mask likewise, true where a score is hidden.

    causal: row i sees columns j <= i + columns - rows. masked_score: what hidden scores are, None for -inf.
    """

    scale: float = 1.0
    causal: bool = False
    masked_score: float | None = None

    op: ClassVar[str] = "softmax"
    tensors: ClassVar[tuple[str, ...]] = ("x", "mask")
    differentiable: ClassVar[tuple[str, ...]] = ("x",)

    def check(self) -> None:
        if not (self.has("x") and len(self["x"].shape) == 4 and self["x"].shape[3] >= 1):
            raise InvalidProblem("x must be (batch, heads, rows, columns), with at least one column.")
        self.expect_dtype("x", FLOATS)
        self.expect_number("scale")
        self.expect_bool("causal")
        if self.masked_score is not None:
            self.expect_number("masked_score")
        self.expect("mask", self["x"].shape, "that of x", ("bool", "uint8"))

    @property
    def shows(self) -> bool:
        """Whether hidden scores may have a probability, but have no gradient."""
        return self.has("mask") and self.masked_score is not None

    @property
    def fill(self) -> float:
        return -float("inf") if self.masked_score is None else float(self.masked_score)

    def outputs(self) -> dict[str, Described]:
        return {"y": self["x"]}


@dataclass(frozen=True)
class SoftmaxTile:
    """Compile-time part: `rows` rows at a time, of `chunks` steps of `block` columns. exact: for fp32, to its last place."""

    rows: int
    block: int
    columns: int
    chunks: int
    causal: bool
    exact: bool
    cut: ClassVar[bool] = False  # exp's other form


# -- kernels --------------------------------------------------------------------------------------------------------------


@jit
def place(sizes, T: tl.constexpr):
    """(batch, head, rows, their last visible column) of this program; heads go together, as they share a mask."""
    program = tl.program_id(0)
    heads, rows, shift = sizes
    head = program % heads
    tiles = tl.cdiv(rows, T.rows)
    tile = program // heads % tiles
    row = tile * T.rows + tl.arange(0, T.rows)
    return (program // (heads * tiles)).to(tl.int64), head.to(tl.int64), row.to(tl.int64), row + shift


@jit
def lines(ptr, strides, at, first, T: tl.constexpr):
    """Addresses of a step."""
    batch, head, row, _last = at
    column = first + tl.arange(0, T.block)
    return ptr + batch * strides[0] + head * strides[1] + row[:, None] * strides[2] + column.to(tl.int64)[None, :] * strides[3]


@jit
def seen(at, first, rows, T: tl.constexpr):
    """(which scores a step has to read, which of them a row sees); the former in whole lines of 16 bytes."""
    _batch, _head, row, last = at
    column = first + tl.arange(0, T.block)
    inside = (row < rows)[:, None] & (column < T.columns)[None, :]
    if T.causal:
        return inside & (column // 8 * 8 <= last[:, None]), inside & (column[None, :] <= last[:, None])
    return inside, inside


@jit
def scores(x_ptr, mask_ptr, strides, at, first, rows, scale, fill, T: tl.constexpr):
    """Scaled scores of a step, in float32; -inf where there is none."""
    read, sees = seen(at, first, rows, T)
    x = tl.load(lines(x_ptr, strides[0], at, first, T), mask=read, other=0.0).to(tl.float32) * scale
    if mask_ptr is not None:
        x = tl.where(tl.load(lines(mask_ptr, strides[2], at, first, T), mask=read, other=0) != 0, fill, x)
    return tl.where(sees, x, float("-inf"))


@jit
def store(y_ptr, strides, at, first, rows, value, T: tl.constexpr):
    _batch, _head, row, _last = at
    column = first + tl.arange(0, T.block)
    inside = (row < rows)[:, None] & (column < T.columns)[None, :]
    tl.store(lines(y_ptr, strides, at, first, T), value.to(y_ptr.dtype.element_ty), mask=inside)


@jit
def softmax_forward(x_ptr, mask_ptr, y_ptr, strides, sizes, scale, fill, T: tl.constexpr):
    """Rows of y. strides of (x, y, mask), sizes = (heads, rows, columns - rows)."""
    at, rows = place(sizes, T), sizes[1]
    ROWS: tl.constexpr = T.rows
    if T.chunks == 1:
        x = scores(x_ptr, mask_ptr, strides, at, 0, rows, scale, fill, T)
        top = tl.max(x, 1)
        blind = (top == fill) | (top == float("-inf"))
        x = exp(x - tl.where(blind, 0.0, top)[:, None], T)
        total = tl.sum(x, 1)
        factor = tl.where(blind, 0.0, quotient(tl.full(total.shape, 1.0, tl.float32), total, T))
        store(y_ptr, strides[1], at, 0, rows, tl.where(blind[:, None], 0.0, x * factor[:, None]), T)
    else:
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for chunk in tl.range(0, T.chunks):
            x = scores(x_ptr, mask_ptr, strides, at, chunk * T.block, rows, scale, fill, T)
            higher = tl.maximum(top, tl.max(x, 1))
            pivot = finite(higher)
            total = total * exp(top - pivot, T) + tl.sum(exp(x - pivot[:, None], T), 1)
            top = higher
        blind = (top == fill) | (top == float("-inf"))
        pivot = tl.where(blind, 0.0, top)
        factor = tl.where(blind, 0.0, quotient(tl.full(total.shape, 1.0, tl.float32), total, T))
        for chunk in tl.range(0, T.chunks):  # the second time from L2
            x = scores(x_ptr, mask_ptr, strides, at, chunk * T.block, rows, scale, fill, T)
            x = exp(x - pivot[:, None], T) * factor[:, None]
            store(y_ptr, strides[1], at, chunk * T.block, rows, tl.where(blind[:, None], 0.0, x), T)


@jit
def softmax_backward(y_ptr, dy_ptr, mask_ptr, dx_ptr, strides, sizes, scale, T: tl.constexpr):
    """Rows of dx = scale * y * (dy - sum(y * dy)), 0 where there is a mask and it hides. strides of (y, dy, dx, mask or none).

    T.exact: what the rounded sum is wrong by is the sum of y * (dy - it), for y's sum is 1: where all dy are nearly equal
    nothing else would be left.
    """
    at, rows = place(sizes, T), sizes[1]
    ROWS: tl.constexpr = T.rows
    if T.chunks == 1:
        y, dy = pair(y_ptr, dy_ptr, strides, at, 0, rows, T)
        if mask_ptr is not None:
            hidden = hides(mask_ptr, strides, at, 0, rows, T)  # asked for before the sums wait
        dy -= tl.sum(y * dy, 1)[:, None]
        if T.exact:
            dy -= tl.sum(y * dy, 1)[:, None]
        dx = scale * y * dy
        if mask_ptr is not None:
            dx = tl.where(hidden, 0.0, dx)
        store(dx_ptr, strides[2], at, 0, rows, dx, T)
    else:
        inner, rest = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
        for chunk in tl.range(0, T.chunks):
            y, dy = pair(y_ptr, dy_ptr, strides, at, chunk * T.block, rows, T)
            inner += tl.sum(y * dy, 1)
        if T.exact:
            for chunk in tl.range(0, T.chunks):
                y, dy = pair(y_ptr, dy_ptr, strides, at, chunk * T.block, rows, T)
                rest += tl.sum(y * (dy - inner[:, None]), 1)
        for chunk in tl.range(0, T.chunks):
            y, dy = pair(y_ptr, dy_ptr, strides, at, chunk * T.block, rows, T)
            dx = scale * y * (dy - inner[:, None] - rest[:, None])
            if mask_ptr is not None:
                dx = tl.where(hides(mask_ptr, strides, at, chunk * T.block, rows, T), 0.0, dx)
            store(dx_ptr, strides[2], at, chunk * T.block, rows, dx, T)


@jit
def pair(y_ptr, dy_ptr, strides, at, first, rows, T: tl.constexpr):
    """y and dy of a step, in float32, 0 where a row sees nothing."""
    read, sees = seen(at, first, rows, T)
    y = tl.load(lines(y_ptr, strides[0], at, first, T), mask=read, other=0.0).to(tl.float32)
    dy = tl.load(lines(dy_ptr, strides[1], at, first, T), mask=read, other=0.0).to(tl.float32)
    y = tl.where(sees, y, 0.0)
    return y, tl.where(y == 0.0, 0.0, dy)  # what arrives at hidden scores may be anything


@jit
def hides(mask_ptr, strides, at, first, rows, T: tl.constexpr):
    """Where the mask hides a step's scores, which then have no gradient, whatever their probability."""
    read, _sees = seen(at, first, rows, T)
    return tl.load(lines(mask_ptr, strides[3], at, first, T), mask=read, other=0) != 0


# -- plans ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SoftmaxLaunch:
    """Rows at a time, columns a step, warps."""

    rows: int
    block: int
    warps: int


def choose(p: Softmax, lane: int) -> SoftmaxLaunch:
    """`lane` elements of each tensor per thread; longer rows than 16,384 are walked twice, the second time through L2."""
    block = min(max(1 << (p["x"].shape[3] - 1).bit_length(), 16), 16384)
    warps = min(max(block // (32 * lane), 4), 16)
    return SoftmaxLaunch(max(1, min(128 * lane // block, 16)), block, warps)


def _call(p: Softmax, kernel: Any, launch: SoftmaxLaunch, args: tuple[Any, ...], tail: tuple[Any, ...]) -> Steps:
    batch, heads, rows, columns = p["x"].shape
    constants = SoftmaxTile(launch.rows, launch.block, columns, ceil(columns / launch.block), p.causal, p["x"].dtype == "fp32")
    grid = (batch * heads * ceil(rows / launch.rows), 1, 1)
    sizes = (heads, rows, columns - rows)
    return Steps((KernelCall(kernel, grid, (*args, sizes, *tail), (("T", constants),), launch.warps, 1),))


def forward(p: Softmax, device: Device, made: tuple[str, ...], launch: SoftmaxLaunch | None = None) -> Steps:
    masks = p.has("mask")
    strides = (Strides("x"), Strides("y"), Strides("mask") if masks else (0, 0, 0, 0))
    args = (Pointer("x"), Pointer("mask") if masks else None, Pointer("y"), strides)
    return _call(p, softmax_forward, launch or choose(p, 32), args, (p.scale, p.fill))


def backward(
    p: Softmax, device: Device, wanted: frozenset[str], arriving: frozenset[str], launch: SoftmaxLaunch | None = None
) -> Steps:
    strides, mask = (Strides("y"), Strides("dy"), Strides("dx")), Pointer("mask") if p.shows else None
    args = (Pointer("y"), Pointer("dy"), mask, Pointer("dx"), (*strides, *((Strides("mask"),) if p.shows else ())))
    return _call(p, softmax_backward, launch or choose(p, 16), args, (p.scale,))


def kept(p: Softmax, wanted: frozenset[str]) -> tuple[str, ...]:
    """The mask only where hidden scores are not all of probability 0."""
    return ("y", "mask") if p.shows else ("y",)


# -- plain PyTorch --------------------------------------------------------------------------------------------------------


def _hidden(p: Softmax, device: Any) -> Any:
    """What the triangle hides, (rows, columns); None without one."""
    import torch

    if not p.causal:
        return None
    _, _, rows, columns = p["x"].shape
    return torch.ones(rows, columns, dtype=torch.bool, device=device).triu(columns - rows + 1)


def host_forward(p: Softmax, t: dict[str, Any], outputs: tuple[str, ...]) -> dict[str, Any]:
    x = t["x"].float() * p.scale
    if p.has("mask"):
        x = x.masked_fill(t["mask"] != 0, p.fill)
    hidden = _hidden(p, x.device)
    if hidden is not None:
        x = x.masked_fill(hidden, -float("inf"))
    top = x.nan_to_num(nan=1.0).amax(-1, keepdim=True) if x.numel() else x[..., :1]
    blind = (top == p.fill) | (top < -3e38)
    return {"y": x.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)}


def host_backward(p: Softmax, t: dict[str, Any], outputs: tuple[str, ...]) -> dict[str, Any]:
    y = t["y"].float()
    dy = t["dy"].float().masked_fill(y == 0.0, 0.0)
    dy = dy - (y * dy).sum(-1, keepdim=True)
    if p["x"].dtype == "fp32":  # as the kernel's T.exact
        dy = dy - (y * dy).sum(-1, keepdim=True)
    dx = p.scale * y * dy
    return {"dx": dx.masked_fill(t["mask"] != 0, 0.0) if p.shows else dx}


SOFTMAX = Op(Softmax, forward, backward, host_forward, host_backward, kept)
