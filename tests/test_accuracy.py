"""What the accuracy rule asks of the smallest problems, and of the judge itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashtile import Band
from flashtile.torch.execute.bound import device_of
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


# The mask leaves the query one key, which is known at run time alone.
LEFT = Case("one-left", seqlen_q=1, seqlen_k=285, heads_q=3, window=(12, 5), mask="document", used_k=(282,))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout", [None, 0.1])
@pytest.mark.parametrize("upstream", ["out", "both"])
def test_the_one_key_that_a_mask_leaves(
    place: torch.device, backend: str, variant: str, upstream: str, dropout: float | None, dtype: str
) -> None:
    if dtype == "fp32" and not device_of(place).multiplies_float64:
        pytest.skip("no matrix units for float64: rounding is left of what cancels")
    score = ("bias-heads", "softcap")
    case = replace(LEFT, score=score, dtype=dtype, backward=variant, upstream=upstream, dropout=dropout)
    tensors = case.tensors(place)
    result, (truth, plain) = run(backend, case, tensors), expected(case, tensors)
    judge(case, result, truth, plain)
    assert result["dv"].any()
    if upstream == "out":
        assert not any(made[name].any() for made in (result, truth, plain) for name in ("dq", "dk", "dscore.0"))


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("case", [
    Case("decided-bias", 1, 183, 14, 1, head_dim=64, head_dim_v=5, score=("bias",), causal=True, mask="holes-and-documents"),
    Case("decided-alibi", 1, 77, 180, 3, head_dim=64, head_dim_v=5, score=("alibi",), window=(12, 5), mask="document"),
    Case("decided-sink", 1, 60, 20, 2, head_dim=64, head_dim_v=5, sink="fp32", dropout=0.1),
    Case("decided-item", 1, 2, 114, 1, head_dim=64, mask="prefix", dropout=0.1, cu_q=(0, 0, 0, 1, 1), cu_k=(0, 38, 38, 57, 99)),
], ids=lambda case: case.name)  # fmt: skip
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_rows_that_one_key_decides(
    place: torch.device, backend: str, variant: str, case: Case, number: int, dtype: str
) -> None:
    """Scores of 8 on average: what out is rounded by is more than what dp and delta differ by."""
    case = replace(case, name=f"{case.name}-{number}", dtype=dtype, scale=1.0, backward=variant, upstream="out")
    tensors = case.tensors(place)
    judge(case, run(backend, case, tensors), *expected(case, tensors))


@pytest.mark.parametrize("sink", [None, "fp32"])
@pytest.mark.parametrize(("seqlen", "mask"), [(256, None), (180, "prefix"), (40, None)])
def test_a_table_adds_up_thousands_of_scores(
    place: torch.device, backend: str, variant: str, seqlen: int, mask: str | None, sink: str | None
) -> None:
    """Kernels in any order: to two units of its largest element, however exact plain PyTorch's order happens to be."""
    case = Case("table", 1, seqlen, seqlen, 1, scale=1.0, score=("table",), mask=mask, causal=True, sink=sink)
    case = replace(case, upstream="out", backward=variant)
    tensors = case.tensors(place)
    result, (truth, plain) = run(backend, case, tensors), expected(case, tensors)
    judge(case, result, truth, plain)
    error = measure("dscore.0", case, result["dscore.0"], truth["dscore.0"], plain["dscore.0"])
    assert backend != "triton" or error.largest <= error.floor


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
