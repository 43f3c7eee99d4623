"""Hopper's forward of e4m3 computes what it should, by a run of its source on the CPU (`emulated_stored`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).resolve().parents[2]
LIMITS = {
    "out": 2.8e-2,
    "lse": 2e-3,
    "padding": 0.0,
}  # relative RMS: what three bits of the probabilities cost; 13 bits of sums
VARLEN: dict[str, Any] = dict(batch=1, seqlen_q=290, seqlen_k=420, cu_q=(0, 70, 70, 75, 280), cu_k=(0, 130, 150, 150, 411))


def case(name: str, head_dim: int, stored: dict[str, Any] | None = None, launch: dict[str, Any] | None = None,
         **fields: Any) -> dict[str, Any]:  # fmt: skip
    sizes = dict(batch=1, seqlen_q=200, seqlen_k=333, heads_q=2, heads_kv=1, dtype="bf16")
    return {"case": {**sizes, "name": name, "head_dim": head_dim, **fields}, "stored": stored or {}, "launch": launch or {}}


GROUPS = {
    "narrow": (
        case("full", 64),
        case("causal", 64, causal=True, batch=2, seqlen_q=300, seqlen_k=200),
        case("window", 64, window=(100, 30), seqlen_q=300),
        case("before", 64, causal=True, window=(40, 0), seqlen_q=130, seqlen_k=400),
        case("sink", 64, sink="fp32", causal=True, stored=dict(k_scale="heads", q_scale="all", v_scale="")),
        case("softcap", 64, score=("softcap",), causal=True),
        case("columns", 16, causal=True, dtype="fp16", stored=dict(q_scale="", k_scale="", v_scale="")),
        case("padded", 64, batch=3, seqlen_q=140, seqlen_k=300, used_q=(140, 9, 17), used_k=(1, 0, 272), causal=True),
        case("two", 64, launch=dict(groups=2, resident=False), window=(70, 0), causal=False),
    ),
    "middle": (
        case("full", 128, heads_q=4, heads_kv=2),
        case("causal", 128, causal=True),
        case("window", 128, window=(150, 0), seqlen_q=333),
        case("varlen", 128, **VARLEN, causal=True),
        case("varlen-used", 128, **VARLEN, used_q=(33, 0, 1, 205), used_k=(3, 17, 0, 240), sink="fp32"),
        case("columns", 96, head_dim_v=80, causal=True),
        case("alibi", 128, score=("softcap", "alibi")),
        case("keys", 128, score=("alibi",), causal=True),
        case("long", 128, seqlen_q=64, seqlen_k=2000),
    ),
    "wide": (
        case("full", 256, seqlen_q=130),
        case("causal", 256, causal=True),
        case("varlen", 192, **VARLEN, head_dim_v=208),
        case("values", 64, head_dim_v=256, causal=True, seqlen_q=130),
    ),
}  # fmt: skip


@pytest.mark.parametrize("group", GROUPS)
def test_e4m3_is_multiplied(group: str) -> None:
    cases = [*GROUPS[group]]
    command = [sys.executable, "-m", "tests.hopper.emulated_stored", *map(json.dumps, cases)]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    wrong = [
        f"{told}: {result.get('failure') or result['errors']}"
        for told, result in zip(cases, results, strict=True)
        if "failure" in result or any(error > LIMITS[name] for name, error in result["errors"].items())
    ]
    assert not wrong, "\n".join(wrong)
