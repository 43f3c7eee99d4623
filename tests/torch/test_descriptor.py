"""What the bulk copy engine can address, and what is copied for it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashtile.plan.call import Buffer
from flashtile.torch.execute.bound import output_strides
from flashtile.torch.execute.descriptor import addressable, staged_strides


def fits(tensor: torch.Tensor) -> bool:
    return addressable(tensor.shape, tensor.stride(), tensor.element_size(), tensor.data_ptr())


def make(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (make(2, 5, 3, 64), True),
        (make(2, 3, 5, 64).transpose(1, 2), True),
        (make(2, 5, 3, 3, 64)[:, :, 1], True),  # one of packed q, k, v
        (make(2, 5, 3, 128)[..., :64], True),
        (make(2, 5, 3, 128)[..., ::2], False),
        (make(2, 5, 64, 3).transpose(2, 3), False),
        (make(2, 5, 3, 65)[..., 1:], False),
        (make(2, 5, 3, 12), False),
        (make(2, 1, 1, 12), False),
        (make(1, 1, 1, 12), True),  # axes of one element are never walked
        (make(2, 5, 1, 64).expand(2, 5, 3, 64), False),
        (make(2 * 5 * 3 * 64 + 4)[4:].view(2, 5, 3, 64), False),
    ],
)
def test_addressable(tensor: torch.Tensor, expected: bool) -> None:
    assert fits(tensor) is expected


@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.sampled_from([2, 4]))
def test_a_staged_copy_is_addressable_and_does_not_overlap(shape: list[int], element_bytes: int) -> None:
    strides = staged_strides(shape, element_bytes)
    assert addressable(shape, strides, element_bytes)
    for outer in range(len(shape) - 1):
        assert strides[outer] >= strides[outer + 1] * shape[outer + 1]


def test_described_outputs_keep_the_order_but_for_the_last_axis() -> None:
    buffer = Buffer("out", (2, 5, 3, 64), "bf16", "output", like="q")
    assert output_strides(buffer, make(2, 3, 5, 64).transpose(1, 2), described=True) == (960, 64, 320, 1)
    assert output_strides(buffer, make(2, 5, 64, 3).transpose(2, 3), described=True) == (960, 192, 64, 1)
    assert output_strides(buffer, make(2, 5, 64, 3).transpose(2, 3)) == (960, 192, 1, 3)
