"""Where the items of xformers' block-diagonal biases lie among all tokens: its `_SeqLenInfo` and what extends that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from functools import cached_property
from itertools import accumulate, pairwise
from operator import index
from typing import Any

import torch

from flashtile.errors import InvalidProblem
from flashtile.torch.execute.inference_safe import keeps, lasting


class _SeqLenInfo:
    """Items one after another: item i from seqstart_py[i] to seqstart_py[i + 1].

    seqstart is the same as an int32 tensor, on `device` (by default a GPU if there is one). What is written into that tensor
    counts in later calls, as in xformers; seqstart_py is what checks and `materialize` go by.
    """

    def __init__(self, seqstart: torch.Tensor | None, max_seqlen: int, min_seqlen: int, seqstart_py: Sequence[int]):
        self.max_seqlen, self.min_seqlen, self.seqstart_py = max_seqlen, min_seqlen, list(seqstart_py)
        self.on(None if seqstart is None else seqstart.device)
        self._seen: dict[str, torch.Tensor] = {}  # those that somebody was given, and may have written to
        self._made: dict[tuple[str, torch.device], torch.Tensor] = {}  # their like where calls needed them
        self._give(seqstart=seqstart)

    def _give(self, **tensors: torch.Tensor | None) -> None:
        self._seen |= {name: tensor for name, tensor in tensors.items() if tensor is not None}

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int], *, device: Any = None) -> _SeqLenInfo:
        """Items of these lengths, one after another."""
        sizes = whole_numbers("seqlens", seqlens)
        return cls(None, max(sizes, default=-1), min(sizes, default=-1), [0, *accumulate(sizes)]).on(device)

    def from_seqlens_inplace(self, seqlens: Iterable[int]) -> None:
        """Other lengths of as many items, none longer than before; in the tensors that there are, for CUDA graphs."""
        sizes = self._as_before("seqlens", seqlens, len(self.seqstart_py) - 1, self.max_seqlen)
        self._write("seqstart", self.seqstart_py, [0, *accumulate(sizes)])

    def _as_before(self, name: str, seqlens: Iterable[int], items: int, longest: int) -> list[int]:
        sizes = whole_numbers(name, seqlens)
        if len(sizes) != items or max(sizes, default=-1) > longest:
            raise InvalidProblem(f"{name} are {sizes}; there must be {items} as before, and none above {longest}.")
        return sizes

    def _write(self, name: str, old: list[int], new: list[int]) -> None:
        old[:] = new
        for tensor in [*(t for n, t in self._seen.items() if n == name), *(t for (n, _), t in self._made.items() if n == name)]:
            tensor.copy_(torch.tensor(new, dtype=torch.int32), non_blocking=True)

    def on(self, device: Any) -> Any:
        """Itself, whose tensors are to be on a device; by default on a GPU if there is one."""
        self.device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
        return self

    def to(self, device: Any) -> Any:
        """The same items with their tensors on a device."""
        moved = copy(self).on(device)
        moved._seen, moved._made = {name: tensor.to(moved.device) for name, tensor in self._seen.items()}, {}
        for name in ("seqstart_py", "seqlen_py"):
            if hasattr(self, name):
                setattr(moved, name, list(getattr(self, name)))
        return moved

    @property
    def seqstart(self) -> torch.Tensor:
        """seqstart_py as int32 (items + 1,)."""
        return self._shown("seqstart")

    def _shown(self, name: str) -> torch.Tensor:
        if name in self._seen:
            return self._seen[name]
        made = _lengths(tuple(getattr(self, f"{name}_py")), self.device)
        if keeps():
            self._seen[name] = made
        return made

    def tensor(self, name: str, device: torch.device) -> torch.Tensor:
        """One of its tensors for a call on a device, copied there once; each time where somebody may have written to it."""
        if name in self._seen:
            return self._seen[name].to(device, non_blocking=True)
        if not keeps():
            return _lengths(tuple(getattr(self, f"{name}_py")), device)
        if (name, device) not in self._made:
            self._made[name, device] = _lengths(tuple(getattr(self, f"{name}_py")), device)
        return self._made[name, device]

    @property
    def is_shown(self) -> bool:
        """Whether its tensors may say something else than its lists."""
        return bool(self._seen)

    @property
    def places(self) -> list[tuple[int, int]]:
        """(first, end) of each item with what follows it up to the next one."""
        return list(pairwise(self.seqstart_py))

    def intervals(self) -> Iterable[tuple[int, int]]:
        """(first, end) of each item."""
        return self.places

    @property
    def widest(self) -> int:
        """No item's place is longer."""
        return max(self.max_seqlen, 0)

    @property
    def total(self) -> int:
        return self.seqstart_py[-1]

    def split(self, x: torch.Tensor, batch_sizes: Sequence[int] | None = None) -> list[torch.Tensor]:
        """(1, total, ...) in parts of so many items of one length each, by default one: (items, seqlen, ...)."""
        if x.shape[:2] != (1, self.total):
            raise InvalidProblem(f"tensor has shape {tuple(x.shape)}; it must be (1, {self.total}, ...).")
        tokens, first = x[0].split([b - a for a, b in self.places]), 0
        parts: list[torch.Tensor] = []
        for size in batch_sizes or [1] * len(tokens):
            parts.append(torch.stack(tokens[first : first + size]))
            first += size
        return parts


