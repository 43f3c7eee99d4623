"""Second derivatives on the CPU: identities that need no reference, over random cases, and autograd through the definition."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

import flashtile
from flashtile import NotSupported, Options, Softcap
from flashtile.reference.attention import attention_plain, attention_reference
from tests.cases import MASKS, MODIFIERS, Case, Tensors
from tests.torch.test_float64 import CASES, CPU, doubled

DRAWS = 440
SHARDS = 8
LISTED = ("blocks", "table", "one-long", "flash-attn-v1")  # made by kernels first, and the same to the CPU
PREDICATES = [name for name in MASKS if not any(word in name for word in LISTED)]
CPU_ONLY = Options(backend="cpu")


def drawn(seed: int) -> Case:
    """A random problem of a few queries and keys."""
    draw = random.Random(seed)
    heads_kv = draw.choice((1, 2))
    sizes = dict(seqlen_q=draw.randint(1, 9), seqlen_k=draw.randint(1, 9), head_dim=draw.randint(1, 5))
    sizes |= dict(heads_kv=heads_kv, heads_q=heads_kv * draw.choice((1, 2)), head_dim_v=draw.randint(1, 4))
    how: dict[str, Any] = {}
    shape = draw.choice(("plain", "plain", "varlen", "used", "mask"))
    if shape == "varlen":
        cut_q, cut_k = draw.randint(0, sizes["seqlen_q"]), draw.randint(0, sizes["seqlen_k"])
        how = dict(cu_q=(0, cut_q, sizes["seqlen_q"]), cu_k=(0, cut_k, sizes["seqlen_k"]))
    elif shape == "used":
        how = dict(batch=2, used_q=(draw.randint(0, sizes["seqlen_q"]), sizes["seqlen_q"]))
        how["used_k"] = (draw.randint(0, sizes["seqlen_k"]), draw.randint(0, sizes["seqlen_k"]))
    elif shape == "mask":
        how = dict(mask=draw.choice(PREDICATES))
    else:
        how = dict(batch=draw.choice((1, 2)))
    if draw.random() < 0.5:
        how["window"] = draw.choice(((None, 0), (2, 1), (0, 3), (None, 2)))
    if draw.random() < 0.6:
        how["score"] = tuple(draw.sample(sorted(MODIFIERS), draw.choice((1, 1, 2))))
    if shape in ("varlen", "used"):  # whose positions differ from item to item
        how["score"] = tuple(name for name in how.get("score", ()) if not name.startswith("bias") or "each" in name)
    if draw.random() < 0.4:
        how["sink"] = "fp32"
    if draw.random() < 0.3:
        how["dropout"] = 0.3
    return Case(f"second-{seed}", **sizes, **how)


def function_of(case: Case, names: list[str]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    how = case.masks(CPU) | case.lengths(CPU) | {"return_lse": True, "options": CPU_ONLY}

    def outputs(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = dict(zip(names, given, strict=True))
        out, lse = case.function(*(tensors[n] for n in "qkv"), **case.given(tensors), **how)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    return outputs


def like(tensors: Tensors, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in tensors.values())


def dot(left: Any, right: Any) -> torch.Tensor:
    return sum(((a * b).sum() for a, b in zip(left, right, strict=True)), torch.zeros((), dtype=torch.float64))


def close(left: torch.Tensor, right: torch.Tensor, scale: torch.Tensor) -> bool:
    return bool((left - right).abs() <= 1e-11 * (1.0 + scale.abs()))


@pytest.mark.parametrize("shard", range(SHARDS))
def test_identities(shard: int) -> None:
    """The tangent is the backward's adjoint, linear in what moves; the Hessian is symmetric, by either way to it."""
    checked = 0
    for seed in range(shard, DRAWS, SHARDS):
        case, generator = drawn(seed), torch.Generator().manual_seed(seed)
        tensors = doubled(case)
        function, leaves = function_of(case, [*tensors]), tuple(t.requires_grad_() for t in tensors.values())
        a, b = like(tensors, generator), like(tensors, generator)
        primal, moved = torch.func.jvp(function, tuple(t.detach() for t in leaves), a)
        upstream = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in primal]
        made = function(*leaves)
        grads = torch.autograd.grad(made, leaves, upstream, retain_graph=True)
        size = dot([m.abs() for m in moved], [u.abs() for u in upstream])
        assert close(dot(moved, upstream), dot(grads, a), size), f"adjoint: {case}"

        plain = tuple(t.detach() for t in leaves)
        if seed % 4 == 0:
            mixed = [2.0 * x - 3.0 * y for x, y in zip(a, b, strict=True)]
            other, both = (torch.func.jvp(function, plain, tuple(some))[1] for some in (b, mixed))
            for one, two, joined in zip(moved, other, both, strict=True):
                torch.testing.assert_close(joined, 2.0 * one - 3.0 * two, rtol=1e-10, atol=1e-10)

        def loss(*given: torch.Tensor, function: Any = function) -> torch.Tensor:
            return sum((made.square().sum() + made.sin().sum() for made in function(*given)), torch.zeros(()))

        first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
        ha, hb = (torch.autograd.grad(dot(first, some), leaves, retain_graph=True) for some in (a, b))
        size = dot([h.abs() for h in ha], [x.abs() for x in b])
        assert close(dot(ha, b), dot(hb, a), size), f"symmetry: {case}"
        every = tuple(range(len(plain)))
        if seed % 2:  # forward over reverse, reverse over forward
            again = torch.func.jvp(torch.func.grad(loss, argnums=every), plain, a)[1]
        else:
            again = torch.func.grad(lambda *x: torch.func.jvp(loss, x, a)[1], argnums=every)(*plain)  # noqa: B023
        for one, two in zip(ha, again, strict=True):
            torch.testing.assert_close(two, one, rtol=1e-9, atol=1e-9)
        checked += 1
    assert checked == DRAWS // SHARDS


