"""Writing new keys and values into the pages of a cache."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.kernels.device.stored import narrowed
from flashtile.plan.buffers import append_buffers
from flashtile.plan.call import KernelCall, Plan, Pointer, Strides
from flashtile.problem.cache import AppendProblem
from flashtile.problem.stored import LARGEST
from flashtile.triton_glue.language import constexpr, jit, tl

ELEMENTS = 4096  # that a program copies
LEAST_SCALE = constexpr(2.0**-126)  # of a token: one over it is finite


@dataclass(frozen=True)
class How:
    """What the compiler must know: rows of a page, 1 where nobody asks; heads that a program writes; widths of rows and of
    their tiles; and what is stored, as `problem.stored.Stored` has it, "" for what comes.
    """

    page: int
    rows: int
    width: int
    width_v: int
    columns: int
    columns_v: int
    stored: str
    k_scale: str
    v_scale: str

    @property
    def most(self) -> float:
        """The largest number that is stored."""
        return LARGEST.get(self.stored, 0.0)


@jit
def copy_rows(ptrs, strides, token, entry, head, there, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, STORED: tl.constexpr,
              MOST: tl.constexpr, SCALE: tl.constexpr):  # fmt: skip
    """Rows of one tensor, a head of a token each; ptrs and strides of what comes, its cache, its scales; token = (slab, place)
    of each, entry = (page, row) in the cache.
    """
    in_ptr, out_ptr, scale_ptr = ptrs
    in_strides, out_strides, scale_strides = strides
    slab, place = token
    page, row = entry
    column = tl.arange(0, COLUMNS).to(tl.int64)
    source = slab * in_strides[0] + place * in_strides[1] + head * in_strides[2]
    target = page * out_strides[0] + row * out_strides[1] + head * out_strides[2]
    inside = there[:, None] & (column < WIDTH)[None, :]
    x = tl.load(in_ptr + source[:, None] + column[None, :] * in_strides[3], mask=inside, other=0.0)
    if STORED != "":
        x = x.to(tl.float32)
        if SCALE == "token":
            top = tl.max(tl.abs(x), 1)
            scale = tl.where(top > 0.0, tl.div_rn(top, tl.full(top.shape, MOST, tl.float32)), 1.0)
            scale = tl.maximum(scale, LEAST_SCALE)
            tl.store(scale_ptr + page * scale_strides[0] + row * scale_strides[1] + head * scale_strides[2], scale, mask=there)
            x = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
        elif SCALE == "head":
            at = slab * scale_strides[0] + place * scale_strides[1] + head * scale_strides[2]
            scale = tl.load(scale_ptr + at, mask=there, other=1.0)
            x = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
        x = narrowed(x, MOST, STORED)
    tl.store(out_ptr + target[:, None] + column[None, :] * out_strides[3], x, mask=inside)


@jit
def row_of(place_ptrs, strides, slab, place, there, seqlen, items, rows, PAGE: tl.constexpr):
    """(page, row) of new tokens by the items' lengths, and whether an item has a page for it.

    Where lengths grow they count rows up to an item's first new one, else up to its last.
    """
    GROWS: tl.constexpr = place_ptrs[4] is not None  # pyright: ignore[reportAssignmentType]
    if place_ptrs[3] is not None:
        before = (place * 0).to(tl.int32)
        for start in tl.range(0, items + 1, 64):
            other = start + tl.arange(0, 64)
            cu = tl.load(place_ptrs[3] + other, mask=other <= items, other=2**31 - 1)
            before += tl.sum((cu[None, :] <= place[:, None]).to(tl.int32), 1)
        there = there & (before > 0) & (before <= items)
        item = tl.where(there, before - 1, 0).to(tl.int64)
        edge = tl.load(place_ptrs[3] + item + (0 if GROWS else 1), mask=there, other=0).to(tl.int64)
    else:
        item, edge = slab, place * 0 + (0 if GROWS else seqlen)
    position = tl.load(place_ptrs[1] + item, mask=there, other=0).to(tl.int64) - edge + place
    there = there & (position >= 0) & (position < rows)
    if place_ptrs[2] is not None:
        entry = place_ptrs[2] + item * strides[0] + position // PAGE * strides[1]
        page = tl.load(entry, mask=there, other=-1).to(tl.int64)
        return page, position % PAGE, there & (page >= 0)
    else:
        return item, position, there


@jit
def grow(place_ptrs, seqlen, items):
    """Write how many rows items have with the new ones."""
    for start in tl.range(0, items, 64):
        item = start + tl.arange(0, 64)
        there = item < items
        count = item * 0 + seqlen
        if place_ptrs[3] is not None:
            count = tl.load(place_ptrs[3] + item + 1, mask=there, other=0) - tl.load(place_ptrs[3] + item, mask=there, other=0)
        before = tl.load(place_ptrs[1] + item, mask=there, other=0)
        tl.store(place_ptrs[4] + item, before + count, mask=there)


@jit(do_not_specialize=["tokens", "seqlen", "heads", "pages", "items", "most"])
def append_rows(in_ptrs, out_ptrs, scale_ptrs, place_ptrs, strides, tokens, seqlen, heads, pages, items, most,
                HOW: tl.constexpr):  # fmt: skip
    """How.rows heads of tokens; in_ptrs = (k, v), out_ptrs = (k_cache, v_cache), scale_ptrs theirs; place_ptrs = (slots, or
    seqused_k, page_table or None, cu_seqlens or None, after where lengths grow); strides of the first six, slots and
    page_table; most: rows that an item may have. No v where values are columns of keys.
    """
    if place_ptrs[4] is not None:
        if tl.program_id(0) == 0:
            grow(place_ptrs, seqlen, items)
    STORED: tl.constexpr = HOW.stored
    K_SCALE: tl.constexpr = HOW.k_scale
    V_SCALE: tl.constexpr = HOW.v_scale
    index = tl.program_id(0).to(tl.int64) * HOW.rows + tl.arange(0, HOW.rows)
    token, head = index // heads, index % heads
    slab, place = token // seqlen, token % seqlen
    if place_ptrs[0] is not None:
        slot = tl.load(place_ptrs[0] + slab * strides[6][0] + place * strides[6][1], mask=token < tokens, other=-1)
        page, row, there = slot // HOW.page, slot % HOW.page, slot >= 0
    else:
        page, row, there = row_of(place_ptrs, strides[7], slab, place, token < tokens, seqlen, items, most, HOW.page)
    there = there & (page < pages)
    copy_rows((in_ptrs[0], out_ptrs[0], scale_ptrs[0]), (strides[0], strides[2], strides[4]), (slab, place), (page, row), head,
              there, HOW.width, HOW.columns, STORED, HOW.most, K_SCALE)  # fmt: skip
    if in_ptrs[1] is not None:
        copy_rows((in_ptrs[1], out_ptrs[1], scale_ptrs[1]), (strides[1], strides[3], strides[5]), (slab, place), (page, row),
                  head, there, HOW.width_v, HOW.columns_v, STORED, HOW.most, V_SCALE)  # fmt: skip


def plan_append(p: AppendProblem) -> Plan:
    """One launch."""
    columns, columns_v = (1 << (n - 1).bit_length() for n in (p.head_dim, p.head_dim_v))
    rows = max(1, ELEMENTS // max(columns, columns_v))
    tokens = p.slabs * p.seqlen
    how = How(
        p.page_size if p.items is None or p.columns is not None else 1, rows, p.head_dim, p.head_dim_v, columns, columns_v,
        "" if p.stored is None else p.stored.dtype, p.scaling("k"), p.scaling("v"),
    )  # fmt: skip
    scales = {side: f"{side}_scale{'_out' if p.scaling(side) == 'token' else ''}" for side in p.sides if p.scaling(side)}

    def each(form: str) -> list[str | None]:
        return [form.format(side) if side in p.sides else None for side in "kv"]

    given, made, scaled = each("{}"), each("{}_out"), [scales.get(side) for side in "kv"]
    places = [n if n in p.shapes() else None for n in ("slots", "seqused_k", "page_table", "cu_seqlens")]
    places.append("after" if p.grows else None)
    strided = (*given, *made, *scaled, places[0], places[2])
    call = KernelCall(
        append_rows, (-(-tokens * p.heads_kv // rows), 1, 1),
        (*(tuple(None if n is None else Pointer(n) for n in names) for names in (given, made, scaled, places)),
         tuple((0, 0, 0, 0) if n is None else Strides(n) for n in strided), tokens, p.seqlen, p.heads_kv, p.pages, p.items or 0,
         p.page_size * (1 if p.columns is None else p.columns)),
        (("HOW", how),), 4, 1,
    )  # fmt: skip
    return Plan(p, "triton", "", append_buffers(p), (call,), ("append, one launch",))
