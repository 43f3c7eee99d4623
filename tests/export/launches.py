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
import triton
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
triton.knobs.compilation.disable_line_info = True  # as exported kernels are compiled: the same files on disk

from flashtile.export import schedule  # noqa: E402
from flashtile.export.attention import AttentionExport, entries, select  # noqa: E402
from flashtile.export.build import build, write  # noqa: E402
from flashtile.export.companion import CompanionExport, companion_entries  # noqa: E402
from flashtile.export.compile import compile_call  # noqa: E402
from flashtile.export.emit import identifier, scratch_of, tensors_of  # noqa: E402
from flashtile.export.entry import Entry, steps_of  # noqa: E402
from flashtile.kernels.hopper.choose import choose_forward  # noqa: E402
from flashtile.plan.backend import Gradients  # noqa: E402
from flashtile.plan.call import KernelCall, Plan  # noqa: E402
from flashtile.plan.device import H100, Device  # noqa: E402
from flashtile.spec.attention import AttentionProblem  # noqa: E402
from flashtile.spec.companion import Companion  # noqa: E402
from flashtile.spec.dtype import SIZES_BYTES  # noqa: E402
from flashtile.torch.run import TORCH_DTYPES, KernelLaunch  # noqa: E402

STATUS_OK = 0


class Card:
    """What the executor reads of a torch.device."""

    type, index = "cuda", 0


def lines_of(file: Path) -> list[str]:
    text = file.read_text().splitlines()
    file.write_text("")
    return text


def own_plan(entry: Entry, export: AttentionExport | CompanionExport, sizes: dict[str, int]) -> Plan:
    """The plan that the front end runs for these sizes."""
    if isinstance(export, CompanionExport):
        return entry.plan(sizes, H100)
    problem = export.at(sizes)
    if entry.direction == "forward":
        return select(problem, H100, None).forward(problem, H100)
    return select(problem, H100, "auto").backward(problem, H100, Gradients(dlse=problem.returns_lse), "auto")


