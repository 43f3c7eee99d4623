"""Forward mode and double backward of ops against the reference in float64: right, or refused by name, and never zero."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from flashtile import NotSupported, ops
from flashtile.kernels.ops.catalogue import BACKENDS, OPS
from flashtile.torch.ops.run import run
from tests.companions.cases import CASES, Case, Tensors


def inputs(case: Case, device: str) -> Tensors:
    made = case.tensors(torch.device(device))
    return {n: made[n].clone() for n, _ in case.problem.given}


def narrowest(case: Case) -> torch.dtype:
    kinds = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    given = [kinds[d.dtype] for d in (*dict(case.problem.given).values(), *case.problem.outputs().values()) if d.dtype in kinds]
    return max(given, key=lambda t: torch.finfo(t).eps)


SMALL = [
    case
    for case in CASES
    if sum(torch.Size(d.shape).numel() for _, d in case.problem.given) < 20_000 and not OPS[case.problem.op].over(case.problem)
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_double_backward(backend: str, device: torch.device) -> None:
    """Of a weighted sum of gradients, by inputs and by what arrived."""
    checked, refused, wrong = set[str](), set[str](), list[str]()
    for case in SMALL:
        problem = case.problem
        wanted = [n for n, _ in problem.given if n in case.wanted]
        place = "cpu" if backend == "cpu" else device.type
        given = inputs(case, place)
        for name in wanted:
            given[name].requires_grad_()
        outputs = run(problem.op, dict(given), problem.options(), backend)
        flows = [i for i, name in enumerate(problem.public()) if name not in problem.constant() and outputs[i].requires_grad]
        if not flows:
            continue
        upstream = {i: torch.randn_like(outputs[i]).requires_grad_() for i in flows}
        leaves = [*(given[n] for n in wanted), *upstream.values()]
        try:
            first = torch.autograd.grad(
                [outputs[i] for i in flows],
                leaves[: len(wanted)],
                list(upstream.values()),
                create_graph=True,
                allow_unused=True,
            )
            weights = [None if g is None else torch.randn_like(g) for g in first]
            total = sum(
                ((g * w).sum() for g, w in zip(first, weights, strict=True) if g is not None and w is not None), torch.zeros(())
            )
            second = torch.autograd.grad(total, leaves, allow_unused=True)
        except NotSupported:
            refused.add(case.name)
            continue
        wide = {n: t.detach().double().cpu() if t.is_floating_point() else t.detach().cpu() for n, t in given.items()}
        for name in wanted:
            wide[name].requires_grad_()
        truths = case.reference(wide)
        ups = {i: t.detach().double().cpu().requires_grad_() for i, t in upstream.items()}
        others = [*(wide[n] for n in wanted), *ups.values()]
        there = [i for i in flows if truths[problem.public()[i]].requires_grad]
        made = torch.autograd.grad(
            [truths[problem.public()[i]] for i in there], others[: len(wanted)], [ups[i] for i in there], create_graph=True,
            allow_unused=True,
        )  # fmt: skip
        whole = sum(
            ((g * w.double().cpu()).sum() for g, w in zip(made, weights, strict=True) if g is not None and w is not None),
            torch.zeros(()),
        )
        expected = torch.autograd.grad(whole, others, allow_unused=True)
        for name, one, truth in zip([*wanted, *map(str, ups)], second, expected, strict=True):
            if truth is None or not truth.any():
                continue
            if one is None:
                wrong.append(f"{case.name}: {name} has no second derivative")
                continue
            most = 512 * torch.finfo(narrowest(case)).eps * max(float(truth.abs().max()), 1.0)
            if not (one.double().cpu() - truth).abs().max() <= most:
                wrong.append(f"{case.name}: {name} off by {(one.double().cpu() - truth).abs().max()} of {truth.abs().max()}")
        checked.add(case.name)
    assert not wrong, "\n".join(wrong)
    assert len(checked) > 4 * len(refused), "\n".join(sorted(refused))


@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_mode(backend: str, device: torch.device) -> None:
    """With gradients of the same tensors wanted too: duals, and torch.func's."""
    wrong, checked = list[str](), 0
    for case in SMALL:
        problem = case.problem
        place = "cpu" if backend == "cpu" else device.type
        given = inputs(case, place)
        names = [n for n in given if n in case.wanted]
        moved = {n: torch.randn_like(given[n]) for n in names}
        for name in names:
            given[name].requires_grad_()
        with forward_ad.dual_level():
            duals = {n: forward_ad.make_dual(t, moved[n]) if n in moved else t for n, t in given.items()}
            try:
                outputs = run(problem.op, duals, problem.options(), backend)
            except NotSupported:
                continue
            wide = {n: t.detach().double().cpu() if t.is_floating_point() else t for n, t in given.items()}
            wide = {n: forward_ad.make_dual(t, moved[n].double().cpu()) if n in moved else t.cpu() for n, t in wide.items()}
            truths = case.reference(wide)
            for name, one in zip(problem.public(), outputs, strict=True):
                truth, found = (forward_ad.unpack_dual(t).tangent for t in (truths[name], one))
                if name in problem.constant() or truth is None or not truth.any():
                    continue
                if found is None:
                    wrong.append(f"{case.name}: {name} has no tangent")
                    continue
                most = 256 * torch.finfo(narrowest(case)).eps * max(float(truth.abs().max()), 1.0)
                if not (found.double().cpu() - truth).abs().max() <= most:
                    wrong.append(f"{case.name}: {name} off by {(found.double().cpu() - truth).abs().max()}")
            checked += 1
    assert not wrong, "\n".join(wrong)
    assert checked > len(SMALL) // 2


