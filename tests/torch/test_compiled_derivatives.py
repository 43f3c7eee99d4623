"""Steps that differentiate a model twice, compiled: equal to the eager ones, in one graph or in several."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import flashtile
from flashtile import Mass, ops
from flashtile.torch.call.sharded import HOME
from flashtile.triton_glue import language

Model = Callable[[torch.Tensor], torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor, Model], torch.Tensor]


def parts() -> tuple[list[torch.Tensor], Model, torch.Tensor]:
    """Parameters, a norm and attention of them, and tokens."""
    generator = torch.Generator().manual_seed(0)
    project = torch.randn(16, 48, generator=generator).requires_grad_()
    weight = torch.rand(16, generator=generator).requires_grad_()

    def model(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (ops.rms_norm(x, weight) @ project).view(*x.shape[:2], 3, 2, 8).unbind(2)
        return x + flashtile.attention(q, k, v, causal=True).flatten(2)

    return [project, weight], model, torch.randn(2, 9, 16, generator=generator)


def mean_flow(x: torch.Tensor, v: torch.Tensor, model: Model) -> torch.Tensor:
    """Its change reaches the gradients, too, which arXiv 2505.13447 detaches."""
    out, change = torch.func.jvp(model, (x,), (v,))  # pyright: ignore[reportAssignmentType, reportUnknownVariableType]
    return (out - v + 0.5 * change).square().mean()


def penalty(x: torch.Tensor, v: torch.Tensor, model: Model) -> torch.Tensor:
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad((model(x) * v).sum(), x, create_graph=True)
    return (slope.flatten(1).norm(dim=1) - 1.0).square().mean()


def slope(x: torch.Tensor, v: torch.Tensor, model: Model) -> torch.Tensor:
    """The same penalty by a transform, which torch.compile traces."""
    made = torch.func.grad(lambda x: (model(x) * v).sum())(x)
    return (made.flatten(1).norm(dim=1) - 1.0).square().mean()


def stepped(loss: Loss) -> tuple[torch.Tensor, ...]:
    """The loss and the parameters' gradients."""
    parameters, model, x = parts()
    value = loss(x, x.flip(1), model)
    return value.detach(), *torch.autograd.grad(value, parameters)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.fixture(autouse=True)
def forgotten() -> None:
    torch._dynamo.reset()


def test_a_mean_flow_step_is_the_eager_one() -> None:
    """Where graphs may end: at what brings tangents of its own."""
    expected = stepped(mean_flow)
    assert all(t.any() for t in expected)
    for _ in range(2):  # what has been compiled by then, too
        for found, truth in zip(stepped(torch.compile(mean_flow, backend="aot_eager")), expected, strict=True):
            torch.testing.assert_close(found, truth)


@pytest.mark.parametrize("engine", ["eager", "aot_eager"])
@pytest.mark.parametrize("loss", [mean_flow, slope], ids=["mean flow", "penalty"])
def test_a_step_is_one_graph(loss: Loss, engine: str) -> None:
    """Tangents and second derivatives are operators of it, and have gradients."""
    expected = stepped(loss)
    assert all(t.any() for t in expected)
    for found, truth in zip(stepped(torch.compile(loss, backend=engine, fullgraph=True)), expected, strict=True):
        close(found, truth)


@pytest.mark.parametrize("engine", ["eager", "aot_eager"])
def test_a_product_with_a_hessian_is_one_graph(engine: str) -> None:
    """Forward mode of reverse mode: a Function switches tangents off, and each level of torch.func must see its own."""
    _, model, x = parts()

    def product(x: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(torch.func.grad(lambda x: model(x).sin().sum()), (x,), (x.flip(1),))[1]

    with torch.no_grad():  # or aot_eager differentiates a third time, by parameters
        expected, found = product(x), torch.compile(product, backend=engine, fullgraph=True)(x)
    assert expected.any()
    close(found, expected)


@pytest.mark.parametrize("engine", [None, "eager"])
def test_directions_alone_may_want_a_gradient(engine: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is then left of a second derivative, at each call; nor is it taken for a GPU's launches."""
    monkeypatch.setattr(language, "INTERPRETED", False)
    q, k, v, direction = torch.randn(4, 1, 6, 2, 8)

    def change(direction: torch.Tensor, of: int) -> torch.Tensor:
        return torch.func.jvp(lambda q: flashtile.attention(q, k, v), (q,), (direction,))[of]

    for of in (1, 0):
        torch._dynamo.reset()  # PyTorch 2.11 takes transforms of one code for each other
        slope = torch.func.grad(lambda t, of=of: (change(t, of) * v).sum() + t.sum())
        slope = torch.compile(slope, backend=engine, fullgraph=True) if engine else slope
        expected = (of * change(direction, 1) * v).sum() + direction.sum()  # the tangent alone depends on it, and is linear
        for _ in range(3):
            close((slope(direction) * direction).sum(), expected)


def test_a_penalty_refuses_and_is_right_where_its_step_is_eager() -> None:
    """PyTorch differentiates no backward that AOTAutograd made, ours or plain; a graph that runs as it was traced is ours."""
    step, expected = torch.compile(penalty, backend="aot_eager"), stepped(penalty)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        stepped(step)
    torch._dynamo.reset()
    with torch.compiler.set_stance("force_eager"):
        forced = stepped(step)
    for made in (forced, stepped(torch.compile(penalty, backend="eager"))):
        for found, truth in zip(made, expected, strict=True):
            close(found, truth)


def test_shards_are_not_taken_for_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within torch's context parallelism, which replaces its attention; a graph's tangents, and statistics."""
    q = torch.randn(1, 6, 2, 8)
    change = torch.compile(
        lambda q: torch.func.jvp(lambda q: flashtile.attention(q, q, q), (q,), (q,)), backend="aot_eager", fullgraph=True
    )
    change(q)

    def parallel() -> None:
        """What stands there in the place of torch's attention."""

    parallel.__module__ = f"{HOME}._attention"
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", parallel)
    calls: list[Callable[[], object]] = [lambda: change(q)]
    calls += [lambda name=name: flashtile.attention(q, q, q, returns=name) for name in ("entropy", "max_logit", Mass())]
    for call in calls:
        with pytest.raises(flashtile.NotSupported, match="q, k and v are shards"):
            call()
