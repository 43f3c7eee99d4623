"""append_to_cache: new keys and values into the pages of a cache, in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashtile.errors import InvalidProblem, NotSupported
from flashtile.memory import Memory
from flashtile.torch.cache.known import NO_KEY, add_layouts, is_seen, lengthened, scales_of, taken, write_again
from flashtile.torch.cache.operator import append_rows
from flashtile.torch.cache.rotate import Rotary, rotate
from flashtile.torch.cache.tensors import (
    check_pools,
    check_starts,
    check_table,
    check_written,
    int32,
    refuse_transforms,
)
from flashtile.torch.call.stored import (
    NO_SCALES,
    Maybe,
    Scales,
    check_kind,
    check_resolved,
    check_scales,
    is_shared,
    scaling_of,
)
from flashtile.torch.execute.bound import Bound
from flashtile.torch.execute.plain import is_traced

PAIR = ("append's k", "append's v")


def append_to_cache(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor | None = None, *,
    seqused_k: torch.Tensor | None = None, slots: torch.Tensor | None = None, cu_seqlens: torch.Tensor | None = None,
    q: torch.Tensor | None = None, rotary: Rotary = None, k_scale: Any = None, v_scale: Any = None, backend: str | None = None,
) -> torch.Tensor | None:  # fmt: skip
    """Write new keys and values into a cache, in place; nobody waits for the device.

    k, v: (batch, seqlen, heads_kv, head_dim), or with cu_seqlens, int32 (batch + 1,), (total, heads_kv, head_dim).
    k_cache, v_cache, page_table: as `attention_cached` has them.
    seqused_k: int32 (batch,): rows that each item has; its new keys follow them. The caller advances it.
    slots: instead, int (batch, seqlen) or (total,): where each token goes, page * page_size + row; -1 for nowhere.
    rotary: (cos, sin), (rows, rotary_dim / 2), or (cos, sin, interleaved): k, and q where it is given, are rotated by their
        rows in the cache; it needs seqused_k, and q as many tokens as k.
    k_scale, v_scale: those of a cache of 8 bits, as `attention_cached` has them. A number goes over its scale, to the nearest
        that there is, of two the even one, and of what is beyond the largest: 448 of e4m3, 57344 of e5m2, 127 of int8, which
        stores 0 for NaN. Scales (pages, page_size, heads_kv) are written: the row's largest number over that one.

    Where v_cache is k_cache[..., :head_dim_v], v must be k[..., :head_dim_v], and v_scale k_scale: both are written once.

    Returns q rotated, or None. A row that an item has no page for, a slot outside of the pools, a row that rotary's tables
    lack and two tokens of one slot raise InvalidProblem on the CPU. On a GPU nobody looks: the first two are written nowhere,
    the third is NaN in the cache, and of the two tokens either stays. A page of several items is written for all of them, so
    copy it before two of them write into it. Nothing is cast, under autocast neither. Under torch.compile it is an operator
    that writes the pools in place.
    """
    packed = cu_seqlens is not None or (isinstance(slots, torch.Tensor) and slots.dim() == 1)
    tensors = k, v, k_cache, v_cache, page_table, seqused_k, slots, cu_seqlens, q
    key, scales, bound = _recognize(tensors, packed, rotary is not None, (k_scale, v_scale), backend)
    if bound is not None:
        used, cu, rows = seqused_k, None if cu_seqlens is None else taken("cu_seqlens", cu_seqlens, k), -1
        if used is not None:
            used = taken("seqused_k", used, k)
            if rotary is not None:
                q, k, rows = rotate(q, k, rotary, used, cu, backend)
        slots = None if slots is None else slots.long()
        write_again(bound, (k, v, k_cache, v_cache), scales, page_table, used, slots, cu, rows, backend)
        return q
    if isinstance(cu_seqlens, torch.Tensor) and cu_seqlens.shape == (0,):
        raise InvalidProblem("cu_seqlens has 0 elements; it must have batch + 1.")
    pair = _check_new((k, v), k_cache, v_cache, packed, ("k", "v"))
    if q is not None:
        check_kind("q", q)
        if q.shape[:-2] != k.shape[:-2] or q.dim() != k.dim():
            raise InvalidProblem(f"q has shape {tuple(q.shape)}; its tokens must be those of k, {tuple(k.shape[:-2])}.")
    batch = _batch_of(k, cu_seqlens, packed, slots)
    scales = check_scales(k_scale, v_scale, k_cache, v_cache, batch)
    rows = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "q": q}
    refuse_transforms("append_to_cache", rows)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*rows.values(), *scales)):
        reason = (
            "a cache passes no gradients on; call it under torch.no_grad(), or let attention_cached append, which has "
            "gradients of q and of the new k and v"
        )
        raise NotSupported("append_to_cache of tensors that require gradients", {"flashtile": [reason]})
    if (seqused_k is None) == (slots is None):
        raise InvalidProblem("seqused_k and slots are both given, or neither; exactly one must say where tokens go.")
    if slots is not None:
        if rotary is not None:
            raise InvalidProblem("rotary is given with slots; positions are known with seqused_k alone.")
        check_kind("slots", slots)
        check_resolved("slots", slots)
        if slots.dtype not in (torch.int32, torch.int64) or slots.shape != k.shape[:-2] or slots.device != k.device:
            raise InvalidProblem(
                f"slots is {slots.dtype} of shape {tuple(slots.shape)} on {slots.device}; it must be int64 of shape "
                f"{tuple(k.shape[:-2])} on {k.device}."
            )
        cu = None if cu_seqlens is None else int32("cu_seqlens", cu_seqlens, k)
        if cu is not None and k.device.type == "cpu" and not is_traced(cu):
            check_starts("cu_seqlens", cu, k.shape[0])
        _check_written(pair, k_cache, v_cache, scales, None)
        bound = append_rows(*pair, k_cache, v_cache, *scales, None, None, slots.long(), cu, -1, backend)
        if key is not None and bound is not None and cu is None:  # whose numbers a CPU looks at
            _KNOWN[key] = bound
        return q
    cu = None if cu_seqlens is None else int32("cu_seqlens", cu_seqlens, k)
    new = prepare(q, pair, (k_cache, v_cache), scales, page_table, seqused_k, cu, rotary, backend)
    bound = new.write(k_cache, v_cache)
    if key is not None and bound is not None:
        _KNOWN[key] = bound
    return new.q


def _batch_of(k: torch.Tensor, cu_seqlens: Any, packed: bool, slots: Any) -> int:
    """Items of scales, 1 where nothing says which token is whose."""
    items = k.shape[0] if not packed else cu_seqlens.shape[0] - 1 if isinstance(cu_seqlens, torch.Tensor) else 1
    return items if slots is None else max(items, 1)


def _recognize(
    tensors: tuple[Any, ...], packed: bool, rotates: bool, scales: tuple[Any, Any], backend: Any
) -> tuple[tuple[Any, ...] | None, Scales, Bound | None]:
    """(key, scales as `write_again` takes them, what is known to run it) of an append; None for one without a key."""
    unknown = None, NO_SCALES, None
    if is_seen():
        return unknown
    try:
        k, v, k_cache, v_cache, _, _, slots, cu, _ = tensors
        shared, made = k_cache.data_ptr() == v_cache.data_ptr(), NO_SCALES
        if scales[0] is not None or scales[1] is not None:
            if shared:  # their numbers are compared
                return unknown
            made = scales_of(*scales, k_cache, v_cache, _batch_of(k, cu, packed, slots))
        key: list[Any] = [shared, k.data_ptr() == v.data_ptr(), rotates, backend]
        if not add_layouts(key, (*tensors, *made)) or k.device.type == "meta":
            return unknown
        found = tuple(key)
        bound = _KNOWN.get(found)
        if bound is not None and bound.direct is None and made is not NO_SCALES:
            made = check_scales(*made, k_cache, v_cache, _batch_of(k, cu, packed, slots))
        return found, made, bound
    except NO_KEY:
        return unknown


_KNOWN = Memory[Any, Bound](1024, "known appends to caches")


@dataclass(frozen=True)
class New:
    """New rows of a cache, found good but for their numbers, and rotated where that is asked for."""

    q: Any
    k: torch.Tensor
    v: torch.Tensor
    scales: Scales
    page_table: torch.Tensor | None
    before: torch.Tensor  # rows of each item
    used: torch.Tensor  # with the new ones
    cu: torch.Tensor | None
    rotary_rows: int  # of its tables; -1 without
    backend: str | None

    def write(self, k_cache: torch.Tensor, v_cache: torch.Tensor) -> Bound | None:
        """Into the pools, the rows alone, whose gradients are another's business; what did it, unless that was an operator."""
        return append_rows(
            self.k.detach(), self.v.detach(), k_cache, v_cache, *self.scales, self.page_table, self.before, None, self.cu,
            self.rotary_rows, self.backend,
        )  # fmt: skip


