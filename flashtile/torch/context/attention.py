"""`flashtile.distributed.attention`: attention of local shards of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch

from flashtile.errors import InvalidProblem, NotSupported, check_names
from flashtile.features.masks.prefix import Prefix
from flashtile.problem.dropout import Dropout
from flashtile.problem.mask import Band, Joined, Predicate
from flashtile.problem.options import DEFAULT, Options
from flashtile.problem.predicate import normal_form
from flashtile.problem.score import Score
from flashtile.torch.call.arguments import EVERY
from flashtile.torch.call.dropout import check_dropout
from flashtile.torch.call.inputs import check_arguments, check_tensors, modifiers
from flashtile.torch.call.lengths import given_lengths
from flashtile.torch.context.agree import agree, refused_together
from flashtile.torch.context.calls import Keys, call
from flashtile.torch.context.collectives import Exchange, dealt, ordered, wider
from flashtile.torch.context.context import TWO_AXES, Context, against_dropout, candidates, reach, refusals
from flashtile.torch.context.described import described, numbers
from flashtile.torch.context.gathered import Part, attend_gathered
from flashtile.torch.context.heads import attend_heads
from flashtile.torch.context.known import KNOWN, Known, key_of
from flashtile.torch.context.layout import Fetched, check_length, prefixes, runs
from flashtile.torch.context.ring import Ring, attend_ring
from flashtile.torch.context.shards import held
from flashtile.torch.context.wanted import Wanted, against, wanted
from flashtile.torch.execute.eagerly import eagerly
from flashtile.torch.execute.plain import is_distributed, is_traced, transforms
from flashtile.torch.routes.derivatives import is_dual_level, refuse_tangents
from flashtile.torch.routes.eager import prepare
from flashtile.torch.routes.local import attention as attend
from flashtile.torch.routes.traced import autocast


@eagerly
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
    dropout: keeps what one device's call with the same seed keeps, however many ranks there are, in any layout. Without a seed
    all ranks take what the first one draws. On a GPU ranks' positions must begin at multiples of 64, unless by "ulysses".

    Every rank must call it alike, the backward included. Raises InvalidProblem and NotSupported, on every rank and before
    anything of q, k or v is sent, for what one call or the calls together cannot mean, and where ranks differ in arguments,
    shapes, dtypes, options, or in what a tensor that they have alike holds; the latter on the CPU alone. A gradient cannot be
    differentiated again.
    """
    check_context(context)
    with refused_together(context):
        if unknown:
            check_names("attention", unknown, (*(name for name in EVERY if name != "returns"), "context"))
        q, k, v = plain(q, k, v)
        used = _used(q, k, v, seqused_q, seqused_k, context)
        given: dict[str, Any] = {
            "causal": causal, "window": window, "mask": mask, "score": score, "scale": scale, "sink": sink, "dropout": dropout,
            "options": options, "return_lse": return_lse,
        }  # fmt: skip
        key = key_of(q, k, v, context, None, **given) if used is None else None
        known = None if key is None else KNOWN.get(key)
        found = known or Known(*checked(q, k, v, context, counted=used is not None, **given))
    if known is None:
        lengths = {"seqused_q": seqused_q, "seqused_k": seqused_k}
        told = described(found.want, method=found.method, return_lse=return_lse, q=q, k=k, v=v, **lengths)
        agree(context, told, values=lambda: numbers(found.want, q.shape[1], **lengths))
        if key is not None:
            KNOWN[key] = found
    want, method = found.want.with_seed(context, q.device), found.method
    if method == "ulysses":
        lengths = {} if used is None else {"seqused_q": used, "seqused_k": used}
        made = by_heads(q, k, v, context, want, return_lse, lengths)
    elif method in TWO_AXES:
        over = partial(by_positions, method=TWO_AXES[method], return_lse=return_lse, used=used)
        made = over_mesh(q, k, v, context, want, over)
    else:
        made = by_positions(q, k, v, context, want, method, return_lse, used, found)
    return made if return_lse else made[0]


