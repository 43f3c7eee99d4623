"""Who has which scratch: memory of launches that follow one another on a stream is kept, all else is each call's own."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from threading import Thread

import pytest
import torch

from flashtile.torch.execute import replay
from flashtile.torch.execute.replay import KEPT_BYTES, Replay

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_kept", defaultdict(list))


def kept() -> list[int]:
    """Where what is kept lies."""
    return [scratch.address for scratch in replay._kept[CPU]]  # pyright: ignore[reportPrivateUsage]


def given(size: int, stream: int = 0, meanwhile: Callable[[int], object] = lambda _: None) -> int:
    """The address of the scratch that a call of this many bytes launches with, and what happens before its last launch."""
    made, seen = object.__new__(Replay), list[int]()
    made.device, made.offsets, made.scratch_bytes = CPU, {"sum": 0}, size

    def launch_with(key: tuple[int, ...]) -> None:
        seen.append(key[-1])
        meanwhile(key[-1])

    made.launch_with = launch_with  # pyright: ignore[reportAttributeAccessIssue]
    made.launch([stream, 1, 2])
    return seen[0]


def test_calls_on_the_default_stream_have_the_same_one_after_another() -> None:
    first = given(1024)
    assert [given(1024), given(512), kept()] == [first, first, [first]]


def test_a_larger_call_s_replaces_it() -> None:
    given(1024)
    large = given(4096)
    assert [kept(), given(1024)] == [[large], large]


def test_a_call_amid_another_s_launches_has_its_own() -> None:
    others: list[int] = []
    first = given(1024, meanwhile=lambda _: others.append(given(1024)))
    assert others != [first]
    assert sorted(kept()) == sorted([first, *others])


@pytest.mark.parametrize(("size", "stream"), [(1024, 7), (KEPT_BYTES + 4, 0)])
def test_other_streams_and_large_problems_keep_none(size: int, stream: int) -> None:
    given(size, stream)
    assert kept() == []


def test_threads_never_have_the_same() -> None:
    busy, twice = set[int](), list[int]()

    def use(address: int) -> None:
        if address in busy:
            twice.append(address)
        busy.add(address)
        time.sleep(1e-4)  # others come
        busy.discard(address)

    threads = [Thread(target=lambda: [given(1024, meanwhile=use) for _ in range(100)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert twice == []
    assert 1 < len(kept()) <= len(threads)


def test_a_call_that_fails_loses_only_its_own() -> None:
    def fails(_: int) -> None:
        raise RuntimeError

    given(1024)
    with pytest.raises(RuntimeError):
        given(1024, meanwhile=fails)
    assert kept() == []
    given(1024)
    assert len(kept()) == 1
