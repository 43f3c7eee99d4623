"""PagedCache pickled, copied and saved; pools that are views into other tensors."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flashtile


def made(kind: str, place: torch.device) -> flashtile.PagedCache:
    """Two items of 5 and 20 rows in pages of 8, in pools of a kind."""
    generator = torch.Generator().manual_seed(0)
    table = torch.tensor([[2, -1, -1], [0, 4, 1]], dtype=torch.int32, device=place)
    used = torch.tensor([5, 20], dtype=torch.int32, device=place)
    k, v = (torch.randn(6, 8, 2, 16, generator=generator).to(place) for _ in "kv")
    if kind == "stored":
        scale = torch.rand(6, 8, 2, generator=generator).to(place) + 0.5
        return flashtile.PagedCache(k.to(torch.int8), v.to(torch.int8), table, used, None, scale, scale)
    wide = torch.randn(6, 8, 1, 24, generator=generator).to(place)
    if kind == "stored columns":
        scale = torch.rand(6, 8, 1, generator=generator).to(place) + 0.5
        wide = (wide * 30).to(torch.int8)
        return flashtile.PagedCache(wide, wide[..., :16], table, used, None, scale, scale)
    if kind == "columns":
        return flashtile.PagedCache(wide, wide[..., :16], table, used)
    if kind == "side by side":
        both = torch.cat([k, v], -1)
        return flashtile.PagedCache(both[..., :16], both[..., 16:], table, used, used // 3)
    return flashtile.PagedCache(k, v, table, used)


def through_file(cache: flashtile.PagedCache) -> flashtile.PagedCache:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    with torch.serialization.safe_globals([flashtile.PagedCache]):
        return torch.load(file)


WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "pickle 2": lambda cache: pickle.loads(pickle.dumps(cache, 2)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "torch.save": through_file,
}


@pytest.mark.parametrize("kind", ["plain", "columns", "stored columns", "side by side", "stored"])
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_is_the_same_cache(way: str, kind: str) -> None:
    place = torch.device("cpu")
    cache = made(kind, place)
    other = WAYS[way](cache)
    assert type(other) is flashtile.PagedCache
    heads, dim = cache.k.shape[2:]
    q, new = torch.randn(2, 1, 4, dim), torch.randn(2, 1, heads, dim)
    value = new[..., : cache.v.shape[3]] if "columns" in kind else torch.randn(2, 1, heads, cache.v.shape[3])
    assert torch.equal(other.attention(q), cache.attention(q))
    before = cache.k.clone()
    appended = other.append(new, value)  # which refuses values apart where they are columns of the keys
    assert torch.equal(appended.seqused, cache.seqused + 1)
    assert (appended.v.data_ptr() == appended.k.data_ptr()) == ("columns" in kind)
    assert torch.equal(before, cache.k) == (way != "copy"), "a copy has the pools, and nothing else does"
    assert torch.equal(appended.attention(q), cache.append(new, value).attention(q))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("offset", [1, 3, 8, 16])
def test_pools_may_begin_anywhere_in_their_storage(backend: str, place: torch.device, offset: int, dtype: torch.dtype) -> None:
    """The same numbers at another address, with other strides; rows are written there and nowhere beside."""
    cache, options = made("plain", place), flashtile.Options(backend=backend)
    pools: list[torch.Tensor] = []
    for pool in (cache.k, cache.v):
        wide = torch.full((offset + 6 * 8 * 2 * (16 + offset),), 0.5, device=place).to(dtype)
        view = wide[offset:].view(6, 8, 2, 16 + offset)[..., :16]
        assert view.storage_offset() == offset
        view.copy_(pool.to(dtype))
        pools.append(view)
    q = torch.randn(2, 1, 4, 16).to(place, torch.bfloat16 if dtype.itemsize == 1 else dtype)
    new = torch.randn(2, 2, 2, 16).to(q)
    there = flashtile.PagedCache(*pools, cache.page_table, cache.seqused)
    here = flashtile.PagedCache(
        *(p.clone(memory_format=torch.contiguous_format) for p in pools), cache.page_table, cache.seqused
    )
    there, here = (c.append(new, new, backend=backend) for c in (there, here))
    assert torch.equal(*(c.attention(q, causal=True, options=options) for c in (there, here)))
    for one, other in ((there.k, here.k), (there.v, here.v)):
        assert torch.equal(one.float(), other.float())
        rest = torch.ones(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool, device=place)
        rest[offset:].view(6, 8, 2, 16 + offset)[..., :16] = False
        assert bool((one.as_strided((len(rest),), (1,), 0).float()[rest] == 0.5).all())


def test_a_pickled_cache_is_read_by_another_process(tmp_path: Path) -> None:
    import subprocess
    import sys

    cache = made("columns", torch.device("cpu"))
    (tmp_path / "cache").write_bytes(pickle.dumps(cache))
    script = f"""
import pickle
cache = pickle.load(open({str(tmp_path / "cache")!r}, "rb"))
print(type(cache).__name__, cache.v.data_ptr() == cache.k.data_ptr(), tuple(cache.v.shape))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "PagedCache True (6, 8, 1, 16)\n"
