"""How calls go to the operators: under torch.compile and export, torch.func, dispatch modes, and for subclasses of tensors."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.torch.call.arguments import Arguments
from flashtile.torch.call.inputs import check_tensors
from flashtile.torch.call.lengths import Given
from flashtile.torch.call.masks import mask_of_call
from flashtile.torch.call.sharded import is_replaced
from flashtile.torch.execute.packing import Packing
from flashtile.torch.execute.plain import autocasts, is_compiling, is_watched, transforms
from flashtile.torch.execute.plain import is_traced as watched_or_transformed
from flashtile.torch.routes.derivatives import is_dual_level
from flashtile.torch.routes.functional import ATTENTION, attend_transformed, requires_grad_below
from flashtile.torch.routes.operator import spread
from flashtile.torch.routes.request import write


def is_plain(*packs: Any) -> bool:
    """Whether a call is what eager calls mostly are: plain tensors, no autocast, nobody who wants to see an operator, and
    torch's own attention in its place.
    """
    return not (is_watched(*packs) or autocasts() or transforms() or is_dual_level() or is_replaced())


def is_traced(*packs: Any) -> bool:
    """Whether a call goes to the operators, or to the functions around them that know tangents."""
    return watched_or_transformed(*packs) or is_dual_level()


def autocast(*packs: Any) -> tuple[Any, ...]:
    """q, k, v as autocast wants them, by the rule of torch's own attention: float32 becomes autocast's dtype."""
    return tuple(_lowered(t) if isinstance(t, torch.Tensor) and t.dtype is torch.float32 else t for t in packs)


def _lowered(tensor: torch.Tensor) -> torch.Tensor:
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor


def attend_traced(packing: Packing, packs: tuple[torch.Tensor, ...], given: Given | None, arguments: Arguments) -> Any:
    """What `attention` and its kin return."""
    varlen = given is not None and given.varlen
    parts = packing.unpack(tuple(t[None] for t in packs) if varlen else packs)
    check_tensors(parts["q"], parts["k"], parts["v"], given, arguments.stored is not None)
    if given is not None:
        mask = mask_of_call(arguments.mask, parts["q"], parts["k"], True)
        arguments = Arguments(**arguments.named(mask=mask, stored=arguments.stored))
    text, floats, ints, captured, others = write(packing, parts["q"], given, arguments)
    transformed, wanted = not is_compiling() and (transforms() or is_dual_level()), 0
    if torch.is_grad_enabled():
        for i, tensor in enumerate((*packs, *captured)):
            if tensor.requires_grad or (transformed and requires_grad_below(tensor)):
                wanted |= 1 << i
    attend: Any = attend_transformed if transformed else ATTENTION
    out, lse, _ = attend(*spread(packs), [*captured, *others], wanted, text, floats, ints)
    return (out, lse) if arguments.return_lse else out
