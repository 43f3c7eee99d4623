"""append_to_cache: new keys and values into the pages of a cache, in place."""

from __future__ import annotations

from typing import Any

import torch

from flashtile import dispatch
from flashtile.errors import InvalidProblem, NotSupported
from flashtile.memory import Memory
from flashtile.problem.cache import AppendProblem
from flashtile.torch.cache.tensors import check_pools, check_table, int32
from flashtile.torch.execute.bound import DTYPES, Bound, device_of
from flashtile.torch.execute.plain import is_traced

Rotary = Any  # (cos, sin) or (cos, sin, interleaved)


def append_to_cache(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor | None = None, *,
    seqused_k: torch.Tensor | None = None, slots: torch.Tensor | None = None, cu_seqlens: torch.Tensor | None = None,
    q: torch.Tensor | None = None, rotary: Rotary = None, backend: str | None = None,
) -> torch.Tensor | None:  # fmt: skip
    """Write new keys and values into a cache, in place; nobody waits for the device.

    k, v: (batch, seqlen, heads_kv, head_dim), or with cu_seqlens, int32 (batch + 1,), (total, heads_kv, head_dim).
    k_cache, v_cache, page_table: as `attention_cached` has them.
    seqused_k: int32 (batch,): rows that each item has; its new keys follow them. The caller advances it.
    slots: instead, int (batch, seqlen) or (total,): where each token goes, page * page_size + row; -1 for nowhere.
    rotary: (cos, sin), (rows, rotary_dim / 2), or (cos, sin, interleaved): k, and q where it is given, are rotated by their
        rows in the cache; it needs seqused_k.
    Returns q rotated, or None. A row that an item has no page for raises InvalidProblem on the CPU; on a GPU it is written
    nowhere.
    Two tokens of one slot: either may stay. A page of several items is written for all of them.
    """
    packed = cu_seqlens is not None or (slots is not None and slots.dim() == 1)
    check_pools(k, k_cache, v_cache, packed, "k")
    if not isinstance(v, torch.Tensor) or v.shape[:-1] != k.shape[:-1] or v.dtype != k.dtype or v.device != k.device:
        found = f"{v.dtype} of shape {tuple(v.shape)} on {v.device}" if isinstance(v, torch.Tensor) else type(v).__name__
        raise InvalidProblem(f"v is {found}; it must be {k.dtype} of {tuple(k.shape[:-1])} and head_dim, on {k.device}.")
    for name, new, pool in (("k", k, k_cache), ("v", v, v_cache)):
        if new.shape[-2:] != pool.shape[-2:]:
            raise InvalidProblem(
                f"{name} has (heads, head_dim) {tuple(new.shape[-2:])}; it must be {tuple(pool.shape[-2:])}, those of "
                f"{name}_cache."
            )
    tensors = [t for t in (k, v, k_cache, v_cache, q) if t is not None]
    if is_traced(*tensors):
        reason = "there is no operator of it for torch.compile, torch.func and dispatch modes yet; call it outside of them"
        raise NotSupported("append_to_cache within a graph", {"torch": [reason]})
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        reason = "a cache passes no gradients on; call it under torch.no_grad(), or with detached tensors"
        raise NotSupported("append_to_cache of tensors that require gradients", {"flashtile": [reason]})
    if (seqused_k is None) == (slots is None):
        raise InvalidProblem("seqused_k and slots are both given, or neither; exactly one must say where tokens go.")
    if slots is not None:
        if rotary is not None:
            raise InvalidProblem("rotary is given with slots; positions are known with seqused_k alone.")
        if slots.dtype not in (torch.int32, torch.int64) or slots.shape != k.shape[:-2]:
            raise InvalidProblem(
                f"slots is {slots.dtype} of shape {tuple(slots.shape)}; it must be int64 of shape {tuple(k.shape[:-2])}."
            )
        _write(k, v, k_cache, v_cache, slots.long(), backend)
        return q
    assert seqused_k is not None
    used = int32("seqused_k", seqused_k, k)
    cu = None if cu_seqlens is None else int32("cu_seqlens", cu_seqlens, k)
    return append_pair(q, (k, v), k_cache, v_cache, page_table, used, cu, rotary, backend)[0]


