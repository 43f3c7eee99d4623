"""Whether a call's tensors are memory and nothing else, and who but kernels wants to see what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

is_compiling = torch.compiler.is_compiling
modes = torch._C._len_torch_dispatch_stack
transforms = torch._C._are_functorch_transforms_active
autocasts = torch._C._is_any_autocast_enabled
is_wrapped: Any = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore[reportAttributeAccessIssue]
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


def is_more(tensor: Any) -> bool:
    """Whether it is a DTensor, a fake one, or any other that is not just its memory."""
    return isinstance(tensor, torch.Tensor) and type(tensor) not in PLAIN


def is_distributed(*packs: Any) -> bool:
    """Whether one of these is a DTensor."""
    if not (torch.distributed.is_available() and any(map(is_more, packs))):  # no import of a tenth of a second in vain
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(t, DTensor) for t in packs)


def is_watched(*tensors: Any) -> bool:
    """Whether somebody wants to see an operator: torch.compile, a dispatch mode, or what is more than a plain tensor."""
    if is_compiling() or modes():
        return True
    return not PLAIN.issuperset(map(type, tensors)) and any(map(is_more, tensors))


def uncast(device: torch.device) -> AbstractContextManager[Any]:
    """Where nothing is cast, whatever autocast the caller is under."""
    here = autocasts() and torch.amp.is_autocast_available(device.type)  # meta has none
    return torch.autocast(device.type, enabled=False) if here else nullcontext()


def joined(parts: Sequence[torch.Tensor], dim: int = -1) -> torch.Tensor:
    """`torch.cat`, which under autocast casts, and refuses the other 16-bit dtype."""
    with uncast(parts[0].device):
        return torch.cat(list(parts), dim)


def is_traced(*tensors: Any) -> bool:
    """Whether somebody wants to see an operator, torch.func's transforms too."""
    return is_watched(*tensors) or bool(transforms())
