"""Ranks on GPUs, one GPU each: what the CPU's ranks check, of longer sequences, 16 bits and Hopper's widths.

`python -m tests.distributed.on_gpus` runs it on two GPUs and says what was wrong; with `cpu` behind it, on a CPU. Several
pairs of processes work beside each other, because most of their time goes into compiling. Exits 1 where something was wrong.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

RANKS = 2
PAIRS = int(os.environ.get("PAIRS", "8"))
SECONDS = int(os.environ.get("SECONDS", "150"))  # no task begins later
FEATURES = (
    "causal", "window", "both sides", "sink", "softcap", "alibi", "documents", "padding", "prefix", "seqused", "dropout",
    "bias", "packed causal", "packed window",
)  # fmt: skip


def tasks(device: torch.device) -> dict[str, Callable[[], str | None]]:
    """By name, those first that say most."""
    from flashtile.distributed import Context
    from tests.distributed.cases import PACKED, WITHOUT, Case, judge
    from tests.distributed.engines import ENGINES
    from tests.distributed.volumes import in_groups

    half, found = torch.bfloat16, list[Case]()
    for method in ("allgather", "ulysses", "ring"):
        found += [Case(method, "zigzag", f, half, lse=f != "causal") for f in FEATURES if (method, f) not in WITHOUT]
    found += [Case("allgather", "contiguous", "window", half), Case("ring", "striped", "causal", half)]
    found += [Case("ulysses", "striped", "packed dropout", half), Case("allgather", "zigzag", "causal", half, heads_kv=1)]
    found += [Case(method, "zigzag", "causal", torch.float32) for method in ("allgather", "ulysses", "ring")]
    found.sort(key=lambda case: (case.method != "allgather", case.feature in PACKED))
    made: dict[str, Callable[[], str | None]] = {}

    def within(engine: Callable[[Any], None]) -> None:
        with device:
            engine(device)

    for engine in ENGINES:
        made[engine.__name__] = lambda engine=engine: within(engine)

    def judged(case: Case, groups: int) -> str:
        with in_groups(groups):
            return judge(case, Context(None, case.method, case.layout), 0, device)

    for case in found:
        made[case.spell()] = lambda case=case: judged(case, 1)
        if case.feature in ("causal", "packed causal", "sink") and case.method != "ring":
            made[f"{case.spell()}, two groups of heads"] = lambda case=case: judged(case, 2)
    return made


def rank_main(number: int, kind: str, folder: Path) -> None:
    pair, rank = divmod(number, RANKS)
    os.environ["STRETCHED"] = "16"
    torch.set_num_threads(1)
    device, backend = torch.device(kind, rank if kind == "cuda" else 0), "nccl" if kind == "cuda" else "gloo"
    if kind == "cuda":
        torch.cuda.set_device(device)
    meet = f"file://{folder / f'meet{pair}'}"
    dist.init_process_group(backend, init_method=meet, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    began, found = time.perf_counter(), dict[str, str]()
    for i, (name, task) in enumerate(tasks(device).items()):
        if i % PAIRS != pair:
            continue
        late = torch.tensor([int(time.perf_counter() - began > SECONDS)], device=device)
        dist.all_reduce(late)
        found[name] = f"not begun after {SECONDS} s" if late else "not ended"
        (folder / f"{pair}-{rank}.json").write_text(json.dumps(found))
        if late:
            continue
        torch.manual_seed(0)
        started = time.perf_counter()
        try:
            found[name] = task() or ""
        except BaseException:  # pytest's own failures are no Exceptions
            found[name] = traceback.format_exc()
        told = f"WRONG, rank {rank}, {name}: {found[name]}" if found[name] else f"right, rank {rank}, {name}"
        print(f"{told}, {time.perf_counter() - started:.0f} s", flush=True)  # at once: a run may be cut
        (folder / f"{pair}-{rank}.json").write_text(json.dumps(found))
        dist.barrier()
    print(f"pair {pair}, rank {rank}: {len(found)} in {time.perf_counter() - began:.0f} s", flush=True)
    dist.destroy_process_group()


def main() -> int:
    kind = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    with TemporaryDirectory() as folder:
        context = get_context("spawn")
        running = [context.Process(target=rank_main, args=(n, kind, Path(folder))) for n in range(PAIRS * RANKS)]
        for process in running:
            process.start()
        for process in running:
            process.join()
        told = {file.stem: json.loads(file.read_text()) for file in sorted(Path(folder).glob("*.json"))}
    wrong = [f"{where}, {name}: {text}" for where, found in told.items() for name, text in found.items() if text]
    broken = [n for n, process in enumerate(running) if process.exitcode]
    print(
        *wrong, f"{sum(map(len, told.values()))} tasks of ranks, {len(wrong)} wrong; processes that failed: {broken}", sep="\n"
    )
    return int(bool(wrong or broken))


if __name__ == "__main__":
    sys.exit(main())
