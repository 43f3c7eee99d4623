"""Tangents of forward-mode differentiation, whichever tensor brings them: right on every backend, or refused by name."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import flashtile
from flashtile import Captured, NotSupported, Options, Position, Score
from flashtile.features.scores.bias import bias_contribution
from flashtile.reference.attention import attention_reference
from tests.cases import MODIFIERS, Case, Tensors
from tests.seen import Seen
from tests.torch.test_packed import ENDS, FORMS, make, packed_call

NOT_LINEAR = "does not say that what it adds is `linear` in one tensor"
REFUSED = r"(?s)forward-mode differentiation of .* not implemented.*torch.func.vjp"
VARLEN = dict(heads_q=1, seqlen_q=40, seqlen_k=40, cu_q=(0, 17, 40), cu_k=(0, 17, 40))
CASES = [
    *(Case(f"forward-mode-{name}", seqlen_q=20, seqlen_k=36, score=(name,), sink="fp32") for name in MODIFIERS),
    Case("forward-mode-bf16", dtype="bf16", causal=True),
    Case("forward-mode-varlen", score=("alibi",), sink="fp32", **VARLEN),
    Case("forward-mode-used", batch=2, used_k=(20, 30)),
    Case("forward-mode-holes", batch=2, used_q=(20, 30), used_k=(20, 30), holes=True),
]
ARRIVING = ("dout", "dlse")


def inputs(case: Case) -> list[str]:
    return [name for name in case.tensors(torch.device("cpu")) if name not in ARRIVING]


def call(case: Case, tensors: Tensors, backend: str, **more: Any) -> Any:
    place = tensors["q"].device
    return case.function(
        *(tensors[name] for name in "qkv"), **case.given(tensors), **case.masks(place), **case.lengths(place),
        options=case.options(backend), **more,
    )  # fmt: skip


def dual(tensor: torch.Tensor) -> torch.Tensor:
    return forward_ad.make_dual(tensor, torch.ones_like(tensor))


@pytest.mark.parametrize("wanted", [False, True], ids=["constant", "differentiated"])
@pytest.mark.parametrize(
    ("case", "name"),
    [(case, name) for case in CASES for name in inputs(case)],
    ids=lambda value: getattr(value, "name", value),
)
def test_every_input_has_its_tangent_or_refuses(case: Case, name: str, place: torch.device, wanted: bool, backend: str) -> None:
    tensors = {n: t.requires_grad_(wanted) for n, t in case.tensors(place).items()}
    with forward_ad.dual_level():
        call(case, tensors, backend)  # without tangents it runs
        duals = {**tensors, name: dual(tensors[name])}
        if backend != "cpu" and name == f"score.{case.score.index('table') if 'table' in case.score else None}":
            with pytest.raises(NotSupported, match=NOT_LINEAR):
                call(case, duals, backend)
            return
        expected = exactly(case, tensors, name)
        for context in (torch.enable_grad, torch.no_grad):
            for watch in (nullcontext, lambda: FlopCounterMode(display=False)):
                with context(), watch():
                    found = call(case, duals, backend, return_lse=True)
                for one, exact in zip(found, expected, strict=True):
                    tangent = forward_ad.unpack_dual(one).tangent
                    assert tangent is not None, "a tangent was dropped"
                    assert tangent.dtype is one.dtype
                    error = (tangent.double() - exact).abs().max()
                    assert error <= (2**-7 if case.dtype == "bf16" else 1e-5) * (1.0 + exact.abs().max())


@pytest.mark.parametrize("transformed", [False, True], ids=["forward_ad", "jvp"])
def test_one_pass_makes_out_and_its_tangent(transformed: bool) -> None:
    q, k, v = (torch.randn(1, 6, 2, 8) for _ in range(3))
    with Seen() as seen:
        if transformed:
            torch.func.jvp(lambda q: flashtile.attention(q, k, v), (q,), (k,))
        else:
            with forward_ad.dual_level():
                flashtile.attention(forward_ad.make_dual(q, k), k, v)
    assert seen.names == ["flashtile.attention_tangent.default"]


@dataclass(frozen=True, eq=False)
class Raised(Score):
    """Score modifier score + one number per head, of which the slope of a whole tile is one number."""

    numbers: torch.Tensor

    name = "raised"
    captured = (Captured(bias_contribution, identity=True),)

    def tensors(self, batch: int, heads_q: int) -> tuple[torch.Tensor, ...]:
        return (self.numbers.expand(batch, heads_q),)

    @staticmethod
    def apply(score: Any, at: Position, scalars: tuple[float, ...], tensors: tuple[Any, ...]) -> Any:
        return score + tensors[0][at.batch, at.head]


def test_a_number_per_head_has_a_tangent() -> None:
    q, k, v = (torch.randn(1, 6, 2, 8, dtype=torch.float64) for _ in range(3))
    numbers, more = torch.randn(2, dtype=torch.float64), torch.randn(2, dtype=torch.float64)

    def lse_of(numbers: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return flashtile.attention(q, k, v, causal=True, score=Raised(numbers), return_lse=True)[1]

    _, moved = torch.func.jvp(lambda n: lse_of(n, q), (numbers,), (more,))
    torch.testing.assert_close(moved, more[None, :, None].expand_as(moved))


def exactly(case: Case, tensors: Tensors, name: str) -> list[torch.Tensor]:
    """The tangents in float64, by autograd through the definition."""
    place = tensors["q"].device
    wide = {n: t.detach().double() for n, t in tensors.items()}
    wide[name] = dual(wide[name])
    made = attention_reference(*(wide[n] for n in "qkv"), **case.given(wide), **case.masks(place), **case.lengths(place))
    duals = [forward_ad.unpack_dual(one) for one in made]
    return [torch.zeros_like(d.primal) if d.tangent is None else d.tangent.nan_to_num() for d in duals]


def test_every_parameter_that_is_a_tensor_is_among_them() -> None:
    """Lengths are numbers without tangents; those of 8 bits' scales are in tests/stored."""
    seen = {"qkv", "kv", *(name for case in CASES for name in inputs(case))}
    for function in (
        flashtile.attention,
        flashtile.attention_varlen,
        flashtile.attention_qkvpacked,
        flashtile.attention_kvpacked,
    ):
        for name, parameter in inspect.signature(function).parameters.items():
            if "Tensor" in str(parameter.annotation):
                assert name in seen or name.startswith(("cu_seqlens", "seqused", "scales")), name


