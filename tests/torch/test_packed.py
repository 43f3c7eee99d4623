"""q, k and v in one tensor: the results of three, and one gradient written in place."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import flashtile
from flashtile import InvalidProblem, Options
from flashtile.problem.options import Variant

ENDS = (0, 17, 17, 40)
FORMS = ("llm.c", "heads-first", "grouped", "kv", "llm.c-varlen", "grouped-varlen", "kv-varlen", "expanded")


def packed_call(form: str, packs: list[torch.Tensor], **how: Any) -> Any:
    varlen = {}
    if form.endswith("varlen"):
        ends = torch.tensor(ENDS, dtype=torch.int32, device=packs[0].device)
        varlen = {"cu_seqlens_q": ends} if form.startswith("kv") else {"cu_seqlens": ends}
    if form.startswith("kv"):
        return flashtile.attention_kvpacked(*packs, **varlen, **how)
    heads = {"heads_q": 4} if form.startswith("grouped") else {}
    return flashtile.attention_qkvpacked(*packs, **heads, **varlen, **how)


def make(form: str, place: torch.device, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The packed tensors, and q, k, v as views of them."""
    size = (42,) if form.endswith("varlen") else (2, 24)
    if form.startswith("grouped"):
        whole = torch.randn(*size, 4 + 2 * 2, 16).to(place, dtype)
        return [whole], list(whole.split((4, 2, 2), -2))
    if form.startswith("kv"):
        q, kv = torch.randn(*size, 4, 16).to(place, dtype), torch.randn(*size, 2, 2, 16).to(place, dtype)
        return [q, kv], [q, *kv.unbind(-3)]
    whole = torch.randn(*size, 3, 2, 16).to(place, dtype)
    if form == "heads-first":
        whole = whole.permute(2, 0, 3, 1, 4).contiguous().permute(1, 3, 0, 2, 4)
    if form == "expanded":
        whole = whole[:1].expand(2, -1, -1, -1, -1)
    return [whole], list(whole.unbind(-3))


