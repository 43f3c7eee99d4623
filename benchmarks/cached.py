"""Decoding from a cache, under CUDA graph replay: contiguous and in pages, beside others and a memcpy of the same traffic.

    python benchmarks/cached.py [--models llama3-8b ...] [--batch 1 8 64] [--keys 1024 4096 16384 65536] [--queries 1]
        [--lengths equal lognormal one-long] [--windows 0 1024] [--pages 0 16 64 256] [--caches bf16 e4m3] [--tiles]
        [--backends triton hopper] [--sets split=128 LOADS=4] [--peers sdpa flashinfer fa4] [--without xqa]
        [--cells llama3-8b:64x8192 ...] [--budget SECONDS] [--output bench-output/cached.csv] [--commit HASH]

Items have equal lengths, or lognormal ones about a quarter of the keys, or the first one is 16 times as long as the others.
Every query sees every key of its item, or those of a window that ends at its own. Caches are bf16, or of 8 bits with a scale
for each head. Models `mla-N` are absorbed MLA with N heads: keys of 576 columns, whose first 512 are the values. --tiles: each
of our rows once more for each tile that there might be (`kernels/portable/cached.py`,
`kernels/sm90/host/choose_cached.py`), --backends: for each of these, by their names, --sets: with this split, or this number
in `kernels/device/decoding.py`. A graph holds a call for each of several caches, together larger than the L2 cache where
memory allows, so that keys come from memory. SDPA is given a mask where items differ, and of a window its keys alone. Replays
take turns. What is timed is right, after a replay: against float64 sums over gathered keys. `copy` reads half of the bytes of a
cell's keys and values and writes as many: a memcpy of the same traffic, which is the ceiling. `of_copy` is its time over a
row's, `of_best` the best peer's time over ours, `of_sdpa` that of the best of SDPA's two kernels, `of_contiguous` our own
contiguous time over that of pages, `of_bf16` that of the same pages in bf16 over those of 8 bits, `of_first` that of the
library's choice over a variant's. `tflops` counts both products. What a peer (`cached_peers.py`) refuses is a row with a
`note`. --cells: these, in this order, in the place of all that models, batches, keys, queries, windows and lengths make, as
MODEL:BATCHxKEYS[:qQUERIES][:wWINDOW][:LENGTHS].
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cached_cells import KINDS, LENGTHS, MODELS, Caches, Cell, Row
from benchmarks.cached_peers import GROUPS, SDPA, is_peer, peers_of
from benchmarks.experiment import Ahead, Experiment, main_of
from benchmarks.record import Record, at_least_one, is_lost
from benchmarks.replay import captured, replay_ms
from flashtile import cache_clear
from flashtile.bench.providers import first_line
from flashtile.bench.rotation import rotate
from flashtile.errors import NotSupported
from flashtile.kernels.device import decoding
from flashtile.kernels.portable import cached
from flashtile.kernels.sm90.host import choose_cached as hopper
from flashtile.plan.device import Device
from flashtile.problem.cache import CachedProblem
from flashtile.problem.options import Options

BATCHES = (1, 8, 64)
KEYS = (1024, 4096, 16384, 65536)
PAGES = (16, 64, 256)
BACKENDS = ("triton", "hopper")
RATIOS = ("of_copy", "of_best", "of_sdpa", "of_contiguous", "of_bf16", "of_first")
COPY, COPY_8 = "copy", "copy of 8 bits"
ROUNDS = 30
LEAST_S = 2.0
NUMBERS = ("batch", "keys", "queries", "window")
CELL = re.compile(
    rf"(?P<model>[\w-]+):(?P<batch>[1-9]\d*)x(?P<keys>[1-9]\d*)(:q(?P<queries>[1-9]\d*))?(:w(?P<window>\d+))?"
    rf"(:(?P<lengths>{'|'.join(LENGTHS)}))?"
)
TOLERANCE = 8e-3  # of the largest value: 2 ulp of bf16


@dataclass(frozen=True)
class Variant:
    """A backend and the number of its tile; or `split`, or a constant of `kernels/device/decoding.py`, and its value."""

    backend: str | None = None
    number: int | None = None
    named: tuple[str, float] | None = None

    @property
    def call(self) -> dict[str, Any]:
        """What calls are given."""
        made: dict[str, Any] = {"options": Options(backend=self.backend)} if self.backend else {}
        return made | ({"split": int(self.named[1])} if self.named and self.named[0] == "split" else {})

    def spell(self, taken: list[Any]) -> str:
        return f"{self.named[0]}={self.named[1]:g}" if self.named else f"{self.backend} {taken[-1].spell()}"


@dataclass(frozen=True)
class Asked:
    """Who takes part: of ours pages, 0 for contiguous, what caches hold, variants beside the library's own choice; peers."""

    pages: tuple[int, ...]
    kinds: tuple[str, ...]
    variants: tuple[Variant, ...]
    peers: tuple[str, ...] = GROUPS
    without: tuple[str, ...] = ()  # parts of peers' names


