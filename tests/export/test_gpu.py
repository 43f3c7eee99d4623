"""Exported C on a GPU: what it computes is what the front end's executor computes from the same tensors."""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.export.conftest import COMPILER, ROOT, compile_c, environment

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

PROBLEMS = {
    "grouped": "attention(q=1x1x4x64,kv=1x1x64,bf16,band=:0)",
    "window": "attention(q=1x1x1x128,kv=1x1x128,fp16,band=100:0,score=softcap(30.0),lse)",
    "wide": "attention(q=1x1x2x40,kv=1x1x200,bf16)",
    "modified": "attention(q=1x1x2x32,kv=1x1x32,fp32,band=:0,score=softcap(30.0)+alibi(1x2:fp32:grad))",
    "sunk": "attention(q=1x1x2x64,kv=1x1x64,bf16,band=:0,sink=2:fp32:grad,dropout=0.1)",
    "decode": "cached(attention(q=1x1x4x64,kv=16x1x64,bf16,band=:0,used=k),pages=1x16x1,split=128)",
    "norm": "norm(x=1x768:bf16,residual=1x768:bf16,weight=768:bf16,bias=768:bf16;prenorm=True)",
    "cross_entropy": "cross_entropy(logits=1x5003:bf16,labels=1:int32)",
    "gelu": "dense(x=1x64:bf16,weight1=256x64:bf16,bias1=256:bf16)",
}
ATOMIC = ("dq",)  # the fused backwards add to it in any order


@pytest.fixture(scope="module")
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The problem of a test, compiled for this GPU. One at a time: processes that share the tests share the compiling."""
    from tests.export.called import load

    if COMPILER is None or torch.version.hip:
        pytest.skip("no C compiler, or no NVIDIA GPU")
    folder = tmp_path_factory.mktemp("exported")
    major, minor = torch.cuda.get_device_capability()
    asked = (f"{request.param}={PROBLEMS[request.param]}",)
    # In a process of its own, for it forks, and this one uses the GPU.
    script = f"""
from pathlib import Path
from flashtile.export.main import Request, export
export(Request({asked!r}, ("sm_{major}{minor}",)), Path({str(folder)!r}))
"""
    subprocess.run([sys.executable, "-c", script], env=environment(), cwd=ROOT, check=True)
    compile_c(folder / "flashtile_attention.c", folder / "it.so", "-std=c99", "-shared", "-fPIC", "-ldl", "-lpthread")
    return request.param, load(folder / "it.so")


def fill(name: str, tensor: torch.Tensor, columns: int) -> torch.Tensor:
    """Random values of a buffer's kind."""
    if name == "seqused_k":
        return tensor.random_(20, 16 * 9 + 1)
    if name == "page_table":
        return tensor.copy_(torch.randperm(tensor.numel()).view(tensor.shape))
    if name == "labels":
        return tensor.random_(0, columns)
    if name == "seed":
        return tensor.copy_(torch.tensor([5, 0, 7, 0], dtype=tensor.dtype))
    if name in ("rstd", "mean"):
        return tensor.uniform_(0.5, 1.5)
    return tensor.normal_()


def kept(known: dict[str, torch.Tensor], name: str, tensor: torch.Tensor, columns: int) -> torch.Tensor:
    """What the entry before had or made of that name and shape (a cache's `k` is not an append's), or random values."""
    before = known.get(name)
    return fill(name, tensor, columns) if before is None or before.shape != tensor.shape else before


def nearly(found: torch.Tensor, exact: torch.Tensor) -> bool:
    gap, norm = (found.double() - exact.double()).norm(), exact.double().norm()
    return bool(gap <= (1e-5 if found.dtype == torch.float32 else 1e-2) * norm) and bool(torch.isfinite(found).all())


