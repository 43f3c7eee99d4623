"""Every feature on a GPU: each pair of features against float64, what each costs, and what dropout keeps.

    python benchmarks/features.py [--sections pairs costs dropout tiles] [--backend hopper] [--cases 1100] [--numbers 160 ...]
                                  [--budget 420] [--only sink --rounds 60] [--without flex] [--output features.csv]

pairs: choices that cover every pair of tests/pairwise.py, each with many lengths, by the accuracy rule of tests/judge.py, in
parallel processes; with --backend hopper those of tests/pairwise_hopper.py, and a row of the section "refused" for each pair
that this backend does not run (chosen: triton's). costs: each feature beside the same call without it, and beside PyTorch's
own way to it, all in one rotation, compiled first in parallel processes. dropout: that the kernels keep what `dropout_mask`
says, bit for bit, and how often. tiles (not by default): candidates for each feature's passes, the tile in use first; those
whose results differ from its are failures and not timed; the fastest go into a file for `flashtile.use_tuning`, beside the
output. A section begins no case after its share of what is left of the budget. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import flashtile
from benchmarks.accuracy import check_all, prepared
from benchmarks.experiment import Experiment, main_of
from benchmarks.processes import compile_ahead
from benchmarks.record import Record, at_least_one, is_lost
from flashtile import Bias, Dropout, Options, Softcap, dropout_mask
from flashtile.kernels.portable.candidates import shared_bytes
from flashtile.kernels.portable.choose import choose, family
from flashtile.kernels.portable.tile import Launch, Pass
from flashtile.problem.attention import AttentionProblem
from flashtile.torch.execute.bound import device_of
from flashtile.tune import measure, random_inputs, write_table
from tests import pairwise_hopper
from tests.cases import Case
from tests.judge import breaches, expected, run
from tests.pairwise import TABLE, Meeting, cover

Row = dict[str, Any]
BATCH, SEQLEN, HEADS, HEAD_DIM = 2, 4096, 16, 128
ROUNDS, REPEATS = 15, 3


# -- pairs ------------------------------------------------------------------------------------------------------


def drawn_cases(numbers: Iterable[int]) -> list[Case]:
    """Cases of few kernels: choices that cover every pair once, again and again with other lengths."""
    base, refused = cover(TABLE, TABLE.pairs())
    assert not refused
    return [draw(number, base[number % len(base)]) for number in numbers]


def draw(number: int, choice: dict[str, str]) -> Case:
    dice = random.Random(number)
    seqlen_q = dice.choice((dice.randint(2, 90), dice.randint(91, 400)))
    lengths = {
        "equal": (seqlen_q, seqlen_q),
        "more-keys": (seqlen_q, seqlen_q + dice.randint(1, 200)),
        "more-queries": (seqlen_q + dice.randint(1, 200), seqlen_q),
        "one-query": (1, seqlen_q),
    }[choice["lengths"]]
    name = f"features-{number}-" + "-".join(choice.values())
    return TABLE.case_of(name, choice, seqlen_q=lengths[0], seqlen_k=lengths[1], batch=dice.randint(1, 3))


def checked(case: Case, backend: str) -> Row:
    """The row of a case, on this process's GPU."""
    tensors = case.tensors(torch.device("cuda", 0))
    spelled = prepared(case, tensors, backend)[0].problem.spell()
    failure = "; ".join(breaches(case, run(backend, case, tensors), *expected(case, tensors)))
    return {"backend": backend, "name": case.name, "backward": case.backward, "failure": failure, "problem": spelled}


def checked_hopper(case: pairwise_hopper.HopperCase, backend: str) -> Row:
    """The same of what Hopper returns for a case: forwards alone too, and out without lse."""
    tensors = case.tensors(torch.device("cuda", 0))
    problem = pairwise_hopper.problem_of(case)
    result, (truth, plain) = pairwise_hopper.results(case, tensors), expected(case, tensors)
    failure = "; ".join(breaches(case, result, {name: truth[name] for name in result}, plain))
    backward = ("deterministic" if case.deterministic else case.backward) if case.gradients else "none"
    return {"backend": backend, "name": case.name, "backward": backward, "failure": failure, "problem": problem.spell()}


