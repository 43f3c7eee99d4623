"""xformers' attention biases: `xformers.ops.fmha.attn_bias`. Each says which keys a query sees, as an argument of ours.

`LowerTriangular...` without "FromBottomRight" counts positions from the first key; the others from the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from flashtile.compat.asked import top_left
from flashtile.errors import InvalidProblem, NotSupported
from flashtile.predicate.top_left import TopLeft
from flashtile.spec.mask import CAUSAL, Band
from flashtile.torch.lasting import keeps, lasting


class AttentionBias:
    """Base of all biases: what `memory_efficient_attention` takes beside tensors."""

    def mask(self, seqlen_q: int, seqlen_k: int) -> Any:
        """One of our masks, or None, for so many queries and keys of every item."""
        raise NotImplementedError

    def to(self, device: Any) -> AttentionBias:
        """Itself: its tensors are made where they are needed."""
        return self


@dataclass(frozen=True)
class LocalAttentionFromBottomRightMask(AttentionBias):
    """Keys up to window_left before and window_right behind the query, positions aligned bottom-right."""

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        for name in ("window_left", "window_right"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise InvalidProblem(f"{name} is {size!r}; it must be an int, at least 0.")

    def mask(self, seqlen_q: int, seqlen_k: int) -> Any:
        return Band(self.window_left, self.window_right)


class LowerTriangularMask(AttentionBias):
    """Causal, positions counted from the first key."""

    def mask(self, seqlen_q: int, seqlen_k: int) -> Any:
        return top_left(True, seqlen_q, seqlen_k)

    def add_bias(self, bias: torch.Tensor) -> LowerTriangularMaskWithTensorBias:
        """The same with a tensor that is added to the scores."""
        return LowerTriangularMaskWithTensorBias(bias)

    def make_local_attention(self, window_size: int) -> LowerTriangularFromBottomRightLocalAttentionMask:
        """The same with the last window_size keys alone."""
        raise NotSupported("LowerTriangularMask.make_local_attention", {
            "flashtile": ["a window counted from the first key; use LowerTriangularFromBottomRightMask"]
        })  # fmt: skip


class LowerTriangularFromBottomRightMask(AttentionBias):
    """Causal, the last query sees the last key."""

    def mask(self, seqlen_q: int, seqlen_k: int) -> Any:
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

    def mask(self, seqlen_q: int, seqlen_k: int) -> Any:
        return Band(self._window_size - 1, 0)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """Causal, positions counted from the first key, with a tensor that is added to the scores."""

    def __init__(self, bias: torch.Tensor):
        self._bias = bias


@dataclass(frozen=True)
class _SeqLenInfo:
    """Where items lie among all tokens: item i from seqstart_py[i] to seqstart_py[i + 1]."""

    seqstart_py: tuple[int, ...]

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int]) -> _SeqLenInfo:
        """Items of these lengths, one after another."""
        return cls((0, *accumulate(seqlens)))

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.seqstart_py[:-1], self.seqstart_py[1:], strict=True))

    @property
    def max_seqlen(self) -> int:
        return max(self.lengths, default=0)

    @property
    def seqstart(self) -> torch.Tensor:
        return _lengths(self.seqstart_py, torch.device("cpu"))

    def split(self, tensor: torch.Tensor, batch_sizes: Sequence[int] | None = None) -> list[torch.Tensor]:
        """(1, total, ...) in parts of so many items of one length each, by default one: (items, seqlen, ...)."""
        total = self.seqstart_py[-1]
        if tensor.shape[:2] != (1, total):
            raise InvalidProblem(f"tensor has shape {tuple(tensor.shape)}; it must be (1, {total}, ...).")
        tokens, parts, first = tensor[0].split(self.lengths), list[torch.Tensor](), 0
        for size in batch_sizes or [1] * len(tokens):
            parts.append(torch.stack(tokens[first : first + size]))
            first += size
        return parts


class ItemsMask(AttentionBias):
    """Base of masks of items one after another in (1, total, heads, head_dim), each of which sees its own keys alone."""

    def __init__(self, q_seqinfo: _SeqLenInfo, k_seqinfo: _SeqLenInfo):
        self.q_seqinfo, self.k_seqinfo = q_seqinfo, k_seqinfo
        self._starts: dict[Any, torch.Tensor] = {}

    def starts(self, side: str, device: torch.device) -> torch.Tensor:
        """cu_seqlens of a side ("q" or "k") on a device, copied there once."""
        info = self.q_seqinfo if side == "q" or self.k_seqinfo is self.q_seqinfo else self.k_seqinfo
        return self._kept((id(info), device), info.seqstart_py, device)

    def _kept(self, key: Any, numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
        if not keeps():
            return _lengths(numbers, device)
        if key not in self._starts:
            self._starts[key] = _lengths(numbers, device)
        return self._starts[key]

    def mask(self, seqlen_q: int, seqlen_k: int) -> Any:
        return None


class BlockDiagonalMask(ItemsMask):
    """Items whose queries and keys lie one after another, and all count."""

    def __init__(self, q_seqinfo: _SeqLenInfo, k_seqinfo: _SeqLenInfo, batch_sizes: Sequence[int] | None = None):
        super().__init__(q_seqinfo, k_seqinfo)
        self._batch_sizes = batch_sizes

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, *, device: Any = None, **more: Any
    ) -> Any:
        """Items of these lengths; keys as many as queries by default. device is not needed."""
        if kv_seqlen is not None and len(kv_seqlen) != len(q_seqlen):
            raise InvalidProblem(f"kv_seqlen has {len(kv_seqlen)} items and q_seqlen {len(q_seqlen)}; they must be as many.")
        q = _SeqLenInfo.from_seqlens(q_seqlen)
        return cls(q, q if kv_seqlen is None else _SeqLenInfo.from_seqlens(kv_seqlen), **more)

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[torch.Tensor]) -> tuple[Any, torch.Tensor]:
        """(the mask, the tensors (batch, seqlen, ...) one after another as (1, total, ...))."""
        made = cls.from_seqlens(_seqlens(tensors), batch_sizes=[t.shape[0] for t in tensors])
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
        made = cls.from_seqlens(_seqlens(tensors_q), _seqlens(tensors_k), batch_sizes=sizes[0])
        return made, _joined(tensors_q), _joined(tensors_k), None if tensors_v is None else _joined(tensors_v)

    def split_queries(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """(1, total, ...) in the parts that the mask was made from, or by item, (1, seqlen, ...)."""
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    split = split_queries

    def split_kv(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The same of keys or values."""
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def make_causal(self) -> BlockDiagonalCausalMask:
        """The same, causal, positions counted from each item's first key."""
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        """The same, causal, each item's last query sees its last key."""
        return BlockDiagonalCausalFromBottomRightMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Causal in each item, positions counted from its first key."""

    def mask(self, seqlen_q: int, seqlen_k: int) -> Any:
        return CAUSAL if self.q_seqinfo.lengths == self.k_seqinfo.lengths else TopLeft()

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        """The same with the last window_size keys alone."""
        return BlockDiagonalCausalLocalAttentionMask(self.q_seqinfo, self.k_seqinfo, window_size, self._batch_sizes)


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Causal in each item, its last query sees its last key."""

    def mask(self, seqlen_q: int, seqlen_k: int) -> Any:
        return CAUSAL

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        """The same with the last window_size keys alone."""
        made = BlockDiagonalCausalLocalAttentionFromBottomRightMask
        return made(self.q_seqinfo, self.k_seqinfo, window_size, self._batch_sizes)