def compile_one(
    model: str, queries: int, page: int, keys: int, kind: str, variant: Variant | None, window: int = 0
) -> None:  # fmt: skip
    """In a process of its own: leave the kernels in the cache on disk."""
    with torch.no_grad(), tiled(variant):
        caches = Caches(Cell(model, 1, keys, queries, window=window), 1, torch.device("cuda"))
        if kind != "bf16":
            caches.store(kind)
        with suppress(NoTile, NotSupported):
            caches.ours(page, kind, variant.call if variant else {}, True)[0]()


TILES = 7  # as many as there are for a kind, at most


class NoTile(Exception):
    """There are fewer tiles."""


@contextmanager
def tiled(variant: Variant | None) -> Generator[list[Any]]:
    """Plans take the tile, or the constant, of this variant. Yields the tiles that they took."""
    taken = list[Any]()

    def pick(tiles: tuple[Any, ...]) -> Any:
        assert variant is not None
        assert variant.number is not None
        if variant.number >= len(tiles):
            raise NoTile(variant)
        taken.append(tiles[variant.number])
        return taken[-1]

    def launch_of(problem: CachedProblem, device: Device, heads: int) -> Any:
        return pick(cached.candidates(problem, device, heads))

    def choose_cached(problem: CachedProblem) -> Any:
        return pick(hopper.candidates(problem))

    if variant is None:
        yield taken
        return
    cache_clear()
    with ExitStack() as stack:
        if variant.number is not None:
            stack.enter_context(patch.object(cached, "launch_of", launch_of))
            stack.enter_context(patch.object(hopper, "choose_cached", choose_cached))
        if variant.named and variant.named[0] != "split":
            stack.enter_context(patch.object(decoding, *variant.named))
        yield taken
    cache_clear()


@dataclass(frozen=True)
class Entrant:
    """A graph, and how its results are checked."""

    graph: Any
    results: tuple[torch.Tensor, ...]
    error: float
    call: Any  # whose tensors a graph reads: their memory must stay
    kind: str = "bf16"


def ours_of(caches: Caches, asked: Asked, side: Any, record: Record) -> Iterator[tuple[str, Entrant]]:
    """Ours, of every kind of cache, pages and tile."""
    for kind in asked.kinds:
        if kind != "bf16":
            caches.store(kind)
        for page in (page for page in asked.pages if page <= caches.cell.keys):
            for variant in (None, *asked.variants):
                name = f"flashtile/{page or 'contiguous'}{'' if kind == 'bf16' else f'/{kind}'}"
                with record.attempt(**caches.cell.row(), provider=name), tiled(variant) as taken:
                    call, table = caches.ours(page, kind, variant.call if variant else {})
                    try:
                        made = captured(call, 1, side)
                    except (NoTile, NotSupported):
                        continue
                    tile = f" {variant.spell(taken)}" if variant else ""
                    yield from judged(name + tile, made, call, caches, table, page, record, kind)


def entrants_of(caches: Caches, asked: Asked, side: Any, record: Record) -> Iterator[tuple[str, Entrant]]:
    """Everybody who is captured and right; rows for the others."""
    base = caches.cell.row()
    yield from ours_of(caches, asked, side, record)
    for peer in peers_of(caches, asked.peers):
        if set(peer.name.split("/")) & set(asked.without):
            continue
        try:
            with peer.context():
                call, table = peer.make()
                made = captured(call, 1, side)
        except Exception as error:
            if is_lost(error):
                raise
            note = f"{type(error).__name__}: {first_line(error)}"
            print(caches.cell, peer.name, note, flush=True)
            record.add({**base, "provider": peer.name, "note": note})
            continue
        yield from judged(peer.name, made, call, caches, table, peer.page, record)
    for name, share in ((COPY, 1), (COPY_8, 2)):
        call = caches.copy(share)
        yield name, Entrant(*captured(call, 1, side), 0.0, call)


