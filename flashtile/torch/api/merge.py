"""merge: attention over several sets of keys from attention over each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from flashtile.errors import InvalidProblem
from flashtile.torch.call.stored import check_kind


def merge(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of all keys together, from those of disjoint sets of keys; differentiable in all of them.

    outs: (batch, seqlen, heads, head_dim) each, lses: float32 or float64 (batch, heads, seqlen); or of packed
    items (total, heads, head_dim) and (heads, total). lse is the natural log, -inf where a query saw no key. A
    sink belongs to one of the sets.

    Attention to keys in common, such as a prefix that many items share, is computed once. In float32, or float64 where the
    first out is; out in the first one's dtype.
    """
    for name, some in (("outs", outs), ("lses", lses)):
        if not isinstance(some, Iterable):
            raise InvalidProblem(
                f"{name} is a {type(some).__name__}; it must be a sequence of tensors, one of each set of keys."
            )
    outs, lses = tuple(outs), tuple(lses)
    if not outs or len(outs) != len(lses):
        raise InvalidProblem(f"outs are {len(outs)} and lses are {len(lses)}; they must be as many, and at least one.")
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        check_kind(f"outs[{i}]", out)
        check_kind(f"lses[{i}]", lse)
        for name, tensor in ((f"outs[{i}]", out), (f"lses[{i}]", lse)):
            if not tensor.is_floating_point():
                raise InvalidProblem(f"{name} is {tensor.dtype}; it must be a floating-point tensor.")
            if tensor.device != outs[0].device:
                raise InvalidProblem(
                    f"{name} is on {tensor.device} and outs[0] on {outs[0].device}; they must be on one device."
                )
        if out.dim() not in (3, 4) or out.shape != outs[0].shape:
            raise InvalidProblem(
                f"outs[{i}] has shape {tuple(out.shape)}; all must have one, (batch, seqlen, heads, head_dim)."
            )
        wanted = (*out.shape[:-3], out.shape[-2], out.shape[-3])
        if tuple(lse.shape) != wanted:
            raise InvalidProblem(f"lses[{i}] has shape {tuple(lse.shape)}; it must be {wanted}, (batch, heads, seqlen).")
    wide = torch.float64 if outs[0].dtype is torch.float64 else torch.float32
    every = torch.stack([lse.to(wide) for lse in lses])
    blind = (every == -torch.inf).all(0)
    seen = every.masked_fill(blind, 0.0)  # of nothing, weights that are numbers, for values that are 0
    lse = torch.logsumexp(seen, 0)
    weights = torch.exp(seen - lse).masked_fill(blind, 0.0)
    # a set that a query sees nothing of has weight 0 and a gradient of 0, whatever its out holds
    parts = [
        w.transpose(-1, -2)[..., None] * out.to(wide).masked_fill((one == -torch.inf).transpose(-1, -2)[..., None], 0.0)
        for w, out, one in zip(weights, outs, lses, strict=True)
    ]
    return torch.stack(parts).sum(0).to(outs[0].dtype), lse.masked_fill(blind, -torch.inf)
