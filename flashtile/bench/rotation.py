"""Timing in rotation: everybody in turn, there and back, so that no one always runs on a colder card than another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Entrant = TypeVar("Entrant")

LEAST_ROUNDS = 4  # there and back, which cancels a drift, twice: a median without the one burst that something held up


def rotate(
    entrants: Sequence[Entrant],
    rounds: int,
    burst: Callable[[Entrant], float | None],
    in_time: Callable[[], bool] = lambda: True,
) -> dict[Entrant, list[float]]:
    """Milliseconds of every burst, by entrant; the order of turns is reversed every other round.

    A power-limited card slows down under load and speeds up when idle: providers timed one after another rank the
    order they ran in. `burst` answers None for an entrant that is out; its times are dropped and its turn is not
    taken again. Once `in_time` says no, the rotation ends at the next full round, but not before LEAST_ROUNDS.
    """
    times: dict[Entrant, list[float]] = {entrant: [] for entrant in entrants}
    for round_index in range(rounds):
        if round_index >= LEAST_ROUNDS and not in_time():
            break
        turn = list(times)
        for entrant in turn if round_index % 2 == 0 else turn[::-1]:
            if entrant not in times:
                continue
            ms = burst(entrant)
            if ms is None:
                del times[entrant]
            else:
                times[entrant].append(ms)
    return times
