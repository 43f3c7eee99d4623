"""Which tokens of packed documents a rank holds where each document is shared out by itself, as zigzag shares out one sequence.

Every document has 2 ranks chunks, and so has the whole: chunk c of the whole is chunk c of each document, one after another.
In this order, which is that of shards and of what is gathered, ranks hold zigzag's chunks. All is counted on the device of
cu_seqlens: the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class Documents:
    """Documents, and behind them, like one more, the tokens of none. Chunks of the whole have equally many tokens.

    starts: where each begins in the whole, int64. sizes: how many tokens each has in each chunk, int64 (documents + 1, chunks).
    A document's chunks differ by one token at most: those that are left over go to one chunk each, on from where the
    document before stopped. total: the tokens of the whole, a multiple of the chunks.
    """

    starts: torch.Tensor
    sizes: torch.Tensor
    total: int

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor, total: int, ranks: int) -> Documents:
        """cu_seqlens: ints (documents + 1,). What they must not hold, in a device's memory, stays within the whole."""
        chunks = 2 * ranks
        edges = cu_seqlens.new_zeros(len(cu_seqlens) + 1, dtype=torch.int64)
        edges[1:-1] = cu_seqlens[1:].clamp(0, total).cummax(0).values
        edges[-1] = total
        starts, counts = edges[:-1], edges.diff()[:, None]
        behind = (torch.arange(chunks, device=edges.device) - starts[:, None]) % chunks
        return cls(starts, counts // chunks + (behind < counts % chunks), total)

    @property
    def chunk(self) -> int:
        """How many tokens a chunk of the whole has."""
        return self.total // self.sizes.shape[1]

    @cached_property
    def before(self) -> torch.Tensor:
        """How many tokens of a chunk lie in front of each document's."""
        return self.sizes.cumsum(0) - self.sizes

    @cached_property
    def places(self) -> torch.Tensor:
        """Where each document's part of each chunk begins in the order of chunks."""
        return self.before + torch.arange(self.sizes.shape[1], device=self.before.device) * self.chunk

    def tokens(self) -> Order:
        """The whole's tokens in the order of chunks: of shards, chunks r and 2 ranks - 1 - r are rank r's."""
        first = self.starts[:, None] + self.sizes.cumsum(1) - self.sizes
        return Order(lambda: _spread((first - self.places).T, self.sizes.T, self.total))

    def seen(self, chunks: int) -> Order:
        """The tokens of the first chunks, document by document."""

        def found() -> torch.Tensor:
            sizes = self.sizes[:, :chunks]
            ends = sizes.flatten().cumsum(0).view(sizes.shape)
            return _spread(self.places[:, :chunks] - (ends - sizes), sizes, chunks * self.chunk)

        return Order(found)

    def items(self, first: int, end: int) -> torch.Tensor:
        """cu_seqlens of the documents' tokens in chunks first to end, int32; tokens of none lie behind."""
        return self.before[:, first:end].sum(1, dtype=torch.int32)


def _spread(moved: torch.Tensor, sizes: torch.Tensor, count: int) -> torch.Tensor:
    """0, 1, ... of so many, each moved as its part is, in the order of parts."""
    by = moved.flatten().repeat_interleave(sizes.flatten(), output_size=count)
    return by + torch.arange(count, device=by.device)


class Order:
    """Tokens in another order than theirs. find: which each is, asked when it is wanted."""

    def __init__(self, find: Callable[[], torch.Tensor]):
        self.find = find

    @cached_property
    def at(self) -> torch.Tensor:
        return self.find()

    @cached_property
    def inverse(self) -> torch.Tensor:
        """The order that undoes it."""
        found = torch.empty_like(self.at)
        found[self.at] = torch.arange(len(found), device=found.device)
        return found

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tokens of (1, tokens, heads, d) in this order."""
        return _taken(tensor, self.at)

    def undone(self, tensor: torch.Tensor) -> torch.Tensor:
        """Tokens in this order in their own."""
        return _taken(tensor, self.inverse)


def _taken(tensor: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Tokens as whole rows of memory, which PyTorch copies by 16 bytes on a GPU."""
    return tensor[0].flatten(1)[at].view(1, len(at), *tensor.shape[2:])
