"""torch.onnx.export of flashtile's calls: the graph gives what the call gives, in ONNX's own evaluator and in onnxruntimes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxscript", reason="onnxscript, with which torch exports, is not installed")

import onnx
from onnx.reference import ReferenceEvaluator

import flashtile
from flashtile import Alibi, Band, Bias, Dropout, KeyPadding, NotSupported, Softcap
from flashtile.integrations.onnx import translations
from flashtile.nn import Attention
from flashtile.torch.call.arguments import Arguments
from flashtile.torch.call.lengths import given_lengths
from flashtile.torch.execute.packing import APART
from flashtile.torch.routes.functional import ATTENTION
from flashtile.torch.routes.request import write

SHORT, LONG = (torch.export.Dim(name, min=2, max=64) for name in ("seqlen_q", "seqlen_k"))
Shapes = Callable[[int, int], tuple[tuple[int, ...], ...]]


def apart(seqlen_q: int, seqlen_k: int) -> tuple[tuple[int, ...], ...]:
    return (2, seqlen_q, 4, 16), (2, seqlen_k, 2, 16), (2, seqlen_k, 2, 8)


def biased_by_key(seqlen_q: int, seqlen_k: int) -> tuple[tuple[int, ...], ...]:
    return *apart(seqlen_q, seqlen_k), (2, 1, 1, seqlen_k)


def one_head(seqlen_q: int, seqlen_k: int) -> tuple[tuple[int, ...], ...]:
    return (2, seqlen_q, 4, 16), (2, seqlen_k, 1, 16), (2, seqlen_k, 1, 8)


def ungrouped(seqlen_q: int, seqlen_k: int) -> tuple[tuple[int, ...], ...]:
    return (2, seqlen_q, 4, 16), (2, seqlen_k, 4, 16), (2, seqlen_k, 4, 8), (1, 4, seqlen_q, seqlen_k)


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
    "cap": (lambda q, k, v: flashtile.attention(q, k, v, score=(Softcap(1.5),)), apart, OTHER),
    "cap-lengths": (lambda q, k, v: flashtile.attention(q, k, v, window=(3, 2), score=(Softcap(1.5),)), apart, OTHER),
    "bias-each-head": (
        lambda q, k, v, b: flashtile.attention(q, k, v, window=(6, 2), score=(Bias(b),)), ungrouped,
        (*OTHER, {2: SHORT, 3: LONG}),
    ),
    "bias-hides": (
        lambda q, k, v, b: flashtile.attention(q, k, v, causal=True, score=(Bias(b.masked_fill(b > 0, -math.inf)),)),
        biased_by_key,
        (*SAME, {3: SHORT}),
    ),
    "bias-other-dtype": (
        lambda q, k, v, b: flashtile.attention(q, k, v, score=(Bias(b.half()),)), biased_by_key, (*SAME, {3: SHORT})
    ),
    "blind": (lambda q, k, v: flashtile.attention(q, k, v, mask=Band(left=-1, right=3)), apart, OTHER),
    "one-head": (lambda q, k, v: flashtile.attention(q, k, v, causal=True), one_head, OTHER),
    "bfloat16": (
        lambda *t: flashtile.attention(*(x.bfloat16() for x in t), window=(3, 1), score=(Softcap(1.5),)).float(), apart, OTHER
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


def exported(module: torch.nn.Module, given: tuple[torch.Tensor, ...], dynamic_shapes: Any = None, opset: int = 23) -> Any:
    """The model of a module's call, checked by ONNX."""
    program: Any = torch.onnx.export(
        module.eval(), given, dynamo=True, opset_version=opset, custom_translation_table=translations(),
        dynamic_shapes=dynamic_shapes, verbose=False,
    )  # fmt: skip
    onnx.checker.check_model(program.model_proto, full_check=True)
    assert {o.domain: o.version for o in program.model_proto.opset_import}[""] == opset
    return program.model_proto


