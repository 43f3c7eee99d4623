"""Runs attention and its backward several times as if on an H100, and prints what the last ones were made by.

See test_launch.py.
"""

from __future__ import annotations

import sys
from unittest.mock import patch

import torch

import tests.driver.launches  # noqa: F401  # pyright: ignore[reportUnusedImport] (the driver's stand-in)

# isort: split

import flashtile
import flashtile.torch.execute.prepared
from flashtile.plan.device import H100
from flashtile.torch.execute.replay import Replay

CALLS = 4


def main() -> None:
    torch._C._cuda_getDevice = lambda: None  # pyright: ignore[reportAttributeAccessIssue] (a CPU's index)
    made: list[list[str | None]] = []
    direct = Replay.direct

    def watched(self: Replay, *given: object, **options: object) -> object:
        outputs = direct(self, *given, **options)  # pyright: ignore
        made.append([name if t is not None else None for name, t in zip(self.made, outputs, strict=True)])
        return outputs

    with (
        patch.object(flashtile.torch.execute.prepared, "device_of", lambda _: H100),
        patch.object(Replay, "direct", watched),
    ):
        for wanted in sys.argv[1:]:
            inputs = {n: torch.randn(1, 128, 2, 64, dtype=torch.float16, requires_grad=n in wanted) for n in "qkv"}
            for _ in range(CALLS):
                out = flashtile.attention(**inputs)
                if out.requires_grad:
                    leaves = [t for t in inputs.values() if t.requires_grad]
                    found = torch.autograd.grad(out, leaves, torch.empty_like(out))
                    assert [(g.shape, g.stride(), g.dtype) for g in found] == [(t.shape, t.stride(), t.dtype) for t in leaves]
            print(made)
            made.clear()


if __name__ == "__main__":
    main()
