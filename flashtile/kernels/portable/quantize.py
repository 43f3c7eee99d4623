"""16-bit rows as e4m3 with a scale for every head of an item: one pass finds the largest numbers, another one stores."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.kernels.device.memory import head_offset, tile_offsets
from flashtile.kernels.device.stored import as_bytes
from flashtile.kernels.portable.stored import FIRST_FP8
from flashtile.plan.call import Buffer, KernelCall, Plan, Pointer, Strides
from flashtile.plan.device import Device
from flashtile.triton_glue.language import INTERPRETED, constexpr, jit, tl

ELEMENTS = 8192  # of a tile
MOST = constexpr(448.0)  # e4m3's largest number
LEAST_SCALE = constexpr(2.0**-100)  # of rows of zeros; what it multiplies is then 0, too


@dataclass(frozen=True)
class QuantizeProblem:
    """x (slabs, span, heads, head_dim), of `items`. named: a tensor says which item each row is of, -1 where it does not count
    (otherwise an item is a slab). shifted: `mean` (items, heads, head_dim), float32, is taken from it first.
    """

    slabs: int
    span: int
    heads: int
    head_dim: int
    dtype: str
    items: int
    named: bool = False
    shifted: bool = False

    def spell(self) -> str:
        """One canonical string."""
        tail = ",named" * self.named + ",shifted" * self.shifted
        return f"quantize({self.slabs}x{self.span}x{self.heads}x{self.head_dim},{self.dtype},items={self.items}{tail})"


@dataclass(frozen=True)
class QuantizeTile:
    """Compile-time part. native: the GPU rounds to e4m3."""

    rows: int
    columns: int
    head_dim: int
    native: bool


@jit
def wide_tile(number, in_ptrs, strides, span, heads, T: tl.constexpr):
    """(x less its mean in float32, items, rows, head, slab) of the rows of a tile; 0 and -1 where there is none."""
    ROWS: tl.constexpr = T.rows
    COLUMNS: tl.constexpr = T.columns
    tiles = tl.cdiv(span, ROWS)
    head, tile, slab = number % heads, number // heads % tiles, number // heads // tiles
    row, column = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (row < span)[:, None] & (column < T.head_dim)[None, :]
    at = in_ptrs[0] + head_offset(slab, head, strides[0]) + (tile * ROWS).to(tl.int64) * strides[0][1]
    x = tl.load(at + tile_offsets(strides[0], ROWS, COLUMNS), mask=inside, other=0.0).to(tl.float32)
    if in_ptrs[1] is not None:
        item = tl.load(in_ptrs[1] + slab.to(tl.int64) * strides[1][0] + row * strides[1][1], mask=row < span, other=-1)
    else:
        item = tl.where(row < span, slab, -1)
    if in_ptrs[2] is not None:
        line = in_ptrs[2] + (tl.maximum(item, 0).to(tl.int64) * heads + head)[:, None] * T.head_dim + column[None, :]
        x -= tl.load(line, mask=inside & (item >= 0)[:, None], other=0.0)
    return x, item, row, head, slab


@jit(do_not_specialize=["span"])
def quantize_largest(in_ptrs, top_ptr, strides, span, heads, T: tl.constexpr):
    """top[item, head]: the bits of the largest finite magnitude, which are 0 before.

    in_ptrs = (x, items of rows or None, mean or None).
    """
    x, item, _, head, _ = wide_tile(tl.program_id(0), in_ptrs, strides, span, heads, T)
    size = tl.abs(x)
    most = tl.max(tl.where(size < float("inf"), size, 0.0), 1)  # NaN is below nothing
    most = tl.where(item >= 0, most, 0.0).to(tl.int32, bitcast=True)  # of numbers that are not negative bits rise as they do
    first, last = tl.min(item, 0), tl.max(item, 0)
    if first == last:
        if first >= 0:
            tl.atomic_max(top_ptr + first.to(tl.int64) * heads + head, tl.max(most, 0), sem="relaxed")
    else:
        tl.atomic_max(top_ptr + item.to(tl.int64) * heads + head, most, mask=item >= 0, sem="relaxed")


@jit
def scale_of_top(bits):
    """float32 of the largest magnitude's bits."""
    top = bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(top, tl.full(top.shape, MOST, tl.float32))
    return tl.where(top > 0.0, tl.maximum(scale, LEAST_SCALE), 1.0)


