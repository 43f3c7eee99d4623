"""Runs a case and says what is wrong with it."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from flashtile.errors import NotSupported
from flashtile.fuzz import guard
from flashtile.fuzz.case import EPS, Case
from flashtile.fuzz.formula import Scene, fused, level, soil, yardsticks
from flashtile.fuzz.make import HUGE, Inputs, Tensors, apart, build, call
from flashtile.fuzz.rounding import apart as sums_apart
from flashtile.fuzz.rounding import rounds_lse, slack, sums_twice
from flashtile.fuzz.tiles import forced
from flashtile.memory import cache_clear
from flashtile.torch.execute import bound as run
from flashtile.triton_glue import language as _triton

FACTOR = 1.5  # of the error that plain PyTorch makes in the same dtype
FLOOR_ULP = 2.0  # of a tensor's largest element: below that, errors are luck
FLOAT32 = 2.0**-23  # what is summed is of about 1: below that a sum that should be 0 is 0
LSE_TOLERANCE = 1e-5
OTHER_SEEDS = 4
CLEAR = 4.0  # times what is allowed: no luck makes such an error

Call = Callable[[Inputs, str], tuple[torch.Tensor, "torch.Tensor | None", Tensors]]


@dataclass
class Result:
    """What became of a case: "right", "refused", "wrong", or "close", whose error is above what is allowed by less than CLEAR.

    text: what is wrong, or why it was refused. ratio: of the worst error to what is allowed. kernels: hashes of those that ran.
    """

    status: str
    text: str = ""
    ratio: float = 0.0
    kernels: frozenset[str] = field(default_factory=frozenset)


def check(case: Case, device: torch.device, backend: str = "", function: Call = call) -> Result:
    """Run a case on a device and judge it. function: what computes it, flashtile by default."""
    kernels = watch_kernels()
    kernels.clear()
    try:
        case.check()
        inputs = build(case, device)
        scene = Scene(inputs)
        level(inputs, scene)
        if case.dirty:
            soil(inputs, scene)
        with forced(case.tile), guard.watched() as guards:
            made = results(inputs, backend, function)
            again = results(inputs, backend, function) if case.again else None
    except NotSupported as refusal:
        reasons = [f"{name}: {reason}" for name, lines in refusal.reasons.items() for reason in lines]
        if not reasons or not all(refusal.reasons.values()):
            return Result("wrong", f"it was refused without a reason: {refusal}", math.inf)
        return Result("refused", "; ".join(reasons), 0.0, frozenset(kernels))
    except Exception as error:
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        at = f" ({where.tb_frame.f_code.co_filename.rpartition('/')[2]}:{where.tb_lineno})" if where is not None else ""
        if is_lost(error):
            raise
        if case.tile and type(error).__name__ == "OutOfResources":
            return Result("refused", "the tile that was asked for does not fit into shared memory")
        return Result("wrong", f"it raised {type(error).__name__}: {str(error)[:300]}{at}", math.inf, frozenset(kernels))
    try:
        truth, plain = yardsticks(inputs, scene)
        beside = slack(inputs, scene) if rounds_lse(case, device) else {}
        own = fused(inputs, scene) if case.backend in ("", "cpu") else {}
    except torch.OutOfMemoryError as error:
        return Result("refused", f"the formula does not fit into memory: {str(error)[:60]}")
    except Exception as error:
        if is_lost(error):
            raise
        return Result("wrong", f"the formula itself raised {type(error).__name__}: {str(error)[:300]}", math.inf)
    text, ratio = verdict(case, made, again, truth, plain, guards, beside, own)
    if text and sums_twice(case, device):  # seldom: it takes as long as the formula
        more = sums_apart(inputs, scene)
        beside = {name: beside.get(name, 0.0) + more.get(name, 0.0) for name in beside | more}
        text, ratio = verdict(case, made, again, truth, plain, guards, beside, own)
    status = "right" if not text else "close" if ratio <= CLEAR else "wrong"
    return Result(status, text, ratio, frozenset(kernels))


def settled(case: Case, device: torch.device) -> Result:
    """As `check`; what is close is wrong if it is so with most other seeds, too."""
    result = check(case, device)
    if result.status == "close":
        others = [check(case.smaller(seed=case.seed + 1 + i), device) for i in range(OTHER_SEEDS)]
        if sum(other.status in ("close", "wrong") for other in others) > OTHER_SEEDS // 2:
            return Result("wrong", f"{result.text} (and with most other seeds)", result.ratio, result.kernels)
    return result


def results(inputs: Inputs, backend: str, function: Call) -> Tensors:
    """out, lse and gradients by name."""
    c = inputs.case
    out, lse, leaves = function(inputs, backend)
    made = {"out": out.detach()} | ({} if lse is None else {"lse": lse.detach()})
    flowing = [(out, inputs.flows["dout"])] * (c.upstream in ("both", "out", "alone"))
    if lse is not None and c.upstream in ("both", "lse"):
        flowing.append((lse, inputs.flows["dlse"]))
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    if wanted and flowing and c.upstream != "none":
        outputs, arriving = zip(*flowing, strict=True)
        given = torch.autograd.grad(outputs, list(wanted.values()), arriving, allow_unused=True)
        for (name, leaf), gradient in zip(wanted.items(), given, strict=True):
            parts = apart(c, name, torch.zeros_like(leaf) if gradient is None else gradient)
            made |= {f"d{part}": tensor for part, tensor in parts.items() if part in inputs.wanted}
    return made


# -- judging --------------------------------------------------------------------------------------------------------


def verdict(
    case: Case, made: Tensors, again: Tensors | None, truth: Tensors, plain: Tensors, guards: list[torch.Tensor],
    beside: dict[str, float], own: Tensors,
) -> tuple[str, float]:  # fmt: skip
    """(what is wrong, the worst error over what is allowed). The device is waited for once. beside: what is allowed of a
    result, beside the rule, for what its arithmetic cannot know (`rounding`). own: PyTorch's fused results, if there are."""
    found = list(_misshapen(made, truth, plain))
    if again is not None:
        found += list(_misshapen(again, truth, plain))
    if found:
        return "; ".join(found), math.inf
    runs = [made] if again is None else [made, again]
    names = [name for name, exact in truth.items() if exact.numel()]
    rows = [measure(name, one[name], truth[name], plain[name], own.get(name)) for one in runs for name in names]
    device = truth["out"].device
    spilt = guard.broken(guards).double() if guards else torch.zeros((), dtype=torch.float64, device=device)
    differ = [_different(made[name], again[name]) for name in repeatable(case, names)] if again is not None else []
    numbers = torch.cat([spilt[None], *(d.double()[None] for d in differ), *rows]).tolist()
    worst = 0.0
    if numbers[0]:
        found.append(f"{numbers[0]:.0f} words beside its buffers were written")
        worst = math.inf
    for name, count in zip(repeatable(case, names) if differ else (), numbers[1 : 1 + len(differ)], strict=True):
        if count:
            found.append(f"{name} has other bits the second time, in {count:.0f} elements")
            worst = math.inf
    cells = numbers[1 + len(differ) :]
    for i in range(len(runs) * len(names)):
        name = names[i % len(names)]
        text, ratio = judged(case, name, cells[6 * i : 6 * i + 6], plain[name].dtype, beside.get(name, 0.0))
        worst = max(worst, ratio)
        if text:
            found.append(("the second time " if i >= len(names) else "") + text)
    return "; ".join(found), worst


