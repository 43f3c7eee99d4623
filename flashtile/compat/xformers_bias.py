"""xformers' attention biases: `xformers.ops.fmha.attn_bias`, version 0.0.35. Each says which keys a query sees.

Classes with "FromBottomRight", "WithOffset" or "PaddedKeys" in their names count positions from the last key, the others from
the first. `make_local_attention` gives what its class there gives: of `BlockDiagonalCausalFromBottomRightMask`, too, a window
that is counted from the first key; `make_local_attention_from_bottomright` counts from the last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from flashtile.compat.xformers_items import (
    _GappySeqInfo,
    _PaddedSeqLenInfo,
    _SeqLenInfo,
    whole_numbers,
)
from flashtile.errors import InvalidProblem, NotSupported
from flashtile.features.masks.top_left import TopLeft
from flashtile.problem.mask import CAUSAL, FULL, Band
from flashtile.reference.attention import visible


class AttentionBias:
    """Base of all biases: what `memory_efficient_attention` takes beside tensors."""

    def band(self, seqlen_q: int, seqlen_k: int) -> Band:
        """What a query sees of an item with so many queries and keys."""
        reason = "a bias of your own, which has no `band`; give it as a tensor, what its `materialize` returns"
        raise NotSupported(type(self).__qualname__, {"flashtile": [reason]})

    def materialize(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """What is added to the scores: 0 where a query sees a key, else -inf. shape: (..., seqlen_q, seqlen_k). Quadratic."""
        return written(self.band(*shape[-2:]), shape, dtype, device)

    def to(self, device: Any) -> Any:
        """The same with its tensors on a device."""
        return self


@dataclass(frozen=True)
class LocalAttentionFromBottomRightMask(AttentionBias):
    """Keys up to window_left before and window_right behind the query, positions aligned bottom-right."""

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        _check_sides(self.window_left, self.window_right)

    def band(self, seqlen_q: int, seqlen_k: int) -> Band:
        return Band(self.window_left, self.window_right)


class LowerTriangularMask(AttentionBias):
    """Causal, positions counted from the first key. device is not needed, there neither."""

    def __init__(self, device: Any = None):
        pass

    def band(self, seqlen_q: int, seqlen_k: int) -> Band:
        return _from_first(None, seqlen_q, seqlen_k)

    def add_bias(self, bias: torch.Tensor) -> LowerTriangularMaskWithTensorBias:
        """The same with a tensor that is added to the scores."""
        return LowerTriangularMaskWithTensorBias(bias)

    def make_local_attention(self, window_size: int) -> NoReturn:
        """NotSupported: xformers has none either."""
        raise NotSupported("LowerTriangularMask.make_local_attention", {
            "flashtile": ["a window counted from the first key; use LowerTriangularFromBottomRightMask"]
        })  # fmt: skip


class LowerTriangularFromBottomRightMask(AttentionBias):
    """Causal, the last query sees the last key."""

    def band(self, seqlen_q: int, seqlen_k: int) -> Band:
        return CAUSAL

    def make_local_attention(self, window_size: int) -> LowerTriangularFromBottomRightLocalAttentionMask:
        """The same with the last window_size keys alone."""
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclass(frozen=True)
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """Causal, and the last _window_size keys alone, the query's own among them."""

    _window_size: int

    def __post_init__(self) -> None:
        _check_window(self._window_size)

    def band(self, seqlen_q: int, seqlen_k: int) -> Band:
        return Band(self._window_size - 1, 0)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """Causal, positions counted from the first key, with a tensor that is added to the scores."""

    def __init__(self, bias: torch.Tensor):
        self._bias = bias

    def to(self, device: Any) -> LowerTriangularMaskWithTensorBias:
        return LowerTriangularMaskWithTensorBias(self._bias.to(device))

    def materialize(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        return super().materialize(shape, dtype, device) + self._bias


class ItemsMask(AttentionBias):
    """Base of masks of items one after another in (1, total, heads, head_dim), each of which sees its own keys alone."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: Any  # _SeqLenInfo, or what extends it

    def band(self, seqlen_q: int, seqlen_k: int) -> Band:
        return FULL

    def mask(self) -> Any:
        """One of our masks that is the band of every item."""
        return self.band(0, 0)

    def materialize(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        totals = (self.q_seqinfo.total, self.k_seqinfo.total)
        if tuple(shape[-2:]) != totals:
            raise InvalidProblem(f"shape is {tuple(shape)}; it must end with {totals}, the mask's queries and keys.")
        made = torch.full(totals, -math.inf, dtype=dtype, device=device)
        for (q, q_end), (k, k_end) in zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True):
            item = (q_end - q, k_end - k)
            made[q:q_end, k:k_end] = written(self.band(*item), item, dtype, device)
        return made.expand(shape)

    def to(self, device: Any) -> Any:
        """The same with its tensors on a device; itself where they would be there anyway."""
        if self.q_seqinfo.device == self.k_seqinfo.device == torch.device(device):
            return self
        moved = copy(self)
        moved.q_seqinfo = self.q_seqinfo.to(device)
        moved.k_seqinfo = moved.q_seqinfo if self.k_seqinfo is self.q_seqinfo else self.k_seqinfo.to(device)
        return moved


@dataclass(eq=False)
class BlockDiagonalMask(ItemsMask):
    """Items whose queries and keys lie one after another, and all count."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo
    _batch_sizes: Sequence[int] | None = None

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, *, device: Any = None) -> Any:
        """Items of these lengths; keys as many as queries by default. device: where `seqstart` is; calls need it not."""
        q_sizes = whole_numbers("q_seqlen", q_seqlen)
        k_sizes = q_sizes if kv_seqlen is None else whole_numbers("kv_seqlen", kv_seqlen)
        check_items(q_sizes, k_sizes)
        q = _SeqLenInfo.from_seqlens(q_sizes, device=device)
        return cls(q, q if q_sizes == k_sizes else _SeqLenInfo.from_seqlens(k_sizes, device=device))

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[torch.Tensor]) -> tuple[Any, torch.Tensor]:
        """(the mask, the tensors (batch, seqlen, ...) one after another as (1, total, ...))."""
        made = cls.from_seqlens(_seqlens(tensors))
        made._batch_sizes = [t.shape[0] for t in tensors]
        return made, _joined(tensors)

    @classmethod
    def from_tensor_lists_qkv(
        cls, tensors_q: Sequence[torch.Tensor], tensors_k: Sequence[torch.Tensor],
        tensors_v: Sequence[torch.Tensor] | None = None,
    ) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """(the mask, q, k, v), as `from_tensor_list` of each; v is None without tensors_v."""
        sizes = [[t.shape[0] for t in tensors_q], [t.shape[0] for t in tensors_k]]
        if sizes[0] != sizes[1]:
            raise InvalidProblem(f"tensors_k have batches {sizes[1]} and tensors_q {sizes[0]}; they must be equal.")
        if tensors_v is not None and [t.shape[:2] for t in tensors_v] != [t.shape[:2] for t in tensors_k]:
            shapes = ([tuple(t.shape[:2]) for t in tensors] for tensors in (tensors_v, tensors_k))
            raise InvalidProblem("tensors_v have batches and seqlens {} and tensors_k {}; they must be equal.".format(*shapes))
        made = cls.from_seqlens(_seqlens(tensors_q), _seqlens(tensors_k))
        made._batch_sizes = sizes[0]
        return made, _joined(tensors_q), _joined(tensors_k), None if tensors_v is None else _joined(tensors_v)

    def split_queries(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """(1, total, ...) in the parts that the mask was made from, or by item, (1, seqlen, ...)."""
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    split = split_queries

    def split_kv(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The same of keys or values."""
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def make_causal(self) -> BlockDiagonalCausalMask:
        """The same items, causal, positions counted from each item's first key."""
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        """The same items, causal, each item's last query sees its last key."""
        return BlockDiagonalCausalFromBottomRightMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        """The same items, causal, with the last window_size keys alone, positions counted from each item's first key."""
        return BlockDiagonalCausalLocalAttentionMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size)

    def make_local_attention_from_bottomright(self, window_size: int) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        """The same, positions counted from each item's last key."""
        made = BlockDiagonalCausalLocalAttentionFromBottomRightMask
        return made(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size)


@dataclass(eq=False)
class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Causal in each item, positions counted from its first key."""

    def band(self, seqlen_q: int, seqlen_k: int) -> Band:
        return _from_first(self._left, seqlen_q, seqlen_k)

    @property
    def _left(self) -> int | None:
        return None

    def mask(self) -> Any:
        """A band where all items have as many keys more than queries, as far as the lists say it for sure."""
        if self.q_seqinfo is self.k_seqinfo:
            return self.band(0, 0)
        items = zip(self.q_seqinfo.places, self.k_seqinfo.places, strict=True)
        shifts = {(k_end - k) - (q_end - q) for (q, q_end), (k, k_end) in items}
        sure = len(shifts) == 1 and not (self.q_seqinfo.is_shown or self.k_seqinfo.is_shown)
        return self.band(0, shifts.pop()) if sure else TopLeft(self._left)


@dataclass(eq=False)
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Causal in each item, its last query sees its last key."""

    def band(self, seqlen_q: int, seqlen_k: int) -> Band:
        return CAUSAL


@dataclass(eq=False)
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """Causal in each item, with the last _window_size keys alone, positions counted from its first key."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        _check_window(self._window_size)

    @property
    def _left(self) -> int | None:
        return self._window_size - 1


@dataclass(eq=False)
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """Causal in each item, with the last _window_size keys alone, positions counted from its last key."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        _check_window(self._window_size)

    def band(self, seqlen_q: int, seqlen_k: int) -> Band:
        return Band(self._window_size - 1, 0)


@dataclass(eq=False)
class BlockDiagonalPaddedKeysMask(ItemsMask):
    """Items whose keys lie in places of kv_padding tokens each, of which the first kv_seqlen[i] count."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _PaddedSeqLenInfo

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], causal_diagonal: Any = None, *,
        device: Any = None,
    ) -> Any:  # fmt: skip
        """causal_diagonal is not used, there neither. device: as of `BlockDiagonalMask`."""
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen, device))

    def make_paged(self, block_tables: torch.Tensor, page_size: int, paged_type: Any) -> Any:
        """The mask of a type of `xformers_paged` of the same items, whose keys lie in pages."""
        return paged_type(self.q_seqinfo, self.k_seqinfo, block_tables, page_size)

    def make_local_attention(self, window_left: int, window_right: int) -> BlockDiagonalLocalAttentionPaddedKeysMask:
        """The same with keys up to window_left before and window_right behind the query alone, counted from the last key."""
        return BlockDiagonalLocalAttentionPaddedKeysMask(self.q_seqinfo, self.k_seqinfo, window_left, window_right)


@dataclass(eq=False)
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Causal, each item's last query sees the last of its keys that count."""

    causal_diagonal: Any = None  # not used, there neither

    def band(self, seqlen_q: int, seqlen_k: int) -> Band:
        return CAUSAL


@dataclass(eq=False)
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Keys up to window_left before and window_right behind the query, each item's last query at the last that counts."""

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        _check_sides(self.window_left, self.window_right)

    def band(self, seqlen_q: int, seqlen_k: int) -> Band:
        return Band(self.window_left, self.window_right)

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], window_left: int, window_right: int
    ) -> Any:
        """As `from_seqlens`."""
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen), window_left, window_right)


