"""The public linear_act and mlp: what the case list does not say."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from flashtile import InvalidProblem, ops
from flashtile.kernels.ops.catalogue import BACKENDS
from tests.companions.cases import Case, mlp
from tests.companions.judge import plain, result


@pytest.mark.parametrize("backend", BACKENDS)
def test_leading_axes_and_pre(backend: str, place: torch.device) -> None:
    x, weight, bias = (torch.randn(*shape, device=place) for shape in ((2, 3, 8), (12, 8), (12,)))
    out, pre = ops.linear_act(x, weight, bias, return_pre=True, backend=backend)
    torch.testing.assert_close(pre, F.linear(x, weight, bias))
    torch.testing.assert_close(out, F.gelu(pre, approximate="tanh"))
    assert torch.equal(ops.linear_act(x, weight, bias, backend=backend), out)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gelu_far_out(backend: str, place: torch.device) -> None:
    """No overflow at either end, and NaN stays."""
    x = torch.tensor([[-1e4, -100.0, -10.0, -5.0, 0.0, 5.0, 100.0, 1e4, torch.nan]], device=place).t()
    one = torch.ones(1, 1, device=place)
    leaf = x.clone().requires_grad_()
    out = ops.linear_act(leaf, one, backend=backend)
    exact = x.double().requires_grad_()
    true = F.gelu(exact, approximate="tanh")
    torch.testing.assert_close(out.double(), true, equal_nan=True, rtol=1e-5, atol=1e-7)
    grads = torch.autograd.grad(out.sum(), leaf)[0], torch.autograd.grad(true.sum(), exact)[0]
    torch.testing.assert_close(grads[0][:-1].double(), grads[1][:-1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled(backend: str, recompute: bool, place: torch.device) -> None:
    weights = [torch.randn(*shape, device=place, requires_grad=True) for shape in ((12, 8), (12,), (5, 12), (5,))]

    def function(x: torch.Tensor) -> Any:
        return ops.mlp(x * 2, *weights, recompute=recompute, backend=backend)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (4, 7):
        x = torch.randn(2, rows, 8, device=place, requires_grad=True)
        made = [f(x) for f in (function, compiled)]
        torch.testing.assert_close(*made)
        for a, b in zip(*(torch.autograd.grad(y.square().sum(), (x, *weights)) for y in made), strict=True):
            torch.testing.assert_close(a, b)


KINDS = {"one": "", "two": "", "again": "recompute=True"}


def subsets(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    return (some for count in range(1, len(names) + 1) for some in combinations(names, count))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_gradient_without_the_others(kind: str, dtype: str, backend: str, place: torch.device) -> None:
    """A weight alone in 16 bits too, whose layout is all that its own gradient may ask for."""
    more = "weight1 bias1" if kind == "one" else "weight1 bias1 weight2 bias2"
    whole = Case(mlp(5, 12, 20, 0 if kind == "one" else 7, dtype, more, KINDS[kind]))
    tensors = whole.tensors(place)
    expected = result(whole, tensors, backend)
    for wanted in subsets(whole.wanted):
        made = result(Case(whole.spelling, fixed=tuple(set(whole.wanted).difference(wanted))), tensors, backend)
        assert made.keys() == {"out", *(f"d{name}" for name in wanted)}
        for name, tensor in made.items():
            torch.testing.assert_close(tensor, expected[name])


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_weights_alone_in_16_bits(recompute: bool) -> None:
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    weights = [torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((12, 8), (12,), (5, 12), (5,))]

    def function(x: torch.Tensor) -> Any:
        return ops.mlp(x, *weights, recompute=recompute)

    torch._dynamo.reset()
    made = [f(x) for f in (function, torch.compile(function, backend="aot_eager", fullgraph=True))]
    for a, b in zip(*(torch.autograd.grad(y.sum(), weights) for y in made), strict=True):
        torch.testing.assert_close(a, b)


class Products(TorchDispatchMode):
    """The shapes and strides of the factors of every product that makes a matrix of one of these sizes, or its transpose."""

    def __init__(self, *sizes: tuple[int, int]) -> None:
        super().__init__()
        self.sizes, self.seen = {frozenset(s) for s in sizes}, list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and frozenset(made.shape) in self.sizes:
            self.seen.append([(tuple(factor.shape), factor.stride()) for factor in args])
        return made


ONE, TWO = mlp(9, 12, 20, 0, "fp32", "weight1 bias1"), mlp(9, 12, 20, 7, "fp32", "weight1 bias1 weight2 bias2")
LAID = [(ONE, "dense"), (ONE, "gaps")]  # of one layer autograd leaves dpre transposed where what arrives is
LAID += [(two, layout) for two in (TWO, f"{TWO[:-1]};recompute=True)") for layout in ("dense", "gaps", "transposed")]


@pytest.mark.usefixtures("within_operators")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fixed", [(), ("x", "bias1")], ids=["all", "weights alone"])
@pytest.mark.parametrize(("spelling", "layout"), LAID)
def test_weights_gradients_are_autograds_products(
    spelling: str, layout: Any, fixed: tuple[str, ...], backend: str, place: torch.device
) -> None:
    """Factors in the same order and memory: where a weight is not dense, autograd forms its gradient's transpose."""
    case = Case(spelling, layout, fixed)
    tensors = case.tensors(place)
    with Products((12, 20), (20, 7)) as ours:
        made = result(case, tensors, backend)
    with Products((12, 20), (20, 7)) as autograds:
        exact = plain(case, tensors)
    assert sorted(ours.seen) == sorted(autograds.seen)
    assert len(ours.seen) == 1 + case.problem.has("weight2")
    for name in ("dweight1", "dweight2"):
        if name in exact:
            torch.testing.assert_close(made[name], exact[name])


