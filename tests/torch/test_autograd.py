"""What autograd asks of a function: subsets of gradients, second use, finite differences, clear refusals."""

from __future__ import annotations

import itertools

import pytest
import torch

import flashtile
from flashtile import Alibi, Options, Softcap
from flashtile.problem.options import Variant
from flashtile.reference.attention import attention_reference
from tests.cases import Case, Tensors

CASE = Case("autograd", seqlen_q=20, seqlen_k=36, causal=True, score=("softcap", "alibi"))
NAMES = ("q", "k", "v", "slopes")


def leaves(place: torch.device, requiring: tuple[str, ...] = NAMES) -> Tensors:
    tensors = CASE.tensors(place)
    made = {"q": tensors["q"], "k": tensors["k"], "v": tensors["v"], "slopes": tensors["score.1"]}
    for name, tensor in made.items():
        tensor.requires_grad_(name in requiring)
    return made


def attend(given: Tensors, backend: str, variant: Variant) -> tuple[torch.Tensor, torch.Tensor]:
    return flashtile.attention(
        given["q"], given["k"], given["v"], causal=True, score=(Softcap(2.0), Alibi(given["slopes"])), return_lse=True,
        options=Options(backend=backend, backward=variant),
    )  # fmt: skip


def backward(given: Tensors, backend: str, variant: Variant) -> None:
    out, lse = attend(given, backend, variant)
    tensors = CASE.tensors(out.device)
    torch.autograd.backward([out, lse], [tensors["dout"], tensors["dlse"]])


