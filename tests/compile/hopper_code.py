"""Compiles the Hopper forward of each spelling, or its backward behind "backward:" (where dv has a pass of its own, that
one behind "backward-dv:"), of the split one the pass over keys behind "split:" and that over queries behind "queries:", or
forward mode behind "tangent." and what moves, and prints, as JSON, what test_hopper.py judges.
"""

from __future__ import annotations

import json
import re
import sys

from flashtile.audit.barriers import idle_barriers
from flashtile.audit.hazards import overwritten_operands
from flashtile.kernels.sm90.backend import BACKEND
from flashtile.kernels.sm90.host.choose_forward import choose_forward
from flashtile.kernels.sm90.host.tile_forward import forward_shared_bytes
from flashtile.kernels.sm90.tangent.plan import plan_tangent, refusals
from flashtile.plan.backend import Direction, Gradients
from flashtile.plan.call import KernelCall
from flashtile.plan.device import H100
from flashtile.problem.attention import AttentionProblem
from flashtile.triton_glue.compile import compile_and_read
from flashtile.triton_glue.sass import disassemble, matrix_loops

for argument in sys.argv[1:]:
    direction, _, spelling = argument.rpartition(":attention")
    spelling = f"attention{spelling}" if direction else argument
    problem = AttentionProblem.parse(spelling)
    if direction.startswith("tangent."):
        moves = Direction(frozenset(direction.removeprefix("tangent.")))
        assert BACKEND.unsupported(problem, H100) + refusals(problem, H100, moves) == []
        plan = plan_tangent(problem, H100, moves)
        (call,) = plan.calls
        assert isinstance(call, KernelCall)
    elif direction:
        variant = "split" if direction in ("split", "queries") else "fused"
        assert BACKEND.unsupported(problem, H100, variant) == []
        plan = BACKEND.backward(problem, H100, Gradients(), variant)
        name = "attention_queries" if direction == "queries" else "attention_backward"
        passes = [c for c in plan.calls if isinstance(c, KernelCall) and c.kernel.fn.__name__ == name]
        call = passes[0 if direction == "backward-dv" else -1]
    else:
        assert BACKEND.unsupported(problem, H100) == []
        plan = BACKEND.forward(problem, H100)
        call = plan.calls[-1]  # behind a schedule's
        assert isinstance(call, KernelCall)
    compiled, used = compile_and_read(call, plan, H100)
    ptx, sass = compiled.asm["ptx"], disassemble(compiled)
    loops = [
        {
            "length": len(loop.opcodes),
            "spills": loop.spills,
            "products": loop.count("HGMMA") + loop.count("QGMMA"),
            "exponentials": loop.places("MUFU.EX2"),
            "curves": loop.places("MUFU.TANH"),
            "waits": loop.places("WARPGROUP.DEPBAR"),
            "loads": loop.places("LDG"),
            "wide_loads": loop.places("LDG.E.128"),
            "spreads": loop.places("STS"),
            "turns": loop.places("LDSM"),
            "votes": loop.places("VOTE"),
            "jumps": loop.places("BRA"),
            "skips": loop.skips,
            "maxima": loop.places("FMNMX"),
            "multiplications": loop.places("FMUL"),
            "permutes": loop.places("PRMT"),
            "stores": loop.places("STG") + loop.places("UTMASTG"),
        }
        for loop in matrix_loops(sass)
    ]
    found = {
        "spelling": argument,
        "registers": used.registers,
        "spill_bytes": used.spill_bytes,
        "shared_bytes": used.shared_bytes,
        "priced_bytes": 0 if direction else forward_shared_bytes(problem, choose_forward(problem, H100)),
        "serialised": re.findall(r"\(C75\d\d\)", used.log),
        "wgmma": ptx.count("wgmma.mma_async"),
        "of_64_columns": len(re.findall(r"wgmma\.mma_async\S*\.m64n64k16", ptx)),
        "bulk": len(re.findall(r"cp\.async\.bulk\.tensor[^\n]*global", ptx)),
        "setmaxnreg": len(re.findall(r"setmaxnreg\.(?:inc|dec)", ptx)),
        "loops": loops,
        "overwritten": overwritten_operands(sass),
        "idle_barriers": idle_barriers(compiled.asm["ttgir"]),
        # of loops of so many iterations, how many values each carries
        "carried": [
            (int(times), len(types.split(",")))
            for times, types in re.findall(
                r"scf\.for \S+ = %c0_i32\S* to %c(\d+)_i32\S* .*? -> \((.*?)\)", compiled.asm["ttgir"]
            )
        ],
    }
    print(json.dumps(found))
