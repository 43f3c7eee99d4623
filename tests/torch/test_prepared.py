"""Calls are prepared once and remembered: changing one argument must never meet what another call left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashtile
from flashtile import Alibi, Band, Options, Softcap
from flashtile.reference.attention import attention_reference
from tests.backends import VARIANTS_HERE
from tests.cases import lay_out

Arguments = dict[str, Any]


def warm_arguments(place: torch.device) -> Arguments:
    """Causal GQA with both modifiers: every argument set, so that each can change."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(place)

    return {
        "q": normal(1, 20, 2, 16), "k": normal(1, 36, 1, 16), "v": normal(1, 36, 1, 16), "slopes": normal(2).abs(), "cap": 3.0,
        "causal": True, "window": (30, 5), "mask": Band(right=3), "scale": 0.5, "order": (0, 1), "upstream": "both",
        "variant": "split", "layout": "bshd",
    }  # fmt: skip


def evaluate(function: Callable[..., Any], arguments: Arguments, dtype: torch.dtype | None = None, **extra: Any) -> list[Any]:
    """out, lse and the gradients of q, k, v, slopes under weighted sums as loss."""
    given = [arguments[name].to(dtype or arguments[name].dtype) for name in ("q", "k", "v", "slopes")]
    given = [t.detach().requires_grad_() for t in given]
    q, k, v, slopes = given
    modifiers = (Softcap(arguments["cap"]), Alibi(slopes))
    out, lse = function(
        q, k, v, causal=arguments["causal"], window=arguments["window"], mask=arguments["mask"], scale=arguments["scale"],
        score=[modifiers[i] for i in arguments["order"]], **extra,
    )  # fmt: skip
    weights = [torch.linspace(-1, 2, t.numel(), device=t.device, dtype=t.dtype).view(t.shape) for t in (out, lse)]
    weights[0] = lay_out(weights[0], arguments["layout"])
    if arguments["upstream"] == "sum":
        weights = [torch.ones((), dtype=t.dtype, device=t.device).expand(t.shape) for t in (out, lse)]
    flows = list(zip((out, lse), weights, strict=True))
    if arguments["upstream"] == "out alone":
        flows = flows[:1]
    outputs, arriving = zip(*flows, strict=True)
    grads = torch.autograd.grad(outputs, given, arriving, allow_unused=True)
    return [out.detach(), lse.detach(), *(torch.zeros_like(t) if g is None else g for g, t in zip(grads, given, strict=True))]


def shifted(name: str) -> Callable[[Arguments], Any]:
    """Another tensor of the same shape and layout."""
    return lambda arguments: arguments[name] * 0.75 + 0.5


# (argument, its new value as a function of the warm arguments)
CHANGES: list[tuple[str, Callable[[Arguments], Any]]] = [
    ("q", shifted("q")),
    ("k", shifted("k")),
    ("v", shifted("v")),
    ("slopes", shifted("slopes")),
    ("slopes", lambda a: a["slopes"][None] * 2),
    ("slopes", lambda a: a["slopes"][:1].expand(2)),
    ("slopes", lambda a: a["slopes"].bfloat16()),
    ("cap", lambda a: 1.5),
    ("causal", lambda a: False),
    ("window", lambda a: None),
    ("window", lambda a: (12, 5)),
    ("window", lambda a: (None, 1)),
    ("mask", lambda a: None),
    ("mask", lambda a: Band(left=7)),
    ("mask", lambda a: Band(right=-4)),
    ("scale", lambda a: None),
    ("scale", lambda a: 0.75),
    ("scale", lambda a: -0.5),
    ("scale", lambda a: 0.0),
    ("order", lambda a: (1, 0)),
    ("order", lambda a: (1,)),
    ("order", lambda a: (0,)),
    ("order", lambda a: ()),
    ("upstream", lambda a: "out alone"),
    ("upstream", lambda a: "sum"),
    ("variant", lambda a: "fused"),
    ("layout", lambda a: "gaps"),
    ("layout", lambda a: "bhsd"),
    ("q", lambda a: lay_out(a["q"] + 1, "bhsd")),
    ("k", lambda a: lay_out(a["k"] + 1, "gaps")),
    ("v", lambda a: (a["v"] + 1)[:, :1].expand_as(a["v"])),
    ("q", lambda a: a["q"][:, :9]),
    ("q", lambda a: a["q"].repeat(1, 2, 1, 1)),
    ("v", lambda a: a["v"][..., :7]),
]


