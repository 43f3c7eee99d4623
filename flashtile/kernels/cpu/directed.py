"""Scores along a direction: what modifiers make of them, its derivative in the direction, and the gradients of both.

A modifier's formula in PyTorch (`Score.apply`) is all that is asked for, and that autograd differentiates it twice: J t, which
forward mode would give, is the derivative by w of (J^T w) t.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashtile.kernels.cpu.modifiers import Modifiers
from flashtile.kernels.cpu.region import Tile
from flashtile.kernels.cpu.strip import Rows
from flashtile.plan.buffers import place_of
from flashtile.problem.attention import AttentionProblem

Tensors = dict[str, torch.Tensor]


class Directed(NamedTuple):
    """A tile's modified scores y and their derivative t in the direction, None for zero; neither has a graph.

    score, modified, slope: what both are functions of, and both with autograd's graph; None where modifiers only add.
    """

    y: torch.Tensor
    t: torch.Tensor | None
    score: torch.Tensor | None = None
    modified: torch.Tensor | None = None
    slope: torch.Tensor | None = None


class DirectedModifiers:
    """The modifiers of one call, and the tangents of their captured tensors (`tscore.I.J`)."""

    def __init__(self, p: AttentionProblem, tensors: Tensors, dtype: torch.dtype):
        self.modifiers = Modifiers(p, tensors, dtype)
        self.moved: dict[tuple[int, int], torch.Tensor] = {}
        for name, tensor in tensors.items():
            if name.startswith("tscore."):
                place = place_of(name)
                self.moved[place] = tensor.to(dtype)
                if not self.modifiers.captured[place].requires_grad:
                    self.modifiers.captured[place] = self.modifiers.captured[place].to(dtype).requires_grad_()
        self.grads = self.modifiers.grads
        self.adds = self.modifiers.adds and not self.moved

    def along(self, s: torch.Tensor, t: torch.Tensor | None, rows: Rows, tile: Tile, twice: bool) -> Directed:
        """Of scaled scores and their derivative, both (items, group * rows, width). twice: gradients are wanted, too."""
        if not self.modifiers.chain:
            return Directed(s, t)
        if self.adds:
            self.modifiers.write(rows.by_head(s), rows.at(tile))
            return Directed(s, t)
        with torch.enable_grad(), torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False):
            seen = rows.seen(tile)
            score = rows.by_head(s).detach().requires_grad_()
            modified = self.modifiers.apply(score, rows.at(tile), seen)
            slope = self._slope(score, modified, t if t is None else rows.by_head(t), twice)
        flat = None if slope is None else slope.detach().reshape(s.shape).contiguous()  # it may be one number for many scores
        return Directed(modified.detach().reshape(s.shape).clone(), flat, score, modified, slope)

    def _slope(self, score: torch.Tensor, modified: torch.Tensor, t: torch.Tensor | None, twice: bool) -> torch.Tensor | None:
        """The derivative of `modified` where score moves along t and captured tensors along their tangents."""
        sources = [(score, t), *((self.modifiers.captured[place], moved) for place, moved in self.moved.items())]
        sources = [(source, moved) for source, moved in sources if moved is not None]
        if not sources or not modified.requires_grad:
            return None
        weight = torch.ones_like(modified, requires_grad=True)
        pulled = torch.autograd.grad(modified, [s for s, _ in sources], weight, create_graph=True, allow_unused=True)
        sums = [(g * moved).sum() for g, (_, moved) in zip(pulled, sources, strict=True) if g is not None]
        return torch.autograd.grad(torch.stack(sums).sum(), weight, create_graph=twice)[0] if sums else None

    def pull(self, made: Directed, ds: torch.Tensor, ds2: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """(raw, its derivative in the direction): gradients of scaled scores, given ds of modified ones and its derivative ds2.

        Captured tensors receive the derivatives of theirs.
        """
        if made.score is None or made.modified is None:
            return ds, ds2
        if not made.modified.requires_grad:  # as where it is made of positions alone
            return torch.zeros_like(ds), torch.zeros_like(ds)
        first, second = rows.by_head(ds), rows.by_head(ds2)
        with torch.enable_grad(), torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False):
            (raw,) = torch.autograd.grad(made.modified, made.score, first, retain_graph=True, allow_unused=True)
            total = (made.modified * second).sum()
            if made.slope is not None and made.slope.requires_grad:
                total = total + (made.slope * first).sum()
            raw2, *given = torch.autograd.grad(total, (made.score, *self.modifiers.leaves), allow_unused=True)
        for sums, share in zip(self.grads.values(), given, strict=True):
            if share is not None:
                sums += share
        return tuple(torch.zeros_like(ds) if r is None else r.reshape(ds.shape) for r in (raw, raw2))  # pyright: ignore[reportReturnType]