def _misshapen(made: Tensors, truth: Tensors, plain: Tensors) -> Iterator[str]:
    if made.keys() != truth.keys():
        yield f"results are {', '.join(made)}, not {', '.join(truth)}"
        return
    for name, exact in truth.items():
        dtype = torch.float32 if name == "lse" else plain[name].dtype
        if made[name].shape != exact.shape:
            yield f"{name} has shape {tuple(made[name].shape)}, not {tuple(exact.shape)}"
        elif made[name].dtype != dtype:
            yield f"{name} is {made[name].dtype}, not {dtype}"


def measure(
    name: str, got: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor, own: torch.Tensor | None = None
) -> torch.Tensor:
    """Six numbers of a result: its largest error, plain PyTorch's, the largest element, and what of each is no number.

    An infinity counts as its dtype's largest number, as does what that dtype cannot hold: an exact 8e4 is fp16's infinity.
    """
    if name == "lse":
        empty = exact == -torch.inf
        apart = (got == -torch.inf) != empty
        error = torch.where(empty, 0.0, (got.double() - exact).abs() / exact.abs().clamp(min=1.0))
        nan = ~(error <= LSE_TOLERANCE)
        zero = error.new_zeros(())
        largest = torch.where(error.isnan(), torch.inf, error).amax()
        return torch.stack([largest, zero, zero, apart.sum().double(), exact.isnan().sum().double(), nan.sum().double()])
    most = torch.finfo(got.dtype).max
    counts = [got.isnan().sum().double(), (~exact.isfinite()).sum().double()]
    exact = exact.clamp(-most, most)
    counts.append((plain.isnan() | plain.isinf() & (exact.abs() < most)).sum().double())
    mine, other = ((tensor.double().clamp(-most, most) - exact).abs() for tensor in (got, plain))
    if own is not None:
        other = torch.maximum(other, (own.double().clamp(-most, most) - exact).abs())
    return torch.stack([mine.amax(), other.amax(), exact.abs().amax(), *counts])


