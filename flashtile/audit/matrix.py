"""Compiles every kernel with every shipped tile for every architecture, and holds the result against budgets.

    python -m flashtile.audit.matrix [--target sm90 ...] [--sample N] [--jobs N] [--csv FILE] [--against FILE] [--unmade]

No GPU is needed. A row fails when it does not compile, needs more shared memory than the device has, spills more than
its budget, holds no matrix instructions where it should, or has some whose operands look miscompiled; with --against, when
its machine code is not what that earlier file has of it. So moves and renames show that they changed no kernel. ptxas makes
different code of one text now and then; with --unmade, in both files, the text is compared that the compiler is told, which
takes a tenth of the time and is the same wherever it is made.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import cast

import triton

from flashtile.audit.barriers import idle_barriers
from flashtile.audit.descriptors import suspicious_operands
from flashtile.audit.fragments import short_sums
from flashtile.audit.hazards import overwritten_operands
from flashtile.dispatch import BACKENDS, backend_named
from flashtile.plan.backend import ROW_STATISTICS, Direction, Gradients
from flashtile.plan.call import KernelCall, Plan
from flashtile.plan.device import NAMED, named
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.dtype import DType
from flashtile.problem.options import Variant
from flashtile.triton_glue.compile import compile_and_read, intermediate
from flashtile.triton_glue.sass import code_hash, disassemble

TARGETS = ("sm80", "sm86", "sm90", "sm100", "sm120", "gfx942")

# Bytes of spill per thread, by kind: such spills cost less than the smaller tile that would avoid them (measured on an
# H100 where `flashtile/plan/tuned` has the tile). fp32 holds every operand in three parts, "ieee" unrolls into scalars.
SPILL_BUDGETS = {"16bit": 512, "modifiers": 1024, "fp32": 2048, "fp32 beyond 128": 4096, "ieee": 4096}

IDENTITY = ("backend", "target", "problem", "variant", "kernel", "tile")  # of a row, whatever its code


@dataclass(frozen=True)
class Job:
    """One kernel to compile: the `index`-th call of a plan; the forward's where variant is "", or that of a pass so named."""

    backend: str
    target: str
    problem: str
    variant: str
    index: int


@dataclass(frozen=True)
class Row:
    """One kernel, compiled."""

    backend: str
    target: str
    problem: str
    variant: str
    kernel: str
    tile: str
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    matrix: int = 0
    code: str = ""
    failure: str = ""


