"""The reference itself: against torch's own attention, against a loop, and by gradcheck."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from flashtile import Alibi, Band, Softcap
from flashtile.reference.attention import _product, attention_plain, attention_reference


def inputs(
    batch: int, seqlen_q: int, seqlen_k: int, heads_q: int, heads_kv: int, head_dim: int, head_dim_v: int
) -> list[torch.Tensor]:
    shapes = ((seqlen_q, heads_q, head_dim), (seqlen_k, heads_kv, head_dim), (seqlen_k, heads_kv, head_dim_v))
    return [torch.randn(batch, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("causal", [False, True])
def test_it_agrees_with_torch(causal: bool) -> None:
    q, k, v = inputs(2, 9, 9, 6, 2, 8, 5)
    out, _ = attention_reference(q, k, v, causal=causal)
    theirs = scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(out, theirs.transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_it_agrees_with_the_definition_written_as_loops() -> None:
    q, k, v = (t.detach() for t in inputs(1, 5, 7, 2, 1, 3, 2))
    slopes, band, cap = torch.tensor([0.5, 0.25]), Band(left=2, right=1), 1.5
    out, lse = attention_reference(q, k, v, mask=band, score=(Softcap(cap), Alibi(slopes)), scale=0.7)
    for head in range(2):
        for i in range(5):
            terms = {}
            for j in range(7):
                if i + 2 - 2 <= j <= i + 2 + 1:
                    s = cap * math.tanh(0.7 * float(q[0, i, head] @ k[0, j, 0]) / cap)
                    terms[j] = s - float(slopes[head]) * abs(i + 2 - j)
            total = sum(math.exp(s) for s in terms.values())
            assert lse[0, head, i].item() == pytest.approx(math.log(total), abs=1e-12)
            expected = sum(math.exp(s) / total * v[0, j, 0] for j, s in terms.items())
            torch.testing.assert_close(out[0, i, head], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seqlen_q", [3, 6])
def test_gradcheck(seqlen_q: int) -> None:
    q, k, v = inputs(1, seqlen_q, 4, 2, 1, 3, 2)
    slopes = torch.rand(1, 2, dtype=torch.float64, requires_grad=True)

    def function(*leaves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attention_reference(*leaves[:3], causal=True, score=(Softcap(2.0), Alibi(leaves[3])))
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    assert torch.autograd.gradcheck(function, (q, k, v, slopes))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "mask"), [(6, 3, Band(right=0)), (4, 4, Band(right=-9)), (4, 0, Band())])
def test_rows_that_see_nothing(seqlen_q: int, seqlen_k: int, mask: Band) -> None:
    q, k, v = inputs(2, seqlen_q, seqlen_k, 2, 2, 4, 4)
    out, lse = attention_reference(q, k, v, mask=mask)
    empty = lse[0, 0] == -math.inf
    assert empty.sum() == {3: 3, 4: 4, 0: 4}[seqlen_k]
    assert (out[:, empty] == 0).all()
    (out.sum() + lse.masked_fill(lse == -math.inf, 0.0).sum()).backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))
    assert (q.grad[:, empty] == 0).all()


def test_what_nobody_sees_does_not_matter() -> None:
    q, k, v = inputs(1, 3, 6, 1, 1, 4, 4)
    results = []
    for value in (0.0, math.nan):
        leaves = [t.detach().clone() for t in (q, k, v)]
        leaves[1][:, :2] = leaves[2][:, :2] = value
        leaves = [t.requires_grad_() for t in leaves]
        out, lse = attention_reference(*leaves, window=(1, 0))
        (out.sum() + lse.sum()).backward()
        results.append([out, lse, *(t.grad for t in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_plain_stays_in_its_dtype() -> None:
    q, k, v = (t.detach().half() for t in inputs(1, 5, 5, 2, 1, 8, 8))
    out, lse = attention_plain(q, k, v, causal=True, score=(Alibi(torch.rand(2)),))
    assert out.dtype == lse.dtype == torch.float16
    exact, _ = attention_reference(q, k, v, causal=True)
    assert exact.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_16_bits_err_as_pytorch_s_do(dtype: torch.dtype) -> None:
    a, b, arriving = (torch.randn(2, *shape).to(dtype) for shape in ((50, 64), (64, 70), (50, 70)))
    found = []
    for multiply in (_product, torch.matmul):
        leaves = a.clone().requires_grad_(), b.clone().requires_grad_()
        found.append([(made := multiply(*leaves)).detach(), *torch.autograd.grad(made, leaves, arriving)])
    exact = a.double() @ b.double(), arriving.double() @ b.double().mT, a.double().mT @ arriving.double()
    for mine, torch_s, true in zip(*found, exact, strict=True):
        assert mine.dtype == dtype
        assert (mine != torch_s).float().mean() < 0.01  # float32 sums in another order, seldom rounded otherwise
        assert (mine - true).abs().max() <= 1.01 * (torch_s - true).abs().max()
