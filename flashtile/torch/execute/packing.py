"""q, k and v as parts of fewer tensors: views of them going in, and one gradient for each of them coming out."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Pack:
    """One tensor and its parts: equal ones along an axis of their own before (heads, head_dim), or `heads` of one axis.

    (batch, seqlen, parts, heads, head_dim) where `heads` is None, else (batch, seqlen, sum(heads), head_dim).
    """

    parts: tuple[str, ...]
    heads: tuple[int, ...] | None = None

    def views(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts by name, each (batch, seqlen, heads, head_dim)."""
        if len(self.parts) == 1:
            return {self.parts[0]: tensor}
        split = tensor.unbind(2) if self.heads is None else tensor.split(self.heads, 2)
        return dict(zip(self.parts, split, strict=True))


@dataclass(frozen=True)
class Packing:
    """The tensors that a call is given in the place of q, k and v."""

    packs: tuple[Pack, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of each tensor the names of its parts, joined."""
        return tuple("".join(pack.parts) for pack in self.packs)

    def unpack(self, tensors: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        """q, k and v by name."""
        found: dict[str, torch.Tensor] = {}
        for pack, tensor in zip(self.packs, tensors, strict=True):
            if len(pack.parts) == 1:
                found[pack.parts[0]] = tensor
            else:
                found.update(pack.views(tensor))
        return found


APART = Packing((Pack(("q",)), Pack(("k",)), Pack(("v",))))
QKV = Packing((Pack(("q", "k", "v")),))
KV = Packing((Pack(("q",)), Pack(("k", "v"))))


class PackedGradient:
    """A gradient of several parts, in the memory order of the tensor that it belongs to."""

    def __init__(self, pack: Pack, like: torch.Tensor):
        self.pack, self.shape, self.dtype = pack, like.shape, like.dtype
        order = list(range(like.dim()))
        if 0 not in like.stride():
            order.sort(key=lambda axis: (-like.stride(axis), axis))
        strides, step = [0] * like.dim(), 1
        for axis in reversed(order):
            strides[axis], step = step, step * max(like.shape[axis], 1)
        self.strides = tuple(strides)
        empty = torch.empty_strided(self.shape, self.strides, dtype=like.dtype, device="meta")
        self.parts = {f"d{name}": view.stride() for name, view in pack.views(empty).items()}

    @property
    def name(self) -> str:
        return "d" + "".join(self.pack.parts)

    def allocate(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The gradient and its parts, by name; nothing is written."""
        whole = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        return {self.name: whole, **{f"d{name}": view for name, view in self.pack.views(whole).items()}}