def problems() -> Iterator[str]:
    """Spellings that together reach every kernel, tile rule and compile-time branch that ships."""
    for head_dim in (16, 32, 64, 128, 256):
        for dtype in ("bf16", "fp16"):
            for band in ("", ",band=:0", ",band=1000:", ",band=1000:0"):
                yield f"attention(q=2x2048x8x{head_dim},kv=2048x8x{head_dim},{dtype}{band})"
        for precision in ("tf32x3", "tf32", "ieee"):
            for band in ("", ",band=:0"):
                yield f"attention(q=2x2048x8x{head_dim},kv=2048x8x{head_dim},fp32{band},{precision})"
        for dtype, n in (("bf16", 1000), ("fp16", 1300)):  # one wave, where blocks of short key tiles help with long ones
            yield f"attention(q=1x1000x8x{head_dim},kv={n}x8x{head_dim},{dtype},band=:0)"
        for batch, n, rest in ((16, 512, ""), (1, 200, ""), (1, 200, ",score=softcap(30.0)+alibi(1x8:fp32:grad)")):
            yield f"attention(q={batch}x{n}x8x{head_dim},kv={n}x8x{head_dim},fp32,band=:0{rest},tf32x3)"  # other products
    for head_dim in (64, 128, 256):  # sums of so many heads that what is rounded off them is kept
        for n, rest in ((512, "band=:0"), (2048, "band=:0"), (512, "score=softcap(30.0),dropout=0.1")):
            yield f"attention(q=2x{n}x32x{head_dim},kv={n}x1x{head_dim},fp32,{rest},tf32x3)"
    for head_dim, rest in ((64, ""), (128, ",band=:0"), (128, ",band=:0,dropout=0.1")):  # dq made in the pass over keys
        yield f"attention(q=8x2048x8x{head_dim},kv=2048x8x{head_dim},bf16{rest})"
    for dims in ((40, 40), (80, 80), (96, 96), (192, 128), (64, 128), (5, 40)):
        for dtype in ("bf16", "fp32"):
            tail = ",tf32x3" if dtype == "fp32" else ""
            yield f"attention(q=2x1000x8x{dims[0]},kv=1300x2x{dims[1]},{dtype},band=:0{tail})"
    for head_dim in (64, 128, 256):
        for score in ("softcap(30.0)", "alibi(2x8:fp32:grad)", "softcap(30.0)+alibi(2x8:fp32:grad)"):
            yield f"attention(q=2x2048x8x{head_dim},kv=2048x2x{head_dim},bf16,band=:0,score={score})"
    yield "attention(q=2x2048x8x64,kv=2048x2x64,fp32,band=:0,score=softcap(30.0)+alibi(2x8:fp32:grad),tf32x3)"
    for score in ("", "score=bias(1x1x1x1:fp32:grad),", "score=bias(1x4x90x90:fp32:grad),"):
        yield f"attention(q=2x90x4x64,kv=90x2x64,fp32,{score}sink=4:fp32:grad,dropout=0.1,tf32x3)"
    narrow = "score=bias(2x4x90x90:bf16:grad),where=stored(1;1;1;1;2x4x90x90:bool)"  # loads beside products in float64
    yield f"attention(q=2x90x4x64,kv=90x2x64,fp32,{narrow},dropout=0.1,tf32x3)"
    for dtype, size, n in (("fp32", 96, 700), ("fp32", 256, 700), ("fp16", 256, 96)):  # bytes and dropout (audit/fragments.py)
        asked = f"where=key_padding({n};2x{n}:bool),dropout=0.1" + (",tf32x3" if dtype == "fp32" else "")
        yield f"attention(q=2x{n}x10x{size},kv={n}x2x{size},{dtype},{asked})"
    yield "attention(q=3x90x4x64,kv=90x2x64,fp32,band=9:3,sink=4:fp32:grad,tf32x3,varlen=150x150)"
    yield "attention(q=2x2048x8x64,kv=2048x8x64,bf16,scale=-0.5)"
    for head_dim in (64, 128, 256):  # the pass over queries walks the keys of a large problem twice
        yield f"attention(q=2x2048x8x{head_dim},kv=2048x2x{head_dim},bf16,band=:0,exact_delta)"
    yield "attention(q=9x2048x8x64,kv=2048x2x64,fp16,band=:0,dropout=0.1,exact_delta,varlen=9000x9000)"
    for dims in ((512, 512), (320, 320), (512, 64), (64, 512)):
        yield f"attention(q=2x2048x8x{dims[0]},kv=2048x2x{dims[1]},bf16,band=:0)"
    yield "attention(q=2x2048x8x512,kv=2048x2x512,bf16,score=bias(1x8x2048x2048:bf16:grad),dropout=0.1)"
    for head_dim in (64, 128, 256):
        for shape in ("2x8x2048x2048", "1x8x2048x2048", "2x1x1x2048", "1x8x2048x1"):
            yield f"attention(q=2x2048x8x{head_dim},kv=2048x2x{head_dim},bf16,band=:0,score=bias({shape}:bf16:grad))"
        yield f"attention(q=2x2048x8x{head_dim},kv=2048x2x{head_dim},fp32,score=bias(1x8x2048x2048:fp32:grad),tf32x3)"
    for dtype in ("bf16", "fp32"):
        yield f"attention(q=2x2048x8x64,kv=2048x2x64,{dtype},band=:0,sink=8:fp32:grad)"
        for head_dim in (64, 128, 256):
            yield f"attention(q=2x2048x8x{head_dim},kv=2048x2x{head_dim},{dtype},band=:0,dropout=0.1)"
        yield f"attention(q=2x2048x8x128,kv=2048x2x128,{dtype},band=:0,dropout=0.1,origin=aligned)"
        yield f"attention(q=9x2048x8x64,kv=2048x2x64,{dtype},band=:0,sink=8:fp32:grad,dropout=0.1,varlen=9000x9000)"
    for head_dim in (64, 128, 256):
        for lengths in ("varlen=9000x9000", "used=qk"):
            yield f"attention(q=9x2048x8x{head_dim},kv=2048x2x{head_dim},bf16,band=:0,{lengths})"
    yield "attention(q=9x2048x8x64,kv=2048x2x64,bf16,band=:0,score=alibi(9x8:fp32:grad),varlen=9000x9000)"
    yield "attention(q=9x2048x8x64,kv=2048x2x64,fp32,band=:0,tf32x3,varlen=9000x9000)"
    documents = "document(2048;2048;2x2048:int32;2x2048:int32)"
    for head_dim in (64, 128, 256):
        for block in (128, 32):
            yield f"attention(q=2x2048x8x{head_dim},kv=2048x2x{head_dim},bf16,where={documents},blocks={block}x{block})"
        yield f"attention(q=2x2048x8x{head_dim},kv=2048x2x{head_dim},bf16,band=:0,where={documents})"
    shared = "score=bias(1x8x2048x2048:bf16:grad),sink=8:fp32:grad,dropout=0.1"
    yield f"attention(q=2x2048x8x64,kv=2048x2x64,bf16,{shared},where={documents},blocks=128x128)"
    yield "attention(q=2x2048x8x64,kv=2048x2x64,bf16,where=prefix(2:int32)|dilated(3)&within(64;0),blocks=64x64)"
    yield f"attention(q=2x2048x8x64,kv=2048x2x64,fp32,tf32x3,where={documents},blocks=128x128)"
    yield "attention(q=2x2048x8x64,kv=2048x2x64,bf16,where=stored(1;0;1;1;2x1x2048x2048:bool))"
    yield from stored_problems()
    for rest in (f"where={documents},blocks=128x128", "band=:0,score=softcap(30.0)+alibi(2x8:fp32:grad),dropout=0.1"):
        yield f"attention(q=2x2048x8x64,kv=2048x2x64,fp32,tf32,{rest})"


