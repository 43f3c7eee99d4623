"""Random calls over caches, 600 without a GPU and 2,200 more with one, judged by the float64 reference: what no query may look
at is NaN, and so is new memory.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import flashtile
from flashtile.reference.cached import cached_reference
from tests.cached.cases import CALLS, COUNT, FIRST, KERNELS, drawn_case, kinds_of
from tests.cached.draw import PAGES, check
from tests.judge import FACTOR

STEP = 20
SAMPLE = (7, 23)  # of the whole, each so many: primes, that go through what seeds decide


def judge(backend: str, place: torch.device, seeds: range) -> None:
    for seed in seeds:
        check(drawn_case(seed, backend != "cpu", place), backend)


def test_a_sample_is_right(backend: str, place: torch.device) -> None:
    judge(backend, place, range(FIRST, FIRST + COUNT, SAMPLE[backend != "cpu"]))


@pytest.mark.whole
@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, STEP))
def test_all_are_right(backend: str, place: torch.device, first: int) -> None:
    judge(backend, place, range(first, min(first + STEP, FIRST + COUNT)))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("kernel", range(KERNELS))
def test_calls_of_one_kernel_are_right(kernel: int, device: torch.device) -> None:
    for number in range(CALLS):
        check(drawn_case(FIRST + kernel * CALLS + number, False, device, kernel), "triton")


@pytest.mark.parametrize(("kernel", "number", "plain"), [(6, 2, 3.69e-7), (48, 8, 5.60e-8), (84, 6, 1.99e-7)])
def test_float32_queries_of_8_bits_err_no_more_than_float32(
    kernel: int, number: int, plain: float, device: torch.device
) -> None:
    """`plain`: how far PyTorch was off on an H200, and six products of bf16 parts 2.4 to 2.5 times as far."""
    drawn = drawn_case(FIRST + kernel * CALLS + number, False, device, kernel)
    options = flashtile.Options(backend="triton")
    out = flashtile.attention_cached(*drawn.tensors, **drawn.arguments, split=drawn.split, options=options)
    exact, _ = cached_reference(*drawn.tensors, **drawn.arguments)
    assert (out.double() - exact).abs().max().item() <= FACTOR * plain, drawn.about


def test_calls_of_one_kernel_differ_in_lengths_and_places() -> None:
    """Of each kernel all calls are of the same kinds, and no two the same call."""
    for kernel in range(0, KERNELS, 9):
        some = [drawn_case(FIRST + kernel * CALLS + number, False, variant=kernel) for number in range(CALLS)]
        assert len({tuple(kinds_of(drawn)) for drawn in some}) == 1
        assert len({drawn.about for drawn in some}) == CALLS


def test_everything_is_among_them() -> None:
    found = Counter(kind for seed in range(FIRST, FIRST + COUNT) for kind in kinds_of(drawn_case(seed, False)))
    kinds = [*(f"page {size}" for size in PAGES), "contiguous", *(f"split {n}" for n in (None, 0, 128, 256)), "Tree", "causal"]
    kinds += [f"stored torch.{n}" for n in ("float8_e4m3fn", "float8_e5m2", "int8")] + ["cu_seqlens_q", "first_k", "window"]
    kinds += [f"torch.{n}" for n in ("float16", "bfloat16", "float32")] + [
        "sink",
        "Softcap",
        "Alibi",
        "Bias",
        "Terms",
        "Dilated",
    ]
    assert min(found[kind] for kind in kinds) >= 15, found
