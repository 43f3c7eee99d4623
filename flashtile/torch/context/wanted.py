"""What a call over ranks asks for, and how a local call of it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from flashtile.features.masks.dilated import Dilated
from flashtile.features.masks.document import Document
from flashtile.features.masks.key_padding import KeyPadding
from flashtile.features.masks.prefix import Prefix
from flashtile.features.masks.top_left import TopLeft
from flashtile.features.scores.alibi import Alibi
from flashtile.features.scores.bias import Bias
from flashtile.features.scores.relative import Relative
from flashtile.features.scores.softcap import Softcap
from flashtile.problem.dropout import Dropout, Origin
from flashtile.problem.mask import FULL, Band, Joined, Predicate
from flashtile.problem.predicate import normal_form
from flashtile.torch.call.dropout import random_words
from flashtile.torch.context.context import TWO_AXES, Context
from flashtile.torch.context.layout import Piece
from flashtile.torch.context.shards import gathered

PIECEWISE_MASKS = (Band, Document, KeyPadding, Prefix, TopLeft)
PIECEWISE_SCORES = (Alibi, Bias, Relative, Softcap)
Terms = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Wanted:
    """The arguments of one call, its mask in normal form: a band, and terms of which one must hold."""

    band: Band
    terms: Terms
    score: tuple[Any, ...]
    scale: float | None
    sink: Any
    options: Any
    dropout: Dropout | None = None

    @property
    def leaves(self) -> tuple[Any, ...]:
        return tuple(leaf for term in self.terms for leaf in term)

    @property
    def captured(self) -> tuple[torch.Tensor, ...]:
        """Tensors that may want a gradient."""
        found = [getattr(s, "bias", None) if isinstance(s, Bias) else getattr(s, "slopes", None) for s in self.score]
        return tuple(t for t in (*found, self.sink) if t is not None)

    def leafwise(self, change: Callable[[Any], Any]) -> Wanted:
        """The same with other predicates; one that occurs twice is changed once."""
        changed = {id(leaf): change(leaf) for leaf in self.leaves}
        return replace(self, terms=tuple(tuple(changed[id(leaf)] for leaf in term) for term in self.terms))

    def joined(self, band: Band) -> Band | Joined:
        """The mask as `attention` takes it."""
        if not self.terms:
            return band
        return band & _any([_all(term) for term in self.terms])

    def banded(self) -> dict[str, Any]:
        """The arguments of a call of items, whose mask is the band."""
        told = {"mask": self.band, "score": self.score, "scale": self.scale, "sink": self.sink, "options": self.options}
        return told if self.dropout is None else told | {"dropout": self.dropout}

    def arguments(self) -> dict[str, Any]:
        """Those of a call with all keys and queries."""
        return {**self.banded(), "mask": self.joined(self.band)}

    def of_heads(self, context: Context, heads: slice) -> Wanted:
        """The same of some heads, and of what the ranks of a context hold together."""

        def entire(leaf: Any) -> Any:
            if isinstance(leaf, Document):
                queries = gathered(leaf.queries, context, -1)
                return Document(queries, queries if leaf.keys is leaf.queries else gathered(leaf.keys, context, -1))
            return KeyPadding(gathered(leaf.keep, context, -1)) if isinstance(leaf, KeyPadding) else leaf

        return self.leafwise(entire).of_group(heads, (heads.stop - heads.start) * context.ranks)

    def of_group(self, heads: slice, of: int) -> Wanted:
        """The same of some heads of q, of so many; masks are those of all heads."""
        count = heads.stop - heads.start
        if count == of:
            return self

        def part(modifier: Any) -> Any:
            if isinstance(modifier, (Alibi, Relative)):
                return type(modifier)(modifier.slopes[..., heads])
            if isinstance(modifier, Bias) and modifier.bias.dim() > 2 and modifier.bias.shape[-3] > 1:
                return Bias(modifier.bias[..., heads, :, :])
            return modifier

        sink, dropout = None if self.sink is None else self.sink[heads], self.dropout
        if dropout is not None:
            there = dropout.origin or Origin()
            origin = replace(there, head=there.head + heads.start, heads=count, more=there.more + of - count)
            dropout = replace(dropout, origin=origin)
        return replace(self, score=tuple(map(part, self.score)), sink=sink, dropout=dropout)

    def with_seed(self, context: Context, device: torch.device) -> Wanted:
        """The same with one seed of all ranks: the first one's where each would draw its own."""
        if self.dropout is None or self.dropout.seed is not None:
            return self
        words = random_words(device)
        dist.broadcast(words, dist.get_global_rank(context.group, 0), group=context.group)
        return replace(self, dropout=replace(self.dropout, seed=words.view(torch.int64)))

    def with_keys(self, context: Context) -> Wanted:
        """The same, with what predicates know of keys gathered: `Document`'s queries stay this rank's."""

        def known(leaf: Any) -> Any:
            if isinstance(leaf, Document):
                return Document(leaf.queries, gathered(leaf.keys, context, -1))
            return KeyPadding(gathered(leaf.keep, context, -1)) if isinstance(leaf, KeyPadding) else leaf

        return self.leafwise(known)

    def piece(self, piece: Piece, shift: int) -> dict[str, Any]:
        """The arguments of one local call, but for the sink. Predicates know all keys (`with_keys`)."""
        moved = self.leafwise(lambda leaf: _placed(leaf, piece, shift))
        score = tuple(part for modifier in self.score for part in _scored(modifier, piece, shift, self.band))
        told = {"mask": moved.joined(piece.band(self.band)), "score": score, "scale": self.scale, "options": self.options}
        if self.dropout is None:
            return told
        query, key = piece.query, piece.key
        origin = replace(
            self.dropout.origin or Origin(), query=query.start - shift, query_step=query.step, key=key.start, key_step=key.step
        )
        return told | {"dropout": replace(self.dropout, origin=origin)}


