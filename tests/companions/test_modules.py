"""flashtile.nn: the modules are the functions, with parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn.utils import prune

from flashtile import InvalidProblem, nn, ops
from flashtile.compat.fused_dense import FusedMLP


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


class Adapted(torch.nn.Linear):
    """An adapter, as LoRA's: its weight is what the layer had before."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize("make", [nn.MLP, FusedMLP])
def test_mlp_leaves_out_nothing_that_its_layers_do(make: Callable[[int], torch.nn.Module]) -> None:
    x = torch.randn(2, 8)
    adapted, hooked, parametrized = make(8), make(8), make(8)
    adapted.fc2 = Adapted(32, 8)
    with pytest.raises(InvalidProblem, match=r"^fc2 is a \S+\.Adapted with a forward of its own, .*: merge adapters"):
        adapted(x)
    prune.random_unstructured(hooked.fc1, "weight", 0.5)
    with pytest.raises(InvalidProblem, match=r"^fc1 is a torch\.nn\S+\.Linear with forward hooks, which would be left out"):
        hooked(x)
    prune.remove(hooked.fc1, "weight")
    torch.nn.utils.parametrizations.weight_norm(parametrized.fc1)
    for module in (hooked, parametrized):
        torch.testing.assert_close(module(x), module.fc2(torch.nn.functional.gelu(module.fc1(x), approximate="tanh")))


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


def test_weights_of_classes_are_a_buffer_as_torchs() -> None:
    logits, labels, weight = torch.randn(4, 9), torch.tensor([1, 2, -100, 8]), torch.rand(9)
    module, theirs = nn.CrossEntropyLoss(weight=weight, softcap=30.0), torch.nn.CrossEntropyLoss(weight)
    torch.testing.assert_close(module(logits, labels), theirs(30.0 * (logits / 30.0).tanh(), labels))
    assert module.state_dict().keys() == theirs.state_dict().keys()
    loaded = weight * 2
    module.load_state_dict({"weight": loaded})
    assert torch.equal(module.to(torch.bfloat16).weight, loaded.bfloat16())
    assert not nn.CrossEntropyLoss().state_dict()


def test_modules_take_any_integer() -> None:
    size = np.int64(16)
    assert nn.MLP(size)(torch.randn(2, 16)).shape == (2, 16)  # type: ignore[arg-type]
    assert nn.RMSNorm(size)(torch.randn(2, 16)).shape == (2, 16)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.CrossEntropyLoss(reduction="average"), "reduction is 'average'; it must be one of none, mean, sum"),
        (lambda: nn.CrossEntropyLoss(label_smoothing=2.0), "^label_smoothing is 2.0; it must be finite, from 0.0 to 1.0"),
        (lambda: nn.CrossEntropyLoss(softcap=-1.0), "softcap is -1.0; it must be a positive number or None"),
        (lambda: nn.CrossEntropyLoss(weight=torch.ones(2, 3)), r"weight has shape \(2, 3\); it must be \(classes,\)"),
        (lambda: nn.CrossEntropyLoss(z_loss="1"), "z_loss is '1'; it must be a number"),
        (lambda: nn.CrossEntropyLoss(logit_scale=float("nan")), "logit_scale is nan; it must be finite"),
        (lambda: nn.CrossEntropyLoss(ignore_index=None), "ignore_index is None; it must be an int"),
        (lambda: nn.CrossEntropyLoss(return_lse=1), "return_lse is 1; it must be True or False"),
        (lambda: nn.CrossEntropyLoss(inplace="no"), "inplace is 'no'; it must be True or False"),
        (lambda: nn.CrossEntropyLoss(eager_gradient="no"), "eager_gradient is 'no'; it must be True, False or None"),
        (lambda: nn.CrossEntropyLoss(eager_gradient=True, reduction="none"), "rows' gradients wait"),
        (lambda: nn.CrossEntropyLoss(process_group=object(), inplace=True), "inplace is given with a process_group"),
        (lambda: nn.CrossEntropyLoss(backend="cuda"), "backend is 'cuda'; it must be one of triton, cpu, or None"),
        (lambda: nn.MLP(0), "width is 0; it must be a positive int"),
        (lambda: nn.MLP(8.0), "width is 8.0; it must be a positive int"),  # type: ignore[arg-type]
        (lambda: nn.MLP(8, 0), "hidden is 0; it must be a positive int"),
        (lambda: nn.MLP(8, out=-1), "out is -1; it must be a positive int"),
        (lambda: nn.MLP(8, activation="gelu"), "activation is 'gelu'; it must be one of gelu_tanh, relu, sqrelu"),
        (lambda: nn.MLP(8, recompute=1), "recompute is 1; it must be True or False"),  # type: ignore[arg-type]
        (lambda: nn.LayerNorm((3, 8)), r"hidden is \(3, 8\); it must be a positive int"),  # type: ignore[arg-type]
        (lambda: nn.RMSNorm(True), "hidden is True; it must be a positive int"),
        (lambda: nn.LayerNorm(8, -1.0), "eps is -1.0; it must be finite, from 0.0"),
        (lambda: nn.RMSNorm(8, dropout_p=1.5), "^dropout_p is 1.5; it must be finite, from 0.0 to 1.0"),
        (lambda: nn.RMSNorm(8, dropout_p="0"), "^dropout_p is '0'; it must be a number"),  # type: ignore[arg-type]
        (lambda: nn.RMSNorm(8, prenorm=1), "prenorm is 1; it must be True or False"),  # type: ignore[arg-type]
        (lambda: nn.RMSNorm(8, zero_centered=None), "zero_centered is None; it must be True or False"),  # type: ignore[arg-type]
        (lambda: nn.RMSNorm(8, residual_dtype=torch.float64), "residual_dtype is torch.float64; it must be torch.float16"),
    ],
)
def test_constructors_refuse_what_no_forward_takes(make: Callable[[], torch.nn.Module], message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        make()


def test_unknown_options() -> None:
    with pytest.raises(TypeError, match=r"^CrossEntropyLoss\(\) got an unexpected keyword argument 'nope'"):
        nn.CrossEntropyLoss(nope=1)
