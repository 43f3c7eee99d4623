"""Every way to form an fp32 problem's products (`Products`), where the choice is another for problems as small as tests'."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import flashtile
from flashtile.kernels.portable import choose, directed
from flashtile.kernels.portable.backend import BACKEND
from flashtile.kernels.portable.tile import LONGEST_SUM, Launch, correction_of, make_tile, products
from flashtile.plan.backend import Gradients
from flashtile.plan.call import KernelCall
from flashtile.plan.device import A100, H100, RTX4090
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.dtype import DType
from flashtile.reference.attention import attention_plain
from flashtile.triton_glue import language as _triton
from tests.cases import CASES, Case
from tests.judge import breaches, evaluate, expected, measure, measure_lse
from tests.kernels.conftest import forget_plans

NAMES = (
    "gqa-fp32-split", "causal-fp32-fused", "softcap-alibi-split", "sink-causal-fp32-split", "dropout-causal-fp32-fused",
    "head_dim1-v256-split", "mask-document-fp32-fused",
)  # fmt: skip
SOME = [case for case in CASES if case.name in NAMES]


def test_all_are_cases() -> None:
    assert {case.name for case in SOME} == set(NAMES)


@pytest.fixture(autouse=True)
def _terms_are_added_up_as_a_matrix_unit_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen products and the sum so far, rounded once. numpy's order of a sum is another on every kind of CPU."""
    if not _triton.INTERPRETED:
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from flashtile.triton_glue.interpreter import factor

    multiply = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, total: Any, *rest: Any) -> Any:
        if total.data.dtype != np.float32:
            return multiply(self, a, b, total, *rest)
        left, right = (factor(t).data.astype(np.float64) for t in (a, b))
        made = total.data
        for first in range(0, left.shape[-1], 16):
            terms = slice(first, first + 16)
            made = (made + np.matmul(left[..., terms], right[..., terms, :])).astype(np.float32)
        return TensorHandle(made, total.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(params=["unit", "cut", "aligned"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(choose, "products", lambda problem, device, which: request.param)
    forget_plans()
    yield request.param
    forget_plans()


@pytest.mark.skipif(_triton.VERSION is None, reason="Triton is not installed")
@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_errors_stay_below_plain_pytorchs_on_average(device: torch.device, kind: str, case: Case) -> None:
    """The largest of so few errors is luck, their mean is not."""
    if device.type == "cuda" and kind != "aligned" and max(case.head_dim, case.head_dim_v or 0) > LONGEST_SUM:
        pytest.skip(f"`products` takes aligned parts alone beyond {LONGEST_SUM} columns: a matrix unit's truncation is a bias")
    tensors = case.tensors(device)
    result = evaluate(case.function, case, tensors, return_lse=True, options=case.options("triton"))
    truth, plain = expected(case, tensors)
    assert measure_lse(result["lse"], truth["lse"]) <= 1e-6
    for name in ("out", "dq", "dk", "dv"):
        error = measure(name, case, result[name], truth[name], plain[name])
        assert error.mean <= error.plain_mean, name
        assert error.largest <= 2 * error.allowed, name


@pytest.mark.skipif(_triton.VERSION is None, reason="Triton is not installed")
@pytest.mark.parametrize(("kind", "backward"), [("aligned", "split"), ("cut", "fused")], indirect=["kind"])
def test_sums_of_many_heads_are_rounded_no_more_than_plain_pytorchs(device: torch.device, kind: str, backward: Any) -> None:
    """Which adds up each head by itself: in one rounded sum dk of 64 heads errs by 1.07 and 1.48 times as much."""
    case = Case("many-heads", batch=1, seqlen_q=32, seqlen_k=16, heads_q=64, heads_kv=1, head_dim=16, backward=backward)
    tensors = case.tensors(device)
    result = evaluate(case.function, case, tensors, return_lse=True, options=case.options("triton"))
    truth, plain = expected(case, tensors)
    for name in ("dk", "dv"):
        error = measure(name, case, result[name], truth[name], plain[name])
        assert error.mean <= error.plain_mean, name
        assert error.largest <= error.allowed, name


@pytest.mark.skipif(_triton.VERSION is None, reason="Triton is not installed")
def test_second_derivatives_are_rounded_no_more_either(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one rounded sum those of k of 64 heads err by 1.5 times as much as plain PyTorch's on average."""
    monkeypatch.setattr(directed, "products", lambda problem, device, which: "unit")
    forget_plans()
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 32, 64, 16), (1, 16, 1, 16), (1, 16, 1, 16)) * 2 + ((1, 32, 64, 16),)
    given = [torch.randn(shape, generator=generator).to(device) for shape in shapes]

    def run(function: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        *some, upstream = (t.to(dtype) for t in given)
        leaves = [t.requires_grad_() for t in some[:3]]
        first = torch.autograd.grad(function(*leaves), leaves, upstream, create_graph=True)
        return torch.autograd.grad(first, leaves[1:], some[3:])

    plainly = lambda *leaves: attention_plain(*leaves)[0]  # noqa: E731
    made = run(partial(flashtile.attention, options=flashtile.Options(backend="triton")), torch.float32)
    forget_plans()
    for exact, theirs, ours in zip(run(plainly, torch.float64), run(plainly, torch.float32), made, strict=True):
        error, allowed = ((t.double() - exact).abs().mean() for t in (ours, theirs))
        assert error <= allowed


@pytest.mark.parametrize(
    ("heads", "kind", "block_q", "kept"),
    [(1, "aligned", 16, False), (4, "aligned", 16, True), (4, "aligned", 32, False), (8, "aligned", 32, True),
     (4, "cut", 16, False), (8, "cut", 16, True), (8, "cut", 32, False), (16, "cut", 32, True), (64, "float64", 32, False)],
)  # fmt: skip
def test_rests_are_kept_of_sums_of_many_heads(heads: int, kind: Any, block_q: int, kept: bool) -> None:
    given = AttentionProblem.parse(f"attention(q=1x512x{heads}x64,kv=512x1x64,fp32,tf32x3)")
    for which in ("keys", "fused", "queries"):
        tile = make_tile(given, Launch(block_q, 32, products=kind), which)
        assert tile.keeps_rest == (kept and which != "queries")
    if kind == "aligned":  # with two products of each
        assert make_tile(given, Launch(block_q, 32), "second_keys").keeps_rest == kept
    for other in (replace(given, precision="tf32"), replace(given, dtype=DType.BF16)):
        assert not make_tile(other, Launch(block_q, 32), "keys").keeps_rest


@pytest.mark.skipif(_triton.VERSION is None, reason="Triton is not installed")
@pytest.mark.parametrize("backward", ["split", "fused"])
def test_a_table_s_elements_are_added_up_of_a_corrected_delta(device: torch.device, kind: str, backward: Any) -> None:
    case = Case("table", seqlen_q=150, seqlen_k=150, score=("table",), causal=True, upstream="out", backward=backward)
    tensors = case.tensors(device)
    result = evaluate(case.function, case, tensors, return_lse=True, options=case.options("triton"))
    truth, plain = expected(case, tensors)
    error = measure("dscore.0", case, result["dscore.0"], truth["dscore.0"], plain["dscore.0"])
    assert error.largest <= error.floor


@pytest.mark.skipif(_triton.VERSION is None, reason="Triton is not installed")
@pytest.mark.parametrize("kind", ["unit", "short"], indirect=True)
@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_tf32_keeps_lse_and_two_parts_are_a_tenth_of_its_error(device: torch.device, kind: str, case: Case) -> None:
    case = replace(case, precision="tf32")
    tensors = case.tensors(device)
    result = evaluate(case.function, case, tensors, return_lse=True, options=case.options("triton"))
    truth, plain = expected(case, tensors)
    assert not list(breaches(case, result, truth, plain))
    assert measure_lse(result["lse"], truth["lse"]) <= 1e-6
    if kind == "short":
        for name in truth.keys() - {"lse"}:
            exact = truth[name]
            largest = measure(name, case, result[name], exact, plain[name]).largest
            assert largest <= 2.0**-13 * exact.abs().max().item(), name


def test_tf32_on_hopper_is_fused_of_two_parts_and_keeps_no_statistics() -> None:
    tf32, default = (AttentionProblem.parse(f"attention(q=4x4096x8x64,kv=4096x8x64,fp32,{p})") for p in ("tf32", "tf32x3"))
    assert products(tf32, H100, "forward") == products(tf32, H100, "fused") == "short"
    assert products(replace(tf32, batch=1, seqlen_q=64, seqlen_k=64), H100, "forward") == "short"
    assert products(replace(tf32, precision="ieee"), H100, "forward") == "unit"
    assert [BACKEND.backward(tf32, device, Gradients(), "auto").variant for device in (H100, A100)] == ["fused", "split"]
    names = [{b.name for b in BACKEND.forward(p, H100).named("output")} for p in (tf32, default)]
    assert names == [{"out", "lse"}, {"out", "lse", "stats"}]


def test_what_was_tuned_for_tf32_is_taken_with_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    tf32 = AttentionProblem.parse("attention(q=4x4096x8x64,kv=4096x8x64,fp32,tf32)")
    default = replace(tf32, precision="tf32x3")
    table = {choose.family(p, "forward"): Launch(64, 16) for p in (tf32, default)}
    monkeypatch.setattr(choose, "tiles_of", lambda target: table)
    monkeypatch.setattr(_triton, "INTERPRETED", False)
    assert choose.choose(tf32, H100, "forward") == Launch(64, 16, products="short")
    assert choose.choose(default, H100, "forward").block_k != 16


def problem(batch: int, seqlen: int, score: str = "", head_dim: int = 64) -> AttentionProblem:
    return AttentionProblem.parse(f"attention(q={batch}x{seqlen}x8x{head_dim},kv={seqlen}x8x{head_dim},fp32{score},tf32x3)")


def test_float64_where_it_costs_nothing_and_for_sums_per_head() -> None:
    slopes = ",score=alibi(4x8:fp32:grad)"
    assert products(problem(1, 200), H100, "fused") == "float64"
    assert products(problem(1, 200), RTX4090, "fused") == "aligned"
    assert products(problem(16, 512), H100, "keys") == "aligned"
    assert products(problem(4, 4096), H100, "keys") == "cut"
    assert products(problem(4, 4096), RTX4090, "keys") == "unit"
    assert products(problem(4, 4096, head_dim=256), H100, "keys") == "aligned"
    assert products(problem(4, 4096, slopes), H100, "queries") == "float64"
    assert products(problem(4, 4096, slopes), H100, "keys") == "cut"
    half = AttentionProblem.parse("attention(q=1x64x8x64,kv=64x8x64,bf16)")
    assert products(half, H100, "queries") == "unit"


@pytest.mark.parametrize(
    ("tail", "correction"),
    [
        ("q=1x200x8x64,kv=200x8x64,bf16", "before"),
        ("q=1x200x8x64,kv=200x8x64,fp32,tf32", "before"),
        ("q=1x200x8x64,kv=1x8x64,bf16", "before"),
        ("q=4x65536x32x64,kv=1x32x64,bf16", ""),
        ("q=4x4096x8x64,kv=4096x8x64,bf16", ""),
        ("q=4x4096x8x64,kv=4096x8x64,bf16,sink=8:fp32:grad", "after"),
        ("q=1x200x8x64,kv=200x8x64,fp32", "after"),
        ("q=1x200x8x64,kv=200x8x64,fp32,used=k", "before"),
        ("q=1x200x8x64,kv=200x8x64,fp32,where=prefix(1:int32)", "before"),
        ("q=4x4096x8x64,kv=4096x8x64,fp32,used=k", "after"),
        ("q=4x4096x8x64,kv=4096x8x64,fp32,score=t5_bias(8x16:fp32:grad)", "before"),
        ("q=4x4096x8x64,kv=4096x8x64,fp32,score=t5_bias(8x16:fp32)", "after"),
        ("q=4x4096x8x64,kv=4096x8x64,bf16,score=t5_bias(8x16:fp32:grad)", ""),
    ],
)
def test_when_delta_is_corrected(tail: str, correction: str) -> None:
    p = AttentionProblem.parse(f"attention({tail})")
    assert correction_of(p, choose.choose(p, H100, "queries")) == correction


def test_small_16_bit_problems_correct_delta_before_the_fused_pass() -> None:
    for seqlen, corrected in ((200, True), (4096, False)):
        p = AttentionProblem.parse(f"attention(q=1x{seqlen}x8x64,kv={seqlen}x8x64,bf16,used=k)")
        plan = BACKEND.backward(p, H100, Gradients(), "fused")
        passes = [call for call in plan.calls if isinstance(call, KernelCall) and "SCORE" in dict(call.constants)]
        names = [call.kernel.fn.__name__.removeprefix("attention_backward_") for call in passes]
        assert names == ["queries", "keys"][not corrected :]
        assert all((dict(call.constants)["T"].noise > 0.0) == corrected for call in passes)


@pytest.mark.skipif(_triton.VERSION is None, reason="Triton is not installed")
@pytest.mark.parametrize("kind", ["unit", "cut", "short", "aligned"], indirect=True)
@pytest.mark.parametrize("bits", [-1, 0x7FC00000, 0x7F800000], ids=["all ones", "nan", "inf"])
@pytest.mark.parametrize("name", ["q", "v"])
def test_what_is_not_finite_propagates(device: torch.device, kind: str, name: str, bits: int) -> None:
    """Into the rows or columns that see it, and no others."""
    precision = "tf32" if kind == "short" else "tf32x3"
    case = Case("not-finite", seqlen_q=20, seqlen_k=40, heads_q=1, precision=precision)
    tensors = case.tensors(device)
    tensors[name].view(torch.int32)[:, 15, 0, 3] = bits
    out = evaluate(case.function, case, tensors, return_lse=True, options=case.options("triton"))["out"]
    strange = ~out[0, :, 0].isfinite()
    expected = torch.zeros_like(strange)
    expected[(slice(15, 16), slice(None)) if name == "q" else (slice(None), slice(3, 4))] = True
    assert torch.equal(strange, expected)