@pytest.mark.parametrize(("name", "change"), CHANGES, ids=[f"{i}-{name}" for i, (name, _) in enumerate(CHANGES)])
def test_one_changed_argument_is_honoured(
    backend: str, place: torch.device, name: str, change: Callable[[Arguments], Any]
) -> None:
    warm = warm_arguments(place)
    changed = {**warm, name: change(warm)}
    if changed["variant"] not in VARIANTS_HERE[backend]:
        pytest.skip(f"{backend} has no {changed['variant']} backward")
    results = []
    for arguments in (warm, changed, warm):
        options = Options(backend=backend, backward=arguments["variant"])
        results.append(evaluate(flashtile.attention, arguments, return_lse=True, options=options))
    for arguments, result in ((warm, results[0]), (changed, results[1]), (warm, results[2])):
        truth = evaluate(attention_reference, arguments, torch.float64)
        for got, exact in zip(result, truth, strict=True):
            tolerance = 1e-2 if got.dtype == torch.bfloat16 else 1e-4
            torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)


def test_a_different_dtype(backend: str, place: torch.device) -> None:
    warm = warm_arguments(place)
    options = Options(backend=backend)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float32):
        got = evaluate(flashtile.attention, warm, dtype, return_lse=True, options=options)
        assert got[0].dtype == dtype
        exact = evaluate(attention_reference, warm, torch.float64)
        torch.testing.assert_close(got[0].double(), exact[0], rtol=0.05, atol=0.05)


def test_return_lse_is_honoured(backend: str, place: torch.device) -> None:
    q = warm_arguments(place)["q"]
    options = Options(backend=backend)
    for wanted in (False, True, False):
        result = flashtile.attention(q, q, q, options=options, return_lse=wanted)
        assert isinstance(result, tuple) == wanted


def test_a_list_is_as_good_as_a_tuple(backend: str, place: torch.device) -> None:
    """Unhashable arguments take the same way, captured tensors included."""
    warm = warm_arguments(place)
    options = Options(backend=backend)
    listed = {**warm, "window": list(warm["window"])}
    results = [evaluate(flashtile.attention, a, return_lse=True, options=options) for a in (warm, listed)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_gradients_wanted_after_a_call_without(backend: str, place: torch.device) -> None:
    warm = warm_arguments(place)
    options = Options(backend=backend)
    with torch.no_grad():
        flashtile.attention(warm["q"], warm["k"], warm["v"], score=(Alibi(warm["slopes"]),), options=options)
    slopes = warm["slopes"].requires_grad_()
    flashtile.attention(warm["q"], warm["k"], warm["v"], score=(Alibi(slopes),), options=options).sum().backward()
    assert slopes.grad is not None


def test_interleaved_calls(backend: str, place: torch.device) -> None:
    """Two interleaved calls of one layout keep their own tensors."""
    warm = warm_arguments(place)
    options = Options(backend=backend)
    first, second = (warm["q"].clone().requires_grad_(), (warm["q"] + 1).requires_grad_())
    outs = [flashtile.attention(q, warm["k"], warm["v"], options=options) for q in (first, second)]
    kept = [out.detach().clone() for out in outs]
    (outs[0].sum() + outs[1].sum()).backward()
    for q, out in ((first, kept[0]), (second, kept[1])):
        leaf = q.detach().double().requires_grad_()
        exact, _ = attention_reference(leaf, warm["k"].double(), warm["v"].double())
        exact.sum().backward()
        torch.testing.assert_close(out.double(), exact.detach(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(q.grad.double(), leaf.grad, rtol=1e-4, atol=1e-4)
