"""Warms a problem, calls attention and its backward as if on an H100, and prints of every kernel whether it was on disk.

See test_launch.py.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

import tests.driver.launches  # noqa: F401  # pyright: ignore[reportUnusedImport] (the driver's stand-in)

# isort: split

from triton import knobs

import flashtile
import flashtile.torch.execute.prepared
from flashtile.plan.device import H100
from flashtile.warm import warm

SPELLING = "attention(q=1x128x2x64,kv=128x2x64,fp16)"


def main() -> None:
    torch._C._cuda_getDevice = lambda: None  # pyright: ignore[reportAttributeAccessIssue] (a CPU's index)
    told: list[tuple[int, int]] = []
    for backward in (False, True, True):
        print(warm([SPELLING], H100, 2, lambda done, total, what: told.append((done, total)), backward))
    assert told == [(1, 1), *2 * [(done, 4) for done in (1, 2, 3, 4)]]
    found: list[tuple[str, bool]] = []

    def listen(src: Any, cache_hit: bool, **_: Any) -> None:
        found.append((src.name, cache_hit))

    knobs.compilation.listener = listen
    with patch.object(flashtile.torch.execute.prepared, "device_of", lambda _: H100):
        q, k, v = (torch.randn(1, 128, 2, 64, dtype=torch.float16, requires_grad=True) for _ in range(3))
        flashtile.attention(q, k, v).backward(torch.empty_like(q))
    print(found)


if __name__ == "__main__":
    main()
