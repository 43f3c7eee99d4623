"""Compiles one pass of each spelling for an H100, "pass:attention(...)", and prints, as JSON, what test_features.py judges."""

from __future__ import annotations

import json
import re
import sys
from typing import cast

from flashtile.kernels.portable.choose import choose
from flashtile.kernels.portable.tile import Pass
from flashtile.plan.call import KernelCall
from flashtile.plan.device import H100
from flashtile.problem.attention import AttentionProblem
from flashtile.triton_glue.compile import compile_and_read
from flashtile.triton_glue.sass import disassemble, matrix_loops
from flashtile.tune import plan_of

for argument in sys.argv[1:]:
    name, _, spelling = argument.partition(":")
    problem, which = AttentionProblem.parse(spelling), cast(Pass, name)
    launch = choose(problem, H100, which)
    plan, index = plan_of(problem, H100, which, launch)
    call = plan.calls[index]
    assert isinstance(call, KernelCall)
    compiled, used = compile_and_read(call, plan, H100)
    scores = launch.block_q * launch.block_k / (32 * launch.num_warps)
    kinds = ("LDG", "LDGSTS", "PRMT", "MUFU", "SHFL", "HGMMA", "HMMA")
    loops = [
        {"instructions": len(loop.opcodes) / scores, "spills": loop.spills, **{kind: loop.count(kind) for kind in kinds}}
        for loop in matrix_loops(disassemble(compiled))
    ]
    found = {
        "spelling": argument,
        "shared_bytes": used.shared_bytes,
        "serialised": re.findall(r"\(C75\d\d\)", used.log),
        "loops": loops,
    }
    print(json.dumps(found))
