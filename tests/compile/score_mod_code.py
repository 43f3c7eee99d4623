"""Compiles attention with drawn score_mods for an H100, forward and backward; prints, as JSON, one line for each plan.

Arguments: the seeds of `tests/compat/scalar_functions.py`.
"""

from __future__ import annotations

import json
import sys

import torch

from flashtile import dispatch
from flashtile.compat.scalar_score import Code, kind_of
from flashtile.plan.backend import Gradients
from flashtile.plan.call import KernelCall
from flashtile.plan.device import H100
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.dtype import DType
from flashtile.problem.score import ScoreSpec, TensorSpec
from flashtile.torch.api.recording import AXES, INPUTS, record
from flashtile.torch.execute.bound import DTYPE_NAMES
from flashtile.triton_glue.compile import compile_and_read
from tests.compat.scalar_functions import compiled, environment, score_mod

scope, _ = environment(0, torch.device("cpu"))
SIZES = dict(zip(AXES, (2, 4, 512, 512), strict=True))
for seed in map(int, sys.argv[1:]):
    function = compiled(score_mod(seed), "s, b, h, i, j", scope)
    code = Code(record(function, "score_mod", torch.device("cpu"), INPUTS).result, "score_mod")
    kind = kind_of(code, f"drawn_{seed}", True)
    assert hasattr(kind, "forward"), score_mod(seed)
    tensors = tuple(
        TensorSpec(
            tuple(size if axis in leaf.needs else 1 for axis, size in SIZES.items()),
            DTYPE_NAMES[leaf.dtype], leaf.dtype in (torch.float16, torch.float32),
        )
        for leaf in code.leaves
        if leaf.dtype is not None
    )  # fmt: skip
    score = (ScoreSpec(kind, tuple(code.numbers), tensors),)
    problem = AttentionProblem(2, 512, 512, 4, 4, 64, 64, DType.BF16, score=score)
    for plan in (
        dispatch.plan_forward(problem, H100, None),
        dispatch.plan_backward(problem, H100, Gradients(frozenset("qkv"), False), None, "auto"),
    ):
        kernels = [call for call in plan.calls if isinstance(call, KernelCall)]
        spills = [compile_and_read(call, plan, H100)[1].spill_bytes for call in kernels]
        print(json.dumps({"seed": seed, "backend": plan.backend, "variant": plan.variant, "spill_bytes": spills}), flush=True)
