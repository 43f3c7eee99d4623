"""Sizes that are not known yet: integers that remember how they were made, and what was asked of them.

A plan is made by ordinary arithmetic on the problem's sizes. Made of `Size`s instead, the same code gives grids, arguments
and shapes as expressions, which C can evaluate; and whatever it decided by comparing sizes is written down as a guard, under
which the plan is the right one. (Concolic execution: every Size also has a value, by which comparisons are answered.)
"""

# pyright: reportPrivateUsage=false, reportUnknownVariableType=false
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd
from typing import Any, Union

MOST = 2**31 - 1  # of any size that a caller gives


@dataclass(frozen=True)
class Floor:
    """floor(numerator / denominator), of polynomials."""

    numerator: Terms
    denominator: Terms


Atom = Union[str, Floor]  # noqa: UP007 (evaluated: Python 3.10 cannot write str | a class that is not there yet)
Monomial = tuple[Atom, ...]
Terms = tuple[tuple[Monomial, int], ...]  # a polynomial: coefficients of products of atoms, in a fixed order


@dataclass(frozen=True)
class Guard:
    """A comparison of a polynomial with 0, and how it came out."""

    terms: Terms
    kind: str  # "==" or "<"
    holds: bool

    def met(self, values: Mapping[str, int]) -> bool:
        """Whether it comes out so for these sizes."""
        value = evaluate(self.terms, values)
        return (value == 0 if self.kind == "==" else value < 0) == self.holds

    def turned(self, values: Mapping[str, int], name: str) -> Iterator[dict[str, int]]:
        """The sizes with another value of that name, near its own, with which the guard comes out otherwise."""
        own = values[name]
        others = [own + -own % step for step in _denominators(self.terms)]
        for end in (1, MOST):
            if self.met({**values, name: end}):
                continue
            same, other = own, end
            while abs(other - same) > 1:
                middle = (same + other) // 2
                same, other = (middle, other) if self.met({**values, name: middle}) else (same, middle)
            others.append(other)
        yield from (found for n in dict.fromkeys(others) if not self.met(found := {**values, name: n}))


class Trace:
    """One run of planning code: the guards that it met, in order."""

    def __init__(self) -> None:
        self.guards: dict[Guard, None] = {}

    def size(self, name: str, value: int) -> Size:
        """A size that a caller will give, from 1 to MOST; here it has this value."""
        return Size._make(self, (((name,), 1),), value)

    def decide(self, terms: Terms, kind: str, value: int) -> bool:
        """The outcome of a comparison, kept as a guard unless it is the same for all sizes."""
        low, high = bounds(terms)
        if kind == "<" and (high < 0 or low >= 0):
            return high < 0
        if kind == "==" and (low > 0 or high < 0 or low == high):
            return low == high == 0
        holds = value == 0 if kind == "==" else value < 0
        self.guards.setdefault(Guard(terms, kind, holds))
        return holds


