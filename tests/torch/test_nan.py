"""NaN and Inf: visible ones propagate, invisible ones never leak."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from flashtile import Band, Bias, Document, KeyPadding, Options, Softcap, attention
from flashtile.problem.attention import PRECISIONS, Precision
from flashtile.problem.mask import make_mask
from flashtile.problem.options import Variant
from flashtile.reference.attention import visible
from tests.cases import Case, Tensors, lay_out
from tests.judge import run, run_clean

VALUES = [math.nan, math.inf, -math.inf]


def assert_same(case: Case, got: Tensors, clean: Tensors) -> None:
    """Bitwise, but where a GPU adds dq in any order."""
    assert got.keys() == clean.keys()
    for name, tensor in clean.items():
        if case.backward == "fused" and tensor.is_cuda:
            torch.testing.assert_close(got[name], tensor, rtol=1e-3, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}")
        else:
            torch.testing.assert_close(got[name], tensor, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


UNSEEN = (
    Case("first-keys", seqlen_q=20, seqlen_k=70, window=(10, 0)),
    Case("first-keys-scores", seqlen_q=20, seqlen_k=70, window=(10, 0), score=("softcap", "alibi")),
    Case("last-keys", seqlen_q=60, seqlen_k=60, mask=Band(right=-20), dtype="fp16"),
    Case("last-keys-of-a-tile", seqlen_q=40, seqlen_k=40, mask=Band(right=-3), heads_q=4, score=("alibi",)),
    Case("first-and-last", seqlen_q=40, seqlen_k=80, mask=Band(left=15, right=-9), dtype="bf16"),
)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("case", UNSEEN, ids=lambda case: case.name)
def test_keys_that_nobody_sees(backend: str, place: torch.device, variant: Variant, case: Case, value: float) -> None:
    case = replace(case, backward=variant)
    clean = case.tensors(place)
    keep = visible(make_mask(case.causal, case.window, case.mask), case.seqlen_q, case.seqlen_k, place)
    unseen = ~keep.any(0)
    assert unseen.any()
    dirty = {name: t.clone() for name, t in clean.items()}
    dirty["k"][:, unseen] = value
    dirty["v"][:, unseen] = value
    got = run(backend, case, dirty)
    assert_same(case, got, run_clean(backend, case, place))
    assert (got["dk"][:, unseen] == 0).all()
    assert (got["dv"][:, unseen] == 0).all()


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("score", [(), ("alibi", "softcap")], ids=str)
def test_queries_that_see_nothing(
    backend: str, place: torch.device, variant: Variant, score: tuple[str, ...], value: float
) -> None:
    case = Case("q", seqlen_q=55, seqlen_k=20, causal=True, score=score, backward=variant)
    clean = case.tensors(place)
    dirty = {name: t.clone() for name, t in clean.items()}
    dirty["q"][:, :35] = value
    got = run(backend, case, dirty)
    assert_same(case, got, run_clean(backend, case, place))
    assert (got["dq"][:, :35] == 0).all()


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_row_without_a_key_is_handed_reaches_nothing(
    backend: str, place: torch.device, variant: Variant, dtype: torch.dtype, value: float
) -> None:
    """Its lse is -inf, and a loss of that may hand NaN or Inf back."""
    q, k, v = (torch.randn(1, n, 2, 16, device=place).to(dtype).requires_grad_() for n in (16, 8, 8))
    out, lse = attention(q, k, v, causal=True, return_lse=True, options=Options(backend=backend, backward=variant))
    assert (out[:, :8] == 0).all()
    assert (lse[:, :, :8] == -math.inf).all()
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    clean = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse), retain_graph=True)
    dout[:, :8], dlse[:, :, :8] = value, value
    dirty = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    for got, exact in zip(dirty, clean, strict=True):
        torch.testing.assert_close(got, exact, rtol=0, atol=1e-5 if variant == "fused" and place.type == "cuda" else 0)
    assert (dirty[0][:, :8] == 0).all()


def test_a_bias_of_minus_infinity_hides_behind_a_softcap_and_not_before_it(backend: str, place: torch.device) -> None:
    """Before it, the softcap makes a score of minus the cap of it."""
    q, k, v = (torch.randn(1, 16, 2, 16, device=place) for _ in "qkv")
    bias = torch.zeros(1, 1, 16, 16, device=place)
    bias[:, :, 5] = -math.inf
    options = Options(backend=backend)
    assert (attention(q, k, v, score=(Softcap(5.0), Bias(bias)), options=options)[:, 5] == 0).all()
    seen = attention(q, k, v, score=(Bias(bias), Softcap(5.0)), options=options)[:, 5]
    torch.testing.assert_close(seen, v.mean(1))


@pytest.mark.parametrize("value", VALUES)
def test_what_predicates_hide(backend: str, place: torch.device, variant: Variant, value: float) -> None:
    """Keys that are padding, and queries whose document no key has, in the same tiles as others."""
    ids_q, ids_k = (torch.arange(n, device=place)[None] % 3 for n in (40, 50))
    ids_q = torch.where(ids_q == 2, 9, ids_q).int()
    there = torch.arange(50, device=place)[None] % 4 != 1
    mask = KeyPadding(there) & Document(ids_q, ids_k.int())
    hidden = {"q": ids_q == 9, "k": ~there | (ids_k == 2), "v": ~there | (ids_k == 2), "dout": ids_q == 9}
    clean = {name: torch.randn(1, 40 if name in ("q", "dout") else 50, 2, 16, device=place) for name in hidden}

    def made(given: Tensors) -> Tensors:
        leaves = {name: given[name].clone().requires_grad_() for name in "qkv"}
        options = Options(backend=backend, backward=variant)
        out, lse = attention(*leaves.values(), mask=mask, return_lse=True, options=options)
        gradients = torch.autograd.grad(out, list(leaves.values()), given["dout"])
        return {"out": out.detach(), "lse": lse.detach(), **{f"d{n}": g for n, g in zip("qkv", gradients, strict=True)}}

    dirty = {name: tensor.masked_fill(hidden[name][..., None, None], value) for name, tensor in clean.items()}
    dirty["dout"] = clean["dout"]
    assert_same(Case("hidden", backward=variant), made(dirty), made(clean))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_keys_beyond_the_end_beside_large_negative_scores(
    backend: str, place: torch.device, variant: Variant, dtype: torch.dtype
) -> None:
    """exp(0 - lse), of a key that is none, is not finite."""
    q, k = (torch.full((1, n, 1, 16), x, dtype=dtype, device=place) for n, x in ((17, 8.0), (19, -8.0)))
    leaves = [t.requires_grad_() for t in (q, k, torch.randn(1, 19, 1, 16, device=place).to(dtype))]
    out = attention(*leaves, scale=1.0, options=Options(backend=backend, backward=variant))
    torch.testing.assert_close(out, leaves[2].mean(1, keepdim=True).expand_as(out))
    for gradient in torch.autograd.grad(out.sum(), leaves):
        assert gradient.isfinite().all()


def test_storage_outside_the_view(backend: str, place: torch.device, variant: Variant) -> None:
    case = Case("gaps", causal=True, score=("alibi",), head_dim=5, head_dim_v=24, backward=variant)
    dirty = {name: lay_out(t, "gaps") for name, t in case.tensors(place).items()}
    clean = {name: filled(t) for name, t in dirty.items()}
    assert_same(case, run(backend, case, dirty), run(backend, case, clean))


def filled(tensor: torch.Tensor) -> torch.Tensor:
    """The same layout in a storage whose NaN are replaced by numbers."""
    memory = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    assert memory.isnan().any()
    return memory.nan_to_num(3.0).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_visible_values_propagate(backend: str, place: torch.device, name: str, value: float) -> None:
    """Into the rows that see them, and no others."""
    case = Case("visible", seqlen_q=40, seqlen_k=40, heads_q=2, heads_kv=2)
    clean = case.tensors(place)
    dirty = {key: t.clone() for key, t in clean.items()}
    dirty[name][:, 30, 1, 3] = value
    got, calm = run(backend, case, dirty), run_clean(backend, case, place)
    torch.testing.assert_close(got["out"][:, :, 0], calm["out"][:, :, 0], rtol=0, atol=0)
    strange = ~got["out"][:, :, 1].isfinite()
    if name == "q":
        assert strange[:, 30].all()
        assert not strange[:, torch.arange(40, device=place) != 30].any()
    elif name == "v":
        assert strange[:, :, 3].all()
        assert not strange[:, :, torch.arange(16, device=place) != 3].any()
    elif math.isnan(value):
        assert strange.all()
    else:  # the score is +inf or -inf by the sign of q: +inf gives NaN, -inf is a key of weight 0
        expected = (clean["q"][:, :, 1, 3] * value) == math.inf
        assert torch.equal(strange.all(-1), expected)
        assert torch.equal(strange.any(-1), expected)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", ["k", "v"])
def test_what_some_queries_see(backend: str, place: torch.device, name: str, value: float, dtype: str) -> None:
    """In k it reaches no out of a query that does not see the key; in v it may, within the item and head (0 times NaN)."""
    case = Case("some", batch=2, seqlen_q=40, seqlen_k=40, causal=True, heads_q=2, heads_kv=2, dtype=dtype, upstream="out")
    clean = case.tensors(place)
    dirty = {key: t.clone() for key, t in clean.items()}
    dirty[name][0, 30, 1] = value
    got, calm = run(backend, case, dirty), run_clean(backend, case, place)
    first = 30 if name == "k" else 0
    for out in (got["out"], calm["out"]):
        out[0, first:, 1] = 0.0
    torch.testing.assert_close(got["out"], calm["out"], rtol=0, atol=0)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_visible_nan_reaches_the_gradients(
    backend: str, place: torch.device, variant: Variant, name: str, precision: Precision
) -> None:
    case = Case("gradients", seqlen_q=40, seqlen_k=40, causal=True, heads_q=1, backward=variant, precision=precision)
    dirty = case.tensors(place)
    dirty[name].view(torch.int32)[0, 20, 0, 3] = -1  # a NaN all of whose bits are set: an addition to them wraps around
    got = run(backend, case, dirty)
    reached = {"q": ("dq", "dk"), "k": ("dq", "dk"), "v": ("dq",), "dout": ("dq", "dk", "dv")}[name]
    assert all(got[grad].isnan().any() for grad in reached)


def test_a_poisoned_slope_reaches_its_head_alone(backend: str, place: torch.device) -> None:
    case = replace(Case("slope", score=("alibi",), heads_q=2), upstream="out")
    clean = case.tensors(place)
    dirty = {**clean, "score.0": clean["score.0"].clone()}
    dirty["score.0"][1] = math.nan
    got, calm = run(backend, case, dirty), run_clean(backend, case, place)
    assert got["out"][:, :, 1].isnan().all()
    torch.testing.assert_close(got["out"][:, :, 0], calm["out"][:, :, 0], rtol=0, atol=0)


SEQLEN, BAD = 40, 30


def nan_in(place: torch.device, bad: str, row: int) -> list[torch.Tensor]:
    """q, k, v of two items and two heads; NaN in one row of the first item's first head, of those that `bad` names."""
    made = [torch.randn(2, SEQLEN, 2, 16, device=place) for _ in "qkv"]
    for name, tensor in zip("qkv", made, strict=True):
        if name in bad:
            tensor[0, row, 0] = math.nan
    return [tensor.requires_grad_() for tensor in made]


