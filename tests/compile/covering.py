"""Which of many kernels `make test` compiles: the fewest by a greedy choice in which all traits of all of them occur.

The others are compiled by `make compile`, which runs the tests marked `whole` and the whole matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import pytest

Item = TypeVar("Item")


def covering(items: Iterable[Item], traits: Callable[[Item], set[str]]) -> list[Item]:
    """In each step the first item that adds most traits, until none adds any; in the items' order."""
    left = {item: set(traits(item)) for item in items}
    order, chosen = list(left), []
    while best := max(left, key=lambda item: len(left[item]), default=None):
        seen = left.pop(best)
        if not seen:
            break
        chosen.append(best)
        for rest in left.values():
            rest -= seen
    return sorted(chosen, key=order.index)


def some_whole(items: Iterable[Item], few: Collection[Item]) -> list[Any]:
    """Items as parameters, of which all but a few are for `make compile`."""
    return [pytest.param(item, marks=() if item in few else pytest.mark.whole) for item in items]