def stored_problems() -> Iterator[str]:
    """Those of 8 bits, under 16-bit products and e4m3's."""
    for head_dim in (64, 128, 256):
        for rest in ("", "band=:0,", "band=1000:0,varlen=9000x9000,"):
            batch, total = (9, 2048) if "varlen" in rest else (2, 2048)
            sizes = f"q={batch}x{total}x8x{head_dim},kv={total}x2x{head_dim},bf16"
            yield f"attention({sizes},{rest}stored=e4m3:head:head:head)"
            yield f"attention({sizes},{rest}stored=e4m3:head:head)"
        capped = f"q=2x2048x8x{head_dim},kv=2048x2x{head_dim},bf16,band=:0,sink=8:fp32,score=softcap(30.0)"
        yield f"attention({capped},stored=e4m3:head:head:head)"
    yield "attention(q=2x2048x8x64,kv=2048x2x64,fp16,stored=e5m2:token:token)"
    yield "attention(q=2x2048x8x64,kv=2048x2x64,bf16,stored=int8:head:token)"


def small_problems() -> Iterator[str]:
    """The same of small problems' passes over queries, which walk the keys twice."""
    for dims in ((64, 64), (24, 40), (128, 128), (512, 512)):
        yield f"attention(q=2x90x4x{dims[0]},kv=90x2x{dims[1]},bf16,band=:0)"
    everything = "score=softcap(2.0)+bias(1x4x90x90:fp32:grad),sink=4:fp32:grad,dropout=0.1"
    here = "where=document(90;90;2x90:int32;2x90:int32)"
    for dims in ((64, 64), (24, 40), (128, 128), (512, 512)):
        yield f"attention(q=2x90x4x{dims[0]},kv=90x2x{dims[1]},fp16,band=9:5,{everything},{here})"
    yield f"attention(q=2x90x4x64,kv=90x2x64,fp32,band=9:5,{everything},tf32x3,{here})"
    for head_dim in (64, 256):
        yield f"attention(q=2x90x4x{head_dim},kv=90x2x{head_dim},fp16,{here},blocks=32x32)"


def directed_problems() -> Iterator[str]:
    """Those of the passes beyond first derivatives."""
    for head_dim, rest in ((64, ""), (64, ",band=1000:0"), (128, ""), (128, ",band=:0")):
        yield f"attention(q=2x2048x8x{head_dim},kv=2048x2x{head_dim},bf16{rest})"
    for head_dim in (64, 128):  # the second keeps what is rounded off sums of many heads
        for heads, heads_kv in ((8, 2), (32, 1)):
            yield f"attention(q=2x2048x{heads}x{head_dim},kv=2048x{heads_kv}x{head_dim},fp32,band=:0,tf32x3)"
    yield "attention(q=2x2048x8x64,kv=2048x2x64,bf16,band=:0,score=softcap(30.0)+alibi(2x8:fp32))"
    here = "where=document(90;90;2x90:int32;2x90:int32)"
    yield f"attention(q=2x90x4x64,kv=90x2x64,fp16,band=9:5,score=softcap(2.0)+bias(1x4x90x90:fp16),sink=4:fp32:grad,{here})"


