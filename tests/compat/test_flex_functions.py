"""FlexAttention's functions against torch's own eager computation of them: 400 drawn ones, outputs and all gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention.flex_attention import create_block_mask
from torch.overrides import TorchFunctionMode

from flashtile import Options
from flashtile.compat import asked
from flashtile.compat.flex import flex_attention
from flashtile.compat.score_mod import modifiers_of
from tests.compat.scalar_functions import BATCH, HEADS, KEYS, ROWS, compiled, environment, mask_mod, score_mod

SCORE_MODS, MASK_MODS, PART = 280, 120, 40
SCALE = 0.5
Tensors = list[torch.Tensor]


class Indexing(TorchFunctionMode):
    """tensor[index] without values, as torch's FlexAttention has it, and with gradients of every shape."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, torch.Tensor) for i in index):
                whole = [i if isinstance(i, torch.Tensor) else torch.tensor(i, device=args[0].device) for i in index]
                return torch.ops.aten.index(args[0], whole)
        return func(*args, **(kwargs or {}))


def mapped(function: Callable[..., Any], score: bool) -> Callable[..., Any]:
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=((0,) if score else ()) + dims)
    return function


def reference(q: Any, k: Any, v: Any, mod: Any, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse), by torch.vmap."""
    at = [torch.arange(n, device=q.device) for n in (BATCH, HEADS, ROWS, KEYS)]
    scores = (q @ k.mT) * SCALE
    with Indexing():
        scores = mapped(mod, True)(scores, *at).float() if mod is not None else scores
        seen = mapped(mask, False)(*at) if mask is not None else torch.ones_like(scores, dtype=torch.bool)
    scores = torch.where(seen, scores, -torch.inf)
    some = (scores != -torch.inf).any(-1, keepdim=True)
    safe = torch.where(some, scores, 0.0)
    probabilities = torch.where(some, safe.softmax(-1), 0.0)
    return probabilities @ v, torch.where(some[..., 0], safe.logsumexp(-1), -torch.inf)


def inputs(seed: int, place: torch.device) -> Tensors:
    torch.manual_seed(seed)
    sizes = ((BATCH, HEADS, ROWS, 8), (BATCH, HEADS, KEYS, 8), (BATCH, HEADS, KEYS, 8))
    return [torch.randn(s, device=place).requires_grad_() for s in sizes]


def both(seed: int, place: torch.device, text: str, masked: bool) -> None:
    scope, captured = environment(seed, place)
    mod = None if masked else compiled(text, "s, b, h, i, j", scope)
    mask = compiled(text, "b, h, i, j", scope) if masked else None
    qkv = inputs(seed, place)
    block_mask = None
    if mask is not None:
        with torch.no_grad():
            block_mask = create_block_mask(mask, BATCH, HEADS, ROWS, KEYS, device=str(place))
    if mod is not None:  # what is remembered of a function holds for other numbers in the tensors that it reads
        for tensor in captured:
            tensor.data.neg_()
        modifiers_of(mod, (BATCH, HEADS, ROWS, KEYS), place, torch.float32)
        for tensor in captured:
            tensor.data.neg_()
    out, lse = flex_attention(*qkv, mod, block_mask, scale=SCALE, return_lse=True)
    with torch.no_grad():  # torch's own, which has no gradients on a CPU
        everything = lambda b, h, i, j: b.new_ones((), dtype=torch.bool)  # noqa: E731
        same = mod or (lambda s, b, h, i, j: s)
        theirs, lse2, _ = math_attention(*qkv, same, (mask or everything,), SCALE, {})
    narrow: dict[str, Any] = dict(atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(out, theirs, **narrow)
    torch.testing.assert_close(lse, (lse2 * math.log(2)).float(), **narrow)
    true, true_lse = reference(*qkv, mod, mask)
    torch.testing.assert_close(out, true, **narrow)
    cotangents = [torch.randn_like(out), torch.randn_like(lse) * (lse != -torch.inf)]
    leaves = [*qkv, *captured]
    how: dict[str, Any] = dict(allow_unused=True, materialize_grads=True)
    found = torch.autograd.grad([out, lse], leaves, cotangents, **how)
    wanted = torch.autograd.grad([true, torch.where(lse == -torch.inf, 0.0, true_lse)], leaves, cotangents, **how)
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, atol=5e-5 * max(1.0, other.abs().max().item()), rtol=1e-4)


def tried(kind: str, seeds: range, place: torch.device) -> str:
    """What became of drawn functions, after the count of those that are as torch's is printed."""
    wrong: list[str] = []
    for seed in seeds:
        text = mask_mod(seed) if kind == "mask_mod" else score_mod(seed)
        try:
            both(seed, place, text, kind == "mask_mod")
        except Exception as error:  # a refusal too: torch takes all of them
            wrong.append(f"{kind} {seed}: {text}\n  {type(error).__name__}: {str(error)[:400]}")
    print(f"{len(seeds) - len(wrong)} of {len(seeds)} drawn {kind}s as torch's")
    return "\n".join(wrong)


@pytest.mark.parametrize("first", range(0, SCORE_MODS + MASK_MODS, PART))
def test_drawn_functions_on_the_cpu(first: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(asked, "DEFAULT", Options(backend="cpu"))
    kind, first = ("score_mod", first) if first < SCORE_MODS else ("mask_mod", first - SCORE_MODS)
    with capsys.disabled():
        assert not tried(kind, range(first, first + PART), torch.device("cpu"))


def test_drawn_functions_in_triton(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Interpreted, or on a GPU a few of them: every function is kernels of its own."""
    pytest.importorskip("triton")
    monkeypatch.setattr(asked, "DEFAULT", Options(backend="triton"))
    with capsys.disabled():
        assert not tried("score_mod", range(1000, 1040) if device.type == "cpu" else range(1000, 1008), device)


def test_what_is_drawn_is_various() -> None:
    texts = {score_mod(seed) for seed in range(SCORE_MODS)} | {mask_mod(seed) for seed in range(MASK_MODS)}
    assert len(texts) >= 350
    every = "\n".join(texts)
    arithmetic = ("clamp", "relu", "tanh", "sigmoid", "exp(", "abs()", "minimum", "maximum", "//", "%", "&", "|", "~")
    for said in (*arithmetic, "][", ".sum()", "torch.dot", "F.embedding", "torch.where", ".any()", "@", ".to(torch.float64)"):
        assert said in every, said