@pytest.mark.parametrize("form", [form for form in FORMS if form != "expanded"])  # which no dual tensor is made of
def test_packed_tensors(form: str) -> None:
    """Their tangents are those of q, k and v apart."""
    packs, parts = make(form, torch.device("cpu"), torch.float32)
    for i in range(len(packs)):
        with forward_ad.dual_level():
            given = [dual(t.detach()) if i == j else t.detach() for j, t in enumerate(packs)]
            out, lse = packed_call(form, given, return_lse=True, options=Options(backend="cpu"))
            found = [forward_ad.unpack_dual(one).tangent for one in (out, lse)]
        moves = [True] * 3 if len(packs) == 1 else [i == 0, i == 1, i == 1]
        names = {"cu_seqlens_q": torch.tensor(ENDS, dtype=torch.int32)} if form.endswith("varlen") else {}
        function = flashtile.attention_varlen if names else flashtile.attention
        with forward_ad.dual_level():
            given = [dual(t.detach()) if moved else t.detach() for t, moved in zip(parts, moves, strict=True)]
            apart = function(*given, **names, return_lse=True, options=Options(backend="cpu"))
            expected = [forward_ad.unpack_dual(one).tangent for one in apart]
        for one, other in zip(found, expected, strict=True):
            assert one is not None
            assert other is not None
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ARRIVING)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "operator"])
def test_gradients_with_tangents(name: str, traced: bool, backend: str, place: torch.device) -> None:
    """A backward is linear in what arrives: its tangent is the gradient of the tangent. The operator refuses."""
    case = CASES[0]
    tensors = {n: t.requires_grad_(n == "q") for n, t in case.tensors(place).items()}
    if traced:
        with FlopCounterMode(display=False):
            outputs = call(case, tensors, backend, return_lse=True)
    else:
        outputs = call(case, tensors, backend, return_lse=True)
    output = outputs[ARRIVING.index(name)]
    (expected,) = torch.autograd.grad(output.sum(), tensors["q"], retain_graph=True)
    with forward_ad.dual_level():
        loss = (output * dual(tensors[name].detach())).sum()
        if traced:
            with pytest.raises(NotSupported, match=r"second derivative|forward-mode"):
                torch.autograd.grad(loss, tensors["q"])
            return
        (found,) = torch.autograd.grad(loss, tensors["q"])
        tangent = forward_ad.unpack_dual(found).tangent
        assert tangent is not None
        torch.testing.assert_close(tangent, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients_of_inputs_with_tangents(dtype: torch.dtype, packed: bool) -> None:
    """Forward mode over reverse mode, both by themselves: gradients move with the inputs, until the level ends."""
    values, bias = torch.randn(1, 5, 3, 2, 8, dtype=dtype), torch.randn(1, 2, 5, 5, dtype=dtype)

    def attend(qkv: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        score = (flashtile.Bias(bias),)
        return flashtile.attention_qkvpacked(qkv, score=score) if packed else flashtile.attention(*qkv.unbind(2), score=score)

    def define(qkv: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.double().unbind(2)
        p = (torch.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5 + bias.double()).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", p, v)

    def slopes(function: Any) -> list[torch.Tensor]:
        with forward_ad.dual_level():
            given = [dual(t.clone().requires_grad_()) for t in (values, bias)]
            found = torch.autograd.grad(function(*given).sin().sum(), given, create_graph=True)
            return [forward_ad.unpack_dual(g).tangent for g in found]  # pyright: ignore[reportReturnType]

    for found, expected in zip(slopes(attend), slopes(define), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    given = [t.clone().requires_grad_() for t in (values, bias)]
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(attend(*map(dual, given))).primal
    with forward_ad.dual_level():
        found = torch.autograd.grad(out, given, dual(torch.ones_like(out)))
        for one, other in zip(found, torch.autograd.grad(attend(*given).sum(), given), strict=True):
            torch.testing.assert_close(forward_ad.unpack_dual(one).tangent, other, rtol=1e-4, atol=1e-5)


def test_a_number_with_a_tangent_is_refused() -> None:
    q, number = torch.randn(1, 5, 2, 8), torch.tensor(0.5)
    with pytest.raises(flashtile.InvalidProblem, match=r"scale is a Tensor that has a tangent.*multiplies q"):
        torch.func.jvp(lambda scale: flashtile.attention(q, q, q, scale=scale), (number,), (number,))
    with forward_ad.dual_level(), pytest.raises(flashtile.InvalidProblem, match="softcap is a Tensor that has a tangent"):
        flashtile.attention(q, q, q, score=(flashtile.Softcap(dual(number)),))
    with pytest.raises(flashtile.InvalidProblem, match=r"scale is a Tensor; .*multiplies q"):
        torch.func.vmap(lambda scale: flashtile.attention(q, q, q, scale=scale))(number.expand(2))


@pytest.mark.parametrize("engine", ["eager", "aot_eager"])
def test_compiled_calls_refuse(engine: str) -> None:
    """What a compiled graph is given may have tangents, too."""
    compiled = torch.compile(lambda q, k, v: flashtile.attention(q, k, v), backend=engine, fullgraph=True)
    given = [torch.randn(1, 8, 2, 16) for _ in range(3)]
    compiled(*given)
    with forward_ad.dual_level(), pytest.raises(Exception, match=REFUSED + ".*torch.func.jvp"):
        compiled(dual(given[0]), *given[1:])


@pytest.mark.parametrize("engine", ["eager", "aot_eager"])
def test_a_jvp_that_is_compiled(engine: str) -> None:
    """torch.func.jvp in a compiled function: torch.compile drops custom tangents silently where it can. Here it must not."""
    q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))

    def step(x: torch.Tensor) -> Any:
        return torch.func.jvp(lambda x: flashtile.attention(x, k, v), (x,), (torch.ones_like(x),))

    expected = step(q)
    assert expected[1].any()
    torch.testing.assert_close(torch.compile(step, backend=engine, fullgraph=True)(q), expected)


def test_batches_of_tangents_in_the_old_way_and_products_by_a_third_derivative_refuse_by_name() -> None:
    q, k, v, t = (torch.randn(1, 4, 1, 4) for _ in range(4))
    function = lambda q: flashtile.attention(q, k, v).square().sum()  # noqa: E731
    functional = torch.autograd.functional
    with pytest.raises(NotSupported, match=r"(?s)a batch of tangents.*torch.func.jacfwd"):
        functional.jacobian(function, q, vectorize=True, strategy="forward-mode")
    with pytest.raises(NotSupported, match=r"(?s)third derivative.*functional.vhp"):
        functional.hvp(function, q, t)
    expected = torch.func.jvp(torch.func.grad(function), (q,), (t,))[1]
    torch.testing.assert_close(functional.vhp(function, q, t)[1], expected)


@pytest.mark.parametrize("seed", [5, -(2**63)])
def test_a_linear_map_keeps_what_its_function_keeps(seed: int) -> None:
    """torch.func.linearize leaves writes in place out of its map, such as that of a seed."""
    q, k, v, tangent = (torch.randn(1, 7, 2, 4, dtype=torch.float64) for _ in range(4))

    def dropped(q: torch.Tensor) -> torch.Tensor:
        return flashtile.attention(q, k, v, causal=True, dropout=flashtile.Dropout(0.3, seed))

    expected: Any = torch.func.jvp(dropped, (q,), (tangent,))
    value, linear = torch.func.linearize(dropped, q)
    torch.testing.assert_close((value, linear(tangent)), expected)
