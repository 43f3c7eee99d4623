"""Caches of 8 bits, and values that are columns of keys, against the float64 reference of what is stored."""

from __future__ import annotations

import pytest
import torch

from tests.cached.draw import check, draw


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_random_calls_on_the_cpu(first: int) -> None:
    for seed in range(first, first + 40):
        check(draw(seed, stored=True), "cpu")


@pytest.mark.parametrize("first", range(1000, 1032, 16))
def test_random_calls_of_the_portable_kernels(first: int, device: torch.device) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    for seed in range(first, first + 16):
        check(draw(seed, True, device, stored=True), "triton")