def append_pair(
    q: Any, pair: Any, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor | None, used: torch.Tensor,
    cu: torch.Tensor | None, rotary: Rotary, backend: str | None,
) -> tuple[Any, torch.Tensor]:  # fmt: skip
    """(q, rotated where that is asked for, each item's rows after the append)."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise InvalidProblem(f"append is a {type(pair).__name__}; it must be (k, v).")
    k, v = pair
    check_pools(k, k_cache, v_cache, cu is not None, "append's k")
    if not isinstance(v, torch.Tensor) or v.shape[:-1] != k.shape[:-1] or k.shape[-2:] != k_cache.shape[-2:]:
        raise InvalidProblem(
            f"append is of shapes {tuple(k.shape)} and {tuple(getattr(v, 'shape', ()))}; their heads and head_dims must be "
            f"those of k_cache {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)}."
        )
    batch = len(used)
    if (len(cu) - 1 if cu is not None else k.shape[0]) != batch:
        raise InvalidProblem(f"append's k has shape {tuple(k.shape)}; it must be of {batch} items, as seqused_k is.")
    if cu is not None and isinstance(q, torch.Tensor) and q.shape[0] != k.shape[0]:
        raise InvalidProblem(f"append's k has {k.shape[0]} tokens and q has {q.shape[0]}; they must lie alike.")
    pages = check_table(k_cache, page_table, batch, False)
    if rotary is not None:
        q, k = _rotate(q, k, rotary, used, cu, backend)
    if cu is None:
        item = torch.arange(batch, device=k.device)[:, None]
        offset = torch.arange(k.shape[1], device=k.device)[None]
        exists, added = torch.ones((), dtype=torch.bool, device=k.device), torch.full_like(used, k.shape[1])
    else:
        index = torch.arange(k.shape[0], device=k.device, dtype=torch.int32)
        item = torch.searchsorted(cu[1:].contiguous(), index, right=True).clamp(max=max(batch - 1, 0))
        exists, added = index < cu[-1], cu[1:] - cu[:-1]
        offset = index - cu[item] if batch else index
    row = (used[item] + offset if batch else offset).long()
    column = row // pages.page_size
    if page_table is None:
        page = item.expand(row.shape).long()
    elif pages.columns and batch:
        page = page_table[item.expand(row.shape), column.clamp(0, pages.columns - 1)].long()
    else:
        page = torch.full_like(row, -1)
    good = (column >= 0) & (column < pages.columns) & (page >= 0) & (page < pages.pages)
    if k.device.type == "cpu" and not bool((good | ~exists).all()):
        raise InvalidProblem(
            f"append needs row {int(row[exists & ~good][0])} of an item, which page_table has no page for; items have "
            f"{pages.columns} pages of {pages.page_size} rows, and pages are numbered 0 to {pages.pages - 1}."
        )
    slots = torch.where(good & exists, page * pages.page_size + row % pages.page_size, -1)
    _write(k, v, k_cache, v_cache, slots, backend)
    return q, used + added


def _rotate(q: Any, k: torch.Tensor, rotary: Rotary, used: torch.Tensor, cu: torch.Tensor | None, backend: str | None) -> Any:
    from flashtile.torch.ops.run import run

    if not isinstance(rotary, (tuple, list)) or len(rotary) not in (2, 3):
        raise InvalidProblem(f"rotary is a {type(rotary).__name__}; it must be (cos, sin) or (cos, sin, interleaved).")
    cos, sin, *rest = rotary
    made: list[Any] = []
    for tensor in (q, k):
        if tensor is None:
            made.append(None)
            continue
        wide = tensor if cu is None else tensor[None]
        index = torch.arange(wide.shape[1], device=wide.device, dtype=torch.int32)
        if cu is None:
            positions = used[:, None] + index
        else:
            item = torch.searchsorted(cu[1:].contiguous(), index, right=True).clamp(max=max(len(used) - 1, 0))
            positions = torch.where(index < cu[-1], used[item] + index - cu[item], 0)[None] if len(used) else index[None] * 0
        given = {"q": wide, "k": None, "cos": cos, "sin": sin, "positions": positions}
        (turned,) = run("rotary", given, dict(interleaved=bool(rest and rest[0])), backend)
        made.append(turned if cu is None else turned[0])
    return made


_BOUND = Memory[Any, Bound](1024, "appends to caches")


def _write(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, backend: str | None
) -> None:
    if k.dim() == 3:
        k, v, slots = k[None], v[None], slots[None]
    slabs, seqlen, heads, dim = k.shape
    problem = AppendProblem(slabs, seqlen, heads, dim, v.shape[3], DTYPES[k.dtype], *k_cache.shape[:2])
    place = device_of(k.device)
    plan = dispatch.plan_cached(problem, place, backend)
    tensors = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slots": slots}
    key = (problem, backend, k.device, *((t.stride(), t.data_ptr() & 15) for t in tensors.values()))
    bound = _BOUND.get(key)
    if bound is None:
        bound = _BOUND[key] = Bound(plan, tensors, k.device)
    if slabs * seqlen:
        bound.run(tensors)
    for pool in (k_cache, v_cache):  # launches tell nobody what they write
        torch.autograd.graph.increment_version(pool)
