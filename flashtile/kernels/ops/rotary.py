"""Rotary position embedding of q and k in one launch (RoFormer, arXiv 2104.09864).

    (x_i, x_j) -> (x_i cos - x_j sin, x_i sin + x_j cos)  at the token's position, in float32

Element i is paired with j = i + rotary_dim / 2 (NeoX), or interleaved with its neighbour (GPT-J). The backward turns back.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar

from flashtile.errors import InvalidProblem
from flashtile.plan.call import KernelCall, Pointer, Strides
from flashtile.plan.device import Device
from flashtile.plan.op import Op, Steps
from flashtile.problem.op import FLOATS, Companion, Described
from flashtile.triton_glue.language import jit, tl


@dataclass(frozen=True)
class Rotary(Companion):
    """q (batch, seqlen, heads_q, head_dim), k (batch, seqlen, heads_kv, head_dim); cos, sin (length, rotary_dim / 2).

    positions (batch, seqlen): the row of cos and sin of each token; without them offset + 0, 1, 2, ...
    """

    interleaved: bool = False
    conjugate: bool = False
    offset: int = 0
    inplace: bool = False

    op: ClassVar[str] = "rotary"
    tensors: ClassVar[tuple[str, ...]] = ("q", "k", "cos", "sin", "positions")
    differentiable: ClassVar[tuple[str, ...]] = ("q", "k")
    linear: ClassVar[tuple[str, ...]] = ("q", "k")

    def check(self) -> None:
        for name, axes in (("q", "(batch, seqlen, heads, head_dim)"), ("cos", "(length, rotary_dim / 2)")):
            shape = self[name].shape if self.has(name) else None
            if shape is None or len(shape) != len(axes.split(", ")):
                raise InvalidProblem(f"{name} has shape {shape}; it must be {axes}.")
        self.expect_dtype("q", FLOATS)
        self.expect_dtype("cos", FLOATS)
        k, (batch, seqlen, _, head_dim) = self.find("k"), self["q"].shape
        if k is not None:
            if len(k.shape) != 4 or (k.shape[0], k.shape[1], k.shape[3]) != (batch, seqlen, head_dim):
                raise InvalidProblem(f"k has shape {k.shape}; it must be that of q {self['q'].shape} but for its heads.")
            self.expect_dtype("k", FLOATS)
        if (sin := self.find("sin")) != self["cos"]:
            is_what = sin and sin.spell()
            raise InvalidProblem(f"sin is {is_what}; it must have the shape and dtype of cos, {self['cos'].spell()}.")
        if not 1 <= self.half or 2 * self.half > head_dim:
            raise InvalidProblem(
                f"cos has {self.half} columns; they must be 1 to {head_dim // 2}, half of head_dim {head_dim}."
            )
        self.expect("positions", (batch, seqlen), "(batch, seqlen)", ("int32", "int64"))
        self.expect_bool("interleaved", "conjugate", "inplace")
        if isinstance(self.offset, bool) or not isinstance(self.offset, int) or self.offset < 0:
            raise InvalidProblem(f"offset is {self.offset!r}; it must be an int of at least 0.")
        length = self["cos"].shape[0]
        if not self.has("positions") and self.offset + seqlen > length:
            raise InvalidProblem(f"positions reach {self.offset + seqlen - 1}; cos and sin have {length} rows, one for each.")
        if self.has("positions") and self.offset:
            raise InvalidProblem(f"offset is {self.offset} and positions are given; it must be 0 beside them.")

    @property
    def half(self) -> int:
        return self["cos"].shape[1]

    def outputs(self) -> dict[str, Described]:
        return {f"out_{name}": self[name] for name in ("q", "k") if self.has(name)}

    def public(self) -> tuple[str, ...]:
        return tuple(self.outputs())

    def always_arrive(self) -> tuple[str, ...]:
        return self.public()


@dataclass(frozen=True)
class RotaryTile:
    """Compile-time part: `rows` heads of tokens at a time, `block` >= half columns, `rest` >= columns that are copied."""

    rows: int
    block: int
    half: int
    rest: int
    head_dim: int
    interleaved: bool
    conjugate: bool


# -- kernel ---------------------------------------------------------------------------------------------------------------


@jit
def angles(tables, row, there, T: tl.constexpr):
    """(cos, sin) of rows of the tables, in float32, for tiles (rows, block); NaN where a row is beyond them."""
    cos_ptr, sin_ptr, length, cos_strides, sin_strides = tables
    column = tl.arange(0, T.block)
    exists = (row >= 0) & (row < length)
    inside = (exists & there)[:, None] & (column < T.half)[None, :]
    cos_at = row[:, None] * cos_strides[0] + column[None, :] * cos_strides[1]
    sin_at = row[:, None] * sin_strides[0] + column[None, :] * sin_strides[1]
    cos = tl.load(cos_ptr + cos_at, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + sin_at, mask=inside, other=0.0).to(tl.float32)
    if T.conjugate:
        sin = -sin
    return tl.where(exists[:, None], cos, float("nan")), sin


@jit
def rotate(tables, positions_ptr, x_ptr, out_ptr, strides, sizes, offset, tile, HEADS: tl.constexpr, T: tl.constexpr):
    """A tile of rows of one tensor; strides of (x, out, positions), sizes = (tokens, seqlen)."""
    index = tile * T.rows + tl.arange(0, T.rows)  # more than 2^31 heads of tokens fill no memory
    token, head = index // HEADS, (index % HEADS).to(tl.int64)
    there = token < sizes[0]
    batch, place = (token // sizes[1]).to(tl.int64), (token % sizes[1]).to(tl.int64)
    position = place + offset
    if positions_ptr is not None:
        position = tl.load(positions_ptr + batch * strides[2][0] + place * strides[2][1], mask=there, other=0).to(tl.int64)
    cos, sin = angles(tables, position, there, T)
    x_row = x_ptr + (batch * strides[0][0] + place * strides[0][1] + head * strides[0][2])[:, None]
    out_row = out_ptr + (batch * strides[1][0] + place * strides[1][1] + head * strides[1][2])[:, None]
    kind = out_ptr.dtype.element_ty
    if T.interleaved:
        BLOCK: tl.constexpr = T.block
        ROWS: tl.constexpr = T.rows
        column = tl.arange(0, 2 * BLOCK)[None, :]
        inside = there[:, None] & (column < 2 * T.half)
        x = tl.load(x_row + column * strides[0][3], mask=inside, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, [ROWS, BLOCK, 2]))
        turned = tl.join(first * cos - second * sin, first * sin + second * cos)
        tl.store(out_row + column * strides[1][3], tl.reshape(turned, [ROWS, 2 * BLOCK]).to(kind), mask=inside)
    else:
        column = tl.arange(0, T.block)[None, :]
        inside = there[:, None] & (column < T.half)
        first = tl.load(x_row + column * strides[0][3], mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x_row + (column + T.half) * strides[0][3], mask=inside, other=0.0).to(tl.float32)
        tl.store(out_row + column * strides[1][3], (first * cos - second * sin).to(kind), mask=inside)
        tl.store(out_row + (column + T.half) * strides[1][3], (first * sin + second * cos).to(kind), mask=inside)
    if T.rest > 0:
        column = 2 * T.half + tl.arange(0, T.rest)[None, :]
        inside = there[:, None] & (column < T.head_dim)
        tl.store(out_row + column * strides[1][3], tl.load(x_row + column * strides[0][3], mask=inside), mask=inside)


@jit
def rotary(tables, positions_ptr, inputs, outputs, strides, sizes, offset, tiles, HEADS: tl.constexpr, T: tl.constexpr):
    """q and, from tile `tiles` on, k. strides of (q, k, out_q, out_k, positions); HEADS of (q, k)."""
    tile = tl.program_id(0)
    if tile < tiles:
        rotate(
            tables, positions_ptr, inputs[0], outputs[0], (strides[0], strides[2], strides[4]), sizes, offset, tile, HEADS[0], T
        )
    else:
        if inputs[1] is not None:
            rotate(tables, positions_ptr, inputs[1], outputs[1], (strides[1], strides[3], strides[4]), sizes, offset,
                   tile - tiles, HEADS[1], T)  # fmt: skip


# -- plans ----------------------------------------------------------------------------------------------------------------


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _steps(
    p: Rotary, inputs: tuple[str, ...], outputs: tuple[str, ...], conjugate: bool, rows: int | None, copies: bool
) -> Steps:
    """One launch; four 16-byte loads of q or k in flight per thread, of those turned or of those copied."""
    batch, seqlen, _, head_dim = p["q"].shape
    block, rest = max(_power(p.half), 4), _power(head_dim - 2 * p.half) if copies and head_dim > 2 * p.half else 0
    rows = rows or max(1, 4096 // max(2 * block, rest))
    constants = RotaryTile(rows, block, p.half, rest, head_dim, p.interleaved, conjugate)
    heads = tuple(p[name].shape[2] if p.has(name) else 1 for name in ("q", "k"))
    tiles = [ceil(batch * seqlen * p[name].shape[2] / rows) for name in ("q", "k") if p.has(name)]
    two, none = p.has("k"), (0, 0, 0, 0)
    args = (
        (Pointer("cos"), Pointer("sin"), p["cos"].shape[0], Strides("cos"), Strides("sin")),
        Pointer("positions") if p.has("positions") else None,
        (Pointer(inputs[0]), Pointer(inputs[1]) if two else None), (Pointer(outputs[0]), Pointer(outputs[1]) if two else None),
        (Strides(inputs[0]), Strides(inputs[1]) if two else none, Strides(outputs[0]), Strides(outputs[1]) if two else none,
         Strides("positions") if p.has("positions") else (0, 0)),
        (batch * seqlen, seqlen), p.offset, tiles[0],
    )  # fmt: skip
    return Steps((KernelCall(rotary, (sum(tiles), 1, 1), args, (("HEADS", heads), ("T", constants)), 4, 1),))


def forward(p: Rotary, device: Device, made: tuple[str, ...], rows: int | None = None) -> Steps:
    return _steps(p, ("q", "k"), ("out_q", "out_k"), p.conjugate, rows, not p.inplace)


def backward(p: Rotary, device: Device, wanted: frozenset[str], arriving: frozenset[str], rows: int | None = None) -> Steps:
    if wanted == {"k"}:  # as the q of a problem of its own
        given = tuple((("q" if n == "k" else n), d) for n, d in p.given if n != "q")
        return _steps(Rotary(given, p.interleaved, offset=p.offset), ("dout_k",), ("dk",), not p.conjugate, rows, True)
    if wanted == {"q"} and p.has("k"):
        given = tuple((n, d) for n, d in p.given if n != "k")
        return _steps(Rotary(given, p.interleaved, offset=p.offset), ("dout_q",), ("dq",), not p.conjugate, rows, True)
    return _steps(p, ("dout_q", "dout_k"), ("dq", "dk"), not p.conjugate, rows, True)


def kept(p: Rotary, wanted: frozenset[str]) -> tuple[str, ...]:
    return ("cos", "sin", *(("positions",) if p.has("positions") else ()))


def over(p: Rotary) -> dict[str, str]:
    return {f"out_{name}": name for name in ("q", "k") if p.has(name)} if p.inplace else {}


# -- plain PyTorch --------------------------------------------------------------------------------------------------------


def turn(p: Rotary, t: dict[str, Any], x: Any, conjugate: bool) -> Any:
    """x rotated, or back, in float32."""
    _, seqlen, _, _ = x.shape
    cos, sin = t["cos"].float(), t["sin"].float()
    if p.has("positions"):
        position = t["positions"].long()
        beyond = (position < 0) | (position >= len(cos))
        position = position.where(~beyond, 0)
        cos, sin = (table if len(table) else table.new_zeros(1, p.half) for table in (cos, sin))  # of no row all lie beyond
        cos, sin = cos[position].masked_fill(beyond[..., None], float("nan"))[:, :, None], sin[position][:, :, None]
    else:
        cos, sin = (table[p.offset : p.offset + seqlen][None, :, None] for table in (cos, sin))
    sin = -sin if conjugate else sin
    turned, part = x.float(), x[..., : 2 * p.half].float()
    first, second = (part[..., ::2], part[..., 1::2]) if p.interleaved else part.chunk(2, -1)
    both = (first * cos - second * sin, first * sin + second * cos)
    turned = turned.clone()
    if p.interleaved:
        turned[..., : 2 * p.half : 2], turned[..., 1 : 2 * p.half : 2] = both
    else:
        turned[..., : p.half], turned[..., p.half : 2 * p.half] = both
    return turned


def host_forward(p: Rotary, t: dict[str, Any], outputs: tuple[str, ...]) -> dict[str, Any]:
    return {name: turn(p, t, t[name.removeprefix("out_")], p.conjugate) for name in outputs}


def host_backward(p: Rotary, t: dict[str, Any], outputs: tuple[str, ...]) -> dict[str, Any]:
    return {name: turn(p, t, t[f"dout_{name[1:]}"], not p.conjugate) for name in outputs}


ROTARY = Op(Rotary, forward, backward, host_forward, host_backward, kept, over=over)
