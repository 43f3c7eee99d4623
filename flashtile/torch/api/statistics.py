"""What `returns` asks of `attention`: statistics of the softmax, beside its forward or by passes behind it; what uses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from flashtile.errors import InvalidProblem, NotSupported
from flashtile.problem.number import plain
from flashtile.problem.statistics import Statistics, Wish, wish_of
from flashtile.torch.call.arguments import Arguments
from flashtile.torch.call.inputs import check_tensors
from flashtile.torch.call.lengths import Given
from flashtile.torch.call.masks import mask_of_call
from flashtile.torch.execute.packing import APART
from flashtile.torch.execute.plain import is_compiling, is_distributed, transforms
from flashtile.torch.routes.derivatives import is_dual_level, refuse_tangents
from flashtile.torch.routes.functional import requires_grad_below
from flashtile.torch.routes.request import write
from flashtile.torch.routes.statistics import STATISTICS, WATCHED

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attend_with(
    returns: Any, attend: Callable[[Arguments], Any], packs: Tensors, given: Given | None, arguments: Arguments
) -> tuple[torch.Tensor, Statistics]:
    """(out, statistics). attend: the call itself, of other arguments. packs: q, k, v; varlen's (total, heads, head_dim)."""
    wish = wish_of(returns)
    if plain(arguments.return_lse) is not False:
        raise InvalidProblem(f"return_lse is {arguments.return_lse!r} besides returns; ask for 'lse' among returns instead.")
    for name, refused in (("a DTensor", is_distributed(*packs)), ("a nested tensor", getattr(packs[0], "is_nested", False))):
        if refused:
            reason = "passes of statistics take dense tensors of one device; take them of each shard, or by attention_varlen"
            raise NotSupported(f"statistics of attention of {name}", {"torch": [reason]})
    arguments = arguments._replace(return_lse=True)
    beside = (wish.max_logit or wish.entropy) and arguments.dropout is None
    if beside and (is_compiling() or not (transforms() or is_dual_level())):
        out, found = _beside(wish, packs, given, arguments)
        mass = None
        if wish.mass:
            only = Wish(mass=True, last=wish.last)
            mass = _passes(only, packs, given, arguments, found.lse.detach()).mass
        # no `_replace`: the compiler of PyTorch 2.11 returns nothing that it made
        return out, Statistics(found.lse if wish.lse else None, found.max_logit, found.entropy, mass)
    out, lse = attend(arguments)
    if not wish.passes:
        return out, Statistics(lse=lse if wish.lse else None)
    found = _passes(wish, packs, given, arguments._replace(dropout=None), lse.detach())
    return out, Statistics(lse if wish.lse else None, found.max_logit, found.entropy, found.mass)


def _beside(wish: Wish, packs: Tensors, given: Given | None, arguments: Arguments) -> tuple[torch.Tensor, Statistics]:
    """(out, lse and the statistics of rows), of one operator."""
    text, floats, ints, captured, others = _written(packs, given, arguments)
    wanted = 0
    if torch.is_grad_enabled():
        for i, tensor in enumerate((*packs, *captured)):
            wanted |= int(tensor.requires_grad) << i
    rows = _which(replace(wish, mass=False))
    out, lse, _, peak, entropy = WATCHED(*packs, [*captured, *others], rows, wanted, text, floats, ints)
    largest = _largest(peak, given) if wish.max_logit else None
    return out, Statistics(lse, largest, entropy if wish.entropy else None)


def _which(wish: Wish) -> str:
    asked = (("peak", wish.max_logit), ("entropy", wish.entropy), ("mass", wish.mass))
    return ",".join(name for name, there in asked if there)


def _written(packs: Tensors, given: Given | None, arguments: Arguments) -> Any:
    """A call as operators take it, checked."""
    varlen = given is not None and given.varlen
    q, k, v = (t[None] for t in packs) if varlen else packs
    check_tensors(q, k, v, given)
    if given is not None:
        arguments = arguments._replace(mask=mask_of_call(arguments.mask, q, k, True))
    return write(APART, q, given, arguments)


