"""Block lists on the device: what each block of a mask holds."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.kernels.device.grid import Sizes
from flashtile.kernels.device.mask import predicates, seen
from flashtile.kernels.device.score import locate
from flashtile.kernels.device.tile import Mask
from flashtile.plan.arguments import integers, mask_args
from flashtile.plan.buffers import mask_buffers
from flashtile.plan.call import Buffer, KernelCall, Plan, Pointer
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.blocks import LEAST_BLOCK
from flashtile.triton_glue.language import PLAIN_INTEGERS, constexpr, jit, tl

LEAST = constexpr(LEAST_BLOCK)  # rows that are evaluated at once


@dataclass(frozen=True)
class BlockTile:
    """Compile-time part of `classify_blocks`; the names that `seen` reads are those of `Tile`."""

    block_q: int
    block_k: int
    mask: Mask


@jit(do_not_specialize=PLAIN_INTEGERS)
def classify_blocks(state_ptr, seqlen_q, seqlen_k, heads, left, right, mask_args, T: tl.constexpr, MASK: tl.constexpr):
    """state, int8 (batch, heads, rows, columns): 0 where a block holds no score, 2 where all are visible, else 1."""
    BLOCK_Q: tl.constexpr = T.block_q
    BLOCK_K: tl.constexpr = T.block_k
    rows, columns = tl.cdiv(seqlen_q, BLOCK_Q), tl.cdiv(seqlen_k, BLOCK_K)
    program = tl.program_id(0).to(tl.int64)
    column, row = (program % columns).to(tl.int32), (program // columns % rows).to(tl.int32)
    batch_head = (program // columns // rows).to(tl.int32)
    sizes, band = Sizes(seqlen_q, seqlen_k, heads, 1), (left, right, mask_args)
    first, last = row * BLOCK_Q, tl.minimum(row * BLOCK_Q + BLOCK_Q, seqlen_q)
    key = column * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    shift, end = seqlen_k - seqlen_q, last
    if T.mask.left:  # a block beyond the band holds nothing
        end = tl.where(column * BLOCK_K + BLOCK_K - 1 < first + shift - left, first, end)
    if T.mask.right:
        end = tl.where(column * BLOCK_K > last - 1 + shift + right, first, end)
    some, every = first * 0, first * 0
    for start in tl.range(first, end, LEAST):
        index = start + tl.arange(0, LEAST)[:, None]
        at = locate(batch_head // heads, batch_head % heads, index, key, sizes)
        keep = seen(at, index, key, sizes, band, True, T, MASK).to(tl.int32)
        some = tl.maximum(some, tl.max(tl.max(keep, 1), 0))
        every += tl.sum(tl.sum(keep, 1), 0)
    state = tl.where(every == BLOCK_Q * BLOCK_K, 2, some)
    tl.store(state_ptr + program, state.to(tl.int8))


def plan_classify(p: AttentionProblem) -> Plan:
    """A plan from a mask's tensors to the output `state`, for the block sizes and heads of a problem."""
    assert p.blocks is not None
    shape = (p.batch, p.heads_q, p.blocks.rows(p.seqlen_q), p.blocks.columns(p.seqlen_k))
    tile = BlockTile(p.blocks.block_q, p.blocks.block_k, Mask.of(p, pads_keys=False))
    counts = integers(p)
    args = (
        Pointer("state"), *(counts[n] for n in ("seqlen_q", "seqlen_k", "heads", "left", "right")), mask_args(p),
    )  # fmt: skip
    programs = shape[0] * shape[1] * shape[2] * shape[3]
    call = KernelCall(classify_blocks, (programs, 1, 1), args, (("T", tile), ("MASK", predicates(p))))
    return Plan(p, "triton", "", (*mask_buffers(p), Buffer("state", shape, "int8", "output")), (call,))
