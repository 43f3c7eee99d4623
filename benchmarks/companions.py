"""Checks, then times, the ops of `flashtile.ops` beside torch.compile and, where it is installed, Liger, in rotation.

    python benchmarks/companions.py [--section norm rotary ...] [--limit SECONDS] [--output benchmarks/results/companions.csv]

GB/s are those of the fewest bytes that the op must move; `of_copy` and `of_read` are fractions of what this run's own copy
and read of 1 GiB reach. The caches are cleared before every call. `compiled` is torch.compile of the plain formula.
`--section tune-norm` times other launches than those that `choose_forward` and `choose_backward` give.
"""

from __future__ import annotations

import argparse
import csv
import gc
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flashtile import ops
from flashtile.bench.machine import facts
from flashtile.bench.revision import LIBRARY, commit
from flashtile.bench.rotation import rotate

try:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction

    HAS_LIGER = True
except ImportError:
    HAS_LIGER = False

BF16 = torch.bfloat16
FLUSH_BYTES = 512 * 2**20  # larger than any L2, and long enough to clear that the host is ahead of the device
ROUNDS, MOST_CALLS, BURST_MS = 4, 20, 12.0
TOLERANCE = 1.5e-2  # relative error norm against float32; bf16 rounds to 2e-3 of it
Call = Callable[[], Any]


@dataclass
class Entrant:
    """One provider of one cell: a call, and what it made, for the check."""

    call: Call
    made: Callable[[], tuple[torch.Tensor, ...]] | None = None


@dataclass
class Cell:
    """One op, shape and direction; `entrants` and `exact` are made when its turn comes."""

    section: str
    case: str
    direction: str
    entrants: Callable[[], dict[str, Entrant]]
    exact: Callable[[], tuple[torch.Tensor, ...]]
    bytes: float = 0.0
    flops: float = 0.0
    memory: bool = False
    tolerance: float = TOLERANCE


@dataclass
class Session:
    """What all cells share."""

    device: torch.device
    limit_s: float
    begun: float = field(default_factory=time.perf_counter)
    rows: list[dict[str, Any]] = field(default_factory=list)
    ceilings: dict[str, float] = field(default_factory=dict)
    flush: torch.Tensor | None = None

    def left(self) -> float:
        return self.limit_s - (time.perf_counter() - self.begun)

    def ms(self, call: Call, calls: int) -> float:
        """Median milliseconds of a call, each after the caches were cleared."""
        if self.flush is None:
            self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        pairs = []
        for _ in range(calls):
            self.flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize(self.device)
        return median(start.elapsed_time(end) for start, end in pairs)

    def run(self, cell: Cell) -> None:
        found = cell.entrants()
        exact = [t.float() for t in cell.exact()]
        right: dict[str, Call] = {}
        peaks: dict[str, float] = {}
        for name, entrant in found.items():
            try:
                worst = 0.0
                for got, true in zip((entrant.made or entrant.call)(), exact, strict=True):
                    worst = max(worst, distance(got, true))
                if not worst < cell.tolerance:
                    print(f"WRONG {cell.section} {cell.case} {cell.direction} {name}: off by {worst:.2e}", flush=True)
                    continue
                entrant.call(), entrant.call()
                peaks[name] = peak_mb(entrant.call, self.device) if cell.memory else 0.0
            except Exception as error:  # a peer that cannot run this is out; ours says so and fails the run
                print(
                    f"FAILED {cell.section} {cell.case} {cell.direction} {name}: {type(error).__name__}: {error}"[:500],
                    flush=True,
                )
                continue
            right[name] = entrant.call
        del exact
        counts = {name: max(3, min(MOST_CALLS, int(BURST_MS / self.ms(call, 2)))) for name, call in right.items()}
        times = rotate(list(right), ROUNDS, lambda name: self.ms(right[name], counts[name]), lambda: self.left() > 0)
        for name, taken in times.items():
            ms = median(taken)
            row: dict[str, Any] = dict(
                section=cell.section, case=cell.case, direction=cell.direction, provider=name, ms=round(ms, 4),
                least_ms=round(min(taken), 4), most_ms=round(max(taken), 4), gbps="", of_copy="", of_read="", tflops="",
                peak_mb="",
            )  # fmt: skip
            if cell.bytes:
                gbps = cell.bytes / ms * 1e-6
                row |= dict(gbps=round(gbps), of_copy=round(gbps / self.ceilings["copy"], 3))
                row |= dict(of_read=round(gbps / self.ceilings["read"], 3))
            if cell.flops:
                row |= dict(tflops=round(cell.flops / ms * 1e-9, 1))
            if cell.memory:
                row |= dict(peak_mb=round(peaks[name]))
            self.rows.append(row)
            rate = f"{row['gbps']:>5} GB/s {row['of_copy']:.3f} of copy" if cell.bytes else f"{row['tflops']} TFLOP/s"
            memory = f"  peak {row['peak_mb']} MB" if cell.memory else ""
            print(f"{cell.section:9s}{cell.case:44s}{cell.direction:8s}{name:14s}{ms:9.4f} ms {rate}{memory}", flush=True)
        if "flashtile" not in right:
            self.rows.append(dict(section=cell.section, case=cell.case, direction=cell.direction, provider="flashtile FAILED"))

    def measure_ceilings(self) -> None:
        """Best rate of a 1 GiB copy and of a 1 GiB read, torch's own."""
        source = torch.randn(2**29, dtype=BF16, device=self.device)
        target = torch.empty_like(source)
        copy = min(self.ms(lambda: target.copy_(source), 10) for _ in range(3))
        read = min(self.ms(lambda: source.view(torch.int32).amax(), 10) for _ in range(3))
        self.ceilings = {"copy": 2 * 2**30 / copy * 1e-6, "read": max(2**30 / read, 2 * 2**30 / copy) * 1e-6}
        for name, gbps in self.ceilings.items():
            self.rows.append(dict(section="ceiling", case="1 GiB", direction=name, provider="torch", gbps=round(gbps)))
            print(f"ceiling {name} {gbps:.0f} GB/s", flush=True)


