"""From entries to files: plans for every architecture, their kernels compiled side by side, C around them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path as FilePath
from typing import Any

from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

from flashtile.errors import NotSupported
from flashtile.export import emit
from flashtile.export.emit import Binary, Planned
from flashtile.export.entry import Entry, Path, explore
from flashtile.plan.call import Descriptor, KernelCall
from flashtile.plan.device import Device
from flashtile.triton_glue import language as _triton
from flashtile.triton_glue.compile import Specialisation, compile_kernel, specialise

FILES = ("flashtile_attention.c", "flashtile_attention.h")

Found = tuple[Entry, Device, Path]
Job = tuple[KernelCall, Specialisation, Device]
_jobs: list[Job] = []  # what a forked worker finds by its number: calls hold functions, which cannot be sent


SECONDS = 3.4  # of a core for a kernel: 77 of sm_90 took 132 s on two cores of a Xeon, 2026-11-28


def minutes(kernels: int, workers: int) -> str:
    """How long compiling so many kernels takes, in words."""
    count = -(-round(kernels * SECONDS / workers) // 60)
    return "a minute" if count <= 1 else f"{count} minutes"


def plan_all(entries: Sequence[Entry], devices: Sequence[Device]) -> list[Found]:
    """Every plan of every entry on every device. Raises NotSupported."""
    return [(entry, device, path) for entry in entries for device in devices for path in explore(entry, device)]


def build(found: Sequence[Found], workers: int, report: Callable[[str], None]) -> list[Planned]:
    """All plans with their compiled kernels. `report` is told how far it is."""
    jobs: dict[Any, Job] = {}
    used: list[list[tuple[Any, Specialisation]]] = []
    for _entry, device, path in found:
        buffers = {one.name: one.buffer for one in path.steps.laid}
        used.append([])
        for call in path.steps.calls:
            special = specialise(call, buffers)
            key = key_of(call, special, device)
            jobs.setdefault(key, (call, special, device))
            used[-1].append((key, special))
    numbers = {key: i for i, key in enumerate(jobs)}
    report(f"{len(found)} plans, {len(jobs)} kernels: about {minutes(len(jobs), workers)}, {workers} at a time; "
           "less where Triton has compiled them before")  # fmt: skip
    binaries = compile_all(list(jobs.values()), workers, report)
    return [
        Planned(
            entry, device.arch, path, tuple(binaries[numbers[key]] for key, _ in keys), tuple(special for _, special in keys)
        )
        for (entry, device, path), keys in zip(found, used, strict=True)
    ]


def key_of(call: KernelCall, special: Specialisation, device: Device) -> Any:
    constants = tuple((path, getattr(v, "cache_key", None) or repr(v)) for path, v in special.constants.items())
    return device.arch, call.kernel, repr(special.signature), constants, repr(special.divisible), repr(call.options)


def compile_all(jobs: list[Job], workers: int, report: Callable[[str], None]) -> list[Binary]:
    """The jobs' kernels, in order."""
    global _jobs
    _jobs = jobs
    made: list[Binary] = []
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        for binary in pool.map(_compile, range(len(jobs))):
            made.append(binary)
            report(f"{len(made)}/{len(jobs)} sm_{binary.arch} {binary.name}: {len(binary.image)} bytes")
    return made


def _compile(index: int) -> Binary:
    call, special, device = _jobs[index]
    compiled = compile_kernel(call, special, device)
    told = compiled.metadata
    _check_parameters(call, special, compiled.asm["ptx"])
    if told.global_scratch_size or told.profile_scratch_size or told.num_ctas != 1 or told.launch_cooperative_grid:
        raise NotSupported(call.kernel.fn.__name__, {"export": ["the kernel wants scratch, clusters or a cooperative launch"]})
    maps = tuple(
        {"swizzle": m["swizzle"], "elem_size": m["elem_size"], "type": TMA_DTYPE_DEVICE_TO_HOST[m["elem_type"]],
         "block_size": tuple(m["block_size"])}
        for m in (getattr(told, "tensordesc_meta", None) or ())
    )  # fmt: skip
    return Binary(index, device.arch, told.name, compiled.asm["cubin"], 32 * told.num_warps, told.shared, maps)


def _check_parameters(call: KernelCall, special: Specialisation, ptx: str) -> None:
    """Raise RuntimeError unless the kernel takes what the C file will pass: Triton promises nothing about that."""
    declared = ptx.split(".entry", 1)[1].split(")", 1)[0].count(".param")
    passed = sum(map(_passed, call.args, special.signature.values())) + 2  # Triton's own: scratch, and that of its profiler
    if declared != passed:
        raise RuntimeError(
            f"{call.kernel.fn.__name__} takes {declared} parameters and {passed} would be passed; Triton {_triton.VERSION} "
            "calls kernels in another way than those that export was written for."
        )


def _passed(arg: Any, kind: Any) -> int:
    """How many parameters become of an argument."""
    if isinstance(kind, tuple):
        return sum(map(_passed, arg, kind))
    if isinstance(arg, Descriptor):
        return 1 + 2 * len(arg.block)
    return int(kind != "constexpr")


def write(
    planned: Sequence[Planned], folder: FilePath, declarations: str = "", functions: str = ""
) -> tuple[FilePath, FilePath]:
    """Write flashtile_attention.c and .h; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    binaries = {b.index: b for p in planned for b in p.kernels}
    source, header = (folder / name for name in FILES)
    source.write_text(emit.source(planned, [binaries[i] for i in sorted(binaries)], functions))
    header.write_text(emit.header(planned, declarations))
    return source, header


def workers_here() -> int:
    return len(os.sched_getaffinity(0))