@pytest.mark.usefixtures("within_operators")
def test_a_weight_in_16_bits_has_its_gradient_as_it_lies() -> None:
    """It would be copied where it is formed transposed, and the order is nothing beside its rounding."""
    case = Case(ONE.replace("fp32", "bf16"), "gaps")
    with Products((12, 20)) as products:
        result(case, case.tensors(torch.device("cpu")), "cpu")
    assert [[shape for shape, _ in factors] for factors in products.seen] == [[(20, 9), (9, 12)]]


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "x-list": ({"x": [1.0]}, "x is a list; it must be a torch.Tensor"),
    "x-int": ({"x": t(3, 4, dtype=torch.int32)}, "x is int32; it must be fp16 or bf16 or fp32"),
    "x-meta": ({"x": t(3, 4).to("meta")}, "weight1 is on cpu and others are on meta; they must be on one"),
    "weight1-none": ({"weight1": None}, "weight1 is a NoneType; it must be a torch.Tensor"),
    "weight1-width": ({"weight1": t(6, 5)}, r"weight1 has shape \(6, 5\); it must be \(hidden, width\), x's being 4"),
    "weight1-dtype": ({"weight1": t(6, 4, dtype=torch.bfloat16)}, "weight1 is bf16; it must be fp32"),
    "bias1-shape": ({"bias1": t(4)}, r"bias1 has shape \(4,\); it must be \(hidden,\) = \(6,\)"),
    "weight2-shape": ({"weight2": t(2, 5)}, r"weight2 has shape \(2, 5\); it must be \(out, hidden\) = \(2, 6\)"),
    "bias2-shape": ({"bias2": t(3)}, r"bias2 has shape \(3,\); it must be \(out,\) = \(2,\)"),
    "activation": ({"activation": "gelu"}, "activation is 'gelu'; it must be one of gelu_tanh, relu, sqrelu"),
    "recompute": ({"recompute": 1}, "recompute is 1; it must be True or False"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    arguments, message = BAD[name]
    with pytest.raises(InvalidProblem, match=message):
        ops.mlp(**{"x": t(3, 4), "weight1": t(6, 4), "bias1": t(6), "weight2": t(2, 6), **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight": None}, "weight is a NoneType; it must be a torch.Tensor"),
        ({"weight": t(6, 5)}, r"weight has shape \(6, 5\); it must be \(hidden, width\), x's being 4"),
        ({"weight": t(6, 4, dtype=torch.float64)}, "weight is torch.float64; it must be fp32"),
        ({"bias": t(4)}, r"bias has shape \(4,\); it must be \(hidden,\) = \(6,\)"),
        ({"bias": t(6).to("meta")}, "bias is on meta and others are on cpu; they must be on one device"),
    ],
)
def test_bad_input_of_one_layer_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        ops.linear_act(**{"x": t(3, 4), "weight": t(6, 4), "bias": t(6), **arguments})