@dataclass(eq=False)
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Causal, with the last _window_size keys alone, each item's last query at the last key that counts."""

    _window_size: int

    def __post_init__(self) -> None:
        _check_window(self._window_size)

    def band(self, seqlen_q: int, seqlen_k: int) -> Band:
        return Band(self._window_size - 1, 0)

    @classmethod
    def from_seqlens_local(cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], window_size: int) -> Any:
        """As `from_seqlens`."""
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen), window_size)


@dataclass(eq=False)
class BlockDiagonalGappyKeysMask(ItemsMask):
    """Items whose keys lie anywhere: kv_seqlen[i] of them from kv_seqstarts[i] on; two items may share keys."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _GappySeqInfo

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqstarts: Sequence[int], kv_seqlen: Sequence[int], *, device: Any = None
    ) -> Any:
        """kv_seqstarts: one more number than items, the last of which is how many keys there are."""
        check_items(q_seqlen, kv_seqlen)
        q = _SeqLenInfo.from_seqlens(whole_numbers("q_seqlen", q_seqlen), device=device)
        return cls(q, _GappySeqInfo.from_seqlens_gappy(kv_seqstarts, kv_seqlen, device=device))

    def make_paged(self, block_tables: torch.Tensor, page_size: int, notional_padding: int, paged_type: Any) -> Any:
        """The mask of a type of `xformers_paged`, whose items' keys lie in pages; here item i's lie in a place of its own, from
        i * notional_padding on.
        """
        if notional_padding % page_size:
            raise InvalidProblem(f"notional_padding is {notional_padding}; it must be a multiple of page_size, {page_size}.")
        return paged_type(self.q_seqinfo, self.k_seqinfo.within(notional_padding), block_tables, page_size)


@dataclass(eq=False)
class BlockDiagonalCausalWithOffsetGappyKeysMask(BlockDiagonalGappyKeysMask):
    """Causal, each item's last query sees the last of its keys."""

    def band(self, seqlen_q: int, seqlen_k: int) -> Band:
        return CAUSAL


