"""What a rank of a GPU holds at once: its tensors here, with calls that compute nothing and allocate what Hopper's plans do."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.context import Form, inputs, made, needed_bytes, slowest
from flashtile.torch.context import calls, collectives, gathered
from flashtile.torch.context.known import KNOWN
from flashtile.torch.execute.prepared import PreparedCall
from tests.distributed.volumes import in_groups

BOUND = 1.1  # of a rank's share of q, k, v, out, their gradients, what is gathered and its float32 sums
LAWS = (
    ("allgather", 2, BOUND), ("ulysses", 1, BOUND),
    ("allgather", 1, 1.2),  # 16k tokens, whose heads stay together: 1.191, where other ranks' sums land
)  # fmt: skip


def a_rank_holds_little_more_than_it_needs() -> None:
    given, ranks, marks = inputs("1x32x8x128", 1024, torch.bfloat16, torch.device("cpu")), dist.get_world_size(), [0]
    own = sum(t.nbytes for t in given) / ranks
    with (
        as_on_a_gpu(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as record,
    ):  # one of all: to begin one takes a second
        for method, groups, _ in LAWS:
            KNOWN.clear()  # of other groups
            with in_groups(groups), made(method, given, Form()) as run:
                marks.append(time.time_ns())
                run()
                marks.append(time.time_ns())
    KNOWN.clear()
    profiler: Any = record.profiler
    events = sorted((e.start_ns(), e.nbytes()) for e in profiler.kineto_results.events() if e.name() == "[memory]")
    for (method, groups, bound), first, end in zip(LAWS, marks[1::2], marks[2::2], strict=True):
        peak = max(accumulate(n for at, n in events if first <= at <= end))
        ratio = slowest((peak + own) / needed_bytes(method, given, ranks), given[0].device)
        assert 0.5 < ratio <= bound, (method, groups, ratio)


@contextmanager
def as_on_a_gpu() -> Generator[None]:
    """Calls take 16 bits as they come, and have Hopper's scratch for a backward: float32 sums of dq, two numbers a row."""

    def forward(self: PreparedCall, packs: Any, others: Any, into: torch.Tensor | None = None) -> list[torch.Tensor]:
        q, _, v = packs
        out = q.new_empty((*q.shape[:3], v.shape[3])) if into is None else into
        return [out, q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)]

    def gradients(
        self: PreparedCall, saved: Any, dout: Any, dlse: Any, needs: Any, wide_keys: bool = False, into: Any = None
    ) -> tuple[torch.Tensor, ...]:
        q, *keys = saved[:3]
        scratch = q.new_empty(q.shape, dtype=torch.float32), q.new_empty((2, *q.shape[:3]), dtype=torch.float32)
        dq = torch.empty(q.shape, dtype=q.dtype) if into is None else into
        grads = tuple(torch.empty(t.shape, dtype=torch.float32 if wide_keys else t.dtype) for t in keys)
        del scratch
        return dq, *grads

    with ExitStack() as stack:
        for home, name, other in (
            (PreparedCall, "forward", forward), (PreparedCall, "gradients", gradients),
            (gathered, "widens", lambda q: False), (calls, "widens", lambda q: False),
            # gloo's thread may keep what it sent a while after
            (collectives, "_begin_exchange", lambda sent, context: (torch.empty_like(sent), SimpleNamespace(wait=int))),
        ):  # fmt: skip
            stack.enter_context(patch.object(home, name, other))
        yield
