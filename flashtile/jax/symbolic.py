"""Sizes that `jax.export` leaves open, such as a batch `b`: problems of them, which plain JAX computes at any size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import jax

from flashtile.errors import InvalidProblem, NotSupported
from flashtile.features.masks.top_left import TopLeft
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.lengths import Lengths
from flashtile.problem.mask import CAUSAL, FULL, Band, Predicate
from flashtile.problem.predicate import PredicateSpec

FIRST_EXAMPLE = 1009  # prime: no size that a caller gives is likely to be one of these


def symbols(sizes: Iterable[Any]) -> tuple[str, ...]:
    """The sizes that are not known, as they are written; none of them twice."""
    return tuple(dict.fromkeys(str(n) for n in sizes if jax.export.is_symbolic_dim(n)))


def refusal(arrays: Iterable[Any]) -> list[str]:
    """The reason against kernels for arrays, or what describes them, some of whose sizes are not known."""
    open_ = symbols(n for x in arrays for n in x.shape)
    if not open_:
        return []
    return [
        f"{', '.join(open_)}: symbolic sizes; kernels are planned and launched for sizes that are known. Export known sizes, "
        "or implementation='xla', which takes any"
    ]


def shorter(announced: int, size: Any) -> Any:
    """The smaller of the two; of a size that is not known, what was announced."""
    return announced if jax.export.is_symbolic_dim(size) else min(announced, size)


def problem_of(arrays: Iterable[Any], **given: Any) -> AttentionProblem:
    """The problem of these arrays, or of what describes them; symbolic where one of their sizes is."""
    return (SymbolicProblem if symbols(n for x in arrays for n in x.shape) else AttentionProblem)(**given)


def resized(p: AttentionProblem, arrays: Iterable[Any], **changes: Any) -> AttentionProblem:
    """The problem with other sizes, those of the arrays."""
    return problem_of(arrays, **{**{f.name: getattr(p, f.name) for f in fields(p)}, **changes})


def lengths_in(total_q: Any, total_k: Any) -> Lengths:
    """Of items in runs of so many tokens."""
    return (SymbolicLengths if symbols((total_q, total_k)) else Lengths)(total_q, total_k)


def from_first_key(band: Band, seqlen_q: Any, seqlen_k: Any) -> tuple[Band, Predicate | None]:
    """A band that puts query 0 at key 0 as one that puts the last query at the last key, and what else must hold."""
    shift = seqlen_k - seqlen_q
    if not jax.export.is_symbolic_dim(shift):
        return Band(None if band.left is None else band.left + shift, None if band.right is None else band.right - shift), None
    if band == CAUSAL:
        return FULL, TopLeft()
    reason = f"seqlen_q is {seqlen_q} and seqlen_k {seqlen_k}, symbolic sizes whose difference shifts local_window_size: use "
    raise NotSupported(f"{band} from the first key on", {"xla": [reason + "one symbol for both, or alignment='bottom-right'"]})


class SymbolicPredicate(PredicateSpec):
    """A predicate of tensors some of whose sizes are not known, which its scalars may repeat."""

    def __post_init__(self) -> None:
        """The problem checks it, as one of known sizes."""


def predicate_of(kind: type[Predicate], scalars: tuple[Any, ...], tensors: tuple[tuple[Any, str], ...]) -> PredicateSpec:
    """The predicate as data."""
    unknown = symbols((*scalars, *(n for shape, _ in tensors for n in shape)))
    return (SymbolicPredicate if unknown else PredicateSpec)(kind, scalars, tensors)


class SymbolicLengths(Lengths):
    """Lengths of items in a run of tokens whose size is not known."""

    def __post_init__(self) -> None:
        """Nothing can be checked."""


@dataclass(frozen=True)
class SymbolicProblem(AttentionProblem):
    """A problem some of whose sizes are `jax.export`'s. It is checked as one of the same shapes of other sizes is.

    Whatever depends on a comparison of sizes is answered as for long sequences.
    """

    def __post_init__(self) -> None:
        for name in ("heads_q", "heads_kv", "head_dim", "head_dim_v"):
            if jax.export.is_symbolic_dim(size := getattr(self, name)):
                raise InvalidProblem(f"{name} is {size}; it must be known: batch and lengths alone may be symbolic sizes.")
        examples: dict[Any, int] = {}

        def known(n: Any) -> Any:
            return examples.setdefault(n, FIRST_EXAMPLE + len(examples)) if jax.export.is_symbolic_dim(n) else n

        def shape(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(map(known, sizes))

        given = {f.name: known(getattr(self, f.name)) for f in fields(self)}
        given["score"] = tuple(
            replace(s, tensors=tuple(replace(t, shape=shape(t.shape)) for t in s.tensors)) for s in self.score
        )
        given["where"] = tuple(
            tuple(
                PredicateSpec(leaf.kind, shape(leaf.scalars), tuple((shape(own), t) for own, t in leaf.tensors))
                for leaf in term
            )
            for term in self.where
        )
        totals = known(self.lengths.total_q), known(self.lengths.total_k)
        given["lengths"] = Lengths(*totals, self.lengths.used_q, self.lengths.used_k)
        checked = AttentionProblem(**given)
        for name in ("scale", "precision", "dropout", "exact_delta"):
            object.__setattr__(self, name, getattr(checked, name))

    @cached_property
    def band(self) -> Band:
        return self.mask

    @property
    def lone(self) -> bool:
        left, right = self.mask.left, self.mask.right
        return left is not None and right is not None and left + right < 1 and self.sink is None
