"""torch.func over the ops: grad, vjp, vmap, and each of the other, are loops and autograd."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

from flashtile import InvalidProblem, NotSupported, nn, ops
from flashtile.kernels.ops.catalogue import BACKENDS, OPS
from flashtile.torch.ops.call import hides
from flashtile.torch.ops.run import run
from tests.companions.cases import CASES, Case
from tests.companions.test_operator import FULLEST, TRACED, given

Function = Callable[..., tuple[torch.Tensor, ...]]
DIFFERENTIATED = [case for case in TRACED if case.wanted]


def bound(case: Case, place: torch.device, backend: str) -> tuple[Function, list[torch.Tensor]]:
    """The op's differentiable outputs as a function of the wanted inputs, and these."""
    tensors, problem = {n: t.detach() for n, t in given(case, place).items()}, case.problem

    def function(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = run(problem.op, {**tensors, **dict(zip(case.wanted, leaves, strict=True))}, problem.options(), backend)
        named = zip(problem.public(), made, strict=False)  # an operator with gradients gives more
        return tuple(t for name, t in named if name not in problem.constant())

    return function, [tensors[name] for name in case.wanted]


def loss(function: Function) -> Callable[..., torch.Tensor]:
    return lambda *leaves: sum((o.float().square().sum() for o in function(*leaves)), torch.zeros(()))


def by_autograd(function: Function, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    own = [t.detach().requires_grad_() for t in leaves]
    return torch.autograd.grad(loss(function)(*own), own)


def same(got: Any, expected: Any) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("case", DIFFERENTIATED, ids=lambda case: case.name)
def test_grad_and_vjp_are_autograd(case: Case) -> None:
    function, leaves = bound(case, torch.device("cpu"), "cpu")
    expected, slots = by_autograd(function, leaves), tuple(range(len(leaves)))
    same(grad(loss(function), slots)(*leaves), expected)
    outputs, pull = vjp(function, *leaves)
    same(outputs, function(*leaves))
    same(pull(tuple((2 * o.float()).to(o.dtype) for o in outputs)), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", FULLEST, ids=lambda case: case.problem.op)
def test_maps_and_gradients_of_each_other(case: Case, backend: str, place: torch.device) -> None:
    function, leaves = bound(case, place, backend)
    slots, many = tuple(range(len(leaves))), [torch.stack([t, t * 2, t - 1]) for t in leaves]
    each = [[t[i] for t in many] for i in range(3)]
    for got, *expected in zip(vmap(function)(*many), *(function(*some) for some in each), strict=True):
        same(got, expected)
    for got, *expected in zip(
        vmap(grad(loss(function), slots))(*many), *(by_autograd(function, some) for some in each), strict=True
    ):
        same(got, expected)
    first = [many[0], *leaves[1:]]  # mapped by one input alone: gradients of the others are sums
    dims = (0, *(None for _ in leaves[1:]))
    got = grad(lambda *given: vmap(loss(function), dims)(*given).sum(), slots)(*first)
    loops = [by_autograd(function, [many[0][i], *leaves[1:]]) for i in range(3)]
    for i, (a, *alone) in enumerate(zip(got, *loops, strict=True)):
        expected = torch.stack(alone) if i == 0 else sum(g.float() for g in alone)
        torch.testing.assert_close(a.float(), torch.as_tensor(expected).float(), rtol=1e-2, atol=1e-2)
    outputs, pull = vjp(function, *leaves)
    weights = tuple(torch.stack([o, o * 2]) for o in outputs)
    for got, *expected in zip(vmap(pull)(weights), *(pull(tuple(w[i] for w in weights)) for i in range(2)), strict=True):
        same(got, expected)


HIDING = [case for case in DIFFERENTIATED if hides(case.problem, frozenset(case.wanted))]


@pytest.mark.parametrize("curved", [False, True], ids=["linear", "square"])
@pytest.mark.parametrize("case", [*FULLEST, *HIDING[::4]], ids=lambda case: case.name)
def test_second_derivatives_of_each_input_are_right_or_refused(case: Case, curved: bool) -> None:
    """Also of those inputs to which nothing leads that the backward keeps; never a zero. Against differences, of float32."""
    function, leaves = bound(case, torch.device("cpu"), "cpu")
    slots = tuple(range(len(leaves)))

    def total(*given: torch.Tensor) -> torch.Tensor:
        return loss(function)(*given) if curved else sum((o.float().sum() for o in function(*given)), torch.zeros(()))

    def slopes(*given: torch.Tensor) -> torch.Tensor:
        return sum((g.float().square().sum() for g in grad(total, slots)(*given)), torch.zeros(()))

    for slot in slots:
        if curved or case.wanted[slot] not in case.problem.linear:
            try:
                found = grad(slopes, slot)(*leaves)
            except NotSupported as refusal:
                if "gradients of gradients" not in str(refusal):
                    raise
                continue
            assert found.any()
            if curved:
                mapped = vmap(grad(slopes, slot))(*(t[None] for t in leaves))
                torch.testing.assert_close(mapped[0], found, rtol=1e-4, atol=1e-4 * float(found.abs().max()))
            if all(t.dtype is torch.float32 for t in leaves):
                step = 2e-3 * torch.randn(found.shape, generator=torch.Generator().manual_seed(0))
                ahead, behind = (slopes(*leaves[:slot], leaves[slot] + d, *leaves[slot + 1 :]) for d in (step, -step))
                rounded = found.numel() * torch.finfo(torch.float32).eps ** 2  # of slopes that are 0, their squares
                size = max(0.02 * float(found.norm() * step.norm()), rounded)
                assert (ahead - behind).item() / 2 == pytest.approx((found * step).sum().item(), abs=size, rel=0.02)


@pytest.mark.parametrize("op", OPS)
def test_tangents_are_right_or_refuse_by_name(op: str) -> None:
    """Against differences, of float32; never zero."""
    case = next(c for c in FULLEST if c.problem.op == op)
    function, leaves = bound(case, torch.device("cpu"), "cpu")
    for level in (function, vmap(function)):
        given = tuple(leaves) if level is function else tuple(t[None] for t in leaves)
        try:
            _, found = jvp(level, given, given)
        except NotSupported as refusal:
            if not re.search(f"(?s)forward-mode differentiation of {op} by {case.wanted[0]}.*reverse mode", str(refusal)):
                raise
            continue
        ahead, behind = (level(*(t * factor for t in given)) for factor in (1.005, 0.995))
        for tangent, above, below in zip(found, ahead, behind, strict=True):
            if above.dtype is torch.float32:
                moved = (above - below) / 0.01
                assert tangent.any()
                assert (tangent - moved).norm() <= 0.02 * moved.norm() + 1e-4 * above.norm()


def test_inputs_without_a_gradient_refuse() -> None:
    """At whatever level they want one."""
    x, factor, angles = torch.randn(3, 4, 8), torch.rand(3, 4), torch.rand(4, 4)

    def scaled(factor: torch.Tensor) -> torch.Tensor:
        return vmap(lambda x, factor: ops.rms_norm(x, rowscale=factor))(x, factor).sum()

    def turned(angles: torch.Tensor) -> torch.Tensor:
        return ops.rotary(x[:, :, None], None, angles.cos(), angles.sin()).sum()

    for function, value, name in ((scaled, factor, "rowscale"), (turned, angles, "cos")):
        with pytest.raises(InvalidProblem, match=f"^{name} requires a gradient, which it does not have; detach it"):
            grad(function)(value)
    same(grad(lambda f: scaled(f.detach()) + f.sum())(factor), torch.ones(3, 4))


@pytest.mark.parametrize(
    "more", [{"qk_norm": True}, {"rotary_base": 1e4}, {"qk_norm": True, "rotary_base": 1e4, "heads_kv": 1}], ids=str
)
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_gradients_per_sample_of_a_module(more: dict[str, Any], compiles: bool) -> None:
    module, x = nn.Attention(16, 2, causal=True, **more), torch.randn(3, 7, 16)
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def loss(parameters: Any, x: torch.Tensor) -> torch.Tensor:
        return functional_call(module, parameters, (x[None],)).square().mean()

    per_sample: Any = vmap(grad(loss), (None, 0))
    if compiles:
        torch.compiler.reset()
        per_sample = torch.compile(per_sample, fullgraph=True, backend="aot_eager")
    got = per_sample(parameters, x)
    for i in range(3):
        expected = torch.autograd.grad(module(x[i : i + 1]).square().mean(), list(module.parameters()))
        same([g[i] for g in got.values()], expected)


def test_transforms_within_a_compiled_graph() -> None:
    """Their gradients, and those of leaves outside that a mapped call shares."""
    x, weight = torch.randn(3, 4, 8), torch.randn(8, requires_grad=True)
    calls: list[Callable[[torch.Tensor], Any]] = [
        vmap(lambda x: ops.rms_norm(x, weight)),
        grad(lambda x: ops.rms_norm(x, weight.detach()).square().sum()),
        vmap(grad(lambda x: ops.rms_norm(x, weight.detach()).square().sum())),
        lambda x: vjp(lambda x: ops.softmax(x, causal=True), x)[1](x)[0],
    ]
    for call in calls:
        torch.compiler.reset()
        made = [f(x) for f in (call, torch.compile(call, backend="aot_eager", fullgraph=True))]
        same(made[:1], made[1:])
        if call is calls[0]:
            same(*(torch.autograd.grad(m.square().sum(), weight) for m in made))


def test_mixed_second_derivatives_are_right_or_refused() -> None:
    """Of an input that wants no gradient where the first derivative is taken, in a compiled graph too. Against differences."""
    x, weight, labels = torch.randn(4, 8), torch.randn(16, 8), torch.arange(4)
    functions: list[Any] = [
        lambda x, bias: ops.rms_norm(x).square().sum() + bias.sum(),
        lambda x, bias: ops.linear_act(x, weight, bias).sum(),
        lambda x, bias: ops.linear_cross_entropy(x, weight, labels, bias=bias),
    ]
    for function in functions:

        def first(x: torch.Tensor, bias: torch.Tensor, function: Any = function) -> torch.Tensor:
            return grad(function)(x, bias).square().sum()

        for slot in (0, 1) if function is not functions[0] else (0,):
            calls: list[Any] = [grad(first, slot), torch.compile(grad(first, slot), fullgraph=True, backend="aot_eager")]
            for call in calls:
                torch.compiler.reset()
                given = [x, torch.randn(16, generator=torch.Generator().manual_seed(0))]
                try:
                    found = call(*given)
                except Exception as refusal:  # torch.compile wraps it
                    if "gradients of gradients are not implemented" not in str(refusal):
                        raise
                    continue
                step = 2e-3 * torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
                ahead, behind = (first(*given[:slot], given[slot] + d, *given[slot + 1 :]) for d in (step, -step))
                size = float(found.norm() * step.norm())
                assert (ahead - behind).item() / 2 == pytest.approx(
                    (found * step).sum().item(), abs=0.02 * size + 1e-6, rel=0.02
                )


def test_what_is_written_over_is_the_transforms_own() -> None:
    x, labels, angles = torch.randn(3, 2, 5, 2, 8), torch.randint(8, (3, 20)), torch.rand(5, 4)

    def function(x: torch.Tensor, labels: torch.Tensor, inplace: bool) -> torch.Tensor:
        x = x * 2.0
        turned = ops.rotary(x, None, angles.cos(), angles.sin(), inplace=inplace)
        return ops.cross_entropy((x if inplace else turned).flatten(0, 2), labels, inplace=inplace)

    for transform in (lambda f: vmap(f, (0, 0, None)), lambda f: vmap(grad(f), (0, 0, None))):
        same(transform(function)(x, labels, True), transform(function)(x, labels, False))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_dropout_follows_vmaps_randomness(randomness: str) -> None:
    x = torch.ones(2, 4, 64)
    first, second = vmap(lambda x: ops.layer_norm(x, residual=x, dropout=0.5), randomness=randomness)(x)
    assert torch.equal(first, second) == (randomness == "same")


def test_a_tensor_that_outlived_its_transform_is_what_it_was_before() -> None:
    kept: list[torch.Tensor] = []
    x, weight = torch.randn(4, 8), torch.randn(8, requires_grad=True)
    grad(lambda y: (kept.append(y), (y * y).sum())[1])(x)
    assert kept[0].requires_grad  # the transform's, not the caller's
    assert not ops.rms_norm(kept[0]).requires_grad
    for expected, got in zip(*(torch.autograd.grad(ops.rms_norm(t, weight).sum(), weight) for t in (x, kept[0])), strict=True):
        assert torch.equal(got, expected)


def test_passes_alone_refuse_by_name() -> None:
    """Of other libraries, whose forward and backward are functions without a graph."""
    from flashtile.compat import cross_entropy

    with pytest.raises(NotSupported, match=r"cross_entropy of logits within torch.func's transforms"):
        vmap(lambda x: cross_entropy.forward(x, torch.arange(4), 0.0))(torch.randn(2, 4, 8))


def test_a_jacobian() -> None:
    x = torch.randn(2, 6)
    expected = torch.autograd.functional.jacobian(lambda x: x.softmax(-1), x)
    same([jacrev(ops.softmax)(x)], [expected])


assert len({case.problem.op for case in DIFFERENTIATED}) == len({case.problem.op for case in CASES})
