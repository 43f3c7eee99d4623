"""attention_cached by Hopper's kernel: on a GPU, and refusals anywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import flashtile
from flashtile.kernels.sm90.host.choose_cached import refusals
from flashtile.problem.stored import Stored
from flashtile.reference.cached import cached_plain, cached_reference
from tests.cached.boxes import cleaned, draw, given
from tests.judge import FACTOR, FLOOR_ULP, LSE_TOLERANCE, measure_lse

HOPPER = flashtile.Options(backend="hopper")


def run(seed: int, stored: bool, latent: bool, device: torch.device) -> None:
    """Assert the accuracy rule, and that nothing but numbers comes back."""
    problem, tensors = draw(seed, stored, latent=latent)
    there = {name: t.to(device) for name, t in tensors.items()}
    if latent:
        there["v"] = there["k"][..., : problem.attention.head_dim_v]
    inputs, how = given(problem, there)
    if latent and seed % 2:  # the columns behind the values in a tensor of their own
        columns = problem.attention.head_dim_v
        inputs[0], how["qv"] = there["q"][..., columns:], there["q"][..., :columns]
        inputs[1], inputs[2] = there["k"][..., columns:].clone(), there["v"].clone()
    with torch.no_grad():
        out, lse = flashtile.attention_cached(*inputs, **how, split=problem.split, return_lse=True, options=HOPPER)
        inputs, how = given(problem, cleaned(problem, tensors))
        exact, sums = cached_reference(*inputs, **how)
        plain, _ = cached_plain(*inputs, **how)
    about, out, lse = f"seed {seed}: {problem.spell()}", out.cpu(), lse.cpu()
    assert out.isfinite().all(), about
    assert measure_lse(lse, sums) <= LSE_TOLERANCE, about
    floor = FLOOR_ULP * torch.finfo(out.dtype).eps * exact.abs().max().item()
    error, theirs = ((t.double() - exact).abs().max().item() for t in (out, plain))
    assert error <= max(FACTOR * theirs, floor), f"{about}: off by {error}, plain PyTorch by {theirs}"


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("first", range(0, 320, 20))
def test_random_calls(first: int, stored: bool, device: torch.device) -> None:
    for seed in range(first, first + 20):
        run(seed, stored, False, device)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("first", range(0, 320, 20))
def test_random_calls_of_latents(first: int, device: torch.device) -> None:
    for seed in range(first, first + 20):
        run(seed, False, True, device)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("page", [0, 16, 64])
@pytest.mark.parametrize(("least", "keys", "split", "heads", "window"), [
    (1, 1024, 128, 2, None), (1, 1024, 256, 8, None), (1, 4096, 256, 4, None), (3900, 4096, 256, 4, None),
    (1, 4096, 256, 4, (1500, None)),
])  # fmt: skip
def test_an_items_bits_do_not_depend_on_its_batch(
    least: int, keys: int, split: int, heads: int, window: Any, page: int, device: torch.device
) -> None:
    """Blocks write parts, sums of as many as are added up first, or results: by the batch, and whether lengths are alike."""
    generator = torch.Generator(device).manual_seed(5)
    k, v = (torch.randn(64, keys, heads, 128, generator=generator, device=device, dtype=torch.bfloat16) for _ in "kv")
    used = torch.randint(least, keys + 1, (64,), generator=generator, dtype=torch.int32, device=device)
    q = torch.randn(64, 1, 4 * heads, 128, generator=generator, device=device, dtype=torch.bfloat16)
    how: dict[str, Any] = dict(causal=True, window=window, split=split, return_lse=True, options=HOPPER)

    def call(items: torch.Tensor) -> list[torch.Tensor]:
        if not page:
            made = flashtile.attention_cached(q[items], k[items], v[items], seqused_k=used[items], **how)
        else:
            table = torch.arange(64 * keys // page, dtype=torch.int32, device=device).view(64, -1)
            pools = [t.view(-1, page, heads, 128) for t in (k, v)]
            made = flashtile.attention_cached(q[items], pools[0], pools[1], table[items], seqused_k=used[items], **how)
        return list(made)

    alone = [torch.cat(some) for some in zip(*(call(torch.tensor([i], device=device)) for i in range(64)), strict=True)]
    for count in (64, 48, 33, *range(1, 64, 3)):
        items = torch.randperm(64, generator=generator, device=device)[:count]
        for got, want in zip(call(items), alone, strict=True):
            assert torch.equal(got, want[items])


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize(("page", "heads", "split"), [(0, 16, 256), (64, 16, 512), (64, 128, 256), (0, 128, 0)])
def test_an_items_bits_of_latents_do_not_depend_on_its_batch(page: int, heads: int, split: int, device: torch.device) -> None:
    """Blocks form more or fewer parts, by the batch."""
    generator = torch.Generator(device).manual_seed(5)
    k = torch.randn(64, 1024, 1, 576, generator=generator, device=device, dtype=torch.bfloat16)
    used = torch.randint(1, 1025, (64,), generator=generator, dtype=torch.int32, device=device)
    q = torch.randn(64, 2, heads, 576, generator=generator, device=device, dtype=torch.bfloat16)

    def call(items: torch.Tensor) -> list[torch.Tensor]:
        pool, table = k[items], ()
        if page:
            pool = k.view(-1, page, 1, 576)
            table = (torch.arange(len(pool), dtype=torch.int32, device=device).view(64, -1)[items],)
        how: dict[str, Any] = dict(causal=True, split=split, return_lse=True, options=HOPPER, seqused_k=used[items])
        return list(flashtile.attention_cached(q[items], pool, pool[..., :512], *table, **how))

    alone = [torch.cat(some) for some in zip(*(call(torch.tensor([i], device=device)) for i in range(64)), strict=True)]
    for count in (64, 33, 9):
        items = torch.randperm(64, generator=generator, device=device)[:count]
        for got, want in zip(call(items), alone, strict=True):
            assert torch.equal(got, want[items])


def test_what_it_refuses_it_says() -> None:
    problem = next(p for p, _ in map(draw, range(50)) if p.pages.table and p.pages.page_size == 16)
    assert not refusals(problem)
    changed = {
        "page_size is 24": replace(problem, pages=replace(problem.pages, page_size=24)),
        "page_size is 4;": replace(problem, pages=replace(problem.pages, page_size=4)),
        "keys begin at first_k": replace(problem, pages=replace(problem.pages, first=True)),
        "the cache stores int8": replace(problem, stored=Stored("int8")),
        "rows of the cache have scales": replace(problem, stored=Stored("e4m3", "head", "token")),
        f"values are the first {problem.attention.head_dim_v} of": replace(problem, shared=True),
        "the copy engine cannot read": replace(problem, addressable=False),
        "head_dim is 256": replace(problem, attention=replace(problem.attention, head_dim=256)),
    }
    for says, other in changed.items():
        assert any(says in reason for reason in refusals(other)), says
