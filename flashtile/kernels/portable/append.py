"""Writing new keys and values into the pages of a cache."""

from __future__ import annotations

from flashtile.plan.buffers import append_buffers
from flashtile.plan.call import KernelCall, Plan, Pointer, Strides
from flashtile.problem.cache import AppendProblem
from flashtile.triton_glue.language import jit, tl

ELEMENTS = 4096  # that a program copies


@jit
def copy_rows(in_ptr, out_ptr, in_strides, out_strides, slab, place, page, row, head, there, WIDTH: tl.constexpr,
              COLUMNS: tl.constexpr):  # fmt: skip
    """Rows of one tensor, a head of a token each."""
    column = tl.arange(0, COLUMNS).to(tl.int64)
    source = slab * in_strides[0] + place * in_strides[1] + head * in_strides[2]
    target = page * out_strides[0] + row * out_strides[1] + head * out_strides[2]
    inside = there[:, None] & (column < WIDTH)[None, :]
    x = tl.load(in_ptr + source[:, None] + column[None, :] * in_strides[3], mask=inside)
    tl.store(out_ptr + target[:, None] + column[None, :] * out_strides[3], x, mask=inside)


@jit(do_not_specialize=["tokens", "seqlen", "pages"])
def append_rows(in_ptrs, out_ptrs, slots_ptr, strides, tokens, seqlen, pages, PAGE: tl.constexpr, HEADS: tl.constexpr,
                ROWS: tl.constexpr, WIDTHS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """ROWS heads of tokens; in_ptrs = (k, v), out_ptrs = (k_cache, v_cache), strides of these four and of slots."""
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = index // HEADS, index % HEADS
    slab, place = token // seqlen, token % seqlen
    slot = tl.load(slots_ptr + slab * strides[4][0] + place * strides[4][1], mask=token < tokens, other=-1)
    page, row = slot // PAGE, slot % PAGE
    there = (slot >= 0) & (page < pages)
    copy_rows(in_ptrs[0], out_ptrs[0], strides[0], strides[2], slab, place, page, row, head, there, WIDTHS[0], COLUMNS[0])
    copy_rows(in_ptrs[1], out_ptrs[1], strides[1], strides[3], slab, place, page, row, head, there, WIDTHS[1], COLUMNS[1])


def plan_append(p: AppendProblem) -> Plan:
    """One launch."""
    columns = tuple(1 << (n - 1).bit_length() for n in (p.head_dim, p.head_dim_v))
    rows = max(1, ELEMENTS // max(columns))
    tokens = p.slabs * p.seqlen
    call = KernelCall(
        append_rows, (-(-tokens * p.heads_kv // rows), 1, 1),
        ((Pointer("k"), Pointer("v")), (Pointer("k_out"), Pointer("v_out")), Pointer("slots"),
         tuple(Strides(n) for n in ("k", "v", "k_out", "v_out", "slots")), tokens, p.seqlen, p.pages),
        (("PAGE", p.page_size), ("HEADS", p.heads_kv), ("ROWS", rows), ("WIDTHS", (p.head_dim, p.head_dim_v)),
         ("COLUMNS", columns)), 4, 1,
    )  # fmt: skip
    return Plan(p, "triton", "", append_buffers(p), (call,), ("append, one launch",))
