"""The gradient of a bias that the pass over keys stores: which one it does, zeros where no tile is, sums of what is shared."""

from __future__ import annotations

from math import ceil, prod
from typing import Any

from flashtile.kernels.device.mask import tiles_seen
from flashtile.kernels.device.score import form_of
from flashtile.kernels.sm90.host.tile_forward import COPIED_KEYS, columns_of
from flashtile.memory import remembered
from flashtile.plan.arguments import integers
from flashtile.plan.call import KernelCall, Pointer
from flashtile.problem.attention import AttentionProblem
from flashtile.triton_glue.language import jit, tl

STORED_BYTES = 4 << 30
SCORES = 2048  # that a program of `sum_scores` sums
BLOCK = 128  # queries and keys that a program of `zero_unseen` looks at


def scores_shape(problem: AttentionProblem) -> tuple[int, int, int, int]:
    return problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k


@remembered(1024, "stored bias gradients on sm90")
def stored(problem: AttentionProblem) -> int | None:
    """Which modifier's tensor gets its gradient from the pass over keys: where one alone wants it, and every query and key of a
    head have an element. There it is the score's, of which dq and dk are made; what batch entries or heads share is summed of
    all scores', where these take no more memory than STORED_BYTES.
    """
    p, form = problem, form_of(problem)
    wanting = [i for i, spec in enumerate(p.score) if spec.wants_grad]
    if len(wanting) != 1 or form.prescale or form.curved or p.lengths.ragged or p.seqlen_k % COPIED_KEYS:
        return None
    spec, whole = p.score[wanting[0]], scores_shape(p)
    own = [c.identity for c in spec.kind.captured] == [True] and spec.tensors[0].shape[2:] == whole[2:]
    if own and spec.tensors[0].shape != whole:
        own = 2 * prod(whole) <= STORED_BYTES
    narrow = max(columns_of(p.head_dim), columns_of(p.head_dim_v)) <= 128  # wider tiles are `parted`
    return wanting[0] if own and narrow and spec.tensors[0].dtype == p.dtype.value else None


def paired(problem: AttentionProblem) -> bool:
    """Whether two batch entries, and nobody else, share the tensor whose gradient is `stored`, and have tiles of one length:
    where there are lists of blocks the longest tiles come first, whichever entry's they are.
    """
    p, which = problem, stored(problem)
    if which is None or p.blocks is not None:
        return False
    return p.batch == 2 and p.score[which].tensors[0].shape[:2] == (1, p.heads_q)


def zeros(p: AttentionProblem, target: str, planes: int, tile: Any) -> KernelCall:
    """Zeros in `target` (planes, seqlen_q, seqlen_k) where a BackwardTile's pass does not store."""
    grid = (planes * ceil(p.seqlen_q / BLOCK) * ceil(p.seqlen_k / BLOCK), 1, 1)
    args = (Pointer(target), *(integers(p)[name] for name in ("seqlen_q", "seqlen_k", "left", "right")))
    return KernelCall(zero_unseen, grid, args, (("T", tile), ("BLOCK", BLOCK)))


def sums(source: str, target: str, shape: tuple[int, ...], shared: tuple[int, ...]) -> KernelCall:
    """The sum over batch, heads or both of `source`, of this shape; target (shared) has size 1 where it is summed over."""
    plane = shape[2] * shape[3]
    grid = (shared[0] * shared[1] * ceil(plane / SCORES), 1, 1)
    args = (Pointer(source), Pointer(target), shape[0], shape[1], plane)
    return KernelCall(sum_scores, grid, args, (("SHARED", tuple(n == 1 for n in shared[:2])), ("BLOCK", SCORES)), 8, 1)


@jit
def zero_unseen(target_ptr, seqlen_q, seqlen_k, left, right, T: tl.constexpr, BLOCK: tl.constexpr):
    """Zero a tile of BLOCK queries and keys, unless the keys' tile visits all of it; where there are lists, every one."""
    KEYS: tl.constexpr = T.block_k
    tiles_q, tiles_k = tl.cdiv(seqlen_q, BLOCK), tl.cdiv(seqlen_k, BLOCK)
    column, rest = tl.program_id(0) % tiles_k * BLOCK, tl.program_id(0) // tiles_k
    row, plane = rest % tiles_q * BLOCK, (rest // tiles_q).to(tl.int64)
    lo, _, _, hi, _ = tiles_seen(column, seqlen_k, seqlen_q, right, left, T.mask.right, T.mask.left, KEYS, T.block_q, T)
    if (T.mask.blocks_q > 0) | (row < lo) | (tl.minimum(row + BLOCK, seqlen_q) > hi):
        query, key = row + tl.arange(0, BLOCK), column + tl.arange(0, BLOCK)
        at = (plane * seqlen_q + query)[:, None] * seqlen_k + key[None, :]
        inside = (query < seqlen_q)[:, None] & (key < seqlen_k)[None, :]
        tl.store(target_ptr + at, tl.zeros([BLOCK, BLOCK], target_ptr.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["batches", "heads"])
def sum_scores(source_ptr, target_ptr, batches, heads, plane, SHARED: tl.constexpr, BLOCK: tl.constexpr):
    """target = source (batches, heads, plane), summed over batches, heads or both, as SHARED says, in a fixed order."""
    blocks = tl.cdiv(plane, BLOCK)
    own, place = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    own_heads = 1 if SHARED[1] else heads
    shared_heads = heads if SHARED[1] else 1
    count = shared_heads * batches if SHARED[0] else shared_heads
    total = tl.zeros([BLOCK], tl.float32)
    for n in tl.range(0, count):
        batch, head = own // own_heads + n // shared_heads, own % own_heads + n % shared_heads
        source = source_ptr + (batch * heads + head).to(tl.int64) * plane
        total += tl.load(source + place, mask=place < plane, other=0.0).to(tl.float32)
    tl.store(target_ptr + own.to(tl.int64) * plane + place, total.to(target_ptr.dtype.element_ty), mask=place < plane)
