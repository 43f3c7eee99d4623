"""The public softmax: what the case list does not say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashtile import InvalidProblem, ops
from flashtile.kernels.ops.catalogue import BACKENDS


@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_broadcast(backend: str, place: torch.device) -> None:
    x = torch.randn(2, 3, 5, 8, device=place)
    for shape in ((2, 1, 5, 8), (8,), (5, 1), (1, 1, 5, 8), (2, 3, 1, 8)):
        mask = torch.rand(shape, device=place) < 0.4
        mask[..., 0] = False
        expected = x.masked_fill(mask, -torch.inf).softmax(-1)
        torch.testing.assert_close(ops.softmax(x, mask, backend=backend), expected)
    torch.testing.assert_close(ops.softmax(x[0, 0], scale=0.3, backend=backend), (0.3 * x[0, 0]).softmax(-1))


def test_a_modules_mask_meets_symbols() -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = torch.nn.Buffer(torch.ones(5, 5, dtype=torch.bool).triu(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ops.softmax(x, self.hidden)

    module, x = Module(), torch.randn(2, 3, 5, 5)
    assert torch.equal(torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)(x), module(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_hidden_does_not_leak(backend: str, place: torch.device) -> None:
    """NaN under the mask or above the diagonal, and in the gradients that arrive there."""
    clean, mask = torch.randn(2, 6, 6, device=place), torch.rand(2, 6, 6, device=place) < 0.3
    hidden = mask | torch.ones(6, 6, dtype=torch.bool, device=place).triu(1)
    dout = torch.randn(2, 6, 6, device=place)
    made = []
    for garbage in (0.0, torch.nan, torch.inf):
        x = clean.masked_fill(hidden, garbage).requires_grad_()
        y = ops.softmax(x, mask, causal=True, backend=backend)
        made.append((y, torch.autograd.grad(y, x, dout.masked_fill(hidden, garbage))[0]))
    for y, dx in made[1:]:
        assert torch.equal(y, made[0][0])
        assert torch.equal(dx, made[0][1])
    assert not made[0][0][hidden].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("compiles", [False, True])
def test_a_masked_score_has_a_probability_and_no_gradient(compiles: bool, backend: str, place: torch.device) -> None:
    """Also where what arrives is no number, and of a row of nothing else."""
    x = torch.tensor([[0.0, 0.0, 1.0], [3.0, 2.0, 1.0], [0.0, 0.0, 0.0]], device=place, requires_grad=True)
    mask = torch.tensor([[0, 1, 0], [1, 0, 0], [1, 1, 1]], dtype=torch.bool, device=place)

    def function(x: torch.Tensor) -> Any:
        return ops.softmax(x, mask, scale=0.5, masked_score=-2.0, backend=backend)

    if compiles:
        torch._dynamo.reset()
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    y, true = function(x), (0.5 * x).masked_fill(mask, -2.0).softmax(-1).masked_fill(mask.all(-1, keepdim=True), 0.0)
    torch.testing.assert_close(y, true)
    dy = torch.randn(3, 3, device=place)
    made, exact = (torch.autograd.grad(out, x, dy, retain_graph=True)[0] for out in (y, true))
    torch.testing.assert_close(made, exact)
    assert not made[mask].any()
    dy[0, 1] = torch.nan
    assert torch.autograd.grad(y, x, dy)[0][0].isnan().tolist() == [True, False, True]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_visible_nan_is_seen(backend: str, place: torch.device) -> None:
    x = torch.randn(3, 6, device=place)
    x[1, 2] = torch.nan
    assert ops.softmax(x, backend=backend).isnan().all(-1).tolist() == [False, True, False]


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled(backend: str, place: torch.device) -> None:
    def function(x: torch.Tensor, mask: torch.Tensor) -> Any:
        return ops.softmax(x, mask, scale=0.5, causal=True, backend=backend)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (4, 6):
        x, mask = torch.randn(2, rows, 8, device=place, requires_grad=True), torch.rand(rows, 8, device=place) < 0.3
        made = [f(x, mask) for f in (function, compiled)]
        assert torch.equal(*made)
        assert torch.equal(*(torch.autograd.grad(y.square().sum(), x)[0] for y in made))


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "x-list": ({"x": [1.0]}, "x is a list; it must be a torch.Tensor"),
    "x-rank": ({"x": t(4)}, r"x has shape \(4,\); it must be \(..., rows, columns\), of two to four axes"),
    "x-int": ({"x": t(3, 4, dtype=torch.int32)}, "x is int32; it must be fp16 or bf16 or fp32"),
    "x-empty": ({"x": t(3, 0)}, "x must be .*, with at least one column"),
    "mask-shape": ({"mask": t(2, 4, dtype=torch.bool)}, r"mask has shape \(2, 4\); it must broadcast to that of x \(3, 4\)"),
    "mask-float": ({"mask": t(3, 4)}, "mask is fp32; it must be bool or uint8"),
    "scale": ({"scale": "1"}, "scale is '1'; it must be a number"),
    "causal": ({"causal": None}, "causal is None; it must be True or False"),
    "masked_score": ({"masked_score": float("nan")}, "masked_score is nan; it must be finite"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    arguments, message = BAD[name]
    with pytest.raises(InvalidProblem, match=message):
        ops.softmax(**{"x": t(3, 4), **arguments})
