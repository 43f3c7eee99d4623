"""Tensors of the CPU as if they were on an H100, for scripts of this folder that run eager calls as users do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

import tests.driver.launches  # noqa: F401  # pyright: ignore[reportUnusedImport] (the driver's stand-in)

# isort: split

from flashtile.plan.device import H100

CARD = torch.device("cuda", 0)
MAKERS = ("arange", "empty", "empty_strided", "full", "zeros")


def _here(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *given, device=None, **named: make(*given, **named)


def pretend() -> None:
    """From now on every tensor says that it is on the card, whose memory is the CPU's. Import what is to be called before."""
    for module in list(sys.modules.values()):
        if module.__name__.startswith("flashtile.") and hasattr(module, "device_of"):
            module.device_of = lambda device: H100  # pyright: ignore[reportAttributeAccessIssue]
    for name in MAKERS:
        setattr(torch, name, _here(getattr(torch, name)))
    tensor: Any = torch.Tensor
    tensor.device, tensor.is_cuda = property(lambda _: CARD), property(lambda _: True)
