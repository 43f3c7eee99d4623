"""The suites are the published shapes, and a case survives its own spelling."""

import pytest

from flashtile.bench.cases import SUITES, case, field_flops, suite_named, with_dtype
from flashtile.errors import InvalidProblem
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.dtype import DType

# Batch, heads, seqlen_q, seqlen_k, head_dim, causal, dtype: the rows that the peers were measured on.
CAUSAL_AND_FULL = (True, False)
ANCHORS = {
    "fa3-paper": {
        (b, h, s, s, d, causal, "bf16")
        for causal in CAUSAL_AND_FULL
        for b, s in ((16, 1024), (4, 4096), (1, 16384))
        for h, d in ((32, 64), (16, 128), (8, 256))
    },
    "llmc": {(b, 12, s, s, 64, True, dtype) for dtype in ("fp16", "fp32") for b, s in ((8, 1024), (6, 4096), (1, 8192))},
    "triton-tutorial": {(4, 48, s, s, 64, True, "fp16") for s in (1024, 2048, 4096, 8192, 16384, 32768)},
    "cudnn-cross": {(b, 16, 1024, 1536, 64, False, "bf16") for b in (1, 2, 4, 6)},
    "mla": {(b, 16, s, s, 192, causal, "bf16") for causal in CAUSAL_AND_FULL for b, s in ((16, 1024), (4, 4096), (1, 16384))},
    "jax-split": {(4, h, 4096, 4096, d, causal, "bf16") for h, d in ((32, 64), (16, 128)) for causal in CAUSAL_AND_FULL},
}


@pytest.mark.parametrize("name", ANCHORS)
def test_suite_is_the_published_one(name: str) -> None:
    suite = suite_named(name)
    found = [(c.batch, c.heads_q, c.seqlen_q, c.seqlen_k, c.head_dim, not c.mask.unbounded, c.dtype.value) for c in suite.cases]
    assert len(found) == len(set(found))
    assert set(found) == ANCHORS[name]


@pytest.mark.parametrize("suite", SUITES, ids=lambda s: s.name)
def test_cases_spell_and_parse(suite) -> None:
    assert suite.cases
    assert len(set(suite.cases)) == len(suite.cases)
    for problem in suite.cases:
        assert AttentionProblem.parse(problem.spell()) == problem


def test_unknown_suite_names_the_known() -> None:
    with pytest.raises(InvalidProblem, match="suite is 'fa4-paper'; it must be one of fa3-paper, llmc"):
        suite_named("fa4-paper")


def test_dtype_replaces_and_merges() -> None:
    assert len(with_dtype(suite_named("llmc"), DType.FP16).cases) == 3
    assert {c.dtype for c in with_dtype(suite_named("fa3-paper"), DType.FP16).cases} == {DType.FP16}


def test_flops_are_counted_as_the_field_does() -> None:
    # 0.4336 ms at 634 TFLOP/s forward, 1.316 ms at 522 backward: a published row of the fa3-paper suite
    causal = case(4, 16, 4096, 128, DType.BF16, True)
    assert field_flops(causal, "forward") / 0.4336e-3 == pytest.approx(634e12, rel=2e-3)
    assert field_flops(causal, "backward") / 1.316e-3 == pytest.approx(522e12, rel=2e-3)
    cross = case(2, 16, (1024, 1536), 64, DType.BF16, False)
    assert field_flops(cross, "forward") == 4 * 2 * 16 * 1024 * 1536 * 64