def test_a_block_differentiates_twice(device: torch.device) -> None:
    """A norm, rotary, softmax, linear + activation and a loss together, in every mode of torch.func."""
    generator = torch.Generator().manual_seed(0)
    x, w, w2, weight = (torch.randn(s, generator=generator).to(device) for s in ((6, 16), (16, 16), (5, 16), (16,)))
    labels = torch.arange(6, device=device) % 5

    def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        h = ops.linear_act(ops.rms_norm(x, weight), w)
        return ops.cross_entropy(ops.softmax(h[None, None])[0, 0] @ w2.T, labels)

    def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        h = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
        h = torch.nn.functional.gelu(h @ w.T, approximate="tanh")
        return torch.nn.functional.cross_entropy(h.softmax(-1) @ w2.T, labels)

    given, moved = (x, weight), (torch.randn_like(x), torch.randn_like(weight))
    found, expected = (torch.func.jvp(f, given, moved)[1] for f in (ours, plain))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    grad = lambda f: torch.func.grad(f, argnums=(0, 1))  # noqa: E731
    for one, other in zip(*(torch.func.jvp(grad(f), given, moved)[1] for f in (ours, plain)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    norm = lambda f: torch.func.grad(lambda x: sum(g.square().sum() for g in grad(f)(x, weight)))(x)  # noqa: E731
    torch.testing.assert_close(norm(ours), norm(plain), rtol=1e-3, atol=1e-5)
    both = lambda f: torch.func.grad(lambda x: torch.func.jvp(f, (x, weight), moved)[1])(x)  # noqa: E731
    torch.testing.assert_close(both(ours), both(plain), rtol=1e-3, atol=1e-5)


def test_refusals_say_what_helps() -> None:
    """Of create_graph where the forward kept too little: what is said there works."""
    logits, labels = torch.randn(5, 8, requires_grad=True), torch.randint(0, 8, (5,))
    (first,) = torch.autograd.grad(ops.cross_entropy(logits, labels), logits, create_graph=True)
    with pytest.raises(NotSupported, match="ask for eager_gradient=False"):
        first.sum().backward()
    (first,) = torch.autograd.grad(ops.cross_entropy(logits, labels, eager_gradient=False), logits, create_graph=True)
    torch.autograd.grad(first.square().sum(), logits)
    x, weight = torch.randn(5, 8, requires_grad=True), torch.randn(16, 8)
    (first,) = torch.autograd.grad(ops.linear_act(x, weight).sum(), x, create_graph=True)
    with pytest.raises(NotSupported, match=r"the forward kept no x; let all inputs require a gradient, or use torch\.func"):
        first.sum().backward()
    assert torch.func.hessian(lambda x: ops.linear_act(x, weight).sum())(x.detach()).any()
