"""The ranks of the tests: one process imports everything and forks them. What was wrong is written to a folder.

`python -m tests.distributed.worker FOLDER`: for 2 and 4 ranks FOLDER/RANKS/RANK.json; FOLDER/dies.txt says what a rank met
whose neighbour died.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from flashtile.distributed import Context, attention
from tests.distributed.cases import cases, judge
from tests.distributed.checks import CHECKS, OF_FOUR, OF_TWO
from tests.distributed.drawn import drawn_calls_are_those_of_one_process
from tests.distributed.engines import ENGINES
from tests.distributed.held import a_rank_holds_little_more_than_it_needs
from tests.distributed.known import calls_known_again_are_as_the_first
from tests.distributed.packed import OF_DOCUMENTS, shards_of_documents_come_back
from tests.distributed.ring_names import names_of_ring_flash_attn
from tests.distributed.volumes import (
    a_window_fetches_its_halo_alone,
    auto_takes_what_sends_less_where_work_is_even,
    degrees_of_diffusers,
    heads_by_groups_are_under_way_while_others_are_computed,
    heads_over_one_axis_of_a_mesh_and_positions_over_the_other,
    keys_are_under_way_while_others_are_attended,
)


def meet(rank: int, ranks: int, folder: Path, seconds: int) -> None:
    torch.set_num_threads(1)
    file = f"file://{folder / 'meet'}"
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=ranks, timeout=timedelta(seconds=seconds))


def run(rank: int, ranks: int, folder: Path) -> None:
    meet(rank, ranks, folder, 60)
    tasks: dict[str, Callable[[], str | None]] = {
        c.__name__: c
        for c in (
            *CHECKS,
            a_window_fetches_its_halo_alone,
            shards_of_documents_come_back,
            auto_takes_what_sends_less_where_work_is_even,
            names_of_ring_flash_attn,
            drawn_calls_are_those_of_one_process,
            *(ENGINES if ranks == 2 else ()),
            *((*OF_TWO, *OF_DOCUMENTS) if ranks == 2 else (*OF_FOUR, degrees_of_diffusers)),
            *((keys_are_under_way_while_others_are_attended, calls_known_again_are_as_the_first) if ranks == 2 else ()),
            *((heads_by_groups_are_under_way_while_others_are_computed,) if ranks == 2 else ()),
            *((a_rank_holds_little_more_than_it_needs,) if ranks == 2 else ()),
            *(() if ranks == 2 else (heads_over_one_axis_of_a_mesh_and_positions_over_the_other,)),
        )
    }
    for i, case in enumerate(cases(ranks)):
        tasks[case.spell()] = lambda case=case, i=i: judge(case, Context(None, case.method, case.layout), i % ranks)
    found: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for name, task in tasks.items():
        torch.manual_seed(0)
        began = time.perf_counter()
        try:
            found[name] = task() or ""
        except BaseException:  # pytest's own failures are no Exceptions
            found[name] = traceback.format_exc()
        seconds[name] = time.perf_counter() - began
        (folder / f"{rank}.json").write_text(json.dumps(found))
        told: list[bool] = [False] * ranks  # where one rank failed the others may wait for it elsewhere: all end here
        dist.all_gather_object(told, bool(found[name]))
        if any(told):
            break
    if rank == 0:
        slowest = sorted(seconds, key=seconds.__getitem__)[-8:]
        print(f"{ranks} ranks, {sum(seconds.values()):.1f} s:", *(f"{seconds[n]:.2f} s {n}" for n in slowest), sep="\n  ")


def dies(rank: int, ranks: int, folder: Path) -> None:
    meet(rank, ranks, folder, 2)
    context = Context()
    dist.barrier()
    if rank == 1:
        os._exit(0)
    try:
        attention(*(torch.ones(1, 4, 2, 8) for _ in range(3)), context=context)
    except Exception:
        (folder.parent / "dies.txt").write_text(traceback.format_exc())
        raise


def fork(task: Callable[[int, int, Path], None], ranks: int, folder: Path) -> list[int]:
    """The process ids of so many ranks that run it."""
    folder.mkdir()
    sys.stdout.flush()
    children: list[int] = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                task(rank, ranks, folder)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        children.append(child)
    return children


def main(folder: Path) -> None:
    with suppress(ImportError):  # once for all ranks
        from transformers import Gemma2ForCausalLM, LlamaForCausalLM  # noqa: F401
    statuses: dict[str, list[int]] = {}
    for name, task, ranks in (("2", run, 2), ("4", run, 4), ("dying", dies, 2)):
        began = fork(task, ranks, folder / name)
        statuses[name] = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in began]
    (folder / "statuses.json").write_text(json.dumps(statuses))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
