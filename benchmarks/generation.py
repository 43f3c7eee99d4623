"""What generation takes beside its kernels: the host's time of a cached call, transformers' tokens a second, bits of repeats.

    python benchmarks/generation.py [--sections repeats host generate] [--batch 1 16] [--keys 1024 8192] [--new 48]
        [--compile] [--implementations flashtile sdpa nothing] [--budget SECONDS] [--output bench-output/generation.csv]
        [--commit HASH]

repeats: of 1,000 calls into memory that was filled with NaN, those that made other bits than the first one; one is enough to
fail. host: microseconds of an eager call over a cache of 1,024 keys, queued and not waited for, beside SDPA's, and of replaying
a graph of such calls, by call. generate: a Llama of 1B's shape with random weights and a static cache of --keys places. A row
has the median of its decoding steps, without prompt and warm-up, and `of_sdpa`, the tokens a second over those of transformers'
own "sdpa". Both models have the same weights, and a step's logits must agree before they are timed. Each is in a process of its
own, where it warms up beside the others; then they take turns. --compile: also rows of steps that `generate` compiled. The
implementation "nothing" attends to nothing, in no time: what it gains on sdpa is the most that any attention can.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import processes
from benchmarks.cached_cells import Caches
from benchmarks.cached_cells import Cell as Cached
from benchmarks.experiment import Experiment, main_of
from benchmarks.host import host_us
from benchmarks.processes import Failure, Worker
from benchmarks.record import Record, at_least_one
from benchmarks.replay import captured
from flashtile import append_to_cache, attention, attention_cached
from flashtile.compat.flash_attn_cache import flash_attn_with_kvcache
from flashtile.problem.options import Options
from flashtile.torch.cache import operator

SECTIONS = ("repeats", "host", "generate")
SDPA, NOTHING = "sdpa", "nothing"
IMPLEMENTATIONS = ("flashtile", SDPA, NOTHING)
# Llama 3.2 1B
SHAPE: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "tie_word_embeddings": True,
}  # fmt: skip
WARM_STEPS = 4
TURNS = 2
LOGITS = 5e-2  # of their norm, by which those of two implementations may differ: 16 layers of bf16
TOLERANCE = 8e-3  # of the largest value: 2 ulp of bf16
REPEATS = 1000
HOST_CELL, PAGE = Cached("llama3-8b", 1, 1024, 1), 64
CALLS, REPLAYS, ROUNDS, IN_A_GRAPH = 200, 4, 15, 32
# Of repeats: a cell, keys of a page, what a cache holds, and what calls are given.
REPEATED: dict[str, tuple[Cached, int, str, dict[str, Any]]] = {
    "parts of keys": (Cached("llama3-8b", 1, 8192, 1), 0, "bf16", {}),
    "parts of keys, portable": (Cached("llama3-8b", 1, 8192, 1), 0, "bf16", {"options": Options(backend="triton")}),
    "pages of 16": (Cached("llama3-8b", 64, 1024, 1), 16, "bf16", {}),
    "four queries, lognormal": (Cached("llama3-70b-tp8", 16, 8192, 4, "lognormal"), 64, "bf16", {}),
    "a window": (Cached("gemma3-27b", 16, 4096, 1, "equal", 1024), 64, "bf16", {}),
    "e4m3": (Cached("llama3-8b", 8, 8192, 1), 16, "e4m3", {}),
    "latent": (Cached("mla-16", 4, 4096, 1), 64, "bf16", {}),
}
Call = Callable[[], object]


@dataclass(frozen=True)
class Cell:
    """A section and what it is about: a batch and keys of `generate`, or the name of a call that is repeated."""

    section: str
    name: str = ""
    batch: int = 0
    keys: int = 0


def judged(caches: Caches, made: tuple[torch.Tensor, ...], table: torch.Tensor | None, page: int, kind: str) -> float:
    """The error of a call over caches; ArithmeticError if it is wrong."""
    error = caches.error(made, table, page, kind)
    if not error <= TOLERANCE:
        raise ArithmeticError(f"off by {error:.1e} of the largest value, limit {TOLERANCE:.0e}")
    return error


def repeat(name: str, device: torch.device) -> dict[str, Any]:
    """What 1,000 calls made that differs from the first one."""
    cell, page, kind, given = REPEATED[name]
    caches = Caches(cell, 1, device)
    if kind != "bf16":
        caches.store(kind)
    call, table = caches.ours(page, kind, given)
    first = call()[0].clone()
    error, other = judged(caches, (first,), table, page, kind), torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(REPEATS):
        torch.full_like(first, math.nan)  # given back at once: what comes next is made in its place
        other += (call()[0].view(torch.int16) != first.view(torch.int16)).any()
    if other.item():
        raise ArithmeticError(f"{other.item()} of {REPEATS} calls made other bits than the first one")
    return {**cell.row(), "page": page, "cache": kind, "calls": REPEATS, "other_bits": 0, "error": f"{error:.1e}"}


def host_calls(caches: Caches) -> dict[str, Call]:
    """Eager calls of one token over the same keys, each found right; each writes what is there already, if it writes."""
    q, k, v, used, table = caches.q[0], caches.k[:1], caches.v[:1], caches.used, caches.table(PAGE)[0]
    pages = [pool.view(-1, PAGE, *pool.shape[2:]) for pool in (caches.k, caches.v)]
    new, before = (k[:, -1:].clone(), v[:, -1:].clone()), used - 1
    theirs = [t.transpose(1, 2) for t in (q, k, v)]

    def attend_theirs() -> torch.Tensor:
        return F.scaled_dot_product_attention(*theirs, enable_gqa=True)

    def append_theirs() -> torch.Tensor:
        k[:, -1:] = new[0]
        v[:, -1:] = new[1]
        return attend_theirs()

    def append() -> torch.Tensor:
        append_to_cache(*new, k, v, seqused_k=before)
        return attention_cached(q, k, v, seqused_k=used)

    calls: dict[str, Call] = {
        "flashtile/contiguous": lambda: attention_cached(q, k, v, seqused_k=used),
        "flashtile/64": lambda: attention_cached(q, *pages, table, seqused_k=used),
        "flashtile/contiguous with append": lambda: attention_cached(q, k, v, seqused_k=before, append=new, causal=True),
        "flashtile/append_to_cache, then contiguous": append,
        "flashtile/flash_attn_with_kvcache": lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=used, causal=True),
        "flashtile/without a cache": lambda: attention(q, k, v),
        "sdpa/flash": attend_theirs,
        "sdpa/flash with append": append_theirs,
    }
    for name, call in calls.items():
        made: Any = call()
        made = made.transpose(1, 2) if name.startswith(SDPA) else made
        judged(caches, (made,), table[None] if name == "flashtile/64" else None, PAGE, "bf16")
    return calls


def host(device: torch.device, side: Any, record: Record) -> None:
    """Rows of the host's time, on the default stream; a graph is captured on the other one."""
    caches = Caches(HOST_CELL, 1, device)
    times: dict[str, list[float]] = {}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        calls = host_calls(caches)
        one = calls["flashtile/contiguous"]
        with torch.cuda.stream(side):
            graph = captured(lambda: tuple(one() for _ in range(IN_A_GRAPH))[-1], 1, side)[0]  # pyright: ignore[reportArgumentType]
        for turn in range(ROUNDS + 1):
            for name in list(calls) if turn % 2 else reversed(list(calls)):
                times.setdefault(name, []).append(host_us(calls[name], calls=CALLS))
            times.setdefault("flashtile/contiguous in a graph", []).append(host_us(graph.replay, calls=REPLAYS) / IN_A_GRAPH)
    beside = statistics.median(times["sdpa/flash"][1:])
    for name, taken in times.items():
        middle, least = statistics.median(taken[1:]), min(taken[1:])
        print(f"{name} {middle:.2f} us of the host (least {least:.2f}), {middle / beside:.2f} of sdpa's", flush=True)
        record.add({
            "section": "host", **HOST_CELL.row(), "provider": name, "host_us": round(middle, 2), "least_us": round(least, 2),
            "of_sdpa_us": round(middle / beside, 3), "rounds": ROUNDS,
        })  # fmt: skip


