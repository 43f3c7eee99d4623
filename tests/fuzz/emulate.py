"""What processes of `flashtile fuzz` call first to run Hopper's kernels in the emulator: --setup tests.fuzz.emulate:install."""

from __future__ import annotations

from contextlib import ExitStack

from tests.hopper.emulated_cases import running_on  # installs the emulator

# isort: split

from tests.hopper.emulated import SMALL

FOR_GOOD = ExitStack()


def install() -> None:
    """Plans of this process are for a small H100, and run in the emulator."""
    FOR_GOOD.enter_context(running_on(SMALL))
