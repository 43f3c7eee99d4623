"""What flash-attention's common arguments mean here, and the refusal of those that nothing here can honour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flashtile.errors import InvalidProblem, NotSupported
from flashtile.features.scores.alibi import Alibi
from flashtile.features.scores.softcap import Softcap
from flashtile.problem.dropout import Dropout
from flashtile.problem.mask import Band
from flashtile.problem.number import plain
from flashtile.problem.options import DEFAULT, Options
from flashtile.torch.call.dropout import random_words

DETERMINISTIC = Options(deterministic=True)
Window = tuple[int | None, int | None]


def window_of(window_size: Any) -> Window | None:
    """A window whose negative distances are unbounded, as ours; it may arrive as a tensor of two numbers."""
    if isinstance(window_size, tuple) and window_size == (-1, -1):
        return None
    distances = window_size.tolist() if isinstance(window_size, torch.Tensor) else window_size
    if not isinstance(distances, (tuple, list)) or len(distances) != 2:
        raise InvalidProblem(f"window_size is {window_size!r}; it must be a pair (left, right).")
    left, right = (None if d is None or (isinstance(d, int) and d < 0) else d for d in map(plain, distances))
    return None if left is None and right is None else (left, right)


def top_left(causal: Any, seqlen_q: int, seqlen_k: int) -> Band | None:
    """The mask of a causal order that is counted from the first key."""
    causal = plain(causal)
    if not isinstance(causal, bool):
        raise InvalidProblem(f"causal is {causal!r}; it must be True or False.")
    return Band(right=seqlen_q - seqlen_k) if causal else None


def longest(max_seqlen: Any) -> Any:
    """max_seqlen, which may arrive as a tensor of one number."""
    return int(max_seqlen) if isinstance(max_seqlen, torch.Tensor) else max_seqlen


def options(deterministic: bool = False) -> Options:
    """How to run: no argument of theirs says more."""
    return DETERMINISTIC if deterministic else DEFAULT


def refuse(name: str, reasons: Mapping[str, bool]) -> None:
    """Raise NotSupported with those reasons that hold."""
    holding = [reason for reason, holds in reasons.items() if holds]
    if holding:
        raise NotSupported(name, {"flashtile": holding})


@dataclass(eq=False)  # not frozen: that would be a third of what a call costs here
class Asked:
    """The arguments that flash-attention's functions have in common."""

    softmax_scale: float | None = None
    causal: bool = False
    window_size: Any = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    deterministic: bool = False
    dropout_p: float = 0.0
    mask: Any = None  # besides causal and window_size, one of ours

    @property
    def score(self) -> tuple[Any, ...]:
        """The modifiers; 0 is no softcap."""
        capped = () if self.softcap == 0.0 else (Softcap(self.softcap),)
        return capped if self.alibi_slopes is None else (*capped, Alibi(self.alibi_slopes))

    def arguments(self, rng_state: torch.Tensor | None = None) -> dict[str, Any]:
        """Those of `flashtile.attention`. rng_state: int64 (2,), the seed of dropout; drawn where it is None."""
        return dict(
            causal=self.causal, window=window_of(self.window_size), mask=self.mask, score=self.score, scale=self.softmax_scale,
            dropout=Dropout(self.dropout_p, rng_state) if self.dropout_p else None, options=options(self.deterministic),
        )  # fmt: skip


def drawn_rng_state(device: torch.device) -> torch.Tensor:
    """A new (seed, offset), int64 (2,), from PyTorch's generator of the device: what a call without one draws."""
    return random_words(device).view(torch.int64)


def blind_rows_positive(lse: torch.Tensor) -> torch.Tensor:
    """lse as flash-attention 1 and 2 have it: +inf where a query sees no key."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)
