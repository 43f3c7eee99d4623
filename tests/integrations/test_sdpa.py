"""torch's attention with flashtile as its flash implementation: the same numbers, and torch's own back afterwards."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
    sdpa_kernel,
    varlen,
)

import flashtile
from flashtile import InvalidProblem, NotSupported
from flashtile.integrations import sdpa

VARLEN = inspect.signature(varlen.varlen_attn).parameters


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """flashtile is active; the list tells what ran on it."""
    ran: list[str] = []
    for name in ("run_forward", "run_backward"):
        original = getattr(sdpa, name)
        monkeypatch.setattr(sdpa, name, lambda *given, n=name, f=original: (ran.append(n), f(*given))[1])
    sdpa.register()
    activate_flash_attention_impl("flashtile")
    yield ran
    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()


def given(device: Any = "cpu", dtype: torch.dtype = torch.float32, keys: int = 40) -> list[torch.Tensor]:
    """q, k, v (batch, heads, seqlen, head_dim), leaves."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 40, 64), (2, 2, keys, 64), (2, 2, keys, 64))
    return [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes]


def step(backend: SDPBackend, tensors: list[torch.Tensor], **how: Any) -> list[torch.Tensor]:
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(*tensors, enable_gqa=True, **how)
        weight = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
        return [out.detach(), *torch.autograd.grad((out * weight).sum(), tensors)]