def refused(pairs: dict[Meeting, str], what: str) -> Iterator[Row]:
    """A row for each pair of features that Hopper refuses."""
    for pair, reasons in sorted(pairs.items(), key=lambda item: sorted(item[0])):
        name = ", ".join(f"{axis} {value}" for axis, value in sorted(pair))
        print(f"REFUSED {name} ({what}): {reasons}", flush=True)
        yield {"section": "refused", "backend": "hopper", "name": name, "failure": "", "note": what, "refused": reasons}


def pairs(numbers: Iterable[int], until: float, record: Record, backend: str) -> Iterator[Row]:
    """A row per case; of Hopper one per pair that it refuses, too."""
    if backend == "hopper":
        rows = check_all(checked_hopper, pairwise_hopper.cases(numbers), backend, record, until)
    else:
        rows = check_all(checked, drawn_cases(numbers), backend, record, until)
    for row in rows:
        yield {"section": "pairs", **row}
    if backend == "hopper":
        covered = pairwise_hopper.covered()
        yield from refused(covered.refused, "forward or backward")
        yield from refused(covered.refused_backward, "backward; forwards alone are checked")


# -- costs ------------------------------------------------------------------------------------------------------


def contestants(
    device: torch.device, causal: bool, measured: str | None, flex: bool
) -> dict[str, tuple[Callable[[], Any], list[torch.Tensor]]]:
    """What is timed, by name: the call, and the leaves whose gradients its backward forms."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)

    q, k, v = (normal(BATCH, SEQLEN, HEADS, HEAD_DIM).requires_grad_() for _ in range(3))
    bias, learned = normal(1, HEADS, SEQLEN, SEQLEN), normal(1, HEADS, SEQLEN, SEQLEN).requires_grad_()
    keys, own = normal(BATCH, 1, 1, SEQLEN).requires_grad_(), normal(BATCH, HEADS, SEQLEN, SEQLEN).requires_grad_()
    sink = normal(HEADS).float().requires_grad_()
    slopes = torch.rand(HEADS, device=device, generator=generator).requires_grad_()
    leaves, made = [q, k, v], {}

    def ours(name: str, backend: str | None = measured, more: tuple[torch.Tensor, ...] = (), **given: Any) -> None:
        options = Options(backend=backend)
        made[name] = (lambda: flashtile.attention(q, k, v, causal=causal, options=options, **given), [*leaves, *more])

    ours("plain")
    ours("plain, any backend", None)
    ours("softcap", score=(Softcap(30.0),))
    ours("alibi, gradient", more=(slopes,), score=(flashtile.Alibi(slopes),))
    ours("sink", more=(sink,), sink=sink)
    ours("dropout", dropout=Dropout(0.1))
    ours("bias", score=(Bias(bias),))
    ours("bias, gradient", more=(learned,), score=(Bias(learned),))
    ours("bias of every score, gradient", more=(own,), score=(Bias(own),))
    ours("bias of keys, gradient", more=(keys,), score=(Bias(keys),))

    heads_first = [t.transpose(1, 2) for t in leaves]
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def theirs(name: str, call: Callable[[], Any], *more: torch.Tensor) -> None:
        made[name] = (call, [*leaves, *more])

    theirs("sdpa plain", lambda: sdpa(*heads_first, is_causal=causal))
    theirs("sdpa dropout", lambda: sdpa(*heads_first, is_causal=causal, dropout_p=0.1))
    if not causal:
        theirs("sdpa bias", lambda: sdpa(*heads_first, attn_mask=bias.expand(BATCH, -1, -1, -1)))
        theirs("sdpa bias, gradient", lambda: sdpa(*heads_first, attn_mask=learned.expand(BATCH, -1, -1, -1)), learned)
    try:
        for name, call, more in flex_contestants(heads_first, causal, bias, learned, sink, device) if flex else ():
            theirs(name, call, *more)
    except Exception as error:  # ours are measured all the same
        print(f"OUT flex: {type(error).__name__}: {error}"[:300], flush=True)
    return made


def flex_contestants(
    heads_first: list[torch.Tensor], causal: bool, bias: torch.Tensor, learned: torch.Tensor, sink: torch.Tensor,
    device: torch.device,
) -> Iterator[tuple[str, Callable[[], Any], tuple[torch.Tensor, ...]]]:  # fmt: skip
    """FlexAttention's ways: score_mod for softcap and bias, its lse for sinks."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.recompile_limit = 64  # of one function: beyond the limit it would run eagerly
    flex = torch.compile(flex_attention, dynamic=False)
    mask = None
    if causal:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, SEQLEN, SEQLEN, device=str(device))

    def with_sink() -> torch.Tensor:
        out, lse = flex(*heads_first, block_mask=mask, return_lse=True)
        return out * torch.sigmoid(lse - sink[:, None])[..., None].to(out.dtype)

    def capped(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return 30.0 * torch.tanh(score / 30.0)

    yield "flex plain", lambda: flex(*heads_first, block_mask=mask), ()
    yield "flex softcap", lambda: flex(*heads_first, score_mod=capped, block_mask=mask), ()
    yield "flex sink", with_sink, (sink,)
    for name, tensor in (("flex bias", bias), ("flex bias, gradient", learned)):

        def biased(score: Any, b: Any, h: Any, i: Any, j: Any, tensor: torch.Tensor = tensor) -> Any:
            return score + tensor[0, h, i, j]

        more = (tensor,) if tensor.requires_grad else ()
        yield name, lambda mod=biased: flex(*heads_first, score_mod=mod, block_mask=mask), more


def elapsed_ms(function: Callable[[], Any]) -> float:
    """Time of one call on the device, of REPEATS in a row; one more goes before, lest a launch of the host's be waited for."""
    function()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(REPEATS):
        function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / REPEATS


def both(forward: Callable[[], Any], leaves: list[torch.Tensor]) -> None:
    """A forward and its backward."""
    out = forward()
    torch.autograd.grad(out, leaves, torch.ones_like(out))


def warm(name: str, causal: bool, measured: str | None) -> None:
    """Run a contestant once, which compiles it."""
    forward, leaves = contestants(torch.device("cuda", 0), causal, measured, name.startswith("flex"))[name]
    with torch.no_grad():
        forward()
    both(forward, leaves)
    torch.cuda.synchronize()


def costs(
    until: float, record: Record, measured: str | None, flex: bool, only: Sequence[str] = (), rounds: int = ROUNDS
) -> Iterator[Row]:
    """A row per contestant: milliseconds forward and forward + backward (medians), and the ratio to the plain call.

    only: these and plain calls, of all if empty.
    """
    device, dice = torch.device("cuda", 0), random.Random(0)
    names = list(contestants(device, False, measured, flex))
    if unknown := set(only).difference(names):
        raise ValueError(f"only is {', '.join(sorted(unknown))}; costs are those of {', '.join(names)}.")
    asked = [n for n in names if not only or n in only or "plain" in n]
    masks = {causal: [n for n in asked if not (causal and n.startswith("sdpa bias"))] for causal in (False, True)}
    compile_ahead(
        warm, [(name, causal, measured) for causal, named in masks.items() for name in named], until - time.monotonic()
    )
    for causal in masks:
        share = time.monotonic() + (until - time.monotonic()) / (1 if causal else 2)
        calls: dict[str, tuple[Callable[[], Any], list[torch.Tensor]]] = {}
        made = contestants(device, causal, measured, flex)
        for name, (forward, leaves) in ((n, made[n]) for n in masks[causal] if n in made):
            if time.monotonic() > until or record.lost:
                record.leave(f"costs {name}, causal {causal}")
                continue
            try:
                both(forward, leaves)
                torch.cuda.synchronize()
            except Exception as error:  # a peer that cannot is a row that says so
                failure = f"{type(error).__name__}: {error}"[:200]
                record.lost |= is_lost(error)
                print("FAILED", name, failure, flush=True)
                yield {"section": "costs", "name": name, "causal": causal, "failure": "" if is_peer(name) else failure,
                       "note": failure}  # fmt: skip
                continue
            calls[name] = (forward, leaves)
        times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in calls}
        for turn in range(rounds):
            if time.monotonic() > share and turn:
                break
            for name in dice.sample(list(calls), len(calls)):  # what ran before a call decides how fast the card is
                forward, leaves = calls[name]
                with torch.no_grad():
                    times[name][0].append(elapsed_ms(forward))
                times[name][1].append(elapsed_ms(lambda f=forward, ls=leaves: both(f, ls)))
        for name, (forward_ms, both_ms) in times.items():
            base = "plain" if not is_peer(name) else f"{name.split()[0]} plain"
            row: Row = {"section": "costs", "name": name, "causal": causal, "failure": "", "forward_ms": median(forward_ms),
                        "both_ms": median(both_ms)}  # fmt: skip
            if base in times:
                row["forward_ratio"] = median(forward_ms) / median(times[base][0])
                row["both_ratio"] = median(both_ms) / median(times[base][1])
            print(*(f"{value:.3f}" if isinstance(value, float) else value for value in row.values()), flush=True)
            yield row


