"""Tangents of forward-mode differentiation are refused, whichever tensor brings them: kernels would drop them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import flashtile
from flashtile import Alibi, NotSupported
from tests.cases import MODIFIERS, Case, Tensors
from tests.torch.test_packed import FORMS, make, packed_call

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
def test_every_input_refuses(case: Case, name: str, backend: str, place: torch.device, wanted: bool) -> None:
    tensors = {n: t.requires_grad_(wanted) for n, t in case.tensors(place).items()}
    with forward_ad.dual_level():
        call(case, tensors, backend)  # without tangents it runs
        tensors[name] = dual(tensors[name])
        for context in (torch.enable_grad, torch.no_grad):
            with context(), pytest.raises(NotSupported, match=REFUSED):
                call(case, tensors, backend)
            with context(), FlopCounterMode(display=False), pytest.raises(NotSupported, match=REFUSED):  # the operator
                call(case, tensors, backend)


def test_every_parameter_that_is_a_tensor_is_among_them() -> None:
    """Lengths are numbers without tangents."""
    seen = {"qkv", "kv", *(name for case in CASES for name in inputs(case))}
    for function in (
        flashtile.attention,
        flashtile.attention_varlen,
        flashtile.attention_qkvpacked,
        flashtile.attention_kvpacked,
    ):
        for name, parameter in inspect.signature(function).parameters.items():
            if "Tensor" in str(parameter.annotation):
                assert name in seen or name.startswith(("cu_seqlens", "seqused")), name


@pytest.mark.parametrize("form", [form for form in FORMS if form != "expanded"])  # which no dual tensor is made of
def test_packed_tensors_refuse(form: str) -> None:
    packs, _ = make(form, torch.device("cpu"), torch.float32)
    with forward_ad.dual_level():
        for i in range(len(packs)):
            given = [dual(t.detach()) if i == j else t.detach() for j, t in enumerate(packs)]
            with pytest.raises(NotSupported, match=REFUSED):
                packed_call(form, given)


@pytest.mark.parametrize("name", ARRIVING)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "operator"])
def test_gradients_with_tangents_refuse(name: str, traced: bool, backend: str, place: torch.device) -> None:
    case = CASES[0]
    tensors = {n: t.requires_grad_(n == "q") for n, t in case.tensors(place).items()}
    if traced:
        with FlopCounterMode(display=False):
            outputs = call(case, tensors, backend, return_lse=True)
    else:
        outputs = call(case, tensors, backend, return_lse=True)
    output = outputs[ARRIVING.index(name)]
    with forward_ad.dual_level(), pytest.raises(NotSupported, match=REFUSED):
        (output * dual(tensors[name].detach())).sum().backward()


@pytest.mark.parametrize("name", ["q", "k", "v", "slopes"])
def test_torch_func_refuses(name: str) -> None:
    """jvp, and jvp of grad."""
    tensors = Case("forward-mode-func", score=("alibi",)).tensors(torch.device("cpu"))
    given = {"slopes": tensors["score.0"], **{n: tensors[n] for n in "qkv"}}

    def attend(x: torch.Tensor) -> torch.Tensor:
        t = {**given, name: x}
        return flashtile.attention(t["q"], t["k"], t["v"], score=(Alibi(t["slopes"]),))

    functions: list[Callable[..., Any]] = [attend, torch.func.grad(lambda x: attend(x).sum())]
    for function in functions:
        with pytest.raises(NotSupported, match=REFUSED):
            torch.func.jvp(function, (given[name],), (given[name],))


@pytest.mark.parametrize("engine", ["eager", "aot_eager"])
def test_compiled_calls_refuse(engine: str) -> None:
    """What a compiled graph is given may have tangents, too."""
    compiled = torch.compile(lambda q, k, v: flashtile.attention(q, k, v), backend=engine, fullgraph=True)
    given = [torch.randn(1, 8, 2, 16) for _ in range(3)]
    compiled(*given)
    with forward_ad.dual_level(), pytest.raises(Exception, match=REFUSED):
        compiled(dual(given[0]), *given[1:])
