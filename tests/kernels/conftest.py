"""Fixtures of the CPU backend: other tiles, other arithmetic, other ways."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import flashtile
from flashtile.kernels.cpu import products, region, ways
from flashtile.problem.dtype import DType


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 x 24 scores, one item at a time."""
    for name, value in (("ROWS", 16), ("ROWS_16_BIT", 16), ("WIDTH", 24), ("ELEMENTS", 16 * 24)):
        monkeypatch.setattr(region, name, value)


@pytest.fixture(params=[True, False], ids=["narrow products", "float32 products"])
def narrow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Every tile's 16-bit products in 16 bits, or none's, whatever the CPU is good at."""
    monkeypatch.setattr(products, "NARROW_ROWS", 1)
    monkeypatch.setattr(products, "NARROW_LENGTH", 1)
    monkeypatch.setattr(products, "multiplies", lambda dtype: request.param and dtype is not DType.FP32)
    forget_plans()
    yield request.param
    forget_plans()


@pytest.fixture
def nothing_small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No problem is small enough for what rounding does to delta to be corrected."""
    monkeypatch.setattr("flashtile.kernels.device.small.SMALL_FLOPS", 0)
    forget_plans()
    yield
    forget_plans()


@pytest.fixture
def nothing_delegated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("delegates", "takes_mask"):
        monkeypatch.setattr(ways, name, lambda p: False)
    forget_plans()
    yield
    forget_plans()


def forget_plans() -> None:
    flashtile.cache_clear()
