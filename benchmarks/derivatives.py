"""Tangents and double backward beside our own forward and backward, and beside who else has them, on a GPU.

    python benchmarks/derivatives.py [--shapes 1x8192x32x64 ...] [--tiles] [--rounds 10] [--budget 600]
                                     [--masks full causal] [--output bench-output/derivatives.csv] [--commit HASH]

A cell is a shape (batch x seqlen x heads x head_dim), full and causal, in bf16. Its passes take turns: our forward, the tangent
pass of all inputs and of q alone (out, lse and their tangents in one launch), the same by torch.func.jvp from end to end, our
backward, our double backward (gradients of a sum of dq, dk and dv by q, k, v and dout), the passes of statistics
alone, the forward that keeps them itself, or has one behind it; plain PyTorch where its scores fit, and jvp_flash_attention
where it is installed. `of_forward` and `of_backward` are medians over our forward's and backward's. Every result is checked
first, one head of it: no farther from float64 (float32 beyond 8,192 tokens) than 1.5 x what plain PyTorch in bf16 is, or 2
units in the last place. --tiles times the tangent passes, both passes of a second derivative and that of mass by themselves,
in the chosen tile and in candidates. The exit status is 1 if anything is wrong or fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from torch.autograd import forward_ad

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import flashtile
from benchmarks.experiment import Ahead, Experiment, main_of
from benchmarks.record import Record, at_least_one, sized
from flashtile.bench.rotation import rotate
from flashtile.bench.timing import burst_ms, calls_for
from flashtile.kernels.portable import directed as portable
from flashtile.kernels.portable.tile import Launch, Pass
from flashtile.plan.backend import Direction
from flashtile.plan.call import KernelCall, Plan
from flashtile.plan.device import Device
from flashtile.problem.attention import AttentionProblem
from flashtile.reference.attention import attention_plain
from flashtile.torch.execute.bound import Bound
from flashtile.torch.execute.directed import forward_with_statistics, statistics, tangents
from flashtile.torch.routes.eager import prepare
from flashtile.triton_glue.compile import compile_call

SHAPES = ("1x8192x32x64", "1x16384x16x64", "1x16384x16x128")
ROUNDS = 10
MATH_MOST_BYTES = 2 << 30  # of one matrix of all scores in bf16, of which plain PyTorch's passes hold a dozen
EXACT = 8192  # tokens up to which one head's truth is float64's
ULP = 2.0**-8
STATISTICS = {"max_logit": ("peak", 0), "entropy": ("entropy", 0), "Mass(last=64)": ("mass", 64)}  # their buffers, queries
WITH = "forward with "
Tensors = tuple[torch.Tensor, ...]
Call = Callable[[], Sequence[torch.Tensor]]

# Candidates of --tiles, by what is timed and head dim.
CANDIDATES: dict[str, dict[int, tuple[Launch, ...]]] = {
    "tangent": {
        64: (Launch(128, 64, 8, 2, 8), Launch(64, 64, 4, 2, 8), Launch(128, 32, 8, 3, 8), Launch(64, 64, 4, 4, 8)),
        128: (Launch(128, 64, 8, 2, 8), Launch(64, 64, 4, 2, 8), Launch(64, 64, 4, 1, 8), Launch(64, 32, 4, 2, 8)),
    },
    "tangent of q": {
        64: (Launch(128, 64, 8, 3, 8), Launch(128, 128, 8, 2, 8), Launch(64, 128, 4, 2, 8), Launch(64, 64, 4, 4, 8)),
        128: (Launch(128, 64, 8, 3, 8), Launch(128, 128, 8, 2, 8), Launch(64, 64, 4, 2, 8), Launch(64, 64, 4, 3, 8)),
    },
    "Mass(last=64)": {
        64: (
            Launch(64, 128, 8, 3, 8), Launch(64, 256, 4, 2, 8), Launch(64, 512, 4, 3, 8), Launch(64, 1024, 4, 3, 8),
            Launch(64, 1024, 4, 4, 8),
        ),
        128: (Launch(64, 64, 4, 3, 8), Launch(64, 128, 4, 1, 8), Launch(64, 512, 4, 3, 8), Launch(64, 1024, 8, 3, 8)),
    },
    "second_queries": {
        64: (Launch(64, 64, 4, 3, 8), Launch(128, 64, 8, 2, 8)),
        128: (Launch(128, 64, 8, 1, 8), Launch(64, 64, 4, 2, 8), Launch(64, 32, 4, 1, 8)),
    },
    "second_keys": {
        64: (
            Launch(64, 128, 8, 3, 8), Launch(64, 64, 4, 2, 8), Launch(32, 64, 4, 2, 8, upright=True),
        ),
        128: (
            Launch(32, 64, 4, 1, 8), Launch(32, 64, 4, 2, 8), Launch(32, 64, 8, 2, 8), Launch(32, 128, 8, 2, 8),
            Launch(32, 64, 4, 2, 8, upright=True), Launch(64, 64, 8, 1, 8, upright=True),
        ),
    },
}  # fmt: skip


class Cell:
    """One problem's tensors, and its passes as calls."""

    def __init__(self, shape: str, causal: bool, device: torch.device, only: Sequence[str] | None = None):
        batch, seqlen, heads, head_dim = (int(n) for n in shape.split("x"))
        self.size, self.causal, self.only = (batch, seqlen, heads, head_dim), causal, only
        generator = torch.Generator(device).manual_seed(0)
        made = [torch.randn(self.size, generator=generator, device=device).to(torch.bfloat16) for _ in range(8)]
        self.inputs, self.moved, self.dout, self.ddout = tuple(made[:3]), tuple(made[3:6]), made[6], made[7]
        q, k, v = self.inputs
        self.laid: Any = None
        self.prepared, _ = prepare(q, k, v, causal)
        self.lse = flashtile.attention(q, k, v, causal=causal, return_lse=True)[1]
        self.leaves = tuple(t.detach().requires_grad_() for t in (*self.inputs, self.dout))
        *qkv, dout = self.leaves
        if only is not None and not any("backward" in what for what in only):
            return
        self.out = flashtile.attention(*qkv, causal=causal)
        self.first = torch.autograd.grad(self.out, qkv, dout, create_graph=True)

    def forward(self) -> Sequence[torch.Tensor]:
        return (flashtile.attention(*self.inputs, causal=self.causal),)

    def tangent(self, names: str = "qkv") -> Sequence[torch.Tensor]:
        moved = [t if name in names else None for name, t in zip("qkv", self.moved, strict=True)]
        out, _, tout, _ = tangents(self.prepared, self.inputs, (), moved)
        return out, tout

    def jvp(self) -> Sequence[torch.Tensor]:
        return torch.func.jvp(partial(flashtile.attention, causal=self.causal), self.inputs, self.moved)

    def backward(self) -> Sequence[torch.Tensor]:
        return torch.autograd.grad(self.out, self.leaves[:3], self.dout, retain_graph=True)

    def double_backward(self) -> Sequence[torch.Tensor]:
        return torch.autograd.grad(self.first, self.leaves, self.moved, retain_graph=True)

    def statistics(self, what: str) -> Sequence[torch.Tensor]:
        """The pass alone, behind a forward; (batch, seqlen, heads, 1)."""
        name, last = STATISTICS[what]
        made = statistics(self.prepared, self.inputs, (), self.lse, frozenset({name}), last)[name]
        return (made.transpose(1, 2)[..., None],)

    def watched(self, what: str) -> Sequence[torch.Tensor]:
        """The forward, which keeps a statistic of rows itself."""
        name = STATISTICS[what][0]
        (out, *_), made = forward_with_statistics(self.prepared, self.inputs, (), frozenset({name}))
        found = made[name].transpose(1, 2)[..., None]
        return out, found.amax(1, keepdim=True) if name == "peak" else found

    def massed(self, what: str) -> Sequence[torch.Tensor]:
        """The forward and the pass behind it, as a caller has both."""
        asked = flashtile.Mass(last=STATISTICS[what][1])
        out, found = flashtile.attention(*self.inputs, causal=self.causal, returns=asked)
        return out, found.mass.transpose(1, 2)[..., None]

    def math_jvp(self) -> Sequence[torch.Tensor]:
        return torch.func.jvp(self._plain(), self.inputs, self.moved)

    def by_head(self) -> tuple[Tensors, Tensors]:
        """Inputs and their tangents, (batch, heads, seqlen, head_dim), laid so once."""
        if self.laid is None:
            self.laid = tuple(tuple(t.transpose(1, 2).contiguous() for t in some) for some in (self.inputs, self.moved))
        return self.laid

    def peer(self) -> Sequence[torch.Tensor]:
        """jvp_flash_attention's, of (batch, heads, seqlen, head_dim)."""
        from jvp_flash_attention.jvp_attention import JVPAttn  # pyright: ignore[reportMissingImports]

        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, t) for x, t in zip(*self.by_head(), strict=True)]
            made = forward_ad.unpack_dual(JVPAttn.fwd_dual(*duals, causal=self.causal))
            assert made.tangent is not None
            return made.primal.transpose(1, 2), made.tangent.transpose(1, 2)

    def truth(self, what: str, dtype: torch.dtype) -> Sequence[torch.Tensor]:
        """The first head's results by plain PyTorch in a dtype."""
        x, moved = ([t[:1, :, :1].to(dtype) for t in some] for some in (self.inputs, self.moved))
        dout = self.dout[:1, :, :1].to(dtype)
        if what == "forward":
            return (self._plain()(*x),)
        if what.startswith(WITH):
            (found,) = self.truth(what.removeprefix(WITH), dtype)
            return *self.truth("forward", dtype), found.amax(1, keepdim=True) if "max_logit" in what else found
        if what in STATISTICS:
            name, last = STATISTICS[what]
            scores = x[0][0, :, 0] @ x[1][0, :, 0].T * self.size[3] ** -0.5
            if self.causal:
                scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
            p = scores.softmax(-1)
            made = {"peak": scores.amax(-1), "mass": p[-last:].sum(0)}
            found = made[name] if name in made else -torch.special.xlogy(p, p).sum(-1)
            return (found[None, :, None, None],)
        if what == "tangent of q":
            moved = [moved[0], *map(torch.zeros_like, moved[1:])]
        if "tangent" in what or "jvp" in what:
            return torch.func.jvp(self._plain(), tuple(x), tuple(moved))
        leaves = [t.requires_grad_() for t in (*x, dout)]
        grads = torch.autograd.grad(self._plain()(*leaves[:3]), leaves[:3], leaves[3], create_graph=what != "backward")
        return grads if what == "backward" else torch.autograd.grad(grads, leaves, moved)

    def _plain(self) -> Callable[..., torch.Tensor]:
        return lambda *x: attention_plain(*x, causal=self.causal)[0]

    def passes(self) -> dict[str, Call]:
        """What is timed, ours first."""
        made: dict[str, Call] = {
            "forward": self.forward, "tangent": self.tangent, "tangent of q": partial(self.tangent, "q"), "jvp": self.jvp,
            "backward": self.backward, "double backward": self.double_backward,
            **{name: partial(self.statistics, name) for name in STATISTICS},
            **{WITH + name: partial(self.watched, name) for name in ("max_logit", "entropy")},
            **{WITH + name: partial(self.massed, name) for name in ("Mass(last=64)",)},
        }  # fmt: skip
        batch, seqlen, heads, _ = self.size
        if 2 * batch * heads * seqlen * seqlen <= MATH_MOST_BYTES:
            made["jvp of plain PyTorch"] = self.math_jvp
        if importlib.util.find_spec("jvp_flash_attention") is not None:
            made["jvp_flash_attention"] = self.peer
        return {what: call for what, call in made.items() if self.only is None or what in ("forward", *self.only)}


