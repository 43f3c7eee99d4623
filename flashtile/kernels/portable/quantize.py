"""16-bit rows as e4m3 with a scale for every head of an item: some heads' largest numbers are found while others are stored."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.kernels.device.memory import head_offset, tile_offsets
from flashtile.kernels.device.stored import as_bytes
from flashtile.kernels.portable.stored import FIRST_FP8
from flashtile.plan.call import Buffer, KernelCall, Plan, Pointer, Strides
from flashtile.plan.device import Device
from flashtile.triton_glue.language import INTERPRETED, constexpr, jit, tl

ELEMENTS = 8192  # of a tile
TOGETHER_BYTES = 12 << 20  # of heads whose numbers are read twice: with the next ones' they have to stay in half of an L2 cache
PROGRAMS = 6  # of a multiprocessor, which hide each other's waiting
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
def wide_tile(in_ptrs, strides, slab, tile, head, span, heads, T: tl.constexpr):
    """(x less its mean in float32, items, rows) of a tile of a head; 0 and -1 where there is none."""
    ROWS: tl.constexpr = T.rows
    COLUMNS: tl.constexpr = T.columns
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
    return x, item, row


@jit
def keep_largest(x, item, head, heads, top_ptr):
    """Raise the largest magnitudes of rows' items, as float32's bits: of numbers that are not negative they rise as these do."""
    size = tl.abs(x)
    most = tl.max(tl.where(size < float("inf"), size, 0.0), 1)  # NaN is below nothing
    most = tl.where(item >= 0, most, 0.0).to(tl.int32, bitcast=True)
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
def over(x, scale, T: tl.constexpr):
    """x over the scale of each row, rounded once: in three instructions where one may multiply and add."""
    if T.native:
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None].broadcast_to(x.shape)
        wide = scale[:, None].broadcast_to(x.shape)
        near = x * inverse
        return tl.fma(tl.fma(-near, wide, x), inverse, near)
    else:
        return tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))


@jit
def store_tile(x, item, row, slab, head, top_ptr, out_ptr, strides, span, heads, T: tl.constexpr):
    """e4m3 of x over its scale. Rows that do not count are over 1, and hold whatever they come to."""
    ROWS: tl.constexpr = T.rows
    COLUMNS: tl.constexpr = T.columns
    NATIVE: tl.constexpr = T.native
    at = tl.maximum(item, 0).to(tl.int64) * heads + head
    # past the nearest cache, which may hold the line of before other heads were done
    scale = scale_of_top(tl.load(top_ptr + at, mask=item >= 0, other=0, cache_modifier=".cg"))
    x = tl.where(tl.abs(x) < float("inf"), over(x, scale, T), float("nan"))  # e4m3 has no infinity
    inside = (row < span)[:, None] & (tl.arange(0, COLUMNS) < T.head_dim)[None, :]
    line = out_ptr + head_offset(slab, head, strides) + (row - tl.arange(0, ROWS)).to(tl.int64)[:, None] * strides[1]
    tl.store(line + tile_offsets(strides, ROWS, COLUMNS), as_bytes(x, NATIVE), mask=inside)


@jit
def store_scales(slab, head, top_ptr, scale_ptr, items, heads):
    """The scales of a head of a slab's items."""
    for first in tl.range(0, items, 128):
        number = first + tl.arange(0, 128)
        at = (slab * items + number).to(tl.int64) * heads + head
        top = tl.load(top_ptr + at, mask=number < items, other=0, cache_modifier=".cg")
        tl.store(scale_ptr + at, scale_of_top(top), mask=number < items)


