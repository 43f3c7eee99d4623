"""Which part of a problem the CPU backend computes, against the mask's own definition."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from flashtile.kernels.cpu.region import region_of
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.dtype import DType
from flashtile.problem.mask import Band


def problem(seqlen_q: int, seqlen_k: int, mask: Band) -> AttentionProblem:
    return AttentionProblem(1, seqlen_q, seqlen_k, 1, 1, 8, 8, DType.FP32, mask)


def bands() -> Iterator[Band]:
    bounds = (None, -9, -3, -1, 0, 1, 4, 12)
    yield from (Band(left, right) for left in bounds for right in bounds)


@pytest.mark.parametrize("few", [0, 2, 5, 100])
@pytest.mark.parametrize("lengths", [(7, 7), (4, 9), (9, 4), (20, 20)])
def test_rows_that_see_few_keys_run_apart(lengths: tuple[int, int], few: int) -> None:
    for band in bands():
        part = region_of(problem(*lengths, band))
        seen = [sum(part.band.visible(i, j, 0) for j in range(part.keys)) for i in range(part.rows)]
        runs = list(part.runs(3, few))
        assert [row for first, stop in runs for row in range(first, stop)] == list(range(part.rows))
        for first, stop in runs:
            assert stop - first <= 3
            assert part.most_keys(first, stop - 1) == max(seen[first:stop]), band
        head = next((row for row, count in enumerate(seen) if count > few), part.rows)
        assert not head or head in [stop for _, stop in runs], band


@pytest.mark.parametrize("lengths", [(1, 1), (7, 7), (4, 9), (9, 4), (1, 8), (8, 1), (0, 5), (5, 0)])
def test_region_and_tiles_are_those_of_the_mask(lengths: tuple[int, int]) -> None:
    for band in bands():
        p = problem(*lengths, band)
        sees = [[band.visible(i, j, p.shift) for j in range(p.seqlen_k)] for i in range(p.seqlen_q)]
        rows = [i for i in range(p.seqlen_q) if any(sees[i])]
        keys = [j for j in range(p.seqlen_k) if any(row[j] for row in sees)]
        part = region_of(p)
        assert list(range(p.seqlen_q))[part.row_slice] == rows, band
        assert list(range(p.seqlen_k))[part.key_slice] == keys, band
        local = [sees[i][part.key_slice] for i in rows]
        assert part.full == all(map(all, local)), band
        if part.causal:
            assert local == [[j <= i for j in range(part.keys)] for i in range(part.rows)], band
        for first, last in itertools.combinations_with_replacement(range(part.rows), 2):
            tiles = list(part.tiles(first, last, 3))
            visited = [j for tile in tiles for j in range(tile.start, tile.stop)]
            assert visited == sorted(set(visited)), band
            assert {j for i in range(first, last + 1) for j in range(part.keys) if local[i][j]} <= set(visited), band
            edges = {j for tile in tiles for a, b in tile.edges for j in range(a, b)}
            for j in set(visited) - edges:
                assert all(local[i][j] for i in range(first, last + 1)), (band, first, last, j)


def test_a_window_visits_no_more_than_it_needs() -> None:
    part = region_of(problem(4096, 4096, Band(256, 0)))
    (tile,) = part.tiles(1024, 1151, 512)
    assert (tile.start, tile.stop) == (768, 1152)
    assert tile.edges == ((768, 895), (1025, 1152))
