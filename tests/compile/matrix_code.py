"""Compiles rows of the matrix for the targets given, which together have every trait of all (`--few`: of each kernel one), and
prints what came of each as JSON: see test_matrix.py.

python matrix_code.py [--few] TARGET ...
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict

from flashtile.audit.matrix import Job, compile_row, jobs, plan_of
from flashtile.plan.call import KernelCall
from flashtile.problem.attention import AttentionProblem
from tests.compile.covering import covering

FEATURES = re.compile(r"softcap|alibi|bias|dropout|varlen|used=|sink|document|stored|key_padding|prefix|exact_delta")
few = sys.argv[1] == "--few"


def traits(job: Job) -> set[str]:
    """Every kernel; of those that multiply every dtype, on targets and of kernels, head dim, feature in either direction, and
    those of 128 columns on sm100, whose tensor memory is short for large tiles. Of Hopper's, of which test_hopper.py compiles
    more, each kernel. Few: every kernel; every target.
    """
    problem, call = AttentionProblem.parse(job.problem), plan_of(job).calls[job.index]
    assert isinstance(call, KernelCall)
    kernel, dtype = call.kernel.fn.__name__, problem.dtype.name + problem.precision
    found = {f"{job.backend} {kernel}"}
    if job.backend == "hopper" or "SCORE" not in dict(call.constants):
        return found
    if few:
        return found | {job.target}
    passes = {f"{'backward' if job.variant else 'forward'} {feature}" for feature in FEATURES.findall(job.problem)}
    short = {f"sm100 {kernel}"} if job.target == "sm100" and problem.head_dim == 128 else set[str]()
    return found | {f"{kernel} {dtype}", f"{job.target} {dtype}", f"{problem.head_dim} columns", *passes, *short}


def widest(job: Job) -> int:
    problem = AttentionProblem.parse(job.problem)
    return max(problem.head_dim, problem.head_dim_v)


every = [job for target in sys.argv[1 + few :] for job in jobs([target])]  # plans of one target follow one another
for job in covering(sorted(every, key=widest), traits):  # narrow ones compile in less time
    print(json.dumps(asdict(compile_row(job))), flush=True)
