"""Two streams that take turns, so that one call's last tiles run beside the next one's first."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import cache

import torch


class Lanes:
    """On a GPU turns alternate between the current stream and another; elsewhere they follow one another.

    The other stream waits for what the current one had to do when the lanes were made, and `join` lets the current one wait for
    the other. What is made in a turn may be used, and let go of, after that: the other stream's next lanes wait for it. What
    was made before may not be let go of before `join`, unless the allocator knows of its use (`record_stream`).
    """

    def __init__(self, device: torch.device):
        self.current, self.begun, self.turns = None, None, 0
        if device.type == "cuda":
            self.current = torch.cuda.current_stream(device)
            self.begun = self.current.record_event()

    @contextmanager
    def turn(self) -> Generator[None]:
        self.turns += 1
        if self.current is None or self.begun is None or self.turns % 2:
            yield
            return
        other = _other(self.current.device)
        other.wait_event(self.begun)
        with torch.cuda.stream(other):
            yield

    def join(self) -> None:
        if self.current is not None and self.turns > 1:
            self.current.wait_stream(_other(self.current.device))


@cache
def _other(device: torch.device) -> torch.cuda.Stream:
    """One for each device: launches are remembered by stream."""
    return torch.cuda.Stream(device)
