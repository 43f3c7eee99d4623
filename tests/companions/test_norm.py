"""The public norms: what the case list does not say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flashtile import InvalidProblem, NotSupported, ops
from flashtile.kernels.ops.catalogue import BACKENDS


@pytest.mark.parametrize("backend", BACKENDS)
def test_they_are_torch_s_norms(backend: str, place: torch.device) -> None:
    x, weight, bias = (torch.randn(*shape, device=place) for shape in ((2, 3, 24), (24,), (24,)))
    torch.testing.assert_close(ops.layer_norm(x, weight, bias, backend=backend), F.layer_norm(x, (24,), weight, bias))
    torch.testing.assert_close(ops.rms_norm(x, weight, backend=backend), F.rms_norm(x, (24,), weight, 1e-6))


@pytest.mark.parametrize("hidden", [100, 5000, 16384, 20000])
def test_equal_gradients_leave_a_layer_norm_nothing(hidden: int, place: torch.device) -> None:
    """Their mean is exact, in whatever order a GPU sums; what is left comes of the mean of the normalised row."""
    x = torch.randn(3, hidden, device=place, requires_grad=True)
    for dout in (1.2345678, -0.7654321, 3.1415927):
        (dx,) = torch.autograd.grad(ops.layer_norm(x), x, torch.full_like(x[:1, :1], dout).expand_as(x))
        assert dx.abs().max() < 2e-7 * abs(dout)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_is_the_mask_that_it_says(backend: str, place: torch.device) -> None:
    x, residual = torch.randn(2, 5, 66, device=place), torch.randn(2, 5, 66, device=place)
    dropout = ops.Dropout.draw(0.3, place)
    _, h = ops.layer_norm(x, residual=residual, dropout=dropout, prenorm=True, backend=backend)
    torch.testing.assert_close(h, x * dropout.mask(x.shape) / 0.7 + residual)
    branch = ops.Branch(x)
    _, h = ops.layer_norm(torch.zeros_like(x), branch=branch, dropout=dropout, prenorm=True, backend=backend)
    torch.testing.assert_close(h, x * dropout.mask(x.shape, branch=1) / 0.7)
    assert not torch.equal(dropout.mask(x.shape), dropout.mask(x.shape, branch=1))
    everything = ops.layer_norm(x, residual=residual, dropout=1.0, prenorm=True, backend=backend)[1]
    torch.testing.assert_close(everything, residual)


def test_dropout_keeps_as_many_as_it_should() -> None:
    kept = ops.Dropout(0.3, torch.tensor([7])).mask((400, 1000)).float()
    assert abs(kept.mean().item() - 0.7) < 0.003  # four standard deviations
    assert kept.mean(0).sub(0.7).abs().max() < 0.12
    assert kept.mean(1).sub(0.7).abs().max() < 0.08


@pytest.mark.parametrize("backend", BACKENDS)
def test_seeds_come_from_torch_s_generator(backend: str, place: torch.device) -> None:
    x = torch.randn(3, 40, device=place)
    made = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        made.append(ops.rms_norm(x, dropout=0.5, backend=backend))
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sum_s_gradient_of_stride_0(backend: str, place: torch.device) -> None:
    x = torch.randn(4, 40, device=place, requires_grad=True)
    (ops.layer_norm(x, eps=0.1, backend=backend) ** 2).sum().backward()
    (expected,) = torch.autograd.grad((F.layer_norm(x, (40,), eps=0.1) ** 2).sum(), x)
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_beyond_every_view_are_copied(backend: str, place: torch.device) -> None:
    """(..., hidden) whose leading axes no single stride walks."""
    x = torch.randn(3, 4, 24, device=place).transpose(0, 1)
    torch.testing.assert_close(ops.rms_norm(x, backend=backend), F.rms_norm(x, (24,), eps=1e-6))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_large_mean_costs_nothing(backend: str, place: torch.device) -> None:
    """The variance is of centred values, also of rows in several steps."""
    for hidden in (64, 40000):
        x = torch.randn(2, hidden, device=place) + 3000.0
        exact = F.layer_norm(x.double(), (hidden,))
        assert (ops.layer_norm(x, backend=backend) - exact).abs().max() < 3e-3  # x itself is exact to 1.2e-4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_a_bias_grow_with_its_rows(backend: str, dtype: torch.dtype, place: torch.device) -> None:
    """A sum in bfloat16 would stop at 256, as torch's own does on a CPU; 600 is a bfloat16 number."""
    x = torch.randn(600, 8, dtype=torch.bfloat16, device=place)
    weight, bias = (torch.ones(8, dtype=dtype, device=place, requires_grad=True) for _ in range(2))
    ops.layer_norm(x, weight, bias, backend=backend).sum().backward()
    torch.testing.assert_close(bias.grad, torch.full_like(bias, 600.0), rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(backend: str, dynamic: bool, place: torch.device) -> None:
    """One graph, whatever the sizes; the same bits as eager."""

    def function(x: torch.Tensor, weight: torch.Tensor) -> Any:
        return ops.rms_norm(x, weight, residual=x * 2, prenorm=True, dropout=0.2, backend=backend)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    weight = torch.ones(24, device=place, requires_grad=True)
    for rows in (2, 5, 7):
        x = torch.randn(rows, 3, 24, device=place, requires_grad=True)
        made = []
        for f in (function, compiled):
            torch.manual_seed(0)
            out, h = f(x, weight)
            made.append((out, h, *torch.autograd.grad(out.sum() + h.square().sum(), (x, weight))))
        for eager, traced in zip(*made, strict=True):
            assert torch.equal(eager, traced)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_repeat(backend: str, place: torch.device) -> None:
    x, weight = torch.randn(300, 40, device=place), torch.ones(40, device=place, requires_grad=True)
    made = [torch.autograd.grad(ops.rms_norm(x, weight, backend=backend).sum(), weight)[0] for _ in range(2)]
    assert torch.equal(*made)


def test_second_derivatives_are_right() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    found = []
    for norm, leaf in ((ops.rms_norm, x), (lambda x: x * (x.square().mean(-1, True) + 1e-5).rsqrt(), x.detach().double())):
        leaf.requires_grad_()
        (grad,) = torch.autograd.grad(norm(leaf).sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(leaf.square().sum() + grad.square().sum(), leaf)[0])
    torch.testing.assert_close(found[0].double(), found[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "op",
    [
        lambda x: ops.rms_norm(x, torch.ones(8)),
        ops.softmax,
        lambda x: ops.linear_act(x, torch.ones(4, 8)),
        lambda x: ops.cross_entropy(x, torch.tensor([0, 1, 2])),
        lambda x: ops.linear_cross_entropy(x, torch.ones(5, 8), torch.tensor([0, 1, 2])),
    ],
    ids=["rms_norm", "softmax", "linear_act", "cross_entropy", "linear_cross_entropy"],
)
def test_autograd_grad_hears_of_it_too(op: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """torch.autograd.grad visits no node that leads to nothing it was asked for: a penalty came out without its second part.

    Right, by differences, or refused.
    """
    x, factor = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)

    def penalty(factor: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad(op(x * factor).square().sum(), x, create_graph=True)
        return grad.square().sum() + factor.sum()

    try:
        (found,) = torch.autograd.grad(penalty(factor), factor)
    except NotSupported as refusal:
        if "the second derivative of" not in str(refusal):
            raise
        return
    step = 2e-3 * torch.randn(3, 8)
    moved = (penalty(factor + step) - penalty(factor - step)).item() / 2
    assert moved == pytest.approx((found * step).sum().item(), rel=0.02, abs=0.02 * float(found.norm() * step.norm()))


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


HOST = {"backend": "cpu"}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "x-list": ({"x": [1.0]}, "x is a list; it must be a torch.Tensor"),
    "x-scalar": ({"x": t()}, r"x has shape \(\); it must be \(..., hidden\)"),
    "x-int": ({"x": t(2, 8, dtype=torch.int64)}, "x is int64; it must be fp16 or bf16 or fp32"),
    "x-double": ({"x": t(2, 8, dtype=torch.float64)}, "x is torch.float64; it must be fp16 or bf16 or fp32"),
    "x-empty": ({"x": t(2, 0)}, "x must be there, with a last axis of at least 1"),
    "x-sparse": ({"x": t(2, 8).to_sparse()}, "x has layout torch.sparse_coo; it must be a strided"),
    "weight-meta": ({"weight": t(8).to("meta")}, "weight is on meta and others are on cpu; they must be on one device"),
    "weight-shape": ({"weight": t(7)}, r"weight has shape \(7,\); it must be \(hidden,\) = \(8,\)"),
    "weight-number": ({"weight": 1.0}, "weight is a float; it must be a torch.Tensor"),
    "bias-dtype": ({"bias": t(8, dtype=torch.int32)}, "bias is int32; it must be"),
    "residual-shape": ({"residual": t(3, 8)}, r"residual has shape \(3, 8\); it must be that of x, \(2, 8\)"),
    "eps-negative": ({"eps": -1.0}, "eps is -1.0; it must be finite, from 0.0"),
    "eps-text": ({"eps": "small"}, "eps is 'small'; it must be a number"),
    "eps-nan": ({"eps": float("nan")}, "eps is nan; it must be finite"),
    "dropout-above-1": ({"dropout": 1.5}, "^dropout is 1.5; it must be finite, from 0.0 to 1.0"),
    "dropout-true": ({"dropout": True}, "dropout is True; it must be a probability"),
    "dropout-seed": ({"dropout": ops.Dropout(0.5, t(1))}, "dropout.seed is fp32; it must be int64"),
    "prenorm-int": ({"prenorm": 1}, "prenorm is 1; it must be True or False"),
    "out_dtype": ({"out_dtype": torch.float64}, "out_dtype is torch.float64; it must be"),
    "out_dtype-int": ({"out_dtype": torch.int64}, "out_dtype is 'int64'; it must be one of fp16"),
    "rowscale-shape": ({"rowscale": t(3)}, r"rowscale has shape \(3,\); it must be \(rows,\) = \(2,\)"),
    "rowscale-grad": ({"rowscale": t(2).requires_grad_()}, "rowscale requires a gradient, which it does not have; detach it"),
    "branch-scale": ({"branch": ops.Branch(t(2, 8)), "colscale": t(8)}, "branch.x is given with scales or subsets"),
    "branch-bias": ({"branch": ops.Branch(bias=t(8))}, "branch.bias is given without branch.weight;"),
    "branch-shape": ({"branch": ops.Branch(t(3, 8))}, r"branch.x has shape \(3, 8\); it must be that of x, \(2, 8\)"),
    "branch-list": ({"branch": ops.Branch([1.0])}, "branch.x is a list; it must be a torch.Tensor"),  # type: ignore[arg-type]
    "rowscale-nan": ({"rowscale": float("nan")}, "rowscale is nan; it must be finite"),
    "branch-tensor": ({"branch": t(2, 8)}, "branch and subset must be a flashtile.ops.Branch"),
    "subset-shape": ({"subset": ops.Subset(out=t(3, dtype=torch.int32), out_rows=4)}, r"subset.out has shape \(3,\)"),
    "subset-rows": ({"subset": ops.Subset(out=t(2, dtype=torch.int32))}, "subset.out_rows is None; it must be given with"),
    "subset-beyond": ({"subset": ops.Subset(x=torch.tensor([1, 3])), **HOST}, "subset.x has the index 3; it must be from 0"),
    "subset-negative": (
        {"subset": ops.Subset(out=torch.tensor([-1, 1]), out_rows=2), **HOST}, "subset.out has the index -1; it must be from 0",
    ),
    "subset-twice": ({"subset": ops.Subset(x=torch.tensor([2, 2])), **HOST}, "subset.x has the index 2 twice"),
    "subset-float": ({"subset": ops.Subset(x=t(2))}, "subset.x is fp32; it must be int32 or int64"),
    "centered-alone": ({"zero_centered": True}, "zero_centered is True without a weight"),
    "backend": ({"backend": "hopper"}, "backend is 'hopper'; it must be one of triton, cpu, or None"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    arguments, message = BAD[name]
    with pytest.raises(InvalidProblem, match=message):
        ops.layer_norm(**{"x": t(2, 8), **arguments})


def test_bad_input_is_named_where_it_is_compiled() -> None:
    torch._dynamo.reset()
    with pytest.raises(InvalidProblem, match=r"x is torch\.float64; it must be fp16 or bf16 or fp32"):
        torch.compile(ops.layer_norm, backend="eager")(t(2, 8, dtype=torch.float64))
