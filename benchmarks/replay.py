"""Small problems under CUDA graph replay: ours beside the best of the field, forward alone and forward with backward.

    python benchmarks/replay.py [--without flex ...] [--budget SECONDS] [--output bench-output/replay.csv] [--commit HASH]

Ours is `flashtile.attention` without options. A graph holds several calls one after another, and its replays take turns with
everybody else's. What is timed is right: eagerly, and again after a replay on inputs that changed in place since the capture.
`of_best` is the best peer's median over ours, above 1 where ours is faster. What a peer refuses, or what cannot be captured of
it, is a row with a `note`; ours must run, and a wrong result fails, whosever it is.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.experiment import Ahead, Experiment, main_of
from benchmarks.record import Record, is_lost
from flashtile.bench.cases import BF16, FP16, Direction, case, suite_named
from flashtile.bench.child import Run, Session
from flashtile.bench.providers import PEERS, Attend, Provider, first_line
from flashtile.bench.rotation import rotate
from flashtile.bench.yardstick import Yardstick, tolerance
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.mask import CAUSAL
from flashtile.torch.api.attention import attention

CALLS = {"forward": 20, "step": 10}  # per graph: to begin a replay takes microseconds, which so many calls share
WARM_CALLS = 3  # on the capturing stream, as PyTorch's notes on CUDA graphs ask for
ROUNDS = 30
LEAST_S = 5.0  # for a pass's rounds, which take a second or two, however long its problem's share went into compiling
SEED = 1  # of the inputs that a replay finds; `Session.open` takes the spelling's checksum for the first ones
DIRECTIONS: dict[str, Direction] = {"forward": "forward", "step": "backward"}
RESULTS = {"forward": ("out",), "step": ("dq", "dk", "dv")}
BESIDE = ("sdpa/cudnn", "sdpa/flash", "flex", "fa4")
PROBLEMS: tuple[AttentionProblem, ...] = (
    *suite_named("host").cases,
    *suite_named("cudnn-cross").cases,
    *(c for c in suite_named("llmc").cases if c.dtype is FP16 and c.seqlen_q == 1024),
    *(case(1, 16, 1024, head_dim, BF16, causal) for head_dim in (64, 128) for causal in (True, False)),
    *(case(1, 16, seqlen, head_dim, BF16, True) for seqlen in (2048, 4096) for head_dim in (64, 128)),
)
Call = Callable[[], tuple[torch.Tensor, ...]]
Row = dict[str, Any]


def _ours(problem: AttentionProblem, device: torch.device) -> Attend:
    causal = problem.mask == CAUSAL
    return lambda q, k, v: attention(q, k, v, causal=causal)


OURS = Provider("flashtile", _ours, compiles=True)


@dataclass(frozen=True)
class Captured:
    """A pass of a provider as a graph; a replay writes `results`, which are laid out as the provider lays them."""

    run: Run
    graph: Any
    results: tuple[torch.Tensor, ...]


def session_of(without: Sequence[str] = ()) -> Session:
    """A session of the bench with ours and the peers that are beside it."""
    session = Session(None)
    peers = [peer for peer in PEERS if peer.name in BESIDE and peer.name not in without]
    session.providers = {provider.name: provider for provider in (OURS, *peers)}
    return session


def compile_one(spelling: str, name: str) -> None:
    """In a process of its own: leave a provider's kernels in the caches on disk."""
    session_of().compile(spelling, True, [name])


