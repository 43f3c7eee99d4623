"""flashtile: exact attention, tile by tile.

The names below are loaded at first use, so that `import flashtile` costs nothing and needs neither torch nor Triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from flashtile.torch.dropout import dropout_mask
    from flashtile.torch.layouts import attention_kvpacked, attention_qkvpacked, attention_varlen

__version__ = "0.1.0"

_HOMES = {
    "Alibi": "flashtile.score.alibi",
    "AttentionProblem": "flashtile.spec.attention",
    "Band": "flashtile.spec.mask",
    "Bias": "flashtile.score.bias",
    "Blocks": "flashtile.torch.blocks",
    "Captured": "flashtile.spec.score",
    "Dilated": "flashtile.predicate.dilated",
    "Document": "flashtile.predicate.document",
    "Dropout": "flashtile.spec.dropout",
    "InvalidProblem": "flashtile.errors",
    "KeyPadding": "flashtile.predicate.key_padding",
    "NotSupported": "flashtile.errors",
    "Options": "flashtile.spec.options",
    "Position": "flashtile.spec.score",
    "Predicate": "flashtile.spec.predicate",
    "Prefix": "flashtile.predicate.prefix",
    "Score": "flashtile.spec.score",
    "Softcap": "flashtile.score.softcap",
    "Stored": "flashtile.predicate.stored",
    "TopLeft": "flashtile.predicate.top_left",
    "attention": "flashtile.torch.attention",
    "attention_kvpacked": "flashtile.torch.layouts",
    "attention_qkvpacked": "flashtile.torch.layouts",
    "attention_varlen": "flashtile.torch.layouts",
    "dropout_mask": "flashtile.torch.dropout",
    "explain": "flashtile.explanation",
    "use_tuning": "flashtile.kernels.triton.choose",
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
    "Position",
    "Predicate",
    "Prefix",
    "Score",
    "Softcap",
    "Stored",
    "TopLeft",
    "attention",
    "attention_kvpacked",
    "attention_qkvpacked",
    "attention_varlen",
    "dropout_mask",
    "explain",
    "use_tuning",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'flashtile' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