def check_pair(append: Any, k_cache: torch.Tensor, v_cache: torch.Tensor, packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """attention_cached's append."""
    if not isinstance(append, (tuple, list)) or len(append) != 2:
        raise InvalidProblem(f"append is a {type(append).__name__}; it must be (k, v).")
    return _check_new((append[0], append[1]), k_cache, v_cache, packed, PAIR)


def prepare(
    q: Any, pair: tuple[torch.Tensor, torch.Tensor], pools: tuple[torch.Tensor, torch.Tensor], scales: Scales,
    page_table: torch.Tensor | None, seqused_k: Any, cu: torch.Tensor | None, rotary: Rotary, backend: str | None,
) -> New:  # fmt: skip
    """The new rows; nothing is written yet."""
    (k, v), k_cache = pair, pools[0]
    _check_written(pair, *pools, scales, rotary)
    batch = k.shape[0] if cu is None else cu.shape[0] - 1
    if batch < 0:
        raise InvalidProblem("cu_seqlens has 0 elements; it must have batch + 1.")
    used = int32("seqused_k", seqused_k, k)
    if used.shape[0] != batch:
        raise InvalidProblem(
            f"k has shape {tuple(k.shape)}, of {batch} items, and seqused_k has {used.shape[0]} elements; they must be as many."
        )
    check_table(k_cache, page_table, batch, False)
    rows = -1
    if rotary is not None:
        q, k, rows = rotate(q, k, rotary, used, cu, backend)
    after = lengthened(used, k, cu)
    return New(q, k, v, scales, page_table, used, after, cu, rows, backend)


def _check_new(
    pair: tuple[Any, Any], k_cache: Any, v_cache: Any, packed: bool, names: tuple[str, str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Raise InvalidProblem unless these rows fit into these pools."""
    k, v = pair
    check_pools(k, k_cache, v_cache, packed, names[0])
    check_kind(names[1], v)
    if v.shape[:-1] != k.shape[:-1] or v.dtype != k.dtype or v.device != k.device:
        raise InvalidProblem(
            f"{names[1]} is {v.dtype} of shape {tuple(v.shape)} on {v.device}; it must be {k.dtype} of "
            f"{tuple(k.shape[:-1])} and head_dim, on {k.device}."
        )
    for name, new, pool, of in ((names[0], k, k_cache, "k_cache"), (names[1], v, v_cache, "v_cache")):
        for called, tensor in ((name, new), (of, pool)):
            check_resolved(called, tensor)
        if new.shape[-2:] != pool.shape[-2:]:
            raise InvalidProblem(
                f"{name} has (heads, head_dim) {tuple(new.shape[-2:])}; it must be {tuple(pool.shape[-2:])}, those of {of}."
            )
    return k, v


def _check_written(
    pair: tuple[torch.Tensor, torch.Tensor], k_cache: torch.Tensor, v_cache: torch.Tensor, scales: Scales, rotary: Rotary
) -> None:
    """Raise InvalidProblem for what is expanded and would be written, and, of a cache whose values are columns of its keys,
    for new values, or scales, that are not those of the keys.
    """
    if is_traced(*pair, k_cache, v_cache):
        return
    written = {"k_cache": k_cache, "v_cache": v_cache}
    written |= {n: s for n, s in zip(("k_scale", "v_scale"), scales, strict=True) if s is not None and scaling_of(s) == "token"}
    for name, tensor in written.items():
        check_written(name, tensor)
    if not is_shared(k_cache, v_cache):
        return
    if not is_shared(*(t if t.dim() == 4 else t[None] for t in pair)):
        raise InvalidProblem(
            f"v is a tensor of its own, and v_cache is the first {v_cache.shape[3]} columns of k_cache; v must be those of k: "
            f"k[..., :{v_cache.shape[3]}]."
        )
    if not _are_one(*scales):
        raise InvalidProblem(
            f"v_scale is not k_scale, and v_cache is the first {v_cache.shape[3]} columns of k_cache, which are written once; "
            "they must be the same: v_scale=k_scale."
        )
    if rotary is not None:
        raise InvalidProblem("rotary is given and values are columns of keys, which it would rotate; rotate k's other columns.")


def _are_one(k_scale: Maybe, v_scale: Maybe) -> bool:
    """Whether both scales say the same; those of tokens, which are written, are one tensor. A GPU's numbers are not read."""
    if k_scale is None or v_scale is None:
        return k_scale is v_scale
    if "token" in (scaling_of(k_scale), scaling_of(v_scale)):
        return k_scale.data_ptr() == v_scale.data_ptr() and k_scale.stride() == v_scale.stride()
    return k_scale.device.type != "cpu" or is_traced(k_scale, v_scale) or torch.equal(k_scale, v_scale)
