"""Exported C hands the driver what PyTorch's executor does: kernels, grids and every argument, word by word.

Sizes of 1 are left to test_paths.py: there a launch through Triton's JIT is specialised to strides of 1 and passes fewer
arguments, which a file for all sizes cannot.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.export.conftest import ROOT, environment


@pytest.mark.parametrize(
    ("layout", "spelling", "sizes"),
    [
        ("llmc", "attention(q=1x1x1x64,kv=1x1x64,bf16,band=:0)", ("2x128x4", "8x1024x12", "3x1000x12")),
        ("llmc", "attention(q=1x1x1x64,kv=1x1x64,fp32,band=:0)", ("2x1000x3", "2x1024x3", "3x333x3")),
        ("llmc", "attention(q=1x1x1x64,kv=1x1x64,fp32,band=:0,tf32)", ("2x1024x3",)),
        ("bhsd", "attention(q=1x1x4x64,kv=1x1x64,fp16,band=100:0,score=softcap(30.0),lse)", ("2x257x300x2",)),
        ("bshd", "attention(q=1x1x2x32,kv=1x1x32,bf16,score=alibi(1x2:fp32:grad),sink=2:fp32:grad)", ("2x100x130x3",)),
        ("bshd", "norm(x=1x768:bf16,residual=1x768:bf16,weight=768:bf16,bias=768:bf16;prenorm=True)", ("1000",)),
        ("bshd", "cross_entropy(logits=1x5003:bf16,labels=1:int32)", ("1000",)),
        ("bshd", "cross_entropy(logits=1x512:fp32,labels=1:int32;reduction='mean';eager_gradient=True;inplace=True)", ("50",)),
        ("bshd", "dense(x=1x64:bf16,weight1=256x64:bf16,bias1=256:bf16)", ("1000",)),
        ("bshd", "attention(q=1x2x2x32,kv=2x1x32,bf16,score=bias(1x2x2x2:bf16:grad),dropout=0.1)", ("2x100x130x3",)),
        (
            "bshd",
            "cached(attention(q=1x1x4x64,kv=16x1x64,bf16,band=:0,used=k),pages=1x16x1,split=256)",
            ("2x3x3x100x40x4096x192x64", "64x1x2x2000x9x8192x64x1024"),
        ),
        (
            "bshd",
            "cached(attention(q=1x1x2x32,kv=16x1x32,fp32,used=k),pages=1x16x1:contiguous:first)",
            ("5x2x3x70x8192x128x48",),
        ),
        (
            "bshd",
            "cached(attention(q=1x2x2x64,kv=3x1x64,bf16,varlen=2x3,used=k),pages=1x3x1,cache=e4m3:head:token)",
            ("4x9x2x70x11x4096x192x64",),
        ),
    ],
)
def test_c_launches_what_the_front_end_does(
    tmp_path: Path, driver: Path, layout: str, spelling: str, sizes: tuple[str, ...]
) -> None:
    more = {"TRITON_LIBCUDA_PATH": str(driver), "LD_LIBRARY_PATH": str(driver), "LAUNCHES": str(tmp_path / "launches")}
    more["EARLY"] = str(tmp_path / "early")
    command = [sys.executable, "-m", "tests.export.launches", str(tmp_path), layout, spelling, *sizes]
    done = subprocess.run(command, env=environment(**more), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.count("\n") == 2 * len(sizes), done.stdout
