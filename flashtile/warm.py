"""`flashtile warm`: the kernels of problems compiled ahead of their first calls, into Triton's cache on disk. Needs no GPU."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from flashtile import dispatch
from flashtile.errors import InvalidProblem, NotSupported
from flashtile.plan.backend import Gradients
from flashtile.plan.call import KernelCall, Plan
from flashtile.plan.device import Device
from flashtile.problem.attention import AttentionProblem
from flashtile.triton_glue import language as _triton

Report = Callable[[int, int, str], None]  # how many are done, of how many, and what is now on disk


@dataclass(frozen=True)
class Warmed:
    """How many kernels the problems have, and how many of them were compiled; the others were on disk."""

    kernels: int
    compiled: int

    def __str__(self) -> str:
        return f"{self.kernels} kernels, {self.compiled} compiled now, {self.kernels - self.compiled} on disk before"


def warm(
    spellings: Iterable[str], device: Device, jobs: int | None = None, report: Report = lambda *_: None, backward: bool = True
) -> Warmed:
    """Compile what a first forward of dense tensors, and its backward, would; sizes as spelled choose tiles, hence kernels.

    jobs: kernels compiled at a time; one per core by default. Raises InvalidProblem and NotSupported before it compiles any.
    """
    if device.kind == "cpu":
        raise InvalidProblem("device is the CPU, for which nothing is compiled; it must be a GPU, such as H100.")
    problems = [AttentionProblem.parse(spelling) for spelling in spellings]
    if not problems:
        raise InvalidProblem("there is no problem to warm; give spellings, or a suite.")
    if _triton.INTERPRETED:
        raise NotSupported("warm", {"triton": ["its interpreter is on (TRITON_INTERPRET=1); kernels cannot be compiled"]})
    plans = [plan for problem in problems for plan in _plans(problem, device, backward)]
    return _compile_all(plans, device, jobs or len(os.sched_getaffinity(0)), report)


def _plans(problem: AttentionProblem, device: Device, backward: bool) -> list[Plan]:
    """That of a forward and, if wanted, of the backward of q, k and v."""
    made = [dispatch.plan_forward(problem, device)]
    if backward:
        made.append(dispatch.plan_backward(problem.dequantised, device, Gradients()))
    return made


_jobs: list[tuple[KernelCall, Any, Device]] = []  # what a forked worker finds by its number: calls hold functions


def _compile_all(plans: list[Plan], device: Device, workers: int, report: Report) -> Warmed:
    from flashtile.export.build import key_of
    from flashtile.triton_glue.compile import specialise

    global _jobs
    found: dict[Any, tuple[KernelCall, Any, Device]] = {}
    for plan in plans:
        buffers = {b.name: b for b in plan.buffers}
        for call in plan.calls:
            if isinstance(call, KernelCall):
                special = specialise(call, buffers)
                found.setdefault(key_of(call, special, device), (call, special, device))
    _jobs = list(found.values())
    compiled = 0
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        # the largest kernels are a plan's last
        futures = {pool.submit(_compile, i): _jobs[i][0] for i in reversed(range(len(_jobs)))}
        for done, future in enumerate(as_completed(futures), 1):
            compiled += future.result()
            report(done, len(_jobs), futures[future].kernel.fn.__name__)
    return Warmed(len(_jobs), compiled)


def _compile(index: int) -> bool:
    """Whether the kernel was not on disk."""
    from triton import knobs

    from flashtile.triton_glue.compile import compile_kernel

    hits: list[bool] = []
    knobs.compilation.listener = lambda *_, cache_hit, **__: hits.append(cache_hit)
    compile_kernel(*_jobs[index])
    return not all(hits)
