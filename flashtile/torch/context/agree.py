"""Whether all ranks call alike, asked before anything else is sent: what one refuses, all refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from flashtile.errors import InvalidProblem, NotSupported
from flashtile.memory import Memory

Told = dict[str, str]
SHOWN = 16  # numbers of a tensor that an error shows; of a longer one a checksum
_AGREED = Memory[Any, None](8192, "calls that ranks agreed on")


class Context(Protocol):
    """What is asked here of a `flashtile.distributed.Context`."""

    @property
    def check(self) -> str: ...
    @property
    def layout(self) -> str: ...
    @property
    def ranks(self) -> int: ...
    @property
    def group(self) -> Any: ...


@contextmanager
def refused_together(context: Context) -> Iterator[None]:
    """What fails here fails on every rank: the others, which ask whether all call alike, are told why.

    Whoever comes out of it without an error must `agree`.
    """
    try:
        yield
    except Exception as error:  # whatever it is: the other ranks must not wait
        agree(context, {}, error)
        raise


def agree(context: Context, call: Told, error: Exception | None = None, values: Callable[[], Told] = dict) -> None:
    """Raise on every rank what any of them has against its call, or InvalidProblem where their calls differ.

    call: what decides what is exchanged. values: what numbers ranks must have alike besides, asked where ranks do agree.
    """
    key = context, tuple(call.items())
    if context.check == "first" and error is None and key in _AGREED:
        return
    said: list[Any] = [None] * context.ranks
    told = error if error is None or isinstance(error, NotSupported) else f"{type(error).__name__}: {error}"
    own = {"check": context.check, "layout": context.layout, **call, **({} if error else values())}
    with torch._C._DisableFuncTorch():  # within whose transforms tensors made here would have no memory
        dist.all_gather_object(said, (own, told), group=context.group)
    if error is not None:
        raise error
    for rank, (_, other) in enumerate(said):
        if isinstance(other, NotSupported):
            raise other
        if other is not None:
            raise InvalidProblem(f"rank {rank} refuses the call. {other}")
    first: Told = said[0][0]
    for rank, (other, _) in enumerate(said):
        for name in (*first, *(name for name in other if name not in first)):
            here, there = first.get(name, "not given"), other.get(name, "not given")
            if here != there:
                raise InvalidProblem(f"{name} is {here} on rank 0 and {there} on rank {rank}; ranks must call alike.")
    if context.check == "first":
        _AGREED[key] = None


def numbers_in(found: Mapping[str, Any]) -> Told:
    """The values of those that are tensors in the host's memory."""
    return {name: _checksum(t) for name, t in found.items() if isinstance(t, torch.Tensor) and t.device.type == "cpu"}


def _checksum(tensor: torch.Tensor) -> str:
    tensor = tensor.detach()
    if tensor.numel() <= SHOWN:
        return str(tensor.tolist())
    parts = tensor.contiguous().flatten().view(torch.uint8).to(torch.int64)
    place = torch.arange(1, len(parts) + 1)
    return f"{tuple(tensor.shape)} numbers of checksum {int((parts * (place * 0x9E3779B1 + place.square())).sum()):x}"