@dataclass(frozen=True)
class Served:
    """A model in a process of its own, and what it generates."""

    implementation: str
    batch: int
    keys: int  # places of the static cache
    new: int
    shape: tuple[tuple[str, Any], ...]
    device: torch.device


_MODELS: dict[Served, tuple[Any, torch.Tensor]] = {}  # of this process, with their prompts


def serve(what: str, served: Served, compiled: bool) -> Any:
    """A job of such a process: "prepare", the logits of a step and whose kernels over caches `generate` runs, once all is
    compiled; or "steps", seconds of each decoding step.
    """
    with torch.no_grad():
        if what == "steps":
            return steps_of(*_MODELS[served], served.new, compiled)
        generator = torch.Generator(served.device).manual_seed(served.keys)
        torch.manual_seed(served.keys)
        model, shape = model_of(served), dict(served.shape)
        prompt = served.keys - served.new - WARM_STEPS  # so that the cache which generate makes has so many places
        ids = torch.randint(shape["vocab_size"], (served.batch, prompt), device=served.device, generator=generator)
        _MODELS[served] = model, ids
        said = logits_of(model, ids, served.keys).cpu().numpy()
        operator._CACHED.clear()  # pyright: ignore[reportPrivateUsage]
        for mode in sorted({False, compiled}):
            steps_of(model, ids, served.new, mode)
        return said, sorted({layout.plan.backend for layout in operator._CACHED.values()})  # pyright: ignore[reportPrivateUsage]


