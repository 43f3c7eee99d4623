"""Attention by its definition, O(seqlen_q x seqlen_k), differentiable by autograd. Imports no kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flashtile.problem.dropout import Dropout, placed
from flashtile.problem.dropout import keep as dropout_keep
from flashtile.problem.mask import Band, Joined
from flashtile.problem.predicate import normal_form
from flashtile.problem.score import Position, Score

Pair = tuple[torch.Tensor, torch.Tensor]
Mask = tuple[Band, tuple[tuple[Any, ...], ...]]  # as `normal_form` has it
SCALES = ("q_scale", "k_scale", "v_scale")
Changes = tuple[Sequence[Score], float | None, torch.Tensor | None, Dropout | None]  # score, scale, sink, dropout


def attention_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Pair:
    """(out, lse) of `flashtile.attention`, or with cu_seqlens_q of `attention_varlen`, in float64; laid out as those are.

    arguments: those of `attention_plain`, with the meaning that `flashtile.attention` gives them.
    """
    arguments = {name: a.double() if name in SCALES and isinstance(a, torch.Tensor) else a for name, a in arguments.items()}
    return attention_plain(q.double(), k.double(), v.double(), **arguments)


def attention_plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Band | Joined | None = None,
    score: Sequence[Score] = (),
    scale: float | None = None,
    sink: torch.Tensor | None = None,
    dropout: Dropout | None = None,
    **lengths: Any,
) -> Pair:
    """(out, lse) as a few lines of PyTorch compute them in the inputs' own dtype: what the accuracy rule measures against.

    q_scale, k_scale, v_scale among the others: as `flashtile.attention` has them, of stored numbers, here in q's dtype.
    """
    scales = {name: lengths.pop(name) for name in SCALES if name in lengths}
    q, k, v = (multiplied(t, scales.get(n), n[0], lengths) for t, n in zip((q, k, v), SCALES, strict=True))
    return _attend_items(q, k, v, normal_form(causal, window, mask), (score, scale, sink, dropout), lengths)


def multiplied(x: torch.Tensor, scale: Any, side: str, lengths: Mapping[str, Any]) -> torch.Tensor:
    """x, whose rows are (batch, seqlen) or, of varlen, (total,), times its scale: rounded once."""
    if scale is None:
        return x
    scale = torch.as_tensor(scale, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    cu = lengths.get(f"cu_seqlens_{'q' if side == 'q' else 'k'}")
    cu = lengths.get("cu_seqlens_q") if cu is None else cu
    heads = x.shape[-2]
    if scale.shape != x.shape[:-1]:
        batch = x.shape[0] if cu is None else len(cu) - 1
        scale = scale.expand(batch, heads)
        if cu is None:
            scale = scale[:, None]
        else:  # rows of no item are looked at by nobody
            count = (cu[1:] - cu[:-1]).long()
            rows = scale.repeat_interleave(count, 0)
            scale = torch.cat([rows, rows.new_ones(x.shape[0] - len(rows), heads)])
    return (x.to(scale.dtype) * scale[..., None]).to(x.dtype)


def items(q: torch.Tensor, k: torch.Tensor, lengths: Mapping[str, torch.Tensor | None]) -> list[Any]:
    """Of each item where its queries and its keys lie: index of the first axis, index of the second; all 4-dimensional."""
    given: dict[str, Any] = {name: tensor.tolist() for name, tensor in lengths.items() if tensor is not None}
    starts = {side: given.get(f"cu_seqlens_{side}") for side in "qk"}
    if starts["q"] is not None and starts["k"] is None:
        starts["k"] = starts["q"]
    found: list[Any] = []
    for i in range(q.shape[0] if starts["q"] is None else len(starts["q"]) - 1):
        pair: list[tuple[slice, slice | torch.Tensor]] = []
        for side, tensor in (("q", q), ("k", k)):
            cu, used = starts[side], given.get(f"seqused_{side}")
            first, end = (0, tensor.shape[1]) if cu is None else (cu[i], cu[i + 1])
            slab = slice(i, i + 1) if cu is None else slice(0, 1)
            if used is not None and isinstance(used[i], list):  # which tokens count
                pair.append((slab, torch.tensor([j for j, counts in enumerate(used[i]) if counts], dtype=torch.long)))
            else:
                pair.append((slab, slice(first, end if used is None else first + used[i])))
        found.append(tuple(pair))
    return found


def _attend_items(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, changes: Changes,
    lengths: Mapping[str, torch.Tensor | None],
) -> Pair:  # fmt: skip
    """Each item by itself; 0 and -inf where there is none."""
    if all(tensor is None for tensor in lengths.values()):
        return attend_item(q, k, v, mask, changes)
    varlen = lengths.get("cu_seqlens_q") is not None
    if varlen:
        q, k, v = q[None], k[None], v[None]
    nothing = q[:, :0].sum()  # 0 with a graph, so that there is a gradient even where there is no item
    out = q.new_zeros((*q.shape[:3], v.shape[3])) + nothing
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -math.inf) + nothing
    places = items(q, k, lengths)
    for i, (rows, keys) in enumerate(places):
        values, sums = attend_item(q[rows], k[keys], v[keys], mask, changes, (i, len(places)))
        out[rows], lse[rows[0], :, rows[1]] = values, sums
    return (out[0], lse[0]) if varlen else (out, lse)


def attend_item(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, changes: Changes,
    item: tuple[int, int] | None = None,
) -> Pair:  # fmt: skip
    """`item` = (index, count) of the one item that q, k, v are, where a batch is taken apart."""
    score, scale, sink, dropout = changes
    (batch, seqlen_q, heads_q, head_dim), (seqlen_k, heads_kv) = q.shape, k.shape[1:3]
    group = heads_q // heads_kv
    at, items_here = positions(batch, heads_q, seqlen_q, seqlen_k, q.device), batch
    if item is not None:
        at, items_here = at._replace(batch=at.batch + item[0]), item[1]
    keep = visible(mask[0], seqlen_q, seqlen_k, q.device) & holds(mask[1], at, (items_here, heads_q))
    keep = keep.expand(batch, heads_q, seqlen_q, seqlen_k)
    sees, seen = keep.any(3), keep.any(2)
    # What nobody looks at may hold NaN, and 0 * NaN is NaN: replace it. The gradient there becomes exactly 0.
    q = q.transpose(1, 2).masked_fill(~sees[..., None], 0.0)
    k, v = (t.transpose(1, 2).repeat_interleave(group, 1).masked_fill(~seen[..., None], 0.0) for t in (k, v))

    scores = _product(q, k.transpose(2, 3)) * (1.0 / math.sqrt(head_dim) if scale is None else scale)
    for modifier in score:
        tensors = modifier.tensors(items_here, heads_q)
        scores = type(modifier).apply(scores, at, modifier.scalars(), tensors).to(q.dtype)
    scores = scores.masked_fill(~keep, -math.inf)
    if sink is not None:  # one more key, whose value is zero
        last = sink.to(q.dtype)[None, :, None, None].expand(batch, heads_q, seqlen_q, 1)
        whole = torch.cat([scores, last], -1)
        p, lse = torch.softmax(whole, -1)[..., :seqlen_k], torch.logsumexp(whole, -1)
    else:  # a row that sees nothing would be exp(-inf - -inf): give it finite scores first, then discard them
        scores = scores.masked_fill(~sees[..., None], 0.0)
        lse = torch.logsumexp(scores, -1) if seqlen_k else scores.sum(-1)
        p, lse = torch.softmax(scores, -1).masked_fill(~keep, 0.0), lse.masked_fill(~sees, -math.inf)
    if dropout is not None:
        seed = dropout.seed if isinstance(dropout.seed, torch.Tensor) else torch.tensor([dropout.seed, 0])
        where = at.batch * heads_q + at.head, at.row, at.k
        if dropout.origin is not None:
            where = placed(dropout.origin.words, at.batch, at.head, at.row, at.k, heads_q)
        kept = dropout_keep(dropout.p, 0, *where, heads_q, seed.to(q.device))
        p = p * kept / (1.0 - dropout.p)
    return _product(p, v).transpose(1, 2), lse


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b. PyTorch adds up 16-bit products in float32 and rounds once; so does this on a CPU, 10 to 30 times sooner there
    (PyTorch 2.13, without AVX-512).
    """
    if a.device.type == "cpu" and a.dtype in (torch.float16, torch.bfloat16):
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


