"""Whether all ranks call alike, asked before anything else is sent: what one refuses, all refuse."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from flashtile.errors import InvalidProblem, NotSupported
from flashtile.memory import Memory
from flashtile.torch.context.context import Context

_AGREED = Memory[Any, None](8192, "calls that ranks agreed on")


def agree(context: Context, call: dict[str, Any], error: Exception | None) -> None:
    """Raise on every rank what any of them has against its call, or InvalidProblem where their calls differ."""
    key = context, tuple(call.items())
    if context.check == "first" and error is None and key in _AGREED:
        return
    said: list[Any] = [None] * context.ranks
    told = error if error is None or isinstance(error, NotSupported) else f"{type(error).__name__}: {error}"
    dist.all_gather_object(said, (call, told), group=context.group)
    if error is not None:
        raise error
    for rank, (_, other) in enumerate(said):
        if isinstance(other, NotSupported):
            raise other
        if other is not None:
            raise InvalidProblem(f"rank {rank} refuses the call. {other}")
    for rank, (other, _) in enumerate(said):
        for name, value in other.items():
            if value != call[name]:
                raise InvalidProblem(
                    f"{name} is {call[name]} on rank {context.rank} and {value} on rank {rank}; ranks must call alike."
                )
    if context.check == "first":
        _AGREED[key] = None
