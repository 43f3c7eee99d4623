"""What the library remembers from call to call in a process: where it is listed, how it is bounded, and how it is let go of.

Every memory of this kind has a name and is in `cache_info()`. What hangs on an object (a mask's calls, a plan's addresses) is a
`Memory` without a name, and goes with it. Facts of the machine (a device's properties, a library's handle) are no memories.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from threading import RLock
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")
Given = ParamSpec("Given")


class CacheInfo(NamedTuple):
    """How many entries a memory holds, and at most; how many bytes of tensors, where these are its own."""

    entries: int
    most: int | None
    bytes: int = 0


class Listed(Protocol):
    """What `cache_info` and `cache_clear` ask of a memory."""

    def info(self) -> CacheInfo: ...

    def clear(self) -> None: ...


_LISTED: dict[str, Listed] = {}
_CHANGING = RLock()  # of whoever writes: reading is a dict's, and asks nobody. An entry that goes may take others with it


def listed(name: str, memory: Listed) -> None:
    """Let `cache_info` and `cache_clear` know of a memory."""
    assert name not in _LISTED, name
    _LISTED[name] = memory


class Memory(dict[Key, Value]):
    """A dict of at most `most` entries: one more lets go of the oldest. With a name it is listed."""

    def __init__(self, most: int, name: str | None = None):
        super().__init__()
        self.most = most
        if name is not None:
            listed(name, self)

    def __setitem__(self, key: Key, value: Value) -> None:
        with _CHANGING:
            while len(self) >= self.most and key not in self:
                self.drop_oldest()
            super().__setitem__(key, value)

    def drop_oldest(self) -> Value | None:
        """The oldest entry's value, which is no longer there; None where there is none."""
        with _CHANGING:
            return self.pop(next(iter(self))) if self else None

    def clear(self) -> None:
        with _CHANGING:
            super().clear()

    def info(self) -> CacheInfo:
        return CacheInfo(len(self), self.most)


class Remembered:
    """What `functools.lru_cache` made of a function."""

    def __init__(self, function: Any):
        self.function = function

    def info(self) -> CacheInfo:
        found = self.function.cache_info()
        return CacheInfo(found.currsize, found.maxsize)

    def clear(self) -> None:
        self.function.cache_clear()


def remembered(most: int, name: str) -> Callable[[Callable[Given, Value]], Callable[Given, Value]]:
    """A decorator: `functools.lru_cache` of so many results, listed."""

    def decorate(function: Callable[Given, Value]) -> Callable[Given, Value]:
        found = lru_cache(maxsize=most)(function)
        listed(name, Remembered(found))
        return found  # pyright: ignore[reportReturnType]  which has the function's parameters, as lru_cache does not say

    return decorate


def cache_info() -> dict[str, CacheInfo]:
    """What is remembered in this process: by name, (entries, most of them, bytes).

    Memories of parts that were never used are not there.
    """
    return {name: memory.info() for name, memory in sorted(_LISTED.items())}


def cache_clear() -> None:
    """Let go of everything in `cache_info`: plans, prepared calls and their CUDA graphs, scratch.

    Results stay the same; the next call of each kind is prepared anew, which takes longer. Compiled kernels stay where Triton
    keeps them. Calls of other threads may go on meanwhile.
    """
    for memory in tuple(_LISTED.values()):
        memory.clear()
