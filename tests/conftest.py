"""Where tests run, and what they find in uninitialised memory.

Without a GPU the Triton kernels run in Triton's interpreter; with one, the same tests run on it.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from typing import Any

import hypothesis
import pytest
import torch

from tests import forked

HAS_GPU = torch.cuda.is_available()
os.environ["TRITON_INTERPRET"] = "0" if HAS_GPU else "1"  # read by every @triton.jit: tests import flashtile after this file

torch.set_num_threads(1)  # xdist gives every core a worker of its own
hypothesis.settings.register_profile("flashtile", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("flashtile")


def pytest_configure(config: pytest.Config) -> None:
    from flashtile.triton_glue import language as _triton

    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array:DeprecationWarning:triton")

    if _triton.INTERPRETED:
        from tests.interpreter import hasten

        hasten()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, by marker. Tests that compile and emulate for a minute come first: begun last, they
    leave other cores idle, and what tests of a file share is made again by a worker that takes some of them over.
    """
    items.sort(key=lambda item: item.path.parent.name not in ("compile", "hopper", "export"))
    capability = torch.cuda.get_device_capability() if HAS_GPU else (0, 0)
    missing = {
        "gpu": None if HAS_GPU else "no GPU",
        "sm90": None if capability[0] == 9 else "no Hopper GPU",
        "whole": None if "whole" in config.getoption("markexpr") else "`make compile` does",
        "multi_gpu": None if torch.cuda.device_count() > 1 else "fewer than two GPUs",
    }
    for item in items:
        for marker, reason in missing.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """What modules hold stays: no garbage collection looks through it again."""
    global _spent
    _spent = _all_spent()
    gc.freeze()
    gc.set_threshold(20_000, 20)


CORE_SECONDS: Counter[str] = Counter()  # of tests that have run, by folder
_spent = 0.0  # by this process and what it has started, when it last reported


def _all_spent() -> float:
    return sum(os.times()[:4]) + forked.SPENT[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Reports say what a test, its fixtures or their end have cost, also of what they started: xdist hands that on."""
    global _spent
    report = yield
    before, _spent = _spent, _all_spent()
    report.core_seconds = _spent - before
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    *_, folder = report.nodeid.partition("::")[0].rpartition("/")[0].split("/")
    CORE_SECONDS[folder] += getattr(report, "core_seconds", 0.0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Core minutes by folder: what a run takes on so many cores, however busy they are."""
    if (total := sum(CORE_SECONDS.values())) > 60:
        most = ", ".join(f"{folder} {spent / 60:.1f}" for folder, spent in CORE_SECONDS.most_common() if spent > 6)
        terminalreporter.write_line(f"Core minutes: {total / 60:.1f} in all; {most}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `backend` runs once for each, by name; with `variant` too, for each backward that it has."""
    from tests.backends import VARIANTS_HERE

    if any("backend" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")):
        return  # it lists them itself
    if "variant" in metafunc.fixturenames:
        pairs = [(name, variant) for name, variants in VARIANTS_HERE.items() for variant in variants]
        metafunc.parametrize(("backend", "variant"), pairs)
    elif "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", VARIANTS_HERE)


@pytest.fixture
def device() -> torch.device:
    """The GPU where there is one, else the CPU (where Triton is interpreted)."""
    return torch.device("cuda", torch.cuda.current_device()) if HAS_GPU else torch.device("cpu")


@pytest.fixture
def place(backend: str, device: torch.device) -> torch.device:
    """Where the tensors of a backend's tests lie: the CPU backend knows one place only."""
    return device if backend != "cpu" else torch.device("cpu")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory holds NaN: whoever forgets to write an element, or reads one too many, fails."""
    for home, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(home, name, _poisoned(getattr(home, name)))


@pytest.fixture
def strict_determinism() -> Iterator[None]:
    """The test runs under torch.use_deterministic_algorithms(True)."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def hopper_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper's kernels are planned, and not refused for being interpreted."""
    from flashtile.kernels.sm90 import backend
    from flashtile.triton_glue import language as _triton

    monkeypatch.setattr(_triton, "INTERPRETED", False)
    monkeypatch.setattr(backend, "gluon_refusal", lambda: None)


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        if tensor.is_floating_point() and tensor.device.type != "meta":
            with torch.no_grad():
                tensor.fill_(float("nan"))
        return tensor

    return poisoned


@pytest.fixture
def within_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dispatch modes see what `flashtile.ops` do, not their operators."""
    monkeypatch.setattr("flashtile.torch.execute.plain.modes", lambda: 0)
