"""The tensors that say how long a batch's items are: what a call is given, validated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from flashtile.errors import InvalidProblem
from flashtile.problem.lengths import Lengths
from flashtile.problem.number import PLAIN, plain, told
from flashtile.torch.call.stored import check_kind, is_negated

OTHER_INTS = frozenset({torch.int64, torch.int16, torch.int8, torch.uint8})


@dataclass(frozen=True)
class Given:
    """The int32 tensors by name (`Lengths.tensors`, in its order), and what the caller knows of the longest items.

    alike: one argument spoke of queries and keys, as errors say it.
    """

    tensors: Mapping[str, torch.Tensor]
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    alike: bool = False

    def called(self, name: str) -> str:
        """The argument's name."""
        return name[: -len("_q")] if self.alike else name

    def key(self) -> tuple[Any, ...]:
        """What a prepared call depends on."""
        layouts = ((n, t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15) for n, t in self.tensors.items())
        return (*layouts, self.max_seqlen_q, self.max_seqlen_k)

    @property
    def varlen(self) -> bool:
        return "cu_seqlens_q" in self.tensors

    @property
    def longest(self) -> tuple[int | None, int | None]:
        """What the caller knows of the longest items."""
        return self.max_seqlen_q, self.max_seqlen_k

    def batch(self, q: torch.Tensor) -> int:
        """Items, where q is (batch or 1, seqlen, heads, head_dim)."""
        return self.tensors["cu_seqlens_q"].shape[0] - 1 if self.varlen else q.shape[0]

    def lengths(self, total_q: int, total_k: int) -> Lengths:
        """What the problem says of them."""
        used = {"used_q": "seqused_q" in self.tensors, "used_k": "seqused_k" in self.tensors}
        return Lengths(total_q, total_k, **used) if self.varlen else Lengths(**used)

    def check(self, q: torch.Tensor) -> None:
        """Raise InvalidProblem for tensors without meaning, whatever they hold."""
        for key, tensor in self.tensors.items():
            name = self.called(key)
            if not isinstance(tensor, torch.Tensor):
                raise InvalidProblem(
                    f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor, as "
                    f"torch.tensor({name}, dtype=torch.int32, device=q.device) makes of numbers."
                )
            check_kind(name, tensor)
            if tensor.dtype is torch.bool and key.startswith("seqused"):
                raise InvalidProblem(
                    f"{name} is a mask, which `attention` alone takes, of q, k and v apart; here it must be int32, how many "
                    "tokens of each item count, from its first one on. The mask KeyPadding(keep) hides keys where they stand."
                )
            if key.startswith("seqused") and not self.varlen and tensor.dim() == 2:
                raise InvalidProblem(
                    f"{name} has shape {tuple(tensor.shape)}; it must be (batch,), how many tokens of each item count. "
                    "A mask of 0 and 1 goes in as booleans: mask.bool()."
                )
            if tensor.dtype is not torch.int32:
                raise InvalidProblem(f"{name} is {tensor.dtype}; it must be int32, or other ints, which a call converts.")
            if tensor.device != q.device:
                raise InvalidProblem(f"{name} is on {tensor.device} and q is on {q.device}; they must be on one device.")
            if tensor.dim() != 1 or (name.startswith("cu_") and not tensor.shape[0]):
                size = "(batch + 1,)" if name.startswith("cu_") else "(batch,)"
                raise InvalidProblem(f"{name} has shape {tuple(tensor.shape)}; it must be {size}.")
        batch = self.batch(q)
        for key, tensor in self.tensors.items():
            name, size = self.called(key), batch + key.startswith("cu_")
            if tensor.shape[0] != size:
                raise InvalidProblem(f"{name} has {tensor.shape[0]} elements and the batch {batch} items; it must have {size}.")
        for key in ("max_seqlen_q", "max_seqlen_k"):
            name, longest = self.called(key), getattr(self, key)
            if longest is not None and (isinstance(longest, bool) or not isinstance(longest, int) or longest < 0):
                raise InvalidProblem(f"{name} is {told(longest)}; it must be an int, at least 0, or None.")

    def check_values(self, spans: Mapping[str, int]) -> None:
        """Raise InvalidProblem for numbers without meaning; asked on the CPU alone, where looking costs nothing.

        spans: the size of the tensors' seqlen axis, by "q" and "k". On a GPU kernels keep within it, whatever they read.
        """
        for side, span in spans.items():
            cu, used = self.tensors.get(f"cu_seqlens_{side}"), self.tensors.get(f"seqused_{side}")
            sizes: list[int] | None = None
            if cu is not None:
                ends = cu.tolist()
                sizes = [b - a for a, b in pairwise(ends)]
                if ends[0] != 0 or min(sizes, default=0) < 0 or ends[-1] > span:
                    name = self.called(f"cu_seqlens_{side}")
                    raise InvalidProblem(
                        f"{name} is {_shown(ends)}; it must start with 0, never fall, and end with at most {span}."
                    )
                longest = getattr(self, f"max_seqlen_{side}")
                if longest is not None and max(sizes, default=0) > longest:
                    name = self.called(f"max_seqlen_{side}")
                    raise InvalidProblem(f"{name} is {longest}; it must be at least {max(sizes)}, the longest item.")
            for i, count in enumerate(used.tolist() if used is not None else ()):
                most = span if sizes is None else sizes[i]
                if not 0 <= count <= most:
                    name = self.called(f"seqused_{side}")
                    raise InvalidProblem(f"{name}[{i}] is {count}; it must be from 0 to {most}, the item's tokens.")


def _shown(numbers: list[int]) -> str:
    text = ", ".join(map(str, numbers[:6]))
    return f"[{text}, ...]" if len(numbers) > 6 else f"[{text}]"


def given_lengths(alike: bool = False, **named: Any) -> Given | None:
    """What a call says of its items' lengths; None where it says nothing.

    cu_seqlens_k is cu_seqlens_q by default, and then max_seqlen_k is max_seqlen_q. alike: as `Given` has it.
    """
    if named.get("cu_seqlens_q") is not None and named.get("cu_seqlens_k") is None:
        named["cu_seqlens_k"] = named["cu_seqlens_q"]
        if named.get("max_seqlen_k") is None:
            named["max_seqlen_k"] = named.get("max_seqlen_q")
    tensors = {n: t for n, t in named.items() if t is not None and not n.startswith("max_")}
    if not tensors:
        return None
    dense: dict[str, Any] = {}
    before = made = None
    for name, tensor in tensors.items():
        if tensor is not before:
            before = made = tensor
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                if tensor.dtype is not torch.int32 and tensor.dtype in OTHER_INTS:
                    made = tensor.to(torch.int32)  # on its device, for which nobody waits
                made = made.contiguous()
                made = made.resolve_neg() if is_negated(made) else made
        dense[name] = made
    most_q, most_k = named.get("max_seqlen_q"), named.get("max_seqlen_k")
    if type(most_q) in PLAIN and type(most_k) in PLAIN:
        return Given(dense, most_q, most_k, alike)
    return Given(dense, plain(most_q), plain(most_k), alike)
