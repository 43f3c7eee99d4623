"""What every mask can show of itself."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Shown:
    """Base of masks."""

    def show(
        self, seqlen_q: int | None = None, seqlen_k: int | None = None, *, batch: int = 1, heads: int = 1, item: int = 0,
        head: int = 0,
    ) -> Any:  # fmt: skip
        """A picture of the mask: text at a prompt or when printed, a picture in a notebook, a file by `save(path)`.

        seqlen_q, seqlen_k: the lengths to show it for; seqlen_k is seqlen_q by default. Blocks have lengths of their own.
        batch, heads: as in the calls to come, where the mask's tensors differ among them; `item` and `head` are shown.

        Needs PyTorch. Raises InvalidProblem.
        """
        # Masks are values that need no PyTorch, so that this is named when it is called.
        return import_module("..torch.api.picture", __package__).show(self, seqlen_q, seqlen_k, (batch, heads), (item, head))