class Size(int):
    """An integer with a polynomial of sizes. Arithmetic with it makes further ones, comparisons are kept by the trace."""

    trace: Trace
    terms: Terms

    @staticmethod
    def _make(trace: Trace, terms: Terms, value: int) -> Any:
        if not terms or (len(terms) == 1 and terms[0][0] == ()):
            return value
        made = int.__new__(Size, value)
        made.trace, made.terms = trace, terms
        return made

    def _combine(self, other: Any, terms: Callable[[Terms, Terms], Terms], value: Callable[[int, int], int]) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        return Size._make(self.trace, terms(self.terms, terms_of(other)), value(int(self), int(other)))

    def __add__(self, other: Any) -> Any:
        return self._combine(other, add, int.__add__)

    def __radd__(self, other: Any) -> Any:
        return self + other

    def __sub__(self, other: Any) -> Any:
        return self._combine(other, lambda a, b: add(a, scale(b, -1)), int.__sub__)

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __neg__(self) -> Any:
        return Size._make(self.trace, scale(self.terms, -1), -int(self))

    def __mul__(self, other: Any) -> Any:
        return self._combine(other, multiply, int.__mul__)

    def __rmul__(self, other: Any) -> Any:
        return self * other

    def __floordiv__(self, other: Any) -> Any:
        return self._combine(other, divide, int.__floordiv__)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._combine(other, lambda a, b: divide(b, a), lambda a, b: b // a)

    def __mod__(self, other: Any) -> Any:
        return self - self // other * other

    def __rmod__(self, other: Any) -> Any:
        return other - other // self * self

    def __truediv__(self, other: Any) -> Any:
        return Ratio(self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return Ratio(other, self)

    def _less(self, a: int, b: int) -> bool:
        return self.trace.decide(add(terms_of(a), scale(terms_of(b), -1)), "<", int(a) - int(b))

    def __lt__(self, other: Any) -> bool:
        return self._less(self, other)

    def __gt__(self, other: Any) -> bool:
        return self._less(other, self)

    def __le__(self, other: Any) -> bool:
        return not self._less(other, self)

    def __ge__(self, other: Any) -> bool:
        return not self._less(self, other)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, int):
            return NotImplemented
        return self.trace.decide(add(self.terms, scale(terms_of(other), -1)), "==", int(self) - int(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return self != 0

    def __abs__(self) -> Any:
        return -self if self < 0 else self

    def __hash__(self) -> int:
        return hash((id(self.trace), self.terms))

    def bit_length(self) -> int:
        raise TypeError("the width of a size that is not known cannot be asked for.")


@dataclass(frozen=True)
class Ratio:
    """A quotient on its way into math.ceil."""

    numerator: Any
    denominator: Any

    def __ceil__(self) -> Any:
        return -(-self.numerator // self.denominator)


def fixed(value: int) -> int:
    """The value as a plain integer, which must be that for every size that the plan is for."""
    if isinstance(value, Size):
        assert value == int(value)
    return int(value)


# -- polynomials ----------------------------------------------------------------------------------------------------------


def terms_of(value: int) -> Terms:
    if isinstance(value, Size):
        return value.terms
    return (((), int(value)),) if value else ()


def _ordered(coefficients: Mapping[Monomial, int]) -> Terms:
    kept = ((m, c) for m, c in coefficients.items() if c)
    return tuple(sorted(kept, key=lambda term: (-len(term[0]), repr(term[0]))))


def add(a: Terms, b: Terms) -> Terms:
    total = dict(a)
    for monomial, coefficient in b:
        total[monomial] = total.get(monomial, 0) + coefficient
    return _ordered(total)


def scale(a: Terms, factor: int) -> Terms:
    return tuple((m, c * factor) for m, c in a) if factor else ()


def multiply(a: Terms, b: Terms) -> Terms:
    total: dict[Monomial, int] = {}
    for m, c in a:
        for n, d in b:
            product = tuple(sorted((*m, *n), key=repr))
            total[product] = total.get(product, 0) + c * d
    return _ordered(total)


def divide(a: Terms, b: Terms) -> Terms:
    """floor(a / b): what divides evenly stands outside of the quotient."""
    if len(b) != 1:
        return (((Floor(a, b),), 1),)
    (divisor, factor), whole, rest = b[0], dict[Monomial, int](), dict[Monomial, int]()
    for monomial, coefficient in a:
        left = _without(monomial, divisor)
        if left is None or coefficient % factor:
            rest[monomial] = coefficient
        else:
            whole[left] = coefficient // factor
    if set(rest) == {()} and not divisor:  # a number by a number
        whole[()] = whole.get((), 0) + rest[()] // factor
    elif rest:
        quotient = (Floor(_ordered(rest), b),)  # which may stand among what divided evenly: a % b is a - a // b * b
        whole[quotient] = whole.get(quotient, 0) + 1
    return _ordered(whole)


def _without(monomial: Monomial, divisor: Monomial) -> Monomial | None:
    left = list(monomial)
    for atom in divisor:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)


def divisor(terms: Terms) -> int:
    """The greatest number that divides it whatever the sizes."""
    return reduce(gcd, (c for _, c in terms), 0)


def _denominators(terms: Terms) -> Iterator[int]:
    """The numbers by which parts of it are divided."""
    for quotient in (atom for monomial, _ in terms for atom in monomial if isinstance(atom, Floor)):
        yield from _denominators(quotient.numerator)
        if [monomial for monomial, _ in quotient.denominator] == [()]:
            yield quotient.denominator[0][1]


def bounds(terms: Terms) -> tuple[float, float]:
    """No smaller and no greater, whatever the sizes."""
    low = high = 0.0
    for monomial, coefficient in terms:
        ends = [coefficient * end for end in _product_bounds(monomial)]
        low, high = low + min(ends), high + max(ends)
    return low, high


def _product_bounds(monomial: Monomial) -> tuple[float, float]:
    low = high = 1.0
    for atom in monomial:
        first, last = (1.0, float(MOST)) if isinstance(atom, str) else _quotient_bounds(atom)
        ends = [low * first, low * last, high * first, high * last]
        low, high = min(ends), max(ends)
    return low, high


def _quotient_bounds(quotient: Floor) -> tuple[float, float]:
    (low, high), (first, last) = bounds(quotient.numerator), bounds(quotient.denominator)
    if first <= 0:
        return float("-inf"), float("inf")
    ends = [low // first, low // last, high // first, high // last]
    return min(ends), max(ends)


def evaluate(value: Terms | int, values: Mapping[str, int]) -> int:
    """The number, for these sizes."""
    if isinstance(value, int):
        return evaluate(value.terms, values) if isinstance(value, Size) else value
    total = 0
    for monomial, product in value:
        for atom in monomial:
            if isinstance(atom, str):
                product *= values[atom]
            else:
                product *= evaluate(atom.numerator, values) // evaluate(atom.denominator, values)
        total += product
    return total


# -- as C -----------------------------------------------------------------------------------------------------------------


def in_c(value: Terms | int) -> str:
    """The same as an expression in C, of int64_t variables named like the sizes."""
    if isinstance(value, int):
        return in_c(value.terms) if isinstance(value, Size) else str(value)
    text = ""
    for monomial, coefficient in value:
        factors: list[str] = []
        for atom in monomial:
            factor, sign = _atom_in_c(atom)
            factors.append(factor)
            coefficient *= sign
        if abs(coefficient) != 1 or not factors:
            factors.append(str(abs(coefficient)))
        sign = "-" if coefficient < 0 else "+" if text else ""
        text += f" {sign} " if text else sign
        text += " * ".join(factors)
    return text or "0"


def _atom_in_c(atom: Atom) -> tuple[str, int]:
    """(expression, sign): of what is negative, the opposite, for C divides towards 0."""
    if isinstance(atom, str):
        return atom, 1
    numerator, denominator = atom.numerator, in_c(atom.denominator)
    if bounds(numerator)[0] >= 0:
        return f"(({in_c(numerator)}) / ({denominator}))", 1
    opposite = scale(numerator, -1)
    if bounds(opposite)[0] >= 0:
        return f"quotient_up({in_c(opposite)}, {denominator})", -1
    return f"quotient_down({in_c(numerator)}, {denominator})", 1


def _sign(term: tuple[Monomial, int]) -> int:
    """Of a term as `in_c` writes it."""
    sign = 1 if term[1] > 0 else -1
    for atom in term[0]:
        sign *= _atom_in_c(atom)[1]
    return sign


def guard_in_c(guard: Guard) -> str:
    """A condition in C, with nothing negative on either side."""
    signs = {("==", True): "==", ("==", False): "!=", ("<", True): "<", ("<", False): ">="}
    left = tuple(term for term in guard.terms if _sign(term) > 0)
    right = tuple((m, -c) for m, c in guard.terms if _sign((m, c)) < 0)
    return f"{in_c(left)} {signs[guard.kind, guard.holds]} {in_c(right)}"


def walk(value: Any, function: Callable[[int], Any]) -> Any:
    """The same with `function` of every number in it, through nested tuples."""
    if isinstance(value, tuple):
        return tuple(walk(v, function) for v in value)
    if isinstance(value, Size) or type(value) is int:
        return function(value)
    return value


def conditions(guards: Sequence[Guard]) -> str:
    """All guards as one condition in C."""
    return " && ".join(guard_in_c(guard) for guard in guards) or "1"
