"""transformers' generation: queries of one token over caches, and the pages of its continuous batching.

One token over a whole cache runs on a GPU as `attention_cached`, of which the cache is one page an item; a CPU would copy the
keys for that, and takes `attention`. In continuous batching batches that decode alone bring a table of pages; others bring the
keys of all requests one after another.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from functools import wraps
from importlib import import_module
from typing import Any

import torch

from flashtile.problem.options import Options
from flashtile.torch.cache.attention import attention_cached

BATCHING = "transformers.generation.continuous_batching"
FEW = 8  # queries of an item, up to which they are decoding


def is_decoding(q: torch.Tensor, dropout: float, options: Options | None) -> bool:
    """Whether queries (batch, seqlen_q, heads, head_dim) are few, on a GPU whose kernels may be those of caches."""
    portable = options is None or options.backend in (None, "triton")
    return q.is_cuda and q.shape[1] <= FEW and portable and not dropout and not torch.is_grad_enabled()


def attend_whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    """`attention` with these arguments, over keys (batch, seqlen_k, heads, head_dim) as a contiguous cache."""
    if arguments.get("seqused_k") is None:
        arguments["seqused_k"] = lengths_of(k)
    return attention_cached(q, k, v, **arguments)


def lengths_of(k: torch.Tensor) -> torch.Tensor:
    """All keys of each item, int32 (batch,)."""
    return torch.full(k.shape[:1], k.shape[1], dtype=torch.int32, device=k.device)


def attend_pages(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cu_k: torch.Tensor, arguments: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    """out (1, requests, heads, head_dim_v) of one query a request, whose k and v are written into their pages first.

    pages: block_table, k_cache and v_cache, (pages, page_size, heads, head_dim). cu_k: starts of the requests' keys, these
    counted; a request without any is there to fill a graph, and its table names no page.
    """
    after = (cu_k[1:] - cu_k[:-1])[: q.shape[1]].int()
    rest = {name: value for name, value in arguments.items() if name != "dropout"}
    table, k_cache, v_cache = pages
    new = k[0, :, None], v[0, :, None]
    out = attention_cached(q[0, :, None], k_cache, v_cache, table[: q.shape[1]], seqused_k=after - 1, append=new, **rest)
    return out[:, 0][None]


def open_batching(names: Collection[str]) -> None:
    """Let continuous batching treat these implementations as flash-attention: no mask, and a table of pages where all decode.

    Elsewhere transformers is told that they are none (`register`). Nothing where this transformers has no continuous batching.
    """
    try:
        import_module(BATCHING)
    except ImportError:
        return
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith(BATCHING):
            _wrap(module, "is_flash_attention_requested", names)
    first = sys.modules.get(f"{BATCHING}.initialization")
    original = getattr(first, "lazy_import_flash_attention", None)
    if original is not None:

        @wraps(original)
        def lazy_import_flash_attention(implementation: str | None, *given: Any, **named: Any) -> Any:
            if implementation in names:  # asked whether there is one for pages
                return (None, None, attend_pages, None, None), (None, None)
            return original(implementation, *given, **named)

        setattr(first, original.__name__, lazy_import_flash_attention)


def _wrap(module: Any, name: str, names: Collection[str]) -> None:
    original = getattr(module, name, None)
    if original is None:
        return

    @wraps(original)
    def asked(config: Any = None, requested_attention_implementation: str | None = None, version: Any = None) -> bool:
        wanted = requested_attention_implementation if config is None else config._attn_implementation
        return wanted in names or original(config, requested_attention_implementation, version)

    setattr(module, name, asked)
