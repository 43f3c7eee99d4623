"""Hopper's forward mode computes what it should, by a run of its source on the CPU, in processes of their own."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.hopper.emulating import emulate

pytest.importorskip("triton", reason="Triton is not installed")

LIMIT = 1e-3  # of the largest element: inputs, probabilities and results are rounded to fp16
SIZES = {
    "full": "q=1x200x2xD,kv=333x2xD,fp16",
    "causal": "q=1x200x2xD,kv=333x2xD,fp16,band=:0",
    "unseen queries": "q=2x333x4xD,kv=200x2xD,fp16,band=:0",
    "shared heads": "q=1x257x4xD,kv=400x1xD,fp16",
    "window": "q=1x300x2xD,kv=320x2xD,fp16,band=100:30",
    "left": "q=1x256x2xD,kv=384x1xD,fp16,band=64:",
    "stripe": "q=1x150x1xD,kv=420x1xD,fp16,band=200:-70",
    "tiny": "q=1x5x1xD,kv=7x1xD,fp16",
}


def judge(*cases: dict[str, Any]) -> None:
    for case, result in zip(cases, emulate("emulated_tangent", map(json.dumps, cases)), strict=True):
        assert "failure" not in result, f"{case}: {result}"
        assert max(result["errors"].values()) <= LIMIT, f"{case}: {result}"


@pytest.mark.parametrize("head_dim", [64, 128])
def test_tangents_are_exact(head_dim: int) -> None:
    """Whatever moves beside q; rows that see nothing, or no key of their block's first tile."""
    moves = ("q", "qkv", "qk", "qv")
    judge(*(
        {"problem": f"attention({text.replace('D', str(head_dim))})", "moves": moves[(i + j) % 4]}
        for i, text in enumerate(SIZES.values()) for j in range(2)
    ))  # fmt: skip


def test_other_tiles() -> None:
    """Narrow heads; blocks of their own, without turns, more stages."""
    judge(
        {"problem": "attention(q=1x200x2x40,kv=333x2x40,fp16,band=:0)", "moves": "qkv"},
        *({"problem": "attention(q=2x200x2x64,kv=333x2x64,fp16,band=:0)", "moves": "q", "launch": launch}
          for launch in (dict(turns=False), dict(resident=False, stages=4), dict(block_k=64, stages=2))),
    )  # fmt: skip


def test_what_tangents_have_in_common_cancels() -> None:
    judge(*({"problem": f"attention({SIZES[name].replace('D', '64')})", "moves": "qk", "offset": 100.0}
            for name in ("full", "causal", "window")))  # fmt: skip


def test_what_nobody_sees_reaches_nothing() -> None:
    """Keys before every query's window, or behind, may hold NaN, and so may their tangents."""
    judge(*({"problem": f"attention({SIZES[name].replace('D', str(d))})", "moves": "qkv", "unseen": True}
            for name, d in (("left", 64), ("stripe", 128))))  # fmt: skip


def test_what_second_derivatives_want_of_rows() -> None:
    """FIELDS, of any gradients that arrive."""
    every = ["dout", "dlse", "tdout", "tdlse"]
    judge(*(
        {"problem": f"attention({SIZES[name].replace('D', str(d))})", "moves": moves, "arrives": arrives}
        for name, d, moves, arrives in (
        ("causal", 64, "qkv", every), ("full", 128, "qkv", ["dout"]), ("unseen queries", 64, "q", ["tdout", "tdlse"]),
        ("window", 128, "qk", ["dlse"]), ("tiny", 40, "qkv", every),
    )))  # fmt: skip


def test_what_is_refused() -> None:
    from flashtile.kernels.sm90.tangent.plan import refusals
    from flashtile.plan.backend import Direction
    from flashtile.plan.device import H100
    from flashtile.problem.attention import AttentionProblem

    whole = AttentionProblem.parse("attention(q=1x8192x8x64,kv=8192x8x64,bf16,band=:0)")
    assert refusals(whole, H100, Direction(frozenset("q"))) == []
    assert any("q has no tangent" in reason for reason in refusals(whole, H100, Direction(frozenset("kv"))))
    for changes, what in (
        (dict(head_dim=96, head_dim_v=96), "head_dim is 96"), (dict(head_dim_v=128), "head_dim_v 128"),
        (dict(scale=-1.0), "scale"), (dict(seqlen_q=16, seqlen_k=16), "small"),
    ):  # fmt: skip
        assert any(what in reason for reason in refusals(replace(whole, **changes), H100, Direction(frozenset("q")))), what
