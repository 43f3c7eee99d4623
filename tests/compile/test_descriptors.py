"""The assembler that kernels are compiled with, and the tool that shows what it is for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")

from flashtile.triton_glue.compile import TOOLS  # noqa: E402
from flashtile.triton_glue.language import SOUND_PTXAS  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]

# dq of a problem with fewer keys than a tile, and rows that are no multiple of 16 elements apart: the loop over whole tiles is
# skipped, and the next one finds its second operand's address uncomputed if ptxas 12.8 has its way.
CODE = """
import subprocess, sys
from types import SimpleNamespace
from flashtile.dispatch import plan_backward
from flashtile.triton_glue.compile import TOOLS, compile_call
from flashtile.audit.descriptors import suspicious_operands
from flashtile.triton_glue.sass import disassemble
from flashtile.kernels.portable import choose
from flashtile.kernels.portable.tile import Launch
from flashtile.plan.backend import Gradients
from flashtile.plan.device import H100
from flashtile.problem.attention import AttentionProblem
choose.measured = lambda problem, device, which: Launch(128, 32, 8, 3, 8, held=2)
problem = AttentionProblem.parse("attention(q=64x4097x2x40,kv=17x2x40,fp16,lse)")
plan = plan_backward(problem, H100, Gradients(dlse=True), "triton", "split")
call = next(c for c in plan.calls if c.kernel.fn.__name__ == "attention_backward_queries")
compiled = compile_call(call, plan, H100)
print(len(suspicious_operands(disassemble(compiled))))
source, target = sys.argv[1] + "/it.ptx", sys.argv[1] + "/it.cubin"
open(source, "w").write(compiled.asm["ptx"].replace(".version 8.8", ".version 8.7"))
subprocess.run([TOOLS / "ptxas", "--gpu-name=sm_90a", source, "-o", target], check=True)
older = SimpleNamespace(asm={"cubin": open(target, "rb").read()})
print(len(suspicious_operands(disassemble(older))))
"""


def version(tool: Path) -> tuple[int, ...]:
    said = subprocess.run([str(tool), "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(int(n) for n in said.split("release ")[1].split(",")[0].split("."))


def test_kernels_are_compiled_rightly_and_what_the_older_assembler_makes_of_them_is_found(tmp_path: Path) -> None:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_PTXAS_PATH"}
    chosen = {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    done = subprocess.run(command, env={**inherited, **chosen}, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    ours, older = map(int, done.stdout.split())
    assert ours == 0
    assert older == (8 if version(TOOLS / "ptxas") < SOUND_PTXAS else 0)
