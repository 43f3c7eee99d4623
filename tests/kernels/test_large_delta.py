"""Backwards of large 16-bit problems, which apply modifiers in other forms, and do not correct delta by the keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashtile
from flashtile import Options
from flashtile.reference.attention import attention_reference
from tests.cases import CASES, Case
from tests.judge import FACTOR, expected, judge, measure, run

pytestmark = pytest.mark.usefixtures("nothing_small")


@pytest.mark.parametrize(("head_dim_v", "keys"), [(24, 40), (512, 16)])
def test_delta_has_every_column_and_the_gradient_of_lse(
    head_dim_v: int, keys: int, backend: str, variant: str, place: torch.device
) -> None:
    q, k, v = (torch.randn(1, n, 2, d, device=place) for n, d in ((20, 16), (keys, 16), (keys, head_dim_v)))
    inputs = [t.to(torch.float16) for t in (q, k, v + 1.0)]
    dout, dlse = torch.randn(1, 20, 2, head_dim_v, device=place).half(), torch.randn(1, 2, 20, device=place) * 8.0
    leaves = [t.clone().requires_grad_() for t in inputs]
    options = Options(backend=backend, backward=variant)  # pyright: ignore[reportArgumentType]
    out, lse = flashtile.attention(*leaves, return_lse=True, options=options)
    made = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    wide = [t.double().requires_grad_() for t in inputs]
    exact = torch.autograd.grad(attention_reference(*wide), wide, (dout.double(), dlse.double()))
    plain = [t.clone().requires_grad_() for t in inputs]
    scores = torch.einsum("bihd,bjhd->bhij", *plain[:2]) * 0.25
    formed = torch.einsum("bhij,bjhd->bihd", scores.softmax(3), plain[2])
    theirs = torch.autograd.grad((formed, scores.logsumexp(3)), plain, (dout, dlse.half()))
    for name, mine, other, true in zip("qkv", made, theirs, exact, strict=True):
        allowed = FACTOR * (other.double() - true).abs().max() + 2.0 * 2.0**-10 * true.abs().max()
        assert (mine.double() - true).abs().max() <= allowed, name


# Curves and sums on the raw product, and rows of two keys, whose delta is a sum.
NAMES = [f"{score}-fp16-{how}" for score in ("softcap", "alibi", "bias") for how in ("split", "fused")]
FORMS = [
    *(case for case in CASES if case.name in NAMES),
    *(Case(f"two-keys-{how}", window=(1, 0), dtype="fp16", backward=how) for how in ("split", "fused")),
]


@pytest.mark.parametrize("case", FORMS, ids=[case.name for case in FORMS])
def test_forms_of_modifiers_that_small_problems_do_not_have(case: Case, place: torch.device) -> None:
    tensors = case.tensors(place)
    judge(case, run("triton", case, tensors), *expected(case, case.tensors(place)))


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize(("backend", "variant"), [("triton", "split"), ("triton", "fused")])
def test_slopes_do_not_feel_what_delta_is_off_by(backend: str, variant: str, dtype: str, place: torch.device) -> None:
    """Far from the diagonal every row adds what its delta is off by, times its distances: sums per head are corrected after."""
    case = Case("large-slopes", seqlen_q=96, seqlen_k=16, score=("alibi",), dtype=dtype, upstream="out")
    case = replace(case, backward=variant)  # pyright: ignore[reportArgumentType]
    tensors = case.tensors(place)
    result, (truth, plain) = run(backend, case, tensors), expected(case, tensors)
    error = measure("dscore.0", case, result["dscore.0"], truth["dscore.0"], plain["dscore.0"])
    assert error.largest <= 0.1 * error.plain_largest


# Cut (both sides 1,024 or more) and aligned parts; a sink, whose value is 0; keys that begin and end with a tile's own.
CENTERED = [
    Case("mean-aligned", heads_q=2, heads_kv=1, seqlen_q=40, seqlen_k=140),
    Case("mean-window-sink", seqlen_q=40, seqlen_k=140, window=(20, 9), sink="fp32"),
    Case("mean-cut", heads_q=1, heads_kv=1, seqlen_q=20, seqlen_k=140),
]


@pytest.mark.parametrize("case", CENTERED, ids=[case.name for case in CENTERED])
@pytest.mark.parametrize(("backend", "variant"), [("triton", "fused")])
def test_a_large_mean_of_values_rounds_neither_out_nor_what_is_made_of_it(
    case: Case, backend: str, variant: str, place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum of values of 64 has roundings of its size; out and delta, which is made of it, need not have them."""
    monkeypatch.setattr(
        "flashtile.kernels.portable.choose.products", lambda *_: "cut" if case.name == "mean-cut" else "aligned"
    )
    case = replace(case, batch=1, head_dim=16, head_dim_v=16, dtype="fp32", upstream="out")
    case = replace(case, backward=variant)  # pyright: ignore[reportArgumentType]
    tensors = case.tensors(place)
    tensors["v"].data += 64.0
    result, (truth, plain) = run(backend, case, tensors), expected(case, tensors)
    judge(case, result, truth, plain)
    errors = {name: measure(name, case, result[name], truth[name], plain[name]) for name in ("out", "dq")}
    assert errors["out"].largest <= 0.5 * errors["out"].plain_largest
    least = FACTOR if case.name == "mean-cut" else 1.0  # of 20 rows; processors sum plain ones in orders of their own
    assert errors["dq"].largest <= least * errors["dq"].plain_largest


def test_nothing_that_is_hidden_decides_what_is_taken_off_the_values(
    place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys behind an item's last one hold anything; the mean of all of them would show in the last bits."""
    monkeypatch.setattr("flashtile.kernels.portable.choose.products", lambda *_: "aligned")
    q, k, v = (torch.rand(1, n, 1, 16, device=place) for n in (20, 30, 30))
    used = torch.tensor([9], dtype=torch.int32, device=place)
    options = Options(backend="triton")
    outs = []
    for fill in (0.0, 1e30, float("nan")):
        v = torch.cat([v[:, :9], torch.full_like(v[:, 9:], fill)], 1)
        outs.append(flashtile.attention(q, k, v, seqused_k=used, options=options))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