def wanted(causal: Any, window: Any, mask: Any, score: Sequence[Any], scale: Any, sink: Any, options: Any) -> Wanted:
    """What a call's arguments mean together. Raises InvalidProblem for a mask that is none."""
    band, terms = normal_form(causal, window, mask)
    return Wanted(band, terms, tuple(score), scale, sink, options)


def _placed(leaf: Any, piece: Piece, shift: int) -> Any:
    if isinstance(leaf, Band):
        return piece.band(leaf)
    if isinstance(leaf, TopLeft):
        return piece.band(Band(None if leaf.left is None else leaf.left + shift, -shift))
    if isinstance(leaf, Document):
        return Document(leaf.queries[..., piece.rows], leaf.keys[..., piece.key.keys])
    if isinstance(leaf, KeyPadding):
        return KeyPadding(leaf.keep[..., piece.key.keys])
    key = piece.key
    return Prefix(((leaf.lengths - key.start + key.step - 1) // key.step).clamp(0, key.count).to(leaf.lengths.dtype))


def _scored(modifier: Any, piece: Piece, shift: int, band: Band) -> tuple[Any, ...]:
    if isinstance(modifier, Softcap) or (isinstance(modifier, Alibi) and piece.natural):
        return (modifier,)
    if isinstance(modifier, Bias):
        bias = modifier.bias[(None,) * (4 - modifier.bias.dim())]
        bias = bias[:, :, piece.rows] if bias.shape[2] > 1 else bias
        return (Bias(bias[..., piece.key.keys] if bias.shape[3] > 1 else bias),)
    # slope * (key - query) of the whole is step * slope * (j - i) here, and a number that depends on the head alone
    back = piece.lag if isinstance(modifier, Alibi) else piece.lag - shift
    apart = modifier.slopes[..., None, None]
    return Relative(modifier.slopes * piece.query.step), Bias(apart * -back if apart.dim() == 4 else apart[None] * -back)


def _all(term: tuple[Any, ...]) -> Any:
    found: Any = FULL
    for leaf in term:
        found = found & leaf
    return found


def _any(terms: list[Any]) -> Any:
    found = terms[0]
    for term in terms[1:]:
        found = found | term
    return found


def has_rows(modifier: Any, rows: int) -> bool:
    """Whether it may have elements of this rank's queries alone, of which there are so many."""
    bias = modifier.bias if isinstance(modifier, Bias) else None
    return bias is not None and bias.dim() > 1 and (bias.shape[-2] > 1 or rows == 1)


def against(want: Wanted, method: str, rows: int) -> list[str]:
    """Why a method cannot do it, where a rank has so many queries."""
    if method in TWO_AXES:
        return list(dict.fromkeys([*against(want, "ulysses", rows), *against(want, TWO_AXES[method], rows)]))
    reasons: list[str] = []
    if method == "ring" and want.options is not None and want.options.delta == "exact":
        reasons.append("delta='exact' forms delta of all of a row's keys, and a ring has one rank's at a time")
    for leaf in want.leaves:
        name = getattr(leaf, "name", type(leaf).__name__)
        if method == "ulysses":
            if isinstance(leaf, Predicate) and not isinstance(leaf, (*PIECEWISE_MASKS, Dilated)):
                reasons.append(f"predicate {name}, whose tensors' axes are not known")
        elif not isinstance(leaf, PIECEWISE_MASKS):
            reasons.append(f"predicate {name}, which cannot be told a part of the keys; method 'ulysses' may do it")
    for modifier in want.score:
        if not isinstance(modifier, PIECEWISE_SCORES):
            reasons.append(f"score modifier {modifier.name}, whose use of positions is not known")
        elif isinstance(modifier, Alibi) and method != "ulysses" and (want.band.right is None or want.band.right > 0):
            reasons.append("alibi without causal order; method 'ulysses' does it")
        elif method == "ulysses" and has_rows(modifier, rows):
            reasons.append("a bias with an axis of queries, of which each rank has its rows; method 'allgather' does it")
    return reasons
