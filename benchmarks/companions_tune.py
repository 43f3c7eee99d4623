"""Times other launches of the norms and of cross-entropy than those that the library chooses, each checked first.

    python benchmarks/companions_tune.py [--match REGEX] [--budget SECONDS] [--dry]
        [--output benchmarks/results/companions-tune.csv]

Processes of their own compile all launches ahead. A launch is right where its outputs are those of the op's plain PyTorch
form. --match: only problems of which spelling and direction, as in "cross_entropy(...) fwd", have it. --dry compiles them
without a GPU and prints what the compiler says of them.
"""

from __future__ import annotations

import argparse
import re
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.companion_cells import WARM_CALLS, Session, distance
from benchmarks.experiment import Ahead, Experiment, main_of
from benchmarks.record import Record
from flashtile.kernels.ops import cross_entropy, norm
from flashtile.kernels.ops.catalogue import OPS
from flashtile.plan.call import KernelCall, Plan
from flashtile.plan.device import H100, Device
from flashtile.plan.op import plan_backward, plan_forward
from flashtile.problem.op import Companion
from flashtile.torch.execute.bound import TORCH_DTYPES, Bound, device_of

Tensors = dict[str, torch.Tensor]
TOLERANCE = 5e-3  # relative error norm: what a rounding to bf16 more or less costs
FEW_ROWS = 512  # of the tensors with which kernels are compiled ahead


@dataclass(frozen=True)
class Cell:
    """A problem, a direction, and the launches that may suit it."""

    spelling: str
    direction: str
    launches: tuple[Any, ...]

    def plan(self, problem: Companion, device: Device, launch: Any) -> Plan:
        op = OPS[problem.op]
        if problem.op == "cross_entropy":
            module, chooser = cross_entropy, "choose"
        else:
            module, chooser = norm, "choose_forward" if self.direction == "fwd" else "choose_backward"
        with nullcontext() if launch is None else patch.object(module, chooser, lambda *_: launch):
            if self.direction == "fwd":
                return plan_forward(op, problem, device, "triton", True)
            return plan_backward(op, problem, device, "triton", wanted(problem), frozenset(problem.public()))

    def tensors(self, problem: Companion, device: torch.device) -> Tensors:
        """Inputs of the plan, for a backward those that a forward leaves."""
        torch.manual_seed(0)
        made: Tensors = {}
        for name, described in problem.given:
            if name == "labels":
                made[name] = torch.randint(problem["logits"].shape[1], described.shape, device=device)
            elif name == "seed":
                made[name] = torch.tensor([5], device=device)
            else:
                made[name] = torch.randn(described.shape, device=device, dtype=TORCH_DTYPES[described.dtype])
        if self.direction == "fwd":
            return made
        op = OPS[problem.op]
        first = Bound(plan_forward(op, problem, device_of(device), "triton", True), made, device).run(dict(made))
        given = {name: first[name] for name in op.kept(problem, wanted(problem))}
        return given | {f"d{name}": torch.randn_like(first[name]) for name in problem.public()}

    def truth(self, problem: Companion, given: Tensors, plan: Plan) -> Tensors:
        """The outputs by the op's plain PyTorch form."""
        op, names = OPS[problem.op], tuple(b.name for b in plan.named("output") if b.over is None)
        return (op.host_forward if self.direction == "fwd" else op.host_backward)(problem, dict(given), names)


def wanted(problem: Companion) -> frozenset[str]:
    return frozenset(name for name, _ in problem.given if name in problem.differentiable)


