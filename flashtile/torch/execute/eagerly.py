"""Functions in front of which torch.compile ends its graph, and which it does not look into."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

REASON = "attention over ranks, which agree before they exchange anything, and attention with tangents run eagerly"
Function = TypeVar("Function", bound=Callable[..., Any])


def eagerly(function: Function) -> Function:
    """What `torch.compiler.disable` makes of it, without the second that it takes to load the compiler before there is need."""
    made: list[Callable[..., Any]] = []

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **named)
        if not made:
            made.append(torch.compiler.disable(function, reason=REASON))
        return made[0](*args, **named)

    marks: dict[str, Any] = {"_torchdynamo_disable": True, "_torchdynamo_disable_msg": REASON}
    vars(call).update(marks)
    return call  # pyright: ignore[reportReturnType]
