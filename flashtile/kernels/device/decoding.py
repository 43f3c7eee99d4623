"""What every kernel over a cache shares: whose a tile of queries is, and the sum of parts of keys, in order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from flashtile.kernels.device.exponential import exp
from flashtile.kernels.device.mask import tiles_seen
from flashtile.kernels.device.softmax import Rows, add_sink, empty_rows, finish, scored
from flashtile.kernels.device.stream import await_stream
from flashtile.plan.call import Buffer, KernelCall, Pointer, Strides
from flashtile.plan.device import Device
from flashtile.problem.cache import CachedProblem
from flashtile.problem.dtype import DType
from flashtile.triton_glue.language import jit, tl

PROGRAM_KEYS = 2048  # that one program goes through at most, where more programs are to be had
SUM_COLUMNS = 32  # of the values that a program of the sum has at least
LOADS = 8  # parts under way: code for 16, which runs once, took 0.3 to 4 us longer (an H200)
PROGRAMS = 3.0  # of parts, that a multiprocessor is to have at least
FEW_PARTS = 4  # places of parts in the code at least, where an item has no more than half of the others
ABREAST = 4  # sums of parts that warps form side by side, where few programs add many parts up (an H200: eight were slower)
SUM_REGISTERS = (128, 160)  # for ptxas else holds few loads under way: of SUM_ELEMENTS, and of twice as many
SUM_ELEMENTS = 512  # and so many numbers of a part, where a tile has fewer rows than these take

UNSPECIALIZED = ["seqlen_q", "batch", "group", "capacity", "pages", "left", "right"]


@dataclass(frozen=True)
class Packing:
    """What the compiler must know beside the tile: query heads that a tile packs, tiles that a group of heads takes, rows of a
    page (1 without a table, where nobody asks), keys of a part (0 for one pass), parts of a program; whether the sum of parts
    begins early.

    stored, k_scale, v_scale: as `problem.cache.Stored` has them, "" for a cache of the queries' dtype. native:
    Triton makes fp16 of them well. lowers: queries are bf16 and multiplied in fp16, which numbers of the cache become with
    fewer instructions. shared: values are the first T.head_dim_v columns of the keys, which have `rest` more, in rest_columns,
    where they lie apart in a pool of their own. abreast: sums that a program of the sum forms side by side. near: parts that a
    tile of queries sees a key of at most, where a window leaves no more than are added up first; else 0. whole: where not 0, at
    least as many as there are items, and results of items whose lengths are `alike` are there already.
    """

    heads: int
    chunks: int
    page: int
    split: int
    parts: int
    early: bool
    stored: str = ""
    k_scale: str = ""
    v_scale: str = ""
    native: bool = False
    lowers: bool = False
    shared: bool = False
    apart: bool = False
    rest: int = 0
    rest_columns: int = 0
    abreast: int = 1
    near: int = 0
    whole: int = 0


class Seat(NamedTuple):
    """A tile's item, and where its queries lie."""

    batch: tl.tensor  # the item; in a packed batch, one behind the last for queries that belong to none
    slab: tl.tensor  # of the tensors' first axis
    first_q: tl.tensor  # the item's first query in the second axis
    span: tl.tensor  # queries that are written
    q: tl.tensor  # queries that count
    k: tl.tensor  # keys
    first_k: tl.tensor  # the row of the first key
    token: tl.tensor  # the tile's first query, within the item