def errors(found: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> list[float]:
    """The largest error of each result's first head, over its largest element."""
    pairs = zip(found, truth, strict=True)
    return [float((one[:1, :, :1].double() - exact).abs().max() / exact.double().abs().max()) for one, exact in pairs]


def measure(cell: Cell, record: Record, rounds: int, device: torch.device, row: dict[str, Any]) -> None:
    """Check every pass, then time those that are right in one rotation."""
    exact = torch.float64 if cell.size[1] <= EXACT else torch.float32
    right: dict[str, Call] = {}
    facts: dict[str, dict[str, Any]] = {}
    truths: dict[str, tuple[Sequence[torch.Tensor], list[float]]] = {}
    for what, call in cell.passes().items():
        same = "tangent" if "jvp" in what else what
        with record.attempt(**row, what=what):
            if same not in truths:
                truth = cell.truth(same, exact)
                truths[same] = truth, errors(cell.truth(same, torch.bfloat16), truth)
            truth, plain = truths[same]
            found = errors(call(), truth)
            wrong = [e for e, other in zip(found, plain, strict=True) if not e <= max(1.5 * other, 2 * ULP)]
            facts[what] = {"error": f"{max(found):.2e}", "error_of_plain": f"{max(plain):.2e}"}
            if wrong and what in ("jvp_flash_attention", "jvp of plain PyTorch"):
                facts[what]["note"] = "less exact than 1.5 x plain PyTorch's"
            elif wrong:
                record.fail(f"off by {found}, plain PyTorch by {plain}", **row, what=what)
                continue
            right[what] = call
    truths.clear()
    torch.cuda.empty_cache()
    counts = {what: calls_for(burst_ms(call, 2, device), device) for what, call in right.items()}
    times = rotate(tuple(right), rounds, lambda what: burst_ms(right[what], counts[what], device))
    mid = {what: median(some) for what, some in times.items()}
    for what, ms in mid.items():
        of = {f"of_{base}": f"{ms / mid[base]:.2f}" for base in ("forward", "backward") if base in mid}
        print(*row.values(), what, f"{ms:.3f} ms", *(f"{name} {value}" for name, value in of.items()), facts[what], flush=True)
        record.add({**row, "what": what, "ms": f"{ms:.4f}", **of, **facts[what]})


def tiled(only: Sequence[str] | None) -> list[str]:
    """What --tiles times."""
    return [what for what in CANDIDATES if only is None or what in only]


def pass_of(what: str) -> Pass:
    """The kind of pass that a candidate's tile is of."""
    return "second_keys" if what in STATISTICS else "tangent" if what.startswith("tangent") else cast(Pass, what)


def launches_of(p: AttentionProblem, place: Device, what: str) -> list[Launch]:
    """The chosen tile, then the candidates that fit."""
    which, wide = pass_of(what), 64 if p.head_dim <= 64 else 128
    last = (STATISTICS[what][1],) if what in STATISTICS else ()
    chosen = (portable.choose_light if last else portable.choose_directed)(p, place, which, *last)
    others = [c for c in CANDIDATES[what][wide] if last or portable.shared_bytes(p, c, which) <= place.smem_bytes]
    return list({launch.spell(): launch for launch in (chosen, *others)}.values())


def plan_in(p: AttentionProblem, place: Device, what: str, launch: Launch) -> Plan:
    """The plan that holds a pass in a tile: of mass, or along all inputs, or q alone."""
    launches: dict[Pass, Launch] = {pass_of(what): launch}
    if what in STATISTICS:
        name, last = STATISTICS[what]
        return portable.plan_statistics(p, place, Direction(wanted=frozenset({name}), last=last), launches)
    if what.startswith("tangent"):
        return portable.plan_tangent(p, place, Direction(frozenset("q" if what.endswith("of q") else "qkv")), launches)
    return portable.plan_second(p, place, Direction(frozenset("qkv"), frozenset({"dout"}), frozenset("qkv")), launches)


def warm(shape: str, causal: bool, what: str, tile: int | None = None) -> None:
    """Leave the kernels of one pass in the caches, or of a pass in one tile."""
    device = torch.device("cuda", 0)
    cell = Cell(shape, causal, device, (what,))
    if tile is None:
        cell.passes()[what]()
        return
    p, place = cell.prepared.problem, cell.prepared.place
    plan = plan_in(p, place, what, launches_of(p, place, what)[tile])
    compile_call(named_call(plan, what)[1], plan, place)


def named_call(plan: Plan, what: str) -> tuple[int, KernelCall]:
    """The launch of what is timed, and its place among a plan's calls."""
    name = STATISTICS[what][0] if what in STATISTICS else pass_of(what)
    found = [(i, c) for i, c in enumerate(plan.calls) if isinstance(c, KernelCall)]
    return next((i, c) for i, c in found if c.kernel.fn.__name__ == f"attention_{name}")


def tiles(cell: Cell, record: Record, rounds: int, device: torch.device, row: dict[str, Any]) -> None:
    """Time each pass's kernel in its tile and in the candidates, whose results must be those of the first of its kind."""
    p, place = cell.prepared.problem, cell.prepared.place
    names = "q", "k", "v", "tq", "tk", "tv", "dout", "lse"
    tensors = *cell.inputs, *cell.moved, cell.dout, cell.lse
    given: dict[str, torch.Tensor] = dict(zip(names, tensors, strict=True))
    expected = dict[str, list[torch.Tensor]]()
    for what in tiled(cell.only):
        runs, kind = dict[str, Call](), "second" if what.startswith("second") else what
        for launch in launches_of(p, place, what):
            with record.attempt(**row, what=what, tile=launch.spell()):
                plan = plan_in(p, place, what, launch)
                inputs = {b.name: given[b.name] for b in plan.named("input")}
                made = Bound(plan, dict(inputs), device).run(dict(inputs))
                found = [made[b.name] for b in plan.named("output") if b.name != "lse"]
                pairs = zip(found, expected.setdefault(kind, found), strict=True)
                apart = max(float((a.double() - b.double()).abs().max() / b.double().abs().max()) for a, b in pairs)
                if not apart <= 4 * ULP:
                    record.fail(f"is {apart:.1e} off the first tile's results", **row, what=what, tile=launch.spell())
                    continue
                runs[launch.spell()] = alone(plan, what, made, device)
        counts = {tile: calls_for(burst_ms(call, 2, device), device) for tile, call in runs.items()}
        times = rotate(tuple(runs), rounds, lambda tile, runs=runs, counts=counts: burst_ms(runs[tile], counts[tile], device))
        for tile, some in times.items():
            print(*row.values(), what, tile, f"{median(some):.3f} ms", flush=True)
            record.add({**row, "what": what, "tile": tile, "ms": f"{median(some):.4f}"})


def alone(plan: Plan, what: str, tensors: dict[str, torch.Tensor], device: torch.device) -> Call:
    """The one launch of a plan that is this pass, over tensors of a run."""
    bound = Bound(plan, {b.name: tensors[b.name] for b in plan.named("input")}, device)
    launch: Any = bound.launches[named_call(plan, what)[0]]

    def call() -> Sequence[torch.Tensor]:
        launch(tensors)
        return ()

    return call


class Derivatives(Experiment[tuple[str, bool]]):
    """A cell is a shape, full or causal."""

    output, budget_s = "bench-output/derivatives.csv", 600

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--shapes", nargs="+", type=sized(4), default=SHAPES, help="batch x seqlen x heads x head_dim")
        parser.add_argument("--rounds", type=at_least_one, default=ROUNDS)
        parser.add_argument("--only", nargs="+", help="of a cell's passes these, beside our forward; of --tiles these alone")
        parser.add_argument("--masks", nargs="+", choices=("full", "causal"), default=("full", "causal"))
        parser.add_argument("--tiles", action="store_true", help="time candidate tiles instead")

    def cells(self) -> list[tuple[str, bool]]:
        return [(shape, mask == "causal") for shape in self.chosen.shapes for mask in self.chosen.masks]

    def ahead(self) -> Ahead:
        jobs: list[tuple[Any, ...]] = []
        for shape, causal in self.cells():
            cell = Cell(shape, causal, self.device(), ())
            p, place = cell.prepared.problem, cell.prepared.place
            if self.chosen.tiles:
                some = tiled(self.chosen.only)
                jobs += [(shape, causal, what, i) for what in some for i, _ in enumerate(launches_of(p, place, what))]
            else:
                cell.only = self.chosen.only
                jobs += [(shape, causal, what) for what in cell.passes()]
        return warm, jobs

    def place(self, cell: tuple[str, bool]) -> dict[str, str]:
        return {"shape": cell[0], "mask": "causal" if cell[1] else "full"}

    def measure(self, cell: tuple[str, bool], record: Record, until: float) -> None:
        how = tiles if self.chosen.tiles else measure
        how(Cell(*cell, self.device(), self.chosen.only), record, self.chosen.rounds, self.device(), self.place(cell))


def main() -> int:
    return main_of(Derivatives)


if __name__ == "__main__":
    sys.exit(main())
