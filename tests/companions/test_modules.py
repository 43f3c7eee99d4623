"""flashtile.nn: the modules are the functions, with parameters."""

from __future__ import annotations

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
