"""flashinfer's states of attention, (out, lse): merged, and in the terms of its callers. Its lse has base 2 and heads last."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from flashtile.errors import InvalidProblem
from flashtile.torch.api.merge import merge
from flashtile.torch.call.stored import check_kind, check_kinds

LN2 = math.log(2.0)


def lse_of(lse: torch.Tensor, base: str = "log2", layout: str = "NH") -> torch.Tensor:
    """Our lse, (heads, tokens) by the natural logarithm, as flashinfer's run is asked for it."""
    for name, value, known in (("lse_base", base, ("log2", "ln")), ("lse_layout", layout, ("NH", "HN"))):
        if value not in known:
            raise InvalidProblem(f"{name} is {value!r}; it must be one of {', '.join(known)}.")
    lse = lse / LN2 if base == "log2" else lse
    return lse.transpose(0, 1).contiguous() if layout == "NH" else lse


def put(name: str, into: Any, made: torch.Tensor) -> torch.Tensor:
    """A result, in the caller's tensor where there is one."""
    if into is None or into is made:
        return made
    check_kind(name, into)
    if into.shape != made.shape or into.dtype is not made.dtype:
        raise InvalidProblem(
            f"{name} is {into.dtype} of shape {tuple(into.shape)}; it must be {made.dtype} of shape {tuple(made.shape)}."
        )
    return into.copy_(made)


def answer(out: torch.Tensor, lse: Any, into: tuple[Any, Any], v_scale: Any, return_lse: bool, asked: tuple[str, str]) -> Any:
    """out, or (out, lse) as flashinfer lays it, in the tensors that are given; out: (tokens, heads, head_dim)."""
    if v_scale is not None and not isinstance(v_scale, torch.Tensor):  # which is multiplied as values are read
        out = out * v_scale
    out = put("out", into[0], out)
    if return_lse or into[1] is not None:  # a given one is written in any case
        lse = put("lse", into[1], lse_of(lse, *asked))
    return (out, lse) if return_lse else out


def takes(out: Any, q: torch.Tensor, v_scale: Any, sinks: Any) -> bool:
    """Whether kernels may write the result there; else it is copied, as with gradients, or refused."""
    if not isinstance(out, torch.Tensor) or not (v_scale is None or isinstance(v_scale, torch.Tensor)):
        return False
    if torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in (q, sinks)):
        return False
    return out.shape == q.shape and out.dtype is q.dtype and out.device == q.device and out.is_contiguous()


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of all keys, from states of disjoint sets of them; differentiable.

    v: (tokens, states, heads, head_dim); s: (tokens, states, heads), base 2, -inf where a state saw no key; lse likewise,
    (tokens, heads).
    """
    check_kinds(v=v, s=s)
    if v.dim() != 4 or s.shape != v.shape[:3]:
        raise InvalidProblem(
            f"v has shape {tuple(v.shape)} and s {tuple(s.shape)}; they must be (tokens, states, heads, head_dim) and "
            "(tokens, states, heads)."
        )
    return merged(v.unbind(1), s.unbind(1))


def merged(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of states (tokens, heads, head_dim) and (tokens, heads), each a tensor of its own."""
    wide = [one.to(torch.promote_types(one.dtype, torch.float32)) for one in lses]
    out, lse = merge(outs, [one.transpose(0, 1) * LN2 for one in wide])
    return out, lse_of(lse)


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_states` of two: v (tokens, heads, head_dim), s (tokens, heads)."""
    check_kinds(v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
    for name, v, s in (("a", v_a, s_a), ("b", v_b, s_b)):
        if v.shape != v_a.shape or v.dim() != 3 or s.shape != v.shape[:2]:
            raise InvalidProblem(
                f"v_{name} has shape {tuple(v.shape)} and s_{name} {tuple(s.shape)}; both v must be (tokens, heads, head_dim) "
                "alike, and s (tokens, heads)."
            )
    return merged((v_a, v_b), (s_a, s_b))


def merge_state_in_place(
    v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor, mask: Any = None
) -> None:
    """Write `merge_state` of (v, s) and the other into v and s; mask: bool (tokens,), which tokens alone."""
    out, lse = merge_state(v, s, v_other, s_other)
    if mask is not None:
        seen = mask.bool()
        out, lse = out.where(seen[:, None, None], v), lse.where(seen[:, None], s)
    v.copy_(out)
    s.copy_(lse)
