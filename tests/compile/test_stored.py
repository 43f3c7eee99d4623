"""Hopper's forward of e4m3, compiled without a GPU: what a step of it takes."""

from __future__ import annotations

import pytest

from flashtile.plan.device import H100
from tests.compile.conftest import Compiled
from tests.compile.test_hopper import executed

pytest.importorskip("triton", reason="Triton is not installed")

# Instructions per key tile that needs no mask, as compiled on 2026-11-29; a tenth more is a step back. Each thread has 64
# exponentials, as many multiply-adds in front of them, maxima and sums; half as many conversions; a multiply-add for each
# accumulator.
STEPS = {64: 410, 128: 434, 256: 540}


@pytest.mark.parametrize(
    "head_dim", [64, pytest.param(128, marks=pytest.mark.whole), pytest.param(256, marks=pytest.mark.whole)]
)
def test_a_step_moves_nothing_between_threads(compiled: Compiled, head_dim: int) -> None:
    spelling = f"attention(q=4x4096x16x{head_dim},kv=4096x16x{head_dim},bf16,stored=e4m3:head:head:head)"
    (found,) = compiled("hopper_code.py", spelling)
    assert not found["overwritten"]
    assert not found["idle_barriers"]
    assert not found["serialised"]
    assert found["shared_bytes"] <= min(found["priced_bytes"], H100.smem_bytes)
    steps = [loop for loop in found["loops"] if loop["exponentials"] and not loop["stores"]]
    assert len(steps) == (2 if head_dim == 256 else 3)  # one of each warpgroup
    for step in steps:
        assert step["products"] == head_dim // 32 + 4 * max(head_dim // 128, 1)
        assert not step["spills"]
        assert not step["permutes"]  # probabilities are packed as they lie
        assert executed(step) <= 1.1 * STEPS[head_dim]
