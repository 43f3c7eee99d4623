"""Decoding from a cache, under CUDA graph replay: contiguous and in pages, beside SDPA and a device memcpy of the same traffic.

    python benchmarks/cached.py [--models llama3-8b ...] [--batch 1 8 64] [--keys 1024 4096 16384 65536] [--queries 1]
        [--budget SECONDS] [--output bench-output/cached.csv] [--commit HASH]

All items have equal lengths and bf16 caches, and every query sees every key. A graph holds a call for each of several caches,
together larger than the L2 cache where memory allows, so that keys come from memory. Replays take turns. What is timed is
right, after a replay: against float64 sums over gathered keys. `copy` reads half of the bytes of a cell's keys and values and
writes as many: a memcpy of the same traffic, which is the ceiling. `of_copy` is its time over a row's, `of_best` the best
peer's time over ours, `of_contiguous` our own contiguous time over that of pages. What SDPA refuses is a row with a `note`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import processes
from benchmarks.record import Record, at_least_one, is_lost, machine, need_gpu, options
from benchmarks.replay import captured, replay_ms
from flashtile.bench.providers import first_line
from flashtile.bench.rotation import rotate
from flashtile.torch.cache.attention import attention_cached

# heads_q, heads_kv, head_dim of one layer
MODELS = {"llama3-8b": (32, 8, 128), "llama3-70b-tp8": (8, 1, 128), "qwen3-32b": (64, 8, 128)}
BATCHES = (1, 8, 64)
KEYS = (1024, 4096, 16384, 65536)
PAGES = (16, 64, 256)
PEERS = {"sdpa/flash": "FLASH_ATTENTION", "sdpa/cudnn": "CUDNN_ATTENTION"}
COPY = "copy"
LEAST_BYTES = 256 << 20  # of all caches of a graph: five times an H100's L2, so that nothing of it is found there
MOST_COPIES = 512
MOST_BYTES = 80 << 30
ROUNDS = 30
LEAST_S = 2.0
TOLERANCE = 8e-3  # of the largest value: 2 ulp of bf16
Call = Callable[[], tuple[torch.Tensor, ...]]
Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """What all entrants of a rotation do."""

    model: str
    batch: int
    keys: int
    queries: int

    @property
    def cache_bytes(self) -> int:
        _, heads, dim = MODELS[self.model]
        return 4 * self.batch * self.keys * heads * dim  # bf16 keys and values

    @property
    def copies(self) -> int:
        """Caches that a graph goes through."""
        return max(1, min(MOST_COPIES, -(-LEAST_BYTES // self.cache_bytes), MOST_BYTES // self.cache_bytes))

    @property
    def all_bytes(self) -> int:
        """What a call reads and writes at least."""
        heads, _, dim = MODELS[self.model]
        return self.cache_bytes + 4 * self.batch * self.queries * heads * dim

    def row(self) -> Row:
        heads, heads_kv, dim = MODELS[self.model]
        return {
            "model": self.model, "heads_q": heads, "heads_kv": heads_kv, "head_dim": dim, "batch": self.batch,
            "keys": self.keys, "queries": self.queries,
        }  # fmt: skip

    def __str__(self) -> str:
        return f"{self.model} b{self.batch} k{self.keys} q{self.queries}"


class Caches:
    """The tensors of a cell: pools that all layouts share, which differ in their tables alone."""

    def __init__(self, cell: Cell, copies: int, device: torch.device):
        self.cell, self.copies, self.device = cell, copies, device
        heads, heads_kv, dim = MODELS[cell.model]
        self.generator = torch.Generator(device).manual_seed(1)
        shape = (copies * cell.batch, cell.keys, heads_kv, dim)
        self.k, self.v = (self.normal(shape) for _ in "kv")
        self.q = self.normal((copies, cell.batch, cell.queries, heads, dim))
        self.used = torch.full((cell.batch,), cell.keys, dtype=torch.int32, device=device)

    def normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_(generator=self.generator)

    def part(self, copy: int) -> slice:
        """The items of one cache."""
        return slice(copy * self.cell.batch, (copy + 1) * self.cell.batch)

    def table(self, page: int) -> torch.Tensor:
        """(copies, batch, columns): pages in random order."""
        columns = self.cell.keys // page
        order = torch.randperm(self.copies * self.cell.batch * columns, device=self.device, generator=self.generator)
        return order.int().view(self.copies, self.cell.batch, columns)

    def ours(self, page: int, one: bool = False) -> tuple[Call, torch.Tensor | None]:
        """(a call over every cache, its table)."""
        number = range(1 if one else self.copies)
        if not page:
            return lambda: tuple(
                attention_cached(self.q[i], self.k[self.part(i)], self.v[self.part(i)], seqused_k=self.used) for i in number
            ), None
        table = self.table(page)
        k, v = (t.view(-1, page, *t.shape[2:]) for t in (self.k, self.v))
        return lambda: tuple(attention_cached(self.q[i], k, v, table[i], seqused_k=self.used) for i in number), table

    def sdpa(self) -> Call:
        """SDPA over contiguous caches, by whichever of its kernels is allowed."""

        def attend(i: int) -> torch.Tensor:
            q, k, v = (t.transpose(1, 2) for t in (self.q[i], self.k[self.part(i)], self.v[self.part(i)]))
            made = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
            return made.transpose(1, 2)

        return lambda: tuple(attend(i) for i in range(self.copies))

    def copy(self) -> Call:
        """A memcpy that reads and writes, together, what a call reads of keys and values."""
        target = torch.empty_like(self.k[self.part(0)])
        return lambda: tuple(target.copy_(self.k[self.part(i)]) for i in range(self.copies))

    def error(self, made: tuple[torch.Tensor, ...], table: torch.Tensor | None, page: int) -> float:
        """The largest error of the last cache's first and last item, over the largest value."""
        copy, worst = self.copies - 1, 0.0
        for item in {0, self.cell.batch - 1}:
            place = copy * self.cell.batch + item
            if table is None:
                k, v = self.k[place], self.v[place]
            else:
                pages = table[copy, item].long()
                k, v = (t.view(-1, page, *t.shape[2:])[pages].flatten(0, 1) for t in (self.k, self.v))
            exact = formula(self.q[copy, item], k, v)
            worst = max(worst, ((made[-1][item].double() - exact).abs().max() / exact.abs().max()).item())
        return worst


