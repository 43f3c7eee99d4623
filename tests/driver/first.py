"""First calls as if on an H100: prints of every kernel compiled by which call it was, and whether it was on disk.

Without a gradient, with one where the forward is on disk, and with one where nothing is. See test_launch.py.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

import tests.driver.launches  # noqa: F401  # pyright: ignore[reportUnusedImport] (the driver's stand-in)

# isort: split

from triton import knobs

import flashtile
import flashtile.torch.execute.prepared as prepared
from flashtile.kernels.sm90.forward.kernel import attention_forward
from flashtile.plan.device import H100
from flashtile.torch.execute.bound import Bound


class OnCard(Bound):
    """One that compiles ahead, as on a GPU."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.ahead = False


def main() -> None:
    torch._C._cuda_getDevice = lambda: None  # pyright: ignore[reportAttributeAccessIssue] (a CPU's index)
    found: list[tuple[str, str, bool]] = []
    now = ""

    def listen(src: Any, cache_hit: bool, **_: Any) -> None:
        found.append((now, src.name, cache_hit))

    def tensors(head_dim: int, grad: bool) -> list[torch.Tensor]:
        return [torch.randn(1, 128, 2, head_dim, dtype=torch.float16, requires_grad=grad) for _ in range(3)]

    knobs.compilation.listener = listen
    with patch.object(prepared, "device_of", lambda _: H100), patch.object(prepared, "Bound", OnCard):
        now = "alone"
        flashtile.attention(*tensors(64, False))
        now = "on disk"
        attention_forward.device_caches.clear()
        flashtile.attention(*(torch.cat((t, t)).requires_grad_() for t in tensors(64, False)))
        now = "forward"
        out = flashtile.attention(*tensors(128, True), causal=True)
        now = "backward"
        out.backward(torch.empty_like(out))
    print(found)


if __name__ == "__main__":
    main()
