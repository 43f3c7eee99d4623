"""float64 on the CPU: exact to its own rounding, differentiated so that torch.autograd.gradcheck agrees; GPUs refuse it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashtile
from flashtile import Band, InvalidProblem, NotSupported, Options, dispatch
from flashtile.plan.device import NAMED
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.dtype import DType
from flashtile.reference.attention import attention_reference
from tests.cases import MASKS, MODIFIERS, Case, Tensors

CPU = torch.device("cpu")
SIZES = dict(seqlen_q=5, seqlen_k=6, head_dim=3, head_dim_v=2)
VARLEN = dict(seqlen_q=7, seqlen_k=8, head_dim=3, head_dim_v=2, cu_q=(0, 2, 2, 7), cu_k=(0, 5, 6, 8))
CASES = [
    *(Case(f"fp64-{name}", score=(name,), **SIZES) for name in MODIFIERS),
    *(Case(f"fp64-{name}", mask=name, **SIZES) for name in MASKS),
    Case("fp64-gqa-causal", batch=2, heads_q=4, heads_kv=2, causal=True, **SIZES),
    Case("fp64-window-sink", window=(2, 1), sink="fp32", **SIZES),
    Case("fp64-no-keys", mask=Band(right=-4), sink="fp32", **SIZES),
    Case("fp64-dropout", dropout=0.4, sink="fp32", score=("alibi", "softcap"), **SIZES),
    Case("fp64-varlen", causal=True, sink="fp32", score=("alibi", "bias-each-head"), **VARLEN),
    Case("fp64-used", batch=2, used_q=(3, 5), used_k=(0, 4), **SIZES),
    Case("fp64-holes", batch=2, used_q=(3, 5), used_k=(2, 4), holes=True, **SIZES),
    Case("fp64-bhsd", layout="bhsd", **SIZES),
]

WHOLE = ("fp64-dropout",)


def doubled(case: Case) -> Tensors:
    """The case's inputs in float64."""
    made = {name: t.double() for name, t in case.tensors(CPU).items()}
    return {name: t for name, t in made.items() if name not in ("dout", "dlse")}


def call(case: Case, tensors: Tensors, **more: Any) -> Any:
    masks, lengths = case.masks(CPU), case.lengths(CPU)
    return case.function(*(tensors[n] for n in "qkv"), **case.given(tensors), **masks, **lengths, return_lse=True, **more)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradcheck(case: Case) -> None:
    tensors = doubled(case)
    names = [*tensors]

    def outputs(*given: torch.Tensor) -> Any:
        out, lse = call(case, dict(zip(names, given, strict=True)))
        return out, lse.masked_fill(lse == -torch.inf, 0.0)  # whose differences have no numbers

    fast = case.name not in WHOLE  # along random directions, not element by element
    assert torch.autograd.gradcheck(outputs, tuple(t.requires_grad_() for t in tensors.values()), fast_mode=fast)


@pytest.mark.parametrize(("seqlen", "engine"), [(40, "aot_eager"), (700, "eager")])
def test_it_is_float64_all_the_way(seqlen: int, engine: str) -> None:
    """Several tiles too, and through the operator; float32 anywhere would show at 1e-8."""
    tensors = doubled(Case("fp64-exact", seqlen_q=seqlen, seqlen_k=seqlen + 9, score=("softcap",), sink="fp32"))
    given = {"score": (flashtile.Softcap(2.0),), "sink": tensors.pop("sink"), "causal": True}
    leaves = [t.requires_grad_() for t in tensors.values()]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return flashtile.attention(q, k, v, **given, return_lse=True)

    function = attend if engine == "eager" else torch.compile(attend, backend=engine, fullgraph=True)
    out, lse = function(*leaves)
    expected = attention_reference(*leaves, **given)
    assert out.dtype is lse.dtype is torch.float64
    for one, other in zip((out, lse), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    made, wanted = (torch.autograd.grad(a.sum() + b.cos().sum(), leaves) for a, b in ((out, lse), expected))
    for one, other in zip(made, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_its_spelling() -> None:
    problem = AttentionProblem(1, 16, 16, 1, 1, 8, 8, DType.FP64)
    assert problem.spell() == "attention(q=1x16x1x8,kv=16x1x8,fp64)"
    assert AttentionProblem.parse(problem.spell()) == problem


@pytest.mark.parametrize("target", [name for name in NAMED if name != "cpu"])
def test_gpus_refuse(target: str) -> None:
    problem = AttentionProblem(1, 1024, 1024, 8, 8, 64, 64, DType.FP64)
    with pytest.raises(NotSupported, match="dtype is fp64; supported are fp16") as caught:
        dispatch.plan_forward(problem, NAMED[target])
    assert "fp64 runs on the CPU" in str(caught.value)


def test_it_stands_beside_float64_alone() -> None:
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(InvalidProblem, match=r"sink is torch\.float64; it must be float16"):
        flashtile.attention(q, q, q, sink=torch.zeros(2).double())
    with pytest.raises(InvalidProblem, match="sink is fp64 and q is fp32"):
        AttentionProblem.parse("attention(q=1x16x1x8,kv=16x1x8,fp32,sink=1:fp64)")
    flashtile.attention(q.double(), q.double(), q.double(), sink=torch.zeros(2))
    flashtile.attention(q.double(), q.double(), q.double(), options=Options(backend="cpu"), sink=torch.zeros(2).double())
