"""Runs Gluon kernels for Hopper as plain Python on the CPU: README.md."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from gluon_emulator import language, launch, words
from gluon_emulator.machine import Deadlock, extend_tensors

__all__ = ["Deadlock", "install", "seed"]


def seed(number: int) -> None:
    """Let the roles of all kernels from here on run in another order, the same for the same number."""
    launch.DICE.seed(number)


def install(number: int = 0) -> None:
    """Put the emulator in Gluon's place, for the whole process, before any kernel's module is imported."""
    seed(number)
    extend_tensors()
    hopper = _module(
        "hopper", mbarrier=words.mbarrier, fence_async_shared=words.fence_async_shared, warpgroup_mma=words.warpgroup_mma,
        warpgroup_mma_wait=words.warpgroup_mma_wait,
        tma=_module(
            "tma", async_copy_global_to_shared=words.tma_load, async_load=words.tma_load, store_wait=words.store_wait,
            async_copy_shared_to_global=words.tma_store, async_store=words.tma_store, async_atomic_add=words.tma_add,
        ),
    )  # fmt: skip
    home = "triton.experimental.gluon"
    standing: dict[str, ModuleType] = {
        home: _module("gluon", jit=launch.jit, constexpr_function=launch.unchanged, __path__=[]),
        f"{home}.language": language,
        f"{home}.language.nvidia": _module("nvidia", __path__=[]),
        f"{home}.language.nvidia.hopper": hopper,
        f"{home}.nvidia": _module("nvidia", __path__=[]),
        f"{home}.nvidia.hopper": _module("hopper", TensorDescriptor=launch.TensorDescriptor),
    }
    language.__path__ = []  # pyright: ignore[reportAttributeAccessIssue]  it stands for a package
    for name in ("triton", "triton.experimental"):
        try:
            import_module(name)
        except ImportError:
            sys.modules[name] = _module(name, __path__=[])
    for name, module in standing.items():
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        setattr(sys.modules[parent], last, module)


def _module(name: str, **values: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(values)
    return module
