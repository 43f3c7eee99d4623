"""`flashtile.distributed.attention`: attention of local shards of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from flashtile.errors import InvalidProblem, NotSupported, check_names
from flashtile.features.masks.prefix import Prefix
from flashtile.problem.dropout import Dropout
from flashtile.problem.mask import Band, Joined, Predicate
from flashtile.problem.options import Options
from flashtile.problem.score import Score
from flashtile.torch.call.describe import ARGUMENTS, make_problem
from flashtile.torch.call.inputs import check_sink, check_tensors, modifiers
from flashtile.torch.call.lengths import given_lengths
from flashtile.torch.context.agree import agree
from flashtile.torch.context.calls import call
from flashtile.torch.context.collectives import Exchange, Gather, dealt, ordered
from flashtile.torch.context.context import METHODS, Context, refusals
from flashtile.torch.context.layout import check_length, prefixes, runs
from flashtile.torch.context.ring import Ring, attend_ring
from flashtile.torch.context.shards import held
from flashtile.torch.context.wanted import Wanted, against, wanted


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    context: Context,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Band | Joined | None = None,
    score: Sequence[Score] = (),
    scale: float | None = None,
    sink: torch.Tensor | None = None,
    dropout: Dropout | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    return_lse: bool = False,
    options: Options | None = None,
    **unknown: NoReturn,
) -> Any:
    """`flashtile.attention` of a sequence of which every rank of `context` holds a shard, forward and backward.

    q: (batch, seqlen_q / ranks, heads_q, head_dim), k and v likewise, laid as `context.layout` says; so are out, lse
    (batch, heads_q, seqlen_q / ranks) and the gradients of q, k and v. Masks, windows and ALiBi count positions of the whole.
    Tensors along queries or keys are shards, too: ids of `Document`, `KeyPadding`. A `Bias` has this rank's queries and all
    keys, in their own order. What all ranks have alike (slopes, sink, bias without queries) gets this rank's part of its
    gradient; their sum over ranks is the whole's, as of a model's parameters.
    seqused_q, seqused_k: of the whole, on every rank; both, and alike, unless the method is "ulysses".

    Every rank must call it alike, the backward included. Raises InvalidProblem and NotSupported, on every rank and before
    anything of q, k or v is sent, for what one call or the calls together cannot mean, and for dropout.
    """
    if unknown:
        check_names("attention", unknown, (*ARGUMENTS, "context"))
    if not isinstance(context, Context):
        raise InvalidProblem(f"context is a {type(context).__name__}; it must be a flashtile.distributed.Context.")
    error, want, method, used = None, None, "", None
    try:
        used = _used(q, k, v, seqused_q, seqused_k)
        want, method = _checked(q, k, v, context, causal, window, mask, modifiers(score), scale, sink, dropout, options)
    except Exception as refused:  # whatever it is: the other ranks must not wait
        error = refused
    agree(context, _described(q, k, v, want, method, return_lse, context), error)
    assert want is not None
    if context.ranks == 1:
        method = "ulysses"
    if method == "ulysses":
        return _ulysses(q, k, v, context, want, return_lse, used)
    rows = None
    if used is not None:
        rows, keys = (
            held(t.shape[1] * context.ranks, context.layout, context.ranks, context.rank, q.device) < used[:, None]
            for t in (q, k)
        )
        q, k, v = (t.where(there[..., None, None], 0.0) for t, there in ((q, rows), (k, keys), (v, keys)))
        want = wanted(False, None, want.joined(want.band) & Prefix(used), want.score, want.scale, want.sink, want.options)
    want = want.with_keys(context)
    seqlen_q, seqlen_k = q.shape[1] * context.ranks, k.shape[1] * context.ranks
    if method == "ring":
        out, lse = attend_ring(q, k, v, Ring(context, want, seqlen_q, seqlen_k))
    else:
        out, lse = _allgather(q, k, v, context, want, return_lse)
    if rows is not None:
        out = out.where(rows[..., None, None], 0.0)
        lse = None if lse is None else lse.where(rows[:, None], -torch.inf)
    return (out, lse) if return_lse else out


def _allgather(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context, want: Wanted, return_lse: bool) -> Any:
    """(out, lse or None): a call for each run of queries, beside the first keys of all."""
    shift = (k.shape[1] - q.shape[1]) * context.ranks
    keys, values = Gather.apply(torch.cat([k, v], -1), context).split([k.shape[3], v.shape[3]], -1)
    own = runs(context.layout, q.shape[1] * context.ranks, context.ranks, context.rank)
    made: list[Any] = []
    for piece in prefixes(own, shift, keys.shape[1], want.band):
        arguments = want.piece(piece, shift)
        made.append(call(q[:, piece.rows], keys[:, piece.keys], values[:, piece.keys], return_lse, sink=want.sink, **arguments))
    if not return_lse:
        return (made[0] if len(made) == 1 else torch.cat(made, 1)), None
    return torch.cat([out for out, _ in made], 1), torch.cat([lse for _, lse in made], 2)


def _ulysses(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context, want: Wanted, return_lse: bool, used: Any
) -> Any:
    """Each rank attends its heads of the whole. Fewer heads of keys than ranks are sent to as many as need them."""
    ranks, heads = context.ranks, q.shape[2] // context.ranks
    copies, wire = max(ranks // k.shape[2], 1), k.dtype
    if copies > 1:  # gradients of copies are summed, and travel, in float32
        k, v = (t.float().repeat_interleave(copies, 2) for t in (k, v))
    q, k, v = (ordered(Exchange.apply(t, context, 2, 1, wire), context, 1) for t in (q, k, v))
    arguments = want.whole(context, slice(context.rank * heads, (context.rank + 1) * heads))
    if used is not None:
        arguments |= {"seqused_q": used, "seqused_k": used}
    made = call(q, k, v, return_lse, **arguments)
    out, lse = made if return_lse else (made, None)
    out = Exchange.apply(dealt(out, context, 1), context, 1, 2)
    if lse is None:
        return out
    return out, Exchange.apply(dealt(lse, context, 2), context, 2, 1)


def _used(q: Any, k: Any, v: Any, seqused_q: Any, seqused_k: Any) -> Any:
    """How many tokens of each item count; None where all do."""
    if seqused_q is None and seqused_k is None:
        return None
    check_tensors(q, k, v, None)
    alike = seqused_q is seqused_k
    if not alike and isinstance(seqused_q, torch.Tensor) and isinstance(seqused_k, torch.Tensor):
        alike = seqused_q.device.type == "cpu" and torch.equal(seqused_q, seqused_k)
    if not alike or q.shape[1] != k.shape[1]:
        reason = "seqused_q and seqused_k that are not one tensor, of one length; KeyPadding(keep) hides keys alone"
        raise NotSupported("attention over ranks", {"torch": [reason]})
    given = given_lengths(seqused_q=seqused_q, seqused_k=seqused_k)
    assert given is not None
    assert seqused_q is not None
    if seqused_q.dtype is torch.bool:
        raise NotSupported("attention over ranks", {"torch": ["seqused that is a mask with holes; give counts"]})
    given.check(q)
    return given.tensors["seqused_q"]


def _checked(
    q: Any, k: Any, v: Any, context: Context, causal: Any, window: Any, mask: Any, score: Any, scale: Any, *rest: Any
) -> tuple[Wanted, str]:
    """What is asked for, and the method that does it. rest: sink, dropout, options."""
    sink, dropout, options = rest
    check_tensors(q, k, v, None)
    make_problem(q, k, v, scale=scale, options=options, causal=causal, window=window, mask=None, score=(), sink=None)
    if sink is not None:
        check_sink(sink, q)
    ranks, reasons = context.ranks, list[str]()
    for name, tensor in (("seqlen_q", q), ("seqlen_k", k)):
        check_length(context.layout, ranks, tensor.shape[1] * ranks, f"the whole's {name}")
    if dropout is not None:
        reasons.append("dropout, whose bits depend on positions that kernels count from a call's own first query and head")
    if isinstance(mask, Joined) and mask.spec is not None:
        reasons.append("a mask with blocks, whose lists are of the whole; give it without")
    want = wanted(causal, window, mask, score, scale, sink, options)
    _check_shapes(want, q, k, ranks)
    methods = METHODS[2:0:-1] + METHODS[3:] if context.method == "auto" else (context.method,)
    against_all = {m: [*refusals(m, context.layout, q.shape[2], k.shape[2], ranks), *against(want, m)] for m in methods}
    method = next((m for m in methods if not against_all[m]), None)
    if reasons or method is None:
        raise NotSupported("attention over ranks", {"torch": reasons} if reasons else against_all)
    return want, method


def _check_shapes(want: Wanted, q: Any, k: Any, ranks: int) -> None:
    """Raise InvalidProblem for tensors beside q, k and v that are neither this rank's shard nor what they must be."""
    for leaf in want.leaves:
        tensors = leaf.tensors(q.shape[0], q.shape[2]) if isinstance(leaf, Predicate) else ()
        along: tuple[tuple[str, str], ...] = getattr(leaf, "along", ())
        for (name, side), tensor in zip(along, tensors, strict=False):
            size = (q if side == "q" else k).shape[1]
            if tensor.shape[-1] != size:
                raise InvalidProblem(f"{name} have shape {tuple(tensor.shape)}; the last axis must be this rank's {size}.")
    whole = (q.shape[0], q.shape[2], q.shape[1], k.shape[1] * ranks)
    for modifier in want.score:
        for captured, tensor in zip(modifier.captured, modifier.tensors(q.shape[0], q.shape[2]), strict=True):
            if captured.broadcast and any(n not in (1, size) for n, size in zip(tensor.shape, whole, strict=True)):
                raise InvalidProblem(
                    f"{modifier.name}'s tensor has shape {tuple(tensor.shape)}; it must broadcast to {whole}: this rank's "
                    "queries, and all keys."
                )


def _described(q: Any, k: Any, v: Any, want: Wanted | None, method: str, return_lse: bool, context: Context) -> dict[str, Any]:
    """What ranks must have in common, as plain values."""
    found: dict[str, Any] = {"layout": context.layout, "method": method, "return_lse": return_lse}
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        found[name] = (tuple(tensor.shape), str(tensor.dtype)) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
    grads = torch.is_grad_enabled()
    found["the wish for gradients"] = grads and [bool(getattr(t, "requires_grad", False)) for t in (q, k, v)]
    found["the mask"] = None if want is None else (want.band, [[_leaf(leaf) for leaf in term] for term in want.terms])
    found["score"] = None if want is None else [(type(m).__name__, tuple(m.scalars())) for m in want.score]
    found["scale"], found["sink"] = (None, None) if want is None else (want.scale, want.sink is not None)
    return {name: str(value) for name, value in found.items()}


def _leaf(leaf: Any) -> Any:
    return (leaf.name, *leaf.scalars()) if hasattr(leaf, "scalars") else str(leaf)
