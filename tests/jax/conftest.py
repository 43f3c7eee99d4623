"""Tests of flashtile.jax, in an environment with JAX and without PyTorch: `make jax` runs them, with this file alone.

Twice: compiled (TRITON_INTERPRET=0, everything but test_interpreted.py) and interpreted (that file).
"""

from __future__ import annotations

import gc
import os
from importlib.util import find_spec

import pytest

DEVICES = 8  # simulated

if find_spec("jax") is None:
    collect_ignore_glob = ["*.py"]
else:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flags = [os.environ.get("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={DEVICES}"]
    if os.environ["JAX_PLATFORMS"] == "cpu":  # a third of the time: small programs take longer to compile than to run
        flags += ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
        flags += ["--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true"]  # half of what is left
    os.environ["XLA_FLAGS"] = " ".join(flags)


def pytest_configure(config: pytest.Config) -> None:
    from flashtile.triton_glue import language as _triton

    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array:DeprecationWarning:triton")

    if _triton.INTERPRETED:
        from tests.interpreter import hasten

        hasten()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from flashtile.triton_glue import language as _triton

    for item in items:
        interprets = item.path.name == "test_interpreted.py"
        if interprets != _triton.INTERPRETED and (interprets or item.get_closest_marker("compiles")):
            item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=" + str(int(interprets))))


def pytest_collection_finish() -> None:
    """What modules hold stays: no garbage collection looks through it again."""
    gc.freeze()
    gc.set_threshold(20_000, 20)
