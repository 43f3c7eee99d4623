"""Measures the tiles of the Triton backend on the GPU at hand and writes the fastest ones down.

Candidates come priced from `kernels/portable/candidates.py`. Each pass is timed alone, all candidates of a pass in
rotation (a power-limited card ranks a sequence by its order), after its result was compared with the first
candidate's. The file that comes out is what `flashtile/plan/tuned/` ships and `flashtile.use_tuning` loads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton

from flashtile.errors import InvalidProblem, NotSupported
from flashtile.kernels.portable.backend import BACKEND, broadcast_gradients
from flashtile.kernels.portable.backward import attention_backward_keys, attention_backward_queries
from flashtile.kernels.portable.broadcast import attention_backward_broadcast
from flashtile.kernels.portable.candidates import candidates
from flashtile.kernels.portable.choose import family
from flashtile.kernels.portable.forward import attention_forward
from flashtile.kernels.portable.tile import Launch, Pass
from flashtile.output import prepare
from flashtile.plan.backend import Gradients
from flashtile.plan.call import KernelCall, Plan
from flashtile.plan.device import Device
from flashtile.problem.attention import AttentionProblem
from flashtile.torch.execute.bound import KIND, TORCH_DTYPES, Bound, device_of
from flashtile.triton_glue import language as _triton

PASSES: tuple[Pass, ...] = ("forward", "keys", "queries", "fused", "pairs")
KERNELS: dict[Pass, object] = {
    "forward": attention_forward,
    "keys": attention_backward_keys,
    "queries": attention_backward_queries,
    "fused": attention_backward_keys,
    "pairs": attention_backward_broadcast,
}
SWIZZLES = (1, 8)
ROUNDS = 3
BURST_MS = 12.0
SAME = {"fp16": 1e-2, "bf16": 2e-2, "fp32": 1e-3}  # tiles differ by rounding only; more means a broken kernel


@dataclass
class Measured:
    """One candidate, bound and timed."""

    launch: Launch
    bound: Bound
    index: int  # of the timed call
    ms: float = float("inf")
    failed: str = ""


def tune(spellings: Iterable[str], output: Path, passes: Iterable[Pass] = PASSES, *, verbose: bool = True) -> dict[str, Any]:
    """The tuning table measured for these problems, also written to `output` as JSON, anew after each of them.

    Raises InvalidProblem and NotSupported before anything is measured.
    """
    if not torch.cuda.is_available():
        raise InvalidProblem("tune needs a GPU; this machine has none that torch can use.")
    prepare(output)
    device = torch.device("cuda", torch.cuda.current_device())
    place = device_of(device)
    problems = {spelling: tunable(spelling, place) for spelling in spellings}
    table: dict[str, Any] = {}
    result: dict[str, Any] = {}
    for spelling, problem in problems.items():
        tensors = random_inputs(problem, device)
        for which in passes:
            if which == "pairs" and not broadcast_gradients(problem):
                continue
            best = tune_pass(problem, place, device, which, tensors, verbose)
            if best is not None:
                table[family(problem, which)] = {**asdict(best.launch), "ms": round(best.ms, 4), "problem": spelling}
        del tensors
        result = write_table(output, table, place)  # an interrupted run leaves what it had
    return result


def tunable(spelling: str, place: Device) -> AttentionProblem:
    """The problem. Raises InvalidProblem, and NotSupported for what cannot run here or has no meaning at random."""
    problem = AttentionProblem.parse(spelling)
    reasons = BACKEND.unsupported(problem, place, "split")
    if problem.lengths.ragged or problem.blocks is not None:
        reasons = [*reasons, "items differ in length, or the mask has block lists: tune draws tensors at random, those too"]
    if reasons:
        raise NotSupported(problem.spell(), {BACKEND.name: reasons})
    return problem


def write_table(output: Path, tiles: dict[str, Any], place: Device) -> dict[str, Any]:
    """What `flashtile.use_tuning` reads, with where and when it was measured; also written to `output`."""
    result = {
        "device": place.name,
        "target": place.target,
        "triton": triton.__version__,
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "tiles": tiles,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    return result


def random_inputs(problem: AttentionProblem, device: torch.device) -> dict[str, torch.Tensor]:
    """Everything a backward reads, of the problem's shapes; out and lse come from a forward."""
    plan = BACKEND.backward(problem, device_of(device), Gradients(), "split")
    tensors = {
        b.name: torch.randn(b.shape, dtype=torch.float32, device=device).to(TORCH_DTYPES[b.dtype]) for b in plan.named("input")
    }
    plan = BACKEND.forward(problem, device_of(device))
    forward = Bound(plan, tensors, device).run(dict(tensors))
    return {**tensors, **{b.name: forward[b.name] for b in plan.named("output")}}


