"""The ring: keys and values go from rank to rank, partial results merge by lse in float32, and gradients travel with the keys.

Nothing of the size of the whole sequence is kept: the backward passes keys round once more and computes each part again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashtile.torch.context.calls import Keys, call, widens
from flashtile.torch.context.collectives import WHAT, Passing, wider
from flashtile.torch.context.context import Context
from flashtile.torch.context.layout import Piece, pairs, runs
from flashtile.torch.context.wanted import Wanted
from flashtile.torch.execute.plain import joined
from flashtile.torch.routes.derivatives import first_derivatives
from flashtile.torch.routes.local import attention


@dataclass(frozen=True)
class Ring:
    """Everything of a call but its tensors. shift: seqlen_k - seqlen_q of the whole."""

    context: Context
    want: Wanted
    seqlen_q: int
    seqlen_k: int

    @property
    def shift(self) -> int:
        return self.seqlen_k - self.seqlen_q

    def pieces(self, source: int) -> tuple[Piece, ...]:
        """The calls with the keys of one rank."""
        c = self.context
        own = runs(c.layout, self.seqlen_q, c.ranks, c.rank)
        return pairs(own, runs(c.layout, self.seqlen_k, c.ranks, source), self.shift, self.want.band)


def attend_ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: Ring) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse)."""
    return _Ring.apply(ring, q, k, v, *ring.want.captured)  # pyright: ignore[reportReturnType]


def merge(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (batch, seqlen, heads, d) and lse (batch, heads, seqlen), float32, with the keys of another part as well."""
    both = torch.logaddexp(lse, part_lse)
    return out * _share(lse, both) + part * _share(part_lse, both), both


def _share(lse: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    share = torch.where(lse == -torch.inf, 0.0, (lse - both).exp())
    return share.transpose(1, 2)[..., None]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ring: Ring, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *captured: torch.Tensor) -> Any:
        context, wide = ring.context, widens(q)
        out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=wider(q.dtype))
        lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=out.dtype)
        block = joined([k, v])
        for step in range(context.ranks):
            passing = Passing(block, context) if step + 1 < context.ranks else None
            for piece in ring.pieces((context.rank - step) % context.ranks):
                rows, keys = piece.rows, block[:, piece.keys]
                keys = keys.split([k.shape[3], v.shape[3]], -1)
                given = [t.float() if wide else t for t in (q[:, rows], *keys)]
                part = attention(*given, return_lse=True, **ring.want.piece(piece, ring.shift))
                out[:, rows], lse[..., rows] = merge(out[:, rows], lse[..., rows], *part)
            block = block if passing is None else passing.arrived()
        if ring.want.sink is not None:
            out, lse = merge(out, lse, torch.zeros_like(out), ring.want.sink.to(lse.dtype)[:, None].expand_as(lse))
        ctx.ring, ctx.needs = ring, (any(ctx.needs_input_grad[2:4]), ctx.needs_input_grad)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out.to(q.dtype, copy=True), lse.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        ring, context, wide = ctx.ring, ctx.ring.context, widens(q)
        dout = torch.zeros_like(out) if grads[0] is None else grads[0].to(out.dtype)
        rest = -(dout * out).sum(-1).transpose(1, 2)  # what every probability adds: minus delta, and lse's gradient
        rest = rest if grads[1] is None else rest + grads[1]
        dq, block = torch.zeros_like(q, dtype=wider(q.dtype)), joined([k, v])
        dblock = torch.zeros_like(block, dtype=wider(block.dtype))
        captured = ring.want.captured
        sums = [torch.zeros_like(t, dtype=wider(t.dtype)) if t.requires_grad else None for t in captured]
        others = [t for t in (captured[:-1] if ring.want.sink is not None else captured) if t.requires_grad]
        for step in range(context.ranks):
            passing = Passing(block, context) if step + 1 < context.ranks else None
            for piece in ring.pieces((context.rank - step) % context.ranks):
                rows = piece.rows
                parts = q[:, rows], *block[:, piece.keys].split([k.shape[3], v.shape[3]], -1)
                values = [t.detach().to(torch.float32 if wide else t.dtype) for t in parts]
                leaves = [t.new_zeros((), dtype=wider(t.dtype)).expand(t.shape).requires_grad_() for t in values[1:]]
                leaves = [values[0].requires_grad_(), *leaves]
                with torch.enable_grad():
                    made = call(leaves[0], Keys(*values[1:], *leaves[1:]), True, **ring.want.piece(piece, ring.shift))
                weight = _share(made[1].detach(), lse[..., rows])
                down = dout[:, rows] * weight
                own = (down * made[0].detach()).sum(-1).transpose(1, 2)
                down_lse = own + weight[..., 0].transpose(1, 2) * rest[..., rows]
                found = torch.autograd.grad(made, [*leaves, *others], (down.to(made[0].dtype), down_lse), allow_unused=True)
                dq[:, rows] += found[0]
                dblock[:, piece.keys] += joined(found[1:3])
                for tensor, grad in zip(others, found[3:], strict=True):
                    total = next(s for t, s in zip(captured, sums, strict=True) if t is tensor)
                    if grad is not None and total is not None:
                        total += grad
            block = block if passing is None else passing.arrived()
            dblock = Passing(dblock, context).arrived()  # after as many steps as ranks it is at home
        if ring.want.sink is not None and sums[-1] is not None:
            share = (ring.want.sink.detach().to(lse.dtype)[:, None] - lse).exp()
            sums[-1] += (share * rest).sum((0, 2))
        dk, dv = dblock.split([k.shape[3], v.shape[3]], -1)
        made_of = [None if s is None else s.to(t.dtype) for t, s in zip(captured, sums, strict=True)]
        found = (dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *made_of)
        return None, *first_derivatives(WHAT, "torch", found, (q, k, v), captured, grads)
