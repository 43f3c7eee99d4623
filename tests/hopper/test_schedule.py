"""How many heads go together on Hopper, and how evenly blocks then share the tiles of lists."""

from __future__ import annotations

import random
from statistics import mean

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from flashtile.kernels.sm90.host.choose_backward import backward_choice, choose_backward
from flashtile.kernels.sm90.host.choose_forward import TOGETHER_BYTES, choose_forward, forward_choice, queries_choice
from flashtile.kernels.sm90.host.schedule import busiest
from flashtile.plan.device import H100
from flashtile.plan.rules import told
from flashtile.problem.attention import AttentionProblem

DOCUMENTS = ",where=document(4096;4096;1x4096:int32;1x4096:int32),blocks=128x128"


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


@pytest.mark.parametrize(
    ("rest", "forward", "backward"),
    [
        (",band=:0", ["two warpgroups take turns", "the cheapest of"], ["three stages of queries", "a warp of this pass"]),
        (
            "",
            ["two warpgroups take turns", "the cheapest of 2 ways"],
            ["three stages of queries", "fewer heads have to go together"],
        ),
        (
            ",deterministic",
            ["two warpgroups take turns", "the cheapest of 2 ways"],
            ["three stages of queries", "in a fixed order"],
        ),
        (",dropout=0.1", ["two warpgroups take turns"], ["three stages of queries", "roles with more to say"]),
        (",used=qk,band=:0", ["two warpgroups", "the items' lengths"], ["three stages", "differ in length under a causal"]),
        (DOCUMENTS, ["two warpgroups", "how long lists are"], ["three stages", "tiles of documents"]),
    ],
)
def test_rules_that_fired_are_told(rest: str, forward: list[str], backward: list[str]) -> None:
    p = problem(1, 4096, 16, rest)
    for words, (launch, fired) in ((forward, forward_choice(p, H100)), (backward, backward_choice(p, H100))):
        lines = told(fired)
        assert launch in (choose_forward(p, H100), choose_backward(p, H100))
        found = [next((i for i, line in enumerate(lines) if word in line), -1) for word in words]
        assert -1 not in found, (words, lines)
        assert found == sorted(found)


def test_dq_s_pass_tells_why_it_has_half_the_keys() -> None:
    whole, half = (queries_choice(problem(1, 4096, 16, rest), H100) for rest in ("", ",dropout=0.1"))
    assert (whole[0].block_k, half[0].block_k) == (128, 64)
    assert [any("128 keys spill" in line for line in told(fired)) for _, fired in (whole, half)] == [False, True]


def test_all_heads_go_together_where_the_cache_holds_them() -> None:
    launch = choose_forward(problem(1, 4096, 16, ",band=:0"), H100)
    assert launch.resident
    assert launch.swizzle == 16


@pytest.mark.parametrize(
    ("sizes", "rest", "ungrouped"),
    [
        ("q=2x3000x20x128,kv=3000x4x128", "", True),  # 192 tiles for 132 blocks, or 960
        ("q=2x3000x20x128,kv=3000x4x128", ",band=:0", True),
        ("q=1x2048x32x128,kv=2048x8x128", "", False),  # 128 tiles, or 512: in either way four of a head for a block
        ("q=1x2048x32x128,kv=2048x8x128", ",band=:0", True),
        ("q=1x1024x32x128,kv=1024x8x128", "", True),
        ("q=1x4096x32x128,kv=4096x8x128", ",band=:0", False),
        ("q=2x4096x64x128,kv=4096x8x128", "", True),  # 4,096 steps of a group's tile
        ("q=1x8192x64x128,kv=8192x8x128", ",band=:0", True),
        ("q=1x8192x64x128,kv=8192x8x128", ",band=1024:0", False),
        ("q=1x8192x64x64,kv=8192x8x64", ",band=:0", False),
        ("q=1x8192x40x128,kv=8192x8x128", ",band=:0", False),
        ("q=2x8192x32x128,kv=8192x8x128", ",band=:0", False),
        ("q=1x16384x32x128,kv=16384x8x128", "", True),
        ("q=1x65536x64x128,kv=65536x8x128", ",band=:0", False),  # not measured, and 2 GB of dk and dv
        ("q=1x1000x32x128,kv=1000x8x128", "", False),
        ("q=1x1024x32x128,kv=1024x32x128", "", False),
        ("q=1x1024x32x192,kv=1024x8x192", "", False),
        ("q=2x3000x20x128,kv=3000x4x128", ",deterministic", False),
        ("q=2x3000x20x128,kv=3000x4x128", ",dropout=0.1", False),
        ("q=2x3000x20x128,kv=3000x4x128", ",score=softcap(30.0)", False),
        ("q=2x3000x20x128,kv=3000x4x128", ",sink=20:fp32", False),
        ("q=2x3000x20x128,kv=3000x4x128", ",used=qk", False),
    ],
)
def test_query_heads_that_share_keys_have_tiles_of_their_own(sizes: str, rest: str, ungrouped: bool) -> None:
    p = AttentionProblem.parse(f"attention({sizes},bf16{rest})")
    launch, fired = backward_choice(p, H100)
    assert launch.ungrouped == ungrouped
    assert any("tiles of its own" in line for line in told(fired)) == ungrouped
    assert not choose_backward(p, H100, split=True).ungrouped
    assert not launch.interleaves or not ungrouped


@pytest.mark.parametrize(
    ("seqlen", "rest", "swizzle", "converts"),
    [
        (8192, ",band=:0", 4, True),
        (16384, ",band=:0", 4, False),
        (32768, ",band=:0", 4, False),
        (65536, ",band=:0", 4, False),
        (131072, ",band=:0", 1, False),  # not measured
        (32768, ",band=:0,score=softcap(30.0)", 1, False),
        (32768, "", 1, False),
    ],
)
def test_long_causal_heads_go_together_and_leave_dq_to_a_pass(seqlen: int, rest: str, swizzle: int, converts: bool) -> None:
    launch, fired = backward_choice(problem(1, seqlen, 16, rest), H100)
    assert (launch.swizzle, launch.converts) == (swizzle, converts)
    assert any("long causal tiles" in line for line in told(fired)) == (seqlen in (32768, 65536) and rest == ",band=:0")


@pytest.mark.parametrize(
    ("rest", "joined", "converts"), [("", True, False), (",band=:0", False, False), (",deterministic", False, False)]
)
def test_narrow_tiles_join_words_without_a_mask_and_leave_dq_to_a_pass(rest: str, joined: bool, converts: bool) -> None:
    launch = choose_backward(AttentionProblem.parse(f"attention(q=4x4096x16x96,kv=4096x16x96,bf16{rest})"), H100)
    assert (launch.joined, launch.converts) == (joined, converts)
    assert launch.narrow == (rest != ",deterministic")