class _UsedInfo(_SeqLenInfo):
    """Items that use the first seqlen_py[i] tokens of their places; seqlen is the same as an int32 tensor."""

    def __init__(
        self, seqstart: torch.Tensor | None, max_seqlen: int, min_seqlen: int, seqstart_py: Sequence[int],
        seqlen: torch.Tensor | None, seqlen_py: Sequence[int],
    ):  # fmt: skip
        super().__init__(seqstart, max_seqlen, min_seqlen, seqstart_py)
        self.seqlen_py = list(seqlen_py)
        self._give(seqlen=seqlen)

    @property
    def seqlen(self) -> torch.Tensor:
        """seqlen_py as int32 (items,)."""
        return self._shown("seqlen")

    def intervals(self) -> Iterable[tuple[int, int]]:
        """(first, end) of what each item uses."""
        return [(first, first + length) for (first, _), length in zip(self.places, self.seqlen_py, strict=True)]

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int], *, device: Any = None) -> _SeqLenInfo:
        raise InvalidProblem("lengths alone do not say where these items lie; use from_seqlens_padded or from_seqlens_gappy.")


class _PaddedSeqLenInfo(_UsedInfo):
    """Items in places of `padding` tokens each."""

    def __init__(
        self, seqstart: torch.Tensor | None, max_seqlen: int, min_seqlen: int, seqstart_py: Sequence[int],
        seqlen: torch.Tensor | None, seqlen_py: Sequence[int], padding: int,
    ):  # fmt: skip
        super().__init__(seqstart, max_seqlen, min_seqlen, seqstart_py, seqlen, seqlen_py)
        self.padding = padding

    @property
    def widest(self) -> int:
        return self.padding

    @classmethod
    def from_seqlens_padded(cls, seqlens: Sequence[int], padding: int, *, device: Any = None) -> _PaddedSeqLenInfo:
        """Items of these lengths, each at a multiple of `padding`."""
        sizes = whole_numbers("kv_seqlen", seqlens)
        if max(sizes, default=0) > padding:
            raise InvalidProblem(f"kv_seqlen holds {max(sizes)} and kv_padding is {padding}; it must be at least that.")
        starts = [i * padding for i in range(len(sizes) + 1)]
        return cls(None, max(sizes, default=-1), min(sizes, default=-1), starts, None, sizes, padding).on(device)

    def from_seqlens_padded_inplace(self, seqlens: Sequence[int]) -> None:
        """Other lengths in the same places, none longer than the longest before; for CUDA graphs."""
        self._write("seqlen", self.seqlen_py, self._as_before("seqlens", seqlens, len(self.seqlen_py), self.max_seqlen))


