"""The companions' machine code, compiled without a GPU: 16-byte accesses, no spills, within shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NEWEST = ROOT / ".venv" / "newest-triton"

# spelling -> most bytes of spill per thread in any of its kernels
NORMS = {
    **{f"norm(x=8192x{n}:bf16,weight={n}:bf16;kind='rms')": 0 for n in (1024, 4096, 16384, 65536)},
    **{f"norm(x=8192x{n}:bf16,weight={n}:bf16,bias={n}:bf16)": 0 for n in (2048, 8192)},
    "norm(x=8192x16384:bf16,weight=16384:bf16,bias=16384:bf16)": 96,  # sums of two gradients fill half of the registers
    "norm(x=8192x4096:bf16,residual=8192x4096:bf16,weight=4096:bf16,bias=4096:bf16,seed=1:int64;dropout_p=0.1;prenorm=True)": 0,
}
ENTROPIES = {
    "cross_entropy(logits=8192x131072:bf16,labels=8192:int64)": 0,
    "cross_entropy(logits=8192x131072:bf16,labels=8192:int64;reduction='mean';eager_gradient=True)": 0,
    "cross_entropy(logits=8192x50257:bf16,labels=8192:int64;reduction='mean';eager_gradient=True)": 0,
    "cross_entropy(logits=8192x32000:fp32,labels=8192:int64;smoothing=0.1;z_loss=0.0001)": 16,
}
SPELLINGS = {**NORMS, **ENTROPIES}


@cache
def compiled(target: str, *spellings: str, packages: Path | None = None) -> list[dict[str, Any]]:
    path = os.pathsep.join(str(p) for p in (packages, ROOT) if p)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    command = [sys.executable, str(HERE / "companion_code.py"), target, *spellings]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_hopper_code(spelling: str) -> None:
    found = [f for f in compiled("sm90", *SPELLINGS) if f["spelling"] == spelling]
    assert len(found) >= 2
    for kernel in found:
        assert kernel["fits"], kernel
        assert kernel["spill_bytes"] <= SPELLINGS[spelling], kernel
        assert kernel["wide_loads"], kernel


@pytest.mark.parametrize("target", ["sm80", "sm86", "gfx942"])
def test_other_architectures_compile(target: str) -> None:
    some = list(SPELLINGS)[::3]
    for kernel in compiled(target, *some):
        assert kernel["fits"], kernel


@pytest.mark.skipif(not NEWEST.is_dir(), reason="tools/setup.sh could not install the newest Triton")
def test_they_compile_under_the_newest_triton() -> None:
    for kernel in compiled("sm90", *list(SPELLINGS)[::3], packages=NEWEST):
        assert kernel["fits"], kernel
