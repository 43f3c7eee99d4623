"""Statistics of the softmax against plain float64: largest logit, entropy with its gradient, mass; every backend."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import flashtile
from flashtile import (
    Alibi,
    Band,
    Bias,
    Document,
    InvalidProblem,
    Mass,
    NotSupported,
    Options,
    Softcap,
    Statistics,
    dispatch,
    qk_clip,
)  # fmt: skip
from flashtile.kernels.portable.directed import KEYS, plan_statistics
from flashtile.kernels.portable.tile import Launch, products
from flashtile.problem.predicate import normal_form
from flashtile.reference.attention import holds, positions, visible
from tests.torch.test_second_order import drawn

ALL = ("lse", "max_logit", "entropy", Mass(last=3))
BACKENDS = ("cpu", "triton")
DRAWS = 80


def place_of(backend: str, device: torch.device) -> torch.device:
    return torch.device("cpu") if backend == "cpu" else device


def defined(scores: torch.Tensor, sink: torch.Tensor | None, last: int) -> Statistics:
    """The definitions, of scores (..., heads, queries, keys) that are -inf where hidden."""
    whole = scores
    if sink is not None:
        whole = torch.cat((scores, sink.to(scores)[:, None, None].expand(*scores.shape[:-1], 1)), -1)
    lse = whole.logsumexp(-1)
    p = (whole - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    entropy = -torch.where(p > 0, p * torch.where(p > 0, p, 1.0).log(), 0.0).sum(-1)
    mass = p[..., max(scores.shape[-2] - last, 0) :, : scores.shape[-1]].sum(-2)
    largest = scores.amax((-1, -2)) if scores.numel() else scores.new_full(scores.shape[:-2], -torch.inf)
    return Statistics(lse, largest, entropy, mass)


def attention_scores(
    q: torch.Tensor, k: torch.Tensor, causal: bool = False, window: Any = None, mask: Any = None, score: Any = ()
) -> torch.Tensor:
    """Scaled, modified scores (batch, heads_q, seqlen_q, seqlen_k); -inf where hidden."""
    band, terms = normal_form(causal, window, mask)
    at = positions(q.shape[0], q.shape[2], q.shape[1], k.shape[1], q.device)
    keys = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) / q.shape[-1] ** 0.5
    for modifier in score:
        scores = modifier.apply(scores, at, modifier.scalars(), modifier.tensors(q.shape[0], q.shape[2])).to(scores.dtype)
    keep = visible(band, q.shape[1], k.shape[1], q.device) & holds(terms, at, (q.shape[0], q.shape[2]))
    return scores.masked_fill(~keep, -torch.inf)


def close(found: torch.Tensor, exact: torch.Tensor, most: float) -> None:
    torch.testing.assert_close(found.double().cpu(), exact.double().cpu(), rtol=most, atol=most)


def sizes(**how: Any) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shape = dict(batch=2, seqlen_q=37, seqlen_k=45, heads_q=4, heads_kv=2, head_dim=16) | how
    b, d = shape["batch"], shape["head_dim"]
    q = torch.randn(b, shape["seqlen_q"], shape["heads_q"], d, generator=generator)
    k, v = (torch.randn(b, shape["seqlen_k"], shape["heads_kv"], d, generator=generator) for _ in range(2))
    return 3 * q, k, v


def documents(ahead: int, device: torch.device | None = None) -> Any:
    """Causal documents of nine tokens; the last queries of those that are `ahead` see nothing."""
    q, k = (torch.arange(n, device=device)[None].expand(2, -1) // 9 for n in (37, 45))
    return Document(q + ahead, k) & Band(right=10)


GIVEN: dict[str, dict[str, Any]] = {
    "plain": {}, "causal": dict(causal=True), "window": dict(window=(5, 3)), "softcap": dict(score=(Softcap(2.0),)),
    "alibi": dict(score=(Alibi(torch.tensor([0.1, 0.2, 0.5, 1.0])),), causal=True), "sink": dict(sink=torch.randn(4)),
    "large sink": dict(sink=torch.tensor([30.0, -3.0, 12.0, 8.0])),
    "bias": dict(score=(Bias(torch.randn(1, 4, 37, 45)), Softcap(4.0)), sink=torch.randn(4)),
    "document": dict(mask=documents(0)), "blind": dict(mask=documents(2)), "dropout": dict(dropout=flashtile.Dropout(0.4, 3)),
}  # fmt: skip


def moved(given: dict[str, Any], place: torch.device) -> dict[str, Any]:
    """The arguments on another device."""
    if place.type == "cpu":
        return given
    there = dict(given)
    if "sink" in given:
        there["sink"] = given["sink"].to(place)
    there["score"] = tuple(
        replace(s, **{n: t.to(place) for n, t in vars(s).items() if isinstance(t, torch.Tensor)})
        for s in given.get("score", ())
    )
    if "mask" in given:
        there["mask"] = documents(0 if given is GIVEN["document"] else 2, place)
    return there


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", GIVEN)
def test_as_defined(name: str, dtype: torch.dtype, backend: str, device: torch.device) -> None:
    place, given = place_of(backend, device), GIVEN[name]
    q, k, v = (t.to(dtype) for t in sizes())
    leaves = [t.to(place).requires_grad_() for t in (q, k, v)]
    there = moved(given, place)
    out, found = flashtile.attention(*leaves, **there, returns=ALL, options=Options(backend=backend))
    assert torch.equal(out, flashtile.attention(*leaves, **there, return_lse=True, options=Options(backend=backend))[0])
    wide: Any = [t.double().requires_grad_() for t in (q, k)]
    exact = defined(
        attention_scores(*wide, **{n: x for n, x in given.items() if n not in ("sink", "dropout")}), given.get("sink"), 3
    )
    most = 2e-5 if dtype is torch.float32 else 2e-3  # of 16 bits products are exact, and sums float32
    for one, truth in zip(found, exact, strict=True):
        close(one.detach(), truth, most)
    assert (found.max_logit.requires_grad, found.mass.requires_grad, found.entropy.requires_grad) == (False, False, True)
    weight = torch.randn(found.entropy.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grads = torch.autograd.grad((found.entropy * weight.to(found.entropy)).sum(), leaves[:2])
    truths = torch.autograd.grad((exact.entropy * weight).sum(), wide)
    for one, truth in zip(grads, truths, strict=True):
        close(one, truth, 1e-4 if dtype is torch.float32 else 3e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_varlen_is_each_item(backend: str, device: torch.device) -> None:
    place, options = place_of(backend, device), Options(backend=backend)
    q, k, v = (t[0].to(place) for t in sizes())
    q[9] *= 5.0  # the largest scores are those of an item's first query
    ends = [(0, 0), (9, 20), (9, 21), (30, 40)]  # the second item has no queries, and tokens are left
    cu_q, cu_k = (torch.tensor(some, dtype=torch.int32, device=place) for some in zip(*ends, strict=True))
    leaves: Any = [t.requires_grad_() for t in (q, k)]
    out, found = flashtile.attention_varlen(q, k, v, cu_q, cu_k, causal=True, returns=ALL, options=options)
    total = found.entropy.square().sum()
    grads = torch.autograd.grad(total, leaves)
    assert (out.shape, found.max_logit.shape, found.mass.shape) == (q.shape, (3, 4), (4, 45))
    sums = [torch.zeros_like(t) for t in leaves]
    for i, ((a, c), (b, d)) in enumerate(pairwise(ends)):
        if a == b:
            assert (found.max_logit[i] == -torch.inf).all()
            assert not found.mass[:, c:d].any()
            continue
        some: Any = [q[None, a:b].detach().requires_grad_(), k[None, c:d].detach().requires_grad_()]
        _, alone = flashtile.attention(some[0], some[1], v[None, c:d], causal=True, returns=ALL, options=options)
        close(found.max_logit[i], alone.max_logit[0], 1e-6)
        close(found.entropy[:, a:b], alone.entropy[0], 1e-5)
        close(found.mass[:, c:d], alone.mass[0], 1e-5)
        for whole, grad, where in zip(
            sums, torch.autograd.grad(alone.entropy.square().sum(), some), ((a, b), (c, d)), strict=True
        ):
            whole[where[0] : where[1]] = grad[0]
    for grad, whole in zip(grads, sums, strict=True):
        close(grad, whole, 1e-5)
    assert not found.mass[:, 40:].any()
    assert not found.entropy[:, 30:].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("keys", [0, 7])
def test_items_without_queries(keys: int, backend: str, device: torch.device) -> None:
    place = place_of(backend, device)
    q, k, v = (torch.randn(n, heads, 8, device=place, requires_grad=True) for n, heads in ((0, 4), (keys, 2), (keys, 2)))
    cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32, device=place) for ends in ([0, 0, 0], [0, keys // 2, keys]))
    out, found = flashtile.attention_varlen(q, k, v, cu_q, cu_k, returns=ALL, options=Options(backend=backend))
    assert out.shape == (0, 4, 8)
    assert found.lse.shape == found.entropy.shape == (4, 0)
    assert found.max_logit.tolist() == [[-torch.inf] * 4] * 2
    assert found.mass.tolist() == [[0.0] * keys] * 4
    for gradient in torch.autograd.grad((out, found.entropy), (q, k, v), (out.detach(), found.entropy.detach())):
        assert not gradient.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_used_lengths(backend: str, device: torch.device) -> None:
    place, options = place_of(backend, device), Options(backend=backend)
    q, k, v = (t.to(place) for t in sizes())
    used: dict[str, Any] = {
        "seqused_q": torch.tensor([30, 37], dtype=torch.int32, device=place),
        "seqused_k": torch.tensor([45, 11], dtype=torch.int32, device=place),
    }
    _, found = flashtile.attention(q, k, v, causal=True, returns=(Mass(last=3), "max_logit"), options=options, **used)
    for i in range(2):
        a, c = (int(n[i]) for n in used.values())
        alone = flashtile.attention(
            q[i : i + 1, :a], k[i : i + 1, :c], v[i : i + 1, :c], causal=True, returns=ALL, options=options
        )[1]
        close(found.mass[i, :, :c], alone.mass[0], 1e-5)
        close(found.max_logit[i], alone.max_logit[0], 1e-6)


@pytest.mark.parametrize("last", [1, 20, 64])
@pytest.mark.parametrize("features", ["", "causal", "used", "varlen"])
def test_mass_by_parts(features: str, last: int, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """A program of more keys than a product has; keys end within a part, queries in more tiles than one."""
    place = device
    q, k, v = (t.to(place) for t in sizes(batch=2, seqlen_q=50, seqlen_k=300, head_dim=16))
    given: dict[str, Any] = {"causal": features == "causal"}
    if features == "used":
        for name, some in (("seqused_q", [50, 19]), ("seqused_k", [300, 129])):
            given[name] = torch.tensor(some, dtype=torch.int32, device=place)
    if features == "varlen":
        for name, some in (("cu_seqlens_q", [0, 17, 90, 100]), ("cu_seqlens_k", [0, 200, 200, 590])):
            given[name] = torch.tensor(some, dtype=torch.int32, device=place)
        q, k, v = (t.reshape(-1, *t.shape[2:]) for t in (q, k, v))
    call = flashtile.attention_varlen if features == "varlen" else flashtile.attention
    expected = call(q, k, v, **given, returns=Mass(last=last), options=Options(backend="triton"))[1].mass
    plans = list[Any]()

    def plan(name: str, problem: Any, device: Any, direction: Any, backend: Any) -> Any:
        assert name == "statistics"
        tile = Launch(16, 256, products=products(problem, device, KEYS))
        plans.append(plan_statistics(problem, device, direction, {KEYS: tile}))
        return plans[-1]

    monkeypatch.setattr(dispatch, "plan_pass", plan)
    flashtile.cache_clear()
    found = call(q, k, v, **given, returns=Mass(last=last), options=Options(backend="triton"))[1].mass
    assert dict(plans[0].calls[-1].constants)["PACE"].parts == 2
    close(found, expected, 1e-6)


@pytest.mark.parametrize("shard", range(2))
def test_random_entropies_pass_gradcheck(shard: int) -> None:
    """In float64 on the CPU, captured tensors and sinks too."""
    checked = 0
    for seed in range(shard, DRAWS, 2):
        case = drawn(seed)
        if case.cu_q is not None or case.used_q is not None or case.mask is not None:
            continue
        tensors = {
            n: t.double().requires_grad_()
            for n, t in case.tensors(torch.device("cpu")).items()
            if n not in ("dout", "dlse") and t.is_floating_point()
        }

        def entropy(*given: torch.Tensor, case: Any = case, names: Any = tuple(tensors)) -> torch.Tensor:
            some = dict(zip(names, given, strict=True))
            return flashtile.attention(*(some[n] for n in "qkv"), **case.given(some), returns="entropy")[1].entropy

        made = entropy(*tensors.values())
        used = [t for n, t in tensors.items() if n != "v"]
        assert torch.autograd.gradcheck(lambda *x, made=entropy, v=tensors["v"]: made(*x[:2], v, *x[2:]), used)
        assert (made >= 0).all()
        checked += 1
    assert checked >= 10


def test_transforms_and_compile() -> None:
    q, k, v = (t.double() for t in sizes(seqlen_q=5, seqlen_k=7))
    entropy = lambda q, k: flashtile.attention(q, k, v, returns="entropy")[1].entropy  # noqa: E731
    expected = torch.func.grad(lambda q: entropy(q, k).square().sum())(q)
    leaf = q.clone().requires_grad_()
    (found,) = torch.autograd.grad(entropy(leaf, k).square().sum(), leaf)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.func.vmap(entropy)(torch.stack((q, 2 * q)), torch.stack((k, k)))[1], entropy(2 * q, k))
    with pytest.raises(NotSupported, match=r"(?s)forward-mode.*entropy of attention.*by q"):
        torch.func.jvp(lambda q: entropy(q, k), (q,), (q,))
    (grad,) = torch.autograd.grad(entropy(leaf, k).square().sum(), leaf, create_graph=True)
    with pytest.raises(NotSupported, match="second derivative of attention's entropy"):
        grad.sum().backward()
    compiled = torch.compile(lambda q: flashtile.attention(q, k, v, returns=ALL), fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(leaf)[1], flashtile.attention(leaf, k, v, returns=ALL)[1], strict=True):
        torch.testing.assert_close(one, other)
    (again,) = torch.autograd.grad(compiled(leaf)[1].entropy.square().sum(), leaf)
    torch.testing.assert_close(again, expected)


def test_tangents_of_the_entropys_gradient_are_refused() -> None:
    """jvp of grad: no zero."""
    q, k, v = sizes(seqlen_q=3, seqlen_k=4)
    summed = lambda q: flashtile.attention(q, k, v, returns="entropy")[1].entropy.square().sum()  # noqa: E731
    for derivative in (torch.func.grad(summed), torch.func.jacrev(summed)):
        with pytest.raises(NotSupported, match=r"(?s)forward-mode.*statistics of attention by q"):
            torch.func.jvp(derivative, (q,), (q,))
    pull: Any = torch.func.vjp(lambda q: flashtile.attention(q, k, v, returns="entropy")[1].entropy, q)[1]
    with pytest.raises(NotSupported, match=r"(?s)forward-mode.*gradients of attention's entropy by dentropy"):
        torch.func.jvp(pull, (torch.ones(2, 4, 3),), (torch.ones(2, 4, 3),))


def test_errors_say_what_to_do() -> None:
    q, k, v = sizes()
    for returns, what in (("entropie", "returns has 'entropie'"), (("lse", "lse"), "twice"), ("mass", "Mass")):
        with pytest.raises(InvalidProblem, match=what):
            flashtile.attention(q, k, v, returns=returns)
    with pytest.raises(InvalidProblem, match="last"):
        Mass(last=0)
    with pytest.raises(InvalidProblem, match="return_lse is True besides returns"):
        flashtile.attention(q, k, v, returns="lse", return_lse=True)
    with pytest.raises(NotSupported, match="seqused_k of bool"):
        flashtile.attention(q, k, v, returns="lse", seqused_k=torch.ones(2, 45, dtype=torch.bool))


def test_absent_statistics_run_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashtile.torch.api import statistics

    monkeypatch.setattr(statistics, "STATISTICS", None)
    q, k, v = sizes()
    out, found = flashtile.attention(q, k, v, returns="lse")
    expected = flashtile.attention(q, k, v, return_lse=True)
    assert torch.equal(out, expected[0])
    assert torch.equal(found.lse, expected[1])
    assert found[1:] == (None, None, None)


def test_a_forward_of_kernels_keeps_rows_statistics_itself(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """In one launch, lists of blocks read or not; out may be differentiated twice; what is not asked for is not there."""
    from flashtile.torch.execute import directed

    monkeypatch.setattr(directed, "statistics", None)
    q, k, v = (t.to(device) for t in sizes())
    place = documents(0, device)
    for mask in (place, flashtile.Blocks.build(place, 37, 45, batch=2, block_size=(32, 32))):
        options = Options(backend="triton")
        out, found = flashtile.attention(q, k, v, mask=mask, returns=("max_logit", "entropy"), options=options)
        assert torch.equal(out, flashtile.attention(q, k, v, mask=mask, return_lse=True, options=options)[0])
        assert found.lse is None
        exact = defined(attention_scores(q.double().cpu(), k.double().cpu(), mask=documents(0)), None, 3)
        close(found.max_logit, exact.max_logit, 2e-5)
        close(found.entropy, exact.entropy, 2e-5)
    leaf = q.clone().requires_grad_()
    out, found = flashtile.attention(leaf, k, v, returns="max_logit", options=options)
    plain = flashtile.attention(leaf, k, v, options=options)
    pair = [torch.autograd.grad(x.square().sum(), leaf, create_graph=True)[0] for x in (out, plain)]
    twice = [torch.autograd.grad(g.square().sum(), leaf)[0] for g in pair]
    torch.testing.assert_close(*twice)
    assert found.entropy is None


def test_qk_clip_bounds_logits() -> None:
    q, k, v = sizes()
    _, found = flashtile.attention(10 * q, k, v, returns="max_logit")
    threshold = 20.0
    of_q, of_k = qk_clip(found.max_logit, threshold, heads_kv=2)
    clipped = flashtile.attention(10 * q * of_q[:, None], k * of_k[:, None], v, returns="max_logit")[1].max_logit.amax(0)
    torch.testing.assert_close(clipped, found.max_logit.amax(0).clamp(max=threshold))
    same = qk_clip(torch.tensor([1.0, -torch.inf]))
    assert all(torch.equal(t, torch.ones(2)) for t in same)
    with pytest.raises(InvalidProblem, match="heads_kv is 3"):
        qk_clip(found.max_logit, heads_kv=3)