def captured(call: Call, calls: int, side: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """A graph of calls one after another, and what the last of them returned. `side` is the current stream."""
    for _ in range(WARM_CALLS):
        call()
    torch.cuda.synchronize()
    graph, results = torch.cuda.CUDAGraph(), ()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(calls):
            results = call()
    return graph, results


def call_of(run: Run, what: str) -> Call:
    """A pass as a call; for a step after `Run.keep_graph`, whose graph is given up."""
    run.out = None
    return run.step if what == "step" else lambda: (run.forward(),)


def begin(session: Session, name: str, what: str, side: Any, record: Record) -> Captured | None:
    """A provider's pass, found right and captured; None after a row that says why not."""
    assert session.problem is not None
    cell = {"problem": session.problem.spell(), "pass": what, "provider": name}
    reply = session.prepare(name, DIRECTIONS[what])
    if reply["status"] != "ok":
        leave(record, cell, f"{reply['status']}: {reply['reason']}", reply["status"] == "wrong")
        return None
    run = session.runs[name]
    try:
        with run.provider.context():
            return Captured(run, *captured(call_of(run, what), CALLS[what], side))
    except Exception as error:  # the end of a capture that has failed raises once more, over what it was that failed
        within = f", after {first_line(error.__context__)}" if error.__context__ is not None else ""
        text = f"is not captured: {type(error).__name__}: {first_line(error)}{within}"
        if is_lost(error):
            raise
        leave(record, cell, text)
        return None


def leave(record: Record, cell: Row, text: str, wrong: bool = False) -> None:
    """A row without times: failed where it is ours, or wrong; else with a note."""
    if wrong or cell["provider"] == OURS.name:
        record.fail(text, **cell)
    else:
        print(*cell.values(), text, flush=True)
        record.add({**cell, "note": text})


def check(problem: AttentionProblem, yardstick: Yardstick, what: str, made: Captured) -> tuple[float, str]:
    """The largest error after a replay, and why the results are wrong ("" if they are right)."""
    for tensor in made.results:
        tensor.fill_(math.nan)  # what the replay does not write shows
    made.graph.replay()
    torch.cuda.synchronize()
    limit = tolerance(problem)[0 if what == "forward" else 1]
    named = zip(RESULTS[what], made.results, strict=True)
    errors = {name: yardstick.error(name, made.run.turn(tensor)) for name, tensor in named}
    wrong = [f"{name} is off by {error:.1e}, limit {limit:.0e}" for name, error in errors.items() if not error <= limit]
    return max(errors.values()), "; ".join(wrong)


def replay_ms(graph: Any) -> float:
    """Milliseconds of a replay that follows another one, behind which its own launch is hidden."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def beside(medians: Mapping[str, float]) -> Row:
    """The best peer and its time over ours; nothing where either is missing."""
    peers = {name: us for name, us in medians.items() if name != OURS.name}
    if not peers or OURS.name not in medians:
        return {}
    best = min(peers, key=peers.__getitem__)
    return {"best": best, "of_best": round(peers[best] / medians[OURS.name], 3)}


def time_pass(entrants: Mapping[str, Captured], errors: Mapping[str, float], cell: Row, record: Record, until: float) -> None:
    """The rows of one problem and pass, of replays in rotation."""
    until = max(until, time.monotonic() + LEAST_S)
    ms = rotate(list(entrants), ROUNDS, lambda name: replay_ms(entrants[name].graph), lambda: time.monotonic() < until)
    us = {name: [taken / CALLS[cell["pass"]] * 1e3 for taken in some] for name, some in ms.items()}
    medians = {name: statistics.median(some) for name, some in us.items()}
    for name, middle in medians.items():
        row: Row = {**cell, "provider": name, "replay_us": round(middle, 3), "least_us": round(min(us[name]), 3)}
        row |= {"error": f"{errors[name]:.2e}", **(beside(medians) if name == OURS.name else {})}
        ratio = f", {row['best']} takes {row['of_best']:.3f} x as long" if "best" in row else ""
        print(*cell.values(), f"{name} {middle:.2f} us (least {min(us[name]):.2f}){ratio}", flush=True)
        record.add(row)


def measure(session: Session, problem: AttentionProblem, side: Any, record: Record, until: float) -> None:
    """The rows of one problem."""
    session.open(problem.spell(), True)
    cells = [(what, name) for what in CALLS for name in session.providers]
    made = {(what, name): begin(session, name, what, side, record) for what, name in cells}
    generator = torch.Generator(session.device).manual_seed(SEED)
    for tensor in session.inputs.values():
        tensor.normal_(generator=generator)
    yardstick = Yardstick(problem, session.inputs)
    for what in CALLS:
        entrants, errors = dict[str, Captured](), dict[str, float]()
        cell = {"problem": problem.spell(), "pass": what}
        for name in session.providers:
            found = made[what, name]
            if found is None:
                continue
            errors[name], wrong = check(problem, yardstick, what, found)
            if wrong:
                leave(record, {**cell, "provider": name}, f"wrong after a replay: {wrong}", True)
            else:
                entrants[name] = found
        time_pass(entrants, errors, cell, record, until)


def summary(rows: Sequence[Row]) -> list[str]:
    """A line per pass: how the best peers' times are to ours."""
    lines: list[str] = []
    for what in CALLS:
        ratios = {row["problem"]: row["of_best"] for row in rows if row.get("pass") == what and "of_best" in row}
        if ratios:
            least = min(ratios, key=ratios.__getitem__)
            mean = statistics.geometric_mean(ratios.values())
            lines.append(f"{what}: of_best {mean:.3f} over {len(ratios)} problems, least {ratios[least]:.3f} of {least}")
    return lines


class Replay(Experiment[AttentionProblem]):
    """A cell is a problem."""

    output, budget_s, ahead_share = "bench-output/replay.csv", 480, 0.5

    def __init__(self, chosen: argparse.Namespace):
        super().__init__(chosen)
        self.session = session_of(chosen.without)
        self.side = torch.cuda.Stream(self.session.device)

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--without", nargs="+", choices=BESIDE, default=[], help="peers to leave out; flex compiles for long"
        )

    def device(self) -> torch.device:
        return self.session.device

    def about(self) -> Row:
        return {**{f"{what}s": calls for what, calls in CALLS.items()}, "rounds": ROUNDS}

    def ahead(self) -> Ahead:
        compiling = [name for name, provider in self.session.providers.items() if provider.compiles]
        return compile_one, [(problem.spell(), name) for name in compiling for problem in PROBLEMS]

    def begin(self, record: Record) -> AbstractContextManager[Any]:
        """One stream for everything, tensors and checks too: who works on another one is found out."""
        return torch.cuda.stream(self.side)

    def cells(self) -> Sequence[AttentionProblem]:
        return PROBLEMS

    def name(self, cell: AttentionProblem) -> str:
        return cell.spell()

    def place(self, cell: AttentionProblem) -> Row:
        return dict(problem=cell.spell())

    def measure(self, cell: AttentionProblem, record: Record, until: float) -> None:
        measure(self.session, cell, self.side, record, until)

    def report(self, record: Record) -> None:
        print(*summary(record.rows), sep="\n", flush=True)


def main() -> int:
    return main_of(Replay)


if __name__ == "__main__":
    sys.exit(main())
