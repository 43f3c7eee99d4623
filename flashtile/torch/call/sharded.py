"""torch's own context parallelism: within it q, k and v are shards, in an order that only it knows."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType
from typing import Any

import torch.nn.functional as F

from flashtile.errors import NotSupported

HOME = "torch.distributed.tensor.experimental"
MODULE = f"{HOME}._context_parallel._attention"
_over_ranks = ContextVar("a call under way knows of ranks", default=False)  # of this thread


def is_replaced() -> bool:
    """Whether torch's attention is a function of Python, as it is within `context_parallel`; it may be another's, too."""
    return type(F.scaled_dot_product_attention) is FunctionType


@contextmanager
def over_ranks() -> Generator[None]:
    """Within it q, k and v are shards, and the caller knows."""
    token = _over_ranks.set(True)
    try:
        yield
    finally:
        _over_ranks.reset(token)


def refuse_shards(distributed: bool = False) -> None:
    """Raise NotSupported within `torch.distributed.tensor.experimental.context_parallel`.

    distributed: whether the tensors are DTensors; then also where torch's attention of these is, by now, its parallel one.

    It is known by the module that torch's attention is of then. What else is asked has names of torch's own, of 2.11 to 2.15:
    where a release has others, shards are refused without the layout's name.
    """
    home: Any = sys.modules.get(MODULE)
    replaced = is_replaced() and F.scaled_dot_product_attention.__module__.startswith(HOME)
    if _over_ranks.get() or not (replaced or (distributed and _handles(home))):
        return
    balanced = getattr(getattr(home, "_cp_options", None), "enable_load_balance", None)
    if distributed and balanced is False:  # contiguous, which is what their placements say
        return
    layout = "..., of the order in which torch balances" if balanced is None else repr("zigzag" if balanced else "contiguous")
    raise NotSupported("attention within torch's context parallelism", {"torch": [
        "q, k and v are shards, and a call would take them for the whole; flashtile.distributed.attention(q, k, v, "
        f"context=Context(mesh, layout={layout})) attends to the whole, also there"
    ]})  # fmt: skip


def _handles(home: Any) -> bool:
    """Whether DTensors' attention is the parallel one."""
    from torch.distributed.tensor import DTensor

    handlers = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", {})
    return not getattr(home, "custom_ops", {}).keys().isdisjoint(handlers)
