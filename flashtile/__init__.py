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
    from flashtile.kernels.triton.choose import use_tuning
    from flashtile.predicate.dilated import Dilated
    from flashtile.predicate.document import Document
    from flashtile.predicate.key_padding import KeyPadding
    from flashtile.predicate.prefix import Prefix
    from flashtile.predicate.stored import Stored
    from flashtile.predicate.top_left import TopLeft
    from flashtile.score.alibi import Alibi
    from flashtile.score.bias import Bias
    from flashtile.score.softcap import Softcap
    from flashtile.spec.attention import AttentionProblem
    from flashtile.spec.dropout import Dropout
    from flashtile.spec.mask import Band
    from flashtile.spec.options import Options
    from flashtile.spec.predicate import Predicate
    from flashtile.spec.score import Captured, Position, Score
    from flashtile.torch.attention import attention
    from flashtile.torch.blocks import Blocks
    from flashtile.torch.cache import append_to_cache
    from flashtile.torch.cached import attention_cached
    from flashtile.torch.dropout import dropout_mask
    from flashtile.torch.layouts import attention_kvpacked, attention_qkvpacked, attention_varlen
    from flashtile.torch.merge import merge
    from flashtile.torch.paged_cache import PagedCache

__version__ = "0.2.0"

_HOMES = {
    "Alibi": ".score.alibi",
    "AttentionProblem": ".spec.attention",
    "Band": ".spec.mask",
    "Bias": ".score.bias",
    "Blocks": ".torch.blocks",
    "Captured": ".spec.score",
    "Dilated": ".predicate.dilated",
    "Document": ".predicate.document",
    "Dropout": ".spec.dropout",
    "InvalidProblem": ".errors",
    "KeyPadding": ".predicate.key_padding",
    "NotSupported": ".errors",
    "Options": ".spec.options",
    "PagedCache": ".torch.paged_cache",
    "Position": ".spec.score",
    "Predicate": ".spec.predicate",
    "Prefix": ".predicate.prefix",
    "Score": ".spec.score",
    "Softcap": ".score.softcap",
    "Stored": ".predicate.stored",
    "TopLeft": ".predicate.top_left",
    "append_to_cache": ".torch.cache",
    "attention": ".torch.attention",
    "attention_cached": ".torch.cached",
    "attention_kvpacked": ".torch.layouts",
    "attention_qkvpacked": ".torch.layouts",
    "attention_varlen": ".torch.layouts",
    "dropout_mask": ".torch.dropout",
    "explain": ".explanation",
    "merge": ".torch.merge",
    "use_tuning": ".kernels.triton.choose",
}

__all__ = [
    "Alibi",
    "AttentionProblem",
    "Band",
    "Bias",
    "Blocks",
    "Captured",
    "Dilated",
    "Document",
    "Dropout",
    "InvalidProblem",
    "KeyPadding",
    "NotSupported",
    "Options",
    "PagedCache",
    "Position",
    "Predicate",
    "Prefix",
    "Score",
    "Softcap",
    "Stored",
    "TopLeft",
    "append_to_cache",
    "attention",
    "attention_cached",
    "attention_kvpacked",
    "attention_qkvpacked",
    "attention_varlen",
    "dropout_mask",
    "explain",
    "merge",
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