def _cells() -> list[Cell]:
    n, entropy = norm.NormLaunch, cross_entropy.LossLaunch
    layer = "norm(x={r}x{n}:bf16,weight={n}:bf16,bias={n}:bf16)"
    rms = "norm(x={r}x{n}:bf16,weight={n}:bf16;kind='rms')"
    added = ("norm(x={r}x{n}:bf16,residual={r}x{n}:bf16,weight={n}:bf16,bias={n}:bf16,seed=1:int64;"
             "dropout_p=0.1;prenorm=True)")  # fmt: skip
    training = "reduction='mean';eager_gradient=True)"
    wide, widest, narrow = dict(r=8192, n=16384), dict(r=4096, n=65536), dict(r=32768, n=1024)
    forwards, longest = (n(1, 16384, 16), n(1, 16384, 32), n(1, 8192, 16)), (n(1, 32768, 32), n(1, 16384, 32))
    rows = (
        n(4, 1024, 4),
        n(2, 1024, 4),
        n(1, 1024, 2),
        n(1, 1024, 1),
        n(2, 1024, 1),
        n(2, 1024, 2),
        n(4, 1024, 2),
        n(8, 1024, 8),
    )
    strips = (n(1, 8192, 8, 1, 3), n(1, 8192, 16, 1, 3), n(1, 8192, 16, 1, 4, False), n(1, 4096, 8, 1, 4))
    whole = (n(1, 16384, 16, 1, 3, False), n(1, 16384, 16, 1, 2, False))
    short = (n(2, 1024, 4, 2, 4), n(4, 1024, 4, 2, 4), n(4, 1024, 4, 2, 3), n(2, 1024, 4, 4, 3), n(2, 1024, 4, 3, 4),
             n(2, 1024, 4, 2, 6), n(1, 1024, 2, 4, 4), n(1, 1024, 2, 4, 6), n(4, 1024, 8, 1, 4), n(4, 1024, 8, 1, 6),
             n(2, 1024, 8, 1, 6), n(4, 1024, 8, 2, 4))  # fmt: skip
    ways = {
        "8192x32768": (entropy(16384, 16), entropy(8192, 16), entropy(8192, 8), entropy(16384, 32, 1, 132)),
        "8192x50257": (entropy(16384, 32), entropy(8192, 16), entropy(8192, 8), entropy(16384, 32, 1, 132)),
        "8192x131072": (entropy(16384, 32, 1, 132), entropy(16384, 32, 2, 66), entropy(16384, 16), entropy(16384, 16, 4, 66)),
        "4096x262144": (entropy(16384, 32, 2, 66), entropy(16384, 32, 4, 33), entropy(16384, 16, 4, 66)),
    }
    return [
        *(Cell(kind.format(**wide), "fwd", forwards) for kind in (layer, rms, added)),
        *(Cell(kind.format(**widest), "fwd", longest) for kind in (layer, rms)),
        *(Cell(kind.format(**narrow), "fwd", rows) for kind in (layer, rms)),
        *(Cell(kind.format(**widest), "bwd", strips[:3]) for kind in (layer, rms)),
        *(Cell(kind.format(**wide), "bwd", (*strips, *whole)) for kind in (layer, rms)),
        Cell(added.format(**wide), "bwd", (*strips, whole[1])),
        *(Cell(kind.format(**narrow), "bwd", short) for kind in (layer, rms, added)),
        *(Cell(f"cross_entropy(logits={sizes}:bf16,labels={sizes.partition('x')[0]}:int64;{training}", "fwd", launches)
          for sizes, launches in ways.items()),
        *(Cell(f"cross_entropy(logits=8192x{classes}:bf16,labels=8192:int64;reduction='mean')", "fwd",
               (entropy(8192, 16), entropy(16384, 8), entropy(8192, 8))) for classes in (32768, 50257)),
        Cell("cross_entropy(logits=8192x32768:fp32,labels=8192:int64;reduction='mean')", "fwd",
             (entropy(8192, 16), entropy(8192, 8), entropy(4096, 8))),
        Cell(f"cross_entropy(logits=8192x32768:fp32,labels=8192:int64;{training}", "fwd",
             (entropy(16384, 32), entropy(8192, 32), entropy(8192, 16))),
    ]  # fmt: skip


CELLS = _cells()


def warm(i: int, j: int) -> None:
    """Run a launch on few rows: Triton keeps what it compiled on disk."""
    cell, device = CELLS[i], torch.device("cuda", 0)
    rows = re.search(r"=(\d+)x", cell.spelling)
    assert rows is not None
    problem = Companion.parse(re.sub(rf"={rows[1]}([x:])", rf"={FEW_ROWS}\1", cell.spelling))
    given = cell.tensors(problem, device)
    Bound(cell.plan(problem, device_of(device), cell.launches[j]), given, device).run(dict(given))
    torch.cuda.synchronize()