def is_peer(name: str) -> bool:
    return name.startswith(("sdpa", "flex"))


# -- tiles ------------------------------------------------------------------------------------------------------

# Features by name: what they add to the spelling of a problem, and the passes that it changes.
SCORES = f"{HEADS}x{SEQLEN}x{SEQLEN}:bf16"
TILED: dict[str, tuple[str, tuple[Pass, ...]]] = {
    "softcap": ("score=softcap(30.0)", ("keys", "queries")),
    "alibi, gradient": (f"score=alibi({BATCH}x{HEADS}:fp32:grad)", ("keys", "queries")),
    "dropout": ("dropout=0.1", ("forward", "keys", "queries")),
    "bias, gradient": (f"score=bias(1x{SCORES}:grad)", ("forward", "keys", "queries", "pairs")),
    "bias of keys, gradient": (f"score=bias({BATCH}x1x1x{SEQLEN}:bf16:grad)", ("forward", "keys", "queries", "pairs")),
}
# For head_dim 128: what compiles for sm90 with few spills in the loop (`triton_glue/compile.py`, Triton 3.6.0).
CANDIDATES: dict[Pass, tuple[Launch, ...]] = {
    "forward": (
        Launch(64, 64, 4, 2, 8), Launch(64, 64, 4, 3, 8), Launch(64, 32, 4, 3, 8), Launch(128, 64, 8, 2, 8),
        Launch(128, 64, 8, 3, 8), Launch(128, 128, 8, 2, 8), Launch(64, 64, 4, 2, 1), Launch(128, 128, 8, 2, 1),
    ),
    "keys": (
        Launch(32, 64, 4, 2, 8, held=1), Launch(32, 64, 4, 3, 8, held=1), Launch(32, 64, 4, 2, 8), Launch(32, 128, 8, 2, 8),
        Launch(32, 128, 8, 3, 8, held=1), Launch(64, 128, 8, 2, 8), Launch(32, 128, 8, 2, 1),
    ),
    "queries": (
        Launch(64, 64, 4, 2, 8, held=1), Launch(64, 64, 4, 3, 8, held=1), Launch(64, 64, 4, 2, 8),
        Launch(64, 32, 4, 3, 8, held=1), Launch(128, 64, 8, 2, 8, held=1), Launch(128, 64, 8, 2, 8),
        Launch(64, 64, 4, 2, 1, held=1),
    ),
    "pairs": (
        Launch(64, 64, 4, 1), Launch(64, 64, 4, 2), Launch(64, 128, 8, 1), Launch(64, 128, 8, 2), Launch(128, 64, 8, 1),
        Launch(128, 64, 8, 2), Launch(128, 128, 8, 1),
    ),
}  # fmt: skip


