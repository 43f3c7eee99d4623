"""The band algebra and the tile ranges, against brute force."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtile.problem.mask import CAUSAL, FULL, Band, key_range, make_mask

bounds = st.none() | st.integers(-40, 40) | st.sampled_from((1 - 2**31, 2**31 - 1))
bands = st.builds(Band, bounds, bounds)
lengths = st.integers(0, 24)


def pairs(band: Band, seqlen_q: int, seqlen_k: int) -> set[tuple[int, int]]:
    shift = seqlen_k - seqlen_q
    return {(i, j) for i in range(seqlen_q) for j in range(seqlen_k) if band.visible(i, j, shift)}


@settings(max_examples=500)
@given(bands, bands, bands)
def test_and_is_an_intersection_semilattice(a: Band, b: Band, c: Band) -> None:
    assert a & b == b & a
    assert (a & b) & c == a & (b & c)
    assert a & a == a
    assert a & FULL == a


@settings(max_examples=300)
@given(bands, bands, lengths, lengths)
def test_and_shows_what_both_show(a: Band, b: Band, seqlen_q: int, seqlen_k: int) -> None:
    both = pairs(a & b, seqlen_q, seqlen_k)
    assert both == pairs(a, seqlen_q, seqlen_k) & pairs(b, seqlen_q, seqlen_k)


@settings(max_examples=300)
@given(bands, lengths, lengths)
def test_a_wider_band_shows_more(band: Band, seqlen_q: int, seqlen_k: int) -> None:
    wider = Band(*(None if bound is None else min(bound + 2, 2**31 - 1) for bound in (band.left, band.right)))
    assert pairs(band, seqlen_q, seqlen_k) <= pairs(wider, seqlen_q, seqlen_k)


@settings(max_examples=500)
@given(bands, lengths, lengths)
def test_clipped_shows_the_same_with_no_idle_bound(band: Band, seqlen_q: int, seqlen_k: int) -> None:
    clipped, shown = band.clipped(seqlen_q, seqlen_k), pairs(band, seqlen_q, seqlen_k)
    assert pairs(clipped, seqlen_q, seqlen_k) == shown
    assert -seqlen_q <= (clipped.left or 0) < max(seqlen_k, 1)
    assert -seqlen_k <= (clipped.right or 0) < max(seqlen_q, 1)
    for side in (Band(left=clipped.left), Band(right=clipped.right)):
        assert side == FULL or len(pairs(side, seqlen_q, seqlen_k)) < seqlen_q * seqlen_k


def test_a_bound_that_hides_one_pair_is_kept() -> None:
    for seqlen_q, seqlen_k in itertools.product(range(1, 5), repeat=2):
        everything = seqlen_q * seqlen_k
        for clipped, wider in (
            (Band(left=seqlen_k - 2).clipped(seqlen_q, seqlen_k), Band(left=seqlen_k - 1).clipped(seqlen_q, seqlen_k)),
            (Band(right=seqlen_q - 2).clipped(seqlen_q, seqlen_k), Band(right=seqlen_q - 1).clipped(seqlen_q, seqlen_k)),
        ):
            assert clipped.count_visible(seqlen_q, seqlen_k) == everything - 1
            assert wider == FULL


@settings(max_examples=500)
@given(bands, lengths, lengths)
def test_count_visible(band: Band, seqlen_q: int, seqlen_k: int) -> None:
    assert band.count_visible(seqlen_q, seqlen_k) == len(pairs(band, seqlen_q, seqlen_k))


def test_causal_is_aligned_bottom_right() -> None:
    assert pairs(CAUSAL, 2, 4) == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3)}
    assert pairs(CAUSAL, 4, 2) == {(2, 0), (3, 0), (3, 1)}


def test_make_mask_joins_its_three_arguments() -> None:
    assert make_mask(False, None, None) == FULL
    assert make_mask(True, None, None) == CAUSAL
    assert make_mask(False, (3, None), None) == Band(left=3)
    assert make_mask(True, (3, 7), Band(left=5, right=-1)) == Band(left=3, right=-1)


@st.composite
def tile_runs(draw: st.DrawFn) -> tuple[Band, int, int, int, int, int]:
    """(band, seqlen_q, seqlen_k, first row, last row, block) of a tile of rows."""
    seqlen_q, seqlen_k = draw(st.integers(1, 48)), draw(st.integers(0, 48))
    first = draw(st.integers(0, seqlen_q - 1))
    last = draw(st.integers(first, min(first + 15, seqlen_q - 1)))
    return draw(bands), seqlen_q, seqlen_k, first, last, draw(st.sampled_from((1, 2, 4, 8, 16)))


def visited(ranges: tuple[int, int, int, int], block: int) -> list[tuple[int, bool]]:
    """(start, masked) of every tile, as the kernels' three loops visit them."""
    lo, full_lo, full_hi, hi = ranges
    assert lo <= full_lo <= full_hi
    loops = ((lo, full_lo, True), (full_lo, full_hi, False), (full_hi, hi, True))
    return [(start, masked) for begin, end, masked in loops for start in range(begin, end, block)]