def by_positions(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context, want: Wanted, method: str, return_lse: bool, used: Any,
    known: Known | None = None,
) -> tuple[torch.Tensor, Any]:  # fmt: skip
    """(out, lse or None), each rank of its own queries; of each item's first `used` tokens."""
    rows = None
    if used is not None:
        rows, keys = (
            held(t.shape[1] * context.ranks, context.layout, context.ranks, context.rank, q.device) < used[:, None]
            for t in (q, k)
        )
        q, k, v = (t.where(there[..., None, None], 0.0) for t, there in ((q, rows), (k, keys), (v, keys)))
        band, terms = normal_form(False, None, want.joined(want.band) & Prefix(used))
        want = replace(want, band=band, terms=terms)
    want = want.with_keys(context)
    seqlen_q, seqlen_k = q.shape[1] * context.ranks, k.shape[1] * context.ranks
    if method == "ring":
        out, lse = attend_ring(q, k, v, Ring(context, want, seqlen_q, seqlen_k))
    else:
        out, lse = _allgather(q, k, v, context, want, return_lse, known)
    if rows is not None:
        out = out.where(rows[..., None, None], 0.0)
        lse = None if lse is None else lse.where(rows[:, None], -torch.inf)
    return out, lse


def _allgather(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context, want: Wanted, return_lse: bool, known: Known | None
) -> Any:
    """(out, lse or None): a call for each run of queries, beside the first keys of all, or those of its window."""
    shift = (k.shape[1] - q.shape[1]) * context.ranks
    band = reach(want.band, want.dropout is not None)
    own = runs(context.layout, q.shape[1] * context.ranks, context.ranks, context.rank)

    def parts_of(have: Fetched, want: Wanted) -> list[Part]:
        pieces = prefixes(own, shift, k.shape[1] * context.ranks, want.band, have)
        return [Part(p.rows, p.keys, {"sink": want.sink, **want.piece(p, shift)}) for p in pieces]

    return attend_gathered(q, k, v, context, want, band, parts_of, return_lse, known)


def over_mesh(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context, want: Wanted, over: Callable[..., tuple[Any, Any]]
) -> tuple[torch.Tensor, Any]:
    """(out, lse or None): heads are exchanged over the mesh's second axis; `over` attends these over its first.

    The shards of the second axis' ranks make up a shard of the same layout over the first. over(q, k, v, outer, want).
    """
    outer, inner = context.axes
    heads = q.shape[2] // inner.ranks
    q, k, v = (ordered(Exchange.apply(t, inner, 2, 1), inner, 1) for t in (q, k, v))
    out, lse = over(q, k, v, outer, want.of_heads(inner, slice(inner.rank * heads, (inner.rank + 1) * heads)))
    out = Exchange.apply(dealt(out, inner, 1), inner, 1, 2)
    return out, None if lse is None else Exchange.apply(dealt(lse, inner, 2), inner, 2, 1)


