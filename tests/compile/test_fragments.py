"""Products are as long as the fragments that matrix instructions read: the rule of tiles, and the tool that reads TTGIR."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from flashtile.audit.fragments import short_sums
from flashtile.kernels.portable.backend import BACKEND
from flashtile.kernels.portable.candidates import candidates
from flashtile.kernels.portable.choose import choose
from flashtile.kernels.portable.tile import WHOLE_FRAGMENT, reads_bytes_and_joins
from flashtile.plan.device import NAMED, Device
from flashtile.problem.attention import AttentionProblem

MMA = "#mma = #ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0, warpsPerCTA = [1, 4], instrShape = [16, 8]}>\n"


def dot(terms: int, width: int, mma: str = "#mma") -> str:
    left, right = (f"#ttg.dot_op<{{opIdx = {i}, parent = {mma}, kWidth = {width}}}>" for i in (0, 1))
    return (f"%9 = tt.dot %7, %8, %6, inputPrecision = tf32 : tensor<16x{terms}xf16, {left}> * tensor<{terms}x64xf16, {right}>"
            f" -> tensor<16x64xf32, {mma}> loc(#loc3)\n")  # fmt: skip


def test_products_shorter_than_a_fragment_are_found() -> None:
    assert short_sums(MMA + dot(16, 8) + dot(16, 8) + dot(32, 16)) == ["16 terms of kWidth 8", "32 terms of kWidth 16"]


def test_others_are_not() -> None:
    wider = MMA.replace("#mma", "#mma1").replace("versionMajor = 2", "versionMajor = 3")
    assert short_sums(MMA + wider + dot(32, 8) + dot(16, 4) + dot(16, 8, "#mma1")) == []


BYTES = ("where=key_padding(200;2x200:bool)", "where=document(200;200;2x200:int8;2x200:int8)",
         "where=stored(2;1;200;200;2x1x200x200:bool)")  # fmt: skip
GPUS = [device for device in NAMED.values() if device.kind == "cuda"]


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.target)
def test_tiles_of_bytes_and_dropout_have_whole_fragments(device: Device, hopper_runs: None) -> None:
    kinds = product(("fp32", "bf16"), (16, 40, 64, 96, 128, 256, 512), BYTES)
    asked = 0
    for dtype, size, where in kinds:
        for tail in ("", ",tf32") if dtype == "fp32" else ("",):
            p = AttentionProblem.parse(f"attention(q=2x200x4x{size},kv=200x2x{size},{dtype},{where},dropout=0.1{tail})")
            passes = {"forward": "k", "queries": "k", "keys": "q", "fused": "qk"}
            for which, axes in passes.items():
                if dtype == "fp32" and size == 512:
                    continue  # refused
                launch = choose(p, device, which)  # pyright: ignore[reportArgumentType]
                if reads_bytes_and_joins(p, device, launch.products):
                    asked += 1
                    summed = [getattr(launch, f"block_{axis}") for axis in axes]
                    assert min(summed) >= WHOLE_FRAGMENT, (p.spell(), which, launch)
                    for tried in candidates(p, device, which):  # pyright: ignore[reportArgumentType]
                        assert min(getattr(tried, f"block_{axis}") for axis in axes) >= WHOLE_FRAGMENT
    assert asked > 100


def test_a_tile_that_no_longer_fits_is_refused(hopper_runs: None) -> None:
    p = AttentionProblem.parse("attention(q=2x200x4x128,kv=200x2x128,fp32,where=key_padding(200;2x200:bool),dropout=0.1)")
    assert "of shared memory" in BACKEND.unsupported(p, NAMED["sm86"], "fused")[0]
    assert not BACKEND.unsupported(p, NAMED["sm90"], "fused")


@pytest.mark.compiles
def test_compiled_kernels_have_none() -> None:
    """Of both kinds that were wrong on a GPU: fp32 over grouped heads, 16 bits with head dims beyond 128."""
    code = """
from flashtile.triton_glue.compile import compile_call
from flashtile.audit.fragments import short_sums
from flashtile.kernels.portable.backend import BACKEND
from flashtile.plan.backend import Gradients
from flashtile.plan.device import NAMED
from flashtile.kernels.portable.tile import Launch
from flashtile.problem.attention import AttentionProblem
problem = AttentionProblem.parse("attention(q=2x700x10x96,kv=200x2x96,fp32,where=key_padding(200;2x200:bool),dropout=0.5)")
device, asked = NAMED["sm90"], Gradients()
plan = BACKEND.backward(problem, device, asked, "split")
(keys,) = [call for call in plan.calls if call.kernel.fn.__name__.endswith("keys")]
assert short_sums(compile_call(keys, plan, device).asm["ttgir"]) == []
small = BACKEND.backward(problem, device, asked, "split", {"keys": Launch(16, 16, 4, 1, products="aligned")})
(keys,) = [call for call in small.calls if call.kernel.fn.__name__.endswith("keys")]
import triton
found = short_sums(compile_call(keys, small, device).asm["ttgir"])
assert bool(found) == (triton.__version__ < "3.8"), found
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "TRITON_INTERPRET": "0"}, timeout=300)
