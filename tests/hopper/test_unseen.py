"""Hopper's backward, emulated: what no query sees may hold NaN, also where the band ends before a query's own key."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).resolve().parents[2]
CODE = """
from tests.fuzz.emulate import install
install()
import torch
import flashtile
from flashtile import Band, Options

torch.manual_seed(0)
for head_dim, right in ((128, -1), (256, -20)):  # the queries behind the last one, up to a tile's end, see the last keys
    tensors = [torch.randn(1, 80, 1, head_dim).bfloat16() for _ in range(4)]
    found = []
    for unseen in (1.0, float("nan")):
        q, k, v, dout = (x.clone() for x in tensors)
        k[:, right:] *= unseen
        v[:, right:] *= unseen
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = flashtile.attention(*leaves, mask=Band(None, right), options=Options(backend="hopper"))
        found.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
    for name, there, here in zip(("out", "dq", "dk", "dv"), *found):
        assert torch.equal(there, here), (head_dim, right, name)
        assert name in ("out", "dq") or not here[:, right:].any(), name
"""


def test_gradients_do_not_depend_on_keys_that_no_query_sees() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
