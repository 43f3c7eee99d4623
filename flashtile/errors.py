"""The two errors that flashtile raises on purpose."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from numbers import Integral


class InvalidProblem(ValueError):
    """The request has no meaning: the message names the thing, its value, and what it must be."""


class NotSupported(NotImplementedError):
    """The request has a meaning, but no backend can run it; `reasons` says why, backend by backend."""

    def __init__(self, request: str, reasons: Mapping[str, Sequence[str]]):
        self.request = request
        self.reasons = {name: tuple(lines) for name, lines in reasons.items()}
        rows = [f"  {name}: {line}" for name, lines in self.reasons.items() for line in lines]
        super().__init__("\n".join([f"no backend can run {request}:", *rows]))

    def __reduce__(self) -> tuple[type[NotSupported], tuple[str, Mapping[str, Sequence[str]]]]:
        """For processes that compile: one error passes to another process whole."""
        return type(self), (self.request, self.reasons)


def renamed(error: InvalidProblem, called: Mapping[str, str]) -> InvalidProblem:
    """The error with the names that its caller has for things, by those that it was raised with."""
    return InvalidProblem(re.sub(r"\w+", lambda word: called.get(word[0], word[0]), str(error)))


def check_sizes(**sizes: object) -> None:
    """Raise InvalidProblem for what is no positive int."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
            raise InvalidProblem(f"{name} is {size!r}; it must be a positive int.")


def check_names(function: str, given: Iterable[str], known: Container[str]) -> None:
    """Raise TypeError, as Python does, for a keyword argument that the public function does not take."""
    for name in given:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