@pytest.mark.parametrize("library", PROBLEMS, indirect=True)
def test_c_computes_what_the_front_end_does(library: Any) -> None:
    from flashtile.torch.execute.bound import Bound, device_of
    from tests.export.called import Tensors, call, exported, own_plan, place, sizes_of

    name, loaded = library
    spelling, gpu, draw = PROBLEMS[name], torch.device("cuda", torch.cuda.current_device()), random.Random(0)
    torch.manual_seed(0)
    export, pair = exported(name, spelling)
    columns = 0 if spelling.startswith(("attention", "cached")) else 5003
    for turn in range(6):
        lengths = [draw.choice([1, 2, 3, 128, draw.randint(1, 700)]) for _ in range(2)]
        numbers = [draw.choice([1, 2, 5]), *lengths, draw.choice([1, 2, 5])]
        numbers = numbers if columns == 0 else [draw.choice([1, 16, 1000, 4099])]
        if turn == 0 and columns == 0:
            numbers = [2, 1024, 1024, 6]
        if name == "decode":
            numbers = [draw.choice([1, 5, 40]), draw.choice([1, 2, 20]), 2, 400, 9, 16 * 2 * 64, 64, 16 * 64]
        known: Tensors = {}
        for entry in pair:
            sizes = sizes_of(entry, export, numbers, device_of(gpu))
            plan = own_plan(entry, export, sizes, device_of(gpu))
            tensors, scratch = place(entry, plan, sizes, "cuda")
            inputs = {b.name: kept(known, b.name, tensors[b.name], columns) for b in plan.named("input")}
            tensors.update(inputs)
            for buffer in plan.named("output"):
                if buffer.over is None:
                    tensors[buffer.name].fill_(float("nan"))
            scratch.fill_(0xFF)
            before = {
                n: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=gpu).copy_(t) for n, t in inputs.items()
            }
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            call(loaded, entry, plan, sizes, tensors, scratch, stream.cuda_stream)
            torch.cuda.current_stream().wait_stream(stream)
            expected = Bound(plan, inputs, gpu).run(before)
            for buffer in plan.named("output"):
                found, exact = tensors[buffer.name], expected[buffer.name]
                same = nearly(found, exact) if buffer.name in ATOMIC else torch.equal(found, exact)
                assert same, f"{entry.name} {numbers}: {buffer.name}"
            known.update(tensors)


@pytest.mark.parametrize("library", ["gelu"], indirect=True)
def test_it_can_be_captured_and_replayed(library: Any) -> None:
    """As a part of a CUDA graph, once the kernels are loaded."""
    from flashtile.export.op import CompanionExport, companion_entries
    from flashtile.problem.op import Companion
    from flashtile.torch.execute.bound import device_of
    from tests.export.called import call, own_plan, place, sizes_of

    _, loaded = library
    torch.ones(1, device="cuda")  # makes a context current, which C asks for
    assert loaded.flashtile_prepare() == 0
    export = CompanionExport(Companion.parse(PROBLEMS["gelu"]))
    entry = companion_entries("gelu", export)[0]
    gpu = torch.device("cuda", torch.cuda.current_device())
    sizes = sizes_of(entry, export, [100], device_of(gpu))
    plan = own_plan(entry, export, sizes, device_of(gpu))
    tensors, scratch = place(entry, plan, sizes, "cuda")
    tensors["pre"].normal_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(loaded, entry, plan, sizes, tensors, scratch, torch.cuda.current_stream().cuda_stream)
    tensors["pre"].normal_()
    graph.replay()
    exact = torch.nn.functional.gelu(tensors["pre"].double(), approximate="tanh")
    assert nearly(tensors["out"], exact)


@pytest.mark.parametrize("library", ["gelu"], indirect=True)
def test_without_a_context_of_its_own_library(library: Any) -> None:
    """A thread without a current context is told so."""
    import threading

    _, loaded = library
    answers: list[tuple[int, bytes]] = []

    def ask() -> None:
        wanted = ctypes.c_size_t()
        status = loaded.flashtile_gelu_forward_scratch(ctypes.c_int64(1), ctypes.byref(wanted))
        answers.append((status, loaded.flashtile_last_error()))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert answers[0][0] == 4, answers
    assert b"no CUDA context is current" in answers[0][1]