def test_more_gradients_than_the_call_before_asked_for(backend: str, place: torch.device, variant: Variant) -> None:
    """What is remembered of a call that wants dq alone, which a CPU runs at once, is not what one runs that wants all."""
    given, dout = [torch.randn(1, 64, 2, 64, device=place) for _ in "qkv"], torch.randn(1, 64, 2, 64, device=place)
    made = {}
    flashtile.cache_clear()
    for wanted in ("q", "q", "qkv"):
        some = [tensor.detach().requires_grad_(name in wanted) for name, tensor in zip("qkv", given, strict=True)]
        out = flashtile.attention(*some, causal=True, options=Options(backend=backend, backward=variant))
        made[wanted] = torch.autograd.grad(out, [leaf for leaf in some if leaf.requires_grad], dout)
    wide = [tensor.double().requires_grad_() for tensor in given]
    exact = torch.autograd.grad(attention_reference(*wide, causal=True)[0], wide, dout.double())
    torch.testing.assert_close(made["qkv"], tuple(tensor.float() for tensor in exact), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(made["q"][0], made["qkv"][0], rtol=1e-3, atol=1e-4)


def test_every_subset_of_gradients(backend: str, place: torch.device, variant: Variant) -> None:
    """A gradient exists exactly where it is required, and does not depend on which others are."""
    names = ("q", "k", "v", "slopes")
    everything = leaves(place, names)
    backward(everything, backend, variant)
    for count in range(len(names)):
        for subset in itertools.combinations(names, count):
            some = leaves(place, subset)
            if not subset:
                out, lse = attend(some, backend, variant)
                assert not out.requires_grad
                assert not lse.requires_grad
                continue
            backward(some, backend, variant)
            for name in names:
                assert (some[name].grad is not None) == (name in subset), (subset, name)
                if name in subset:
                    torch.testing.assert_close(some[name].grad, everything[name].grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_no_graph_where_none_is_wanted(backend: str, place: torch.device, context: type) -> None:
    given = leaves(place, ("q", "k", "v", "slopes"))
    with_graph, lse_with_graph = attend(given, backend, "auto")
    with context():
        out, lse = attend(given, backend, "auto")
    assert with_graph.requires_grad
    assert not out.requires_grad
    assert torch.equal(out, with_graph.detach())
    assert torch.equal(lse, lse_with_graph.detach())


@pytest.mark.parametrize("output", [0, 1], ids=["out", "lse"])
def test_finite_differences(backend: str, place: torch.device, variant: Variant, output: int) -> None:
    """The gradient along random directions against differences of the forward itself."""
    given = leaves(place, ("q", "k", "v", "slopes"))
    generator = torch.Generator().manual_seed(1)

    def normal(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator).to(place)

    result = attend(given, backend, variant)[output]
    arriving = normal(result)
    arriving[~result.isfinite()] = 0
    grads = torch.autograd.grad(result, list(given.values()), arriving, allow_unused=True)
    for (name, tensor), grad in zip(given.items(), grads, strict=True):
        direction, step = normal(tensor), 1e-2
        ends = []
        for sign in (1, -1):
            moved = {**given, name: tensor.detach() + sign * step * direction}
            with torch.no_grad():
                ends.append(torch.nan_to_num(attend(moved, backend, variant)[output].double(), neginf=0.0))
        difference = ((ends[0] - ends[1]) * arriving.double()).sum().item() / (2 * step)
        along = 0.0 if grad is None else (grad.double() * direction.double()).sum().item()
        assert along == pytest.approx(difference, rel=2e-3, abs=2e-2), name


def test_gradients_without_strides(backend: str, place: torch.device, variant: Variant) -> None:
    """sum() sends one element, expanded to every position."""
    grads = []
    for expanded in (True, False):
        given = leaves(place, ("q", "k", "v", "slopes"))
        out, lse = attend(given, backend, variant)
        if expanded:
            (out.sum() + lse.sum()).backward()
        else:
            torch.autograd.backward([out, lse], [torch.ones_like(out), torch.ones_like(lse)])
        grads.append([given[name].grad for name in given])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_gradient_that_is_a_negated_view(backend: str, place: torch.device, variant: Variant) -> None:
    """As it comes from the imaginary part of a conjugate: memory holds the opposite."""
    grads = []
    for turn in (torch._neg_view, torch.neg):
        given = leaves(place)
        out, lse = attend(given, backend, variant)
        torch.autograd.backward([out, lse], [turn(torch.ones_like(out)), turn(torch.ones_like(lse))])
        grads.append([given[name].grad for name in NAMES])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_second_backward_over_a_kept_graph(backend: str, place: torch.device) -> None:
    given = leaves(place, ("q", "k", "v", "slopes"))
    out, _ = attend(given, backend, "split")
    inputs = list(given.values())
    first = torch.autograd.grad(out, inputs, torch.ones_like(out), retain_graph=True)
    second = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, inputs, torch.ones_like(out))


def test_hooks_may_lay_saved_tensors_otherwise(backend: str, place: torch.device) -> None:
    """As those do that move tensors elsewhere until the backward."""
    q, k, v = (torch.randn(1, 2, 9, 16, device=place).transpose(1, 2).requires_grad_() for _ in range(3))
    dout = torch.randn(1, 9, 2, 16, device=place)
    expected = torch.autograd.grad(flashtile.attention(q, k, v, options=Options(backend=backend)), (q, k, v), dout)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(memory_format=torch.contiguous_format), lambda t: t):
        out = flashtile.attention(q, k, v, options=Options(backend=backend))
    for got, exact in zip(torch.autograd.grad(out, (q, k, v), dout), expected, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-5)