def plan_of(problem: AttentionProblem, place: Device, which: Pass, launch: Launch) -> tuple[Plan, int]:
    """The plan that holds the pass with this launch, and the position of its call."""
    if which == "forward":
        plan = BACKEND.forward(problem, place, {which: launch})
    else:
        plan = BACKEND.backward(problem, place, Gradients(), "fused" if which == "fused" else "split", {which: launch})
    kernels = [call.kernel if isinstance(call, KernelCall) else None for call in plan.calls]
    return plan, kernels.index(KERNELS[which])


def tune_pass(
    problem: AttentionProblem, place: Device, device: torch.device, which: Pass, tensors: dict[str, torch.Tensor], verbose: bool
) -> Measured | None:
    """The fastest candidate of a pass: tiles first, then the head order of the best three."""
    measured = measure(problem, place, device, which, tensors, candidates(problem, place, which))
    best = sorted((m for m in measured if not m.failed), key=lambda m: m.ms)[:3]
    orders = [Launch(**{**asdict(m.launch), "swizzle": s}) for m in best for s in SWIZZLES]
    finals = measure(problem, place, device, which, tensors, orders)
    measured += finals
    alive = sorted((m for m in finals if not m.failed), key=lambda m: m.ms)
    if verbose:
        failed = sum(bool(m.failed) for m in measured)
        print(f"{family(problem, which)}: {len(measured)} tried, {failed} failed  [{problem.spell()}]")
        for m in alive[:6]:
            print(f"  {m.ms:8.4f} ms  {m.launch.spell()}", flush=True)
        for m in measured:
            if m.failed.startswith("wrong"):
                print(f"  {m.failed}: {m.launch.spell()}", flush=True)
    return alive[0] if alive else None


def measure(
    problem: AttentionProblem, place: Device, device: torch.device, which: Pass, tensors: dict[str, torch.Tensor],
    launches: list[Launch],
) -> list[Measured]:  # fmt: skip
    """The launches with their times; a wrong, refused or broken one says why in `failed`."""
    measured: list[Measured] = []
    for launch in launches:
        plan, index = plan_of(problem, place, which, launch)
        measured.append(Measured(launch, Bound(plan, tensors, device), index))
    with _triton.side_by_side(KIND):
        for m in measured:
            scratch = _allocate(m.bound, tensors)
            m.bound.launches[m.index].warm(scratch)  # pyright: ignore[reportFunctionMemberAccess]
    reference: dict[str, torch.Tensor] | None = None
    for m in measured:
        try:
            result = m.bound.run(dict(tensors))
            torch.cuda.synchronize()
        except Exception as error:
            m.failed = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        made = {b.name: result[b.name] for b in m.bound.plan.named("output")}
        if reference is None:
            reference = made
        for name, tensor in made.items():
            norm = reference[name].double().norm()
            if not (tensor.double() - reference[name].double()).norm() <= SAME[problem.dtype.value] * norm:
                m.failed = f"wrong {name}"
    _time([m for m in measured if not m.failed], tensors)
    return measured


def _allocate(bound: Bound, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    made = {
        name: torch.empty_strided(shape, strides, dtype=dtype, device=bound.device).zero_()
        for name, shape, strides, dtype, _ in bound.allocations
    }
    return {**tensors, **made}


def _time(measured: list[Measured], tensors: dict[str, torch.Tensor]) -> None:
    """Fill in ms: the median of bursts, the candidates taking turns, forwards and backwards."""
    if not measured:
        return
    scratch = {id(m): _allocate(m.bound, tensors) for m in measured[:1]}
    times: dict[int, list[float]] = {id(m): [] for m in measured}
    for turn in range(ROUNDS):
        for m in measured if turn % 2 == 0 else reversed(measured):
            buffers = scratch.get(id(m)) or _allocate(m.bound, tensors)
            launch: Any = m.bound.launches[m.index]
            repeats = 1 if m.ms == float("inf") else max(1, round(BURST_MS / m.ms))
            launch(buffers)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(repeats):
                launch(buffers)
            end.record()
            end.synchronize()
            m.ms = start.elapsed_time(end) / repeats
            times[id(m)].append(m.ms)
    for m in measured:
        m.ms = median(times[id(m)])
