"""Trees of drafts over a cache: a node sees the prefix, its ancestors and itself, whatever lies in other rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashtile
from flashtile import InvalidProblem, Tree
from tests.cached.draw import check, draw
from tests.drafts import drafts


@pytest.mark.parametrize("seed", range(24))
def test_random_calls(backend: str, place: torch.device, seed: int) -> None:
    """Judged by the float64 reference; pages, layouts, packed queries, left padding and modifiers as they are drawn."""
    drawn = draw(seed + 500, small=backend != "cpu", device=place)
    cu = drawn.arguments.get("cu_seqlens_q")
    nodes = drawn.tensors[0].shape[1] if cu is None else max(int((cu[1:] - cu[:-1]).max()), 1)
    items = len(drawn.arguments["seqused_k"])
    tree = drafts(items, nodes, place, seed)
    arguments = {k: v for k, v in drawn.arguments.items() if k not in ("window", "causal")} | {"mask": tree}
    check(replace(drawn, arguments=arguments), backend)


def test_each_path_is_a_causal_call_of_its_own(backend: str, place: torch.device) -> None:
    """The definition: a node's row is that of the chain from its root to it, appended behind the prefix."""
    parents, used = [-1, 0, 0, 1, 2, 2, -1, 6], 21
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, used + 8, 2, 16, generator=generator).to(place) for _ in "kv")
    q = torch.randn(1, 8, 4, 16, generator=generator).to(place)
    options = flashtile.Options(backend=backend)
    table = torch.arange(10, dtype=torch.int32)[None].to(place)
    pools = [torch.nn.functional.pad(t, (0, 0, 0, 0, 0, 1), value=torch.nan).view(10, 3, 2, 16) for t in (k, v)]
    out, lse = flashtile.attention_cached(
        q, *pools, table, seqused_k=torch.tensor([used + 8]).to(place), mask=Tree(torch.tensor(parents).to(place)),
        return_lse=True, options=options,
    )  # fmt: skip
    for node in range(8):
        line, at = [node], parents[node]
        while at >= 0:
            line, at = [at, *line], parents[at]
        rows = [*range(used), *(used + n for n in line)]
        want, sums = flashtile.attention(q[:, line], k[:, rows], v[:, rows], causal=True, return_lse=True, options=options)
        torch.testing.assert_close(out[:, node], want[:, -1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[:, :, node], sums[:, :, -1], rtol=1e-5, atol=1e-5)


def test_a_chain_is_causal(backend: str, place: torch.device) -> None:
    calls = (draw(seed, small=True, device=place) for seed in range(3, 40))
    drawn = next(one for one in calls if one.tensors[0].dtype is torch.float32)
    q, k_cache, v_cache, *table = drawn.tensors
    used = drawn.arguments["seqused_k"]
    cu = drawn.arguments.get("cu_seqlens_q")
    how = dict(seqused_k=used, cu_seqlens_q=cu, options=flashtile.Options(backend=backend))
    chain = Tree(torch.arange(-1, 9 if cu is not None else q.shape[1] - 1)[None].to(place))
    out = flashtile.attention_cached(q, k_cache, v_cache, *table, mask=chain, **how)
    torch.testing.assert_close(out, flashtile.attention_cached(q, k_cache, v_cache, *table, causal=True, **how), equal_nan=True)


def test_bad_parents_are_named() -> None:
    for wrong, says in (([1, 0], "has 1 for node 0"), ([-2, 0], "has -2 for node 0"), ([-1, 1], "has 1 for node 1")):
        with pytest.raises(InvalidProblem, match=rf"tree parents\[1\] {says}; it must be -1 or an earlier node's"):
            Tree(torch.tensor([[-1, 0], wrong]))
    with pytest.raises(InvalidProblem, match=r"tree parents are torch\.uint32"):
        Tree(torch.zeros(2, dtype=torch.uint32))
    with pytest.raises(InvalidProblem, match=r"tree parents are torch\.float32"):
        Tree(torch.zeros(2))
    with pytest.raises(InvalidProblem, match=r"tree parents are list"):
        Tree([0, 1])
    q, pool = torch.randn(2, 3, 2, 16), torch.randn(2, 9, 2, 16)
    used = torch.tensor([5, 9], dtype=torch.int32)
    for parents, says in ((torch.tensor([-1, 0]), "shape of tree parents"), (torch.full((3, 3), -1), "are of 3 items")):
        with pytest.raises(InvalidProblem, match=says):
            flashtile.attention_cached(q, pool, pool, seqused_k=used, mask=Tree(parents))