def ran(model: Any, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
    feeds = {put.name: t.numpy() for put, t in zip(model.graph.input, given, strict=True)}
    return torch.from_numpy(ReferenceEvaluator(model).run(None, feeds)[0])


ModelOf = Callable[..., Any]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> ModelOf:
    """`model_of(name, opset=23)`: the model of one of CALLS, which one worker of a session exports for all."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "onnx"
    shared.mkdir(exist_ok=True)

    @cache
    def model(name: str, opset: int = 23) -> Any:
        place = shared / f"{name}-{opset}.onnx"
        with FileLock(f"{place}.lock"):
            if not place.exists():
                function, _, dynamic = CALLS[name]
                onnx.save(exported(Call(function), calls(name)[0], (dynamic,), opset), place)
        return onnx.load(place)

    return model


def calls(name: str) -> list[tuple[torch.Tensor, ...]]:
    """Tensors of the lengths that are traced and of others: fewer keys than queries leave queries that see none."""
    _, shapes, dynamic = CALLS[name]
    lengths = ((9, 12), (17, 11)) if any(LONG in axes.values() for axes in dynamic) else ((9, 9), (17, 17))
    generator = torch.Generator().manual_seed(len(name))
    return [tuple(1.5 * torch.randn(s, generator=generator) for s in shapes(*pair)) for pair in lengths]


# What every onnxruntime computes alike.
ATTENTIONS = {
    "causal", "lengths", "causal-lengths", "bias-by-key", "bias-each-head", "bias-hides", "bias-other-dtype", "cap", "blind",
    "one-head", "qkvpacked", "heads", "kvpacked",
}  # fmt: skip
TOLERANCE = dict(rtol=1e-5, atol=2e-6)


def near(name: str, found: torch.Tensor, given: tuple[torch.Tensor, ...]) -> None:
    how = dict(rtol=2e-2, atol=1e-2) if name == "bfloat16" else TOLERANCE
    torch.testing.assert_close(found, CALLS[name][0](*given), **how)


@pytest.mark.parametrize("name", CALLS)
def test_exported_calls(name: str, model_of: ModelOf) -> None:
    model = model_of(name)
    for given in calls(name):
        near(name, ran(model, given), given)
    nodes = [node for node in model.graph.node if node.op_type == "Attention"]
    assert len(nodes) == (name in ATTENTIONS)
    causal = [a.i for node in nodes for a in node.attribute if a.name == "is_causal"] == [1]
    assert causal == (name in ("causal", "qkvpacked"))  # the others' masks are tensors of the graph, or none


MODELS = [
    *((name, 23) for name in CALLS),
    *((name, 18) for name in ("causal", "window", "causal-lengths", "bias", "bias-hides", "blind", "bfloat16", "kvpacked")),
]
RUNTIMES = {"oldest": "1.20.0", "capping": "1.23.2", "newest": "1.32.0"}  # as tools/setup.sh installs them


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, model_of: ModelOf) -> Path:
    """A folder with the model of each call, and of those that tell, in an opset of onnxruntime 1.20, and its inputs."""
    folder = tmp_path_factory.mktemp("models")
    for name, opset in MODELS:
        onnx.save(model_of(name, opset), folder / f"{name}-{opset}.onnx")
        for i, given in enumerate(calls(name)):
            np.savez(folder / f"{name}-{opset}-{i}.npz", *(t.numpy() for t in given))
    return folder


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_exported_calls_in_onnxruntime(runtime: str, models: Path, tmp_path: Path) -> None:
    packages = Path(sys.prefix) / f"onnxruntime-{runtime}"
    if not packages.is_dir():
        pytest.skip(f"onnxruntime {RUNTIMES[runtime]} is not installed in {packages.name}; make installs it")
    for file in models.iterdir():
        (tmp_path / file.name).symlink_to(file)
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    command = [sys.executable, str(Path(__file__).with_name("onnxruntime_runs.py")), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == RUNTIMES[runtime], done.stderr[-2000:]
    for name, opset in MODELS:
        for i, given in enumerate(calls(name)):
            case = f"{name}-{opset}-{i}"
            refused = tmp_path / f"{case}.txt"
            if runtime == "oldest" and opset == 23:
                assert "till opset 21" in refused.read_text()
                continue
            assert not refused.exists(), f"{case}: {refused.read_text()}"
            near(name, torch.from_numpy(np.load(tmp_path / f"{case}.out.npy")), given)


@pytest.mark.parametrize(("name", "opset"), [*(("causal", n) for n in (16, 17, 20, 22, 24, 25, 26)), ("window", 24)])
def test_other_opsets(name: str, opset: int, model_of: ModelOf) -> None:
    """Torch converts to those before 18; Attention is that of ONNX in those that have one of the same meaning."""
    model = model_of(name, opset)
    for given in calls(name):
        near(name, ran(model, given), given)
    assert ("Attention" in {node.op_type for node in model.graph.node}) == (name == "causal" and opset in (24, 25))


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
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_onnx_cannot_say_is_refused(name: str) -> None:
    asked, message = REFUSED[name]
    q, translate = torch.randn(2, 9, 4, 16), translations()[ATTENTION]
    text, floats, ints, captured, others = write(
        APART, q, asked.get("given"), Arguments(**{k: v for k, v in asked.items() if k != "given"})
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