def tiles(until: float, device: torch.device, table: Path) -> Iterator[Row]:
    """A row per candidate: milliseconds of its pass alone; `table` receives the fastest of each family."""
    place, fastest = device_of(device), dict[str, Any]()
    for causal in (False, True):
        shape = f"q={BATCH}x{SEQLEN}x{HEADS}x{HEAD_DIM},kv={SEQLEN}x{HEADS}x{HEAD_DIM},bf16" + ",band=:0" * causal
        for name, (tail, passes) in TILED.items():
            problem = AttentionProblem.parse(f"attention({shape},{tail})")
            tensors = random_inputs(problem, device)
            for which in passes:
                if time.monotonic() > until:
                    print("tiles: time is up", flush=True)
                    return
                now = choose(problem, place, which)
                launches = [now, *(launch for launch in CANDIDATES[which] if launch != now)]
                fitting = [launch for launch in launches if shared_bytes(problem, launch, which) <= place.smem_bytes]
                measured = measure(problem, place, device, which, tensors, fitting)
                alive = [m for m in measured if not m.failed]
                for m in sorted(measured, key=lambda m: m.ms):
                    note = f"{which} {m.launch.spell()}" + " (in use)" * (m.launch == now)
                    wrong = m.failed if m.failed.startswith("wrong") or m.launch == now else ""
                    print(f"{name} {'causal' if causal else 'full'} {note}: {m.failed or f'{m.ms:.4f} ms'}", flush=True)
                    yield {"section": "tiles", "name": name, "causal": causal, "failure": wrong, "note": note,
                           "pass_ms": m.ms if m in alive else None}  # fmt: skip
                if alive:
                    best = min(alive, key=lambda m: m.ms)
                    fastest[family(problem, which)] = {
                        **asdict(best.launch),
                        "ms": round(best.ms, 4),
                        "problem": problem.spell(),
                    }
                    write_table(table, fastest, place)
            del tensors


