"""Plans of expressions: for sizes that nobody asked about beforehand they are the plans that the front end makes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.export.conftest import ROOT, environment

pytest.importorskip("triton", reason="Triton is not installed")

CASES = [
    ("llmc", "attention(q=2x128x4x64,kv=128x4x64,bf16,band=:0)"),
    ("llmc", "attention(q=2x128x4x128,kv=128x4x128,fp32,band=:0)"),
    ("bshd", "attention(q=2x128x4x64,kv=128x4x64,fp32,band=:0,lse)"),
    ("bshd", "attention(q=2x128x4x128,kv=128x4x128,bf16)"),
    ("llmc", "attention(q=2x128x4x96,kv=128x4x96,fp16,band=:0)"),
    ("bhsd", "attention(q=2x128x4x128,kv=128x1x128,fp16,band=100:0,score=softcap(30.0))"),
    ("bshd", "attention(q=2x128x4x80,kv=128x2x96,bf16,score=alibi(2x4:fp32:grad),sink=4:fp32:grad)"),
    ("bshd", "attention(q=2x128x4x64,kv=128x2x64,bf16,score=bias(1x4x128x128:bf16:grad),dropout=0.1)"),
    ("bhsd", "attention(q=2x128x4x64,kv=128x4x64,bf16,band=:0,deterministic)"),
    ("", "cached(attention(q=1x1x4x128,kv=16x1x128,bf16,band=:0,used=k),pages=1x16x1,split=256)"),
    ("", "cached(attention(q=1x1x2x64,kv=32x1x96,fp32,used=k,sink=2:fp32),pages=1x32x1:contiguous:first)"),
    ("", "cached(attention(q=1x2x2x64,kv=8x1x64,fp16,varlen=2x8,used=k),pages=1x8x1,split=128,cache=e4m3:head:token)"),
    ("", "cached(attention(q=1x2x4x64,kv=16x1x64,bf16,band=:0,used=k),pages=1x16x1,split=256,cache=e4m3:head:head)"),
    ("", "norm(x=1x768:bf16,residual=1x768:bf16,weight=768:bf16,bias=768:bf16;prenorm=True)"),
    ("", "norm(x=1x70000:fp32,weight=70000:fp32;kind='rms')"),
    ("", "cross_entropy(logits=1x50304:bf16,labels=1:int32;reduction='mean';eager_gradient=True;inplace=True)"),
    ("", "dense(x=1x64:bf16,weight1=256x64:bf16,bias1=256:bf16)"),
]
# Of the heads' shared bias there are 990 plans, which take longer than those of all others.
LONG = [("bhsd", "attention(q=2x128x4x64,kv=128x2x64,bf16,band=:0,score=bias(2x1x128x128:bf16:grad))")]


@pytest.mark.parametrize("cases", [CASES, pytest.param(LONG, marks=pytest.mark.whole)], ids=["each", "long"])
def test_every_size_gets_its_plan(cases: list[tuple[str, str]]) -> None:
    command = [sys.executable, "-m", "tests.export.paths", *(word for case in cases for word in case)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr[-3000:]  # the last that was right, and what came then
    assert done.stdout.count("\n") == 4 * len(cases), done.stdout