def judged(case: Case, name: str, numbers: list[float], dtype: torch.dtype, beside: float = 0.0) -> tuple[str, float]:
    """(what breaks the rule or nothing, error over what is allowed) of a result of this dtype."""
    error, plain, largest, odd, odd_exact, odd_plain = numbers
    if name == "lse":
        if odd_exact:
            return "the formula's lse is NaN", math.inf
        if odd:
            return f"lse is -inf in {odd:.0f} wrong rows", math.inf
        ratio = error / LSE_TOLERANCE
        return (f"lse is off by {error:.3g}, relatively" if odd_plain else ""), ratio
    if odd_exact:
        return f"the formula's {name} is not finite", math.inf
    if odd:
        return f"{name} is NaN in {odd:.0f} elements", math.inf
    ulp = max(2.0**-10 if case.precision == "tf32" and case.dtype == "fp32" else EPS[case.dtype], torch.finfo(dtype).eps)
    unit = FLOAT32 * (16.0 * HUGE if case.kind == "huge" else 1.0)
    allowed = max(0.0 if odd_plain else FACTOR * plain, FLOOR_ULP * ulp * largest, unit) + beside
    if error <= allowed:
        return "", error / allowed if allowed else 0.0
    said = "nothing finite" if odd_plain else f"{plain:.3g}"
    text = f"{name} is off by {error:.3g} of {largest:.3g}; plain PyTorch by {said}, allowed {allowed:.3g}"
    return text, error / allowed if allowed else math.inf


def repeatable(case: Case, names: list[str]) -> list[str]:
    """The results that have the same bits every time: those of forwards, and of backwards that are split or deterministic."""
    fixed = case.deterministic or case.backward == "split"
    return [name for name in names if fixed or not name.startswith("d")]


def _different(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[one.element_size()]
    return (one.contiguous().view(bits) != other.contiguous().view(bits)).sum()


# -- what ran -------------------------------------------------------------------------------------------------------

LOST = ("illegal", "misaligned", "launch failure", "launch timed out", "device-side assert", "hardware stack error")


def is_lost(error: BaseException) -> bool:
    """Whether this process's GPU context died of the error."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in LOST)


@cache
def watch_kernels() -> set[str]:
    """A set that grows by the hash of every kernel that is launched for the first time."""
    seen: set[str] = set()
    launch_first, prepare = run.KernelLaunch.launch_first, run.KernelLaunch.prepare

    def note(self: Any, tensors: Tensors) -> None:
        if self.device.type == "cpu":  # interpreted, or emulated
            told = repr((self.call.kernel.fn.__name__, self.call.constants, sorted(self.call.options.items())))
            seen.add(hashlib.sha256(re.sub(r" at 0x\w+", "", told).encode()).hexdigest())
        launch_first(self, tensors)

    def note_compiled(self: Any, compiled: Any) -> None:
        seen.add(str(getattr(compiled, "hash", id(compiled))))
        prepare(self, compiled)

    run.KernelLaunch.launch_first, run.KernelLaunch.prepare = note, note_compiled
    return seen


def forget() -> None:
    """Let go of all prepared calls and plans: a campaign meets thousands of layouts, each of them once."""
    cache_clear()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def place(backend: str) -> torch.device:
    """Where a backend's cases run."""
    on_gpu = torch.cuda.is_available() and backend != "cpu" and not _triton.INTERPRETED
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
