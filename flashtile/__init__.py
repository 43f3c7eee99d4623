"""flashtile: exact attention, tile by tile.

The names below are loaded at first use, so that `import flashtile` costs nothing and needs neither torch nor Triton.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashtile import compat, distributed, integrations, jax, nn, ops  # noqa: F401  lazy, as the names below are
    from flashtile.errors import InvalidProblem, NotSupported
    from flashtile.explanation import explain
    from flashtile.features.masks.chunked import Chunked
    from flashtile.features.masks.dilated import Dilated
    from flashtile.features.masks.document import Document
    from flashtile.features.masks.key_padding import KeyPadding
    from flashtile.features.masks.prefix import Prefix
    from flashtile.features.masks.stored import Stored
    from flashtile.features.masks.top_left import TopLeft
    from flashtile.features.masks.tree import Tree
    from flashtile.features.scores.alibi import Alibi
    from flashtile.features.scores.bias import Bias
    from flashtile.features.scores.softcap import Softcap
    from flashtile.kernels.portable.choose import use_tuning
    from flashtile.memory import cache_clear, cache_info
    from flashtile.problem.attention import AttentionProblem
    from flashtile.problem.dropout import Dropout
    from flashtile.problem.mask import Band, Predicate
    from flashtile.problem.options import Options
    from flashtile.problem.score import Captured, Position, Score
    from flashtile.problem.statistics import Mass, Statistics
    from flashtile.torch.api.attention import attention
    from flashtile.torch.api.blocks import Blocks
    from flashtile.torch.api.layouts import attention_kvpacked, attention_qkvpacked, attention_varlen
    from flashtile.torch.api.merge import merge
    from flashtile.torch.api.quantize import Quantized, quantize
    from flashtile.torch.api.statistics import qk_clip
    from flashtile.torch.cache.append import append_to_cache
    from flashtile.torch.cache.attention import attention_cached
    from flashtile.torch.cache.paged import PagedCache
    from flashtile.torch.call.dropout import dropout_mask

__version__ = "0.2.0"

_HOMES = {
    "Alibi": ".features.scores.alibi",
    "AttentionProblem": ".problem.attention",
    "Band": ".problem.mask",
    "Bias": ".features.scores.bias",
    "Blocks": ".torch.api.blocks",
    "Captured": ".problem.score",
    "Chunked": ".features.masks.chunked",
    "Dilated": ".features.masks.dilated",
    "Document": ".features.masks.document",
    "Dropout": ".problem.dropout",
    "InvalidProblem": ".errors",
    "KeyPadding": ".features.masks.key_padding",
    "Mass": ".problem.statistics",
    "NotSupported": ".errors",
    "Options": ".problem.options",
    "PagedCache": ".torch.cache.paged",
    "Position": ".problem.score",
    "Predicate": ".problem.mask",
    "Prefix": ".features.masks.prefix",
    "Quantized": ".torch.api.quantize",
    "Score": ".problem.score",
    "Softcap": ".features.scores.softcap",
    "Statistics": ".problem.statistics",
    "Stored": ".features.masks.stored",
    "TopLeft": ".features.masks.top_left",
    "Tree": ".features.masks.tree",
    "append_to_cache": ".torch.cache.append",
    "attention": ".torch.api.attention",
    "attention_cached": ".torch.cache.attention",
    "attention_kvpacked": ".torch.api.layouts",
    "attention_qkvpacked": ".torch.api.layouts",
    "attention_varlen": ".torch.api.layouts",
    "cache_clear": ".memory",
    "cache_info": ".memory",
    "dropout_mask": ".torch.call.dropout",
    "explain": ".explanation",
    "merge": ".torch.api.merge",
    "qk_clip": ".torch.api.statistics",
    "quantize": ".torch.api.quantize",
    "use_tuning": ".kernels.portable.choose",
}

__all__ = [
    "Alibi",
    "AttentionProblem",
    "Band",
    "Bias",
    "Blocks",
    "Captured",
    "Chunked",
    "Dilated",
    "Document",
    "Dropout",
    "InvalidProblem",
    "KeyPadding",
    "Mass",
    "NotSupported",
    "Options",
    "PagedCache",
    "Position",
    "Predicate",
    "Prefix",
    "Quantized",
    "Score",
    "Softcap",
    "Statistics",
    "Stored",
    "TopLeft",
    "Tree",
    "append_to_cache",
    "attention",
    "attention_cached",
    "attention_kvpacked",
    "attention_qkvpacked",
    "attention_varlen",
    "cache_clear",
    "cache_info",
    "dropout_mask",
    "explain",
    "merge",
    "qk_clip",
    "quantize",
    "use_tuning",
]


_PACKAGES = ("compat", "distributed", "integrations", "jax", "nn", "ops")


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module 'flashtile' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted((*__all__, *(name for name in _PACKAGES if name != "jax" or find_spec("jax"))))
