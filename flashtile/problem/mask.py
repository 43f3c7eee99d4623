"""Which keys a query sees. A mask is a value; masks compose with `&`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashtile.errors import InvalidProblem
from flashtile.problem.number import PLAIN, plain, told
from flashtile.problem.picture import Shown

if TYPE_CHECKING:
    from flashtile.problem.predicate import Joined


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
        from flashtile.problem.predicate import Terms

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
            raise InvalidProblem(f"mask is a {type(mask).__name__}; it must be a flashtile mask such as Band.")
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