@pytest.mark.parametrize(("bad", "reached"), [("q", [BAD]), ("k", list(range(BAD, SEQLEN)))])
def test_nan_reaches_out_of_the_queries_that_see_it(
    bad: str, reached: list[int], backend: str, place: torch.device, variant: Variant
) -> None:
    q, k, v = nan_in(place, bad, BAD)
    out = attention(q, k, v, causal=True, options=Options(backend=backend, backward=variant))
    assert out[0, :, 0].isnan().any(-1).nonzero().flatten().tolist() == reached
    for tensor in (out, *torch.autograd.grad(out.sum(), (q, k, v))):
        assert tensor[0, :, 0].isnan().any()
        assert not tensor[0, :, 1].isnan().any()  # the other head
        assert not tensor[1].isnan().any()  # the other item


@pytest.mark.parametrize("bad", ["kv", "qkv"])
def test_nan_in_padding(bad: str, backend: str, place: torch.device, variant: Variant) -> None:
    """By KeyPadding padded queries are computed, and reach dk and dv even with a dout of 0; by seqused nothing is read."""
    q, k, v = nan_in(place, bad, SEQLEN - 1)
    keep = torch.arange(SEQLEN, device=place).expand(2, -1) < SEQLEN - 1
    dout = torch.randn(2, SEQLEN, 2, 16, device=place)
    dout[:, SEQLEN - 1] = 0.0
    options = Options(backend=backend, backward=variant)
    out = attention(q, k, v, causal=True, mask=KeyPadding(keep), options=options)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    assert not out[:, :-1].isnan().any()
    assert not dq[:, :-1].isnan().any()
    for tensor in (out[:, -1], dq[:, -1], dk, dv):
        assert bool(tensor.isnan().any()) == ("q" in bad)
    out = attention(q, k, v, causal=True, seqused_q=keep, seqused_k=keep, options=options)
    for tensor in (out, *torch.autograd.grad(out, (q, k, v), dout)):
        assert not tensor.isnan().any()
