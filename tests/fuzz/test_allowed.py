"""What the fuzzer allows: what roundings that a call's arithmetic cannot know may do, and no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashtile import Bias
from flashtile.fuzz import check as checks
from flashtile.fuzz.case import Case
from flashtile.fuzz.formula import Scene, fused, yardsticks
from flashtile.fuzz.make import build, call
from flashtile.fuzz.rounding import apart, rounds_lse, slack, sums_twice
from flashtile.reference.attention import attention_reference

CPU = torch.device("cpu")
BASE = Case(2, 19, 37, 4, 2, 16, 24, "fp32", backend="cpu")

HUGE = replace(BASE, data="huge", scale=1.0, dtype="bf16", upstream="out")


@pytest.mark.parametrize(
    ("changes", "device", "rounds"),
    [
        ({"backend": "hopper"}, "cpu", True),
        ({"backend": ""}, "cuda", True),
        ({"backend": ""}, "cpu", False),
        ({"backend": "cpu"}, "cpu", False),
        ({"backend": "triton"}, "cuda", False),  # small: the portable backward walks the keys first
        ({"backend": "triton", "seqlen_q": 4096, "seqlen_k": 4096}, "cuda", True),
        ({"backend": "triton", "seqlen_q": 4096, "seqlen_k": 4096, "delta": "exact"}, "cuda", False),
        ({"backend": "triton", "seqlen_q": 4096, "seqlen_k": 4096, "dtype": "fp32"}, "cuda", False),
        ({"backend": "hopper", "data": "normal"}, "cpu", False),
    ],
)
def test_which_backwards_know_no_more_than_a_rounded_lse(changes: dict[str, Any], device: str, rounds: bool) -> None:
    assert rounds_lse(replace(HUGE, **changes), torch.device(device)) == rounds


def test_what_the_rounding_of_lse_may_do_is_bounded() -> None:
    """A factor of each row of p, as large as the roundings may make it, puts gradients off by what is allowed for, not less."""
    case = replace(HUGE, backend="hopper", heads_q=2, seqlen_q=40)
    inputs = build(case, CPU)
    allowed = slack(inputs, Scene(inputs))
    q, k, v = (inputs.leaves[name].double() for name in "qkv")
    score = torch.zeros(2, 2, 40, 37, dtype=torch.float64, requires_grad=True)
    out, lse = attention_reference(q, k, v, scale=1.0, score=(Bias(score),))
    dout = inputs.flows["dout"].double()
    (ds,) = torch.autograd.grad(out, score, dout)
    p = (torch.einsum("bihd,bjhd->bhij", q, k) - lse[..., None]).exp()
    chance = torch.where(torch.rand(lse.shape) < 0.5, -1.0, 1.0).double()
    factor = torch.expm1(chance * 4.3 * 2.0**-24 * lse.abs())[..., None]
    made = {
        "dq": torch.einsum("bhij,bjhd->bihd", factor * ds, k),
        "dk": torch.einsum("bhij,bihd->bjhd", factor * ds, q),
        "dv": torch.einsum("bhij,bihd->bjhd", factor * p, dout),
    }
    for name, error in made.items():
        assert 0.02 * allowed[name] <= error.abs().max().item() <= allowed[name], name


# An H200's Hopper kernels were off by 5.14e-7 and 8.94e-7 of 0 here: every query that sees anything sees one key.
LONE = "q=5x176x2x64 kv=80x2x64 bf16 items=varlen used=qk layout=gaps upstream=alone backward=split backend=hopper seed=181464"


@pytest.mark.parametrize(
    ("changes", "device", "twice"),
    [
        ({}, "cpu", True),
        ({"upstream": "lse"}, "cpu", False),
        ({"delta": "exact"}, "cpu", False),
        ({"backend": "triton"}, "cuda", False),
        ({"backend": "triton", "seqlen_q": 40_000, "seqlen_k": 4_000}, "cuda", True),
        ({"backend": ""}, "cuda", True),
        ({"backend": ""}, "cpu", False),
    ],
)
def test_which_backwards_sum_dp_and_delta_apart(changes: dict[str, Any], device: str, twice: bool) -> None:
    assert sums_twice(replace(Case.parse(LONE), **changes), torch.device(device)) == twice


def test_what_sums_of_dp_and_delta_differ_by_is_allowed_and_no_more() -> None:
    """float32 sums of the same products in other orders, where dq and dk are 0; what 16 bits of out leave there is wrong."""
    case = Case.parse(LONE)
    inputs = build(case, CPU)
    scene = Scene(inputs)
    allowed = apart(inputs, scene)
    truth, plain = yardsticks(inputs, scene)
    assert not truth["dq"].any()
    assert not plain["dk"].any()
    q, k, v, dout = ((inputs.leaves | inputs.flows)[name].float() for name in ("q", "k", "v", "dout"))
    (item,) = (i for i, rows in enumerate(scene.sees[:, 0].any(1).tolist()) if rows)
    rows, (key,) = list(inputs.lengths.tokens_q[item]), inputs.lengths.tokens_k[item]
    products = dout[rows] * v[key]
    steps = products.unflatten(2, (-1, 16)).sum(3)
    ds = (sum(steps.unbind(2)) - products.sum(2)) * case.scale_value
    rounded = (products * (1.0 + torch.rand(products.shape) * 2.0**-8)).sum(2) - products.sum(2)  # of out beside dropout
    for wrong, right in ((ds, True), (rounded * case.scale_value, False)):
        dq, dk = wrong[..., None] * k[key], torch.einsum("ih,ihd->hd", wrong, q[rows])
        assert (dq.abs().max().item() <= allowed["dq"]) == right
        assert (dk.abs().max().item() <= allowed["dk"]) == right
    assert ds.any()
    made = {**{name: tensor.to(torch.bfloat16) for name, tensor in truth.items()}, "dq": torch.full_like(plain["dq"], 5.14e-7)}
    assert checks.verdict(case, made, None, truth, plain, [], {}, {})[0]
    assert not checks.verdict(case, made, None, truth, plain, [], allowed, {})[0]
    assert 9e-7 < allowed["dq"] < 4e-5, allowed


def test_float32_on_a_cpu_is_judged_beside_both_attentions_of_pytorch() -> None:
    """Also where a band or lengths leave of an item what PyTorch's attention knows; of equal head dims it is what runs."""

    def beside(**changes: Any) -> dict[str, torch.Tensor]:
        inputs = build(replace(BASE, **{"upstream": "out", **changes}), CPU)
        return fused(inputs, Scene(inputs))

    few: dict[str, Any] = {"seqlen_q": 58, "seqlen_k": 39, "band": ":-20"}
    for changes in ({}, few, {"band": "300:200"}, {"band": ":0", "items": "self", "seqlen_k": BASE.seqlen_q}):
        assert beside(**changes).keys() == {"out", "dq", "dk", "dv"}
        alike = {**changes, "upstream": "alone", "head_dim_v": BASE.head_dim, "heads_q": BASE.heads_kv}
        made = checks.results(build(replace(BASE, **alike), CPU), "cpu", call)
        assert all(torch.equal(made[name], tensor) for name, tensor in beside(**alike).items())
    for changes in (
        {"precision": "ieee"},
        {"dtype": "fp16"},
        {"score": "alibi"},
        {"band": "9:0"},
        {"upstream": "both"},
        {"band": ":0"},
    ):
        assert not beside(**changes)


def test_what_a_dtype_cannot_hold_is_its_infinity() -> None:
    """Of its sign; and no infinity stands for what the dtype holds."""

    def judge(exact: float, got: float, plain: float, dtype: torch.dtype = torch.float16) -> str:
        exact_, got_, plain_ = (torch.tensor([number, 1.0], dtype=torch.float64) for number in (exact, got, plain))
        numbers = checks.measure("dq", got_.to(dtype), exact_, plain_.to(dtype))
        return checks.judged(replace(BASE, dtype="fp16"), "dq", numbers.tolist(), dtype)[0]

    inf = float("inf")
    assert not judge(8e4, inf, inf)
    assert not judge(-8e4, -inf, -inf)
    assert not judge(65505.0, 65504.0, inf)
    assert not judge(1e300, inf, inf, torch.float32)
    for exact, got, plain in ((8e4, -inf, inf), (8e4, 1.0, inf), (8e4, float("nan"), inf), (3e4, inf, inf), (3e4, inf, 3e4)):
        assert judge(exact, got, plain), (exact, got, plain)
