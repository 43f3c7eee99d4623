"""What a process remembers: bounded, listed, cleared, and no result depends on it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import flashtile
from flashtile import memory, ops
from flashtile.memory import CacheInfo, Memory
from flashtile.torch.context import agree
from flashtile.torch.execute import replay
from flashtile.torch.ops import call as ops_call
from flashtile.torch.routes import eager

ROOT = Path(__file__).parent.parent
IMPORT_ALL = """
import pkgutil, flashtile
from importlib import import_module
for module in pkgutil.walk_packages(flashtile.__path__, "flashtile."):
    if module.name.startswith(("flashtile.torch", "flashtile.kernels", "flashtile.ops")):
        import_module(module.name)
print("\\n".join(flashtile.cache_info()))
"""


def test_one_more_lets_go_of_the_oldest_alone() -> None:
    kept = Memory[int, str](3)
    for i in range(5):
        kept[i] = str(i)
    assert kept == {2: "2", 3: "3", 4: "4"}
    kept[3] = "again"  # which is no new entry
    assert kept == {2: "2", 3: "again", 4: "4"}
    assert kept.drop_oldest() == "2"
    kept.clear()
    assert kept.drop_oldest() is None
    assert kept.info() == CacheInfo(0, 3)


def test_reading_is_a_dicts() -> None:
    assert Memory.get is dict.get
    assert Memory.__getitem__ is dict.__getitem__


def attend(length: int) -> list[torch.Tensor]:
    torch.manual_seed(length)
    q, k, v = (torch.randn(1, length, 2, 16, requires_grad=True) for _ in range(3))
    out = flashtile.attention(q, k, v, causal=True)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]


def normalise(length: int) -> list[torch.Tensor]:
    torch.manual_seed(length)
    x = torch.randn(length, 8, requires_grad=True)
    out = ops.rms_norm(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), x)]


@pytest.mark.parametrize(
    ("name", "memory", "run"),
    [("calls", eager._CALLS, attend), ("calls of ops", ops_call._CALLS, normalise)],  # pyright: ignore[reportPrivateUsage]
    ids=["attention", "ops"],
)
def test_calls_are_bounded_and_the_same_when_forgotten(
    name: str, memory: Memory[object, object], run: Callable[[int], list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    flashtile.cache_clear()
    assert flashtile.cache_info()[name].entries == 0
    monkeypatch.setattr(memory, "most", 2)
    first = {length: run(length) for length in (3, 4, 5, 6)}
    assert flashtile.cache_info()[name] == CacheInfo(2, 2)
    for length in (6, 3):  # one that is remembered, and one that is not
        assert all(map(torch.equal, run(length), first[length]))
    flashtile.cache_clear()
    assert {info.entries for info in flashtile.cache_info().values()} == {0}
    assert all(map(torch.equal, run(6), first[6]))


def test_scratch_is_listed_by_its_bytes() -> None:
    flashtile.cache_clear()
    device = torch.device("cpu")
    replay._kept[device].append(replay.take(1024, device))  # pyright: ignore[reportPrivateUsage]
    assert flashtile.cache_info()["scratch"] == CacheInfo(1, None, 1024)
    flashtile.cache_clear()
    assert flashtile.cache_info()["scratch"] == CacheInfo(0, None, 0)


def test_a_name_is_given_once() -> None:
    assert agree._AGREED.info().most == 8192  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(AssertionError, match="calls"):
        memory.listed("calls", Memory(1))


def test_every_memory_is_documented() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, timeout=240, check=True, cwd=ROOT)
    page = (ROOT / "docs/reference/environment.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall("`([a-z][^`]*)`", row)} - {"kernels of JAX programs"}
    assert set(done.stdout.splitlines()) == named
