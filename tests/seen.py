"""The library's operators that run, for tests of who sees them."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Seen(TorchDispatchMode):
    """Their names, in order: "flashtile.attention.default"."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "flashtile":
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))
