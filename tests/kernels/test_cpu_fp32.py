"""How exact the CPU backend is in float32: long rows by the accuracy rule, and what it takes to keep it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import flashtile
from flashtile import Alibi, Options
from flashtile.kernels.cpu import distance, peaked, products, tiled
from flashtile.reference.attention import attention_plain, attention_reference
from tests.cases import Case, lay_out
from tests.judge import expected, judge, run
from tests.kernels.cpu_calls import OPTIONS, PLACE, inputs, step


def _long() -> Iterator[Case]:
    """Rows of thousands of keys, which take Triton's interpreter too long for `tests/cases.py`."""
    base = Case("long", seqlen_q=2048, seqlen_k=2048, heads_q=1, head_dim=64, upstream="out", precision="ieee")
    for causal in (False, True):
        one = replace(base, causal=causal)
        name = "long-causal" if causal else "long"
        for dim in (16, 64, 128):
            yield replace(one, name=f"{name}-{dim}", head_dim=dim)
            yield replace(one, name=f"{name}-softcap-{dim}", head_dim=dim, score=("softcap30",))
            yield replace(one, name=f"{name}-alibi-{dim}", head_dim=dim, score=("alibi",), fixed_slopes=True)
        yield replace(one, name=f"{name}-lse", upstream="both")
        yield replace(one, name=f"{name}-softcap-lse", score=("softcap30",), upstream="both")
        yield replace(one, name=f"{name}-window", window=(256, None if causal else 256))
        yield replace(one, name=f"{name}-narrow-window", window=(16, None if causal else 16), head_dim=32)
        yield replace(one, name=f"{name}-large-scores", scale=1.0)
        yield replace(one, name=f"{name}-gqa", seqlen_q=1024, heads_q=2)
        yield replace(one, name=f"{name}-bias", score=("bias-keys",))
        yield replace(one, name=f"{name}-sink", sink="fp32", fixed_slopes=True)
        yield replace(one, name=f"{name}-head_dim_v", head_dim_v=40)
        yield replace(one, name=f"{name}-varlen", cu_q=(0, 600, 2048), cu_k=(0, 500, 2048))
        yield replace(one, name=f"{name}-padded", used_k=(2000,), used_q=(1990,))
        yield replace(one, name=f"{name}-document", mask="document", seqlen_q=1024, seqlen_k=1024)
    yield replace(base, name="long-4096", seqlen_q=512, seqlen_k=4096)


LONG: tuple[Case, ...] = tuple(_long())


@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_long_rows(case: Case) -> None:
    tensors = case.tensors(PLACE)
    judge(case, run("cpu", case, tensors), *expected(case, tensors))