def model_of(served: Served) -> Any:
    """A causal model of random weights."""
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, LlamaConfig

    from flashtile.integrations.transformers import register

    register()
    AttentionInterface.register(NOTHING, lambda module, query, *given, **named: (query.transpose(1, 2), None))
    AttentionMaskInterface.register(NOTHING, lambda *given, **named: None)
    config = LlamaConfig(**dict(served.shape), bos_token_id=None, eos_token_id=None, pad_token_id=None)
    with served.device:
        made = AutoModelForCausalLM.from_config(config, attn_implementation=served.implementation, dtype=torch.bfloat16)
    return made.eval()


def logits_of(model: Any, ids: torch.Tensor, places: int) -> torch.Tensor:
    """What a decoding step behind all tokens but the last one says, (batch, vocabulary)."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=places)
    model(ids[:, :-1], past_key_values=cache, logits_to_keep=1)
    return model(ids[:, -1:], past_key_values=cache).logits[:, -1].double()


class Clock:
    """A streamer of transformers that notes when each token is there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def steps_of(model: Any, ids: torch.Tensor, new: int, compiled: bool) -> list[float]:
    """Seconds of each decoding step: those behind the prompt's token, and behind the first ones, which warm up."""
    clock = Clock()
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new + WARM_STEPS + 1, do_sample=False, pad_token_id=0,
        cache_implementation="static", disable_compile=not compiled, streamer=clock,
    )  # fmt: skip
    steps = [end - begin for begin, end in pairwise(clock.times[1:])]  # the first of all is the prompt itself
    if len(steps) != new + WARM_STEPS:
        raise ArithmeticError(f"{len(steps)} decoding steps where {new + WARM_STEPS} were asked for")
    return steps[WARM_STEPS:]