def distance(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative error norm; infinite where anything is not finite."""
    if got.shape != exact.shape:
        return float("inf")
    off = ((got.float() - exact).norm() / exact.norm().clamp(min=1e-20)).item()
    return off if off == off else float("inf")


def peak_mb(call: Call, device: torch.device) -> float:
    """Megabytes allocated at most during a call, beyond what was before."""
    gc.collect()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    made = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    del made
    return (peak - before) / 2**20


def normal(*shape: int, grad: bool = False, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda", dtype=BF16) * scale).requires_grad_(grad)


def both(
    section: str, case: str, functions: dict[str, Callable[..., Any]], inputs: tuple[torch.Tensor, ...],
    sizes: tuple[float, float], exact: Callable[..., Any],
) -> Iterator[Cell]:  # fmt: skip
    """A forward cell and a backward cell of functions of the same inputs, that `exact` computes in float32."""
    leaves = [t for t in inputs if t.requires_grad]

    def outputs(function: Callable[..., Any], given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        made = function(*given)
        return made if isinstance(made, tuple) else (made,)

    shapes = [t.shape for t in outputs(functions["flashtile"], inputs)]
    douts = [normal(*shape) for shape in shapes]

    def forwards() -> dict[str, Entrant]:
        def entrant(function: Callable[..., Any]) -> Entrant:
            return Entrant(lambda: outputs(function, tuple(t.detach() for t in inputs)))

        return {name: entrant(function) for name, function in functions.items()}

    def backwards() -> dict[str, Entrant]:
        def entrant(function: Callable[..., Any]) -> Entrant:
            made = outputs(function, inputs)
            return Entrant(lambda: torch.autograd.grad(made, leaves, douts, retain_graph=True))

        found = {}
        for name, function in functions.items():
            try:
                found[name] = entrant(function)
            except Exception as error:
                print(f"FAILED {section} {case} backward {name}: {error}"[:300], flush=True)
        return found

    def wide(grad: bool) -> tuple[torch.Tensor, ...]:
        return tuple(
            t.detach().float().requires_grad_(grad and t.requires_grad) if t.is_floating_point() else t for t in inputs
        )

    def exact_backward() -> tuple[torch.Tensor, ...]:
        given = wide(True)
        made = outputs(exact, given)
        return torch.autograd.grad(made, [t for t in given if t.requires_grad], [d.float() for d in douts])

    yield Cell(section, case, "fwd", forwards, lambda: outputs(exact, wide(False)), sizes[0])
    yield Cell(section, case, "bwd", backwards, exact_backward, sizes[1])


# -- norms ----------------------------------------------------------------------------------------------------------------

NORM_SHAPES = ((32768, 4096), (8192, 16384), (32768, 1024), (16384, 8192), (32768, 2048), (4096, 65536))


def norms() -> Iterator[Cell]:
    for rows, hidden in NORM_SHAPES:
        x, residual = (normal(rows, hidden, grad=True) for _ in range(2))
        weight, bias = (normal(hidden, grad=True) for _ in range(2))
        n, case = 2.0 * rows * hidden, f"{rows}x{hidden}"

        def layer(x: Any, w: Any, b: Any, hidden: int = hidden) -> Any:
            return F.layer_norm(x, (hidden,), w, b, 1e-6)

        def rms(x: Any, w: Any, hidden: int = hidden) -> Any:
            return F.rms_norm(x, (hidden,), w, 1e-6)

        def add_rms(x: Any, r: Any, w: Any, hidden: int = hidden) -> Any:
            return F.rms_norm(x + r, (hidden,), w, 1e-6), x + r

        found: dict[str, Callable[..., Any]] = {
            "flashtile": lambda x, w, b: ops.layer_norm(x, w, b, 1e-6), "compiled": torch.compile(layer, dynamic=False),
        }  # fmt: skip
        if HAS_LIGER:
            found["liger"] = lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-6)
        yield from both("norm", f"layer_norm {case}", found, (x, weight, bias), (2 * n, 3 * n), layer)
        found = {"flashtile": lambda x, w: ops.rms_norm(x, w, eps=1e-6), "compiled": torch.compile(rms, dynamic=False)}
        if HAS_LIGER:
            found["liger"] = lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False, None)
        yield from both("norm", f"rms_norm {case}", found, (x, weight), (2 * n, 3 * n), rms)
        if hidden > 16384:
            continue
        found = {
            "flashtile": lambda x, r, w: ops.rms_norm(x, w, eps=1e-6, residual=r, prenorm=True),
            "compiled": torch.compile(add_rms, dynamic=False),
        }
        if HAS_LIGER:
            found["liger"] = lambda x, r, w: LigerFusedAddRMSNormFunction.apply(x, r, w, 1e-6, 0.0, "llama", False)
        yield from both("norm", f"add_rms_norm {case}", found, (x, residual, weight), (4 * n, 4 * n), add_rms)
        yield from dropped(x, residual, weight, bias, n, case)


def dropped(x: Any, residual: Any, weight: Any, bias: Any, n: float, case: str) -> Iterator[Cell]:
    """Dropout, addition and LayerNorm in one; torch.compile draws other numbers, so that the check is of ours alone."""
    dropout = ops.Dropout.draw(0.1, x.device)
    mask = dropout.mask(x.shape)

    def compiled(x: Any, r: Any, w: Any, b: Any) -> Any:
        h = F.dropout(x, 0.1, True) + r
        return F.layer_norm(h, (h.shape[-1],), w, b, 1e-6), h

    def exact(x: Any, r: Any, w: Any, b: Any) -> Any:
        h = x * mask / 0.9 + r
        return F.layer_norm(h, (h.shape[-1],), w, b, 1e-6), h

    def ours(x: Any, r: Any, w: Any, b: Any) -> Any:
        return ops.layer_norm(x, w, b, 1e-6, residual=r, prenorm=True, dropout=dropout)

    found = {"flashtile": ours, "compiled": torch.compile(compiled, dynamic=False)}
    cells = both("norm", f"dropout_add_layer_norm {case}", found, (x, residual, weight, bias), (4 * n, 5 * n), exact)
    for cell in cells:
        make = cell.entrants

        def unchecked(make: Any = make, cell: Cell = cell) -> dict[str, Entrant]:
            found = make()
            truth = cell.exact
            found["compiled"].made = truth
            return found

        cell.entrants = unchecked
        yield cell


def tune_norm(session: Session) -> None:
    """Other launches, fastest first, for the shapes of `norms`."""
    from flashtile.kernels.companions import norm
    from flashtile.plan.call import Buffer, Plan
    from flashtile.plan.companion import plan_backward, plan_forward
    from flashtile.torch.companion import describe
    from flashtile.torch.run import Bound, device_of

    place = device_of(session.device)
    for kind, (rows, hidden) in product(("rms", "layer"), NORM_SHAPES):
        tensors = {"x": normal(rows, hidden), "weight": normal(hidden)} | ({"bias": normal(hidden)} if kind == "layer" else {})
        problem = norm.Norm(tuple(describe(tensors).items()), kind=kind)
        wanted = frozenset(tensors)
        first = Bound(plan_forward(norm.NORM, problem, place, "triton", True), tensors, session.device).run(dict(tensors))
        given = {name: first[name] for name in norm.kept(problem, wanted)} | {"dout": normal(rows, hidden)}
        block = min(1 << (hidden - 1).bit_length(), 32768)
        for direction in ("fwd", "bwd"):
            base: Plan = (
                plan_forward(norm.NORM, problem, place, "triton", True) if direction == "fwd"
                else plan_backward(norm.NORM, problem, place, "triton", wanted, frozenset({"out"}))
            )  # fmt: skip
            buffers = tuple(b for b in base.buffers if b.role != "scratch")
            timed: list[tuple[float, norm.Launch]] = []
            for launch in launches(norm, direction, min(block, 16384) if direction == "bwd" else block, rows):
                if session.left() < 0:
                    return
                made = ("out", *(("mean",) if kind == "layer" else ()), "rstd")
                steps = (
                    norm.forward(problem, place, made, launch) if direction == "fwd"
                    else norm.backward(problem, place, wanted, frozenset({"out"}), launch)
                )  # fmt: skip
                scratch: tuple[Buffer, ...] = steps.scratch
                plan = Plan(problem, "triton", "", (*buffers, *scratch), steps.calls)
                inputs = tensors if direction == "fwd" else given
                try:
                    bound = Bound(plan, inputs, session.device)
                    bound.run(dict(inputs)), bound.run(dict(inputs))
                    timed.append((session.ms(lambda bound=bound, inputs=inputs: bound.run(dict(inputs)), 8), launch))
                except Exception as error:  # too much shared memory, too many registers
                    print(f"tune {kind} {direction} {launch}: {type(error).__name__}", flush=True)
            n = 2.0 * rows * hidden * (2 if direction == "fwd" else 3)
            for ms, launch in sorted(timed, key=lambda pair: pair[0])[:4]:
                share = n / ms * 1e-6 / session.ceilings["copy"]
                print(f"tune {kind} {rows}x{hidden} {direction} {share:.3f} {ms:.4f} ms {launch}", flush=True)
                session.rows.append(dict(
                    section="tune-norm", case=f"{kind} {rows}x{hidden} {launch}", direction=direction, provider="flashtile",
                    ms=round(ms, 4), of_copy=round(share, 3),
                ))  # fmt: skip


def launches(norm: Any, direction: str, block: int, rows: int) -> Iterator[Any]:
    if direction == "fwd":
        for lane, warps in product((8, 16, 32, 64), (1, 2, 4, 8, 16, 32)):
            step = min(block, 16384) if lane == 8 else block
            if warps * 32 * lane >= step // 2 and warps * 32 * lane // step <= 16 and warps * lane >= 32:
                yield norm.Launch(max(1, warps * 32 * lane // step), step, warps)
        return
    for lane, warps, per_sm, stages in product((8, 16, 32), (4, 8, 16, 32), (1, 2, 3, 4, 6), (1, 3)):
        if warps * 32 * lane >= block and warps * 32 * lane // block <= 8 and 8 <= warps * per_sm <= 32:
            yield norm.Launch(warps * 32 * lane // block, block, warps, per_sm, stages, block <= 8192)


# -- cross-entropy --------------------------------------------------------------------------------------------------------


def cross_entropies() -> Iterator[Cell]:
    for rows, classes in ((8192, 131072), (8192, 32768), (4096, 262144), (32768, 32768), (8192, 50257)):
        x, labels = normal(rows, classes, grad=True), torch.randint(classes, (rows,), device="cuda")
        n, case = 2.0 * rows * classes, f"{rows}x{classes}"

        def plain(x: Any, labels: Any) -> Any:
            return F.cross_entropy(x.float(), labels)

        def exact(x: Any, labels: Any) -> Any:
            return F.cross_entropy(x, labels)

        found = {"flashtile": ops.cross_entropy, "compiled": torch.compile(plain, dynamic=False)}
        yield from rows_in_steps("loss", case, found, x, labels, n, exact, False)
        if HAS_LIGER:  # writes the gradient over the logits: not checked after the first call
            found["liger/inplace"] = lambda x, labels: LigerCrossEntropyFunction.apply(
                x, labels, None, -100, 0.0, 0.0, "mean", None
            )[0]
        yield from rows_in_steps("train", case, found, x, labels, 2 * n, exact, True)


def rows_in_steps(
    what: str, case: str, functions: dict[str, Callable[..., Any]], x: Any, labels: Any, size: float, exact: Any, train: bool
) -> Iterator[Cell]:
    """A cell of the loss, or of loss and gradient; the truth is computed a few rows at a time."""
    rows = x.shape[0]
    step = max(1, 2**28 // x.shape[1])

    def truth() -> tuple[torch.Tensor, ...]:
        losses, grads = [], []
        for first in range(0, rows, step):
            part = x[first : first + step].detach().float().requires_grad_()
            loss = exact(part, labels[first : first + step]) * (len(part) / rows)
            losses.append(loss.detach())
            if train:
                grads.append(torch.autograd.grad(loss, part)[0].to(BF16))
        return (torch.stack(losses).sum(), torch.cat(grads)) if train else (torch.stack(losses).sum(),)

    def entrants() -> dict[str, Entrant]:
        def entrant(name: str, function: Callable[..., Any]) -> Entrant:
            def call() -> tuple[torch.Tensor, ...]:
                if not train:
                    return (function(x.detach(), labels),)
                loss = function(x, labels)
                return loss.detach(), torch.autograd.grad(loss, x)[0]

            def on_a_copy() -> tuple[torch.Tensor, ...]:
                copy = x.detach().clone().requires_grad_()
                loss = function(copy, labels)
                return loss.detach(), torch.autograd.grad(loss, copy)[0]

            return Entrant(call, on_a_copy if name.endswith("inplace") else None)

        return {name: entrant(name, function) for name, function in functions.items()}

    yield Cell("ce", f"cross_entropy {case}", what, entrants, truth, size, memory=train)


# -- rotary, softmax, head ------------------------------------------------------------------------------------------------


def rotaries() -> Iterator[Cell]:
    batch, seqlen, heads, heads_kv, dim = 2, 8192, 32, 8, 128
    angle = torch.arange(seqlen, device="cuda")[:, None] / 10000 ** (torch.arange(0, dim, 2, device="cuda") / dim)
    cos, sin = angle.cos(), angle.sin()
    q, k = normal(batch, seqlen, heads, dim, grad=True), normal(batch, seqlen, heads_kv, dim, grad=True)
    size = 4.0 * (q.numel() + k.numel()) + 8.0 * cos.numel()
    for interleaved in (False, True):

        def turn(x: Any, interleaved: bool = interleaved) -> Any:
            c, s = cos[None, :, None], sin[None, :, None]
            first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
            both = first * c - second * s, first * s + second * c
            return (torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)).to(x.dtype)

        def plain(q: Any, k: Any, turn: Any = turn) -> Any:
            return turn(q), turn(k)

        def ours(q: Any, k: Any, interleaved: bool = interleaved) -> Any:
            return ops.rotary(q, k, cos, sin, interleaved=interleaved)

        def over(q: Any, k: Any, interleaved: bool = interleaved) -> Any:
            with torch.no_grad():
                return ops.rotary(q, k, cos, sin, interleaved=interleaved, inplace=True)

        found = {"flashtile": ours, "compiled": torch.compile(plain, dynamic=False)}
        case = f"{'interleaved' if interleaved else 'neox'} {batch}x{seqlen} {heads}/{heads_kv}x{dim}"
        forward, backward = both("rotary", case, found, (q, k), (size, size), plain)
        make = forward.entrants

        def in_place(make: Any = make, over: Any = over, interleaved: bool = interleaved) -> dict[str, Entrant]:
            """Those that write over q and k turn copies, again and again: checked on fresh ones."""
            found, copies = make(), [t.detach().clone() for t in (q, k)]
            fresh = Entrant(lambda: over(*copies), lambda: over(q.detach().clone(), k.detach().clone()))
            found["flashtile/inplace"] = fresh
            if HAS_LIGER and not interleaved:
                c2, s2 = (torch.cat((t, t), -1)[None].to(BF16) for t in (cos, sin))

                def liger(q: Any, k: Any) -> Any:
                    made = LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), c2, s2)
                    return tuple(t.transpose(1, 2) for t in made)

                found["liger/inplace"] = Entrant(lambda: liger(*copies), lambda: liger(q.detach().clone(), k.detach().clone()))
            return found

        forward.entrants = in_place
        yield forward
        yield backward


def softmaxes() -> Iterator[Cell]:
    for batch, heads, length in ((4, 16, 2048), (1, 16, 4096)):
        x = normal(batch, heads, length, length, grad=True)
        mask = torch.rand(batch, 1, length, length, device="cuda") < 0.2
        above = torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1)
        n, case = 2.0 * x.numel(), f"{batch}x{heads}x{length}"

        def masked(x: Any, mask: Any = mask) -> Any:
            return torch.softmax((x.float() * 0.5).masked_fill(mask, -10000.0), -1).to(x.dtype)

        def causal(x: Any, above: Any = above) -> Any:
            return torch.softmax((x.float() * 0.5).masked_fill(above, -torch.inf), -1).to(x.dtype)

        def ours_masked(x: Any, mask: Any = mask) -> Any:
            return ops.softmax(x, mask, scale=0.5, masked_score=-10000.0)

        found = {"flashtile": ours_masked, "compiled": torch.compile(masked, dynamic=False)}
        yield from both("softmax", f"masked {case}", found, (x,), (2 * n + mask.numel(), 3 * n), masked)
        found = {
            "flashtile": lambda x: ops.softmax(x, scale=0.5, causal=True),
            "compiled": torch.compile(causal, dynamic=False),
        }
        yield from both("softmax", f"causal {case}", found, (x,), (1.5 * n, 2 * n), causal)


def heads() -> Iterator[Cell]:
    rows, hidden, classes = 8192, 4096, 128256
    x, weight = normal(rows, hidden, grad=True, scale=0.1), normal(classes, hidden, grad=True, scale=0.02)
    labels = torch.randint(classes, (rows,), device="cuda")

    def plain(x: Any, weight: Any) -> Any:
        return F.cross_entropy(F.linear(x, weight).float(), labels)

    def step(function: Callable[..., Any]) -> Entrant:
        def call() -> tuple[torch.Tensor, ...]:
            loss = function(x, weight)
            return loss.detach(), *torch.autograd.grad(loss, (x, weight))

        return Entrant(call)

    def exact() -> tuple[torch.Tensor, ...]:
        wide, losses, dx = weight.detach().float(), [], []
        dweight = torch.zeros_like(wide)
        for first in range(0, rows, 512):
            part = x[first : first + 512].detach().float()
            logits = (part @ wide.t()).requires_grad_()
            loss = F.cross_entropy(logits, labels[first : first + 512], reduction="sum") / rows
            (grad,) = torch.autograd.grad(loss, logits)
            losses.append(loss.detach())
            dx.append(grad @ wide)
            dweight += grad.t() @ part
        return torch.stack(losses).sum(), torch.cat(dx), dweight

    def entrants() -> dict[str, Entrant]:
        found = {"flashtile": step(lambda x, w: ops.linear_cross_entropy(x, w, labels))}
        found["compiled"] = step(torch.compile(plain, dynamic=False))
        if HAS_LIGER:
            found["liger"] = step(lambda x, w: LigerFusedLinearCrossEntropyFunction.apply(x, w, labels)[0])
        return found

    case = f"linear_cross_entropy {rows}x{hidden}x{classes}"
    yield Cell("head", case, "train", entrants, exact, flops=6.0 * rows * hidden * classes, memory=True, tolerance=4e-2)


SECTIONS: dict[str, Callable[[], Iterator[Cell]]] = {
    "norm": norms,
    "ce": cross_entropies,
    "rotary": rotaries,
    "softmax": softmaxes,
    "head": heads,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", nargs="+", choices=[*SECTIONS, "tune-norm"], default=list(SECTIONS))
    parser.add_argument("--limit", type=float, default=200.0, help="seconds; cells that have not begun by then are left out")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/companions.csv"))
    parser.add_argument("--commit", default="")
    chosen = parser.parse_args()
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # a compiled backward is to be called again and again
    torch._dynamo.config.recompile_limit = 1000  # one function, many shapes: beyond the limit it would run eagerly
    torch._dynamo.config.accumulated_recompile_limit = 10000
    torch.manual_seed(0)
    session = Session(torch.device("cuda", 0), chosen.limit)
    session.measure_ceilings()
    for section in chosen.section:
        if section == "tune-norm":
            tune_norm(session)
            continue
        for cell in SECTIONS[section]():
            if session.left() < 0:
                print(f"LEFT OUT, no time: {cell.section} {cell.case} {cell.direction}", flush=True)
                continue
            session.run(cell)
            gc.collect()
    machine = dict(
        **facts(session.device), date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        commit=commit(LIBRARY) or chosen.commit,
    )  # fmt: skip
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    with chosen.output.open("w", newline="") as file:
        columns = list(dict.fromkeys(name for row in session.rows for name in row))
        writer = csv.DictWriter(file, [*columns, *machine], restval="")
        writer.writeheader()
        writer.writerows({**row, **machine} for row in session.rows)
    return int(any(row["provider"].endswith("FAILED") for row in session.rows))


if __name__ == "__main__":
    sys.exit(main())
