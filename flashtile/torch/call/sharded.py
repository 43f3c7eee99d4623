"""torch's own context parallelism: within it q, k and v are shards, in an order that only it knows."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

import torch.nn.functional as F

from flashtile.errors import NotSupported

HOME = "torch.distributed.tensor.experimental._context_parallel._attention"


def is_replaced() -> bool:
    """Whether torch's attention is a function of Python, as it is within `context_parallel`; it may be another's, too."""
    return type(F.scaled_dot_product_attention) is FunctionType


def refuse_shards(distributed: bool = False) -> None:
    """Raise NotSupported within `torch.distributed.tensor.experimental.context_parallel`.

    distributed: whether the tensors are DTensors; then also where torch's attention of these is, by now, its parallel one.
    """
    home: Any = sys.modules.get(HOME)  # names of its own, which another release may not have: then nothing is known
    replaced = getattr(home, "_replaced_functions", ())
    if home is None or not (F.scaled_dot_product_attention in replaced or (distributed and _handles(home))):
        return
    layout = "zigzag" if getattr(getattr(home, "_cp_options", None), "enable_load_balance", False) else "contiguous"
    if distributed and layout == "contiguous":  # which is what their placements say
        return
    raise NotSupported("attention within torch's context parallelism", {"torch": [
        "q, k and v are shards, and a call would take them for the whole; flashtile.distributed.attention(q, k, v, "
        f"context=Context(mesh, layout={layout!r})) attends to the whole, also there"
    ]})  # fmt: skip


def _handles(home: Any) -> bool:
    """Whether DTensors' attention is the parallel one."""
    from torch.distributed.tensor import DTensor

    handlers = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", {})
    return not getattr(home, "custom_ops", {}).keys().isdisjoint(handlers)
