"""Layout "documents": zigzag of each packed document by itself. Without ranks: which tokens are where."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from flashtile.torch.context.documents import Documents


@pytest.mark.parametrize("seed", range(60))
def test_items_of_a_chunk_end_where_their_keys_do(seed: int) -> None:
    dice = random.Random(seed)
    ranks = dice.choice([1, 2, 3, 4, 8])
    total = 2 * ranks * dice.randint(0 if seed == 0 else 1, 20)
    edges = [0, *sorted(dice.randint(0, total) for _ in range(dice.randint(0, 6)))]
    made = Documents.of(torch.tensor(edges, dtype=torch.int32), total, ranks)
    tokens = made.tokens().at
    assert sorted(tokens.tolist()) == list(range(total))
    assert tokens[made.tokens().inverse].tolist() == list(range(total))
    for chunk in range(2 * ranks):
        mine, seen = tokens[chunk * made.chunk : (chunk + 1) * made.chunk].tolist(), tokens[made.seen(chunk + 1).at].tolist()
        assert seen == sorted(tokens[: (chunk + 1) * made.chunk].tolist())
        queries, keys = made.items(chunk, chunk + 1).tolist(), made.items(0, chunk + 1).tolist()
        assert len(queries) == len(keys) == len(edges)
        for (start, _), (first, end), (first_key, end_key) in zip(
            pairwise(edges), pairwise(queries), pairwise(keys), strict=True
        ):
            assert seen[first_key:end_key] == list(range(start, start + end_key - first_key))
            assert mine[first:end] == seen[end_key - (end - first) : end_key]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_have_equal_work(ranks: int) -> None:
    """Also where zigzag of the whole stream leaves one with far more."""
    edges, total = [0, 16384, 23593, 39977, 45875, 62259, 65530], 65536
    made = Documents.of(torch.tensor(edges), total, ranks)

    def scores(chunk: int) -> int:
        sizes = zip(made.items(chunk, chunk + 1).diff().tolist(), made.items(0, chunk + 1).diff().tolist(), strict=True)
        return sum(queries * (keys - queries) + queries * (queries + 1) // 2 for queries, keys in sizes)

    work = [scores(rank) + scores(2 * ranks - 1 - rank) for rank in range(ranks)]
    assert sum(work) == sum((end - start) * (end - start + 1) // 2 for start, end in pairwise(edges))
    assert max(work) * ranks <= 1.001 * sum(work)


@pytest.mark.parametrize("edges", [[0, 9, 4], [3, 30], [0, 99]])
def test_what_a_device_may_hold_stays_within_the_whole(edges: list[int]) -> None:
    """Nobody reads cu_seqlens in a GPU's memory: whatever they hold, no order points outside."""
    made = Documents.of(torch.tensor(edges, dtype=torch.int32), 16, 2)
    assert sorted(made.tokens().at.tolist()) == list(range(16))
    assert sorted(made.seen(3).at.tolist()) == list(range(12))
