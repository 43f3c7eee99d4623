"""flashtile.explain, called with tensors, a problem or a spelling."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import flashtile
from flashtile import InvalidProblem, Mass, NotSupported, Options, Softcap
from flashtile.plan.device import A100, H100
from flashtile.problem.dtype import DType

PROBLEM = flashtile.AttentionProblem(1, 4096, 4096, 16, 16, 128, 128, DType.BF16)


def test_it_shows_itself() -> None:
    shown = flashtile.explain(PROBLEM, device=H100)
    assert repr(shown) == str(shown)
    assert str(shown).startswith(PROBLEM.spell() + "\non H100 (sm90)\n")
    assert str(flashtile.explain(PROBLEM.spell(), device="sm90")) == str(shown)


def test_tensors_are_explained_where_they_are(device: Any) -> None:
    q, k, v = (torch.randn(1, 32, 2, 16, device=device) for _ in range(3))
    shown = flashtile.explain(q, k, v, causal=True, score=(Softcap(3.0),), return_lse=True)
    assert "band=:0,score=softcap(3.0)" in str(shown)
    assert (shown.device.kind == "cpu") == (device.type == "cpu")


def test_the_other_backends_say_why() -> None:
    q, k, v = (torch.randn(1, 32, 2, 16) for _ in range(3))
    shown = flashtile.explain(q, k, v, device=A100)
    assert shown.forward.backend == "triton"
    assert shown.refusals == {
        "hopper": ("the device is sm80; these kernels are made of sm90's instructions",),
        "cpu": ("tensors are on sm80; this backend runs on the CPU",),
    }
    asked = flashtile.explain(q, k, v, options=Options(backend="cpu"))
    assert asked.forward.backend == "cpu"
    assert "triton" in asked.refusals


def test_the_rules_behind_each_tile_are_told() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    for half in str(flashtile.explain(PROBLEM, device=A100)).split("\n\nother backends")[0].split("backward:"):
        lines = half.splitlines()
        tiles = [i for i, line in enumerate(lines) if " tile " in line and "rule:" not in line]
        assert tiles
        assert all(lines[i + 1].startswith("    rule: ") and lines[i + 1].endswith("]") for i in tiles)


def test_layout_notes() -> None:
    x = torch.randn(1, 32, 4, 34)
    q, k, v = x[..., :16], x[..., ::2][..., :16], x[:, :, :1, 1:17].expand(1, 32, 4, 16)
    text = str(flashtile.explain(q, k, v, device=H100))
    assert "k's last stride is 2: loads are not vectorised, no copy is made" in text
    assert "v's head stride is 0: the expanded tensor is read as it is" in text
    assert "v starts 4 bytes past a multiple of 16: loads are narrower" in text
    assert "q's row and head stride is not a multiple of 16 elements: loads are narrower" in text
    dense = torch.randn(1, 32, 4, 16)
    assert flashtile.explain(dense, dense, dense, device=H100).layout == ()


def test_gradients_that_nobody_wants_are_not_planned() -> None:
    q, k, v = (torch.randn(1, 32, 2, 16) for _ in range(3))
    v.requires_grad_()
    names = {b.name for b in flashtile.explain(q, k, v, device=H100).backward.named("output")}
    assert names == {"dv"}


@pytest.mark.parametrize(
    ("dtype", "precision", "bound"),
    [
        ("bf16", "tf32x3", 137.439 / 789),
        ("fp32", "tf32", (6 + 3) / 2 * 137.439 / 789),
        ("fp32", "tf32x3", 6 * 137.439 / 789),
        ("fp32", "ieee", None),
    ],
)
def test_roofline(dtype: str, precision: Any, bound: float | None) -> None:
    problem = flashtile.AttentionProblem(1, 4096, 4096, 16, 16, 128, 128, DType(dtype), precision=precision)
    text = str(flashtile.explain(problem, device=H100)).partition("backward")[0]
    told = bound and (f"{bound:.3g} ms" if bound >= 1 else f"{1000 * bound:.3g} us")
    expected = f"roofline {told}, bound by arithmetic" if bound else "bound by memory"
    assert expected in text


def test_errors_are_those_of_attention() -> None:
    q = torch.randn(1, 32, 2, 16)
    with pytest.raises(InvalidProblem, match=r"k is a NoneType; it must be a torch\.Tensor"):
        flashtile.explain(q)
    with pytest.raises(InvalidProblem, match="causal is given besides a problem"):
        flashtile.explain(PROBLEM, causal=True)
    with pytest.raises(InvalidProblem, match="device is 3; it must be one of sm80"):
        flashtile.explain(PROBLEM, device=3)  # type: ignore[arg-type]
    deterministic = replace(PROBLEM, deterministic=True)
    with pytest.raises(NotSupported, match="fused backward adds dq atomically"):
        flashtile.explain(deterministic, device=A100, options=Options(backward="fused"))


def test_sinks_dropout_and_bias_are_explained() -> None:
    q, k, v = (torch.zeros(1, 64, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    sink, bias = torch.zeros(2, requires_grad=True), torch.zeros(2, 64, 64, requires_grad=True)
    given = {"sink": sink, "dropout": flashtile.Dropout(0.1), "score": (flashtile.Bias(bias),)}
    text = str(flashtile.explain(q, k, v, device="H100", **given))
    problem = "score=bias(1x2x64x64:fp32:grad),sink=2:fp32:grad,dropout=0.1"
    assert problem in text
    again = str(flashtile.explain(f"attention(q=1x64x2x64,kv=64x2x64,bf16,{problem})", device="H100"))
    for said in (text, again):
        assert "attention_backward_broadcast: grid" in said
        assert "gradient of bias tile" in said
    for name, value in given.items():
        with pytest.raises(flashtile.InvalidProblem, match=f"{name} is given besides a problem"):
            flashtile.explain("attention(q=1x64x2x64,kv=64x2x64,bf16)", **{name: value})


def test_lengths_are_told_apart() -> None:
    q, ends = torch.zeros(64, 2, 16), torch.tensor([0, 40, 64], dtype=torch.int32)
    for keys in ({}, {"max_seqlen_k": 40}):  # as many as queries, whose list they share
        text = str(flashtile.explain(q, q, q, cu_seqlens_q=ends, max_seqlen_q=40, **keys, device="H100"))
        assert "attention(q=2x40x2x16,kv=40x2x16,fp32,tf32x3,varlen=64x64)" in text
    assert "schedule_tiles: grid 3x1x1" in text
    assert str(flashtile.explain("attention(q=2x40x2x16,kv=40x2x16,fp32,tf32x3,varlen=64x64)", device="H100")).startswith("att")
    with pytest.raises(TypeError, match="cu_seqlens"):
        flashtile.explain(q, q, q, cu_seqlens=ends)


def test_the_words_of_every_tile_are_in_the_glossary() -> None:
    pytest.importorskip("triton")
    from flashtile.kernels.portable.tile import Launch, Products
    from flashtile.kernels.sm90.host.tile_backward import BackwardLaunch
    from flashtile.kernels.sm90.host.tile_forward import ForwardLaunch

    tiles = [
        ForwardLaunch(resident=True, apart=True),
        BackwardLaunch(parted=True, helps=True, pieces=2, joined=True, converts=True),
    ]
    tiles += [Launch(64, 64, products=products, held=1) for products in get_args(Products)]
    told = {word.partition("=")[0] for tile in tiles for word in tile.spell().split()[1:]}
    assert len(told) > 15
    text = (Path(__file__).parent.parent / "docs" / "glossary.md").read_text()
    assert told - set(re.findall(r"`([^`]+)`", text)) == set()


def test_statistics_are_explained() -> None:
    told: Any = flashtile.explain
    problem, asked = "attention(q=1x512x4x64,kv=512x4x64,bf16,band=:0)", ("lse", "max_logit", "entropy", Mass(last=64))
    made = dict(told(problem, device="H100", returns=asked).statistics)
    found = {what: len(plan.calls) for what, plan in made.items()}
    assert found == {"max_logit, entropy, beside out": 1, "mass, behind the forward": 1, "the entropy's gradient": 2}
    on_cpu = told(problem, device="cpu", returns="max_logit", options=Options(backend="cpu"))
    assert "max_logit, behind the forward: cpu" in str(on_cpu)
    assert "attention_mass" in str(told(problem, device="H100", returns=Mass()))
    assert not told(problem, device="H100", returns="lse").statistics
    dropped = told(problem.replace("bf16", "bf16,dropout=0.1"), device="H100", returns="max_logit").statistics
    assert [what for what, _ in dropped] == ["max_logit, behind the forward"]
    bias = told(problem.replace("band=:0", "score=bias(1x4x512x512:bf16:grad)"), device="H100", returns="entropy")
    assert "the entropy's gradient by bias's tensor is not implemented" in str(bias)
    with pytest.raises(InvalidProblem, match="returns has 'logit'"):
        told(problem, device="H100", returns="logit")
    with pytest.raises(InvalidProblem, match="returns is given besides a problem"):
        told("cached(attention(q=2x1x8x64,kv=1024x2x64,bf16,used=k),pages=128x16x64)", device="H100", returns="lse")
