"""flashtile.nn: the modules are the functions, with parameters."""

from __future__ import annotations

import copy

import pytest
import torch

from flashtile import nn, ops


def test_norms() -> None:
    x, residual = torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    for module, function in ((nn.LayerNorm(16), ops.layer_norm), (nn.RMSNorm(16, bias=True), ops.rms_norm)):
        torch.nn.init.normal_(module.weight)
        out = function(x, module.weight, module.bias, module.eps, residual=residual)
        torch.testing.assert_close(module(x, residual), out)
        out.sum().backward()
        assert module.weight.grad is not None
        module.reset_parameters()
        torch.testing.assert_close(module(x), function(x, eps=module.eps))


def test_norms_drop_while_training() -> None:
    x = torch.ones(2, 64)
    module = nn.RMSNorm(64, dropout_p=0.5, prenorm=True, zero_centered=True)
    assert (module(x)[1] == 0).any()
    assert torch.equal(module.eval()(x)[1], x)
    assert "dropout_p=0.5" in repr(module)


def test_mlp() -> None:
    x = torch.randn(2, 3, 8)
    module = nn.MLP(8, recompute=True)
    expected = module.fc2(torch.nn.functional.gelu(module.fc1(x), approximate="tanh"))
    torch.testing.assert_close(module(x), expected)
    module(x).square().sum().backward()
    grads = [p.grad for p in module.parameters()]
    for grad, true in zip(grads, torch.autograd.grad(expected.square().sum(), list(module.parameters())), strict=True):
        assert grad is not None
        torch.testing.assert_close(grad, true, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compiles", [False, True])
def test_products_under_autocast(compiles: bool) -> None:
    """In its dtype, as torch's own linear: float32 and the other one of 16 bits; a call outside is as it was."""
    torch._dynamo.reset()
    x, labels, head = torch.randn(5, 8), torch.tensor([1, 2, -100, 8, 0]), torch.randn(9, 8, requires_grad=True)
    module = nn.MLP(8)
    low_head, low = head.detach().bfloat16().requires_grad_(), copy.deepcopy(module).bfloat16()

    def function(x: torch.Tensor, module: nn.MLP, head: torch.Tensor) -> torch.Tensor:
        return ops.linear_cross_entropy(module(x), head, labels)

    called = torch.compile(function, backend="aot_eager", fullgraph=True) if compiles else function
    expected = function(x.bfloat16(), low, low_head)
    true = [g.float() for g in torch.autograd.grad(expected, (low_head, *low.parameters()))]
    for given in (x, x.bfloat16()):
        with torch.autocast("cpu", torch.bfloat16):
            loss = called(given, module, head)
            assert module(x.half()).dtype == torch.bfloat16
        torch.testing.assert_close(loss, expected)
        grads = torch.autograd.grad(loss, (head, *module.parameters()))
        assert {g.dtype for g in grads} == {torch.float32}
        for grad, exact in zip(grads, true, strict=True):
            torch.testing.assert_close(grad, exact, rtol=2e-2, atol=1e-4)
    assert module(x).dtype == torch.float32


def test_cross_entropy_loss() -> None:
    logits, labels = torch.randn(4, 9), torch.tensor([1, 2, -100, 8])
    module = nn.CrossEntropyLoss(label_smoothing=0.1)
    torch.testing.assert_close(module(logits, labels), torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1))
    assert "label_smoothing=0.1" in repr(module)
