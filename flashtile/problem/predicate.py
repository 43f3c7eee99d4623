"""Predicates without their tensors, as a problem holds them, and the one form of every mask: a band, and an "or" of "and"s."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from flashtile.errors import InvalidProblem
from flashtile.problem.lengths import Lengths
from flashtile.problem.mask import FULL, PREDICATES, Band, Joined, Predicate, make_mask
from flashtile.problem.number import PLAIN, plain

FLOATS = ("fp16", "bf16", "fp32")
DTYPES = ("int32", "int64", "int8", "uint8", "bool", *FLOATS)


@dataclass(frozen=True)
class PredicateSpec:
    """A predicate, or a band beside predicates, without its tensors: what a problem and a plan hold."""

    kind: type[Predicate]
    scalars: tuple[int, ...] = ()
    tensors: tuple[tuple[tuple[int, ...], str], ...] = ()  # shape and dtype of each

    def __post_init__(self) -> None:
        if not PLAIN.issuperset(map(type, self.scalars)):
            object.__setattr__(self, "scalars", tuple(map(plain, self.scalars)))
        for number in self.scalars:
            if isinstance(number, bool) or not isinstance(number, int) or abs(number) >= 2**31:
                raise InvalidProblem(f"{self.kind.name} has the scalar {number!r}; it must be an int within 32 bits.")
        for shape, dtype in self.tensors:
            if min(shape, default=0) < 0:
                raise InvalidProblem(f"{self.kind.name}'s tensor has shape {shape}; its sizes must not be negative.")
            if dtype not in DTYPES:
                raise InvalidProblem(f"{self.kind.name}'s tensor is {dtype!r}; it must be one of {', '.join(DTYPES)}.")

    def check(self, scores: tuple[int, int, int, int], lengths: Lengths) -> None:
        """Raise InvalidProblem for tensors that do not serve (batch, heads_q, seqlen_q, seqlen_k) scores."""
        shapes = tuple(shape for shape, _ in self.tensors)
        self.kind.check(shapes, scores)
        for _, dtype in self.tensors if self.kind.truths else ():
            if dtype in FLOATS:  # numbers are added to scores elsewhere, where 0 is a key that counts
                raise InvalidProblem(
                    f"{self.kind.name}'s tensor is {dtype}; it must be bool, or ints of which 0 hides. Numbers that are added "
                    "to scores are the score modifier Bias."
                )
        for (name, side), shape in zip(self.kind.along, shapes, strict=False):
            seqlen = scores[2 if side == "q" else 3]
            # where items differ in length it must reach the longest one's end, which the device alone knows
            if lengths.known(side) and (len(shape) != 2 or shape[1] < seqlen):
                raise InvalidProblem(f"the shape of {name} is {shape}; its last axis must be at least seqlen_{side}, {seqlen}.")

    def spell(self) -> str:
        tensors = ["x".join(map(str, shape)) + ":" + dtype for shape, dtype in self.tensors]
        return f"{self.kind.name}({';'.join([*map(str, self.scalars), *tensors])})"

    @staticmethod
    def parse(text: str) -> PredicateSpec:
        kind, numbers, described = PREDICATES.read(text)
        tensors: list[tuple[tuple[int, ...], str]] = []
        for part in described:
            shape, dtype = part.split(":")
            tensors.append((tuple(int(n) for n in shape.split("x")) if shape else (), dtype))
        return PredicateSpec(kind, tuple(int(n) for n in numbers), tuple(tensors))


Where = tuple[tuple[PredicateSpec, ...], ...]


def check_ends(where: Where, seqlen_q: int, seqlen_k: int, lengths: Lengths) -> None:
    """Raise InvalidProblem for tensors of more queries or keys than a caller's batch has: which of them are meant is unknown.

    Of items that lie one after another it is: each counts its own.
    """
    for leaf in (leaf for term in where for leaf in term if not lengths.varlen):
        for (name, side), (shape, _) in zip(leaf.kind.along, leaf.tensors, strict=False):
            seqlen = seqlen_q if side == "q" else seqlen_k
            if shape[1] > max(seqlen, 1):  # of no keys there is a tensor of one, for none may be empty
                raise InvalidProblem(
                    f"the shape of {name} is {shape}; its last axis must be seqlen_{side}, {seqlen}. Take those that are "
                    f"meant: [..., :{seqlen}] are the first, [..., -{seqlen}:] the last."
                )


def spell_where(where: Where) -> str:
    """The spelling of an "or" of "and"s."""
    return "|".join("&".join(spec.spell() for spec in term) for term in where)


def parse_where(text: str) -> Where:
    """What `spell_where` wrote."""
    return tuple(tuple(PredicateSpec.parse(p) for p in re.split(r"&", term)) for term in text.split("|"))


def normal_form(causal: Any, window: Any, mask: Any) -> tuple[Band, tuple[tuple[Band | Predicate, ...], ...]]:
    """(a band outside of which nothing is visible, what else must hold: one of these terms; none where nothing must)."""
    if not isinstance(mask, Joined):
        return make_mask(causal, window, mask), ()
    joined = narrowed(causal, window, mask)
    bands = [next((leaf for leaf in term if isinstance(leaf, Band)), FULL) for term in joined.terms]
    hull = bands[0]
    for band in bands[1:]:
        hull = Band(_looser(hull.left, band.left), _looser(hull.right, band.right))
    terms = tuple(tuple(leaf for leaf in term if leaf not in (hull, FULL)) for term in joined.terms)
    return hull, terms if all(terms) else ()


def narrowed(causal: Any, window: Any, mask: Joined) -> Joined:
    """The mask together with what `causal` and `window` say."""
    band = make_mask(causal, window, None)
    return mask if band == FULL else mask & band


def _looser(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else max(a, b)