@jit
def quotient(x, scale):
    """x over its row's scale, rounded once: the reciprocal's product, and what that leaves (Markstein). inf becomes NaN."""
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None]
    near = x * inverse
    return tl.fma(tl.fma(-near, tl.broadcast_to(scale[:, None], x.shape), x), tl.broadcast_to(inverse, x.shape), near)


@jit(do_not_specialize=["span", "count"])
def quantize_store(in_ptrs, top_ptr, out_ptrs, strides, span, heads, count, T: tl.constexpr):
    """y: e4m3 of x over its scale; the `count` scales. Rows that do not count are over 1, and hold whatever they come to.

    What the pass before read last comes first: the cache still holds it.

    out_ptrs = (y, scale); strides of x, of the rows' items or None, of y.
    """
    ROWS: tl.constexpr = T.rows
    COLUMNS: tl.constexpr = T.columns
    NATIVE: tl.constexpr = T.native
    x, item, row, head, slab = wide_tile(tl.num_programs(0) - 1 - tl.program_id(0), in_ptrs, strides, span, heads, T)
    at = tl.maximum(item, 0).to(tl.int64) * heads + head
    scale = scale_of_top(tl.load(top_ptr + at, mask=item >= 0, other=0))
    x = quotient(x, scale)
    x = tl.where(tl.abs(x) < float("inf"), x, float("nan"))  # e4m3 has no infinity
    inside = (row < span)[:, None] & (tl.arange(0, COLUMNS) < T.head_dim)[None, :]
    line = out_ptrs[0] + head_offset(slab, head, strides[2]) + (row - tl.arange(0, ROWS)).to(tl.int64)[:, None] * strides[2][1]
    tl.store(line + tile_offsets(strides[2], ROWS, COLUMNS), as_bytes(x, NATIVE), mask=inside)
    for start in range(tl.program_id(0) * 128, count, tl.num_programs(0) * 128):
        number = start + tl.arange(0, 128)
        made = scale_of_top(tl.load(top_ptr + number, mask=number < count, other=0))
        tl.store(out_ptrs[1] + number, made, mask=number < count)


def plan_quantize(p: QuantizeProblem, device: Device) -> Plan:
    """Two launches. Inputs x, `item`, `mean`; outputs y (bytes), scale (items, heads), and top, which is for them alone."""
    shape, count = (p.slabs, p.span, p.heads, p.head_dim), p.items * p.heads
    columns = 1 << (p.head_dim - 1).bit_length()
    native = device.kind == "cuda" and device.arch >= FIRST_FP8 and not INTERPRETED
    tile = QuantizeTile(max(16, ELEMENTS // columns), columns, p.head_dim, native)
    grid = (-(-p.span // tile.rows) * p.slabs * p.heads, 1, 1)
    given = (Pointer("x"), Pointer("item") if p.named else None, Pointer("mean") if p.shifted else None)
    strides = (Strides("x"), Strides("item") if p.named else None, Strides("y"))
    constants = (("T", tile),)
    calls = (
        KernelCall(quantize_largest, grid, (given, Pointer("top"), strides, p.span, p.heads), constants, 4, 1),
        KernelCall(quantize_store, grid,
                   (given, Pointer("top"), (Pointer("y"), Pointer("scale")), strides, p.span, p.heads, count), constants, 4, 1),
    )  # fmt: skip
    buffers = [Buffer("x", shape, p.dtype, "input")]
    if p.named:
        buffers.append(Buffer("item", shape[:2], "int32", "input"))
    if p.shifted:
        buffers.append(Buffer("mean", (p.items, p.heads, p.head_dim), "fp32", "input"))
    buffers += [
        Buffer("top", (p.items, p.heads), "int32", "output", zeroed=True),
        Buffer("y", shape, "uint8", "output"),
        Buffer("scale", (p.items, p.heads), "fp32", "output"),
    ]
    return Plan(p, "triton", "", tuple(buffers), calls, ("quantize, two launches",))
