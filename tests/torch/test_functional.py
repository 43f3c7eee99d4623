"""torch.func over attention: grad, vmap, and each of the other, are loops and autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.func import grad, vjp, vmap

import flashtile
from flashtile import Alibi, Dropout, NotSupported, Options

CPU = Options(backend="cpu")


def tensors() -> list[torch.Tensor]:
    """q, k, v, slopes; then q, k, v of three calls."""
    generator = torch.Generator().manual_seed(0)
    one = [torch.randn(s, generator=generator) for s in ((2, 20, 4, 16), (2, 36, 2, 16), (2, 36, 2, 16), (4,))]
    return [*one, *(torch.stack([t, t * 2, t - 1]) for t in one[:3])]


def plain(q: Any, k: Any, v: Any) -> Any:
    return flashtile.attention(q, k, v, causal=True, options=CPU)


def loss(q: Any, k: Any, v: Any, slopes: Any) -> Any:
    out, lse = flashtile.attention(q, k, v, causal=True, score=(Alibi(slopes),), return_lse=True, options=CPU)
    return out.square().sum() + lse.sin().sum()


def close(got: Any, expected: Any) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_grad_is_autograd() -> None:
    given = tensors()[:4]
    leaves = [t.clone().requires_grad_() for t in given]
    close(grad(loss, argnums=(0, 1, 2, 3))(*given), torch.autograd.grad(loss(*leaves), leaves))
    out, pull = vjp(plain, *given[:3])
    close(pull(torch.ones_like(out)), torch.autograd.grad(plain(*leaves[:3]).sum(), leaves[:3]))


def test_vmap_is_a_loop() -> None:
    _, k, v, slopes, many_q, many_k, many_v = tensors()
    close(vmap(plain)(many_q, many_k, many_v), [plain(*some) for some in zip(many_q, many_k, many_v, strict=True)])
    close(vmap(plain, (2, None, None), 2)(many_q.movedim(0, 2), k, v).unbind(2), [plain(one, k, v) for one in many_q])

    def captured(q: Any, slopes: Any) -> Any:
        return flashtile.attention(q, k, v, score=(Alibi(slopes),), options=CPU)

    close(vmap(captured, (0, None))(many_q, slopes), [captured(one, slopes) for one in many_q])
    cu = torch.tensor([0, 9, 20], dtype=torch.int32)

    def varlen(x: Any) -> Any:
        return flashtile.attention_varlen(x, x, x, cu, causal=True, options=CPU)

    close(vmap(varlen)(many_q[:, 0]), [varlen(one) for one in many_q[:, 0]])


@pytest.mark.parametrize("shape", [(0, 2, 5, 4, 8), (3, 0, 5, 4, 8), (3, 2, 0, 4, 8)], ids=["calls", "batch", "tokens"])
def test_vmap_of_nothing(shape: tuple[int, ...]) -> None:
    many, sink = torch.randn(shape), torch.randn(4)

    def summed(q: Any) -> Any:
        return flashtile.attention(q, q, q, causal=True, options=CPU).sum()

    def sunk(q: Any, sink: Any) -> Any:
        return flashtile.attention(q, q, q, sink=sink, return_lse=True, options=CPU)[1].sum()

    assert vmap(grad(summed))(many).shape == shape
    assert vmap(grad(lambda q: grad(summed)(q).square().sum()))(many).shape == shape
    assert [t.shape for t in vmap(grad(sunk, argnums=(0, 1)), (0, None))(many, sink)] == [shape, (shape[0], 4)]
    assert vmap(lambda q: flashtile.ops.softmax(q, None))(many).shape == shape


def test_vmap_of_grad() -> None:
    _, k, v, slopes, many_q, *_ = tensors()
    for function, rest in ((lambda *t: plain(*t).square().sum(), (k, v)), (loss, (k, v, slopes))):
        slots = tuple(range(1 + len(rest)))
        got = vmap(grad(function, argnums=slots), (0, *(None for _ in rest)))(many_q, *rest)
        for i in range(3):
            close([g[i] for g in got], grad(function, argnums=slots)(many_q[i], *rest))


def test_transforms_within_a_compiled_graph() -> None:
    """Their gradients, and those of leaves outside that a mapped call shares, which were lost without a word."""
    q, k, v, slopes, many_q, many_k, many_v = tensors()
    everything = (0, 1, 2, 3)

    def alone(*given: Any) -> Any:
        return grad(loss, argnums=everything)(*given)

    def mapped(many_q: Any, *rest: Any) -> Any:
        return vmap(grad(loss, argnums=everything), (0, None, None, None))(many_q, *rest)

    def pulled(q: Any, k: Any, v: Any) -> Any:
        return vjp(plain, q, k, v)[1](q)

    cases: list[tuple[Any, Any]] = [(alone, (q, k, v, slopes)), (mapped, (many_q, k, v, slopes)), (pulled, (q, k, v))]
    for function, given in cases:
        torch.compiler.reset()
        close(torch.compile(function, fullgraph=True, backend="aot_eager")(*given), function(*given))

    def outside(*given: Any) -> Any:
        leaves = [t.clone().requires_grad_() for t in given]
        one = torch.compile(vmap(plain), fullgraph=True, backend="aot_eager")(*leaves)
        two = torch.compile(vmap(plain, (0, None, None)), fullgraph=True, backend="aot_eager")(
            leaves[0], leaves[1][0], leaves[2][0]
        )
        return torch.autograd.grad(one.square().sum() + two.square().sum(), leaves)

    torch.compiler.reset()
    got = outside(many_q, many_k, many_v)
    leaves = [t.clone().requires_grad_() for t in (many_q, many_k, many_v)]
    sums = [
        plain(a, b, c).square().sum() + plain(a, leaves[1][0], leaves[2][0]).square().sum()
        for a, b, c in zip(*leaves, strict=True)
    ]
    close(got, torch.autograd.grad(torch.stack(sums).sum(), leaves))


def test_second_derivatives_within_a_compiled_graph() -> None:
    q, k, v, *_ = tensors()

    def first(q: Any, k: Any) -> Any:
        return grad(lambda q: plain(q, k, v).square().sum())(q).square().sum()

    for slot in (0, 1):
        torch.compiler.reset()
        twice = grad(first, argnums=slot)
        torch.testing.assert_close(torch.compile(twice, fullgraph=True, backend="aot_eager")(q, k), twice(q, k))


def test_holes_are_moved_in_transforms_too() -> None:
    _, _, _, _, many_q, many_k, many_v = tensors()
    keep_q, keep_k = torch.rand(3, 2, 20) < 0.6, torch.rand(3, 2, 36) < 0.6

    def holes(q: Any, k: Any, v: Any, keep_q: Any, keep_k: Any) -> Any:
        return flashtile.attention(q, k, v, causal=True, seqused_q=keep_q, seqused_k=keep_k, options=CPU).square().sum()

    given = (many_q, many_k, many_v, keep_q, keep_k)
    got = vmap(grad(holes, argnums=(0, 1, 2)))(*given)
    for i in range(3):
        leaves = [t[i].clone().requires_grad_() for t in given[:3]]
        close([g[i] for g in got], torch.autograd.grad(holes(*leaves, keep_q[i], keep_k[i]), leaves))


def test_vmap_of_recorded_gradients() -> None:
    """Of a graph that an eager call recorded, whose backward meets gradients of a batch."""
    leaves = [t.requires_grad_() for t in tensors()[:3]]
    made = flashtile.attention(*leaves, causal=True, return_lse=True, options=CPU)
    weights = [torch.randn(2, 3, *t.shape) for t in made]

    def pull(*weights: Any) -> Any:
        return torch.autograd.grad(made[: len(weights)], leaves, weights, retain_graph=True)

    for some in (weights, weights[:1]):
        got = vmap(vmap(pull))(*some)
        for i in range(2):
            for j in range(3):
                close([g[i, j] for g in got], pull(*(w[i, j] for w in some)))
    with pytest.raises(
        NotSupported, match=r"a batch of gradients of attention\(.*\n.*use torch.func.vmap of torch.autograd.grad"
    ):
        torch.autograd.grad(made[0], leaves, weights[0][0], is_grads_batched=True)


def test_grad_of_vmap_also_of_leaves() -> None:
    _, k, v, _, many_q, *_ = tensors()

    def mapped(q: Any, k: Any, v: Any) -> Any:
        return vmap(plain, (0, None, None))(q, k, v).square().sum()

    leaves = [t.clone().requires_grad_() for t in (many_q, k, v)]
    expected = torch.autograd.grad(torch.stack([plain(one, *leaves[1:]) for one in leaves[0]]).square().sum(), leaves)
    close(grad(mapped, argnums=(0, 1, 2))(many_q, k, v), expected)
    close(torch.autograd.grad(mapped(*leaves), leaves), expected)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_dropout_follows_vmaps_randomness(randomness: str) -> None:
    q, k, v, *_ = tensors()

    def dropped(q: Any) -> Any:
        return flashtile.attention(q, k, v, dropout=Dropout(0.5), options=CPU)

    first, second = vmap(dropped, randomness=randomness)(torch.stack([q, q]))
    assert torch.equal(first, second) == (randomness == "same")


def test_a_tensor_that_outlived_its_transform_is_what_it_was_before() -> None:
    kept: list[torch.Tensor] = []
    x, k = torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 16, requires_grad=True)
    torch.func.grad(lambda y: (kept.append(y), (y * y).sum())[1])(x)
    assert kept[0].requires_grad  # the transform's, not the caller's
    assert not flashtile.attention(kept[0], x, x).requires_grad
    (expected,) = torch.autograd.grad(flashtile.attention(x, k, k).sum(), k)
    (got,) = torch.autograd.grad(flashtile.attention(kept[0], k, k).sum(), k)
    assert torch.equal(got, expected)


def test_third_derivatives_refuse() -> None:
    q, k, v, *_ = tensors()

    def twice(q: torch.Tensor) -> torch.Tensor:
        return grad(lambda q: plain(q, k, v).square().sum())(q).square().sum()

    with pytest.raises(NotSupported, match="the third derivative of attention"):
        grad(lambda q: grad(twice)(q).sum())(q)
