"""How many heads go together on Hopper, and how evenly blocks then share the tiles of lists."""

from __future__ import annotations

import random
from statistics import mean

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from flashtile.kernels.sm90.host.choose_forward import TOGETHER_BYTES, choose_forward
from flashtile.kernels.sm90.host.schedule import busiest
from flashtile.plan.device import H100
from flashtile.problem.attention import AttentionProblem


def problem(batch: int, seqlen: int, heads: int, rest: str) -> AttentionProblem:
    return AttentionProblem.parse(f"attention(q={batch}x{seqlen}x{heads}x128,kv={seqlen}x{heads}x128,bf16{rest})")


def table(batch: int, seqlen: int, heads: int) -> AttentionProblem:
    blocks = seqlen // 128
    return problem(batch, seqlen, heads, f",where=block_table(128;128;1x{heads}x{blocks}x{blocks}:bool),blocks=128x128")


@pytest.mark.parametrize(
    ("batch", "seqlen", "heads"), [(1, 4096, 16), (1, 4096, 20), (1, 8192, 8), (1, 8192, 16), (2, 16384, 8)]
)
def test_lists_are_shared_evenly(batch: int, seqlen: int, heads: int) -> None:
    """Random blocks at 80 % sparsity: the busiest of an H100's thread blocks has, on average, 12 % more than its share."""
    launch = choose_forward(table(batch, seqlen, heads), H100)
    assert launch.resident
    draw, uneven = random.Random(seqlen + heads), list[float]()
    for _ in range(8):
        lengths = sorted(sum(draw.random() < 0.2 for _ in range(seqlen // 128)) + 2.0 for _ in range(seqlen // 128))
        share = sum(lengths) * batch * heads / H100.sm_count
        uneven.append(busiest(lengths, batch * heads, launch.swizzle, H100.sm_count, listed=True) / share)
    assert mean(uneven) < 1.12


@pytest.mark.parametrize(("seqlen", "heads"), [(8192, 16), (8192, 32), (16384, 16), (32768, 4)])
def test_heads_of_lists_together_have_room_in_the_cache(seqlen: int, heads: int) -> None:
    launch = choose_forward(table(1, seqlen, heads), H100)
    assert launch.swizzle == 1 or launch.swizzle * seqlen * 512 <= TOGETHER_BYTES


@pytest.mark.parametrize(("batch", "seqlen"), [(4, 4096), (2, 8192), (8, 2048)])
def test_causal_heads_together_have_room_in_the_cache(batch: int, seqlen: int) -> None:
    launch = choose_forward(problem(batch, seqlen, 16, ",band=:0"), H100)
    assert launch.resident
    assert launch.swizzle * seqlen * 512 <= TOGETHER_BYTES


def test_all_heads_go_together_where_the_cache_holds_them() -> None:
    launch = choose_forward(problem(1, 4096, 16, ",band=:0"), H100)
    assert launch.resident
    assert launch.swizzle == 16
