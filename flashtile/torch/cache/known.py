"""Calls over a cache that come again: what was found of one holds for all of its layout, which are launched at once.

A key has everything that decides what a call is, without the numbers in its tensors. `attention_cached` and `append_to_cache`
remember under it what they found, once a call has run. Nothing has a key that somebody wants to see as an operator or to
differentiate, nor what has no meaning: that goes the long way, which says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from flashtile.memory import Memory
from flashtile.problem.mask import Joined
from flashtile.problem.number import PLAIN as NUMBERS
from flashtile.torch.cache.operator import Layout, new_scale, slots_of, tell_written, tensors_of, write_rows
from flashtile.torch.cache.rotate import rotate
from flashtile.torch.cache.tensors import check_lengths, check_modes, int32
from flashtile.torch.call.describe import capture, exactly
from flashtile.torch.call.inputs import modifiers
from flashtile.torch.call.masks import call_mask
from flashtile.torch.call.stored import NO_SCALES, Maybe, Scales, check_scales
from flashtile.torch.execute.bound import Bound
from flashtile.torch.execute.plain import PLAIN, is_compiling, modes, transforms
from flashtile.torch.execute.replay import addresses_of
from flashtile.torch.routes.derivatives import is_dual_level

NO_KEY = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)  # of no tensors, or not hashable
CHANGES = frozenset({"score", "scale", "sink", "k_scale", "v_scale", "shared_prefix"})


def is_seen() -> bool:
    """Whether somebody wants to see an operator, whatever the tensors are."""
    return is_compiling() or modes() > 0 or transforms() or is_dual_level()


def add_layouts(key: list[Any], tensors: Iterable[Any]) -> bool:
    """Add to a key what a call depends on of its tensors, None where there is none; False if it is to have no key."""
    learns = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is None:
            key.append(None)
            continue
        if type(tensor) not in PLAIN or tensor.is_neg() or (learns and tensor.requires_grad):
            return False
        key += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() & 15)
    return True


def scales_of(k_scale: Any, v_scale: Any, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: int) -> Scales:
    """A call's scales, for its key, and for launches, which ask where they lie alone: tensors as they are given."""
    if k_scale is None and v_scale is None:
        return NO_SCALES
    if all(scale is None or isinstance(scale, torch.Tensor) for scale in (k_scale, v_scale)):
        return k_scale, v_scale
    return check_scales(k_scale, v_scale, k_cache, v_cache, batch)