@pytest.mark.parametrize("case", [c for c in CASES if c.mask not in set(MASKS) - set(PREDICATES)], ids=lambda case: case.name)
def test_gradgradcheck(case: Case) -> None:
    tensors = doubled(case)
    leaves = tuple(t.requires_grad_() for t in tensors.values())
    function = function_of(case, [*tensors])
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradcheck(
        function, leaves, fast_mode=True, check_forward_ad=True, check_backward_ad=False, check_undefined_grad=False
    )


@pytest.mark.parametrize("seqlen", [30, 700])
def test_against_the_definition(seqlen: int) -> None:
    """Of several tiles too: the Hessian along a direction, of everything."""
    case = Case("second-exact", seqlen_q=seqlen, seqlen_k=seqlen + 9, causal=True, score=("softcap", "alibi"), sink="fp32")
    tensors = doubled(case)
    names, plain = [*tensors], tuple(tensors.values())
    direction = like(tensors, torch.Generator().manual_seed(1))

    def reference(*given: torch.Tensor) -> Any:
        named = dict(zip(names, given, strict=True))
        return attention_reference(*(named[n] for n in "qkv"), **case.given(named))

    def along(function: Callable[..., Any]) -> Any:
        def loss(*given: torch.Tensor) -> torch.Tensor:
            out, lse = function(*given)
            return out.square().sum() + lse.sin().sum()

        return torch.func.jvp(torch.func.grad(loss, argnums=(0, 1, 2, 3, 4)), plain, direction)[1]

    found, expected = along(function_of(case, names)), along(reference)
    for one, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(one, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_it_is_as_exact_as_plain_pytorch(dtype: torch.dtype) -> None:
    """Tangents and second derivatives: at most 1.5 times as far from float64 as attention in a few lines of the same dtype."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 300, 2, 32, generator=generator).to(dtype) for _ in range(3))
    tangents = tuple(torch.randn(t.shape, generator=generator).to(dtype) for t in (q, k, v))
    given = {"causal": True, "score": (Softcap(5.0),)}

    def of(function: Callable[..., Any], wide: torch.dtype) -> list[torch.Tensor]:
        x, t = (tuple(one.to(wide) for one in some) for some in ((q, k, v), tangents))
        moved = torch.func.jvp(lambda *x: function(*x)[0], x, t)[1]
        grads = torch.func.grad(lambda *x: function(*x)[0].square().sum(dtype=torch.float32), argnums=(0, 1, 2))
        return [one.double() for one in (moved, *torch.func.jvp(grads, x, t)[1])]

    exact = of(lambda *x: attention_plain(*x, **given), torch.float64)
    plain = of(lambda *x: attention_plain(*x, **given), dtype)
    found = of(lambda *x: flashtile.attention(*x, **given, return_lse=True, options=CPU_ONLY), dtype)
    for truth, one, other in zip(exact, found, plain, strict=True):
        ulp = torch.finfo(dtype).eps * truth.abs().max()
        assert (one - truth).abs().max() <= max(1.5 * (other - truth).abs().max(), 2 * ulp)


def test_what_nobody_sees_reaches_nothing() -> None:
    """Values and tangents at hidden keys and padded queries may hold NaN."""
    q, k, v = (torch.randn(2, 20, 2, 8) for _ in range(3))
    used = torch.tensor([11, 20], dtype=torch.int32)

    def step(value: float) -> list[torch.Tensor]:
        x = [t.clone() for t in (q, k, v)]
        moved = [t.sin() for t in x]
        for t in (*x, *moved):
            t[0, 11:] = value
        how = dict(seqused_q=used, seqused_k=used, causal=True, return_lse=True, options=CPU_ONLY)
        out = torch.func.jvp(lambda *x: flashtile.attention(*x, **how)[0], tuple(x), tuple(moved))[1]
        weight = torch.ones_like(out)
        weight[0, 11:] = value
        grads = torch.func.grad(lambda *x: (flashtile.attention(*x, **how)[0][:1, :11].square()).sum(), argnums=(0, 1, 2))
        return [out, *torch.func.jvp(grads, tuple(x), tuple(moved))[1]]

    for clean, dirty in zip(step(0.0), step(float("nan")), strict=True):
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize("what", ["jvp", "double backward"])
def test_memory_is_linear(what: str) -> None:
    """No part of either is as large as the scores of a head."""
    seqlen = 4096
    q, k, v = (torch.randn(1, seqlen, 1, 8) for _ in range(3))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        if what == "jvp":
            with forward_ad.dual_level():
                flashtile.attention(forward_ad.make_dual(q.detach(), k.detach()), k, v, causal=True, options=CPU_ONLY)
        else:
            out = flashtile.attention(*leaves, causal=True, options=CPU_ONLY)
            grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
            sum(g.square().sum() for g in grads).backward()
    profiler: Any = record.profiler
    sizes = [event.nbytes() for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    assert max(sizes) < seqlen * seqlen * 4 / 8


def test_without_use_nothing_more_is_kept() -> None:
    """A backward without create_graph leaves no graph, and out's graph holds what it held."""
    q = torch.randn(1, 8, 2, 8, requires_grad=True)
    (dq,) = torch.autograd.grad(flashtile.attention(q, q, q, options=CPU_ONLY).sum(), q)
    assert dq.grad_fn is None


def test_vmap_of_jacobians() -> None:
    q, k, v = (torch.randn(3, 1, 4, 1, 2, dtype=torch.float64) for _ in range(3))

    def hessian_of(function: Callable[..., Any]) -> Any:
        return torch.func.vmap(torch.func.hessian(lambda q, k, v: function(q, k, v).square().sum(), argnums=(0, 1)))(q, k, v)

    found = hessian_of(lambda *x: flashtile.attention(*x, causal=True))
    expected = hessian_of(lambda *x: attention_reference(*x, causal=True)[0])
    for one, exact in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        torch.testing.assert_close(one, exact)


def test_tangents_of_a_vmap() -> None:
    q, k, v = (torch.randn(3, 1, 4, 1, 2, dtype=torch.float64) for _ in range(3))
    moved = tuple(t.sin() for t in (q, k, v))

    def both(function: Callable[..., Any]) -> Any:
        mapped = torch.func.vmap(function)
        grads = torch.func.grad(lambda *x: mapped(*x).square().sum(), argnums=(0, 1, 2))
        some = torch.func.jvp(lambda k: torch.func.vmap(function, in_dims=(0, None, 0))(q, k, v), (k[0],), (moved[1][0],))
        return torch.func.jvp(mapped, (q, k, v), moved), torch.func.jvp(grads, (q, k, v), moved), some

    found = both(lambda *x: flashtile.attention(*x, causal=True))
    expected = both(lambda *x: attention_reference(*x, causal=True)[0])
    for one, exact in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        torch.testing.assert_close(one, exact)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])  # whose backward keeps more
