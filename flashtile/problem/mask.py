"""Which keys a query sees. Masks are values, joined by `&` and `|`: a `Band`, or a predicate of positions and tensors.

A predicate says of every (query, key) whether the query sees the key. It is a class with

* `visible(at, args)`: a `@jit` function that returns a boolean tile, or one that broadcasts against it;
* `apply(at, scalars, tensors)`: the same formula in PyTorch (CPU backend, reference, block lists), a static method.

`at` is a `Position`, its indices clamped into the problem; `args` is `(*scalars, tensor 0, its strides, tensor 1, ...)`,
scalars are ints. `problem/predicate.py` brings every mask to one form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from flashtile.errors import InvalidProblem
from flashtile.memory import Memory
from flashtile.problem.blocks import BlockSpec
from flashtile.problem.number import PLAIN, plain, told
from flashtile.problem.picture import Shown
from flashtile.problem.registry import Registry
from flashtile.problem.score import Position


@dataclass(frozen=True)
class Band(Shown):
    """Interval mask: key j is visible to query i when i - left <= j <= i + right.

    Positions are aligned bottom-right: query i of seqlen_q stands at i + seqlen_k - seqlen_q. `None` is unbounded.
    Negative distances are meaningful here (`Band(right=-1)` hides the diagonal too).

    >>> Band(right=0) & Band(left=1024)
    Band(left=1024, right=0)
    """

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            bound = getattr(self, name)
            if bound is None:
                continue
            if type(bound) not in PLAIN:
                object.__setattr__(self, name, bound := plain(bound))
            if isinstance(bound, bool) or not isinstance(bound, int):
                raise InvalidProblem(f"Band {name} is {told(bound)}; it must be an int or None.")
            if abs(bound) >= 2**31:
                raise InvalidProblem(f"Band {name} is {bound}; it must lie within 32 bits.")

    def __and__(self, other: Band) -> Band:
        if not isinstance(other, Band):  # asked here: the compiler of PyTorch 2.11 asks no second operand
            return other.__rand__(self) if hasattr(other, "__rand__") else NotImplemented
        return Band(_tighter(self.left, other.left), _tighter(self.right, other.right))

    def __or__(self, other: Band) -> Joined:
        if not isinstance(other, Band):
            return other.__ror__(self) if hasattr(other, "__ror__") else NotImplemented
        return Terms(((self,),)) | other

    @property
    def unbounded(self) -> bool:
        return self.left is None and self.right is None

    def visible(self, query: int, key: int, shift: int) -> bool:
        """Whether `query` (a row index) sees `key`; `shift` is seqlen_k - seqlen_q."""
        position = query + shift
        return (self.left is None or key >= position - self.left) and (self.right is None or key <= position + self.right)

    def count_visible(self, seqlen_q: int, seqlen_k: int) -> int:
        """Number of visible (query, key) pairs."""
        if self.left is not None and self.right is not None and self.left + self.right < 0:
            return 0
        shift = seqlen_k - seqlen_q
        ends = seqlen_q * seqlen_k if self.right is None else _staircase(shift + self.right + 1, seqlen_q, seqlen_k)
        return ends if self.left is None else ends - _staircase(shift - self.left, seqlen_q, seqlen_k)

    def clipped(self, seqlen_q: int, seqlen_k: int) -> Band:
        """The same mask for these lengths, with every bound that hides nothing replaced by `None`.

        What is left lies within the lengths, so that kernels may add it to positions without overflow.

        >>> Band(left=4096, right=0).clipped(1, 128)
        Band(left=None, right=None)
        """
        if min(seqlen_q, seqlen_k) == 0:
            return FULL
        left, right = self.left, self.right
        if left is not None and left >= seqlen_k - 1:
            left = None
        if right is not None and right >= seqlen_q - 1:
            right = None
        return Band(
            None if left is None else max(left, -seqlen_q),
            None if right is None else max(right, -seqlen_k),
        )


FULL = Band()
CAUSAL = Band(right=0)


class Joined(Shown):
    """What `&` and `|` make of bands and predicates."""

    spec: BlockSpec | None = None  # the sizes of its blocks, and the lengths that they are made for
    seqlens: tuple[int, int] = (0, 0)
    calls: Memory[Any, Any] | None = None  # what calls found of it, by their shapes; None where it may become another mask

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


def _staircase(first: int, steps: int, most: int) -> int:
    """The sum of first, first + 1, ... (so many `steps`), each of them cut to 0 .. most."""

    def below(end: int) -> int:
        """The sum of 0, 1, ... below `end`, likewise."""
        rising = max(min(end, most), 0)
        return rising * (rising - 1) // 2 + most * (max(end, 0) - rising)

    return below(first + steps) - below(first)


def _tighter(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


ARRAYS = (
    " Booleans for every score go in as Stored(tensor), for every key of an item as KeyPadding(keep); numbers that are added, "
    "as score=Bias(tensor)."
)
FUNCTIONS = " A function of positions goes into flashtile.compat.flex.flex_attention, or becomes a Predicate."


def no_mask(name: str, value: object, arrays: str = ARRAYS, functions: str = FUNCTIONS) -> InvalidProblem:
    """The error for what is no mask, with what to write for it; arrays, functions: what a front end has for these."""
    remedy = ""
    if isinstance(value, type):
        remedy = f" Calling {value.__name__} makes one."
    elif hasattr(value, "shape"):
        remedy = arrays
    elif callable(value):
        remedy = functions
    return InvalidProblem(f"{name} is a {type(value).__name__}; it must be a flashtile mask such as Band.{remedy}")


def make_mask(causal: bool, window: tuple[int | None, int | None] | None, mask: Band | None) -> Band:
    """The band that `causal`, `window` and `mask` mean together. `window` distances must not be negative."""
    causal = plain(causal)
    if not isinstance(causal, bool):
        raise InvalidProblem(f"causal is {told(causal)}; it must be True or False.")
    band = CAUSAL if causal else FULL
    if window is not None:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            n = plain(window)
            pairs = f": ({n}, {n}) for {n} to either side, ({n}, 0) for {n} before and none after" if type(n) is int else ""
            raise InvalidProblem(f"window is {told(window)}; it must be a pair (left, right) of ints or None{pairs}.")
        window = plain(window[0]), plain(window[1])
        for side, distance in zip(("left", "right"), window, strict=True):
            if distance is None:
                continue
            if isinstance(distance, bool) or not isinstance(distance, int):
                raise InvalidProblem(f"window {side} is {told(distance)}; it must be an int or None.")
            if distance < 0:
                raise InvalidProblem(f"window {side} is {distance}; it must not be negative (None means unbounded).")
        band = band & Band(*window)
    if mask is not None:
        if not isinstance(mask, Band):
            raise no_mask("mask", mask)
        band = band & mask
    return band


# No annotations: Triton reads them. pyright: ignore below, for that reason alone.
def key_range(first, last, length, left, right, LEFT, RIGHT, BLOCK):  # pyright: ignore[reportMissingParameterType, reportUnknownParameterType]
    """The tiles that a run of aligned positions first..last has to visit, as (lo, full_lo, full_hi, hi).

    Tiles starting in [lo, full_lo) and [full_hi, hi) need the mask, those in [full_lo, full_hi) are visible whole.
    `LEFT` and `RIGHT` say which bounds exist. The same source runs on the host and, compiled, in every kernel; with
    the bounds swapped it gives the queries that see a run of keys.
    """
    lo = 0
    full_lo = 0
    hi = length
    full_hi = length // BLOCK * BLOCK
    if LEFT:
        lo = min(max(first - left, 0), length) // BLOCK * BLOCK
        full_lo = (max(last - left, 0) + BLOCK - 1) // BLOCK * BLOCK
    if RIGHT:
        hi = min(max(last + right + 1, 0), length)
        full_hi = min(full_hi, max(first + right + 1, 0) // BLOCK * BLOCK)
    hi = max(hi, lo)
    full_lo = min(max(full_lo, lo), hi)
    full_hi = max(full_hi, full_lo)
    return lo, full_lo, full_hi, hi