@pytest.mark.parametrize(
    "how", [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": torch.ones(40, 40, dtype=torch.bool).tril(3)}], ids=str
)
def test_sdpa_on_the_cpu(calls: list[str], how: dict[str, Any]) -> None:
    tensors = given()
    how = dict(how)
    got = step(SDPBackend.FLASH_ATTENTION, tensors, **how)
    assert calls == ["run_forward", "run_backward"]
    for a, b in zip(got, step(SDPBackend.MATH, tensors, **how), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert calls == ["run_forward", "run_backward"]


def test_causal_is_aligned_top_left(calls: list[str]) -> None:
    tensors = given(keys=24)
    got = step(SDPBackend.FLASH_ATTENTION, tensors, is_causal=True)
    assert calls
    for a, b in zip(got, step(SDPBackend.MATH, tensors, is_causal=True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_float64_is_torch_s_own(calls: list[str]) -> None:
    tensors = given(dtype=torch.float64)
    got = step(SDPBackend.FLASH_ATTENTION, tensors, is_causal=True)
    assert not calls
    for a, b in zip(got, step(SDPBackend.MATH, tensors, is_causal=True), strict=True):
        torch.testing.assert_close(a, b)


def test_compiled(calls: list[str]) -> None:
    tensors = given()
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), backend="aot_eager"
    )
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        torch.testing.assert_close(compiled(*tensors), step(SDPBackend.MATH, tensors, is_causal=True)[0], rtol=1e-4, atol=1e-4)
    assert calls


def test_restored(calls: list[str]) -> None:
    assert current_flash_attention_impl() == "flashtile"
    restore_flash_attention_impl()
    step(SDPBackend.FLASH_ATTENTION, given())
    assert not calls
    assert "flashtile" in list_flash_attention_impls()
    activate_flash_attention_impl("flashtile")
    step(SDPBackend.FLASH_ATTENTION, given())
    assert calls


def test_signatures_are_those_of_the_ops() -> None:
    """Every argument of torch's schemas, which a CPU cannot call, is taken."""
    q = torch.randn(1, 2, 8, 16).half()
    flash = q.transpose(1, 2)
    made = sdpa._dense_forward(q, q, q, 0.0, True, False, scale=None)
    names = [r.name for r in torch.ops.aten._scaled_dot_product_flash_attention.default._schema.returns]
    assert len(made) == len(names) == 9
    grads = sdpa._dense_backward(q, q, q, q, *made[:6], 0.0, True, *made[6:8], scale=None)
    assert [g.shape for g in grads] == [q.shape] * 3
    forward = sdpa._flash_forward(
        flash, flash, flash, None, None, 8, 8, 0.0, True, False, window_size_left=-1, window_size_right=0
    )
    torch.testing.assert_close(forward[0], made[0].transpose(1, 2))
    cu = torch.tensor([0, 3, 8], dtype=torch.int32)
    x = torch.randn(8, 2, 16).half()
    out, lse, state, unused, _ = sdpa._flash_forward(x, x, x, cu, cu, 5, 5, 0.0, True, False, num_splits=1)
    assert (out.shape, lse.shape, state.dtype) == (x.shape, (2, 8), torch.uint64)
    assert len(sdpa._flash_backward(x, x, x, x, out, lse, cu, cu, 5, 5, 0.0, True, state, unused)) == 3
    into = torch.empty_like(x)
    sdpa._flash_forward_into(into, x, x, x, cu, cu, 5, 5, 0.0, True, False)
    assert torch.equal(into, out)
    with pytest.raises(NotSupported, match="float32 is given"):
        sdpa._dense_forward(q.float(), q.float(), q.float())
    with pytest.raises(InvalidProblem, match="block_table is given and seqused_k is None"):
        sdpa._flash_forward(x, x, x, cu, cu, 5, 5, 0.0, True, False, block_table=cu)
    with pytest.raises(NotSupported, match="dropout_p is given"):
        sdpa._flash_forward(x, x, x, cu, cu, 5, 5, 0.5, True, False, block_table=cu, seqused_k=cu)


def pages_of(keys: list[torch.Tensor], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(pool, block_table) of items' keys, (length, heads, head_dim) each; NaN and rubbish where there are none."""
    columns = max(-(-len(k) // size) for k in keys)
    pool = torch.full((len(keys) * columns + 1, size, *keys[0].shape[1:]), torch.nan)
    table, free = torch.full((len(keys), columns), -1, dtype=torch.int32), list(range(len(pool)))[::-1]
    for i, k in enumerate(keys):
        for column, part in enumerate(k.split(size)):
            table[i, column] = free.pop()
            pool[int(table[i, column]), : len(part)] = part
    return pool, table


@pytest.mark.skipif("block_table" not in VARLEN, reason="this PyTorch's varlen_attn reads no pages")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0)])
@pytest.mark.parametrize("size", [3, 16])
def test_varlen_attn_over_pages_on_a_cpu(calls: list[str], window: tuple[int, int], size: int) -> None:
    used, counts = [20, 7, 33], [1, 7, 4]
    generator = torch.Generator().manual_seed(0)
    keys, values = ([torch.randn(n, 2, 16, generator=generator) for n in used] for _ in "kv")
    (k, table), (v, _) = pages_of(keys, size), pages_of(values, size)
    q = torch.randn(sum(counts), 4, 16, generator=generator)
    cu = torch.tensor([0, 1, 8, 12], dtype=torch.int32)
    lengths = torch.tensor(used, dtype=torch.int32)
    how: dict[str, Any] = dict(
        scale=0.3, window_size=window, enable_gqa=True, seqused_k=lengths, block_table=table, return_aux=varlen.AuxRequest(True)
    )
    for splits in (None, 1):
        out, lse = varlen.varlen_attn(q, k, v, cu, None, 7, 33, num_splits=splits, **how)
        for i, (one, key, value) in enumerate(zip(q.split(counts), keys, values, strict=True)):
            sides = tuple(None if n < 0 else n for n in window)
            want = flashtile.attention(*(t[None].double() for t in (one, key, value)), window=sides, scale=0.3, return_lse=True)
            rows = slice(int(cu[i]), int(cu[i + 1]))
            torch.testing.assert_close(out[rows], want[0][0].float(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(lse[:, rows], want[1][0].float(), rtol=1e-5, atol=1e-5)
    into = torch.empty_like(q)
    assert varlen.varlen_attn_out(into, q, k, v, cu, None, 7, 33, **how)[0] is into
    assert torch.equal(into, out)
    with pytest.raises(InvalidProblem, match="block_table has shape"):
        varlen.varlen_attn(q, k, v, cu, None, 7, 33, **{**how, "block_table": table[:2]})
    assert not calls


def test_varlen_attn_on_a_cpu_with_gradients(calls: list[str]) -> None:
    x = torch.randn(60, 4, 16, requires_grad=True)
    cu = torch.tensor([0, 17, 60], dtype=torch.int32)
    out = varlen.varlen_attn(x, x, x, cu, cu, 43, 43)
    (dx,) = torch.autograd.grad(out.square().sum(), x)
    assert calls == ["run_forward", "run_backward"]
    want = torch.cat([F.scaled_dot_product_attention(*[t.transpose(0, 1)] * 3).transpose(0, 1) for t in x.split([17, 43])])
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(dx, torch.autograd.grad(want.square().sum(), x)[0], rtol=1e-4, atol=1e-4)


def test_dropout_of_the_forward_is_that_of_the_backward() -> None:
    q = torch.randn(1, 1, 16, 16).half()
    v = torch.eye(16).half()[None, None]
    out, lse, *_, state, unused, _ = sdpa._dense_forward(q, q, v, 0.5, False, False)
    _, _, dv = sdpa._dense_backward(torch.ones_like(out), q, q, v, out, lse, None, None, 16, 16, 0.5, False, state, unused)
    torch.testing.assert_close(dv[0, 0, :, 0], out[0, 0].sum(0), rtol=1e-2, atol=1e-2)  # both are the sums of what was kept


@pytest.mark.gpu
@pytest.mark.parametrize("how", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
def test_sdpa_on_a_gpu(calls: list[str], device: torch.device, how: dict[str, Any]) -> None:
    tensors = given(device, torch.bfloat16)
    got = step(SDPBackend.FLASH_ATTENTION, tensors, **how)
    assert calls == ["run_forward", "run_backward"]
    exact = step(SDPBackend.MATH, [t.detach().double().requires_grad_() for t in tensors], **how)
    for a, b in zip(got, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_varlen_attn_on_a_gpu(calls: list[str], device: torch.device) -> None:
    x = torch.randn(60, 4, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    cu = torch.tensor([0, 17, 60], dtype=torch.int32, device=device)
    out = varlen.varlen_attn(x, x, x, cu, cu, 43, 43)
    (dx,) = torch.autograd.grad(out.float().sum(), x)
    assert calls == ["run_forward", "run_backward"]
    for start, stop in ((0, 17), (17, 60)):
        one = x[start:stop].detach().float()[None].transpose(1, 2).requires_grad_()
        exact = F.scaled_dot_product_attention(one, one, one)
        torch.testing.assert_close(out[start:stop].float(), exact[0].transpose(0, 1), rtol=2e-2, atol=2e-2)
        (true,) = torch.autograd.grad(exact.sum(), one)
        torch.testing.assert_close(dx[start:stop].float(), true[0].transpose(0, 1), rtol=3e-2, atol=3e-2)
