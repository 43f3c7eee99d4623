"""vLLM: its attention by flashtile, as the attention backend `CUSTOM`: generation and pooling models.

Installed beside vLLM, flashtile offers itself to every vLLM process (`plug_in`, of the entry points
`vllm.general_plugins`); nothing runs on it before `--attention-backend CUSTOM` asks.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

BACKEND = "flashtile.integrations.vllm_backend.FlashtileBackend"
REGISTRY = "vllm.v1.attention.backends.registry"


def register() -> None:
    """Make vLLM's `AttentionBackendEnum.CUSTOM` mean flashtile, in this process. Needs a vLLM that has it."""
    registry: Any = import_module(REGISTRY)
    registry.register_backend(registry.AttentionBackendEnum.CUSTOM, BACKEND)


def plug_in() -> None:
    """`register`, where CUSTOM means nothing yet. Warns where it is another's, or where vLLM has no such name."""
    try:
        custom = import_module(REGISTRY).AttentionBackendEnum.CUSTOM
    except (ImportError, AttributeError):
        warnings.warn("This vLLM has no attention backend CUSTOM; flashtile is not offered.", stacklevel=2)
        return
    if not custom.is_overridden():
        register()
    elif custom.get_path() != BACKEND:
        warnings.warn(f"vLLM's attention backend CUSTOM is {custom.get_path()}; flashtile leaves it so.", stacklevel=2)
