"""torch.onnx.export of flashtile's calls: the graph, run by ONNX's own evaluator, gives what the call gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxscript", reason="onnxscript, with which torch exports, is not installed")

import onnx
from onnx.reference import ReferenceEvaluator

import flashtile
from flashtile import Alibi, Bias, Dropout, KeyPadding, NotSupported, Softcap
from flashtile.integrations.onnx import translations
from flashtile.nn import Attention
from flashtile.torch.lengths import given_lengths
from flashtile.torch.operator import ATTENTION
from flashtile.torch.packing import APART
from flashtile.torch.request import write

SHORT, LONG = (torch.export.Dim(name, min=2, max=64) for name in ("seqlen_q", "seqlen_k"))
Shapes = Callable[[int, int], tuple[tuple[int, ...], ...]]


def apart(seqlen_q: int, seqlen_k: int) -> tuple[tuple[int, ...], ...]:
    return (2, seqlen_q, 4, 16), (2, seqlen_k, 2, 16), (2, seqlen_k, 2, 8)


def biased_by_key(seqlen_q: int, seqlen_k: int) -> tuple[tuple[int, ...], ...]:
    return *apart(seqlen_q, seqlen_k), (2, 1, 1, seqlen_k)


def biased(seqlen_q: int, seqlen_k: int) -> tuple[tuple[int, ...], ...]:
    return *apart(seqlen_q, seqlen_k), (1, 4, seqlen_q, seqlen_k)


SAME, OTHER = ({1: SHORT},) * 3, ({1: SHORT}, {1: LONG}, {1: LONG})
# Of a call: the function, the shapes of its tensors by two lengths, which of their axes are symbolic.
CALLS: dict[str, tuple[Callable[..., Any], Shapes, tuple[dict[int, Any], ...]]] = {
    "causal": (lambda q, k, v: flashtile.attention(q, k, v, causal=True), apart, SAME),
    "softcap": (lambda q, k, v: flashtile.attention(q, k, v, causal=True, scale=0.7, score=(Softcap(1.5),)), apart, SAME),
    "window": (lambda q, k, v: flashtile.attention(q, k, v, window=(3, 1), score=(Softcap(1.5),)), apart, SAME),
    "lengths": (lambda q, k, v: flashtile.attention(q, k, v), apart, OTHER),
    "causal-lengths": (lambda q, k, v: flashtile.attention(q, k, v, causal=True), apart, OTHER),
    "bias": (
        lambda q, k, v, b: flashtile.attention(q, k, v, causal=True, score=(Softcap(2.0), Bias(b))), biased,
        (*OTHER, {2: SHORT, 3: LONG}),
    ),
    "bias-by-key": (
        lambda q, k, v, b: flashtile.attention(q, k, v, causal=True, score=(Bias(b),)), biased_by_key, (*SAME, {3: SHORT}),
    ),
    "qkvpacked": (
        lambda qkv: flashtile.attention_qkvpacked(qkv, causal=True), lambda n, _: ((2, n, 3, 4, 16),), ({1: SHORT},)
    ),
    "heads": (
        lambda qkv: flashtile.attention_qkvpacked(qkv, heads_q=2, window=(2, 0)), lambda n, _: ((2, n, 4, 16),), ({1: SHORT},)
    ),
    "kvpacked": (
        lambda q, kv: flashtile.attention_kvpacked(q, kv, causal=True), lambda n, m: ((2, n, 4, 16), (2, m, 2, 2, 16)),
        ({1: SHORT}, {1: LONG}),
    ),
}  # fmt: skip


class Call(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function

    def forward(self, *given: torch.Tensor) -> Any:
        return self.function(*given)


def exported(module: torch.nn.Module, given: tuple[torch.Tensor, ...], dynamic_shapes: Any = None) -> Any:
    """The model of a module's call, checked by ONNX."""
    program: Any = torch.onnx.export(
        module.eval(), given, dynamo=True, opset_version=23, custom_translation_table=translations(),
        dynamic_shapes=dynamic_shapes, verbose=False,
    )  # fmt: skip
    onnx.checker.check_model(program.model_proto, full_check=True)
    return program.model_proto


def ran(model: Any, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
    feeds = {put.name: t.numpy() for put, t in zip(model.graph.input, given, strict=True)}
    return torch.from_numpy(ReferenceEvaluator(model).run(None, feeds)[0])


@pytest.mark.parametrize("name", CALLS)
def test_exported_calls(name: str) -> None:
    """Of the lengths that were traced and of others: fewer keys than queries leave queries that see none."""
    function, shapes, dynamic = CALLS[name]
    lengths = ((9, 12), (17, 11)) if any(LONG in axes.values() for axes in dynamic) else ((9, 9), (17, 17))
    calls = [tuple(torch.randn(s) for s in shapes(*pair)) for pair in lengths]
    model = exported(Call(function), calls[0], (dynamic,))
    (node,) = (node for node in model.graph.node if node.op_type == "Attention")
    for given in calls:
        torch.testing.assert_close(ran(model, given), function(*given), rtol=1e-5, atol=1e-6)
    causal = [a.i for a in node.attribute if a.name == "is_causal"] == [1]
    assert causal == (
        name in ("causal", "softcap", "bias-by-key", "qkvpacked")
    )  # the others' masks are tensors of the graph, or none


def test_the_module() -> None:
    module, x = Attention(32, 4, 2, causal=True), torch.randn(2, 9, 32)
    model = exported(module, (x,), ({1: SHORT},))
    for length in (9, 20):
        given = torch.randn(2, length, 32)
        with torch.no_grad():
            torch.testing.assert_close(ran(model, (given,)), module(given), rtol=1e-5, atol=1e-6)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "lse": (dict(return_lse=True), "Attention returns no lse"),
    "sink": (dict(sink=torch.zeros(4)), "Attention has no sink"),
    "dropout": (dict(dropout=Dropout(0.5, 1)), "Attention has no dropout"),
    "predicate": (dict(mask=KeyPadding(torch.ones(2, 9, dtype=torch.bool))), "Attention has no where"),
    "lengths": (dict(given=given_lengths(seqused_k=torch.ones(2, dtype=torch.int32))), "Attention has no lengths"),
    "alibi": (dict(score=(Alibi(torch.ones(4)),)), "Attention has no alibi"),
    "order": (dict(score=(Bias(torch.zeros(9, 9)), Softcap(1.0))), "Attention has no bias before softcap"),
    "dtype": (dict(score=(Bias(torch.zeros(9, 9).half()),)), "bias is torch.float16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_onnx_cannot_say_is_refused(name: str) -> None:
    asked, message = REFUSED[name]
    q, translate = torch.randn(2, 9, 4, 16), translations()[ATTENTION]
    text, floats, ints, captured, others = write(
        APART, q, asked.get("given"), **{k: v for k, v in asked.items() if k != "given"}
    )
    with pytest.raises(NotSupported, match=message):
        translate(q, q, q, [*captured, *others], 0, text, floats, ints)


def test_a_refused_export_says_why() -> None:
    with pytest.raises(torch.onnx.errors.OnnxExporterError) as raised:
        exported(Call(lambda q: flashtile.attention(q, q, q, return_lse=True)), (torch.randn(2, 9, 4, 16),))
    causes: list[BaseException | None] = [raised.value]
    while causes[-1] is not None:
        causes.append(causes[-1].__cause__)
    assert any(isinstance(cause, NotSupported) and "returns no lse" in str(cause) for cause in causes)