class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalMask):
    """Causal in each item, with the last window_size keys alone."""

    def __init__(self, q_seqinfo: _SeqLenInfo, k_seqinfo: _SeqLenInfo, _window_size: int, batch_sizes: Any = None):
        super().__init__(q_seqinfo, k_seqinfo, batch_sizes)
        _check_window(_window_size)
        self._window_size = _window_size

    def mask(self, seqlen_q: int, seqlen_k: int) -> Any:
        return Band(self._window_size - 1, 0)


class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalLocalAttentionFromBottomRightMask):
    """The same for items with as many keys as queries, counted from the first key."""

    def mask(self, seqlen_q: int, seqlen_k: int) -> Any:
        if self.q_seqinfo.lengths != self.k_seqinfo.lengths:
            reason = "items have other numbers of keys than of queries, counted from the first key; use ...FromBottomRightMask"
            raise NotSupported("BlockDiagonalCausalLocalAttentionMask", {"flashtile": [reason]})
        return super().mask(seqlen_q, seqlen_k)


@dataclass(frozen=True)
class _PaddedSeqLenInfo(_SeqLenInfo):
    """Where items lie whose first seqlen_py[i] tokens count, in `padding` tokens each."""

    padding: int = 0
    seqlen_py: tuple[int, ...] = ()

    @classmethod
    def from_seqlens_padded(cls, seqlens: Sequence[int], padding: int) -> _PaddedSeqLenInfo:
        """Items of these lengths, each at a multiple of `padding`."""
        if max(seqlens, default=0) > padding:
            raise InvalidProblem(f"kv_seqlen holds {max(seqlens)} and kv_padding is {padding}; it must be at least that.")
        return cls(tuple(i * padding for i in range(len(seqlens) + 1)), padding, tuple(seqlens))


class BlockDiagonalPaddedKeysMask(ItemsMask):
    """Items whose keys lie in places of kv_padding tokens each, of which the first kv_seqlen[i] count."""

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], causal_diagonal: Any = None, *,
        device: Any = None,
    ) -> Any:  # fmt: skip
        """causal_diagonal is not used, there neither; device is not needed."""
        if len(kv_seqlen) != len(q_seqlen):
            raise InvalidProblem(f"kv_seqlen has {len(kv_seqlen)} items and q_seqlen {len(q_seqlen)}; they must be as many.")
        return cls(_SeqLenInfo.from_seqlens(q_seqlen), _PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, kv_padding))

    def used(self, device: torch.device) -> torch.Tensor:
        """seqused_k on a device, copied there once."""
        assert isinstance(self.k_seqinfo, _PaddedSeqLenInfo)
        return self._kept(("used", device), self.k_seqinfo.seqlen_py, device)


class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Causal, each item's last query sees the last of its keys that count."""

    def mask(self, seqlen_q: int, seqlen_k: int) -> Any:
        return CAUSAL


def _seqlens(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [t.shape[1] for t in tensors for _ in range(t.shape[0])]


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.flatten(0, 1) for t in tensors])[None]


@lasting
def _lengths(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def _check_window(size: Any) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InvalidProblem(f"window_size is {size!r}; it must be a positive int.")
