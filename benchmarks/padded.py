"""Decoding from contiguous caches that are padded on the left: told by first_k, and by a mask of keys that are kept.

    python benchmarks/padded.py [--models llama3-8b] [--batch 8 64] [--keys 8192] [--budget SECONDS]
        [--output bench-output/padded.csv] [--commit HASH]

Item i begins in row 389 * i, modulo a quarter of its keys. `whole` is the same call without padding, whose keys are more. A
graph holds a call for each of several caches, as in `cached.py`; replays take turns, and what is timed is right after a replay,
beside float64 sums. `of_mask` is the mask's time over a row's.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cached import ROUNDS, TOLERANCE, OverCaches
from benchmarks.cached_cells import MODELS, Caches, Cell, formula
from benchmarks.experiment import main_of
from benchmarks.record import Record, at_least_one
from benchmarks.replay import captured, replay_ms
from flashtile.bench.rotation import rotate
from flashtile.features.masks.key_padding import KeyPadding
from flashtile.problem.mask import CAUSAL
from flashtile.torch.cache.attention import attention_cached

STEP = 389  # rows by which an item's padding exceeds that of the one before


def ways(caches: Caches) -> dict[str, tuple[dict[str, Any], torch.Tensor]]:
    """(what calls are told, where items begin) by the name of a row."""
    cell, device = caches.cell, caches.device
    first = torch.tensor([STEP * i % (cell.keys // 4) for i in range(cell.batch)], dtype=torch.int32, device=device)
    keep = torch.arange(cell.keys, device=device) >= first[:, None]
    return {
        "whole": ({"causal": True}, torch.zeros_like(first)),
        "first_k": ({"causal": True, "first_k": first}, first),
        "mask": ({"mask": KeyPadding(keep) & CAUSAL}, first),
    }


def error(caches: Caches, made: torch.Tensor, first: torch.Tensor) -> float:
    """The largest error of the last cache's items, over the largest value."""
    worst, copy = 0.0, caches.copies - 1
    for item in {0, 1, caches.cell.batch - 1} & set(range(caches.cell.batch)):
        k, v = (t[caches.part(copy)][item, int(first[item]) :] for t in (caches.k, caches.v))
        exact = formula(caches.q[copy, item], k, v)
        worst = max(worst, ((made[item].double() - exact).abs().max() / exact.abs().max()).item())
    return worst


class Padded(OverCaches):
    """A cell is a model, a batch and keys; the ways to tell its padding take turns."""

    output, budget_s = "bench-output/padded.csv", 60

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--models", nargs="+", choices=MODELS, default=["llama3-8b"])
        parser.add_argument("--batch", nargs="+", type=at_least_one, default=[8, 64])
        parser.add_argument("--keys", nargs="+", type=at_least_one, default=[8192])

    def cells(self) -> list[Cell]:
        chosen = self.chosen
        return [Cell(model, batch, keys, 1) for keys in chosen.keys for batch in chosen.batch for model in chosen.models]

    def measure(self, cell: Cell, record: Record, until: float) -> None:
        caches = Caches(cell, cell.copies, self.device())
        graphs, wrong = dict[str, Any](), dict[str, float]()
        for name, (how, first) in ways(caches).items():

            def call(how: dict[str, Any] = how) -> tuple[torch.Tensor, ...]:
                parts = (caches.part(i) for i in range(caches.copies))
                return tuple(
                    attention_cached(caches.q[i], caches.k[part], caches.v[part], seqused_k=caches.used, **how)
                    for i, part in enumerate(parts)
                )

            graph, results = captured(call, 1, self.side)
            for tensor in results:
                tensor.fill_(math.nan)  # what the replay does not write shows
            graph.replay()
            torch.cuda.synchronize()
            graphs[name], wrong[name] = (graph, how), error(caches, results[-1], first)
            if not wrong[name] <= TOLERANCE:
                record.fail(f"off by {wrong[name]:.1e} of the largest value", **cell.row(), provider=name)
                del graphs[name]
        ms = rotate(list(graphs), ROUNDS, lambda name: replay_ms(graphs[name][0]), lambda: time.monotonic() < until)
        us = {name: statistics.median(some) / caches.copies * 1e3 for name, some in ms.items()}
        for name, middle in us.items():
            beside = {"of_mask": round(us["mask"] / middle, 3)} if "mask" in us else {}
            record.add({**cell.row(), "provider": name, "us": round(middle, 3), **beside, "error": f"{wrong[name]:.1e}"})
            print(cell, f"{name} {middle:.2f} us", *(f"{key} {value}" for key, value in beside.items()), flush=True)


def main() -> int:
    return main_of(Padded)


if __name__ == "__main__":
    sys.exit(main())