def by_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context, want: Wanted, return_lse: bool, lengths: dict[str, Any]
) -> tuple[torch.Tensor, Any]:
    """(out, lse or None): each rank attends its heads of the whole. Fewer heads of keys than ranks go to all that need them.

    lengths: what a local call is told of the whole's.
    """
    ranks, heads = context.ranks, q.shape[2] // context.ranks
    copies, wire = max(ranks // k.shape[2], 1), k.dtype
    if copies > 1:  # gradients of copies are summed, and travel, in float32
        k, v = (t.to(wider(t.dtype)).repeat_interleave(copies, 2) for t in (k, v))
    elif not is_traced(q, k, v):
        return attend_heads(q, k, v, context, want, return_lse, lengths)
    q, k, v = (ordered(Exchange.apply(t, context, 2, 1, wire), context, 1) for t in (q, k, v))
    arguments = want.of_heads(context, slice(context.rank * heads, (context.rank + 1) * heads)).arguments()
    if copies > 1:
        made = call(q, Keys(k.detach().to(wire), v.detach().to(wire), k, v), return_lse, **arguments, **lengths)
    else:
        made = attend(q, k, v, return_lse=return_lse, **arguments, **lengths)
    out, lse = made if return_lse else (made, None)
    out = Exchange.apply(dealt(out, context, 1), context, 1, 2)
    if lse is None:
        return out, None
    return out, Exchange.apply(dealt(lse, context, 2), context, 2, 1)


def _used(q: Any, k: Any, v: Any, seqused_q: Any, seqused_k: Any, context: Context) -> Any:
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
    if q.device.type == "cpu":
        given.check_values({"q": q.shape[1] * context.ranks})
    return given.tensors["seqused_q"]


def check_context(context: Any) -> None:
    """Raise InvalidProblem for what is none: then there is nobody to agree with."""
    if not isinstance(context, Context):
        raise InvalidProblem(f"context is a {type(context).__name__}; it must be a flashtile.distributed.Context.")


def plain(q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    """q, k, v as autocast wants them. Raises for what is no memory of this rank's."""
    if is_distributed(q, k, v):
        raise InvalidProblem("q, k and v hold a DTensor; give this rank's part, to_local(), or call flashtile.attention.")
    reasons: list[str] = []
    if transforms():
        reasons.append("torch.func's transforms; torch.autograd differentiates it once, in reverse mode")
    if any(isinstance(t, torch.Tensor) and t.device.type == "meta" for t in (q, k, v)):
        reasons.append("tensors on meta; context.explain takes them")
    if reasons:
        raise NotSupported("attention over ranks", {"torch": reasons})
    if is_dual_level():
        refuse_tangents("attention over ranks", "torch", zip("qkv", (q, k, v), strict=True))
    return autocast(q, k, v)


def checked(q: Any, k: Any, v: Any, context: Context, **given: Any) -> tuple[Wanted, str]:
    """What is asked for, and the method that does it. given: the other arguments of `attention`; packed, counted: whether
    cu_seqlens or seqused come beside them.
    """
    check_tensors(q, k, v, None)
    score, mask, ranks = modifiers(given.pop("score")), given.pop("mask"), context.ranks
    dropout, packed, counted = given.pop("dropout"), given.pop("packed", False), given.pop("counted", False)
    if dropout is not None:
        check_dropout(dropout, q.device)
    trial = None if dropout is None else Dropout(dropout.p, 0)  # which draws nothing
    alone, _ = prepare(q, k, v, dropout=trial, **given)  # whatever backends have against it
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        alone.require_backward()
    check_arguments(score, None, DEFAULT)
    for name, tensor in (("seqlen_q", q), ("seqlen_k", k)):
        check_length(context.layout, ranks, tensor.shape[1] * ranks, f"the whole's {name}")
    reasons: list[str] = []
    if dropout is not None and dropout.origin is not None:
        reasons.append("dropout with an origin, which ranks give their calls themselves")
    if context.layout == "documents" and not packed:
        reasons.append(
            "layout 'documents' without cu_seqlens; attention_varlen takes them, and 'zigzag' shares out one sequence"
        )
    if isinstance(mask, Joined) and mask.spec is not None:
        reasons.append("a mask with blocks, whose lists are of the whole; give it without")
    want = wanted(given["causal"], given["window"], mask, score, given["scale"], given["sink"], given["options"])
    drops = dropout if alone.problem.dropout is not None else None
    want = replace(want, dropout=drops)
    _check_shapes(want, q, k, ranks)
    seqlens, layout = (q.shape[1] * ranks, k.shape[1] * ranks), context.layout
    dense = not (packed or counted or want.terms)
    methods, _ = candidates(context, q, k, v, want.band, drops is not None, dense)
    against_all = {
        m: [
            *refusals(m, layout, q.shape[2], k.shape[2], context.inner if m in TWO_AXES else ranks),
            *against(want, m, q.shape[1]),
            *([] if drops is None else against_dropout(m, layout, seqlens, ranks // context.inner, q.device.type, packed)),
        ]
        for m in methods
    }
    method = next((m for m in methods if not against_all[m]), None)
    if reasons or method is None:
        raise NotSupported("attention over ranks", {"torch": reasons} if reasons else against_all)
    return want, "ulysses" if ranks == 1 and layout != "documents" else method


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