def test_gradients_of_mapped_tangents(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 4, 1, 2, dtype=torch.float64) for _ in range(3))
    moved = torch.randn(3, *q.shape, dtype=torch.float64)

    def gradients(function: Callable[..., Any], dtype: torch.dtype) -> Any:
        def along(q: Any, k: Any, v: Any) -> Any:
            each = lambda t: torch.func.jvp(lambda q, k: function(q, k, v), (q, k), (t, t.cos()))  # noqa: E731
            out, tangents = torch.func.vmap(each)(moved.to(dtype))
            return out.sin().sum() + tangents.square().sum()

        return torch.func.grad(along, argnums=(0, 1, 2))(*(t.to(dtype) for t in (q, k, v)))

    found = gradients(lambda *x: flashtile.attention(*x, causal=True), dtype)
    expected = gradients(lambda *x: attention_reference(*x, causal=True)[0], torch.float64)
    for one, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(one, exact.to(dtype), atol=1e-4, rtol=1e-4)


def test_what_is_missing_says_so() -> None:
    q, k, v = (torch.randn(1, 4, 1, 2) for _ in range(3))

    def attend(q: torch.Tensor) -> torch.Tensor:
        return flashtile.attention(q, k, v)

    with pytest.raises(NotSupported, match="tangents of tangents are not implemented"):
        torch.func.jacfwd(torch.func.jacfwd(attend))(q)
    leaf = q.requires_grad_()
    (first,) = torch.autograd.grad(attend(leaf).square().sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaf, create_graph=True)
    with pytest.raises(NotSupported, match="the third derivative of attention"):
        torch.autograd.grad(second.square().sum(), leaf)
    each = torch.ones(3, *first.shape)
    with pytest.raises(NotSupported, match="a batch of second derivatives of attention"):
        torch.autograd.grad(first, leaf, each, retain_graph=True, is_grads_batched=True)
    with pytest.raises(NotSupported, match="a batch of second derivatives of attention"):
        torch.func.vmap(lambda one: torch.autograd.grad(first, leaf, one, retain_graph=True))(each)
