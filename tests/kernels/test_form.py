"""How a problem's modifiers are applied: by what they add and a curve where that is possible, otherwise one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from flashtile.features.scores.softcap import Softcap, softcap_backward, softcap_forward
from flashtile.kernels.device.score import Form, chain, early, form_of
from flashtile.kernels.sm90.host.choose_backward import choose_backward
from flashtile.kernels.sm90.host.choose_forward import choose_forward
from flashtile.kernels.sm90.host.tile_backward import make_backward_tile
from flashtile.kernels.sm90.host.tile_forward import brought, copied
from flashtile.plan.device import H100, MI300X
from flashtile.problem.attention import AttentionProblem
from flashtile.triton_glue.language import INTERPRETED

ONE_BY_ONE = Form(prescale=True)


def problem(tail: str) -> AttentionProblem:
    return AttentionProblem.parse(f"attention(q=1x64x2x64,kv=64x2x64,{tail})")


@pytest.mark.parametrize(
    ("tail", "form"),
    [
        ("bf16", Form(False)),
        ("fp16,score=softcap(2.0)", Form(False, 0, True)),
        ("bf16,score=alibi(1x2:fp32)+alibi(1x2:fp32)", Form(False, 2)),
        ("bf16,score=alibi(1x2:fp32)+softcap(2.0)", Form(False, 1, True)),
        ("bf16,score=softcap(2.0)+alibi(1x2:fp32)", ONE_BY_ONE),
        ("bf16,score=softcap(2.0)+softcap(3.0)", ONE_BY_ONE),
        ("fp32,score=softcap(2.0)", ONE_BY_ONE),
        ("fp32", ONE_BY_ONE),
        ("bf16,scale=-1.0", ONE_BY_ONE),
        ("bf16,scale=0.0,score=alibi(1x2:fp32)", ONE_BY_ONE),
    ],
)
def test_the_form_of_a_problem(tail: str, form: Form) -> None:
    assert form_of(problem(tail)) == form_of(problem(tail), gradients=True) == form


def test_gradients_of_captured_tensors_need_scaled_scores() -> None:
    p = problem("bf16,score=alibi(1x2:fp32:grad)")
    assert form_of(p) == Form(False, 1)
    assert form_of(p, gradients=True) == ONE_BY_ONE


def test_the_functions_of_a_form() -> None:
    p, curve = problem("fp16,score=softcap(2.0)"), Softcap.curve
    assert curve is not None
    coarse = curve.function if INTERPRETED else curve.approximate
    assert chain(p, H100, form_of(p)) == (coarse, curve.derivative, curve.width)
    assert chain(replace(p, returns_lse=True), H100, form_of(p)) == (curve.function, curve.derivative, curve.width)
    assert chain(p, MI300X, form_of(p))[0] is curve.function
    assert chain(p, H100, ONE_BY_ONE) == (softcap_forward, softcap_backward)


@pytest.mark.parametrize(
    ("score", "which"),
    [
        ("bias(1x2x64x64:fp16)", 0),
        ("alibi(1x2:fp32)+bias(1x1x1x64:bf16)+bias(1x2x64x64:bf16)+bias(1x2x64x64:bf16)", 2),
        ("bias(1x2x64x64:fp32)+bias(1x1x1x64:bf16)", 1),
        ("bias(1x2x64x1:bf16)", None),
        ("softcap(2.0)+bias(1x2x64x64:bf16)", None),
    ],
)
def test_the_modifier_that_may_be_loaded_ahead(score: str, which: int | None) -> None:
    p = problem(f"bf16,score={score}")
    assert early(p, form_of(p)) == which


@pytest.mark.parametrize(
    ("problem", "which", "forward", "backward", "late"),
    [
        ("q=1x64x2x128,kv=64x2x128,bf16,score=bias(1x1x64x64:fp16)", 0, True, 0, False),
        ("q=1x64x2x64,kv=64x2x64,bf16,score=alibi(1x2:fp32)+bias(1x2x64x64:bf16)", 1, True, 1, False),
        ("q=1x64x2x128,kv=64x2x128,bf16,score=bias(1x2x64x64:bf16)+bias(1x2x64x64:bf16)", 0, True, 0, True),
        ("q=1x64x2x128,kv=64x2x128,bf16,score=bias(1x2x64x64:bf16)+softcap(2.0)", 0, True, -1, True),
        ("q=1x64x2x256,kv=64x2x256,bf16,score=bias(1x2x64x64:bf16)", 0, True, -1, True),
        ("q=1x64x2x128,kv=65x2x128,bf16,score=bias(1x2x64x65:bf16)", -1, False, -1, True),
        ("q=1x64x2x128,kv=64x2x128,bf16,used=k,score=bias(1x2x64x64:bf16)", -1, False, -1, True),
        ("q=1x64x2x128,kv=64x2x128,bf16,score=bias(1x2x64x64:fp32)", -1, False, -1, True),
        ("q=1x64x2x128,kv=64x2x128,bf16,score=bias(1x2x1x64:bf16)", -1, False, -1, False),
    ],
)
def test_the_tensor_that_hopper_s_copy_engine_brings(
    problem: str, which: int, forward: bool, backward: int, late: bool
) -> None:
    p = AttentionProblem.parse(f"attention({problem})")
    form, launch = form_of(p), choose_backward(p, H100)
    tile = make_backward_tile(p, launch, form)
    assert (copied(p, form), brought(p, choose_forward(p, H100), form)) == (which, forward)
    assert (tile.modifiers.early, tile.modifiers.late) == (backward, late)