@pytest.mark.parametrize("form", FORMS)
def test_packed_is_apart(backend: str, place: torch.device, variant: Variant, form: str) -> None:
    dtype = torch.float32 if form in ("llm.c", "kv-varlen") else torch.float16
    packs, parts = make(form, place, dtype)
    how: dict[str, Any] = {"causal": True, "return_lse": True, "options": Options(backend=backend, backward=variant)}
    packs = [t.detach().requires_grad_() for t in packs]
    out, lse = packed_call(form, packs, **how)
    dout, dlse = torch.randn(out.shape).to(out), torch.randn(lse.shape).to(lse)
    grads = torch.autograd.grad((out, lse), packs, (dout, dlse))

    leaves = [t.detach().requires_grad_() for t in parts]
    if form.endswith("varlen"):
        plain = flashtile.attention_varlen(*leaves, torch.tensor(ENDS, dtype=torch.int32, device=place), **how)
    else:
        plain = flashtile.attention(*leaves, **how)
    wanted = torch.autograd.grad(plain, leaves, (dout, dlse))
    tolerance = 2e-3 if place.type == "cuda" else 0.0  # strides arrange a GPU's sums, and atomics come in any order
    for mine, other in ((out, plain[0]), (lse, plain[1])):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
    if form.startswith("grouped"):
        views = [*grads[0].split((4, 2, 2), -2)]
    else:
        views = [*(grads[:1] if form.startswith("kv") else ()), *grads[-1].unbind(-3)]
    for mine, other in zip(views, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
    for grad, pack in zip(grads, packs, strict=True):
        assert grad.shape == pack.shape
        assert form == "expanded" or grad.stride() == pack.stride()


def test_nothing_is_concatenated(backend: str, place: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient that autograd receives is the memory that the backward wrote."""
    from flashtile.torch.execute import packing

    allocated: list[torch.Tensor] = []
    allocate = packing.PackedGradient.allocate

    def recorded(self: packing.PackedGradient, device: torch.device) -> dict[str, torch.Tensor]:
        made = allocate(self, device)
        allocated.append(made[self.name])
        return made

    monkeypatch.setattr(packing.PackedGradient, "allocate", recorded)
    qkv = torch.randn(1, 20, 3, 1, 16, device=place, requires_grad=True)
    out = flashtile.attention_qkvpacked(qkv, causal=True, options=Options(backend=backend))
    (grad,) = torch.autograd.grad(out.sum(), qkv)
    assert [t.data_ptr() for t in allocated] == [grad.data_ptr()]
    assert grad.isfinite().all()


def test_only_q_wants_a_gradient(backend: str, place: torch.device) -> None:
    q, kv = torch.randn(1, 20, 2, 16, device=place, requires_grad=True), torch.randn(1, 20, 2, 2, 16, device=place)
    options = Options(backend=backend)
    (mine,) = torch.autograd.grad(flashtile.attention_kvpacked(q, kv, options=options).sum(), q)
    (other,) = torch.autograd.grad(flashtile.attention(q, *kv.unbind(2), options=options).sum(), q)
    torch.testing.assert_close(mine, other)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


ENDS_8 = torch.tensor([0, 8], dtype=torch.int32)
BAD: dict[str, tuple[Any, str]] = {
    "list": (lambda: flashtile.attention_qkvpacked([1.0]), "qkv is a list; it must be a torch.Tensor"),  # type: ignore[arg-type]
    "rank": (
        lambda: flashtile.attention_qkvpacked(zeros(8, 3, 2, 16)),
        "qkv has shape (8, 3, 2, 16); it must be (batch, seqlen, 3, heads, head_dim)",
    ),
    "two": (lambda: flashtile.attention_qkvpacked(zeros(1, 8, 2, 2, 16)), "it must be (batch, seqlen, 3, heads, head_dim)"),
    "varlen": (
        lambda: flashtile.attention_qkvpacked(zeros(1, 8, 3, 2, 16), cu_seqlens=ENDS_8),
        "qkv has shape (1, 8, 3, 2, 16); it must be (total, 3, heads, head_dim)",
    ),
    "grouped": (
        lambda: flashtile.attention_qkvpacked(zeros(1, 8, 7, 16), heads_q=4),
        "heads_q is 4 and qkv has 7 heads; what heads_q leaves must be as many for k as for v",
    ),
    "grouped-none": (lambda: flashtile.attention_qkvpacked(zeros(1, 8, 4, 16), heads_q=4), "heads_q is 4 and qkv has 4 heads"),
    "grouped-text": (lambda: flashtile.attention_qkvpacked(zeros(1, 8, 4, 16), heads_q="2"), "heads_q is '2' and qkv"),  # type: ignore[arg-type]
    "kv": (
        lambda: flashtile.attention_kvpacked(zeros(1, 8, 2, 16), zeros(1, 8, 3, 2, 16)),
        "kv has shape (1, 8, 3, 2, 16); it must be (batch, seqlen, 2, heads, head_dim)",
    ),
    "kv-varlen": (
        lambda: flashtile.attention_kvpacked(zeros(8, 2, 16), zeros(8, 2, 16), cu_seqlens_q=ENDS_8),
        "kv has shape (8, 2, 16); it must be (total, 2, heads, head_dim)",
    ),
    "float32": (
        lambda: flashtile.attention_qkvpacked(zeros(8, 3, 2, 16), cu_seqlens=ENDS_8.float()),
        "cu_seqlens is torch.float32; it must be int32",
    ),
    "start": (lambda: flashtile.attention_qkvpacked(zeros(8, 3, 2, 16), cu_seqlens=ENDS_8 + 1), "cu_seqlens is [1, 9]; it"),
    "longest": (
        lambda: flashtile.attention_qkvpacked(zeros(8, 3, 2, 16), cu_seqlens=ENDS_8, max_seqlen=7),
        "max_seqlen is 7; it must be at least 8, the longest item",
    ),
    "used": (
        lambda: flashtile.attention_qkvpacked(zeros(1, 8, 6, 16), heads_q=2, seqused=ENDS_8[1:] + 1),
        "seqused[0] is 9; it must be from 0 to 8",
    ),
    "used-items": (
        lambda: flashtile.attention_qkvpacked(zeros(1, 8, 3, 2, 16), seqused=ENDS_8),
        "seqused has 2 elements and the batch 1 items; it must have 1",
    ),
    "used-mask": (
        lambda: flashtile.attention_qkvpacked(zeros(1, 8, 3, 2, 16), seqused=torch.ones(1, 8, dtype=torch.bool)),
        "seqused is a mask, which `attention` alone takes, of q, k and v apart; here it must be int32, how many tokens",
    ),
    "only-k": (
        lambda: flashtile.attention_kvpacked(zeros(1, 8, 2, 16), zeros(1, 8, 2, 2, 16), cu_seqlens_k=ENDS_8),
        "cu_seqlens_k is given and cu_seqlens_q is None",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_packs(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(InvalidProblem, match=re.escape(message)):
        call()


def test_unknown_arguments_are_those_of_the_function_that_was_called() -> None:
    x, cu = torch.zeros(8, 4, 16), torch.tensor([0, 8], dtype=torch.int32)
    calls: dict[str, Any] = {
        "attention_varlen": lambda **more: flashtile.attention_varlen(x, x, x, cu, **more),
        "attention_qkvpacked": lambda **more: flashtile.attention_qkvpacked(x[None, :, None].expand(1, 8, 3, 4, 16), **more),
        "attention_kvpacked": lambda **more: flashtile.attention_kvpacked(
            x[None], x[None, :, None].expand(1, 8, 2, 4, 16), **more
        ),
    }
    for name, call in calls.items():
        call(return_lse=True)
        with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'nope'"):
            call(nope=1)


@pytest.mark.parametrize("form", [*FORMS, "varlen", "holes"])
def test_second_derivatives(form: str) -> None:
    """By torch.autograd.grad, for a factor of what is attended to: what differences of first derivatives come to."""
    layout = {"varlen": "grouped-varlen", "holes": "grouped"}.get(form, form)
    packs, _ = make(layout, torch.device("cpu"), torch.float64)
    leaf = packs[0].detach().requires_grad_()

    def squares(factor: torch.Tensor) -> torch.Tensor:
        if form in FORMS:
            out = packed_call(form, [leaf * factor, *packs[1:]])
        elif form == "varlen":
            out = flashtile.attention_varlen(*(leaf * factor).split((4, 2, 2), -2), torch.tensor(ENDS, dtype=torch.int32))
        else:
            seen = torch.arange(48).view(2, 24) % 5 != 1
            out = flashtile.attention(*(leaf * factor).split((4, 2, 2), -2), seqused_k=seen)
        (grad,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
        return grad.square().sum()

    factor = torch.ones((), dtype=torch.float64, requires_grad=True)
    (second,) = torch.autograd.grad(squares(factor), factor)
    step = 1e-5
    differences = (squares(factor.detach() + step) - squares(factor.detach() - step)) / (2 * step)
    torch.testing.assert_close(second, differences.detach(), rtol=1e-5, atol=0.0)
