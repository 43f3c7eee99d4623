"""What `attention` and its kin take by name, as one value: made where a call comes in, and read where a problem is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import torch

from flashtile.problem.dropout import Dropout
from flashtile.problem.mask import Band, Joined
from flashtile.problem.options import Options
from flashtile.problem.score import Score
from flashtile.problem.stored import Stored


class Keywords(TypedDict, total=False):
    """What every form of `attention` takes by name, with the meaning that it has there."""

    causal: bool
    window: tuple[int | None, int | None] | None
    mask: Band | Joined | None
    score: Sequence[Score]
    scale: float | None
    sink: torch.Tensor | None
    dropout: Dropout | None
    return_lse: bool
    options: Options | None


class ScaledKeywords(Keywords, total=False):
    """The same, and the scales of q, k and v that are of 8 bits."""

    q_scale: Any
    k_scale: Any
    v_scale: Any


class Scaled(NamedTuple):
    """That k and v, or q too, are bytes, and what they are multiplied by: `torch/call/stored.py` makes it.

    tensors: those scales that there are, of q, k and v.
    """

    kind: Stored
    tensors: tuple[torch.Tensor, ...]


class Arguments(NamedTuple):
    """The same as given, not checked yet: a tuple, which costs an eager call least and which torch.compile sees through.

    Lengths are not among them: `lengths.Given` holds those of every form.
    """

    causal: Any = False
    window: Any = None
    mask: Any = None
    score: Any = ()
    scale: Any = None
    sink: Any = None
    dropout: Any = None
    return_lse: Any = False
    options: Any = None
    stored: Scaled | None = None

    def named(self, **changes: Any) -> dict[str, Any]:
        """By name, for a public function, with some of them changed."""
        return {**dict(zip(NAMES, self, strict=False)), **changes}


NAMES = Arguments._fields[:-1]  # which a caller has
EVERY = ("q", "k", "v", *NAMES[:-2], "seqused_q", "seqused_k", *NAMES[-2:], "returns")  # of `attention`, in its order


def arguments_of(keywords: Mapping[str, Any]) -> Arguments:
    """Of a public function's keywords; their names are known to be right."""
    return Arguments(**keywords)