def measure(session: Session, cell: Cell) -> None:
    """Every launch of a cell, the fastest first, and the library's own."""
    problem, device = Companion.parse(cell.spelling), session.device
    given = cell.tensors(problem, device)
    chosen = cell.plan(problem, device_of(device), None)
    exact = {name: tensor.float() for name, tensor in cell.truth(problem, given, chosen).items()}
    bytes_in, bytes_out = sum(t.nbytes for t in given.values() if t.dim() == 2), 0
    timed: list[tuple[float, Any]] = []
    for launch in cell.launches:
        with session.record.attempt(problem=cell.spelling, direction=cell.direction, launch=str(launch)):
            bound = Bound(cell.plan(problem, device_of(device), launch), given, device)
            made = bound.run(dict(given))
            off = max(distance(made[name], exact[name]) for name in exact)
            if not off < TOLERANCE:
                raise ArithmeticError(f"off by {off:.1e}")
            bytes_out = sum(made[b.name].nbytes for b in chosen.named("output") if made[b.name].dim() == 2)
            del made
            session.ms(lambda bound=bound: bound.run(dict(given)), WARM_CALLS)  # clocks are low after a pause
            timed.append((session.ms(lambda bound=bound: bound.run(dict(given)), 8), launch))
    for ms, launch in sorted(timed, key=lambda pair: pair[0]):
        share = (bytes_in + bytes_out) / ms * 1e-6 / session.ceilings["copy"]
        print(f"{share:.3f} of copy {ms:.4f} ms {cell.direction} {launch} {cell.spelling}", flush=True)
        session.record.add(dict(problem=cell.spelling, direction=cell.direction, launch=str(launch), ms=round(ms, 4),
                                of_copy=round(share, 3)))  # fmt: skip


def compile_all(cells: list[Cell]) -> None:
    """What the compiler says of every launch, for an H100 that need not be there."""
    from flashtile.triton_glue.compile import compile_and_read

    for cell, launch in ((c, launch) for c in cells for launch in c.launches):
        plan = cell.plan(Companion.parse(cell.spelling), H100, launch)
        for call in plan.calls:
            if isinstance(call, KernelCall) and any(name == "T" for name, _ in call.constants):
                _, used = compile_and_read(call, plan, H100)
                fits = "fits" if used.shared_bytes <= H100.smem_bytes else "DOES NOT FIT"
                print(f"{fits}: {used.registers} registers, spills {used.spill_bytes} B, {used.shared_bytes} B shared, "
                      f"{cell.direction} {launch} {cell.spelling}", flush=True)  # fmt: skip


class Tune(Experiment[Any]):
    """A cell is one of CELLS."""

    output, budget_s = "benchmarks/results/companions-tune.csv", 120

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--match", default="")
        parser.add_argument("--dry", action="store_true", help="compile every launch, without a GPU")

    @classmethod
    def check(cls, chosen: argparse.Namespace, parser: argparse.ArgumentParser) -> int | None:
        chosen.cells = [cell for cell in CELLS if re.search(chosen.match, f"{cell.spelling} {cell.direction}")]
        if not chosen.dry:
            return None
        compile_all(chosen.cells)
        return 0

    def ahead(self) -> Ahead:
        return warm, [(CELLS.index(cell), j) for cell in self.cells() for j in range(len(cell.launches))]

    def begin(self, record: Record) -> AbstractContextManager[Any]:
        self.session = Session(self.device(), record)
        self.session.measure_ceilings()
        return nullcontext()

    def cells(self) -> list[Any]:
        return self.chosen.cells

    def name(self, cell: Any) -> str:
        return f"{cell.spelling} {cell.direction}"

    def place(self, cell: Any) -> dict[str, str]:
        return dict(problem=cell.spelling, direction=cell.direction, launch="all")

    def measure(self, cell: Any, record: Record, until: float) -> None:
        self.session.until = until
        measure(self.session, cell)


def main() -> int:
    return main_of(Tune)


if __name__ == "__main__":
    sys.exit(main())
