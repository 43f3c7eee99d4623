"""What the accuracy rule asks of the smallest problems, and of the judge itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashtile import Band
from tests.cases import DTYPES, Case
from tests.judge import FLOOR_ULP, breaches, expected, judge, measure, run

# Plain PyTorch's dq and dk are exactly 0 here, but for what comes through lse.
LONE = (
    Case("lone-1x1", seqlen_q=1, seqlen_k=1),
    Case("lone-key", seqlen_q=40, seqlen_k=1, head_dim=64),
    Case("lone-window", seqlen_q=40, seqlen_k=40, window=(0, 0)),
    Case("lone-first-keys", seqlen_q=1, seqlen_k=30, mask=Band(right=-29)),  # causal, counted from the first key
    Case("lone-last-keys", seqlen_q=3, seqlen_k=30, mask=Band(left=-2)),
    Case("lone-scores", seqlen_q=1, seqlen_k=1, score=("softcap", "alibi")),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("upstream", ["out", "both"])
@pytest.mark.parametrize("case", LONE, ids=lambda case: case.name)
def test_a_lone_key(place: torch.device, backend: str, variant: str, case: Case, upstream: str, dtype: str) -> None:
    case = replace(case, dtype=dtype, backward=variant, upstream=upstream)
    tensors = case.tensors(place)
    result = run(backend, case, tensors)
    judge(case, result, *expected(case, tensors))
    if upstream == "out":
        assert not result["dq"].any()
        assert not result["dk"].any()


def test_the_floor_is_two_units() -> None:
    case = Case("floor")
    exact = torch.linspace(-1.0, 1.0, 9, dtype=torch.float64)
    ulp = torch.finfo(torch.float32).eps
    plain = exact.float()
    result, wrong = exact.clone(), exact.clone()
    result[3] += 0.99 * FLOOR_ULP * ulp
    wrong[3] += 1.01 * FLOOR_ULP * ulp
    assert measure("dq", case, result, exact, plain).ratio <= 1.5
    assert not list(breaches(case, {"dq": result.float()}, {"dq": exact}, {"dq": plain}))
    assert measure("dq", case, wrong, exact, plain).ratio > 1.5
    assert measure("dq", case, exact, exact, plain).mean_ratio <= 1.0


@pytest.mark.parametrize("upstream", ["out", "both"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_slopes_do_not_feel_the_rounding_of_out(
    place: torch.device, backend: str, variant: str, upstream: str, dtype: str
) -> None:
    """Far from the diagonal every row adds what its delta is off by, times its distances."""
    case = Case("slopes-far", seqlen_q=96, seqlen_k=16, score=("softcap30", "alibi"))
    case = replace(case, dtype=dtype, upstream=upstream, backward=variant)
    tensors = case.tensors(place)
    result, (truth, plain) = run(backend, case, tensors), expected(case, tensors)
    error = measure("dscore.1", case, result["dscore.1"], truth["dscore.1"], plain["dscore.1"])
    assert error.largest <= 0.1 * error.plain_largest
