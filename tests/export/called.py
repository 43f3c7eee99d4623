"""Exported C through ctypes, beside the plan that the front end would run."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Union

import torch

from flashtile.dispatch import first_of, plan_cached
from flashtile.export.attention import GPU_BACKENDS, AttentionExport, Layout, entries
from flashtile.export.cached import CachedExport, cached_entries
from flashtile.export.emit import identifier, scratch_of, tensors_of
from flashtile.export.entry import Entry, steps_of
from flashtile.export.op import CompanionExport, companion_entries
from flashtile.plan.backend import Gradients
from flashtile.plan.call import Plan
from flashtile.plan.device import Device
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.cache import CachedProblem, append_of
from flashtile.problem.dtype import SIZES_BYTES
from flashtile.problem.op import Companion
from flashtile.torch.execute.bound import TORCH_DTYPES

Export = Union[AttentionExport, CachedExport, CompanionExport]  # noqa: UP007 (Python 3.10 at run time)
Tensors = dict[str, torch.Tensor]


def exported(name: str, spelling: str, layout: Layout = "bshd") -> tuple[Export, list[Entry]]:
    """What a spelling becomes, and its functions."""
    if spelling.startswith("attention("):
        export = AttentionExport(AttentionProblem.parse(spelling), layout)
        return export, entries(name, export)
    if spelling.startswith("cached("):
        cached = CachedExport(CachedProblem.parse(spelling))
        return cached, cached_entries(name, cached)
    companion = CompanionExport(Companion.parse(spelling))
    return companion, companion_entries(name, companion)


def sizes_of(entry: Entry, export: Export, numbers: list[int], device: Device) -> dict[str, int]:
    """The sizes that a caller gives, with those that the run-time derives of them alone."""
    sizes = {**dict(zip(entry.sizes, numbers, strict=True)), "sm_count": device.sm_count}
    return export.complete(sizes, device)[0] if isinstance(export, CachedExport) else sizes


def own_plan(entry: Entry, export: Export, sizes: dict[str, int], device: Device) -> Plan:
    """The plan that the front end runs for these sizes."""
    if isinstance(export, CompanionExport):
        return entry.plan(sizes, device)
    if isinstance(export, CachedExport):
        cached = export.at(sizes)
        return plan_cached(append_of(cached) if entry.direction == "append" else cached, device)
    problem = export.at(sizes)
    if entry.direction == "forward":
        return first_of(GPU_BACKENDS, lambda each: each.unsupported(problem, device), problem, device).forward(problem, device)
    return first_of(GPU_BACKENDS, lambda each: each.unsupported(problem, device, "auto"), problem, device).backward(
        problem, device, Gradients(dlse=problem.returns_lse), "auto"
    )


def place(entry: Entry, plan: Plan, sizes: dict[str, int], device: str = "cpu") -> tuple[Tensors, torch.Tensor]:
    """Tensors of the plan's buffers, laid out as the entry does, and the scratch that some of them are parts of."""
    steps = steps_of(entry, plan, sizes)
    tensors = {
        one.name: torch.empty_strided(one.buffer.shape, one.strides, dtype=TORCH_DTYPES[one.buffer.dtype], device=device)
        for one in tensors_of(steps)
    }
    parts = [one.elements * SIZES_BYTES[one.buffer.dtype] for one in scratch_of(steps)]
    offsets = [sum((n + 255) // 256 * 256 for n in parts[:i]) for i in range(len(parts) + 1)]
    scratch = torch.empty(offsets[-1], dtype=torch.uint8, device=device)
    for one in steps.laid:
        if one.buffer.over is not None:
            tensors[one.name] = tensors[one.buffer.over]
    for one, offset, size in zip(scratch_of(steps), offsets, parts, strict=False):
        part = scratch[offset : offset + size].view(TORCH_DTYPES[one.buffer.dtype])
        tensors[one.name] = part.view(one.buffer.shape)
    return tensors, scratch


def load(path: Path) -> Any:
    library = ctypes.CDLL(str(path))
    library.flashtile_last_error.restype = ctypes.c_char_p
    return library


def call(
    library: Any, entry: Entry, plan: Plan, sizes: dict[str, int], tensors: Tensors, scratch: torch.Tensor, stream: int | None
) -> None:
    """Call the entry's two functions; the scratch that they ask for must be what `place` made."""
    given = [one.name for one in tensors_of(steps_of(entry, plan, sizes))]
    kind = type("Tensors", (ctypes.Structure,), {"_fields_": [(identifier(name), ctypes.c_void_p) for name in given]})
    pointers = kind(*(tensors[name].data_ptr() for name in given))
    integers, wanted = [ctypes.c_int64(sizes[n]) for n in entry.sizes], ctypes.c_size_t()
    status = getattr(library, f"flashtile_{entry.name}_scratch")(*integers, ctypes.byref(wanted))
    assert status == 0, library.flashtile_last_error()
    assert wanted.value == scratch.numel(), (wanted.value, scratch.numel())
    function = getattr(library, f"flashtile_{entry.name}")
    place = ctypes.c_void_p(scratch.data_ptr()), ctypes.c_size_t(scratch.numel())
    status = function(ctypes.byref(pointers), *integers, *place, ctypes.c_void_p(stream))
    assert status == 0, library.flashtile_last_error()
