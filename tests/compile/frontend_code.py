"""Reads kernels as Triton does and then as tests/frontend.py has it, with line numbers and without, and prints a line of JSON
for each, with hashes of the texts: of one in thirteen kernels of two problems, or with "all" of each kernel of the matrix.

It is run by itself, and not by tests/frontend.py.
"""

from __future__ import annotations

import json
import os
import sys
from hashlib import sha256

from flashtile.audit.matrix import Job, jobs, jobs_of, plan_of
from flashtile.plan.call import KernelCall
from flashtile.plan.device import NAMED
from flashtile.triton_glue.compile import represented
from tests.frontend import hasten  # which imports nothing of flashtile

TARGETS = ("sm90", "gfx942")
FEW = (
    "attention(q=2x90x4x64,kv=90x2x64,bf16,band=30:0)",
    "attention(q=2x200x4x40,kv=300x2x24,fp32,tf32x3,score=softcap(30.0)+alibi(2x4:fp32),where=prefix(2:int32),dropout=0.1,lse)",
)


def text(job: Job) -> str:
    """The first representation of a kernel, with its places."""
    plan, device = plan_of(job), NAMED[job.target]
    call = plan.calls[job.index]
    assert isinstance(call, KernelCall)
    made, _context = represented(call, plan, device)
    return str(made)


asked = [j for t in TARGETS for p in FEW for j in jobs_of(p, t)][::13] if sys.argv[1] == "few" else jobs(list(TARGETS))
placed = asked if sys.argv[1] == "all" else asked[:1]  # these with line numbers, too


def texts() -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    for job in asked:
        os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
        found.append({"bare": text(job)})
        if job in placed:
            os.environ["TRITON_DISABLE_LINE_INFO"] = "0"
            found[-1]["placed"] = text(job)
    return [{name: sha256(made.encode()).hexdigest() for name, made in each.items()} for each in found]


own = texts()
hasten()
for job, before, after in zip(asked, own, texts(), strict=True):
    print(json.dumps({"backend": job.backend, "target": job.target, "problem": job.problem, "own": before, "quick": after}))
