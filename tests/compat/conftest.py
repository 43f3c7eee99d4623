"""What other libraries' names are called with, and through which backend."""

from __future__ import annotations

import pytest

from flashtile import Options
from flashtile.compat import asked


@pytest.fixture
def through(backend: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The backend that every name uses in this test: their signatures have no place for it."""
    monkeypatch.setattr(asked, "DEFAULT", Options(backend=backend))
    monkeypatch.setattr(asked, "DETERMINISTIC", Options(backend=backend, deterministic=True))
    return backend
