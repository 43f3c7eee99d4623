"""Exports problems, compiles the C, and compares what it launches with what PyTorch's executor does. See test_launches.py.

python -m tests.export.launches FOLDER LAYOUT SPELLING SIZES...     each SIZES as 2x257x300x4, in the entry's order
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver

# What torch would answer on a machine with one H100.
torch.cuda.current_device = lambda: 0
torch.cuda.set_device = lambda device: None
torch.cuda.get_device_capability = lambda device=None: (9, 0)  # pyright: ignore[reportAttributeAccessIssue]
torch._C._cuda_getCurrentRawStream = lambda device: 0
active: Any = CudaDriver()
active.get_current_stream = lambda device: 0
driver.set_active(active)

from flashtile.export import llmc, schedule  # noqa: E402
from flashtile.export.attention import AttentionExport  # noqa: E402
from flashtile.export.build import build, plan_all, write  # noqa: E402
from flashtile.export.entry import Entry  # noqa: E402
from flashtile.kernels.sm90.host.choose_forward import choose_forward  # noqa: E402
from flashtile.plan.call import KernelCall, Plan  # noqa: E402
from flashtile.plan.device import H100, Device  # noqa: E402
from flashtile.problem.attention import AttentionProblem  # noqa: E402
from flashtile.torch.execute.bound import TORCH_DTYPES, KernelLaunch  # noqa: E402
from flashtile.triton_glue.compile import compile_call  # noqa: E402
from tests.export.called import Export, call, exported, load, own_plan, place, sizes_of  # noqa: E402
from tests.frontend import hasten  # noqa: E402

hasten()

COUNTS: dict[str, int] = {}  # parameters of each kernel that was launched, by name
EARLY = Path(os.environ["EARLY"])


class Card:
    """What the executor reads of a torch.device."""

    type, index = "cuda", 0


def lines_of(file: Path) -> list[str]:
    text = file.read_text().splitlines()
    file.write_text("")
    return text


def filled(entry: Entry, plan: Plan, tensors: dict[str, torch.Tensor]) -> list[int]:
    """How many words the executor sets to zero before the launches, buffer by buffer."""
    return [tensors[b.name].numel() for b in plan.buffers if b.zeroed]


def compare(library: Any, entry: Entry, export: Export, numbers: list[int], file: Path) -> None:
    sizes = sizes_of(entry, export, numbers, H100)
    plan = own_plan(entry, export, sizes, H100)
    tensors, scratch = place(entry, plan, sizes)
    expected: list[str] = []
    for step in plan.calls:
        assert isinstance(step, KernelCall)
        ptx = compile_call(step, plan, H100).asm["ptx"].split(".entry")[1].split(")")[0]
        name = step.kernel.fn.__name__
        COUNTS[name] = len(re.findall(r"\.param", ptx)) - 2  # two are Triton's own scratch
        os.environ["PARAMETERS"] = str(COUNTS[name])
        launch = KernelLaunch(step, plan, {name: t.stride() for name, t in tensors.items()}, Card)  # pyright: ignore
        launch(tensors)
        expected += lines_of(file)
    os.environ["PARAMETERS"] = "".join(f" {name}={count}" for name, count in COUNTS.items())
    EARLY.write_text("")
    call(library, entry, plan, sizes, tensors, scratch, None)
    found = lines_of(file)
    assert EARLY.read_text().split() == [step.kernel.fn.__name__ for step in plan.calls if step.early], entry.name  # pyright: ignore
    words = [int(line.split()[2]) * int(line.split()[3]) for line in found if line.startswith("fill")]
    assert words == filled(entry, plan, tensors), (entry.name, numbers, words)
    launched = [line for line in found if not line.startswith("fill")]
    assert launched == expected, f"{entry.name} {numbers}:\n" + "\n".join([*launched, "instead of", *expected])
    print(entry.name, numbers, plan.backend, len(launched))


def compare_packed(library: Any, both: list[Entry], export: AttentionExport, numbers: list[int], file: Path) -> None:
    """llm.c's functions do what the problem's own do with the parts of the packed tensors."""
    sizes = {**dict(zip(both[0].sizes, numbers, strict=True)), "sm_count": H100.sm_count}
    problem = export.at(sizes)
    batch, seqlen, heads, width = problem.batch, problem.seqlen_q, problem.heads_q, problem.head_dim
    code = {"fp32": 0, "fp16": 1, "bf16": 2}[problem.dtype.value]
    own = [ctypes.c_int64(n) for n in (batch, seqlen, heads, heads * width)]
    stats_bytes, scratch_bytes = ctypes.c_size_t(), ctypes.c_size_t()
    status = library.flashtile_attention_bytes(code, *own, ctypes.byref(stats_bytes), ctypes.byref(scratch_bytes))
    assert status == 0, library.flashtile_last_error()
    inp, dinp = (torch.empty((batch, seqlen, 3, heads, width), dtype=TORCH_DTYPES[problem.dtype.value]) for _ in range(2))
    out, dout = (torch.empty((batch, seqlen, heads, width), dtype=inp.dtype) for _ in range(2))
    stats, scratch = (torch.empty(n.value, dtype=torch.uint8) for n in (stats_bytes, scratch_bytes))
    lse_bytes = (4 * batch * heads * seqlen + 15) // 16 * 16
    named = dict(zip("qkv", inp.unbind(2), strict=True)) | {"out": out, "dout": dout, "lse": stats, "stats": stats[lse_bytes:]}
    named |= {f"d{name}": part for name, part in zip("qkv", dinp.unbind(2), strict=True)}
    assert stats_bytes.value == lse_bytes + (8 * batch * heads * seqlen if problem.float32_grade else 0)
    for entry, tensors in zip(both, ((out, stats, inp), (dinp, dout, inp, out, stats, scratch)), strict=True):
        plan = own_plan(entry, export, sizes, H100)
        call(library, entry, plan, sizes, named, scratch if entry.direction == "backward" else scratch[:0], None)
        expected = lines_of(file)
        more = [ctypes.c_size_t(scratch.numel())] if entry.direction == "backward" else []
        function = getattr(library, f"flashtile_attention_{entry.direction}")
        status = function(code, *(ctypes.c_void_p(t.data_ptr()) for t in tensors), *more, *own, None)
        assert status == 0, library.flashtile_last_error()
        assert lines_of(file) == expected, entry.name


def samples(entry: Entry, export: Export, sizes: list[list[int]], device: Device) -> list[dict[str, int]]:
    """These sizes with what the run-time finds for them."""
    found: list[dict[str, int]] = []
    for numbers in sizes:
        given = sizes_of(entry, export, numbers, device)
        if isinstance(export, AttentionExport) and export.scheduled:
            problem = export.at(given)
            launch = choose_forward(problem, device)
            given.update(choice=schedule.number_of(problem, launch), swizzle=launch.swizzle)
        found.append(given)
    return found


def main() -> None:
    folder, layout, spelling, *asked = sys.argv[1:]
    known = AttentionProblem.parse(spelling) if spelling.startswith("attention(") else None
    export, made = exported("problem" if known is None else llmc.name_of(known), spelling, layout)  # pyright: ignore
    sizes = [[int(n) for n in text.split("x")] for text in asked]
    # Only the plans of these sizes are compiled; test_paths.py has the others.
    both = [replace(entry, samples=partial(samples, entry, export, sizes), complete=lambda sizes, device: []) for entry in made]
    planned = build(plan_all(both, [H100]), 2, lambda line: None)
    packed = [export.problem] if isinstance(export, AttentionExport) and layout == "llmc" else []
    more = (llmc.declarations(), llmc.functions(packed, planned)) if packed else ()
    source, _ = write(planned, Path(folder), *more)
    library = Path(folder) / "libflashtile_attention.so"
    subprocess.run(["cc", "-std=c99", "-O1", "-shared", "-fPIC", source, "-o", library, "-ldl", "-lpthread"], check=True)  # fmt: skip  # noqa: E501
    loaded = load(library)
    file = Path(os.environ["LAUNCHES"])
    file.write_text("")
    for numbers in sizes:
        for entry in both:
            compare(loaded, entry, export, numbers, file)
        if packed:
            assert isinstance(export, AttentionExport)
            compare_packed(loaded, both, export, numbers, file)


if __name__ == "__main__":
    main()
