"""The protocol of predicates: masks that are functions of positions and tensors. They join with bands by `&` and `|`.

A predicate says of every (query, key) whether the query sees the key. It is a class with

* `visible(at, args)`: a `@jit` function that returns a boolean tile, or one that broadcasts against it;
* `apply(at, scalars, tensors)`: the same formula in PyTorch (CPU backend, reference, block lists), a static method.

`at` is a `Position`, its indices clamped into the problem; `args` is `(*scalars, tensor 0, its strides, tensor 1, ...)`,
scalars are ints. Every mask is brought to one form: a band, and an "or" of "and"s of predicates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from flashtile.errors import InvalidProblem
from flashtile.problem.blocks import BlockSpec
from flashtile.problem.lengths import Lengths
from flashtile.problem.mask import FULL, Band, make_mask
from flashtile.problem.number import PLAIN, plain
from flashtile.problem.picture import Shown
from flashtile.problem.registry import Registry
from flashtile.problem.score import Position

FLOATS = ("fp16", "bf16", "fp32")
DTYPES = ("int32", "int64", "int8", "uint8", "bool", *FLOATS)


class Joined(Shown):
    """What `&` and `|` make of bands and predicates."""

    spec: BlockSpec | None = None  # the sizes of its blocks, and the lengths that they are made for
    seqlens: tuple[int, int] = (0, 0)
    calls: dict[Any, Any] | None = None  # what calls found of it, by their shapes; None where it may become another mask

    @property
    def unlisted(self) -> Band | Joined:
        """The same mask without lists of its blocks."""
        return self

    @property
    def lists(self) -> Mapping[str, Any]:
        """The lists of its blocks, by the names of a plan's inputs; empty where it has none."""
        return {}

    @property
    def terms(self) -> tuple[tuple[Band | Predicate, ...], ...]:
        """The mask as an "or" of "and"s; at most one band in each."""
        raise NotImplementedError

    def __and__(self, other: Any) -> Joined:
        theirs = self._terms_beside(other)
        if theirs is None:
            return other & self if isinstance(other, Joined) else NotImplemented
        return Terms(tuple(_merged((*a, *b)) for a in self.terms for b in theirs))

    __rand__ = __and__

    def __or__(self, other: Any) -> Joined:
        theirs = self._terms_beside(other)
        if theirs is None:
            return other | self if isinstance(other, Joined) else NotImplemented
        return Terms((*self.terms, *theirs))

    def __ror__(self, other: Any) -> Joined:
        theirs = self._terms_beside(other)
        return NotImplemented if theirs is None else Terms((*theirs, *self.terms))

    def _terms_beside(self, other: Any) -> tuple[tuple[Band | Predicate, ...], ...] | None:
        """The terms of what this may join; None for no mask, and for one with blocks, whose own operator keeps them.

        That is called, not left to NotImplemented: the compiler of PyTorch 2.11 asks no second operand.
        """
        return None if isinstance(other, Joined) and other.spec is not None else terms_of(other)


class Terms(Joined):
    """A mask of several parts."""

    def __init__(self, terms: tuple[tuple[Band | Predicate, ...], ...]):
        self._terms = terms

    @property
    def terms(self) -> tuple[tuple[Band | Predicate, ...], ...]:
        return self._terms


PREDICATES: Registry[Predicate] = Registry("predicate", "features.masks")


class Predicate(Joined):
    """Base of all predicates; a subclass with a `name` registers itself for `parse`."""

    name: ClassVar[str] = ""
    visible: ClassVar[Callable[..., Any]]
    # of each tensor (batch, length): what errors call it, and whether it has an element for every query ("q") or key ("k")
    along: ClassVar[tuple[tuple[str, str], ...]] = ()
    truths: ClassVar[bool] = False  # whether its tensors say yes or no: bool, or ints of which 0 is no
    broadcast: ClassVar[bool] = False  # whether its tensors broadcast to (batch, heads_q, seqlen_q, seqlen_k), as `check` asks

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        PREDICATES.add(cls)

    @property
    def terms(self) -> tuple[tuple[Band | Predicate, ...], ...]:
        return ((self,),)

    @staticmethod
    def check(shapes: tuple[tuple[int, ...], ...], scores: tuple[int, int, int, int]) -> None:
        """Raise InvalidProblem for tensors of shapes that do not serve (batch, heads_q, seqlen_q, seqlen_k) scores."""

    def scalars(self) -> tuple[int, ...]:
        """Runtime ints."""
        return ()

    def tensors(self, batch: int, heads_q: int) -> tuple[Any, ...]:
        """Tensors as the kernel indexes them; expanded views are fine."""
        return ()

    @staticmethod
    def grain(scalars: tuple[int, ...]) -> tuple[int, int]:
        """Queries and keys of blocks within which it is the same, counted from the first score."""
        return 1, 1

    @staticmethod
    def apply(at: Position, scalars: tuple[int, ...], tensors: tuple[Any, ...]) -> Any:
        """Boolean, broadcasting against the tile whose indices `at` holds as tensors."""
        raise NotImplementedError("a predicate must define `apply` to run on the CPU or in the reference.")


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


def terms_of(mask: Any) -> tuple[tuple[Band | Predicate, ...], ...] | None:
    """A mask as an "or" of "and"s; None for what is no mask."""
    if isinstance(mask, Band):
        return ((mask,),)
    return mask.terms if isinstance(mask, Joined) else None


def _merged(leaves: tuple[Band | Predicate, ...]) -> tuple[Band | Predicate, ...]:
    band: Band = FULL
    predicates: list[Predicate] = []
    for leaf in leaves:
        if isinstance(leaf, Band):
            band = band & leaf
        elif not any(leaf is known for known in predicates):
            predicates.append(leaf)
    return (*predicates, band)


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