def written(band: Band, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    seqlen_q, seqlen_k = shape[-2:]
    seen = visible(band, seqlen_q, seqlen_k, torch.device(device))
    return torch.zeros(shape, dtype=dtype, device=device).masked_fill_(~seen, -math.inf)


def _from_first(left: int | None, seqlen_q: int, seqlen_k: int) -> Band:
    """Causal with `left` keys before the query's own, counted from the first key."""
    ahead = seqlen_k - seqlen_q
    return Band(None if left is None else left + ahead, -ahead)


def _padded(q_seqlen: Any, kv_padding: int, kv_seqlen: Any, device: Any = None) -> tuple[_SeqLenInfo, _PaddedSeqLenInfo]:
    check_items(q_seqlen, kv_seqlen)
    q = _SeqLenInfo.from_seqlens(whole_numbers("q_seqlen", q_seqlen), device=device)
    return q, _PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, kv_padding, device=device)


def _seqlens(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [t.shape[1] for t in tensors for _ in range(t.shape[0])]


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.flatten(0, 1) for t in tensors])[None]


def check_items(q_seqlen: Sequence[int], kv_seqlen: Sequence[int]) -> None:
    if len(kv_seqlen) != len(q_seqlen):
        raise InvalidProblem(f"kv_seqlen has {len(kv_seqlen)} items and q_seqlen {len(q_seqlen)}; they must be as many.")


def _check_window(size: Any) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InvalidProblem(f"window_size is {size!r}; it must be a positive int.")


def _check_sides(window_left: Any, window_right: Any) -> None:
    for name, size in (("window_left", window_left), ("window_right", window_right)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise InvalidProblem(f"{name} is {size!r}; it must be an int, at least 0.")