def check_tiles(ranges: tuple[int, int, int, int], shown: set[tuple[int, int]], rows: range, length: int, block: int) -> None:
    """Each tile is visited once, in order; whole ones unmasked, and none that the rows do not touch at all.

    `shown` holds (row, column) pairs. A band that hides everything (left + right < 0) may be visited in vain.
    """
    tiles = visited(ranges, block)
    starts = [start for start, _ in tiles]
    assert starts == sorted(set(starts))
    assert all(start % block == 0 and 0 <= start < length for start in starts)
    kinds = dict(tiles)
    touched = [c for r, c in shown if r in rows]
    for start in range(0, length, block):
        tile = range(start, start + block)
        whole = start + block <= length and all((r, c) in shown for r in rows for c in tile)
        seen = any((r, c) in shown for r in rows for c in tile)
        assert not (seen and start not in kinds), f"tile {start} is skipped, but visible"
        assert not (not whole and kinds.get(start) is False), f"tile {start} is not masked, but not visible whole"
        assert not (whole and kinds[start]), f"tile {start} is masked, but visible whole"
        if touched:
            between = start <= max(touched) and start + block > min(touched)
            assert (start in kinds) == between, f"tile {start} is visited in vain"


@settings(max_examples=3000)
@given(tile_runs())
def test_key_range(run: tuple[Band, int, int, int, int, int]) -> None:
    band, seqlen_q, seqlen_k, first, last, block = run
    shift, left, right = seqlen_k - seqlen_q, band.left, band.right
    ranges = key_range(
        first + shift, last + shift, seqlen_k, left or 0, right or 0, left is not None, right is not None, block
    )  # fmt: skip
    check_tiles(ranges, pairs(band, seqlen_q, seqlen_k), range(first, last + 1), seqlen_k, block)


@settings(max_examples=3000)
@given(tile_runs())
def test_key_range_with_swapped_bounds_ranges_over_queries(run: tuple[Band, int, int, int, int, int]) -> None:
    band, seqlen_k, seqlen_q, first, last, block = run
    shift, left, right = seqlen_k - seqlen_q, band.left, band.right
    ranges = key_range(
        first - shift, last - shift, seqlen_q, right or 0, left or 0, right is not None, left is not None, block
    )  # fmt: skip
    shown = {(key, query) for query, key in pairs(band, seqlen_q, seqlen_k)}
    check_tiles(ranges, shown, range(first, last + 1), seqlen_q, block)


@pytest.mark.parametrize("far", [2**31 - 1, 1 - 2**31])
def test_bounds_at_the_ends_of_32_bits(far: int) -> None:
    for band in (Band(left=far), Band(right=far)):
        assert band.count_visible(5, 7) == (35 if far > 0 else 0)
        assert pairs(band.clipped(5, 7), 5, 7) == pairs(band, 5, 7)