# -- dropout ----------------------------------------------------------------------------------------------------


def dropout(device: torch.device) -> Iterator[Row]:
    """Rows on the mask that a forward and each backward applied, read from one-hot values and gradients."""
    batch, heads, length, width = 2, 4, 512, 128
    chance = 0.3
    q = torch.zeros(batch, length, heads, 64, device=device, dtype=torch.bfloat16)
    seed = torch.randint(-(2**63), 2**63 - 1, (2,), device=device)
    told = dropout_mask(Dropout(chance, seed), batch, heads, length, length, device)
    for backend, variant in (("triton", "split"), ("triton", "fused"), (None, "auto")):
        options = Options(backend=backend, backward=variant)
        wrong_forward = wrong_backward = 0
        for start in range(0, length, width):
            here = torch.arange(start, start + width, device=device)
            hot = torch.zeros(batch, length, heads, width, device=device, dtype=torch.bfloat16)
            hot[:, here, :, here - start] = 1.0
            v = hot.clone().requires_grad_()
            out = flashtile.attention(q, q, v, dropout=Dropout(chance, seed), options=options)
            (dv,) = torch.autograd.grad(out, v, hot)
            wrong_forward += int(((out > 0) != told.transpose(1, 2)[..., here]).sum())
            wrong_backward += int(((dv > 0) != told[:, :, here].permute(0, 3, 1, 2)).sum())
        failure = "" if wrong_forward == wrong_backward == 0 else "the mask differs from dropout_mask"
        yield {"section": "dropout", "name": f"bits {backend} {variant}", "failure": failure,
               "note": f"{wrong_forward} and {wrong_backward} of {told.numel()} differ"}  # fmt: skip
    for chance in (0.001, 0.1, 0.5):
        told = dropout_mask(Dropout(chance, seed), 1, 8, 4096, 4096, device)
        sigmas = (told.double().mean().item() - (1 - chance)) / math.sqrt(chance * (1 - chance) / told.numel())
        yield {"section": "dropout", "name": f"rate {chance}", "failure": "" if abs(sigmas) < 5 else "beyond 5 sigma",
               "note": f"{sigmas:.2f} sigma"}  # fmt: skip


class Features(Experiment[str]):
    """A cell is a section."""

    output, budget_s = "bench-output/features.csv", 420

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        usual = ["dropout", "costs", "pairs"]
        parser.add_argument("--sections", nargs="+", choices=(*usual, "tiles"), default=usual)
        parser.add_argument("--cases", type=at_least_one, default=1100)
        parser.add_argument("--numbers", type=int, nargs="+", help="the pairs of these numbers alone, which are in their names")
        parser.add_argument(
            "--backend",
            choices=("triton", "hopper", "chosen"),
            default="triton",
            help="whose costs are measured, and whose pairs",
        )
        parser.add_argument(
            "--only", nargs="+", default=[], metavar="NAME", help="the costs of these alone, beside plain calls"
        )
        parser.add_argument("--rounds", type=at_least_one, default=ROUNDS, help=f"how often each cost is timed; {ROUNDS}")
        parser.add_argument("--without", choices=("flex",), help="a peer that takes long to compile")

    def cells(self) -> list[str]:
        return self.chosen.sections

    def place(self, cell: str) -> dict[str, str]:
        return dict(section=cell, name="the section")

    def measure(self, cell: str, record: Record, until: float) -> None:
        chosen = self.chosen
        measured = None if chosen.backend == "chosen" else chosen.backend
        sections: dict[str, Callable[[], Iterator[Row]]] = {
            "dropout": lambda: dropout(self.device()),
            "costs": lambda: costs(until, record, measured, not chosen.without, chosen.only, chosen.rounds),
            "pairs": lambda: pairs(chosen.numbers or range(chosen.cases), until, record, measured or "triton"),
            "tiles": lambda: tiles(until, self.device(), chosen.output.with_suffix(".json")),
        }
        for row in sections[cell]():
            record.add(row)


def main() -> int:
    return main_of(Features)


if __name__ == "__main__":
    sys.exit(main())
