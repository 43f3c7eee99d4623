"""attention_cached(shared_prefix=): the same as without, and an item's bits do not depend on its batch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import flashtile
from flashtile import InvalidProblem, NotSupported
from flashtile.reference.cached import cached_reference


def draw(seed: int, place: torch.device, dtype: torch.dtype = torch.float32) -> tuple[list[Any], dict[str, Any], int]:
    """(tensors, arguments, prefix): the prefix lies once in pages, or, without a table, in item 0; elsewhere it is NaN."""
    r, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, size, seqlen, packed, contiguous = (
        r.randint(1, 4),
        r.choice((1, 4, 16)),
        r.choice((1, 2, 3)),
        seed % 3 == 1,
        seed % 4 == 3,
    )
    pages = r.randint(1, 4)
    prefix, columns, heads, group = size * pages, pages + 3, 2, r.choice((1, 2, 3))
    own = [0 if r.random() < 0.1 else r.randint(seqlen, 3 * size) if 3 * size >= seqlen else 0 for _ in range(batch)]
    used = [prefix + n if n else 0 for n in own]
    k, v = (torch.randn(batch * columns, size, heads, 16, generator=generator).to(dtype) for _ in "kv")
    table = torch.randperm(batch * columns, generator=generator).int().view(batch, columns)
    table[:, :pages] = table[0, :pages].clone()
    q = torch.randn(batch, seqlen, heads * group, 16, generator=generator).to(dtype)
    how: dict[str, Any] = dict(seqused_k=torch.tensor(used, dtype=torch.int32), causal=r.random() < 0.7)
    if r.random() < 0.4:
        how["sink"] = torch.randn(heads * group, generator=generator)
    if r.random() < 0.3:
        how["score"] = (flashtile.Softcap(4.0),)
    if packed:
        q, how["cu_seqlens_q"] = q.flatten(0, 1), torch.arange(batch + 1, dtype=torch.int32) * seqlen
    tensors = [q, k, v, table]
    if contiguous:
        tensors = [q, *(pool[table.long()].flatten(1, 2) for pool in (k, v))]
    made = {name: x.to(place) if isinstance(x, torch.Tensor) else x for name, x in how.items()}
    return [t.to(place) for t in tensors], made, prefix


@pytest.mark.parametrize("seed", range(24))
def test_it_is_what_it_is_without(backend: str, place: torch.device, seed: int) -> None:
    tensors, how, prefix = draw(seed, place)
    options = flashtile.Options(backend=backend)
    exact, sums = cached_reference(*tensors, **how)
    if len(tensors) == 3:  # nobody reads the others' copies
        for pool in tensors[1:]:
            pool[1:, :prefix] = torch.nan
    out, lse = flashtile.attention_cached(*tensors, **how, shared_prefix=prefix, return_lse=True, options=options)
    torch.testing.assert_close(out.double(), exact, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(lse.double(), sums, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("seed", [0, 2, 5])
def test_an_items_bits_do_not_depend_on_its_batch(backend: str, place: torch.device, seed: int) -> None:
    tensors, how, prefix = draw(seed, place, torch.bfloat16)
    q, k, v, table = tensors
    used = how.pop("seqused_k")
    how |= dict(shared_prefix=prefix, options=flashtile.Options(backend=backend), return_lse=True)
    whole = flashtile.attention_cached(q, k, v, table, seqused_k=used, **how)
    for i in range(len(used)):
        alone = flashtile.attention_cached(q[i : i + 1], k, v, table[i : i + 1], seqused_k=used[i : i + 1], **how)
        assert all(torch.equal(a[0], w[i]) for a, w in zip(alone, whole, strict=True))


def test_append_comes_first_and_gradients_go_the_ordinary_way() -> None:
    tensors, how, prefix = draw(0, torch.device("cpu"))
    q, k, v, table = tensors
    new = [torch.randn(q.shape[0], q.shape[1], 2, 16) for _ in "kv"]
    used = how.pop("seqused_k").clamp(min=prefix)
    pools = [(k.clone(), v.clone()) for _ in range(2)]
    made = [
        flashtile.attention_cached(q, *some, table, seqused_k=used, append=(new[0], new[1]), shared_prefix=n, **how)
        for some, n in zip(pools, (0, prefix), strict=True)
    ]
    torch.testing.assert_close(*made)
    assert torch.equal(pools[0][0], pools[1][0])
    rows = q.clone().requires_grad_()
    flashtile.attention_cached(rows, *pools[0], table, seqused_k=used, shared_prefix=prefix, **how).sum().backward()
    assert rows.grad is not None


@pytest.mark.parametrize("seed", [3, 6, 7])
def test_gradients_read_item_0s_prefix_too(seed: int) -> None:
    tensors, how, prefix = draw(seed, torch.device("cpu"))
    for other in tensors[1:] if len(tensors) == 3 else tensors[3:]:  # nobody reads the others' copies, nor their tables
        other[1:, : prefix if len(tensors) == 3 else prefix // tensors[1].shape[1]] = (
            torch.nan if other.is_floating_point() else -9
        )
    alone = flashtile.attention_cached(*tensors, **how, shared_prefix=prefix)
    rows = tensors[0].clone().requires_grad_()
    out = flashtile.attention_cached(rows, *tensors[1:], **how, shared_prefix=prefix)
    torch.testing.assert_close(out, alone, rtol=2e-5, atol=2e-6)
    (grad,) = torch.autograd.grad(out.square().sum(), rows)
    assert grad.isfinite().all()


def test_float64_stays_float64() -> None:
    """Also where no item has a key, and lse is that of the sink."""
    tensors, how, prefix = draw(4, torch.device("cpu"), torch.float64)
    for used in (how["seqused_k"], torch.zeros_like(how["seqused_k"])):
        given = {**how, "seqused_k": used, "sink": torch.randn(tensors[0].shape[-2]), "return_lse": True}
        apart, together = (flashtile.attention_cached(*tensors, **given, shared_prefix=n) for n in (0, prefix))
        torch.testing.assert_close(together, apart, rtol=1e-12, atol=1e-12)


def test_one_item_has_no_scales_of_its_own() -> None:
    q, k, v = torch.randn(1, 1, 1, 16), *torch.randint(-9, 9, (2, 1, 8, 1, 16), dtype=torch.int8)
    how: dict[str, Any] = dict(seqused_k=torch.tensor([7]), k_scale=torch.tensor([0.1]), v_scale=torch.tensor([[0.2]]))
    torch.testing.assert_close(*(flashtile.attention_cached(q, k, v, **how, shared_prefix=n) for n in (0, 5)))


def test_stored_scales_go_along() -> None:
    tensors, how, prefix = draw(4, torch.device("cpu"))
    q, k, v, table = tensors
    k, v = (t.to(torch.float8_e4m3fn) for t in (k, v))
    for scale in (0.5, torch.rand(2) + 0.5, torch.rand(k.shape[:3]) + 0.5):
        how |= dict(k_scale=scale, v_scale=scale)
        made = [flashtile.attention_cached(q, k, v, table, **how, shared_prefix=n) for n in (0, prefix)]
        torch.testing.assert_close(*made)
    with pytest.raises(NotSupported, match="scales of its own"):
        flashtile.attention_cached(
            q, k, v, table, **{**how, "k_scale": torch.rand(len(table), 2) + 0.5, "v_scale": None}, shared_prefix=prefix
        )


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    (dict(shared_prefix=-1), InvalidProblem, "shared_prefix is -1; it must be a number of keys, from 0 to 47"),
    (dict(shared_prefix=True), InvalidProblem, "shared_prefix is True"),
    (dict(shared_prefix=48), InvalidProblem, "fewer than the 48 rows"),
    (dict(shared_prefix=9), InvalidProblem, "it must be whole pages: 8 of these keys are"),
    (dict(shared_prefix=32), InvalidProblem, "seqused_k[0] is 30; with shared_prefix=32 it must be at least 33"),
    (dict(first_k=torch.zeros(2, dtype=torch.int32)), NotSupported, "first_k is given"),
    (dict(window=(5, 0)), NotSupported, "the window ends on the left"),
    (dict(window=[5, 0]), NotSupported, "the window ends on the left"),
    (dict(mask=flashtile.Dilated(2)), NotSupported, "the mask has predicates"),
    (dict(score=flashtile.Alibi(torch.ones(2))), NotSupported, "Alibi counts keys from the first"),
]


@pytest.mark.parametrize(("change", "kind", "says"), BAD, ids=[says for *_, says in BAD])
def test_what_has_no_meaning_is_named(change: dict[str, Any], kind: type[Exception], says: str) -> None:
    given: dict[str, Any] = dict(
        q=torch.randn(2, 2, 2, 16), k_cache=torch.randn(12, 8, 2, 16), v_cache=torch.randn(12, 8, 2, 16),
        page_table=torch.arange(12, dtype=torch.int32).view(2, 6), seqused_k=torch.tensor([30, 40]), causal=True,
        shared_prefix=16,
    )  # fmt: skip
    with pytest.raises(kind) as error:
        flashtile.attention_cached(**{**given, **change})
    assert says in str(error.value)