# What is asked of passes beyond forward and backward.
WANTED = {"second": "qkv", "entropy": "qk", "statistics": (*ROW_STATISTICS, "mass"), "watched": ROW_STATISTICS}


def direction_of(name: str) -> Direction:
    """Whatever moves, arrives and is made."""
    moved, given = "qkv" if name in ("tangent", "second") else "", {"dout"} if name == "second" else ()
    return Direction(frozenset(moved), frozenset(given), frozenset(WANTED.get(name, ())))


def plan_of(job: Job) -> Plan:
    """The plan that holds the kernel of a job."""
    return _plan(replace(job, index=0))


@lru_cache(maxsize=1)  # jobs of one plan follow one another
def _plan(first: Job) -> Plan:
    backend, problem, device = backend_named(first.backend), AttentionProblem.parse(first.problem), named(first.target)
    if not first.variant:
        return backend.forward(problem, device)
    if first.variant in backend.passes:
        return backend.passes[first.variant].plan(problem, device, direction_of(first.variant))
    return backend.backward(problem, device, Gradients(dlse=True), cast(Variant, first.variant))


def jobs_of(spelling: str, target: str) -> Iterator[Job]:
    """Every kernel of a problem, of every backend with kernels that takes it."""
    problem, device = AttentionProblem.parse(spelling), named(target)
    for backend in BACKENDS:
        for variant in (None, "split", "fused"):
            if backend.unsupported(problem, device, variant):
                continue
            first = Job(backend.name, target, spelling, variant or "", 0)
            for index, call in enumerate(plan_of(first).calls):
                if isinstance(call, KernelCall):
                    yield replace(first, index=index)


def directed_jobs(spelling: str, target: str) -> Iterator[Job]:
    """Every kernel of a problem's passes beyond first derivatives."""
    problem, device = AttentionProblem.parse(spelling), named(target)
    for backend in BACKENDS:
        for name, offered in {} if backend.unsupported(problem, device) else backend.passes.items():
            if offered.unsupported(problem, device, direction_of(name)):
                continue
            first = Job(backend.name, target, spelling, name, 0)
            calls = enumerate(plan_of(first).calls)
            yield from (replace(first, index=index) for index, call in calls if isinstance(call, KernelCall))


def kind(problem: AttentionProblem) -> str:
    """The line of SPILL_BUDGETS that a problem falls under."""
    if problem.dtype is not DType.FP32:
        return "modifiers" if problem.score or problem.where or problem.dropout is not None else "16bit"
    if problem.precision == "ieee":
        return "ieee"
    return "fp32 beyond 128" if max(problem.head_dim, problem.head_dim_v) > 128 else "fp32"


def compile_row(job: Job) -> Row:
    """Compile one kernel and hold it against the budgets."""
    device, problem, plan = named(job.target), AttentionProblem.parse(job.problem), plan_of(job)
    call = plan.calls[job.index]
    assert isinstance(call, KernelCall)
    constants = dict(call.constants)
    tile = constants.get("T")
    name = call.kernel.fn.__name__
    keys = tile and getattr(tile, "block_k", None)  # passes without scores have none
    text = f"{tile.block_q}x{keys} warps={call.num_warps} stages={call.num_stages}" if tile and keys else ""
    row = Row(job.backend, job.target, job.problem, job.variant, name, text)
    try:
        compiled, used = compile_and_read(call, plan, device)
    except Exception as error:
        return replace(row, failure=f"{type(error).__name__}: {str(error)[-300:]}")
    failures: list[str] = []
    if used.shared_bytes > device.smem_bytes:
        failures.append(f"needs {used.shared_bytes} bytes of shared memory, {job.target} has {device.smem_bytes}")
    budget = SPILL_BUDGETS[kind(problem)]
    if used.spill_bytes > budget:
        failures.append(f"spills {used.spill_bytes} bytes, budget {budget}")
    multiplies = "SCORE" in constants
    if multiplies and not used.matrix and not (problem.dtype is DType.FP32 and problem.precision == "ieee"):
        failures.append("has no matrix instructions")
    code = disassemble(compiled) if device.kind == "cuda" else compiled.asm["amdgcn"]
    short = short_sums(compiled.asm["ttgir"]) if device.kind == "cuda" else []
    if short:
        failures.append(f"products are shorter than their operands' fragments: {', '.join(short)}")
    if device.kind == "cuda" and device.arch == 90:
        suspicious = suspicious_operands(code) if job.backend == "triton" else []
        if suspicious:
            failures.append(f"operands differ by the way to them: {', '.join(suspicious[:3])}")
        overwritten = overwritten_operands(code)
        if overwritten:
            failures.append(f"operands are overwritten before they are read: {', '.join(overwritten[:3])}")
        idle = idle_barriers(compiled.asm["ttgir"])
        if idle:
            failures.append(f"no role is given the barriers {', '.join(idle)}")
    return replace(
        row,
        registers=used.registers,
        spill_bytes=used.spill_bytes,
        shared_bytes=used.shared_bytes,
        matrix=used.matrix,
        code=code_hash(code, device.kind),
        failure="; ".join(failures),
    )


