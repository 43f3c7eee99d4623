"""Bursts and host times of one call, inside the process that owns the device."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

Call = Callable[[], Any]

BURST_MS = 25.0  # long enough for the clock of events, short enough that the card's power limiter has not yet bitten
IDLE_S = 0.12  # before each burst: lets the card's clock recover, so that everybody starts from the same state
MOST_CALLS = {"cuda": 500, "cpu": 20}  # a CPU's call is timed by itself, and twenty give a steady median
HOST_BATCHES = 5
HOST_CALLS = 100  # per batch: four launches a call stay below the 1,024 that a CUDA stream queues before it blocks


def calls_for(ms: float, device: torch.device) -> int:
    """Number of calls that fill a burst."""
    return max(3, min(MOST_CALLS[device.type], int(BURST_MS / max(ms, 1e-3))))


def burst_ms(call: Call, calls: int, device: torch.device, idle_s: float = IDLE_S) -> float:
    """Milliseconds per call: the mean of a burst between two CUDA events, or the median call on a CPU.

    Calls follow each other without waiting, as in a loop of eager calls: a call whose host time exceeds its device
    time shows the former, which the host columns tell apart.
    """
    with _no_garbage_collection():
        if device.type == "cpu":
            call()
            return median(_wall_ms(call) for _ in range(calls))
        time.sleep(idle_s)
        call()
        call()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) / calls


def host_us(call: Call, ms: float) -> float:
    """Microseconds of host time per call on a GPU: many calls without waiting for the device, median of batches.

    `ms` is what a call takes; it bounds the number of calls, so that a batch stays near 20 ms of device time.
    """
    calls = max(3, min(HOST_CALLS, int(20 / max(ms, 1e-3))))
    batches: list[float] = []
    with _no_garbage_collection():
        for _ in range(HOST_BATCHES):
            call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            batches.append((time.perf_counter() - start) / calls * 1e6)
            torch.cuda.synchronize()
    return median(batches)


def _wall_ms(call: Call) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


@contextmanager
def _no_garbage_collection() -> Generator[None, None, None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