@pytest.mark.parametrize("how", [{}, {"heads_q": 2}, {"seqlen_q": 1}, {"seqlen_k": 9}, {"batch": 1, "seqlen_k": 700}], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_torch_s_own_bits_forward_and_backward(causal: bool, how: dict[str, int]) -> None:
    """The first call, and the ones after it, which ask less; laid as torch has it, and as ours. Of one key dq and dk are 0,
    which torch's kernel rounds.
    """
    sizes: dict[str, Any] = {"batch": 2, "seqlen_q": 130, "seqlen_k": 130, **how}
    if causal and sizes["seqlen_q"] != sizes["seqlen_k"]:
        sizes["seqlen_k"] = sizes["seqlen_q"]
    q, k, v, dout = inputs(**sizes)
    ours, theirs = ([t.detach().requires_grad_() for t in (q, k, v)] for _ in range(2))
    sdpa: Any = torch.nn.functional.scaled_dot_product_attention
    want = sdpa(*(t.transpose(1, 2) for t in theirs), is_causal=causal, enable_gqa=True).transpose(1, 2)
    wanted = [want, *torch.autograd.grad(want, theirs, dout)]
    if sizes["seqlen_k"] == 1:
        wanted[1:3] = map(torch.zeros_like, wanted[1:3])
    for layout in ("bshd", "bshd", "bhsd"):
        leaves = [lay_out(t.detach(), layout).requires_grad_() for t in ours]
        out = flashtile.attention(*leaves, causal=causal, options=OPTIONS)
        for got, exact in zip((out, *torch.autograd.grad(out, leaves, dout)), wanted, strict=True):
            assert torch.equal(got, exact)


def test_a_subset_of_gradients_and_any_that_arrives() -> None:
    q, k, v, _ = inputs(1, 40, 40)
    for _ in range(3):
        leaves = [q, k.detach().requires_grad_(), v]
        flashtile.attention(*leaves, options=OPTIONS).sum().backward()
        assert leaves[1].grad is not None
        exact = k.double().requires_grad_()
        attention_reference(q.double(), exact, v.double())[0].sum().backward()
        torch.testing.assert_close(leaves[1].grad.double(), exact.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("seqlen", [1, 3, 7, 15, 16, 40])
@pytest.mark.parametrize("precision", ["tf32x3", "ieee"])
def test_nan_reaches_what_it_reaches_in_plain_torch(precision: Any, seqlen: int, name: str) -> None:
    """At every call of a layout, also where rows are shorter than a vector register."""
    how, given = {"options": Options(backend="cpu", precision=precision)}, inputs(1, seqlen, seqlen, 2, 2)
    infinite = (math.inf, -math.inf) if seqlen > 1 else ()  # a row whose scores are all -inf is one that sees nothing
    for bad in (None, math.nan, *infinite):
        leaves = [t.clone() for t in given[:3]]
        if bad is not None:
            leaves["qkv".index(name)][0, seqlen // 2, 0, 3] = bad
        results: list[tuple[torch.Tensor, ...]] = []
        for function, extra in ((flashtile.attention, how), (lambda *qkv: attention_plain(*qkv)[0], {})):
            mine = [t.clone().requires_grad_() for t in leaves]
            out = function(*mine, **extra)
            results.append((out, *torch.autograd.grad(out, mine, given[3])))
        for got, plain in zip(*results, strict=True):
            assert (~got.isfinite()).ge(~plain.isfinite()).all()
            assert got.isfinite()[:, :, 1].all()
            if bad is None:
                torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_scores_that_torch_s_lse_is_too_coarse_for(causal: bool) -> None:
    """Of such items tiles compute the backward; the others have torch's bits."""
    q, k, v, dout = inputs(2, 150, 150, head_dim=32)
    calm = [t.detach().requires_grad_() for t in (q, k, v)]
    small = torch.autograd.grad(flashtile.attention(*calm, causal=causal, options=OPTIONS), calm, dout)
    q[1] *= 300.0
    leaves, exact = ([t.to(dtype).requires_grad_() for t in (q, k, v)] for dtype in (torch.float32, torch.float64))
    for _ in range(2):
        found = torch.autograd.grad(flashtile.attention(*leaves, causal=causal, options=OPTIONS), leaves, dout)
        truth = torch.autograd.grad(attention_reference(*exact, causal=causal)[0], exact, dout.double())
        for got, want, before in zip(found, truth, small, strict=True):
            assert torch.equal(got[0], before[0])
            assert (got - want)[1].abs().max() <= 1e-3 * want[1].abs().max()


def test_lse_of_many_keys_has_its_gradient() -> None:
    """Torch's kernels have none: tiles compute it, of torch's own out and lse."""
    case = Case("many", seqlen_q=40, seqlen_k=300)
    tensors = case.tensors(PLACE)
    judge(case, run("cpu", case, tensors), *expected(case, tensors))


STRICT = Options(backend="cpu", precision="ieee")


@pytest.mark.parametrize("causal", [False, True])
def test_strict_sums_give_torch_s_own_bits_in_most_rows(causal: bool) -> None:
    q, k, v, _ = inputs(2, 600, 600)
    q[1, 500, 2] *= 8.0  # a row that few keys decide
    given = [t.transpose(1, 2) for t in (q, k, v)]
    theirs = torch.nn.functional.scaled_dot_product_attention(
        given[0], given[1], given[2], is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
    out = flashtile.attention(q, k, v, causal=causal, options=STRICT)
    torch.testing.assert_close(out, theirs, rtol=1e-5, atol=1e-5)
    again = (out != theirs).any(3)
    assert again[1, 500, 2]
    assert again[:, peaked.FIRST_ROWS if causal else 0 :].sum(1).max() <= peaked.LEAST_ROWS


@pytest.mark.parametrize("causal", [False, True])
def test_the_gradients_of_large_scores(causal: bool) -> None:
    """An item's large scores cost other items nothing, not even a bit."""
    case = Case("large", 2, 600, 600, head_dim=32, causal=causal, upstream="out", precision="ieee")
    tensors = case.tensors(PLACE)
    small = run("cpu", case, tensors)
    tensors["q"][1] *= 6.0
    result = run("cpu", case, tensors)
    judge(case, result, *expected(case, tensors))
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert torch.equal(result[name][0], small[name][0])


@pytest.mark.parametrize("head_dim", [16, 64, 100, 256])
def test_scores_are_more_exact_than_a_product_s(head_dim: int) -> None:
    """Of a query and keys near it, whose partial sums grow evenly."""
    k = torch.randn(1, 200, head_dim)
    q = k + 0.5 * torch.randn_like(k)
    exact = (q.double() @ k.double().mT).diagonal(dim1=1, dim2=2)
    errors = [
        (made.diagonal(dim1=1, dim2=2) - exact).square().mean().sqrt()
        for made in (products.Scratch(exact=True).product("scores", q, k.mT), torch.bmm(q, k.mT))
    ]
    assert errors[0] <= 0.7 * errors[1]


def test_sums_over_keys_are_more_exact_than_a_product_s() -> None:
    a, b = torch.rand(1, 64, 1000), torch.randn(1, 1000, 32)
    exact, made = a.double() @ b.double(), torch.zeros(1, 64, 32)
    products.Scratch(exact=True).add_product(made, a, b, 64)
    assert (made - exact).square().mean() <= 0.5 * (torch.bmm(a, b) - exact).square().mean()


def test_gradients_of_one_column_are_no_less_exact_than_plain_pytorch_s() -> None:
    """A product of one column adds up its terms one by one, and so was off by 1.3 times plain PyTorch's error, in median."""
    ratios: list[float] = []
    for seed in range(15):
        torch.manual_seed(seed)
        q, k, v, dout = (torch.randn(2, n, 2, d) for n, d in ((100, 1), (300, 1), (300, 64), (100, 64)))
        exact, plain, mine = (
            [t.to(dtype).requires_grad_() for t in (q, k, v)] for dtype in (torch.float64, *[torch.float32] * 2)
        )
        out = flashtile.attention(*mine, options=OPTIONS)
        (got,) = torch.autograd.grad(out, mine[:1], dout)
        (want,) = torch.autograd.grad(attention_reference(*exact)[0], exact[:1], dout.double())
        (other,) = torch.autograd.grad(attention_plain(*plain)[0], plain[:1], dout)
        ratios.append(((got - want).abs().amax() / (other - want).abs().amax()).item())
    assert sorted(ratios)[7] < 1.0


def test_tiles_that_alibi_puts_out_of_reach_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    given, score = inputs(1, 1100, 1100), (Alibi(torch.tensor([0.5, 0.25, 0.5, 0.25])),)
    exponentials: list[int] = []
    exp = tiled._hidden_exp_

    def counted(*args: Any) -> torch.Tensor:
        exponentials[-1] += 1
        return exp(*args)

    monkeypatch.setattr(tiled, "_hidden_exp_", counted)
    results = []
    for leaves_out in (True, False):
        if not leaves_out:
            monkeypatch.setattr(distance.Reach, "misses", lambda *_: False)
        exponentials.append(0)
        results.append(step(*given, score=score))
    assert exponentials[0] < 0.8 * exponentials[1]
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["k", "v", "dout"])
def test_nan_is_seen_from_afar(name: str) -> None:
    """Where plain PyTorch multiplies it by a probability of 0."""
    given = inputs(1, 1100, 1100)
    given["qkv".index(name) if name in "qkv" else 3][0, 0] = math.nan
    out, _, dq, _, dv = step(*given, score=(Alibi(torch.full((4,), 0.5)),))
    if name == "dout":
        assert dv[0, -1].isnan().all()
    else:
        assert out[0, -1].isnan().any()
        assert dq[0, -1].isnan().any()


@pytest.mark.parametrize("case", [
    Case("slopes", 2, 300, 280, heads_q=4, head_dim=64, score=("alibi",)),
    Case("capped-slopes", 1, 300, 280, heads_q=2, head_dim=32, causal=True, score=("softcap30", "alibi")),
    Case("sink", 2, 119, 393, heads_q=2, head_dim=32, sink="fp32"),
], ids=lambda case: case.name)  # fmt: skip
def test_one_sum_per_head_is_rounded_once_in_small_problems(case: Case) -> None:
    tensors = case.tensors(PLACE)
    found, (exact, _) = run("cpu", case, tensors), expected(case, tensors)
    sums = [name for name in found if name.startswith(("dscore", "dsink"))]
    assert sums
    for name in sums:
        assert (found[name] - exact[name]).abs().max() <= 2.0**-23 * exact[name].abs().max(), name
