"""The predicates of a call: described for the problem, with their tensors, validated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from flashtile.errors import InvalidProblem
from flashtile.features.masks.within import Within
from flashtile.problem.mask import Band, Joined, Predicate
from flashtile.problem.number import plain_pair
from flashtile.problem.predicate import PredicateSpec, Where, narrowed, normal_form
from flashtile.problem.score import broadcasts
from flashtile.torch.call.stored import check_kind
from flashtile.torch.execute.inference_safe import lasting

KINDS = {
    torch.int32: "int32", torch.int64: "int64", torch.int8: "int8", torch.uint8: "uint8", torch.bool: "bool",
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32",
}  # fmt: skip


@dataclass(frozen=True)
class Predicates:
    """What a mask asks for: a band, and one of `terms`, whose tensors are `tensors[i]` for the i-th predicate."""

    band: Band
    terms: tuple[tuple[Predicate, ...], ...]
    tensors: tuple[tuple[torch.Tensor, ...], ...]
    mask: Joined
    lists: tuple[torch.Tensor, ...]

    @property
    def leaves(self) -> tuple[Predicate, ...]:
        return tuple(leaf for term in self.terms for leaf in term)

    @property
    def flat(self) -> tuple[torch.Tensor, ...]:
        """All tensors: those of the predicates, then the block lists."""
        return (*(tensor for some in self.tensors for tensor in some), *self.lists)

    @property
    def where(self) -> Where:
        """The terms as a problem holds them."""
        tensors = iter(self.tensors)
        return tuple(
            tuple(
                PredicateSpec(type(leaf), leaf.scalars(), tuple((tuple(t.shape), KINDS[t.dtype]) for t in next(tensors)))
                for leaf in term
            )
            for term in self.terms
        )

    def written(self) -> tuple[str, list[int]]:
        """The kinds of the terms as text, each with how many numbers and tensors it has, and the numbers."""
        tensors = iter(self.tensors)
        numbers: list[int] = []
        kinds: list[str] = []
        for term in self.terms:
            leaves: list[str] = []
            for leaf in term:
                scalars = leaf.scalars()
                leaves.append(f"{leaf.name}:{len(scalars)}:{len(next(tensors))}")
                numbers += scalars
            kinds.append("&".join(leaves))
        return "|".join(kinds), numbers

    def key(self) -> tuple[Any, ...]:
        """What a prepared call depends on."""
        layouts = tuple((t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15, t.is_neg()) for t in self.flat)
        kinds = tuple(tuple((type(leaf), leaf.scalars()) for leaf in term) for term in self.terms)
        return self.band, kinds, layouts, self.mask.spec, self.mask.seqlens

    def check(self, device: torch.device) -> None:
        """Raise InvalidProblem for tensors that no kernel can read."""
        for tensor in self.lists:
            if tensor.device != device:
                raise InvalidProblem(f"blocks are on {tensor.device} and q is on {device}; they must be on one device.")
        for leaf, some in zip(self.leaves, self.tensors, strict=True):
            for tensor in some:
                if not isinstance(tensor, torch.Tensor):
                    raise InvalidProblem(f"{leaf.name} has a {type(tensor).__name__}; it must be a torch.Tensor.")
                check_kind(f"{leaf.name}'s tensor", tensor)
                if tensor.dtype not in KINDS:
                    known = ", ".join(str(dtype).removeprefix("torch.") for dtype in KINDS)
                    raise InvalidProblem(f"{leaf.name}'s tensor is {tensor.dtype}; it must be one of {known}.")
                if tensor.device != device:
                    raise InvalidProblem(
                        f"{leaf.name}'s tensor is on {tensor.device} and q is on {device}; they must be on one device."
                    )


def mask_of_call(mask: Any, q: Any, k: Any, ragged: bool) -> Any:
    """The mask of a call of q and k (batch, seqlen, heads, head_dim): what its blocks say where items may differ in length.

    Lists are made for one length. Raises InvalidProblem for blocks of other sizes than those of q and k.
    """
    if (
        not isinstance(mask, Joined)
        or mask.spec is None
        or not all(isinstance(t, torch.Tensor) and t.dim() == 4 for t in (q, k))
    ):
        return mask
    if mask.seqlens != (q.shape[1], k.shape[1]):
        made = " x ".join(map(str, mask.seqlens))
        raise InvalidProblem(f"the mask's blocks are for {made} scores; they must be for {q.shape[1]} x {k.shape[1]}.")
    return mask.unlisted if ragged else mask


class CallMask(NamedTuple):
    """What a call needs to know of Predicates: their `key` and `flat`."""

    key: tuple[Any, ...]
    flat: tuple[torch.Tensor, ...]


def call_mask(causal: Any, window: Any, mask: Joined, batch: int, heads_q: int) -> CallMask:
    """That of `predicates_of` the same, found once per shape of calls where the mask says that it stays as it is.

    It is what takes longest on the host: 28 of a call's 33 us of preparation beside 3 without a mask (1 x 8192, 16 heads).
    """
    known = mask.calls if isinstance(causal, bool) else None
    key: Any = causal, batch, heads_q
    if window is not None:
        key = *key, *window, *map(type, window)  # True equals 1, and is no distance
    found = None if known is None else known.get(key)
    if found is None:
        find = predicates_of if known is None else lasting(predicates_of)
        predicates = find(causal, window, mask, batch, heads_q)
        found = CallMask(predicates.key(), predicates.flat)
        if known is not None and plain_pair(window) is window:  # a tensor is another key as it changes
            known[key] = found
    return found


def predicates_of(causal: Any, window: Any, mask: Joined, batch: int, heads_q: int) -> Predicates:
    """The normal form of a mask, for a problem of so many items and heads."""
    mask = narrowed(causal, window, mask)
    band, joined = normal_form(False, None, mask)
    terms = tuple(tuple(Within(leaf) if isinstance(leaf, Band) else leaf for leaf in term) for term in joined)
    tensors = tuple(leaf.tensors(batch, heads_q) for term in terms for leaf in term)
    for tensor in mask.lists.values():
        if not broadcasts(tensor.shape[:2], (batch, heads_q)):
            raise InvalidProblem(
                f"the mask's blocks are for {tuple(tensor.shape[:2])} (batch, heads); it must be ({batch}, {heads_q}), or 1."
            )
    lists = tuple(tensor.expand(batch, heads_q, *tensor.shape[2:]) for tensor in mask.lists.values())
    return Predicates(band, terms, tensors, mask, lists)
