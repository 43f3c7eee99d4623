"""A covering sample of the compile-only stage (`make compile` is all of it), under both Triton releases.

Compilation needs kernels that are not interpreted, hence processes of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compile.conftest import NEWEST, Compiled

triton = pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).resolve().parents[2]


TARGETS = ("sm90", "sm80", "sm86", "sm100", "sm120", "gfx942")


def run(cache: Path, code: str) -> None:
    """Python that runs this code, whose kernels are compiled into `cache`."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", "from tests.frontend import hasten; hasten()\n" + code]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_a_covering_sample_keeps_within_its_budgets(compiled: Compiled) -> None:
    rows = compiled("matrix_code.py", *TARGETS)
    assert not [row for row in rows if row["failure"]]
    for target in TARGETS:
        assert sum(row["target"] == target and row["matrix"] > 0 for row in rows) >= 3


@pytest.mark.skipif(not NEWEST.is_dir(), reason="tools/setup.sh could not install the newest Triton")
def test_each_kernel_compiles_under_the_newest_triton(compiled: Compiled) -> None:
    targets = ("sm90", "sm80", "sm120", "gfx942")
    rows = compiled("matrix_code.py", "--few", *targets, packages=NEWEST)
    assert not [row for row in rows if row["failure"]]
    for target in targets:
        assert any(row["target"] == target and row["matrix"] > 0 for row in rows)


def test_hopper_kernels_use_its_matrix_units(tmp_path: Path) -> None:
    code = """
from flashtile.triton_glue.compile import compile_call
from flashtile.kernels.portable.backend import BACKEND
from flashtile.plan.backend import Gradients
from flashtile.plan.device import H100
from flashtile.problem.attention import AttentionProblem
problem = AttentionProblem.parse("attention(q=1x256x1x64,kv=256x1x64,bf16)")
calls = BACKEND.forward(problem, H100).calls + BACKEND.backward(problem, H100, Gradients(), "split").calls[1:]
plans = [BACKEND.forward(problem, H100)] + 2 * [BACKEND.backward(problem, H100, Gradients(), "split")]
for call, plan in zip(calls, plans):
    assert "wgmma.mma_async" in compile_call(call, plan, H100).asm["ptx"], call.kernel
"""
    run(tmp_path, code)


# Rows that a sample misses, and whose tiles once spilled kilobytes or did not fit: (targets, variant, pass, problem).
CROWDED = [
    (("sm80", "sm86"), "split", "queries", "attention(q=2x2048x8x128,kv=2048x8x128,fp32,band=:0,tf32x3)"),
    (("sm80", "sm86"), "", "forward", "attention(q=2x2048x8x256,kv=2048x8x256,bf16,band=1000:0)"),
    (("sm80",), "fused", "keys", "attention(q=2x2048x8x256,kv=2048x8x256,fp32,tf32)"),
    (("sm90",), "fused", "keys", "attention(q=2x2048x8x256,kv=2048x8x256,bf16,band=1000:0)"),
    (("sm100",), "split", "queries", "attention(q=2x2048x8x256,kv=2048x8x256,bf16,band=:0)"),
    (("sm80",), "split", "queries", "attention(q=2x1000x8x40,kv=1300x2x40,bf16,band=:0)"),
]


def test_crowded_tiles_keep_within_their_budgets(tmp_path: Path) -> None:
    code = f"""
from flashtile.audit.matrix import compile_row, jobs_of, plan_of
for targets, variant, which, spelling in {CROWDED!r}:
    for target in targets:
        jobs = [job for job in jobs_of(spelling, target) if job.backend == "triton" and job.variant == variant]
        jobs = [job for job in jobs if plan_of(job).calls[job.index].kernel.fn.__name__.endswith(which)]
        assert len(jobs) == 1, (target, spelling, jobs)
        row = compile_row(jobs[0])
        assert row.tile and not row.failure, row
"""
    run(tmp_path, code)


def test_float64_products_take_what_narrow_tensors_changed(tmp_path: Path) -> None:
    code = """
from flashtile.audit.matrix import compile_row, jobs_of, problems
spelling = next(p for p in problems() if "bf16:grad" in p and "stored" in p and "fp32" in p)
jobs = [job for job in jobs_of(spelling, "sm90") if job.variant != "fused"]
assert len(jobs) >= 4
for row in map(compile_row, jobs):
    assert not row.failure, (row.kernel, row.failure)
"""
    run(tmp_path, code)
