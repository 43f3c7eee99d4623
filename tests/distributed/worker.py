"""One rank of the tests; `python -m tests.distributed.worker RANK RANKS FOLDER`. What was wrong is written to FOLDER."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from flashtile.distributed import Context
from tests.distributed.cases import cases, judge
from tests.distributed.checks import CHECKS


def main() -> None:
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    meet = f"file://{folder / 'meet'}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    tasks: dict[str, Callable[[], str | None]] = {check.__name__: check for check in CHECKS}
    for case in cases(ranks):
        tasks[case.spell()] = lambda case=case: judge(case, Context(method=case.method, layout=case.layout))
    found: dict[str, str] = {}
    for name, task in tasks.items():
        torch.manual_seed(0)
        try:
            found[name] = task() or ""
        except BaseException:  # pytest's own failures are no Exceptions
            found[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(found))
        told: list[bool] = [False] * ranks  # where one rank failed the others may wait for it elsewhere: all end here
        dist.all_gather_object(told, bool(found[name]))
        if any(told):
            break


if __name__ == "__main__":
    main()
