"""Hopper's second derivatives are what they should be, by a run of their source on the CPU, in processes of their own."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from flashtile.dispatch import backend_named
from flashtile.plan.backend import Direction
from flashtile.plan.call import KernelCall
from flashtile.plan.device import H100
from flashtile.problem.attention import AttentionProblem
from tests.hopper.emulating import emulate

pytest.importorskip("triton", reason="Triton is not installed")

LIMIT = 1e-3  # of the largest element: inputs, what products take, and results are rounded to fp16
EVERY = ["dlse", "tdout", "tdlse"]
SIZES = {
    "full": "q=1x200x2xD,kv=333x2xD,fp16",
    "causal": "q=2x150x4xD,kv=333x2xD,fp16,band=:0",
    "square": "q=1x256x2xD,kv=256x2xD,fp16,band=:0",
    "window": "q=1x300x2xD,kv=320x1xD,fp16,band=100:30",
    "shared heads": "q=1x257x4xD,kv=100x1xD,fp16",
    "tiny": "q=1x5x1xD,kv=7x1xD,fp16",
}


@pytest.mark.parametrize("head_dim", [64, 128])
def test_second_derivatives_are_exact(head_dim: int) -> None:
    """Whatever arrives beside dout; rows that see one key alone, lengths that fill no tile, several heads that share keys."""
    cases: list[dict[str, Any]] = [
        {"problem": f"attention({text.replace('D', str(head_dim))})", "arrives": EVERY[: i % 4]}
        for i, text in enumerate(SIZES.values())
    ]
    narrow = 40 if head_dim == 64 else 104
    cases.append({"problem": f"attention({SIZES['causal'].replace('D', str(narrow))})"})
    cases.append({"problem": f"attention({SIZES['square'].replace('D', str(head_dim))})", "tile": {"stages": 1, "swizzle": 1}})
    for case, result in zip(cases, emulate("emulated_second", map(json.dumps, cases)), strict=True):
        assert "failure" not in result, f"{case}: {result}"
        assert max(result["errors"].values()) <= LIMIT, f"{case}: {result}"


BACK = Direction(frozenset("qkv"), frozenset({"dout"}), frozenset({"q", "k", "v", "out"}))
SQUARE = AttentionProblem.parse("attention(q=1x8192x8x64,kv=8192x2x64,bf16,band=:0)")
BY_KEYS = ["attention_tangent", "attention_second", "attention_dq"]
BOTH_WAYS = ["attention_tangent", "attention_second_queries", "attention_second_keys"]


@pytest.mark.parametrize(("changes", "direction", "kernels"), [
    ({}, BACK, BY_KEYS),
    (dict(head_dim=128, head_dim_v=128), BACK, [*BY_KEYS[:2], "attention_turned_dq"]),
    (dict(deterministic=True), BACK, BOTH_WAYS),  # shares of dq are added in any order
    (dict(seqlen_k=4096), BACK, BOTH_WAYS),  # queries that see nothing may hold NaN
    ({}, replace(BACK, moved=frozenset("qk")), BOTH_WAYS),
    ({}, replace(BACK, given=frozenset({"dlse"})), BOTH_WAYS),
    ({}, replace(BACK, wanted=frozenset("qk")), BOTH_WAYS),
])  # fmt: skip
def test_which_passes_there_are(
    changes: dict[str, Any], direction: Direction, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass over keys where it may add dq up in any order, and all is asked; elsewhere the portable kernels' two."""
    monkeypatch.setattr("flashtile.triton_glue.language.INTERPRETED", False)
    offered = backend_named("hopper").passes["second"]
    problem = replace(SQUARE, **changes)
    assert offered.unsupported(problem, H100, direction) == []
    plan = offered.plan(problem, H100, direction)
    assert [call.kernel.fn.__name__ for call in plan.calls if isinstance(call, KernelCall)] == kernels