def test_an_input_changed_in_place_is_noticed(backend: str, place: torch.device) -> None:
    given = leaves(place, ("q",))
    out, _ = attend(given, backend, "auto")
    given["k"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_the_gradient_of_a_gradient_is_refused(backend: str, place: torch.device) -> None:
    """Also as a part of a larger loss, where a missing path would be a silent zero."""
    given = leaves(place, ("q", "slopes"))
    out, _ = attend(given, backend, "auto")
    grads = torch.autograd.grad(out.sum(), [given["q"], given["slopes"]], create_graph=True)
    for grad in grads:
        loss = grad.pow(2).sum() + given["q"].sum()
        if backend == "cpu":
            assert not torch.equal(torch.autograd.grad(loss, given["q"], retain_graph=True)[0], torch.ones_like(grads[0]))
            continue
        with pytest.raises(flashtile.NotSupported, match=r"(?s)second derivative of attention.*not implemented"):
            loss.backward(retain_graph=True)
        with pytest.raises(flashtile.NotSupported, match="second derivative of attention"):  # which visits no other node
            torch.autograd.grad(loss, given["q"], retain_graph=True)


@pytest.mark.parametrize("source", [*NAMES, "dout", "dlse"])
def test_the_gradient_of_a_gradient_is_refused_to_whom_asks_for_one_input(
    backend: str, place: torch.device, source: str
) -> None:
    """torch.autograd.grad visits only what leads to the input: without that it would give q's own path here, alone."""
    given = leaves(place)
    factors = {name: torch.ones((), device=place, requires_grad=True) for name in (*NAMES, "dout", "dlse")}
    out, lse = attend({name: t * factors[name] for name, t in given.items()}, backend, "auto")
    loss = (out * factors["dout"]).sum() + (lse * factors["dlse"]).sum()
    (dq,) = torch.autograd.grad(loss, given["q"], create_graph=True)
    if backend == "cpu":
        leaf = (dq * given["q"]).sum()
        (whole,) = torch.autograd.grad((dq * given["q"] * factors[source]).sum(), factors[source])
        assert source == "v" or abs(whole.item() - leaf.item()) > 1e-3 * abs(leaf.item())  # more than its own path
        return
    with pytest.raises(flashtile.NotSupported, match=r"(?s)second derivative of attention.*not implemented"):
        torch.autograd.grad((dq * given["q"] * factors[source]).sum(), factors[source])


def test_a_gradient_with_a_graph_may_be_used(backend: str, place: torch.device) -> None:
    """As long as nobody differentiates it."""
    results = []
    for create_graph in (False, True):
        given = leaves(place)
        out, lse = attend(given, backend, "auto")
        loss = out.sum() + lse.sum()
        grads = torch.autograd.grad(loss, [*given.values()], create_graph=create_graph)
        results.append(grads)
        if create_graph:
            again = torch.autograd.grad(loss + (grads[0].detach() * given["q"]).sum(), given["q"])[0]
            torch.testing.assert_close(again, 2 * grads[0].detach(), rtol=1e-5, atol=1e-5)
    for plain, with_graph in zip(*results, strict=True):
        torch.testing.assert_close(with_graph.detach(), plain, rtol=1e-5, atol=1e-6)


def test_gradients_are_none_where_no_output_is_used(backend: str, place: torch.device) -> None:
    given = leaves(place, ("q", "k"))
    attend(given, backend, "auto")
    assert given["q"].grad is None
    other = given["q"].sum()
    other.backward()
    assert given["k"].grad is None


def test_gradients_take_the_dtype_and_order_of_their_inputs(backend: str, place: torch.device) -> None:
    given = {name: t.detach() for name, t in leaves(place).items()}
    given["slopes"] = given["slopes"].half()
    given["q"] = given["q"].transpose(1, 2).contiguous().transpose(1, 2)
    for tensor in given.values():
        tensor.requires_grad_()
    out, lse = attend(given, backend, "auto")
    grads = torch.autograd.grad([out, lse], list(given.values()), [torch.ones_like(out), torch.ones_like(lse)])
    assert [g.dtype for g in grads] == [t.dtype for t in given.values()]
    assert [g.shape for g in grads] == [t.shape for t in given.values()]
    assert out.stride() == given["q"].stride(), "out keeps the memory order of q"


def test_a_compiled_function_may_call_backward_of_an_eager_call() -> None:
    """The compiler then meets the backward itself, in Python."""
    q = torch.randn(2, 9, 2, 16, requires_grad=True)
    out = flashtile.attention(q, q, q, options=Options(backend="cpu"))
    (expected,) = torch.autograd.grad(out.sin().sum(), q, retain_graph=True)
    torch._dynamo.reset()
    torch.compile(lambda out: out.sin().sum().backward(), backend="aot_eager")(out)
    torch.testing.assert_close(q.grad, expected)
