"""What a tile tells the compiler, by subject: the structs that all backends' tiles share, which device functions here ask.

A kernel's constexpr `T` has its shape as plain fields (`T.block_q`, `T.columns`) and everything else by subject:
`T.mask.right`, `T.schedule.swizzle`. Plain ints, bools and strings only: Triton keys its cache by their text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from flashtile.kernels.device.mask import term_starts
from flashtile.kernels.device.score import Form, shares_items
from flashtile.problem.attention import AttentionProblem


@dataclass(frozen=True)
class Mask:
    """Which scores there are."""

    left: bool  # the band is bounded on the left
    right: bool  # the band is bounded on the right: causal masks, and others
    pads_keys: bool  # the last key tile reaches beyond the keys, and a pass must know
    predicate: bool  # predicates narrow the mask
    starts: int  # where their terms begin (`term_starts`)
    blocks_q: int  # the queries of a block that the mask's lists count; 0 without lists
    blocks_k: int  # its keys

    @classmethod
    def of(cls, problem: AttentionProblem, pads_keys: bool, **own: Any) -> Self:
        """A problem's mask; `own` are the fields of a backend's own struct."""
        p = problem
        return cls(
            left=p.band.left is not None,
            right=p.band.right is not None,
            pads_keys=pads_keys,
            predicate=bool(p.where),
            starts=term_starts(p),
            blocks_q=p.blocks.block_q if p.blocks is not None else 0,
            blocks_k=p.blocks.block_k if p.blocks is not None else 0,
            **own,
        )


@dataclass(frozen=True)
class Items:
    """How batch entries lie."""

    ragged: bool  # they differ in length: programs take their tile from a schedule (`device/varlen.py`)
    varlen: bool  # they lie one after another, without padding
    together: bool  # one tensor of the mask or the scores serves all of them, so that one tile of each goes together

    @classmethod
    def of(cls, problem: AttentionProblem) -> Self:
        return cls(problem.lengths.ragged, problem.lengths.varlen, shares_items(problem))


@dataclass(frozen=True)
class Modifiers:
    """What becomes of scores before and after the softmax (`device/score.py`)."""

    count: int  # how many modifiers there are: dropout's arguments follow theirs
    prescale: bool  # scores are scaled before the softmax and modifiers applied one by one
    adds: int  # otherwise: modifiers that add to the raw product
    curved: bool  # and a last one that is a curve of it
    sink: bool  # one more logit per head joins the softmax
    dropout: bool  # probabilities are dropped

    @classmethod
    def of(cls, problem: AttentionProblem, form: Form, **own: Any) -> Self:
        """A problem's modifiers in a form; `own` are the fields of a backend's own struct."""
        p = problem
        return cls(
            count=len(p.score),
            prescale=form.prescale,
            adds=form.adds,
            curved=form.curved,
            sink=p.sink is not None,
            dropout=p.dropout is not None,
            **own,
        )
