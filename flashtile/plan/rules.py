"""Rules: how a tile is chosen, as data. Planning applies them, and `explain` tells which ones fired."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

Asked = TypeVar("Asked")  # what a tile is chosen for
Tile = TypeVar("Tile")  # what is chosen: a launch, or launches of which the first that fits will be taken


class Reason(Protocol):
    """What a rule says of itself."""

    @property
    def because(self) -> str: ...

    @property
    def measured(self) -> str: ...


@dataclass(frozen=True)
class Rule(Generic[Asked, Tile]):
    """Where `when` holds of what is asked, and of the tile that the rules before it left, `tile` makes the tile of it.

    because: the reason, in words. measured: where that was found (device, date, page), or that it was counted and not timed.
    """

    when: Callable[[Asked, Tile], bool]
    tile: Callable[[Asked, Tile], Tile]
    because: str
    measured: str


def apply_all(rules: Iterable[Rule[Asked, Tile]], asked: Asked, tile: Tile, fired: list[Reason]) -> Tile:
    """The tile after every rule that holds, in order; those that changed it are added to `fired`."""
    for rule in rules:
        if rule.when(asked, tile):
            before, tile = tile, rule.tile(asked, tile)
            if tile != before:
                fired.append(rule)
    return tile


def apply_first(rules: Iterable[Rule[Asked, Tile]], asked: Asked, tile: Tile, fired: list[Reason]) -> Tile:
    """The tile after the first rule that holds, which is added to `fired`."""
    rule = next((rule for rule in rules if rule.when(asked, tile)), None)
    if rule is None:
        return tile
    fired.append(rule)
    return rule.tile(asked, tile)


def told(fired: Iterable[Reason]) -> tuple[str, ...]:
    """The lines of `explain` below a tile."""
    return tuple(f"  rule: {reason.because} [{reason.measured}]" for reason in fired)
