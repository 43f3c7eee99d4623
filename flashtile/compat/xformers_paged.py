"""xformers' biases whose keys lie in pages, (1, pages * page_size, heads, head_dim), found by a table of pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch

from flashtile.compat.xformers_bias import (
    AttentionBias,
    BlockDiagonalGappyKeysMask,
    BlockDiagonalMask,
    BlockDiagonalPaddedKeysMask,
    check_items,
    written,
)
from flashtile.compat.xformers_items import _GappySeqInfo, _PaddedSeqLenInfo, _SeqLenInfo, whole_numbers
from flashtile.errors import InvalidProblem
from flashtile.problem.mask import CAUSAL, Band


@dataclass(eq=False)
class Paged(AttentionBias):
    """Base of the masks whose keys lie in pages. block_tables: int32 (items, columns), the pages of each item."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: Any
    block_tables: torch.Tensor
    page_size: int

    def __post_init__(self) -> None:
        table, size = self.block_tables, self.page_size
        items = len(self.k_seqinfo.seqlen_py)
        if not isinstance(table, torch.Tensor) or table.dim() != 2 or table.shape[0] != items:
            shape = tuple(table.shape) if isinstance(table, torch.Tensor) else type(table).__name__
            raise InvalidProblem(f"block_tables is {shape}; it must be an int32 tensor (items, columns), of {items} items.")
        if table.dtype not in (torch.int32, torch.int64):
            raise InvalidProblem(f"block_tables is {table.dtype}; it must be int32 or int64.")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidProblem(f"page_size is {size!r}; it must be an int of at least 1.")
        longest = max(self.k_seqinfo.seqlen_py, default=0)
        if longest > table.shape[1] * size:
            raise InvalidProblem(
                f"kv_seqlen reaches row {longest} and block_tables has {table.shape[1]} pages of {size} an item; it must have "
                "as many rows."
            )

    def band(self, seqlen_q: int, seqlen_k: int) -> Band:
        return Band()

    @property
    def first(self) -> str | None:
        """The name of the tensor of items' first keys."""
        return None

    def materialize(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """What is added to scores of all rows of the pages up to the last one that the table names; quadratic, and waits.

        shape: (..., queries, items * columns * page_size).
        """
        table, size = self.block_tables.cpu().long(), self.page_size
        wanted = (self.q_seqinfo.total, table.numel() * size)
        if tuple(shape[-2:]) != wanted:
            raise InvalidProblem(f"shape is {tuple(shape)}; it must end with {wanted}, the mask's queries and the items' rows.")
        made = torch.full((wanted[0], (int(table.max()) + 1) * size), -math.inf, dtype=dtype)
        items = zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), table, strict=True)
        starts = [0] * len(table) if self.first is not None else [a for a, _ in self.k_seqinfo.intervals()]
        for ((q, q_end), (k, k_end), pages), start in zip(items, starts, strict=True):
            row = torch.arange(k - start, k_end - start)
            item = (q_end - q, k_end - k)
            made[q:q_end, pages[row // size] * size + row % size] = written(self.band(*item), item, dtype, "cpu")
        return made.to(device).expand(*shape[:-1], made.shape[-1])

    def to(self, device: Any) -> Any:
        """The same with its tensors on a device."""
        moved = copy(self)
        moved.q_seqinfo, moved.k_seqinfo = self.q_seqinfo.to(device), self.k_seqinfo.to(device)
        moved.block_tables = self.block_tables.to(device)
        return moved


@dataclass(eq=False)
class PagedBlockDiagonalPaddedKeysMask(Paged):
    """Items whose keys are the first kv_seqlen[i] rows of their pages."""

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int], block_tables: torch.Tensor, page_size: int, *,
        device: Any = None,
    ) -> Any:  # fmt: skip
        """Items of these lengths."""
        check_items(q_seqlen, kv_seqlen)
        q = _SeqLenInfo.from_seqlens(whole_numbers("q_seqlen", q_seqlen), device=device)
        size = page_size if isinstance(page_size, int) else 0  # what is wrong, and too few pages, are named below
        columns = block_tables.shape[-1] if getattr(block_tables, "shape", ()) else 0
        longest = max(columns * size, *whole_numbers("kv_seqlen", kv_seqlen), 0)
        return cls(q, _PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, longest, device=device), block_tables, page_size)


@dataclass(eq=False)
class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    """Causal, each item's last query sees the last of its keys."""

    def band(self, seqlen_q: int, seqlen_k: int) -> Band:
        return CAUSAL


@dataclass(eq=False)
class PagedBlockDiagonalGappyKeysMask(Paged):
    """Items whose keys are kv_seqlen[i] rows of their pages from kv_seqstarts[i] on, counted within the item."""

    @property
    def first(self) -> str | None:
        return "seqstart"

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqstarts: Sequence[int], kv_seqlen: Sequence[int], block_tables: torch.Tensor,
        page_size: int, *, device: Any = None,
    ) -> Any:  # fmt: skip
        """kv_seqstarts: as many numbers as items."""
        check_items(q_seqlen, kv_seqlen)
        q = _SeqLenInfo.from_seqlens(whole_numbers("q_seqlen", q_seqlen), device=device)
        return cls(q, _GappySeqInfo.from_seqlens_gappy(kv_seqstarts, kv_seqlen, True, device=device), block_tables, page_size)


@dataclass(eq=False)
class PagedBlockDiagonalCausalWithOffsetGappyKeysMask(PagedBlockDiagonalGappyKeysMask):
    """Causal, each item's last query sees the last of its keys."""

    def band(self, seqlen_q: int, seqlen_k: int) -> Band:
        return CAUSAL


VARLEN_BIASES = (
    BlockDiagonalMask, BlockDiagonalGappyKeysMask, BlockDiagonalPaddedKeysMask, PagedBlockDiagonalPaddedKeysMask,
    PagedBlockDiagonalGappyKeysMask,
)  # fmt: skip