def place(entry: Entry, plan: Plan) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors of the plan's buffers, laid out as the entry does, and the scratch that some of them are parts of."""
    steps = steps_of(entry, plan)
    tensors = {one.name: room(one.buffer.dtype, one.buffer.shape, one.strides) for one in tensors_of(steps)}
    sizes = [one.elements * SIZES_BYTES[one.buffer.dtype] for one in scratch_of(steps)]
    offsets = [sum((n + 255) // 256 * 256 for n in sizes[:i]) for i in range(len(sizes) + 1)]
    scratch = torch.empty(offsets[-1], dtype=torch.uint8)
    for one in steps.laid:
        if one.buffer.over is not None:
            tensors[one.name] = tensors[one.buffer.over]
    for one, offset, size in zip(scratch_of(steps), offsets, sizes, strict=False):
        part = scratch[offset : offset + size].view(TORCH_DTYPES[one.buffer.dtype])
        tensors[one.name] = part.view(one.buffer.shape)
    return tensors, scratch


def room(dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=TORCH_DTYPES[dtype])


def filled(entry: Entry, plan: Plan, tensors: dict[str, torch.Tensor]) -> list[int]:
    """How many words the executor sets to zero before the launches, buffer by buffer."""
    return [tensors[b.name].numel() for b in plan.buffers if b.zeroed]


def compare(library: Any, entry: Entry, export: AttentionExport | CompanionExport, numbers: list[int], file: Path) -> None:
    sizes = {**dict(zip(entry.sizes, numbers, strict=True)), "sm_count": H100.sm_count}
    plan = own_plan(entry, export, sizes)
    tensors, scratch = place(entry, plan)
    expected: list[str] = []
    counts: dict[str, int] = {}
    for call in plan.calls:
        assert isinstance(call, KernelCall)
        ptx = compile_call(call, plan, H100).asm["ptx"].split(".entry")[1].split(")")[0]
        name = call.kernel.fn.__name__
        counts[name] = len(re.findall(r"\.param", ptx)) - 2  # two are Triton's own scratch
        os.environ["PARAMETERS"] = str(counts[name])
        launch = KernelLaunch(call, plan, {name: t.stride() for name, t in tensors.items()}, Card)  # pyright: ignore
        launch(tensors)
        expected += lines_of(file)
    given = [one.name for one in tensors_of(steps_of(entry, plan))]

    class Tensors(ctypes.Structure):
        _fields_ = [(identifier(name), ctypes.c_void_p) for name in given]

    pointers = Tensors(*(tensors[name].data_ptr() for name in given))
    bytes_wanted = ctypes.c_size_t()
    integers = [ctypes.c_int64(n) for n in numbers]
    status = getattr(library, f"flashtile_{entry.name}_scratch")(*integers, ctypes.byref(bytes_wanted))
    assert status == STATUS_OK, library.flashtile_last_error()
    assert bytes_wanted.value == scratch.numel(), (bytes_wanted.value, scratch.numel())
    os.environ["PARAMETERS"] = "".join(f" {name}={count}" for name, count in counts.items())
    function = getattr(library, f"flashtile_{entry.name}")
    status = function(
        ctypes.byref(pointers), *integers, ctypes.c_void_p(scratch.data_ptr()), ctypes.c_size_t(scratch.numel()), None
    )
    assert status == STATUS_OK, library.flashtile_last_error()
    found = lines_of(file)
    words = [int(line.split()[2]) * int(line.split()[3]) for line in found if line.startswith("fill")]
    assert words == filled(entry, plan, tensors), (entry.name, numbers, words)
    launched = [line for line in found if not line.startswith("fill")]
    assert launched == expected, f"{entry.name} {numbers}:\n" + "\n".join([*launched, "instead of", *expected])
    print(entry.name, numbers, plan.backend, len(launched))


def samples(
    entry: Entry, export: AttentionExport | CompanionExport, sizes: list[list[int]], device: Device
) -> list[dict[str, int]]:
    """These sizes with what the run-time finds for them."""
    found: list[dict[str, int]] = []
    for numbers in sizes:
        given = {**dict(zip(entry.sizes, numbers, strict=True)), "sm_count": device.sm_count}
        if isinstance(export, AttentionExport) and export.scheduled:
            problem = export.at(given)
            launch = choose_forward(problem, device)
            given.update(choice=schedule.number_of(problem, launch), swizzle=launch.swizzle)
        found.append(given)
    return found


def main() -> None:
    folder, layout, spelling, *asked = sys.argv[1:]
    export: AttentionExport | CompanionExport
    if spelling.startswith("attention("):
        export = AttentionExport(AttentionProblem.parse(spelling), layout)  # pyright: ignore[reportArgumentType]
        made = entries("attention", export)
    else:
        export = CompanionExport(Companion.parse(spelling))
        made = companion_entries("companion", export)
    sizes = [[int(n) for n in text.split("x")] for text in asked]
    # Only the plans of these sizes are compiled; test_paths.py has the others.
    both = [replace(entry, samples=partial(samples, entry, export, sizes)) for entry in made]
    planned = build(both, [H100], 2, lambda line: None)
    source, _ = write(planned, Path(folder))
    library = Path(folder) / "libflashtile_attention.so"
    subprocess.run(["cc", "-std=c99", "-O1", "-shared", "-fPIC", source, "-o", library, "-ldl", "-lpthread"], check=True)  # fmt: skip  # noqa: E501
    loaded = ctypes.CDLL(str(library))
    loaded.flashtile_last_error.restype = ctypes.c_char_p
    file = Path(os.environ["LAUNCHES"])
    file.write_text("")
    for numbers in sizes:
        for entry in both:
            compare(loaded, entry, export, numbers, file)


if __name__ == "__main__":
    main()