def judged(
    name: str, made: tuple[Any, tuple[torch.Tensor, ...]], call: Any, caches: Caches, table: torch.Tensor | None,
    page: int, record: Record, kind: str = "bf16",
) -> Iterator[tuple[str, Entrant]]:  # fmt: skip
    """The entrant, or a row that says how wrong a replay is."""
    graph, results = made
    for tensor in results:
        tensor.fill_(math.nan)  # what the replay does not write shows
    graph.replay()
    torch.cuda.synchronize()
    error = caches.error(results, table, page, kind)
    if error <= TOLERANCE:
        yield name, Entrant(graph, results, error, (call, table), kind)
    else:
        record.fail(f"off by {error:.1e} of the largest value, limit {TOLERANCE:.0e}", **caches.cell.row(), provider=name)


def beside(medians: Mapping[str, float], name: str, kind: str) -> Row:
    """What stands in a row of ours beside its time."""
    peers = {peer: us for peer, us in medians.items() if is_peer(peer)}
    row: Row = {}
    copy = COPY if kind == "bf16" else COPY_8
    if copy in medians and name not in (COPY, COPY_8):
        row["of_copy"] = round(medians[copy] / medians[name], 3)
    if not name.startswith("flashtile/"):
        return row
    if peers:
        best = min(peers, key=peers.__getitem__)
        row |= {"best": best, "of_best": round(peers[best] / medians[name], 3)}
    if sdpa := [us for peer, us in peers.items() if peer in SDPA]:
        row["of_sdpa"] = round(min(sdpa) / medians[name], 3)
    plain, *tile = name.split(" ", 1)
    rivals = {"of_contiguous": f"flashtile/contiguous{'' if kind == 'bf16' else f'/{kind}'}"}
    if kind != "bf16":
        rivals["of_bf16"] = plain.removesuffix(f"/{kind}")
    if tile:
        rivals["of_first"] = plain
    return row | {key: round(medians[rival] / medians[name], 3) for key, rival in rivals.items() if rival in medians}


def measure(cell: Cell, asked: Asked, device: torch.device, side: Any, record: Record, until: float) -> None:
    """The rows of one cell."""
    caches = Caches(cell, cell.copies, device)
    entrants = dict(entrants_of(caches, asked, side, record))
    until = max(until, time.monotonic() + LEAST_S)
    ms = rotate(list(entrants), ROUNDS, lambda name: replay_ms(entrants[name].graph), lambda: time.monotonic() < until)
    us = {name: [taken / caches.copies * 1e3 for taken in some] for name, some in ms.items()}
    medians = {name: statistics.median(some) for name, some in us.items()}
    for name, middle in medians.items():
        row: Row = {**cell.row(), "provider": name, "caches": caches.copies, "us": round(middle, 3)}
        kind = "e4m3" if name == COPY_8 else entrants[name].kind
        row |= {"least_us": round(min(us[name]), 3), "gb_per_s": round(cell.all_bytes(kind) / middle / 1e3, 1)}
        row |= {"error": f"{entrants[name].error:.1e}", "cache": kind, **beside(medians, name, kind)}
        if name not in (COPY, COPY_8):
            row["tflops"] = round(cell.flops / middle / 1e6, 1)
        ratios = " ".join(f"{key} {row[key]}" for key in RATIOS if key in row)
        print(cell, f"{name} {middle:.2f} us, {row['gb_per_s']} GB/s {row.get('tflops', '')} {ratios}", flush=True)
        record.add(row)


def setting(text: str) -> tuple[str, float]:
    """NAME=NUMBER."""
    name, _, value = text.partition("=")
    if name != "split" and not isinstance(getattr(decoding, name, None), (int, float)):
        raise argparse.ArgumentTypeError(f"{text!r}: it must be split=N, or the name of a number in kernels/device/decoding.py")
    return name, float(value) if "." in value else int(value)


def cell_of(text: str) -> Cell:
    """MODEL:BATCHxKEYS, and what differs from one query, no window and equal lengths."""
    made = CELL.fullmatch(text)
    if made is None or made["model"] not in MODELS:
        raise argparse.ArgumentTypeError(f"{text!r}: it must be MODEL:BATCHxKEYS[:qQUERIES][:wWINDOW][:LENGTHS]")
    batch, keys, queries, window = (int(made[name] or least) for name, least in zip(NUMBERS, (1, 1, 1, 0), strict=True))
    return Cell(made["model"], batch, keys, queries, made["lengths"] or LENGTHS[0], window)