def _passes(wish: Wish, packs: Tensors, given: Given | None, arguments: Arguments, lse: torch.Tensor) -> Statistics:
    """What takes a pass of its own."""
    text, floats, ints, captured, others = _written(packs, given, arguments)
    wanted, inputs = 0, (*packs, *captured)
    if wish.entropy and is_dual_level():
        refuse_tangents(
            "the entropy of attention",
            "torch",
            zip(("q", "k", "v", *("a captured tensor" for _ in captured)), inputs, strict=True),
        )
    if wish.entropy and torch.is_grad_enabled():
        within = not is_compiling() and transforms()
        for i, tensor in enumerate(inputs):
            if tensor.requires_grad or (within and requires_grad_below(tensor)):
                wanted |= 1 << i
    numbers = wish.last, wanted, text, floats, ints
    peak, entropy, mass = STATISTICS(*packs, [*captured, *others], lse, _which(wish), *numbers)
    return Statistics(
        max_logit=_largest(peak, given) if wish.max_logit else None, entropy=entropy if wish.entropy else None,
        mass=mass if wish.mass else None,
    )  # fmt: skip


def _largest(peak: torch.Tensor, given: Given | None) -> torch.Tensor:
    """(items, heads_q): of each item the largest of its rows."""
    if given is None or not given.varlen:
        if peak.shape[-1] == 0:
            return peak.new_full(peak.shape[:-1], -torch.inf)
        return peak.amax(-1)
    ends = given.tensors["cu_seqlens_q"][1:]
    rows = torch.arange(peak.shape[-1], dtype=ends.dtype, device=peak.device)
    item = torch.searchsorted(ends, rows, right=True)  # of rows behind the last item, one more than there are
    made = peak.new_full((peak.shape[0], ends.shape[0] + 1), -torch.inf)
    return made.scatter_reduce(1, item.expand(peak.shape[0], -1), peak, "amax")[:, :-1].T.contiguous()


def qk_clip(
    max_logit: torch.Tensor, threshold: float = 100.0, *, alpha: float = 0.5, heads_kv: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(factors of each query head's weights, (heads_q,), those of each key head's, (heads_kv,)) of QK-clip.

    max_logit: (..., heads_q), as `attention(..., returns="max_logit")` gives it; other axes, such as the batch's, are reduced
        by their maximum. Across ranks reduce it by MAX before.
    threshold: no head's largest logit stays above it. alpha: the share of a head's factor that goes to its queries.
    heads_kv: where groups of query heads share a key head; heads_q by default. A shared key head is scaled as the head of
        its group that needs it most asks for, and each query head by what is then left of its own factor.

    Multiply the rows of W_q and W_k that make a head by its factors, after an optimizer's step: the product of both is
    min(1, threshold / max_logit), by which the head's logits shrink (Kimi K2, arXiv 2507.20534). Of MLA scale the parts
    without rotation by both factors, the rotated queries by their product, and leave the shared rotated key alone.
    """
    threshold, alpha, heads_kv = plain(threshold), plain(alpha), plain(heads_kv)
    if not isinstance(max_logit, torch.Tensor) or max_logit.dim() < 1 or not max_logit.is_floating_point():
        raise InvalidProblem("max_logit must be a tensor (..., heads_q) of floating point.")
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not threshold > 0:
        raise InvalidProblem(f"threshold is {threshold!r}; it must be a number above 0.")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 <= alpha <= 1:
        raise InvalidProblem(f"alpha is {alpha!r}; it must be a number from 0 to 1.")
    heads_q = max_logit.shape[-1]
    heads_kv = heads_q if heads_kv is None else heads_kv
    if isinstance(heads_kv, bool) or not isinstance(heads_kv, int) or heads_kv < 1 or heads_q % heads_kv:
        raise InvalidProblem(f"heads_kv is {heads_kv!r}; it must be an int that divides heads_q, {heads_q}.")
    largest = max_logit.detach().reshape(-1, heads_q).amax(0)
    factor = torch.where(largest > threshold, threshold / largest, torch.ones_like(largest))
    keys = factor.view(heads_kv, -1).amin(1).pow(1.0 - alpha)
    return factor / keys.repeat_interleave(heads_q // heads_kv), keys
