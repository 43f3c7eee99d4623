"""Every backend x every case of 8 bits: out and lse against float64 of what is stored, or a refusal with its reason."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

import flashtile
from flashtile import AttentionProblem, Options, dispatch
from flashtile.torch.api.stored import describe_stored
from flashtile.torch.call.arguments import Arguments
from flashtile.torch.call.lengths import given_lengths
from flashtile.torch.execute.bound import device_of
from flashtile.triton_glue import language
from tests.cases import Case, Tensors
from tests.judge import breaches, measure_lse
from tests.stored.cases import CASES, StoredCase

FP8_ERROR = 2.8e-2  # of out, relative RMS: what three mantissa bits of the probabilities cost
REFUSED = {"triton": ("fp8-items-items-rows", "stored-e4m3", "fp32-e4m3")}
PAIRS = [(backend.name, case) for case in CASES for backend in dispatch.BACKENDS]


@lru_cache(maxsize=1)
def expected_of(case: StoredCase, place: torch.device) -> tuple[Tensors, Tensors]:
    return case.expected(place)


def _given(case: StoredCase, place: torch.device) -> Any:
    lengths: dict[str, Any] = {**case.case.lengths(place)}
    return given_lengths(**lengths)


def problem_of(case: StoredCase, place: torch.device) -> AttentionProblem:
    inputs, scales, others = case.tensors(place)
    arguments: Any = Arguments(**case.case.given(others), **case.case.masks(place), return_lse=True, options=case.options(None))
    return describe_stored(inputs, _given(case, place), arguments, scales)[0]


@pytest.mark.parametrize(("backend", "case"), PAIRS, ids=[f"{backend}-{case.name}" for backend, case in PAIRS])
def test_case(backend: str, place: torch.device, case: StoredCase) -> None:
    problem = problem_of(case, place)
    assert AttentionProblem.parse(problem.spell()) == problem
    inputs, scales, others = case.tensors(place)
    reasons = dispatch.backend_named(backend).unsupported(problem, device_of(place))
    if reasons:
        if backend == "triton" and place.type == "cpu":
            assert "fp32" in reasons[0] or "v_scale" in reasons[0] or "interpret" in reasons[0].lower(), reasons
        with pytest.raises(flashtile.NotSupported) as refusal:
            case.call(case.case.function, inputs, scales, others, options=case.options(backend))
        assert refusal.value.reasons == {backend: tuple(reasons)}
        return
    out, lse = case.call(case.case.function, inputs, scales, others, return_lse=True, options=case.options(backend))
    truth, plain = expected_of(case, place)
    if case.fp8 and backend != "cpu":
        assert out.dtype is torch.bfloat16
        error = (out.double() - truth["out"]).norm() / truth["out"].norm()
        assert error <= FP8_ERROR
        assert measure_lse(lse, truth["lse"]) <= (1e-5 if place.type == "cpu" else 2e-3)  # Hopper's sums have 13 bits
    else:
        judged = Case("stored", dtype="bf16" if case.fp8 else case.case.dtype)
        found = list(breaches(judged, {"out": out, "lse": lse}, truth, plain))
        assert not found, found


def small(kind: torch.dtype = torch.float8_e4m3fn, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 5, 4, 16, generator=generator).to(dtype)
    return [q, *(torch.randn(2, 7, 2, 16, generator=generator).to(kind) for _ in "kv")]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"k_scale": 0.0}, "k_scale is 0.0; it must be positive and finite"),
    ({"v_scale": float("nan")}, "v_scale is nan; it must be positive and finite"),
    ({"k_scale": torch.tensor([1.0, float("inf")])}, "k_scale holds inf; it must be positive and finite"),
    ({"v_scale": torch.zeros(2, 2)}, "v_scale holds 0.0; it must be positive and finite"),
    ({"k_scale": torch.full((2, 7, 2), float("nan"))}, "k_scale holds nan; it must be positive and finite"),
    ({"k_scale": torch.ones(3)}, r"k_scale has shape \(3,\); it must be \(\) for a scale of all, \(2,\)"),
    ({"v_scale": torch.ones(2, dtype=torch.float64)}, "v_scale is torch.float64; it must be float32"),
    ({"q_scale": 2.0}, "q_scale is given and q is torch.bfloat16"),
    ({"k_scale": "1"}, "k_scale is a str"),
]


@pytest.mark.parametrize(("arguments", "says"), BAD)
def test_bad_scales_are_named(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(flashtile.InvalidProblem, match=says):
        flashtile.attention(*small(), **arguments)


def test_bad_dtypes_are_named() -> None:
    q, k, v = small()
    for tensors, options, says in (
        ((q, k, v.to(torch.float8_e5m2)), None, "v is torch.float8_e5m2 and k is torch.float8_e4m3fn"),
        ((q.to(torch.float8_e4m3fn), k, v), None, "q is torch.float8_e4m3fn; it must be float16 or bfloat16, or be given with"),
        ((q, k.to(torch.int8), v.to(torch.int8)), "fp8", "precision is 'fp8' and k is torch.int8"),
        ((q.float(), k.float(), v.float()), "fp8", "precision is 'fp8' and q is torch.float32"),
    ):
        with pytest.raises(flashtile.InvalidProblem, match=says):
            flashtile.attention(*tensors, options=Options(precision=options or "tf32x3"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(flashtile.InvalidProblem, match=r"k_scale is given and k is torch\.bfloat16"):
        flashtile.attention(q, q[:, :, :2], q[:, :, :2], k_scale=2.0)
    with pytest.raises(TypeError, match="k_descale"):
        flashtile.attention(q, k, v, k_descale=2.0)  # pyright: ignore[reportCallIssue]
    with pytest.raises(flashtile.InvalidProblem, match="precision is 'fp8' and q is not stored"):
        flashtile.attention_kvpacked(q[:, :, :2], torch.stack([k.bfloat16()] * 2, 2), options=Options(precision="fp8"))


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
def test_what_is_no_number_stays_none(kind: torch.dtype) -> None:
    """e4m3's NaN and e5m2's infinity are what they are where a query sees them, and reach no query that does not."""
    q, k, v = small(kind)
    number = float("nan") if kind is torch.float8_e4m3fn else float("inf")
    k = k.float().index_fill(1, torch.tensor([6]), number).to(kind)
    out = flashtile.attention(q, k, v, causal=True)
    assert not out[:, -1].isfinite().any()
    assert out[:, :-1].isfinite().all()
    clean = flashtile.attention(q, k.float().nan_to_num(0.0, 0.0, 0.0).to(kind), v, causal=True)
    assert torch.equal(out[:, :-1], clean[:, :-1])


def test_one_infinity_counts_by_its_sign(backend: str, place: torch.device) -> None:
    """In a key a score of +inf makes NaN and one of -inf weighs 0, as in attention of 16 bits; in a value it is one in out."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 1, 64) for n in (20, 32, 32))
    options = Options(backend=backend)

    def call(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        stored = [t.to(torch.float8_e5m2).to(place) for t in (k, v)]
        return flashtile.attention(q.bfloat16().to(place), *stored, options=options)[0, :, 0].cpu()

    others = torch.arange(32) != 3
    for sign in (1, -1):
        infinite = k.clone()
        infinite[0, 3, 0, 5] = sign * float("inf")
        out, seen = call(infinite, v), sign * q[0, :, 0, 5] > 0
        assert 0 < seen.sum() < 20
        assert out[seen].isnan().all()
        torch.testing.assert_close(out[~seen], call(k[:, others], v[:, others])[~seen], rtol=2e-2, atol=2e-2)
        infinite = v.clone()
        infinite[0, 3, 0, 5] = sign * float("inf")
        out = call(k, infinite)
        assert (out[:, 5] == sign * float("inf")).all()
        assert out[:, torch.arange(64) != 5].isfinite().all()


def test_gradients_are_those_of_the_numbers() -> None:
    q, k, v = small()
    scale, sink = torch.rand(2, 2) + 0.5, torch.randn(4)
    leaves = [t.detach().requires_grad_() for t in (q, sink)]
    out = flashtile.attention(leaves[0], k, v, k_scale=scale, v_scale=0.5, sink=leaves[1], causal=True)
    found = torch.autograd.grad(out.float().square().sum(), leaves)
    others = [t.detach().requires_grad_() for t in (q, sink)]
    wide = (k.float() * scale[:, None, :, None]).bfloat16(), (v.float() * 0.5).bfloat16()
    same = flashtile.attention(others[0], *wide, sink=others[1], causal=True)
    assert torch.equal(out, same)
    for mine, theirs in zip(found, torch.autograd.grad(same.float().square().sum(), others), strict=True):
        assert torch.equal(mine, theirs)


def test_scales_have_gradients_and_tangents_and_what_is_stored_none() -> None:
    """Also where nothing else wants one."""
    q, k, v = small()
    scale = torch.rand(2, 2) + 0.5
    ours = lambda s: flashtile.attention(q, k, v, k_scale=s, v_scale=s, causal=True).float().square().sum()  # noqa: E731

    def formula(s: torch.Tensor) -> torch.Tensor:
        wide = ((t.float() * s[:, None, :, None]).to(q.dtype) for t in (k, v))
        return flashtile.attention(q, *wide, causal=True).float().square().sum()

    leaves = [scale.clone().requires_grad_() for _ in range(2)]
    found, wanted = (torch.autograd.grad(f(s), s)[0] for f, s in zip((ours, formula), leaves, strict=True))
    assert found.any()
    assert torch.equal(found, wanted)
    for one, other in zip(*(torch.func.jvp(f, (scale,), (torch.ones_like(scale),)) for f in (ours, formula)), strict=True):
        assert torch.equal(one, other)
    for place, name in enumerate("kv", 1):
        given = [q, k, v]
        given[place] = given[place].clone().requires_grad_()
        with pytest.raises(flashtile.NotSupported, match=rf"{name} of torch.float8_e4m3fn requires one; detach it"):
            flashtile.attention(*given)
        with torch.no_grad():
            flashtile.attention(*given)


def test_gradients_go_straight_through() -> None:
    """16-bit q, k, v under fp8: their gradients are those of the quantised numbers."""
    q, k, v = (t.bfloat16().requires_grad_() for t in small())
    out = flashtile.attention(q, k, v, options=Options(precision="fp8"))
    given = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    z = flashtile.quantize(q, k, v)
    sides = zip(z.tensors, z.scales.values(), strict=True)
    leaves = [(t.float() * s[:, None, :, None]).bfloat16().requires_grad_() for t, s in sides]
    same = torch.autograd.grad(flashtile.attention(*leaves).float().square().sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(given, same, strict=True))


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_compiled(varlen: bool) -> None:
    q, k, v = small()
    scale, lengths = torch.rand(2, 2) + 0.5, {}
    if varlen:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        lengths = {"cu_seqlens_q": torch.tensor([0, 3, 10], dtype=torch.int32),
                   "cu_seqlens_k": torch.tensor([0, 6, 14], dtype=torch.int32)}  # fmt: skip
    function = flashtile.attention_varlen if varlen else flashtile.attention

    def call(*three: torch.Tensor) -> Any:
        return function(*three, k_scale=scale, causal=True, return_lse=True, **lengths)  # pyright: ignore[reportCallIssue]

    compiled = torch.compile(call, backend="eager", fullgraph=True)(q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(compiled, call(q, k, v), strict=True))


def test_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = small()
    monkeypatch.setattr(language, "INTERPRETED", False)
    found = flashtile.explain(q, k, v, k_scale=2.0, device="H100")
    assert found.forward.backend == "triton"
    assert found.refusals["hopper"][0].startswith("k and v are stored in e4m3 and 10 query rows share them, of heads together")
    many = flashtile.explain(q.repeat(1, 60, 1, 1), k, v, k_scale=2.0, device="H100")
    assert (many.forward.backend, len(many.forward.calls)) == ("hopper", 3)
    z = flashtile.quantize(*(t.bfloat16() for t in (q, k, v)))
    options = Options(precision="fp8")
    found = flashtile.explain(*z.tensors, **z.scales, options=options, device="H100")
    assert "stored=e4m3:head:head:head" in str(found)
    assert (found.forward.backend, len(found.forward.calls)) == ("hopper", 2)
    for rows, says in ((dict(k_scale=torch.ones(2, 7, 2)), "k_scale is one of each token"), (dict(), "band")):
        told = {**z.scales, **rows}
        mask = flashtile.Band(right=0) if rows else flashtile.Dilated(3)
        found = flashtile.explain(*z.tensors, **told, mask=mask, options=options, device="H100")
        assert found.forward.backend == "triton"
        assert any(says in reason for reason in found.refusals["hopper"])
    of_tokens = {**z.scales, "v_scale": torch.ones(2, 7, 2)}
    with pytest.raises(flashtile.NotSupported, match=r"v_scale is one of each token .* shape \(2, 2\), or leave precision"):
        flashtile.explain(*z.tensors, **of_tokens, options=options, device="H100")
    found = flashtile.explain(q.bfloat16(), z.k, z.v, k_scale=z.k_scale, v_scale=of_tokens["v_scale"], device="H100")
    assert found.forward.backend == "triton"
    with pytest.raises(flashtile.NotSupported, match="sm80 has no products of e4m3"):
        flashtile.explain(*z.tensors, **z.scales, options=options, device="A100")