class OverCaches(Experiment[Cell]):
    """What experiments over caches have in common: graphs on a stream of their own, whose replays take turns."""

    def device(self) -> torch.device:
        return torch.device("cuda")

    def about(self) -> dict[str, int]:
        return {"rounds": ROUNDS}

    @contextmanager
    def begin(self, record: Record) -> Iterator[None]:
        self.side = torch.cuda.Stream(self.device())
        with torch.no_grad(), torch.cuda.stream(self.side):
            yield

    def place(self, cell: Cell) -> dict[str, Any]:
        return dict(cell.row())


class Cached(OverCaches):
    """A cell is a model, a batch, keys and queries of a step; its caches and providers are timed in one rotation."""

    output, budget_s, ahead_share = "bench-output/cached.csv", 480, 0.3

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
        parser.add_argument("--batch", nargs="+", type=at_least_one, default=list(BATCHES))
        parser.add_argument("--keys", nargs="+", type=at_least_one, default=list(KEYS), help="multiples of 256")
        parser.add_argument("--queries", nargs="+", type=at_least_one, default=[1])
        parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=["equal"])
        parser.add_argument("--windows", nargs="+", type=int, default=[0], help="keys that a query sees; 0: all")
        parser.add_argument("--pages", nargs="+", type=int, choices=(0, *PAGES), default=[0, *PAGES], help="0: contiguous")
        parser.add_argument("--caches", nargs="+", choices=KINDS, default=["bf16", "e4m3"])
        parser.add_argument("--tiles", action="store_true", help="every tile that there might be")
        parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=[], help="these beside the library's choice")
        parser.add_argument("--peers", nargs="*", choices=GROUPS, default=list(GROUPS), help="those of them that are installed")
        parser.add_argument("--without", nargs="+", default=[], help="peers with such a part in their names, as xqa")
        parser.add_argument("--cells", nargs="+", type=cell_of, default=[], help="these alone; see above")
        parser.add_argument("--sets", nargs="+", type=setting, default=[], help="split=N, or a constant of the sum of parts")

    @classmethod
    def check(cls, chosen: argparse.Namespace, parser: argparse.ArgumentParser) -> int | None:
        odd = [keys for keys in (*chosen.keys, *(cell.keys for cell in chosen.cells)) if any(keys % page for page in PAGES)]
        if odd:
            parser.error(f"{odd[0]} keys: they must be a multiple of {PAGES[-1]}")
        return None

    def __init__(self, chosen: argparse.Namespace):
        super().__init__(chosen)
        numbers = range(TILES) if chosen.tiles else range(1 if chosen.backends else 0)
        variants = tuple(Variant(name, number) for name in chosen.backends or BACKENDS for number in numbers)
        named = tuple(Variant(named=(name, value)) for name, value in chosen.sets)
        ours = (tuple(chosen.pages), tuple(chosen.caches), (*variants, *named))
        self.asked = Asked(*ours, tuple(chosen.peers), tuple(chosen.without))

    def ahead(self) -> Ahead:
        keys = dict[tuple[str, int, int], set[int]]()
        for cell in self.cells():
            keys.setdefault((cell.model, cell.queries, cell.window), set()).add(cell.keys)
        return compile_one, [
            (model, queries, page, number, kind, variant, window)
            for variant in (None, *self.asked.variants) for (model, queries, window), some in keys.items()
            for number in sorted({min(some), max(some)})  # of these one has parts of keys, and one may have none
            for page in self.asked.pages for kind in self.asked.kinds
        ]  # fmt: skip

    def cells(self) -> list[Cell]:
        chosen = self.chosen
        return chosen.cells or [
            Cell(model, batch, keys, queries, lengths, window)
            for keys in chosen.keys for batch in chosen.batch for queries in chosen.queries for lengths in chosen.lengths
            for window in chosen.windows for model in chosen.models
        ]  # fmt: skip

    def measure(self, cell: Cell, record: Record, until: float) -> None:
        measure(cell, self.asked, self.device(), self.side, record, until)


def main() -> int:
    return main_of(Cached)


if __name__ == "__main__":
    sys.exit(main())
