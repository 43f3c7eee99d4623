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
    """What the compiler must know: rows of a page; heads; heads that a program writes; widths of rows and of their tiles; and
    what is stored, as `problem.stored.Stored` has it, "" for what comes.
    """

    page: int
    heads: int
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
def copy_rows(in_ptr, out_ptr, scale_ptr, in_strides, out_strides, scale_strides, slab, place, page, row, head, there,
              WIDTH: tl.constexpr, COLUMNS: tl.constexpr, STORED: tl.constexpr, MOST: tl.constexpr,
              SCALE: tl.constexpr):  # fmt: skip
    """Rows of one tensor, a head of a token each."""
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


@jit(do_not_specialize=["tokens", "seqlen", "pages"])
def append_rows(in_ptrs, out_ptrs, scale_ptrs, slots_ptr, strides, tokens, seqlen, pages, HOW: tl.constexpr):
    """How.rows heads of tokens; in_ptrs = (k, v), out_ptrs = (k_cache, v_cache), scale_ptrs theirs; strides of these six and of
    slots. No v where values are columns of keys.
    """
    STORED: tl.constexpr = HOW.stored
    K_SCALE: tl.constexpr = HOW.k_scale
    V_SCALE: tl.constexpr = HOW.v_scale
    index = tl.program_id(0).to(tl.int64) * HOW.rows + tl.arange(0, HOW.rows)
    token, head = index // HOW.heads, index % HOW.heads
    slab, place = token // seqlen, token % seqlen
    slot = tl.load(slots_ptr + slab * strides[6][0] + place * strides[6][1], mask=token < tokens, other=-1)
    page, row = slot // HOW.page, slot % HOW.page
    there = (slot >= 0) & (page < pages)
    copy_rows(in_ptrs[0], out_ptrs[0], scale_ptrs[0], strides[0], strides[2], strides[4], slab, place, page, row, head, there,
              HOW.width, HOW.columns, STORED, HOW.most, K_SCALE)  # fmt: skip
    if in_ptrs[1] is not None:
        copy_rows(in_ptrs[1], out_ptrs[1], scale_ptrs[1], strides[1], strides[3], strides[5], slab, place, page, row, head,
                  there, HOW.width_v, HOW.columns_v, STORED, HOW.most, V_SCALE)  # fmt: skip


def plan_append(p: AppendProblem) -> Plan:
    """One launch."""
    columns, columns_v = (1 << (n - 1).bit_length() for n in (p.head_dim, p.head_dim_v))
    rows = max(1, ELEMENTS // max(columns, columns_v))
    tokens = p.slabs * p.seqlen
    how = How(
        p.page_size, p.heads_kv, rows, p.head_dim, p.head_dim_v, columns, columns_v, "" if p.stored is None else p.stored.dtype,
        p.scaling("k"), p.scaling("v"),
    )  # fmt: skip
    scales = {side: f"{side}_scale{'_out' if p.scaling(side) == 'token' else ''}" for side in p.sides if p.scaling(side)}

    def each(form: str) -> list[str | None]:
        return [form.format(side) if side in p.sides else None for side in "kv"]

    given, made, scaled = each("{}"), each("{}_out"), [scales.get(side) for side in "kv"]
    call = KernelCall(
        append_rows, (-(-tokens * p.heads_kv // rows), 1, 1),
        (*(tuple(None if n is None else Pointer(n) for n in names) for names in (given, made, scaled)), Pointer("slots"),
         (*((0, 0, 0, 0) if n is None else Strides(n) for n in (*given, *made, *scaled)), Strides("slots")),
         tokens, p.seqlen, p.pages),
        (("HOW", how),), 4, 1,
    )  # fmt: skip
    return Plan(p, "triton", "", append_buffers(p), (call,), ("append, one launch",))