def taken(name: str, lengths: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`int32` of lengths of a known call."""
    return lengths if lengths.dtype is torch.int32 and lengths.is_contiguous() else int32(name, lengths, like)


def lengthened(used: torch.Tensor, k: torch.Tensor, cu: Maybe) -> torch.Tensor:
    """The items' lengths with new rows, of which cu says where each one's begin."""
    return used + (k.shape[1] if cu is None else cu[1:] - cu[:-1])


class Call(NamedTuple):
    """A call of `attention_cached` that may be known.

    tensors: q, the pools, page_table, seqused_k, cu_seqlens_q, first_k; scales: tensors as they were given; others: what
    score and sink capture, then the tensors of predicates.
    """

    key: tuple[Any, ...]
    tensors: tuple[Any, ...]
    scales: Scales
    others: tuple[torch.Tensor, ...]
    known: Known | None


def recognize(
    tensors: tuple[Any, ...], append: Any, more: tuple[bool, bool], asked: tuple[Any, ...], changes: Mapping[str, Any]
) -> Call | None:
    """A call; None for one without a key. more: whether it rotates, and has qv, which q begins with then. asked: causal,
    return_lse, split, options, window, mask.
    """
    if is_seen():
        return None
    q, k_cache, v_cache, _, _, cu, _ = given = tensors
    causal, return_lse, split, options, window, mask = asked
    scales, others, score = NO_SCALES, (), changes.get("score", ())
    try:
        shared = k_cache.data_ptr() == v_cache.data_ptr()
        key: list[Any] = [shared, *more, causal, type(causal), return_lse, type(return_lse), split, type(split), options]
        if window is not None:
            key.append(exactly(window))
        if changes or mask is not None:
            prefix = changes.get("shared_prefix", 0)
            if not CHANGES.issuperset(changes) or type(prefix) is not int or prefix:
                return None
            batch, heads = (q.shape[0], q.shape[2]) if cu is None else (cu.shape[0] - 1, q.shape[1])
            if "k_scale" in changes or "v_scale" in changes:
                scales = scales_of(changes.get("k_scale"), changes.get("v_scale"), k_cache, v_cache, batch)
            scale, sink = changes.get("scale"), changes.get("sink")
            if type(score) is not tuple or score:
                others, score = capture(modifiers(score), batch, heads)
            others += () if sink is None else (sink,)
            if isinstance(mask, Joined):
                if mask.spec is not None:  # its lists of blocks are for one length
                    return None
                mask, masked = call_mask(causal, window, mask, batch, heads)
                others += masked
            key += (scale, type(scale), score, mask)
            tensors = (*tensors, *scales, sink)
        if append is not None:
            if not isinstance(append, (tuple, list)):  # not to be taken apart before somebody says so
                return None
            new_k, new_v = append
            if shared and scales is not NO_SCALES:  # whose numbers are compared
                return None
            key.append(new_k.data_ptr() == new_v.data_ptr())
            tensors = (*tensors, new_k, new_v)
        if not add_layouts(key, tensors):
            return None
        found = tuple(key)
        return Call(found, given, scales, others, _CALLS.get(found))
    except NO_KEY:
        return None


class Known(NamedTuple):
    """What is known of calls of `attention_cached`. bound: what writes the new rows of those that append."""

    layout: Layout
    bound: Bound | None

    def run(
        self, call: Call, append: Any, rotary: Any, backend: str | None, whole: bool, into: Maybe = None
    ) -> tuple[Any, Any]:
        """(out, lse), which unless `whole` may be None; out is `into`, if the kernels have written there."""
        layout, scales, (q, k_cache, v_cache, page_table, used, cu, first) = self.layout, call.scales, call.tensors
        if scales is not NO_SCALES and (layout.looks or (self.bound is not None and self.bound.direct is None)):
            scales = check_scales(*scales, k_cache, v_cache, used.shape[0])
        used = taken("seqused_k", used, q)
        cu = None if cu is None else taken("cu_seqlens_q", cu, q)
        first = None if first is None else taken("first_k", first, q)
        if self.bound is not None:
            k, v = append
            rows = -1
            if rotary is not None:
                q, k, rows = rotate(q, k, rotary, used, cu, backend)
            if layout.looks:  # nothing is written for a call that fails
                slots_of(k, k_cache, page_table, used, cu, rows)
                check_lengths(layout.problem.pages, lengthened(used, k, cu), first, page_table)
            four = k, v, k_cache, v_cache
            after = write_again(self.bound, four, scales, page_table, used, None, cu, rows, backend)
            used = lengthened(used, k, cu) if after is None else after
        lengths = (used,) if cu is None else (cu, cu, used)
        tensors = tensors_of(q, (k_cache, v_cache), scales, page_table, first, (*call.others, *lengths))
        if into is None or type(into) not in PLAIN or into.is_neg() or into.data_ptr() == q.data_ptr():
            return layout.attend(layout.inputs(tensors), first, page_table, whole)
        out, lse = layout.attend(layout.inputs(tensors), first, page_table, whole, into)
        if out is into:
            torch.autograd.graph.increment_version(into)  # for launches tell autograd nothing
        return out, lse


def write_again(
    bound: Bound, four: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], scales: Scales, page_table: Maybe,
    used: Maybe, slots: Maybe, cu: Maybe, rotary_rows: int, backend: str | None,
) -> Maybe:  # fmt: skip
    """What `write_rows` says that items have then, of a layout that is bound already. four: new rows, and the pools; scales:
    tensors as they were given, or, if launches do not do it all, as `check_scale` returns them.
    """
    replay = bound.direct
    if replay is None:
        check_modes(four[0], k_cache=four[2], v_cache=four[3])
        return write_rows(four, scales, page_table, used, slots, cu, rotary_rows, backend or "")[1]
    named: dict[str, Any] = dict(zip(("k", "v", "k_cache", "v_cache"), four, strict=True))
    named |= {"seqused_k": used, "page_table": page_table, "cu_seqlens": cu, "slots": slots}
    for name, scale in () if scales is NO_SCALES else (("k_scale", scales[0]), ("v_scale", scales[1])):
        # all but one of each item, of packed rows, begins where the scales of new rows do
        named[name] = new_scale(scale, four[0], cu) if cu is not None and scale is not None and scale.dim() == 2 else scale
    inputs = [named[name] for name in bound.inputs]
    made = replay.direct(inputs, addresses_of(inputs))
    tell_written(*four[2:], *scales)
    return made[0] if made else None


def remember(call: Call, numbers: Iterable[Any], layout: Layout, bound: Bound | None) -> None:
    """Know a call that has run. numbers: those that it was given, in whatever place."""
    if any(type(number) not in NUMBERS for number in numbers):  # a tensor is another one as it changes
        return
    if layout.device.type == "meta" or any(t.is_neg() for t in call.others):  # on meta all is at one address
        return
    _CALLS[call.key] = Known(layout, bound)


_CALLS = Memory[Any, Known](1024, "known calls over caches")