@jit(do_not_specialize=["span", "items"])
def quantize_heads(in_ptrs, count_ptrs, out_ptrs, strides, out_strides, span, heads, slabs, items, together, T: tl.constexpr):
    """y: e4m3 of x over its scale, and the scales; each head of a slab has `items` items.

    Heads go `together`, so many that the cache still holds them when all of their largest numbers are known: those of the
    next ones are sought in between. A program takes tile after tile, by tickets in this order, so that whoever waits for a
    tile waits for one that somebody works at.
    in_ptrs = (x, which item a row is of or None, mean or None); count_ptrs = (largest magnitudes, as bits, of items and heads;
    tickets, and how many tiles of each group of heads are done), all 0 before; out_ptrs = (y, scale); strides of x and of the
    rows' items, or None; out_strides of y.
    """
    tiles, groups = tl.cdiv(span, T.rows), heads // together
    each, last = tiles * together, 2 * slabs * groups - 1
    ticket = tl.atomic_add(count_ptrs[1], 1, sem="relaxed")
    while ticket < (last + 1) * each:
        following = tl.atomic_add(count_ptrs[1], 1, sem="relaxed")
        turn, place = ticket // each, ticket % each
        stores = ((turn > 0) & (turn % 2 == 0)) | (turn == last)
        group = tl.where(turn == last, last // 2, tl.where(stores, turn // 2 - 1, (turn + 1) // 2))
        slab, head, tile = group // groups, group % groups * together + place % together, place // together
        x, item, row = wide_tile(in_ptrs, strides, slab, tile, head, span, heads, T)
        done_ptr = count_ptrs[1] + 1 + group
        if stores:
            done = tl.atomic_add(done_ptr, 0, sem="acquire")
            while done < each:
                done = tl.atomic_add(done_ptr, 0, sem="acquire")
            store_tile(x, item, row, slab, head, count_ptrs[0], out_ptrs[0], out_strides, span, heads, T)
            if tile == 0:
                store_scales(slab, head, count_ptrs[0], out_ptrs[1], items, heads)
        else:
            keep_largest(x, item, head, heads, count_ptrs[0])
            tl.debug_barrier()  # of the program: its numbers are there before it says so
            tl.atomic_add(done_ptr, 1, sem="release")
        ticket = following


def heads_together(p: QuantizeProblem) -> int:
    """Heads of a slab whose 16-bit numbers, and as many again, the cache holds: a divisor of all."""
    most = max(1, TOGETHER_BYTES // (2 * p.span * p.head_dim))
    return max(n for n in range(1, p.heads + 1) if p.heads % n == 0 and n <= most)


def plan_quantize(p: QuantizeProblem, device: Device) -> Plan:
    """One launch. Inputs x, `item`, `mean`; outputs y (bytes), scale (items, heads), and top and tickets, for it alone."""
    shape, together = (p.slabs, p.span, p.heads, p.head_dim), heads_together(p)
    columns = 1 << (p.head_dim - 1).bit_length()
    native = device.kind == "cuda" and device.arch >= FIRST_FP8 and not INTERPRETED
    tile = QuantizeTile(max(16, ELEMENTS // columns), columns, p.head_dim, native)
    tickets = 2 * -(-p.span // tile.rows) * p.slabs * p.heads
    programs = min(tickets, PROGRAMS * max(device.sm_count, 1))
    given = (Pointer("x"), Pointer("item") if p.named else None, Pointer("mean") if p.shifted else None)
    strides = (Strides("x"), Strides("item") if p.named else None)
    call = KernelCall(
        quantize_heads,
        (programs, 1, 1),
        (
            given,
            (Pointer("top"), Pointer("tickets")),
            (Pointer("y"), Pointer("scale")),
            strides,
            Strides("y"),
            *(p.span, p.heads, p.slabs, p.items // p.slabs, together),
        ),
        (("T", tile),),
        4,
        1,
    )
    buffers = [Buffer("x", shape, p.dtype, "input")]
    if p.named:
        buffers.append(Buffer("item", shape[:2], "int32", "input"))
    if p.shifted:
        buffers.append(Buffer("mean", (p.items, p.heads, p.head_dim), "fp32", "input"))
    buffers += [
        Buffer("top", (p.items, p.heads), "int32", "output", zeroed=True),
        Buffer("tickets", (1 + p.slabs * (p.heads // together),), "int32", "output", zeroed=True),
        Buffer("y", shape, "uint8", "output"),
        Buffer("scale", (p.items, p.heads), "fp32", "output"),
    ]
    return Plan(p, "triton", "", tuple(buffers), (call,), (f"quantize, {together} heads together",))
