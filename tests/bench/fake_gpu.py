"""A GPU that is none, for running the scripts of benchmarks/ where there is no GPU: an H100 by its properties, a CPU by its
tensors. Kernels run in Triton's interpreter, times are those of a clock that ticks, processes are calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from benchmarks import processes
from flashtile.bench import timing
from flashtile.plan.device import H100
from flashtile.torch.execute import bound as run

TICKS = itertools.count()
PROPERTIES = SimpleNamespace(
    name="an H100 that is none", major=9, minor=0, multi_processor_count=H100.sm_count,
    shared_memory_per_block_optin=H100.smem_bytes,
)  # fmt: skip


class Event:
    """An event at the next tick, a millisecond after the one before."""

    def __init__(self, **_: Any):
        self.tick = 0

    def record(self) -> None:
        self.tick = next(TICKS)

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return float(end.tick - self.tick)


class Stream:
    """A stream on which nothing runs; a class, as annotations want it."""

    def __init__(self, *_: Any):
        pass


class NoGraph:
    """A CUDA graph that holds nothing, as of launches on another stream than the captured one."""

    def replay(self) -> None:
        pass


class Again(NoGraph):
    """A graph whose replay calls anew, and writes where the captured call wrote."""

    def __init__(self, call: Callable[[], tuple[torch.Tensor, ...]], results: tuple[torch.Tensor, ...]):
        self.call, self.results = call, results

    def replay(self) -> None:
        for kept, made in zip(self.results, self.call(), strict=True):
            kept.copy_(made)


def captured(call: Callable[[], tuple[torch.Tensor, ...]], *_: Any) -> tuple[Again, tuple[torch.Tensor, ...]]:
    """What `benchmarks.replay.captured` returns, of a graph that can be replayed here."""
    results = call()
    return Again(call, results), results


class OnTheCpu(TorchFunctionMode):
    """Sends what is asked for on a GPU to the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.device:
            return function(*args, **kwargs)
        if "device" in kwargs:
            kwargs["device"] = here(kwargs["device"])
        return function(*map(here, args), **kwargs)


class Generator:
    """Makes a generator of the CPU, whatever is named; a class, as annotations want it."""

    genuine = torch.Generator

    def __new__(cls, device: Any = "cpu") -> Any:
        return cls.genuine(here(device))


def here(value: Any) -> Any:
    """The CPU, where a GPU is named."""
    named = str(value) if isinstance(value, (str, torch.device)) else ""
    return torch.device("cpu") if named.partition(":")[0] == "cuda" else value


def one_by_one(function: Callable[..., Any], jobs: Any, ends: float, workers: int = 1, fresh: bool = False) -> Iterator[Any]:
    """What `in_processes` does, without processes."""
    for job in jobs:
        try:
            made = function(*job)
        except Exception as error:
            made = processes.Failure(f"{type(error).__name__}: {error}"[:500])
        yield job, made


class Caller:
    """A `processes.Worker` without a process."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def take(self, job: processes.Job) -> None:
        ((_, self.made),) = one_by_one(self.function, [job], 0.0)

    def is_done(self, _: float) -> bool:
        return True

    def answer(self) -> Any:
        return self.made

    def stop(self) -> None:
        pass


def pretend(patch: Any) -> None:
    """Pretend by pytest's monkeypatch; to be undone with it, after leaving `OnTheCpu`."""
    fakes: dict[str, Any] = {
        "is_available": lambda: True, "synchronize": lambda *_: None, "empty_cache": lambda: None, "Event": Event,
        "get_device_name": lambda *_: PROPERTIES.name, "get_device_properties": lambda *_: PROPERTIES,
        "memory_allocated": lambda *_: 0, "max_memory_allocated": lambda *_: 0, "reset_peak_memory_stats": lambda *_: None,
        "Stream": Stream, "stream": nullcontext, "CUDAGraph": NoGraph, "graph": lambda *_, **__: nullcontext(),
    }  # fmt: skip
    for name, fake in fakes.items():
        patch.setattr(torch.cuda, name, fake)
    patch.setattr(torch, "Generator", Generator)
    patch.setattr(torch, "compile", lambda function=None, **_: function)
    patch.setattr(torch.nn.attention, "sdpa_kernel", wraps(torch.nn.attention.sdpa_kernel)(lambda *_: nullcontext()))
    patch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    patch.setattr(processes, "in_processes", one_by_one)
    patch.setattr(processes, "Worker", Caller)
    patch.setattr(timing, "BURST_MS", 0.0)
    run.device_of.cache_clear()
