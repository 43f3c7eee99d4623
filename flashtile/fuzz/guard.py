"""Memory that shows who reads what was never written, or writes beyond its end.

Between `watched()` and its end every tensor that PyTorch is asked to leave uninitialised holds NaN, -9 where it is of
integers, and lies between two guards.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

PATTERN = 0x7FFF7FFF  # NaN as fp16, bf16, fp32 and fp64
GUARD = 128  # words of 4 bytes before and behind a tensor
UNWRITTEN = -9
MAKERS = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty"))
EMPTY = torch.empty

_watching: list[list[torch.Tensor]] = []
_guarding: set[Any] = set()  # what stands in the place of MAKERS


@contextmanager
def watched() -> Generator[list[torch.Tensor]]:
    """What is made inside lies between guards, which the list holds: words that must all be PATTERN."""
    install()
    guards: list[torch.Tensor] = []
    _watching.append(guards)
    try:
        yield guards
    finally:
        _watching.pop()


def broken(guards: list[torch.Tensor]) -> torch.Tensor:
    """How many words of the guards were written."""
    return (torch.cat(guards) != PATTERN).sum()


def install() -> None:
    """Stand in the way of whoever asks PyTorch for memory."""
    for home, name in MAKERS:
        make = getattr(home, name)
        if make not in _guarding:
            _guarding.add(guarded := _guarded(make))
            setattr(home, name, guarded)


def _guarded(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(make)
    def guarded(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = make(*args, **kwargs)
        fits = _watching and made.device.type in ("cpu", "cuda") and made.layout is torch.strided and made.numel()
        if not fits or type(made) is not torch.Tensor or made.requires_grad or made.is_quantized:
            return made
        return between(made, _watching[-1])

    return guarded


def between(like: torch.Tensor, guards: list[torch.Tensor]) -> torch.Tensor:
    """A tensor that lies as another one, between guards."""
    with torch.no_grad():
        size = like.element_size()
        elements = 1 + sum((n - 1) * step for n, step in zip(like.shape, like.stride(), strict=True))
        words = -(-elements * size // 16) * 4
        flat = EMPTY(words + 2 * GUARD, dtype=torch.int32, device=like.device).fill_(PATTERN)
        tensor = EMPTY(0, dtype=like.dtype, device=like.device)
        tensor.set_(flat.untyped_storage(), GUARD * 4 // size, like.shape, like.stride())  # pyright: ignore[reportCallIssue, reportArgumentType]
        if not like.is_floating_point():
            tensor.fill_(
                UNWRITTEN % 2 if like.dtype is torch.bool else UNWRITTEN % 251 if like.dtype is torch.uint8 else UNWRITTEN
            )
        used = -(-elements * size // 4)
        guards += [flat[:GUARD], flat[GUARD + used :]]
    return tensor
