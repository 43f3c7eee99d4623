"""Compiles both passes of each companion spelling and prints, as JSON, what test_companions.py judges.

python companion_code.py TARGET [--accesses] SPELLING ...

Accesses to memory are counted where they are asked for: disassembling takes half as long as compiling.
"""

from __future__ import annotations

import json
import re
import sys

from flashtile.audit.barriers import idle_barriers
from flashtile.kernels.ops.catalogue import OPS
from flashtile.plan.call import KernelCall
from flashtile.plan.device import named
from flashtile.plan.op import plan_backward, plan_forward
from flashtile.problem.op import Companion
from flashtile.triton_glue.compile import compile_and_read
from flashtile.triton_glue.sass import disassemble, matrix_loops

device, spellings, accesses = named(sys.argv[1]), sys.argv[2:], sys.argv[2] == "--accesses"
for spelling in spellings[accesses:]:
    problem = Companion.parse(spelling)
    op, wanted = OPS[problem.op], frozenset(n for n, _ in problem.given if n in problem.differentiable)
    plans = [
        plan_forward(op, problem, device, "triton", True),
        plan_backward(op, problem, device, "triton", wanted, frozenset(problem.public())),
    ]
    for plan in plans:
        for call in plan.calls:
            if not isinstance(call, KernelCall):
                continue
            compiled, used = compile_and_read(call, plan, device)
            found = {
                "spelling": spelling,
                "kernel": call.kernel.fn.__name__,
                "registers": used.registers,
                "spill_bytes": used.spill_bytes,
                "shared_bytes": used.shared_bytes,
                "fits": used.shared_bytes <= device.smem_bytes,
            }
            if accesses:
                sass = disassemble(compiled)
                found["loops"] = [
                    {"products": loop.count("HGMMA"), "waits": loop.count("WARPGROUP.DEPBAR"), "spills": loop.spills}
                    for loop in matrix_loops(sass)
                ]
                found["idle_barriers"] = idle_barriers(compiled.asm["ttgir"])
                found["serialised"] = re.findall(r"\(C75\d\d\)", used.log)
                found["wide_loads"] = len(re.findall(r"LDG\.E(?:\.\w+)*\.128|LDGSTS(?:\.\w+)*\.128", sass))
            print(json.dumps(found), flush=True)
