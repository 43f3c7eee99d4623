"""What the all-pairs run of Hopper's kernels on a GPU checks (`benchmarks/features.py`), found without one."""

from __future__ import annotations

import pytest

from flashtile.kernels.sm90 import backend
from flashtile.plan.device import H100
from flashtile.problem.attention import AttentionProblem
from tests.pairwise import pairs_of
from tests.pairwise_hopper import ALONE, AXES, BOTH, Covered, cases, covered, refusals

pytest.importorskip("triton", reason="Triton is not installed")

# Pairs that a backward must be among: a refusal of one would go unnoticed otherwise.
MUST = (
    "dropout 0.1, items varlen", "dropout 0.5, score bias", "dropout 0.1, score bias-gradient", "score softcap, sink fp32",
    "heads gqa, where table-blocks", "items varlen, where document", "backward deterministic, where strangers-blocks",
    "dims 256, dropout 0.5", "score softcap-bounded, upstream out-alone", "sink bf16, where table-blocks",
    "items padded, score bias", "dims 192-128, items varlen-used", "heads mqa, score bias-heads-gradient",
    "backward deterministic, score bias-plane-gradient", "items varlen, score bias-number", "scale negative, score alibi",
)  # fmt: skip


@pytest.fixture
def found(hopper_runs: None) -> Covered:
    return covered()


@pytest.mark.parametrize(("sizes", "runs"), [
    ("q=2x16x4x64,kv=9x4x64,bf16", True),
    ("q=2x15x4x64,kv=9x4x64,bf16", False),
    ("q=4x61x4x64,kv=9x4x64,bf16,varlen=61x36", True),
    ("q=4x60x4x64,kv=9x4x64,bf16,varlen=60x36", False),
    ("q=4x61x4x64,kv=99x4x64,bf16,varlen=61x61,dropout=0.1", True),
    ("q=4x61x4x64,kv=99x4x64,bf16,varlen=61x60,dropout=0.1", False),  # 15 keys an item
    ("q=4x96x2x64,kv=990x2x64,bf16,varlen=96x990,used=qk,dropout=0.1", False),  # items of more keys may have no query
    ("q=4x96x2x64,kv=990x2x64,bf16,varlen=96x990,used=qk", True),  # out is v itself
    ("q=4x96x2x64,kv=990x2x64,bf16,varlen=96x990,used=q,dropout=0.1", True),
    ("q=64x999x32x128,kv=999x32x128,bf16,used=k,dropout=0.1", True),  # 1,046 GFLOP
    ("q=2x39x16x64,kv=15x2x64,bf16,score=bias(2x16x39x15:bf16),dropout=0.1", False),
    ("q=2x39x16x64,kv=16x2x64,bf16,score=bias(2x16x39x16:bf16),dropout=0.1", True),
    ("q=2x39x16x64,kv=15x2x64,bf16,dropout=0.1", True),
    ("q=64x2x32x128,kv=999x32x128,bf16", True),  # 2.1 GFLOP
    ("q=64x1x32x128,kv=1999x32x128,bf16", False),
])  # fmt: skip
def test_gradients_of_lone_queries_are_left_to_kernels_that_correct_delta(hopper_runs: None, sizes: str, runs: bool) -> None:
    refusals = backend.BACKEND.unsupported_backward(AttentionProblem.parse(f"attention({sizes})"), H100, "fused")
    assert [refusal.startswith(("an item has one query, or up to", "there is dropout, and what is known"))
            for refusal in refusals] == [True] * (not runs)  # fmt: skip


def test_what_hopper_does_not_refuse_is_covered(found) -> None:
    both, alone = ({pair for choice in choices for pair in pairs_of(choice)} for choices in (found.both, found.alone))
    assert both.isdisjoint({**found.refused, **found.refused_backward})
    assert both | set(found.refused) | set(found.refused_backward) >= BOTH.pairs()
    assert alone >= set(found.refused_backward)
    assert {frozenset({("sink", sink), ("where", "document")}) for sink in ("fp32", "bf16")} <= set(found.refused_backward)
    assert all(any((axis, name) in pair for pair in both) for axis, names in AXES.items() for name in names)
    for must in MUST:
        assert frozenset((axis, name) for axis, name in map(str.split, must.split(", "))) in both, must
    refused = [*found.refused.values(), *found.refused_backward.values()]
    assert all(refused)
    assert len(refused) < 70
    assert len(found.both) + len(found.alone) < 170, "each is a forward and a backward more to compile"


def test_lengths_are_drawn_that_hopper_takes(found) -> None:
    base = len(found.choices)
    drawn = cases(range(0, 3 * base, 3))
    assert not [case.name for case in drawn if refusals(case)]
    assert max(case.seqlen_k for case in drawn) > 512
    assert {case.backward for case in drawn} == {"fused", "split", "auto"}
    assert [table for table, _ in found.choices] == [BOTH] * len(found.both) + [ALONE] * len(found.alone)


@pytest.mark.parametrize(("sizes", "runs"), [("q=2x256x4x64,kv=512x4x64", False), ("q=2x1024x4x64,kv=1024x4x64", True)])
def test_gradients_of_sinks_are_left_to_them_in_small_problems(hopper_runs: None, sizes: str, runs: bool) -> None:
    for grad in ("", ":grad"):
        refusals = backend.BACKEND.unsupported_backward(
            AttentionProblem.parse(f"attention({sizes},bf16,sink=4:fp32{grad})"), H100, "fused"
        )
        assert [refusal.startswith("the sink's gradient") for refusal in refusals] == [True] * bool(grad and not runs)