def holds(terms: tuple[tuple[Any, ...], ...], at: Position, rows: tuple[int, int]) -> torch.Tensor:
    """Where one of a mask's terms holds; everywhere where there is none."""
    if not terms:
        return torch.ones((), dtype=torch.bool, device=at.row.device)
    found = torch.zeros((), dtype=torch.bool, device=at.row.device)
    for term in terms:
        every = torch.ones_like(found)
        for leaf in term:
            if isinstance(leaf, Band):
                left, right = (math.inf if b is None else b for b in (leaf.left, leaf.right))
                every = every & (at.q - at.k <= left) & (at.k - at.q <= right)
            else:
                every = every & leaf.apply(at, leaf.scalars(), leaf.tensors(*rows))
        found = found | every
    return found


def visible(band: Band, seqlen_q: int, seqlen_k: int, device: torch.device) -> torch.Tensor:
    """Boolean (seqlen_q, seqlen_k): which query sees which key."""
    distance = torch.arange(seqlen_k, device=device) - (torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q)
    keep = torch.ones_like(distance, dtype=torch.bool)
    if band.left is not None:
        keep &= distance >= -band.left
    if band.right is not None:
        keep &= distance <= band.right
    return keep


def positions(batch: int, heads_q: int, seqlen_q: int, seqlen_k: int, device: torch.device) -> Position:
    """The Position of all scores at once; every field broadcasts against (batch, heads_q, seqlen_q, seqlen_k)."""
    row = torch.arange(seqlen_q, device=device)[:, None]
    return Position(
        batch=torch.arange(batch, device=device)[:, None, None, None],
        head=torch.arange(heads_q, device=device)[:, None, None],
        row=row,
        q=row + seqlen_k - seqlen_q,
        k=torch.arange(seqlen_k, device=device)[None, :],
    )
