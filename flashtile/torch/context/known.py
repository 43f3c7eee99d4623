"""Calls over ranks that were checked and agreed on before: what is left of the next one alike is to send and to launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashtile.memory import Memory
from flashtile.problem.mask import Joined
from flashtile.problem.score import Score
from flashtile.torch.call.inputs import modifiers
from flashtile.torch.context.context import Context
from flashtile.torch.context.wanted import Wanted
from flashtile.torch.execute.plain import is_traced
from flashtile.torch.routes.eager import prepare


@dataclass
class Known:
    """What a call came to. ready: its local calls and how keys come to them, where these take q, k and v alone."""

    want: Wanted
    method: str
    ready: Any = None


KNOWN = Memory[Any, Known](1024, "known calls over ranks")


def key_of(q: Any, k: Any, v: Any, context: Context, said: Any, **given: Any) -> Any:
    """What decides a call of q, k and v alone; None where it may have other tensors, or ranks agree about every call.

    said: what else decides it. given: the other arguments of `attention`. Raises for what no backend does.
    """
    score, mask, sink, dropout = modifiers(given["score"]), given["mask"], given["sink"], given.pop("dropout")
    if context.check != "first" or is_traced(q, k, v) or isinstance(mask, Joined) or not (sink is dropout is None):
        return None
    if not (isinstance(score, (tuple, list)) and all(map(_has_numbers_alone, score))):
        return None
    alone, _ = prepare(q, k, v, **given)
    wishes = torch.is_grad_enabled() and tuple(t.requires_grad for t in (q, k, v))
    if wishes and any(wishes):
        alone.require_backward()  # whatever torch's own wish for determinism is by now
    return context, context.ranks, context.rank, alone, wishes, said


def _has_numbers_alone(modifier: Any) -> bool:
    return isinstance(modifier, Score) and not (
        modifier.captured or any(isinstance(n, torch.Tensor) for n in modifier.scalars())
    )
