"""Names and signatures of other libraries, translated; `install` puts them in those libraries' place."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from flashtile.compat.trees import install, uninstall

__all__ = ["install", "uninstall"]


def __getattr__(name: str) -> Any:
    """A library's names, imported when it is asked for."""
    if find_spec(f".{name}", __name__) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f".{name}", __name__)