class _GappySeqInfo(_UsedInfo):
    """Items anywhere: item i has seqlen_py[i] tokens from seqstart_py[i] on; the last start is how many tokens there are."""

    @classmethod
    def from_seqlens_gappy(
        cls, seqstarts: Sequence[int], seqlens: Sequence[int], paged: bool = False, *, device: Any = None
    ) -> _GappySeqInfo:
        """seqstarts: one more than seqlens; with paged as many, counted within each item's pages."""
        if paged:
            return _PagedSeqInfo.from_starts(seqstarts, seqlens, device)
        starts, sizes = whole_numbers("kv_seqstarts", seqstarts), whole_numbers("kv_seqlen", seqlens)
        if len(starts) != len(sizes) + 1:
            raise InvalidProblem(
                f"kv_seqstarts has {len(starts)} numbers and kv_seqlen {len(sizes)}; it must have one more, for how many keys "
                "there are."
            )
        for i, (first, length) in enumerate(zip(starts[:-1], sizes, strict=True)):
            if first + length > starts[-1]:
                raise InvalidProblem(
                    f"item {i} ends at {first} + {length} of kv_seqstarts and kv_seqlen; it must lie within {starts[-1]} keys."
                )
        return cls(None, max(sizes, default=-1), min(sizes, default=-1), starts, None, sizes).on(device)

    def within(self, padding: int) -> _PagedSeqInfo:
        """The same items, each counted from its own place of so many tokens."""
        starts = [start - i * padding for i, start in enumerate(self.seqstart_py[:-1])]
        for i, start in enumerate(starts):
            if not 0 <= start < padding:
                raise InvalidProblem(f"item {i} begins {start} tokens into its place of {padding}; it must begin within it.")
        made = _PagedSeqInfo.from_starts(starts, self.seqlen_py, self.device)
        if self.is_shown:  # what is written into its tensors counts
            start = self.seqstart[:-1] - padding * torch.arange(len(starts), dtype=torch.int32, device=self.device)
            made._give(seqstart=torch.cat([start, self.seqstart[-1:]]), seqlen=start + self.seqlen)
        return made

    @property
    def widest(self) -> int:
        return max([end - first for first, end in self.places], default=0)

    @cached_property
    def joined(self) -> _SeqLenInfo:
        """The same items one after another."""
        return _SeqLenInfo.from_seqlens(self.seqlen_py)

    @property
    def is_sorted(self) -> bool:
        """Whether items follow one another and share no token, whatever lies between them."""
        return all(end <= after for (_, end), after in zip(self.intervals(), self.seqstart_py[1:], strict=True))


class _PagedSeqInfo(_GappySeqInfo):
    """Items each in pages of its own: item i's keys are the rows from seqstart_py[i] to seqlen_py[i], which is an end."""

    @classmethod
    def from_starts(cls, seqstarts: Sequence[int], seqlens: Sequence[int], device: Any) -> _PagedSeqInfo:
        """As many starts as lengths; the last of the starts that are kept is -1, as there."""
        starts, sizes = whole_numbers("kv_seqstarts", seqstarts), whole_numbers("kv_seqlen", seqlens)
        if len(starts) != len(sizes):
            raise InvalidProblem(f"kv_seqstarts has {len(starts)} numbers and kv_seqlen {len(sizes)}; they must be as many.")
        ends = [a + b for a, b in zip(starts, sizes, strict=True)]
        return cls(None, max(sizes, default=-1), min(sizes, default=-1), [*starts, -1], None, ends).on(device)

    def intervals(self) -> Iterable[tuple[int, int]]:
        return list(zip(self.seqstart_py[:-1], self.seqlen_py, strict=True))


def whole_numbers(name: str, values: Any) -> list[int]:
    """As a list of ints. Raises InvalidProblem for what is none."""
    if isinstance(values, torch.Tensor):
        raise InvalidProblem(f"{name} is a tensor; it must be a list of ints, as {name}.tolist() is one.")
    try:
        sizes = [index(v) for v in values]
    except TypeError:
        raise InvalidProblem(f"{name} is {values!r}; it must be a list of ints.") from None
    if min(sizes, default=0) < 0:
        raise InvalidProblem(f"{name} holds {min(sizes)}; its numbers must be at least 0.")
    return sizes


@lasting
def _lengths(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)
