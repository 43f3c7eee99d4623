"""What explain says of calls over a cache, and their spellings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashtile
from flashtile.problem.cache import CachedProblem, default_split
from flashtile.torch.cache import operator
from flashtile.torch.cache.attention import problem_of
from tests.cached import boxes
from tests.cached.draw import draw, taken_apart

LLAMA = "cached(attention(q=64x1x32x128,kv=8192x8x128,bf16,band=:0,used=k),pages=40000x16x512,{})"


def test_spellings_are_read_back() -> None:
    """Of calls of all kinds, as the front end makes them."""
    problems = [boxes.draw(seed)[0] for seed in range(40)]
    for seed in range(80):
        drawn = draw(seed, stored=seed % 2 == 0)
        problems.append(problem_of(*drawn.tensors, **drawn.arguments, split=drawn.split))
        if (apart := taken_apart(drawn)) is not None:
            problems.append(problem_of(*apart[0], **drawn.arguments, split=drawn.split, qv=apart[1]))
    for problem in problems:
        assert CachedProblem.parse(problem.spell()) == problem
    assert len({p.spell() for p in problems}) > 100
    assert sum(p.stored is not None for p in problems) >= 40
    for word in ("varlen=", ":first", ":contiguous", "split=", "v<k", "v<k:apart", "unaligned", "where=", "score=", "sink="):
        assert any(word in p.spell() for p in problems), word


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cached(attention(q=1x1x1x64,kv=16x1x64,bf16,used=k))", "it must be 'cached(attention(...),pages="),
        ("cached(attention(q=1x1x1x64,kv=16x1x64,bf16,used=k),pages=4x16)", "'pages=4x16' is none of pages="),
        ("cached(attention(q=1x1x1x64,kv=16x1x64,bf16,used=k),pages=4x16x1,what)", "'what' is none of"),
        ("cached(attention(q=1x1x1x64,kv=16x1x64,bf16,used=k),pages=4x16x1,v<k,v<k)", "v<k appears twice"),
        ("cached(attention(q=1x1x1x64,kv=16x1x64,bf16),pages=4x16x1)", "attention(...) must say used=k"),
        ("cached(attention(q=1x1x1x64,kv=17x1x64,bf16,used=k),pages=4x16x1)", "has 17 keys and an item may have 16 rows"),
        ("cached(attention(q=1x1x1x64,kv=16x1x64,bf16,used=k),pages=4x16x1,split=100)", "split is 100"),
        ("cached(attention(q=1x1x1x64,kv=16x1x64,what,used=k),pages=4x16x1)", "'what' must be"),
    ],
)
def test_what_is_no_spelling_is_named(text: str, says: str) -> None:
    with pytest.raises(flashtile.InvalidProblem) as error:
        CachedProblem.parse(text)
    assert says in str(error.value)


def test_a_spelling_is_explained(hopper_runs: None) -> None:
    text = str(flashtile.explain(LLAMA.format("split=default"), device="H100"))
    for says in (
        "split=256)", "on H100 (sm90)", "forward: hopper", "decode_hopper: grid 2048x1x1", "boxes of 16 rows",
        "split: 32 parts of 256 keys, the default: 4 rows of queries share each key/value head, and an item may have 8192 keys",
        "2.149 GB", "bound by memory", "triton: could run it, but hopper comes first", "cpu: tensors are on sm90",
    ):  # fmt: skip
        assert says in text, text
    text = str(flashtile.explain(LLAMA.format("cache=int8:head:head"), device="H100"))
    for says in ("forward: triton", "split: one pass, as asked; by default parts of 256 keys", "hopper: the cache stores int8"):
        assert says in text, text
    asked = flashtile.Options(backend="triton")
    text = str(flashtile.explain(LLAMA.format("split=256"), device="H100", options=asked))
    assert "hopper: could run it, but options.backend asks for triton" in text
    with pytest.raises(flashtile.InvalidProblem, match="causal is given besides a problem"):
        flashtile.explain(LLAMA.format("split=256"), causal=True)
    with pytest.raises(flashtile.NotSupported, match="triton"):
        flashtile.explain(LLAMA.format("split=256"), device="cpu", options=asked)


def test_a_call_is_explained_as_it_runs(backend: str, place: torch.device) -> None:
    """The problem and the plan are those that the call then has."""
    k, v = (torch.randn(40, 16, 2, 16, device=place) for _ in "kv")
    table = torch.arange(40, dtype=torch.int32, device=place).view(1, 40)
    cache = flashtile.PagedCache(k, v, table, torch.tensor([500], device=place))
    q, options = torch.randn(1, 1, 4, 16, device=place), flashtile.Options(backend=backend)
    told = flashtile.explain(q, cache, causal=True, window=(100, None), options=options)
    before = len(operator._CACHED)
    cache.attention(q, causal=True, window=(100, None), options=options)
    ran = next(one for one in reversed(list(operator._CACHED.values())) if one.problem.spell() == told.problem.spell())
    assert (ran.problem, ran.plan.backend, len(operator._CACHED)) == (told.problem, backend, before + 1)
    assert "split: 3 parts of 256 keys, the default: 2 rows of queries" in str(told)
    packed = flashtile.explain(q[0], cache, cu_seqlens_q=torch.tensor([0, 1], device=place), options=options)
    assert "the default: queries lie one after another" in str(packed)
    prefill = flashtile.explain(q.expand(1, 40, 4, 16), cache, options=options)
    assert "one pass, the default: 80 rows of queries share each key/value head, more than 64" in str(prefill)
    with pytest.raises(flashtile.InvalidProblem, match="v is given beside a PagedCache"):
        flashtile.explain(q, cache, v)
    with pytest.raises(TypeError, match=r"splt.*did you mean split"):
        flashtile.explain(q, cache, splt=3)


def test_the_bytes_of_a_cache_are_those_that_are_read() -> None:
    whole = CachedProblem.parse(LLAMA.format("split=256"))
    rows, queries = 64 * 8192 * 8, 64 * 32
    assert whole.bytes == rows * 512 + queries * (512 + 4)
    stored = CachedProblem.parse(LLAMA.format("cache=e4m3:token:head"))
    assert stored.bytes == rows * (256 + 4) + queries * (512 + 4)
    assert replace(stored, shared=True).bytes == rows * (128 + 4) + queries * (512 + 4)
    assert default_split(whole.attention, whole.pages) == 256
