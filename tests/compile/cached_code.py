"""Compiles cached attention's kernels, and those of its append, for GPUs that are not here; a line of JSON for each.

Of the spellings every other one for sm80 and the rest for sm90; with "others", those that this leaves out, alone.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from flashtile.audit.barriers import idle_barriers
from flashtile.audit.hazards import overwritten_operands
from flashtile.dispatch import backend_named
from flashtile.plan.call import KernelCall
from flashtile.plan.device import NAMED
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.cache import AppendProblem, CachedProblem, Pages
from flashtile.problem.dtype import DType
from flashtile.problem.stored import Stored
from flashtile.triton_glue.compile import compile_and_read
from flashtile.triton_glue.sass import disassemble

STORED = Stored("e4m3", "head", "head")
SPELLINGS: dict[str, tuple[str, Pages, int, Stored | None, bool]] = {  # what is attended to, its pages, split, form
    "decode": ("attention(q=8x1x32x128,kv=4096x8x128,bf16,band=:0,used=k)", Pages(512, 16, 256), 512, None, False),
    "window": (
        "attention(q=8x1x32x128,kv=4096x8x128,bf16,band=127:0,sink=32:fp32,used=k)", Pages(512, 16, 256), 512, None, False,
    ),
    "e4m3": ("attention(q=8x1x32x128,kv=4096x8x128,bf16,band=:0,used=k)", Pages(512, 16, 256), 512, STORED, False),
    "odd pages": (
        "attention(q=8x4x8x64,kv=3000x8x64,fp16,band=128:0,used=k)", Pages(512, 3, 1000, True, True), 512, None, False,
    ),
    "packed": (
        "attention(q=8x512x64x128,kv=4096x8x128,bf16,band=:0,score=softcap(30.0),sink=64:bf16,lse,varlen=512x32768,used=k)",
        Pages(512, 64, 64), 0, None, False,
    ),
    "modifiers": (
        "attention(q=4x1x8x64,kv=2048x2x64,bf16,score=alibi(4x8:fp32)+bias(1x8x1x2048:bf16),where=prefix(4:int32),used=k)",
        Pages(64, 16, 128), 512, None, False,
    ),
    "fp32 256": ("attention(q=2x1x8x256,kv=2048x8x256,fp32,tf32x3,used=k)", Pages(128, 16, 128), 512, None, False),
    "wider": ("attention(q=2x8x8x512,kv=4096x8x512,fp16,used=k)", Pages(2, 4096, 1, False), 0, None, False),
    "int8": (
        "attention(q=8x1x32x64,kv=4096x8x64,fp16,used=k)", Pages(512, 16, 256), 512, Stored("int8", "token", "token"), False,
    ),
    "e4m3 fp32": ("attention(q=2x1x8x128,kv=2048x8x128,fp32,tf32x3,used=k)", Pages(128, 16, 128), 512, STORED, False),
    "absorbed groups": (
        "attention(q=128x2x128x576,kv=8192x8x512,fp16,band=:0,used=k)", Pages(16384, 64, 128), 256, None, True,
    ),
    "absorbed 16 in two": ("attention(q=8x1x16x576,kv=4096x1x512,bf16,band=:0,used=k)", Pages(512, 64, 64), 512, None, True),
    "absorbed 128": ("attention(q=8x2x128x576,kv=4096x1x512,bf16,band=:0,used=k)", Pages(512, 64, 64), 0, None, True),
    "e4m3 in two": ("attention(q=8x1x16x576,kv=4096x1x512,bf16,band=:0,used=k)", Pages(512, 64, 64), 512, STORED, True),
}  # fmt: skip
HOPPER: dict[str, tuple[str, Pages, int, Stored | None]] = {  # of 576 columns keys hold values
    "hopper": ("attention(q=8x1x32x128,kv=4096x8x128,bf16,used=k)", Pages(8, 4096, 1, False), 512, None),
    "hopper pages": ("attention(q=8x1x32x128,kv=4096x8x128,bf16,band=:0,used=k)", Pages(512, 16, 256), 512, None),
    "hopper window": ("attention(q=8x4x8x128,kv=4096x8x80,fp16,band=100:0,sink=8:fp32,used=k)", Pages(512, 64, 64), 0, None),
    "hopper 64": ("attention(q=8x1x64x64,kv=4096x8x64,fp16,used=k)", Pages(512, 256, 16), 512, None),
    "hopper e4m3": ("attention(q=8x1x32x128,kv=4096x8x128,bf16,band=:0,used=k)", Pages(512, 16, 256), 512, STORED),
    "hopper padded": (
        "attention(q=64x1x32x128,kv=4096x8x128,bf16,band=500:0,used=k)",
        Pages(64, 4096, 1, False, True),
        256,
        None,
    ),
    "hopper alone": ("attention(q=1x1x8x128,kv=8192x1x128,bf16,used=k)", Pages(1, 8192, 1, False), 256, None),
    "hopper e4m3 rows": ("attention(q=8x16x32x128,kv=4096x8x128,bf16,band=:0,used=k)", Pages(512, 64, 64), 256, STORED),
    "hopper e4m3 alone": ("attention(q=1x1x8x128,kv=8192x1x128,bf16,used=k)", Pages(512, 16, 512), 256, STORED),
    "hopper folds": ("attention(q=64x1x32x128,kv=8192x8x128,bf16,used=k)", Pages(512, 16, 512), 256, STORED),
    "hopper latent 16 in two": ("attention(q=64x1x16x576,kv=4096x1x512,bf16,band=:0,used=k)", Pages(4096, 64, 64), 256, None),
    "hopper latent 128": ("attention(q=64x2x128x576,kv=4096x1x512,bf16,band=:0,used=k)", Pages(4096, 64, 64), 0, None),
    "hopper latent alone": (
        "attention(q=64x1x128x576,kv=4096x1x512,fp16,band=100:0,sink=128:bf16,used=k)",
        Pages(64, 4096, 1, False),
        0,
        None,
    ),
    "hopper e5m2": ("attention(q=8x4x8x64,kv=4096x8x48,fp16,used=k)", Pages(8, 4096, 1, False), 0, Stored("e5m2")),
}
TARGETS = ("sm80", "sm90")
OTHERS = ("sm86", "sm100", "sm120", "gfx942")  # docs/support.md says that decoding, also windowed, is compiled for these, too


def main() -> None:
    names, others = list(SPELLINGS), sys.argv[1:] == ["others"]
    asked = {target: names[(i + others) % 2 :: 2] for i, target in enumerate(TARGETS)}
    for target in TARGETS if others else (*TARGETS, *OTHERS):
        device = NAMED[target]
        new = AppendProblem(8, 1, 8, 128, 128, DType.BF16, 512, 16)
        narrow = replace(new, stored=Stored("e4m3", "token", "head"))
        grows = replace(new, slabs=1, items=8, columns=64, packed=True, grows=True)
        appends = () if others else (("append", new), ("narrow", narrow), ("by lengths", grows))
        plans = {name: backend_named("triton").cached(some, device) for name, some in appends}
        for name in asked.get(target, names[:2]):
            spelling, pages, split, stored, shared = SPELLINGS[name]
            problem = CachedProblem(AttentionProblem.parse(spelling), pages, split, stored, shared, "in two" in name)
            plans[name] = backend_named("triton").cached(problem, device)
        for name, (spelling, pages, split, stored) in HOPPER.items() if target == "sm90" and not others else ():
            p = AttentionProblem.parse(spelling)
            problem = CachedProblem(p, pages, split, stored, p.head_dim == 576, "in two" in name)
            plans[name] = backend_named("hopper").cached(problem, device)
        for name, plan in plans.items():
            for call in plan.calls:
                assert isinstance(call, KernelCall)
                made, found = compile_and_read(call, plan, device)
                row = {"name": name, "target": target, "kernel": call.kernel.__name__, "spills": found.spill_bytes}
                row |= {"shared": found.shared_bytes, "limit": device.smem_bytes, "matrix": found.matrix}
                if name in HOPPER and call is plan.calls[0]:
                    row |= {"idle_barriers": idle_barriers(made.asm["ttgir"])}
                    row |= {"overwritten": overwritten_operands(disassemble(made))}
                print(json.dumps(row))


if __name__ == "__main__":
    main()