@jit
def seat_of(tile, cu_ptr, used_ptr, first_ptr, seqlen_q, batch, capacity, TOKENS: tl.constexpr):
    """The Seat of a tile. Packed items begin at tile cu // TOKENS + item: the host knows how many tiles there can be."""
    if cu_ptr is not None:
        before = tile * 0
        for start in tl.range(0, batch + 1, 128):
            other = start + tl.arange(0, 128)
            cu = tl.load(cu_ptr + other, mask=other <= batch, other=0)
            cu = tl.minimum(tl.maximum(cu, 0), seqlen_q)
            begins = (other <= batch) & (cu // TOKENS + other <= tile)
            before += tl.sum(begins.to(tl.int32))
        item = tl.maximum(before - 1, 0)
        first_q = tl.minimum(tl.maximum(tl.load(cu_ptr + item), 0), seqlen_q)
        end = tl.load(cu_ptr + item + 1, mask=item < batch, other=seqlen_q)
        span = tl.maximum(tl.minimum(end, seqlen_q) - first_q, 0)
        token = (tile - first_q // TOKENS - item) * TOKENS
        slab = item * 0
    else:
        tiles = tl.cdiv(seqlen_q, TOKENS)
        item = tile // tiles
        token = tile % tiles * TOKENS
        first_q = item * 0
        span = seqlen_q
        slab = item
    here = item < batch
    first_k = item * 0
    if first_ptr is not None:
        first_k = tl.maximum(tl.load(first_ptr + item, mask=here, other=0), 0)
    rows = tl.minimum(tl.load(used_ptr + item, mask=here, other=0), capacity)
    return Seat(item, slab, first_q, span, tl.where(here, span, 0), tl.maximum(rows - first_k, 0), first_k, token)


@jit
def tokens_of(cu_ptr, seqlen_q, batch):
    """Queries of all items."""
    if cu_ptr is not None:
        return tl.cast(seqlen_q, tl.int64)
    else:
        return tl.cast(batch, tl.int64) * seqlen_q


@jit
def write(rows, ptrs, strides, seat, place, heads, seqlen_q, exists, counts, first, COLUMNS: tl.constexpr, T: tl.constexpr):
    """out and lse of finished rows, of COLUMNS of the values from `first` on; 0 and -inf of rows that do not count.

    ptrs = (out, lse, sink or None); strides of out, sink; place = (query within its item, head) of each row.
    """
    row, head = place
    out_strides, sink_strides = strides
    if T.modifiers.sink:
        sink = tl.load(ptrs[2] + head.to(tl.int64) * sink_strides[0]).to(tl.float32)
        rows = add_sink(rows, sink.to(rows.top.dtype), T)
    out, lse = finish(rows, T)
    out, lse = tl.where(counts[:, None], out, 0.0), tl.where(counts, lse, float("-inf"))
    value = first + tl.arange(0, COLUMNS)
    at = seat.slab.to(tl.int64) * out_strides[0] + (seat.first_q + row).to(tl.int64) * out_strides[1]
    at += head.to(tl.int64) * out_strides[2]
    tl.store(ptrs[0] + at[:, None] + value.to(tl.int64)[None, :] * out_strides[3], out.to(ptrs[0].dtype.element_ty),
             mask=exists[:, None] & (value < T.head_dim_v)[None, :])  # fmt: skip
    lse_at = (seat.slab.to(tl.int64) * heads + head) * seqlen_q + seat.first_q + row
    tl.store(ptrs[1] + lse_at, lse.to(tl.float32), mask=exists & (first == 0))


@jit(do_not_specialize=UNSPECIALIZED)
def decode_combine(part_ptrs, out_ptrs, sink_ptr, strides, lengths, seqlen_q, batch, group, capacity, left, right,
                   PACK: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, SUMS: tl.constexpr,
                   T: tl.constexpr):  # fmt: skip
    """The sum of an item's parts: of PARTS of them in order, and of these sums in order.

    SUMS of these are formed one after another, PACK.abreast of them by other threads of a program; where PACK.near the parts
    of a window, of which a border may be among them. Parts without a key in the band were never written, nor are read. Grid
    (tiles, heads_kv * CHUNKS, columns_v / COLUMNS). part_ptrs = (acc, top, total) as `decode_forward` has them; strides of
    out, sink.
    """
    HEADS: tl.constexpr = PACK.heads
    CHUNKS: tl.constexpr = PACK.chunks
    SPLIT: tl.constexpr = PACK.split
    ABREAST: tl.constexpr = PACK.abreast
    NEAR: tl.constexpr = PACK.near
    ROWS: tl.constexpr = T.block_q
    TOKENS: tl.constexpr = ROWS // HEADS
    heads = tl.num_programs(1) // CHUNKS * group
    seat = seat_of(tl.program_id(0), lengths[0], lengths[1], lengths[2], seqlen_q, batch, capacity, TOKENS)
    head_kv, chunk, first = tl.program_id(1) // CHUNKS, tl.program_id(1) % CHUNKS, tl.program_id(2) * COLUMNS
    row, member, _ = places(seat, chunk, HEADS, ROWS, ROWS)
    exists = (row < seat.span) & (member < group)
    head = head_kv * group + tl.minimum(member, group - 1)
    value = first + tl.arange(0, COLUMNS)
    lo, _, _, hi, _ = tiles_seen(seat.token, seat.q, seat.k, left, right, T.mask.left, T.mask.right, TOKENS, T.block_k, T)
    a_row, a_member, abreast = places(seat, chunk, HEADS, ROWS, ROWS * ABREAST)
    counts = (a_row < seat.span) & (a_member < group) & (a_row < seat.q)
    token = seat.slab.to(tl.int64) * seqlen_q + seat.first_q + a_row
    a_head = head_kv * group + tl.minimum(a_member, group - 1)
    rows = empty_rows(ROWS, COLUMNS, T)
    if PACK.whole > 0:  # nothing is read or written then
        written = all_alike(lengths, batch, capacity, PACK)
        exists, hi = exists & (not written), tl.where(written, lo, hi)
    if PACK.early:
        await_stream()
    place = token * heads + a_head
    rows_of_part = tokens_of(lengths[0], seqlen_q, batch) * heads
    if NEAR > 0:
        begin = lo // SPLIT
        border = (begin // PARTS + 1) * PARTS  # before which parts are added up by themselves
        some = empty_rows(ROWS, COLUMNS, T)
        for i in tl.static_range(NEAR):
            behind = begin + i == border
            rows = chosen(behind, some, rows)
            some = chosen(behind, empty_rows(ROWS, COLUMNS, T), some)
            there = (begin + i < tl.cdiv(hi, SPLIT)) & counts
            some = joined(some, load_part(part_ptrs, (begin + i).to(tl.int64) * rows_of_part + place, value, there, T), T)
        rows = joined(rows, some, T)
    else:
        for start in tl.range(lo // SPLIT // PARTS * PARTS, tl.cdiv(hi, SPLIT), PARTS * SUMS * ABREAST):
            some = empty_rows(ROWS * ABREAST, COLUMNS, T)
            for i in tl.static_range(PARTS * SUMS):  # whose loads are all under way
                if i > 0 and i % PARTS == 0:
                    rows = joined(rows, some, T)
                    some = empty_rows(ROWS, COLUMNS, T)
                part = start + abreast * PARTS + i
                there = (part >= lo // SPLIT) & (part * SPLIT < hi) & counts
                some = joined(some, load_part(part_ptrs, part.to(tl.int64) * rows_of_part + place, value, there, T), T)
            if ABREAST == 1:
                rows = joined(rows, some, T)
            else:
                for which in tl.static_range(ABREAST):
                    rows = joined(rows, one_of(some, which, ABREAST, ROWS, COLUMNS), T)
    rows = scored(rows, T)
    write(rows, (out_ptrs[0], out_ptrs[1], sink_ptr), strides, seat, (row, head), heads, seqlen_q, exists,
          exists & (row < seat.q), first, COLUMNS, T)  # fmt: skip


@jit
def alike(least, most):
    """Whether items have so nearly as many keys each that no block waits for another that has all keys of a longer one."""
    return most - least <= most // 16


@jit
def all_alike(lengths, batch, capacity, PACK: tl.constexpr):
    """The same of all items, of which there are PACK.whole at most."""
    item = tl.arange(0, PACK.whole)
    item = tl.minimum(item, batch - 1)
    row = item * 0
    if lengths[2] is not None:
        row = tl.maximum(tl.load(lengths[2] + item), 0)
    keys = tl.maximum(tl.minimum(tl.load(lengths[1] + item), capacity) - row, 0)
    return alike(tl.min(keys, 0), tl.max(keys, 0))


@jit
def chosen(first, one, other):
    """One state if `first`, else the other, to the bit: a part whose values are infinite would make NaN of a weight of 0."""
    return Rows(
        tl.where(first, one.acc, other.acc), tl.where(first, one.top, other.top), tl.where(first, one.total, other.total)
    )


@jit
def load_part(part_ptrs, place, value, there, T: tl.constexpr):
    """The state of a part's rows, these columns of it; as of no key where it is not `there`."""
    top = tl.load(part_ptrs[1] + place, mask=there, other=float("-inf"))
    total = tl.load(part_ptrs[2] + place, mask=there, other=0.0)
    acc = tl.load(part_ptrs[0] + place[:, None] * T.head_dim_v + value[None, :],
                  mask=there[:, None] & (value < T.head_dim_v)[None, :], other=0.0)  # fmt: skip
    return Rows(acc, top, total)


@jit
def places(seat, chunk, HEADS: tl.constexpr, ROWS: tl.constexpr, ALL: tl.constexpr):
    """(query, head of the group, which of the ROWS times that they are repeated) of ALL rows."""
    number = tl.arange(0, ALL)
    packed = number % ROWS
    return seat.token + packed // HEADS, chunk * HEADS + packed % HEADS, number // ROWS


@jit
def one_of(some, which, ABREAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One of the states that lie abreast, which every thread then has, to the bit: the others are added as zeros."""
    wanted = tl.arange(0, ABREAST) == which
    acc = tl.where(wanted[:, None, None], tl.reshape(some.acc, (ABREAST, ROWS, COLUMNS)), 0.0)
    top = tl.where(wanted[:, None], tl.reshape(some.top, (ABREAST, ROWS)), float("-inf"))
    total = tl.where(wanted[:, None], tl.reshape(some.total, (ABREAST, ROWS)), 0.0)
    return Rows(tl.sum(acc, 0), tl.max(top, 0), tl.sum(total, 0))


@jit
def joined(rows, other, T: tl.constexpr):
    """The state of the keys of both, as `Rows` has it before `scored`: with one that saw nothing the other, to the bit.

    Every operation is said, so that kernels which form the same sum in registers, and must not contract others, have its bits.
    """
    level = tl.maximum(rows.top, other.top)
    pivot = tl.where(level == float("-inf"), 0.0, level)
    if T.modifiers.prescale:
        old, new = exp(rows.top - pivot, T), exp(other.top - pivot, T)
    else:
        old, new = tl.exp2(rows.top - pivot), tl.exp2(other.top - pivot)
    acc = tl.fma(other.acc, new[:, None], rows.acc * old[:, None])
    return Rows(acc, level, tl.fma(other.total, new, rows.total * old))


def parts_of(problem: CachedProblem, programs: int, device: Device, least: float | None = None) -> int:
    """Parts that a program forms, a power of two: of 2048 keys at most, and so many programs on every multiprocessor at least.

    programs: those that there were for one part; least: PROGRAMS unless it is said. Results are the same bits whatever it is.
    """
    tenths = round(10 * (PROGRAMS if least is None else least))  # whole numbers: exported C compares in them
    parts, keys = 1, problem.split
    if problem.split and problem.attention.dtype is not DType.FP32:
        while 2 * parts * keys <= PROGRAM_KEYS and 5 * programs * problem.splits >= tenths * parts * device.sm_count:
            parts *= 2
    return parts


def group_of(split: int) -> int:
    """Parts that are added up before their sum is added to others', whoever does it: of PROGRAM_KEYS keys."""
    return max(1, PROGRAM_KEYS // split)


def loaded_of(count: int, together: int) -> tuple[int, int]:
    """(parts that are added up first, such sums at a time) of the launch that adds up, of `count` parts at most.

    A part that is not there changes no bit of a sum, but its place takes time: one item of 1,024 keys, which has 4 parts, took
    7.7 us where 4 had places and 8.8 where 8 have (an H200). That the places are what it pays for is a guess.
    """
    there = together
    while there > FEW_PARTS and count <= there // 2:
        there //= 2
    sums = max(1, LOADS // together) if there == together else 1
    while sums > 1 and count <= together * (sums // 2):
        sums //= 2
    return there, sums


def reach_of(problem: CachedProblem, tokens: int) -> int | None:
    """Keys that a tile of so many queries sees at most; None where that is all of them."""
    p, left, right = problem.attention, problem.attention.band.left, problem.attention.band.right
    if left is None:
        return None
    last = left + p.seqlen_q  # the last query stands at the last key
    return last if right is None else min(last, left + right + tokens)


def near_of(problem: CachedProblem, split: int, count: int, together: int, tokens: int) -> int:
    """Parts of `split` keys that a tile of queries sees a key of at most, where these are few; else 0."""
    reach = None if problem.attention.lengths.varlen or together == 1 else reach_of(problem, tokens)
    if reach is None:
        return 0
    seen = max(0, -(-(reach - 1) // split)) + 1
    return seen if seen <= min(together, LOADS) and seen < count else 0


def abreast_of(problem: CachedProblem, together: int, tile: Any, device: Device) -> int:
    """Sums of parts that a program forms side by side, of one query and head: where there are several, and few programs."""
    p = problem.attention
    few = p.batch * p.seqlen_q * p.heads_q * (tile.columns_v // SUM_COLUMNS) <= ABREAST * device.sm_count
    several = 1 < together <= LOADS and problem.splits > together
    return ABREAST if several and few and not p.lengths.varlen and not tile.wide else 1


def part_buffers(problem: CachedProblem, count: int, dtype: str) -> tuple[Buffer, ...]:
    """Scratch for (acc, top, total) of so many parts."""
    p = problem.attention
    rows = (count, p.slabs * p.span_q, p.heads_q)
    return (Buffer("acc", (*rows, p.head_dim_v), dtype, "scratch"), Buffer("top", rows, dtype, "scratch"),
            Buffer("total", rows, dtype, "scratch"))  # fmt: skip


def combine_call(problem: CachedProblem, packing: Packing, tile: Any, together: int, device: Device) -> KernelCall:
    """The sum of parts, `together` of them first; tile.block_q rows at a time, or fewer where there are no more."""
    p = problem.attention
    count = -(-problem.splits // (packing.split // problem.split))
    near = near_of(problem, packing.split, count, together, tile.block_q // packing.heads)
    sums = 1
    if not near:
        together, sums = loaded_of(count, together)
    abreast = 1 if near else abreast_of(problem, together, tile, device)
    heads, chunks, sums = (1, p.group, 1) if abreast > 1 else (packing.heads, packing.chunks, sums)
    packing = Packing(heads, chunks, 1, packing.split, 1, packing.early, abreast=abreast, near=near, whole=packing.whole)
    if not p.lengths.varlen:
        rows = heads
        while rows < min(tile.block_q, p.seqlen_q * heads) and abreast == 1:
            rows *= 2
        tile = replace(tile, block_q=rows)
    tokens = tile.block_q // heads
    tiles = p.span_q // tokens + p.batch + 1 if p.lengths.varlen else p.batch * -(-p.span_q // tokens)
    columns = max(SUM_COLUMNS, SUM_ELEMENTS // tile.block_q if abreast == 1 else 0)
    columns = min(tile.columns_v, columns // (1 + tile.wide))  # float64: half as many
    few = tile.block_q * columns <= 2 * SUM_ELEMENTS and not tile.wide
    if few and tiles * p.heads_kv * chunks * (tile.columns_v // columns) < device.sm_count:
        columns = min(tile.columns_v, SUM_COLUMNS)  # else multiprocessors are idle
    sink = Pointer("sink") if p.sink is not None else None
    parts = tuple(Pointer(name) for name in ("acc", "top", "total"))
    lengths = (
        Pointer("cu_seqlens_q") if p.lengths.varlen else None, Pointer("seqused_k"),
        Pointer("first_k") if problem.pages.first else None,
    )  # fmt: skip
    strides = (Strides("out"), (0,) if sink is None else Strides("sink"))
    return KernelCall(
        decode_combine, (tiles, p.heads_kv * chunks, tile.columns_v // columns),
        (parts, (Pointer("out"), Pointer("lse")), sink, strides, lengths, p.span_q, p.batch, p.group, problem.pages.capacity,
         p.band.left or 0, p.band.right or 0),
        (("PACK", packing), ("COLUMNS", columns), ("PARTS", together), ("SUMS", sums), ("T", tile)), 4, 1,
        False, SUM_REGISTERS[tile.block_q * columns > SUM_ELEMENTS] if few else None, packing.early,
    )  # fmt: skip