def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention by its definition, in float64, a head of keys at a time."""
    group, parts = q.shape[1] // k.shape[1], list[torch.Tensor]()
    for head in range(k.shape[1]):
        queries = q[:, head * group : (head + 1) * group].double()
        scores = torch.einsum("qhd,kd->hqk", queries, k[:, head].double()) / math.sqrt(q.shape[-1])
        parts.append(torch.einsum("hqk,kd->qhd", scores.softmax(-1), v[:, head].double()))
    return torch.cat(parts, 1)


def compile_one(model: str, queries: int, page: int, keys: int) -> None:
    """In a process of its own: leave the kernels in the cache on disk."""
    with torch.no_grad():
        Caches(Cell(model, 1, keys, queries), 1, torch.device("cuda")).ours(page, True)[0]()


@dataclass(frozen=True)
class Entrant:
    """A graph, and how its results are checked."""

    graph: Any
    results: tuple[torch.Tensor, ...]
    error: float
    table: torch.Tensor | None = None  # which a graph reads: its memory must stay


def allowed(name: str) -> Any:
    """The context in which SDPA has one kernel."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(getattr(SDPBackend, PEERS[name]))  # pyright: ignore[reportUnknownVariableType]


def entrants_of(caches: Caches, side: Any, record: Record) -> Iterator[tuple[str, Entrant]]:
    """Everybody who is captured and right; rows for the others."""
    base = caches.cell.row()
    for page in (0, *PAGES):
        if page > caches.cell.keys:
            continue
        name = f"flashtile/{page or 'contiguous'}"
        with record.attempt(**base, provider=name):
            call, table = caches.ours(page)
            yield from judged(name, captured(call, 1, side), caches, table, page, record)
    for name in PEERS:
        try:
            with allowed(name):
                made = captured(caches.sdpa(), 1, side)
        except Exception as error:
            if is_lost(error):
                raise
            note = f"{type(error).__name__}: {first_line(error)}"
            print(caches.cell, name, note, flush=True)
            record.add({**base, "provider": name, "note": note})
            continue
        yield from judged(name, made, caches, None, 0, record)
    graph, results = captured(caches.copy(), 1, side)
    yield COPY, Entrant(graph, results, 0.0)


