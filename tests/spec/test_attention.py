"""AttentionProblem: the spelling and its inverse, and what is derived."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtile.errors import InvalidProblem
from flashtile.features.scores.alibi import Alibi
from flashtile.features.scores.softcap import Softcap
from flashtile.problem.attention import PRECISIONS, AttentionProblem
from flashtile.problem.dtype import DType
from flashtile.problem.lengths import Lengths
from flashtile.problem.mask import CAUSAL, FULL, Band
from flashtile.problem.score import Captured, Score, ScoreSpec, TensorSpec

finite = st.floats(allow_nan=False, allow_infinity=False)
bounds = st.none() | st.integers(-(2**31) + 1, 2**31 - 1)
shapes = st.lists(st.integers(0, 2**31), max_size=4).map(tuple)


class Anything(Score):
    """A modifier of three scalars and two tensors of any shape."""

    name = "spec_anything"
    captured = (Captured(max, max), Captured(max, max))

    def scalars(self) -> tuple[float, ...]:
        return 1.0, 2.0, 3.0


def score_specs(rows: tuple[int, int]) -> st.SearchStrategy[ScoreSpec]:
    """Modifiers of a problem whose (batch, heads_q) is `rows`."""

    def tensors(shape: st.SearchStrategy[tuple[int, ...]]) -> st.SearchStrategy[TensorSpec]:
        return st.builds(TensorSpec, shape, st.sampled_from(["fp16", "bf16", "fp32"]), st.booleans())

    anything = st.tuples(finite, finite, finite), st.tuples(tensors(shapes), tensors(shapes))
    return (
        st.builds(ScoreSpec, st.just(Softcap), st.tuples(finite.filter(lambda cap: cap > 0)))
        | st.builds(ScoreSpec, st.just(Alibi), st.just(()), st.tuples(tensors(st.just(rows))))
        | st.builds(ScoreSpec, st.just(Anything), *anything)
    )


counts = st.integers(0, 2**31 - 1)
lengths = st.builds(Lengths, st.none(), st.none(), st.booleans(), st.booleans()) | st.builds(
    Lengths, counts, counts, st.booleans(), st.booleans()
)


@st.composite
def problems(draw: st.DrawFn) -> AttentionProblem:
    batch, heads_kv, group = draw(st.integers(0, 2**31 - 1)), draw(st.integers(1, 9)), draw(st.integers(1, 9))
    return AttentionProblem(
        batch=batch,
        seqlen_q=draw(st.integers(0, 2**31 - 1)),
        seqlen_k=draw(st.integers(0, 2**31 - 1)),
        heads_q=heads_kv * group,
        heads_kv=heads_kv,
        head_dim=draw(st.integers(1, 400)),
        head_dim_v=draw(st.integers(1, 400)),
        dtype=draw(st.sampled_from(DType)),
        mask=Band(draw(bounds), draw(bounds)),
        score=tuple(draw(st.lists(score_specs((batch, heads_kv * group)), max_size=3))),
        scale=draw(st.none() | finite | st.integers(-9, 9)),
        precision=draw(st.sampled_from(PRECISIONS)),
        deterministic=draw(st.booleans()),
        returns_lse=draw(st.booleans()),
        sink=draw(
            st.none() | st.builds(TensorSpec, st.just((heads_kv * group,)), st.sampled_from(["fp16", "fp32"]), st.booleans())
        ),
        dropout=draw(st.none() | st.floats(0, 1 - 2**-30)),
        lengths=draw(lengths),
    )


@settings(max_examples=600)
@given(problems())
def test_parse_inverts_spell(problem: AttentionProblem) -> None:
    parsed = AttentionProblem.parse(problem.spell())
    assert parsed == problem
    assert hash(parsed) == hash(problem)
    assert parsed.spell() == problem.spell()


@settings(max_examples=200)
@given(problems(), problems())
def test_different_problems_are_spelled_differently(a: AttentionProblem, b: AttentionProblem) -> None:
    assert (a == b) == (a.spell() == b.spell())


@settings(max_examples=400)
@given(problems(), st.data())
def test_parse_of_a_damaged_spelling_raises_or_means_something(problem: AttentionProblem, data: st.DataObject) -> None:
    text = problem.spell()
    at = data.draw(st.integers(0, len(text)))
    damaged = (
        text[:at] + data.draw(st.text("=x:,+();-0123456789einf pq", max_size=3)) + text[at + data.draw(st.integers(0, 3)) :]
    )
    with contextlib.suppress(InvalidProblem):  # any other error is a failure
        assert isinstance(AttentionProblem.parse(damaged), AttentionProblem)


def make(**changes: object) -> AttentionProblem:
    fields: dict[str, object] = {
        "batch": 2, "seqlen_q": 5, "seqlen_k": 7, "heads_q": 4, "heads_kv": 2, "head_dim": 16, "head_dim_v": 24,
        "dtype": DType.FP16,
    }  # fmt: skip
    return AttentionProblem(**{**fields, **changes})  # type: ignore[arg-type]


def test_the_spelling_of_a_known_problem() -> None:
    assert make().spell() == "attention(q=2x5x4x16,kv=7x2x24,fp16)"
    ragged = make(lengths=Lengths(50, 60, used_k=True))
    assert ragged.spell() == "attention(q=2x5x4x16,kv=7x2x24,fp16,varlen=50x60,used=k)"
    rich = make(dtype=DType.FP32, mask=CAUSAL, score=(ScoreSpec(Softcap, (30.0,)),), scale=0.5, deterministic=True)
    assert rich.spell() == "attention(q=2x5x4x16,kv=7x2x24,fp32,band=:0,score=softcap(30.0),scale=0.5,tf32x3,deterministic)"


def test_the_default_scale_is_filled_in() -> None:
    assert make().scale == 1 / math.sqrt(16)
    assert make() == make(scale=0.25)
    assert make(scale=0) != make()


def test_precision_matters_for_fp32_alone() -> None:
    assert make(precision="ieee") == make(precision="tf32")
    assert make(dtype=DType.FP32, precision="ieee") != make(dtype=DType.FP32, precision="tf32")


@pytest.mark.parametrize(("mask", "visible"), [(FULL, 35), (CAUSAL, 25), (Band(right=-20), 0)])
def test_flops_count_visible_scores_alone(mask: Band, visible: int) -> None:
    problem = make(mask=mask)
    assert problem.visible_pairs == visible * 2 * 4
    assert problem.flops() == 2 * visible * 8 * (16 + 24)
    assert problem.flops("backward") == 2 * visible * 8 * (3 * 16 + 2 * 24)


def test_bytes_count_every_tensor_once() -> None:
    q, kv, lse = 2 * 5 * 4, 2 * 7 * 2, 4 * 2 * 5 * 4
    assert make().bytes() == 2 * (q * (16 + 24) + kv * (16 + 24)) + lse
    assert make().bytes("backward") == 2 * (2 * (q + kv) * (16 + 24) + q * 24) + lse