class Generation(Experiment[Cell]):
    """A cell is a section, or one of its calls."""

    output, budget_s = "bench-output/generation.csv", 240
    workers: dict[Served, Worker]
    prepared: dict[Served, Any]

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
        parser.add_argument("--batch", nargs="+", type=at_least_one, default=[1, 16])
        parser.add_argument("--keys", nargs="+", type=at_least_one, default=[1024, 8192], help="places of the static cache")
        parser.add_argument("--new", type=at_least_one, default=48, help="decoding steps that are timed")
        parser.add_argument("--compile", action="store_true", help="beside it, let generate compile its steps")
        parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))

    @classmethod
    def check(cls, chosen: argparse.Namespace, parser: argparse.ArgumentParser) -> int | None:
        least = chosen.new + WARM_STEPS + 2
        if min(chosen.keys) < least:
            parser.error(f"--keys {min(chosen.keys)}: with --new {chosen.new} it must be at least {least}")
        return None

    def cells(self) -> list[Cell]:
        chosen, made = self.chosen, list[Cell]()
        for section in chosen.sections:
            if section == "repeats":
                made += [Cell(section, name) for name in REPEATED]
            elif section == "host":
                made.append(Cell(section))
            else:
                made += [Cell(section, "", batch, keys) for batch in chosen.batch for keys in chosen.keys]
        return made

    def place(self, cell: Cell) -> dict[str, Any]:
        return {"section": cell.section, "name": cell.name, "batch": cell.batch or "", "keys": cell.keys or ""}

    @contextmanager
    def begin(self, record: Record) -> Iterator[None]:
        self.side, self.workers, self.prepared = torch.cuda.Stream(self.device()), dict[Served, Worker](), dict[Served, Any]()
        for served in (one for cell in self.cells() if cell.section == "generate" for one in self.served(cell)):
            self.workers[served] = processes.Worker(serve)
            self.workers[served].take(("prepare", served, self.chosen.compile))
        try:
            with torch.no_grad():
                yield
        finally:
            for worker in self.workers.values():
                worker.stop()

    def served(self, cell: Cell) -> list[Served]:
        """The models of a cell."""
        names = sorted(self.chosen.implementations)
        rest = (cell.batch, cell.keys, self.chosen.new, tuple(SHAPE.items()), self.device())
        return [Served(name, *rest) for name in names]

    def await_models(self, until: float) -> None:
        """Until all that compiles is compiled: nothing is timed beside it."""
        for served, worker in self.workers.items():
            if served not in self.prepared:
                self.prepared[served] = answer_of(worker, until)

    def measure(self, cell: Cell, record: Record, until: float) -> None:
        if cell.section == "repeats":
            row = {**self.place(cell), **repeat(cell.name, self.device())}
            print(cell.name, f"{REPEATS} calls, the same bits", flush=True)
            record.add(row)
            return
        self.await_models(record.ends)
        if cell.section == "host":
            host(self.device(), self.side, record)
        else:
            self.generate(cell, record)

    def generate(self, cell: Cell, record: Record) -> None:
        """Rows of the implementations, which take turns."""
        models = self.served(cell)
        made = {served: good(self.prepared[served]) for served in models}
        said = [torch.from_numpy(made[served][0]) for served in models if served.implementation != NOTHING]
        off = max((((one - said[-1]).norm() / said[-1].norm()).item() for one in said), default=0.0)  # of sdpa, if asked for
        if not off < LOGITS:
            raise ArithmeticError(f"logits of a step differ by {off:.1e} of their norm, limit {LOGITS:.0e}")
        for compiled in sorted({False, self.chosen.compile}, reverse=True):
            times: dict[str, list[list[float]]] = {served.implementation: [] for served in models}
            for turn in range(TURNS):
                for served in models if turn % 2 else reversed(models):
                    self.workers[served].take(("steps", served, compiled))
                    times[served.implementation].append(good(answer_of(self.workers[served], record.ends)))
            step = {name: statistics.median(chain(*turns)) for name, turns in times.items()}
            for served in models:
                name = served.implementation
                of = {"of_sdpa": round(step[SDPA] / step[name], 3)} if SDPA in step else {}
                row = {"provider": name, "compiled": compiled, "tokens_per_s": round(cell.batch / step[name], 1)}
                row["step_ms"], row["least_ms"] = (
                    round(s * 1e3, 3) for s in (step[name], min(map(statistics.median, times[name])))
                )
                row["kernels"] = "+".join(made[served][1])
                print(f"generate b{cell.batch} k{cell.keys}", *row.values(), *of.values(), f"logits {off:.1e}", flush=True)
                record.add({
                    **self.place(cell), **row, **of, "new": self.chosen.new,
                    "logits_off": "" if name == NOTHING else f"{off:.1e}",
                    "transformers": version("transformers"),
                })  # fmt: skip


def answer_of(worker: Worker, until: float) -> Any:
    """What becomes of its job."""
    if not worker.is_done(max(0.0, until - time.monotonic())):
        return Failure("there was no time for it")
    return worker.answer()


def good(made: Any) -> Any:
    """What a job returned; RuntimeError for a Failure."""
    if isinstance(made, Failure):
        raise RuntimeError(made.text)
    return made


def main() -> int:
    return main_of(Generation)


if __name__ == "__main__":
    sys.exit(main())