def judged(
    name: str, made: tuple[Any, tuple[torch.Tensor, ...]], caches: Caches, table: torch.Tensor | None, page: int, record: Record
) -> Iterator[tuple[str, Entrant]]:
    """The entrant, or a row that says how wrong a replay is."""
    graph, results = made
    for tensor in results:
        tensor.fill_(math.nan)  # what the replay does not write shows
    graph.replay()
    torch.cuda.synchronize()
    error = caches.error(results, table, page)
    if error <= TOLERANCE:
        yield name, Entrant(graph, results, error, table)
    else:
        record.fail(f"off by {error:.1e} of the largest value, limit {TOLERANCE:.0e}", **caches.cell.row(), provider=name)


def beside(medians: Mapping[str, float], name: str) -> Row:
    """What stands in a row of ours beside its time."""
    peers = {peer: us for peer, us in medians.items() if peer in PEERS}
    row: Row = {}
    if COPY in medians and name != COPY:
        row["of_copy"] = round(medians[COPY] / medians[name], 3)
    if not name.startswith("flashtile/"):
        return row
    if peers:
        best = min(peers, key=peers.__getitem__)
        row |= {"best": best, "of_best": round(peers[best] / medians[name], 3)}
    if "flashtile/contiguous" in medians:
        row["of_contiguous"] = round(medians["flashtile/contiguous"] / medians[name], 3)
    return row


def measure(cell: Cell, device: torch.device, side: Any, record: Record, until: float) -> None:
    """The rows of one cell."""
    caches = Caches(cell, cell.copies, device)
    entrants = dict(entrants_of(caches, side, record))
    until = max(until, time.monotonic() + LEAST_S)
    ms = rotate(list(entrants), ROUNDS, lambda name: replay_ms(entrants[name].graph), lambda: time.monotonic() < until)
    us = {name: [taken / caches.copies * 1e3 for taken in some] for name, some in ms.items()}
    medians = {name: statistics.median(some) for name, some in us.items()}
    for name, middle in medians.items():
        row: Row = {**cell.row(), "provider": name, "caches": caches.copies, "us": round(middle, 3)}
        row |= {"least_us": round(min(us[name]), 3), "gb_per_s": round(cell.all_bytes / middle / 1e3, 1)}
        row |= {"error": f"{entrants[name].error:.1e}", **beside(medians, name)}
        ratios = " ".join(f"{key} {row[key]}" for key in ("of_copy", "of_best", "of_contiguous") if key in row)
        print(cell, f"{name} {middle:.2f} us, {row['gb_per_s']} GB/s {ratios}", flush=True)
        record.add(row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batch", nargs="+", type=at_least_one, default=list(BATCHES))
    parser.add_argument("--keys", nargs="+", type=at_least_one, default=list(KEYS), help="multiples of 256")
    parser.add_argument("--queries", nargs="+", type=at_least_one, default=[1])
    options(parser, "bench-output/cached.csv", 480)
    chosen = parser.parse_args()
    odd = [keys for keys in chosen.keys if any(keys % page for page in PAGES)]
    if odd:
        parser.error(f"--keys {odd[0]}: it must be a multiple of {PAGES[-1]}")
    need_gpu(parser)
    device, side = torch.device("cuda"), torch.cuda.Stream(torch.device("cuda"))
    record = Record(chosen.output, chosen.budget, {"rounds": ROUNDS, **machine(device, chosen.commit)})
    ahead = sorted({min(chosen.keys), max(chosen.keys)})  # of these one has parts of keys, and one may have none
    jobs = [(m, n, page, keys) for m in chosen.models for n in chosen.queries for page in (0, *PAGES) for keys in ahead]
    processes.compile_ahead(compile_one, jobs, record.left(), 0.3)
    cells = [
        Cell(model, batch, keys, queries)
        for keys in chosen.keys for batch in chosen.batch for queries in chosen.queries for model in chosen.models
    ]  # fmt: skip
    with torch.no_grad(), torch.cuda.stream(side):
        for cell, until in record.parts(cells):
            with record.attempt(**cell.row()):
                measure(cell, device, side, record, until)
            torch.cuda.empty_cache()
    return record.end()


if __name__ == "__main__":
    sys.exit(main())
