"""`flashtile.distributed.attention_varlen`: packed documents of which every rank holds a shard."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from flashtile.errors import InvalidProblem, NotSupported, check_names
from flashtile.features.masks.document import Document
from flashtile.features.scores.softcap import Softcap
from flashtile.problem.mask import FULL, Band
from flashtile.torch.call.inputs import modifiers
from flashtile.torch.call.lengths import Given, given_lengths
from flashtile.torch.context.agree import agree, refused_together
from flashtile.torch.context.attention import (
    by_heads,
    by_positions,
    check_context,
    checked,
    over_mesh,
    plain,
)
from flashtile.torch.context.context import TWO_AXES, Context
from flashtile.torch.context.described import described, numbers
from flashtile.torch.context.documents import Documents
from flashtile.torch.context.gathered import Part, attend_gathered
from flashtile.torch.context.known import KNOWN, Known, key_of
from flashtile.torch.context.layout import Fetched, Run, runs, seen_keys
from flashtile.torch.context.shards import document_ids
from flashtile.torch.context.wanted import PIECEWISE_SCORES, Wanted
from flashtile.torch.execute.eagerly import eagerly

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from flashtile.torch.call.arguments import Keywords

NAMES = ("causal", "window", "mask", "score", "scale", "sink", "dropout", "return_lse", "options")
DEFAULTS: dict[str, Any] = {**dict.fromkeys(NAMES), "causal": False, "score": (), "return_lse": False}


@eagerly
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    context: Context,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    **arguments: Unpack[Keywords],
) -> Any:
    """`flashtile.attention_varlen` of packed documents of which every rank of `context` holds a shard, forward and backward.

    q: (total / ranks, heads_q, head_dim), k and v likewise, laid as `context.layout` says of the whole's tokens: a document
        may span ranks. So are out, lse (heads_q, total / ranks) and the gradients.
    cu_seqlens_q: where the whole's documents begin, int32 (documents + 1,), on every rank. cu_seqlens_k: None, or the same.
    max_seqlen_q, max_seqlen_k: no document is longer; a hint.
    arguments: those of `attention`, each document by itself: `Softcap`, `Alibi`, windows, a sink. A mask must be a `Band`.

    With "ulysses", and with "allgather" in causal order or without a band, ranks work on their tokens' documents alone. Else,
    and with "ring", the mask `Document` hides the others, at the cost of all pairs that the band leaves. In layout "documents"
    ranks have equal work; `shard`, `unshard` and `position_ids` are then given the same cu_seqlens.
    Raises InvalidProblem and NotSupported as `flashtile.distributed.attention` does, on every rank.
    """
    check_context(context)
    with refused_together(context):
        check_names("attention_varlen", arguments, NAMES, ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "context"))
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if isinstance(tensor, torch.Tensor) and tensor.dim() != 3:
                raise InvalidProblem(f"{name} has shape {tuple(tensor.shape)}; it must be (total / ranks, heads, head_dim).")
        q, k, v = (t[None] if isinstance(t, torch.Tensor) else t for t in plain(q, k, v))
        said = _layouts(cu_seqlens_q, cu_seqlens_k, most=(max_seqlen_q, max_seqlen_k))
        key = None if said is None else key_of(q, k, v, context, said, **{**DEFAULTS, **arguments})
        known = None if key is None else KNOWN.get(key)
        found = known or Known(*checked(q, k, v, context, packed=True, **{**DEFAULTS, **arguments}))
        if known is None:
            _check_want(found.want, q, k)
        if context.layout == "documents" and not _cuts_off(found.want):
            reason = "layout 'documents' with a band that looks ahead; 'zigzag' and 'contiguous' take any"
            raise NotSupported("attention over ranks", {"torch": [reason]})
        given = _given(q, context, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return_lse = bool(arguments.get("return_lse", False))
    if known is None:
        told = described(
            found.want, method=found.method, return_lse=return_lse, q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        )  # fmt: skip
        agree(context, {"varlen": "yes", **told}, values=lambda: numbers(found.want, 0, cu_seqlens_q=cu_seqlens_q))
        if key is not None:
            KNOWN[key] = found
    want, method = found.want.with_seed(context, q.device), found.method
    if method == "ulysses":
        lengths = {**given.tensors, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        out, lse = by_heads(q, k, v, context, want, return_lse, lengths)
    elif method in TWO_AXES:
        over = partial(_over_positions, method=TWO_AXES[method], return_lse=return_lse, given=given)
        out, lse = over_mesh(q, k, v, context, want, over)
    else:
        out, lse = _over_positions(q, k, v, context, want, method, return_lse, given)
    return (out.squeeze(0), lse.squeeze(0)) if return_lse else out.squeeze(0)


def attention_of_items(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: tuple[Any, Any], keys: slice, *, context: Context,
    max_seqlens: tuple[Any, Any], return_lse: bool, **arguments: Any,
) -> Any:  # fmt: skip
    """`attention_varlen` of this rank's queries and some of the whole's keys, whose items the caller has worked out.

    starts: cu_seqlens of these queries and of these keys. keys: which of the whole's, contiguous shards joined.
    """
    most = {"max_seqlen_q": max_seqlens[0], "max_seqlen_k": max_seqlens[1]}
    with refused_together(context):
        q, k, v = (t[None] if isinstance(t, torch.Tensor) else t for t in plain(q, k, v))
        want, _ = checked(q, k, v, context, **{**DEFAULTS, **arguments})
        _check_want(want, q, k)
        if want.dropout is not None:
            raise NotSupported("attention over ranks", {"torch": ["dropout of items that the caller has worked out"]})
        given = given_lengths(cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], **most)
        assert given is not None
        given.check(q)
        if q.device.type == "cpu":
            first, end, _ = keys.indices(k.shape[1] * context.ranks)
            given.check_values({"q": q.shape[1], "k": end - first})
    told = described(want, method="allgather", return_lse=return_lse, q=q, k=k, v=v)
    agree(context, {"varlen": "items", **told}, values=lambda: numbers(want, 0))
    first, end, _ = keys.indices(k.shape[1] * context.ranks)

    def parts_of(_: Fetched, want: Wanted) -> list[Part]:
        return [Part(slice(0, q.shape[1]), slice(first, end), {**want.banded(), **given.tensors, **most})]

    out, lse = attend_gathered(q, k, v, context, want, FULL, parts_of, return_lse)  # whose items they are, the caller knows
    return (out.squeeze(0), lse.squeeze(0)) if return_lse else out.squeeze(0)


def _over_positions(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context: Context,
    want: Wanted,
    method: str,
    return_lse: bool,
    given: Given,
) -> tuple[torch.Tensor, Any]:
    """(out, lse or None): documents as items where they can be told so, otherwise hidden by a mask."""
    if context.layout == "documents":
        return _of_documents(q, k, v, context, want, return_lse, given)
    if method == "allgather" and _cuts_off(want):
        return _allgather(q, k, v, context, want, return_lse, given)
    starts = given.tensors["cu_seqlens_q"]
    ids = document_ids(starts, context, q.shape[1] * context.ranks)
    return by_positions(q, k, v, context, replace(want, terms=((Document(ids),),)), method, return_lse, starts[-1:])


def _allgather(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context, want: Wanted, return_lse: bool, given: Given
) -> tuple[torch.Tensor, Any]:
    """(out, lse or None): a call for each run of queries, whose items are all documents.

    Those outside the run have no queries there. In causal order keys end where the run does, and so each item's last query
    stands at its last key, as in the whole. Of a window they may begin where the run's first query sees its first.
    """
    band = Band(want.band.left, None if want.band == FULL else 0)
    total = k.shape[1] * context.ranks
    starts, most = given.tensors["cu_seqlens_q"], {"max_seqlen_q": given.max_seqlen_q, "max_seqlen_k": given.max_seqlen_k}
    own = runs(context.layout, q.shape[1] * context.ranks, context.ranks, context.rank)

    def parts_of(have: Fetched, want: Wanted) -> list[Part]:
        parts: list[Part] = []
        row = 0
        for run in own:
            end = run.start + run.count
            key = seen_keys(run, 0, total, band, have.halo) if total else Run(0, 0)
            here = {
                "cu_seqlens_q": starts.clamp(run.start, end) - run.start,
                "cu_seqlens_k": starts.clamp(key.start, key.start + key.count) - key.start,
            }
            rows = slice(row, row + run.count)
            parts.append(Part(rows, have.place(key), {**want.banded(), **most, **here}))
            row += run.count
        return parts

    return attend_gathered(q, k, v, context, want, band, parts_of, return_lse)


def _of_documents(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context, want: Wanted, return_lse: bool, given: Given
) -> tuple[torch.Tensor, Any]:
    """(out, lse or None): a call for each of this rank's chunks, whose items are all documents' parts of it.

    Gathered keys lie chunk by chunk. A call takes those of the chunks that it sees document by document, so that each item's
    last query stands at its last key.
    """
    ranks, everything, parts = context.ranks, want.band == FULL, list[Part]()
    longest = given.max_seqlen_k
    most = None if longest is None else -(-longest // (2 * ranks))  # of a document's chunk

    def parts_of(_: Fetched, want: Wanted) -> list[Part]:
        if not parts:  # worked out while keys are under way
            documents = Documents.of(given.tensors["cu_seqlens_q"], k.shape[1] * ranks, ranks)
            size = documents.chunk
            for i, chunk in enumerate((context.rank, 2 * ranks - 1 - context.rank)):
                seen = 2 * ranks if everything else chunk + 1
                items = {
                    "cu_seqlens_q": documents.items(chunk, chunk + 1), "cu_seqlens_k": documents.items(0, seen),
                    "max_seqlen_q": most, "max_seqlen_k": None if most is None else most * seen,
                }  # fmt: skip
                parts.append(Part(slice(i * size, (i + 1) * size), slice(0, seen * size), items, documents.seen(seen)))
        return [replace(part, arguments={**want.banded(), **part.arguments}) for part in parts]

    return attend_gathered(q, k, v, context, want, FULL if everything else Band(None, 0), parts_of, return_lse)


def _layouts(*starts: Any, most: tuple[Any, Any]) -> Any:
    """What is said of documents but for where they begin; None where it is neither tensors nor ints."""
    if not all(t is None or type(t) is torch.Tensor for t in starts) or not all(n is None or type(n) is int for n in most):
        return None
    return *(None if t is None else (t.shape, t.dtype, t.device) for t in starts), *most


def _cuts_off(want: Wanted) -> bool:
    """Whether documents can be told as items: no query looks ahead, or nothing asks where a query stands."""
    if want.band == FULL:
        return all(isinstance(modifier, Softcap) for modifier in want.score)
    return want.band.right is not None and want.band.right <= 0


def _given(q: Any, context: Context, starts: Any, others: Any, *most: Any) -> Given:
    """What is said of the documents, validated for the whole."""
    if starts is None:
        raise InvalidProblem("cu_seqlens_q is None; it must be a torch.Tensor.")
    alike = others is None or others is starts
    if not alike and isinstance(starts, torch.Tensor) and isinstance(others, torch.Tensor):
        alike = starts.device.type == "cpu" and torch.equal(starts, others)
    if not alike:
        raise NotSupported("attention over ranks", {"torch": ["cu_seqlens_k that is not cu_seqlens_q"]})
    given = given_lengths(cu_seqlens_q=starts, max_seqlen_q=most[0], max_seqlen_k=most[1])
    assert given is not None
    given.check(q)
    if q.device.type == "cpu":
        given.check_values({"q": q.shape[1] * context.ranks})
    return given


def _check_want(want: Wanted, q: torch.Tensor, k: torch.Tensor) -> None:
    reasons: list[str] = []
    if want.terms or not isinstance(want.band, Band):
        reasons.append("a mask beside cu_seqlens that is no Band; flashtile.distributed.attention with Document(ids) takes it")
    for modifier in modifiers(want.score):
        if not isinstance(modifier, PIECEWISE_SCORES) or modifier.name in ("bias", "relative"):
            reasons.append(f"score modifier {modifier.name} beside cu_seqlens")
    if reasons:
        raise NotSupported("attention over ranks", {"torch": reasons})
    if q.shape[1] != k.shape[1]:
        raise InvalidProblem(
            f"k has {k.shape[1]} tokens and q has {q.shape[1]}; they must be as many: documents attend to themselves."
        )
