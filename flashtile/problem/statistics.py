"""What attention knows about itself: the statistics that a call may return beside out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flashtile.errors import InvalidProblem
from flashtile.problem.number import plain, told

NAMES = ("lse", "max_logit", "entropy")


@dataclass(frozen=True)
class Mass:
    """How much probability each key receives from the last queries of its item, or from all of them.

    last: how many queries (SnapKV takes 16 to 64), an int of at least 1; None for all (H2O).
    """

    last: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "last", plain(self.last))
        if self.last is not None and (isinstance(self.last, bool) or not isinstance(self.last, int) or self.last < 1):
            raise InvalidProblem(f"Mass(last={told(self.last)}): last must be an int of at least 1, or None for all queries.")


class Statistics(NamedTuple):
    """The statistics that were asked for, by name; None for the others. Sums are float32, or float64 beside float64.

    lse: (batch, heads_q, seqlen_q), differentiable.
    max_logit: (batch, heads_q): the largest visible score, scaled and modified, without sinks; -inf where nothing is visible.
    entropy: (batch, heads_q, seqlen_q), differentiable: -sum p ln p of a row, a sink among what p is of; in nats.
    mass: (batch, heads_q, seqlen_k): for each key the sum of p over the queries of `Mass`.
    Of varlen lse and entropy are (heads_q, total_q), mass (heads_q, total_k), and max_logit is (items, heads_q). p is what the
    softmax makes, before dropout.
    """

    lse: Any = None
    max_logit: Any = None
    entropy: Any = None
    mass: Any = None


@dataclass(frozen=True)
class Wish:
    """Which statistics a call returns. last: queries that mass counts, 0 for all."""

    lse: bool = False
    max_logit: bool = False
    entropy: bool = False
    mass: bool = False
    last: int = 0

    @property
    def passes(self) -> bool:
        """Whether a pass is needed that a call without statistics has not."""
        return self.max_logit or self.entropy or self.mass


def wish_of(returns: Any) -> Wish:
    """What `returns` asks for. Raises InvalidProblem."""
    listed: Sequence[Any] = returns if isinstance(returns, (tuple, list)) else (returns,)
    asked: dict[str, Any] = {}
    for one in listed:
        name = "mass" if isinstance(one, Mass) else one
        if not (isinstance(name, str) and name in (*NAMES, "mass")) or (name == "mass" and not isinstance(one, Mass)):
            raise InvalidProblem(
                f"returns has {one!r}; it may have {', '.join(map(repr, NAMES))} and a Mass, such as Mass(last=64)."
            )
        if name in asked:
            raise InvalidProblem(f"returns has {name!r} twice; it may have each statistic once.")
        asked[name] = True
        if isinstance(one, Mass):
            asked["last"] = one.last or 0
    return Wish(**asked)
