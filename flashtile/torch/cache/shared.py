"""A prefix that all items share, read once: all queries go over it together, and each item's own keys are merged to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashtile.errors import InvalidProblem, NotSupported
from flashtile.features.scores.softcap import Softcap
from flashtile.problem.cache import Pages
from flashtile.problem.mask import Band
from flashtile.problem.number import plain, told
from flashtile.torch.api.merge import merge
from flashtile.torch.call.inputs import modifiers
from flashtile.torch.call.stored import Maybe, Scales
from flashtile.torch.execute.plain import is_traced

STEPS = 16  # parts of a prefix; so many, and their borders, follow from its length alone


def check_prefix(
    prefix: Any, pages: Pages, used: torch.Tensor, queries: int | torch.Tensor, scales: Scales, asked: dict[str, Any]
) -> int:
    """The number of keys, 0 for none, and where no item has them; InvalidProblem for what is none, NotSupported beside what
    tells shared keys apart.

    queries: of each item.
    """
    prefix = plain(prefix)
    if isinstance(prefix, bool) or not isinstance(prefix, int) or not 0 <= prefix < max(pages.capacity, 1):
        raise InvalidProblem(
            f"shared_prefix is {told(prefix)}; it must be a number of keys, from 0 to {max(pages.capacity, 1) - 1}, fewer than "
            f"the {pages.capacity} rows that an item may have."
        )
    if not prefix:
        return 0
    if pages.table and prefix % pages.page_size:
        raise InvalidProblem(
            f"shared_prefix is {prefix} and pages have {pages.page_size} rows; it must be whole pages: "
            f"{prefix // pages.page_size * pages.page_size} of these keys are."
        )
    reasons: list[str] = []
    if pages.first:
        reasons.append("first_k is given, and items then begin in rows of their own")
    window, mask = asked["window"], asked["mask"]
    bands = [] if window is None else [Band(*window)]
    bands += [mask] if isinstance(mask, Band) else []
    if any(band.left is not None for band in bands):
        reasons.append("the window ends on the left, within the prefix for some queries")
    if mask is not None and not isinstance(mask, Band):
        reasons.append("the mask has predicates, which count keys from the first")
    reasons += [
        f"{type(one).__name__} counts keys from the first; leave shared_prefix out"
        for one in modifiers(asked["score"])
        if not isinstance(one, Softcap)
    ]
    if any(scale is not None and scale.dim() == 2 and scale.shape[0] > 1 and scale.stride(0) != 0 for scale in scales):
        reasons.append("each item has scales of its own, and the prefix is stored once")
    if reasons:
        raise NotSupported("attention_cached with shared_prefix", {"flashtile": reasons})
    if used.device.type == "cpu" and not is_traced(used):
        rights = [0] * bool(asked["causal"]) + [band.right for band in bands if band.right is not None]
        # its first query must see the last key of the prefix
        least = prefix + (queries - 1 - min(rights) if rights else torch.zeros_like(used)) * torch.ones_like(used)
        least = least.clamp(min=prefix)
        short = (used > 0) & (used < least)
        if bool(short.any()):
            item = int(short.nonzero()[0])
            raise InvalidProblem(
                f"seqused_k[{item}] is {int(used[item])}; with shared_prefix={prefix} it must be at least {int(least[item])}, "
                "so that every query stands behind the prefix, or 0."
            )
    return prefix if used.shape[0] else 0


def split_of(prefix: int) -> int:
    """The split of a prefix: of its length alone, whoever shares it."""
    split = 256
    while prefix > split * STEPS:
        split *= 2
    return split


def attend_shared(
    call: Callable[..., Any], prefix: int, q: torch.Tensor, pools: tuple[torch.Tensor, torch.Tensor],
    page_table: torch.Tensor | None, used: torch.Tensor, cu_q: torch.Tensor | None, arguments: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out, lse) as `call`, which is attention_cached, returns them without a prefix.

    All queries are packed as one item that goes over the prefix; a row's bits do not depend on which others there are.
    """
    size = pools[0].shape[1]
    rows = q if cu_q is not None else q.flatten(0, 1)
    one = torch.full((1,), prefix, dtype=torch.int32, device=q.device)
    starts = torch.arange(2, dtype=torch.int32, device=q.device) * rows.shape[0]
    before = {**arguments, "sink": None, "causal": False, "window": None, "mask": None, "split": split_of(prefix)}
    if page_table is None:
        shared = [pool[:1, :prefix] for pool in pools]
        own, table = [pool[:, prefix:] for pool in pools], None
        first_table = None
    else:
        shared, own = list(pools), list(pools)
        first_table, table = page_table[:1, : prefix // size], page_table[:, prefix // size :]
    scales = {name: arguments[name] for name in ("k_scale", "v_scale")}
    before |= {name: _part(scale, page_table, slice(1), slice(prefix)) for name, scale in scales.items()}
    behind = {name: _part(scale, page_table, slice(None), slice(prefix, None)) for name, scale in scales.items()}
    out, lse = call(rows, *shared, first_table, seqused_k=one, cu_seqlens_q=starts, **before)
    rest = call(q, *own, table, seqused_k=(used - prefix).clamp(min=0), cu_seqlens_q=cu_q, **{**arguments, **behind})
    if cu_q is None:
        out, lse = out.view(rest[0].shape), lse.view(q.shape[2], *q.shape[:2]).transpose(0, 1)
        there = (used > 0)[:, None].expand(q.shape[:2])
    else:
        index = torch.arange(q.shape[0], device=q.device, dtype=torch.int32)
        item = torch.searchsorted(cu_q[1:].contiguous(), index, right=True).clamp(max=used.shape[0] - 1)
        there = (used[item] > 0) & (index >= cu_q[0]) & (index < cu_q[-1])
    # an item without any key sees none of the prefix either
    out = out.masked_fill(~there[..., None, None], 0.0)
    lse = lse.masked_fill(~(there[:, None] if cu_q is None else there[None]), -torch.inf)
    return merge((out, rest[0]), (lse, rest[1]))


def prefix_for_each(
    prefix: int, pools: tuple[torch.Tensor, torch.Tensor], scales: Scales, page_table: torch.Tensor | None
) -> tuple[tuple[torch.Tensor, torch.Tensor], Scales, torch.Tensor | None]:
    """(pools, scales, page_table) with item 0's prefix at every item, whatever lies in their own first rows."""
    if page_table is not None:
        return pools, scales, _with_first(page_table, prefix // pools[0].shape[1])
    key_scale, value_scale = (scale if scale is None or scale.dim() == 2 else _with_first(scale, prefix) for scale in scales)
    return (_with_first(pools[0], prefix), _with_first(pools[1], prefix)), (key_scale, value_scale), None


def _with_first(rows: torch.Tensor, count: int) -> torch.Tensor:
    return torch.cat([rows[:1, :count].expand(rows.shape[0], *rows[0, :count].shape), rows[:, count:]], 1)


def _part(scale: Maybe, page_table: torch.Tensor | None, items: slice, rows: slice) -> Maybe:
    """A scale as part of a call's items and rows have it."""
    if scale is None or scale.dim() == 2:
        return scale if scale is None else scale[0]
    return scale if page_table is not None else scale[items, rows]