def read_row(job: Job) -> Row:
    """What one kernel says to the compiler, as a hash in the place of its machine code's."""
    plan = plan_of(job)
    call = plan.calls[job.index]
    assert isinstance(call, KernelCall)
    row = Row(job.backend, job.target, job.problem, job.variant, call.kernel.fn.__name__, "")
    try:
        text = intermediate(call, plan, named(job.target))
    except Exception as error:
        return replace(row, failure=f"{type(error).__name__}: {str(error)[-300:]}")
    return replace(row, code=hashlib.sha256(text.encode()).hexdigest()[:16])


def jobs(targets: list[str], every: int = 1) -> list[Job]:
    """The whole matrix without repetitions, or each `every`-th of it."""
    seen: dict[object, Job] = {}
    asked = [*product(targets, problems(), ("",)), *product(targets, small_problems(), ("attention_backward_queries",))]
    for target, spelling, only in asked:
        for job in jobs_of(spelling, target):
            call = plan_of(job).calls[job.index]
            assert isinstance(call, KernelCall)
            if only not in call.kernel.fn.__name__:
                continue
            problem = AttentionProblem.parse(spelling)
            identity = (target, call.kernel.fn.__name__, call.constants, *call.options.items(), problem.dtype, problem.origin)
            seen.setdefault((job.backend, *identity), job)
    for target, spelling in product(targets, directed_problems()):
        for job in directed_jobs(spelling, target):
            call = plan_of(job).calls[job.index]
            seen.setdefault((target, "directed", call), job)
    return list(seen.values())[::every]


def run(targets: list[str], every: int, workers: int, make: Callable[[Job], Row] = compile_row) -> list[Row]:
    """All rows, compiled in parallel, or made by another function."""
    with ProcessPoolExecutor(workers) as pool:
        return list(pool.map(make, jobs(targets, every), chunksize=4))


def changed(rows: list[Row], earlier: Path) -> list[Row]:
    """The rows with a failure where an earlier file has other machine code of the same kernel; those it lacks are left."""
    with earlier.open(newline="") as file:
        known = {tuple(line[name] for name in IDENTITY): line["code"] for line in csv.DictReader(file)}
    found = [known.get(tuple(str(getattr(row, name)) for name in IDENTITY), row.code) for row in rows]
    return [
        row if code == row.code else replace(row, failure="; ".join(filter(None, (row.failure, "has other machine code"))))
        for row, code in zip(rows, found, strict=True)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=[t for t in NAMED if t != "cpu"])
    parser.add_argument("--sample", type=int, default=1, help="compile each N-th row only")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--unmade", action="store_true", help="compare what the compiler is told, without compiling it")
    parser.add_argument("--against", type=Path, help="a file that --csv made before a change")
    chosen = parser.parse_args()
    rows = run(chosen.target or list(TARGETS), chosen.sample, chosen.jobs, read_row if chosen.unmade else compile_row)
    if chosen.against:
        rows = changed(rows, chosen.against)
    for row in rows:
        if row.failure:
            print(f"FAIL {row.backend} {row.target} {row.kernel} {row.variant} {row.tile} {row.problem}: {row.failure}")
    for target in chosen.target or TARGETS:
        mine = [r for r in rows if r.target == target]
        spilling = [r for r in mine if r.spill_bytes]
        worst = max((r.spill_bytes for r in mine), default=0)
        failed = sum(bool(r.failure) for r in mine)
        print(f"{target}: {len(mine)} kernels, {failed} failures, {len(spilling)} spill, worst {worst} bytes")
    print(f"Triton {triton.__version__}: {len(rows)} kernels compiled, {sum(bool(r.failure) for r in rows)} failures")
    if chosen.csv:
        with chosen.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(Row.__dataclass_fields__))
            writer.writeheader()
            writer.writerows(asdict(r) for r in rows)
    return 1 if any(r.failure for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
