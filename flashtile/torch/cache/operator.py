"""What runs over a cache, eagerly and as operators of `torch.library`, which torch.compile and dispatch modes see.

    flashtile::append_to_cache(k, v, k_cache!, v_cache!, k_scale!?, v_scale!?, page_table?, seqused_k?, slots?, cu_seqlens?,
        rotary_rows, backend)
    flashtile::attention_cached(q, k_cache, v_cache, k_scale?, v_scale?, page_table?, first_k?, others, split, text, floats,
        ints) -> (out, lse)

The first writes into the pools, and into scales of tokens, and says so: compilers copy none of them. text, floats, ints and
others: `routes/request.py`. Neither has gradients; `gradient.py` goes another way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch

from flashtile import dispatch
from flashtile.errors import InvalidProblem, renamed
from flashtile.memory import Memory
from flashtile.plan.buffers import cached_buffers
from flashtile.problem.cache import AppendProblem, CachedProblem, Pages, default_split
from flashtile.torch.cache.latent import is_apart
from flashtile.torch.cache.tensors import CALLED, check_lengths, check_starts, check_table
from flashtile.torch.call.stored import Maybe, Scales, bytes_of, is_shared, scaling_of, stored_of
from flashtile.torch.execute.bound import DTYPES, Bound, device_of
from flashtile.torch.execute.descriptor import addressable
from flashtile.torch.execute.plain import is_watched
from flashtile.torch.execute.replay import addresses_of, laid, lies
from flashtile.torch.routes.library import define
from flashtile.torch.routes.operator import dense_strides
from flashtile.torch.routes.request import read

_MOST = 1024  # remembered layouts
PLACES = ("seqused_k", "page_table", "cu_seqlens")  # of an append by the items' lengths


# -- append ---------------------------------------------------------------------------------------------------------------


def append_rows(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *asked: Any) -> Bound | None:
    """The operator, or what it runs where nobody wants to see it: what has written then. asked: the rest of its arguments,
    backend None for any.
    """
    k_scale, v_scale, *places, backend = asked
    places = [*places, backend or ""]  # no append: what a star takes is a tuple to the compiler of PyTorch 2.11
    if not is_watched(k, v, k_cache, v_cache):
        return write_rows((k, v, k_cache, v_cache), (k_scale, v_scale), *places)[0]
    # scales of heads are only read, and the schema says that scales are written, which no compiler does to an expanded tensor
    heads = [scale if scale is None or scaling_of(scale) == "token" else scale.contiguous() for scale in (k_scale, v_scale)]
    APPEND(k, v, k_cache, v_cache, *heads, *places)
    return None


def run_append(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale: Maybe, v_scale: Maybe, *rest: Any
) -> None:
    write_rows((k, v, k_cache, v_cache), (k_scale, v_scale), *rest)


def write_rows(
    four: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], scales: Scales, page_table: Maybe, used: Maybe,
    slots: Maybe, cu: Maybe, rotary_rows: int, backend: str,
) -> tuple[Bound, Maybe]:  # fmt: skip
    """What has written them, and how many rows items have with them, if it says so. four: new rows, and the pools."""
    (k, v, k_cache, v_cache), (k_scale, v_scale) = four, scales
    count, size = k_cache.shape[:2]
    stored, shared = stored_of(k_cache, (k_scale, v_scale)), is_shared(k_cache, v_cache)
    places: dict[str, torch.Tensor] = {}
    items = None
    if slots is None:
        assert used is not None
        items = used.shape[0]
        if k.device.type != "cuda":
            slots = slots_of(k, k_cache, page_table, used, cu, rotary_rows)
        if k.device.type == "cuda" or backend == "triton":  # the kernel finds the rows itself
            slots = None
            places = {n: t for n, t in zip(PLACES, (used, page_table, cu), strict=True) if t is not None}
    elif k.device.type == "cpu":
        odd = slots[(slots < -1) | (slots >= count * size)]
        if odd.numel():
            raise InvalidProblem(f"slots names {int(odd[0])}; it must be from 0 to {count * size - 1}, or -1 for nowhere.")
        if (two := repeated(slots)) is not None:
            raise InvalidProblem(
                f"slots names {int(slots.flatten()[two[0]])} for tokens {two[0]} and {two[1]}; each must have a slot of its "
                "own, or -1 for nowhere."
            )
    factors = {"k": new_scale(k_scale, k, cu), "v": new_scale(v_scale, v, cu)}
    if k.dim() == 3:
        k, v, slots = k[None], v[None], slots if slots is None else slots[None]
    places |= {} if slots is None else {"slots": slots}
    tensors = {"k": k, "v": v, "k_cache": bytes_of(k_cache), "v_cache": bytes_of(v_cache)}
    tensors |= {f"{side}_scale": scale for side, scale in factors.items() if scale is not None} | places
    if shared:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("v")}
    key = (backend, k.device, k.dtype, stored, shared, v.shape, *places)
    key += tuple((t.shape, t.stride(), t.data_ptr() & 15) for t in tensors.values())
    bound = _APPENDS.get(key)
    if bound is None:
        slabs, seqlen, heads, dim = k.shape
        columns = None if page_table is None else page_table.shape[1]
        problem = AppendProblem(slabs, seqlen, heads, dim, v.shape[3], DTYPES[k.dtype], count, size, stored, shared)
        if slots is None:
            problem = replace(problem, items=items, columns=columns, packed=cu is not None, grows=True)
        plan = dispatch.plan_cached(problem, device_of(k.device), backend or None)
        bound = _APPENDS[key] = Bound(plan, tensors, k.device)
    if k.numel() and items != 0:
        bound.run(tensors)
    tell_written(k_cache, v_cache, k_scale, v_scale)
    return bound, tensors.get("after")


def tell_written(k_cache: torch.Tensor, v_cache: torch.Tensor, *scales: Maybe) -> None:
    """Tell autograd what an append has written, for launches do not."""
    torch.autograd.graph.increment_version(k_cache)
    torch.autograd.graph.increment_version(v_cache)
    for scale in scales:
        if scale is not None and scaling_of(scale) == "token":
            torch.autograd.graph.increment_version(scale)


def new_scale(scale: Maybe, new: torch.Tensor, cu: Maybe) -> Maybe:
    """The scale of each new row, (batch, seqlen, heads_kv) or (1, total, heads_kv), or the pool of tokens' scales."""
    if scale is None or scaling_of(scale) == "token":
        return scale
    if new.dim() == 4:
        return scale[:, None].expand(new.shape[:3])
    if not scale.shape[0]:  # of no item: nothing is written
        return scale.new_ones(()).expand(1, *new.shape[:2])
    if cu is None or scale.stride(0) == 0 or scale.shape[0] == 1:  # of slots, one for every item, of one item
        return scale[:1].expand(new.shape[:2])[None]
    item = torch.searchsorted(cu[1:].contiguous(), torch.arange(new.shape[0], device=new.device, dtype=torch.int32), right=True)
    return scale[item.clamp(max=scale.shape[0] - 1)][None]


_APPENDS = Memory[Any, Bound](_MOST, "appends to caches")


def slots_of(
    k: torch.Tensor, k_cache: torch.Tensor, page_table: Maybe, used: torch.Tensor, cu: Maybe, rotary_rows: int = -1
) -> torch.Tensor:
    """Where each new token goes, int64: -1 where it belongs to no item, and, on a GPU, where an item has no page for it.

    On the CPU the latter raises InvalidProblem, and so do a row that tables of `rotary_rows` rows lack, and two tokens of one
    slot.
    """
    batch, pages = used.shape[0], check_table(k_cache, page_table, used.shape[0], False)
    if cu is None:
        item = torch.arange(batch, device=k.device)[:, None]
        exists = torch.ones((), dtype=torch.bool, device=k.device)
        row = used[item].long() + torch.arange(k.shape[1], device=k.device)[None]
    else:
        if k.device.type == "cpu":
            check_starts("cu_seqlens", cu, k.shape[0])
        if not batch:
            return torch.full(k.shape[:1], -1, dtype=torch.int64, device=k.device)
        index = torch.arange(k.shape[0], device=k.device, dtype=torch.int32)
        item = torch.searchsorted(cu[1:].contiguous(), index, right=True).clamp(max=batch - 1)
        exists = (index >= cu[0]) & (index < cu[-1])
        row = used[item].long() + index - cu[item]
    item, exists = item.expand(row.shape), exists.expand(row.shape)
    column = torch.div(row, pages.page_size, rounding_mode="floor")
    if page_table is None:
        page = item.long()
    elif pages.columns:
        page = page_table[item, column.clamp(0, pages.columns - 1)].long()
    else:
        page = torch.full_like(row, -1)
    good = (column >= 0) & (column < pages.columns) & (page >= 0) & (page < pages.pages)
    if k.device.type == "cpu":
        if not bool((good | ~exists).all()):
            raise InvalidProblem(
                f"append needs row {int(row[exists & ~good][0])} of an item, which page_table has no page for; items have "
                f"{pages.columns} pages of {pages.page_size} rows, and pages are numbered 0 to {pages.pages - 1}."
            )
        if rotary_rows >= 0 and bool((row[exists] >= rotary_rows).any()):
            raise InvalidProblem(
                f"rotary's cos has {rotary_rows} rows and a new key stands in row {int(row[exists].max())} of its item; it "
                "must have a row for each."
            )
    slots = torch.where(good & exists, page * pages.page_size + row % pages.page_size, -1)
    if k.device.type == "cpu" and (two := repeated(slots)) is not None:
        one, other = (int(item.flatten()[token]) for token in two)
        place, within = divmod(int(slots.flatten()[two[0]]), pages.page_size)
        raise InvalidProblem(
            f"page_table gives two new keys, of items {one} and {other}, one place: page {place}, row {within}; each must have "
            "its own: copy a page that items share before they write into it, and give each of them one."
        )
    return slots


def repeated(slots: torch.Tensor) -> tuple[int, int] | None:
    """Two tokens of one slot, or None; -1 is nowhere. The host waits for it."""
    order = slots.flatten().argsort(stable=True)
    ordered = slots.flatten()[order]
    same = ((ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)).nonzero()
    return (int(order[same[0]]), int(order[same[0] + 1])) if same.numel() else None


def _fake_append(*_: Any) -> None:
    return None


APPEND = define(
    "append_to_cache(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? k_scale, Tensor(d!)? v_scale, "
    "Tensor? page_table, Tensor? seqused_k, Tensor? slots, Tensor? cu_seqlens, SymInt rotary_rows, str backend) -> ()",
    run_append, _fake_append,
)  # fmt: skip


# -- attention ------------------------------------------------------------------------------------------------------------


def attend(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *asked: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) by the operator, or by what it runs where nobody wants to see it; asked: the rest of its arguments."""
    return (CACHED if is_watched(q, k_cache, v_cache) else run_attention)(q, k_cache, v_cache, *asked)


def _run(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale: Maybe, v_scale: Maybe, page_table: Maybe,
    first: Maybe, others: list[torch.Tensor], split: int, text: str, floats: list[float], ints: list[int],
) -> tuple[Layout, torch.Tensor, torch.Tensor]:  # fmt: skip
    """What is known of the call, out and lse."""
    others, floats, ints = others or [], floats or [], ints or []  # AOTInductor (2.13) hands None where a list is empty
    others = [t.resolve_neg() if t.is_neg() else t for t in others]
    layout, inputs = layout_of(q, k_cache, v_cache, (k_scale, v_scale), page_table, first, others, split, text, floats, ints)
    return layout, *layout.attend(inputs, first, page_table)


def run_attention(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the operator's arguments."""
    return _run(*given)[1:]


def _operated(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """As `run_attention`, with the strides that the fake promises, of axes of one place too."""
    layout, out, lse = _run(*given)
    return laid(out, layout.out_strides), lse


def layout_of(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scales: Scales, page_table: Maybe, first: Maybe,
    others: list[torch.Tensor], *asked: Any,
) -> tuple[Layout, tuple[torch.Tensor, ...]]:  # fmt: skip
    """What is known of calls like this one, and the inputs of its plan. Raises what has no meaning, or runs nowhere."""
    shared = is_shared(k_cache, v_cache)
    tensors = tensors_of(q, (k_cache, v_cache), scales, page_table, first, others)
    split, text, floats, ints = asked
    key = (text, split, *(t is None for t in (*scales, page_table, first)), *floats, *ints, q.device, shared)
    for tensor in tensors:
        key += (tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() & 15)
    found = _CACHED.get(key)
    if found is None:
        found = _CACHED[key] = Layout((q, k_cache, v_cache), scales, page_table, first is not None, others, asked)
    return found, found.inputs(tensors)


def tensors_of(
    q: torch.Tensor, pools: tuple[torch.Tensor, torch.Tensor], scales: Scales, page_table: Maybe, first: Maybe,
    others: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """All tensors of a call, as callers have them, in the order that `Layout.inputs` expects."""
    return (q, *pools, *[t for t in (*scales, page_table, first) if t is not None], *others)


def describe(
    three: tuple[torch.Tensor, torch.Tensor, torch.Tensor], scales: Scales, page_table: Maybe, first: bool,
    others: list[torch.Tensor], split: int, text: str, floats: list[float], ints: list[int],
) -> tuple[CachedProblem, Any, str | None]:  # fmt: skip
    """(the problem, the request, the backend that is asked for) of a call; split -1: the default."""
    request = read(text)
    batch = page_table.shape[0] if page_table is not None else three[1].shape[0]
    pages = check_table(three[1], page_table, batch, first)
    apart = is_apart(*three)
    try:
        wide = side_by_side(*three, pages, batch, request.varlen, apart)
        named = request.named(wide, others, 0, floats, ints)
    except InvalidProblem as error:
        raise renamed(error, CALLED) from None
    split = default_split(named.problem, pages) if split < 0 else split
    stored, shared = stored_of(three[1], scales), apart or is_shared(*three[1:])
    aligned = all(addressable(t.shape, t.stride(), t.element_size(), t.data_ptr()) for t in three[1:])
    return CachedProblem(named.problem, pages, split, stored, shared, apart, aligned), request, named.options.backend


class Layout:
    """What is known of calls of one request with tensors of one layout."""

    def __init__(
        self, three: tuple[torch.Tensor, torch.Tensor, torch.Tensor], scales: Scales, page_table: Maybe, first: bool,
        others: list[torch.Tensor], asked: tuple[Any, ...],
    ):  # fmt: skip
        self.problem, request, backend = describe(three, scales, page_table, first, others, *asked)
        q = three[0]
        self.packed = request.varlen
        self.plan = dispatch.plan_cached(self.problem, device_of(q.device), backend)
        self.out_strides = dense_strides((*q.shape[:-1], three[2].shape[-1]), q)
        places = _places(self.problem, request.lengths)
        self.names = list(places)
        self.inputs: Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]] = itemgetter(*places.values())
        self._bound: Bound | None = None
        self._lies: bool | None = None  # whether plans lay out as callers have it; known after the first call
        self.looks, self.device = q.device.type == "cpu", q.device

    def attend(
        self, inputs: tuple[torch.Tensor, ...], first: Maybe, page_table: Maybe, whole: bool = True, into: Maybe = None
    ) -> tuple[Any, Any]:
        """(out, lse) as callers have them, unless `whole` lse may be None, and out `into` where that can be; InvalidProblem, on
        the CPU, for lengths and pages without meaning.

        inputs: the plan's, which `inputs` takes from all the call's, as callers have them: to launch again asks for addresses.
        """
        if self.looks:
            by_name = dict(zip(self.names, inputs, strict=True))
            if self.packed:
                check_starts("cu_seqlens_q", by_name["cu_seqlens_q"], inputs[0].shape[0])
            check_lengths(self.problem.pages, by_name["seqused_k"], first, page_table)
        replay = None if self._bound is None else self._bound.direct
        if replay is None:
            tensors = {name: bytes_of(t) if name in ("k", "v") else t for name, t in zip(self.names, inputs, strict=True)}
            if self.packed:
                tensors["q"] = tensors["q"][None]
            if self._bound is None:
                self._bound = Bound(self.plan, tensors, self.device)
            made = self._bound.run(tensors)
            out, lse = made["out"], made["lse"].contiguous()
        else:
            there = None if into is None else ("out", into)
            out, lse = replay.direct(inputs, addresses_of(inputs), whole, there)  # in the order and layout of `cached_buffers`
        if self.packed:  # out is made like q, as callers have it, if it can be
            out, lse = out[0] if out.dim() == 4 else out, lse if lse is None else lse[0]
        if out is into:
            return out, lse
        if self._lies is None:
            self._lies = lies(out, self.out_strides)
        return out if self._lies else laid(out, self.out_strides), lse


_CACHED = Memory[Any, Layout](_MOST, "calls over caches")


def _places(problem: CachedProblem, lengths: list[str]) -> dict[str, int]:
    """Where, among q, the pools, scales, the table, first_k and the others, each input of the plan is."""
    p, pages, stored = problem.attention, problem.pages, problem.stored
    scales = [f"{side}_scale" for side in "kv" if stored is not None and getattr(stored, f"{side}_scale")]
    names = ["q", "k", "v", *scales, *(["page_table"] if pages.table else []), *(["first_k"] if pages.first else [])]
    names += [f"score.{i}.{j}" for i, spec in enumerate(p.score) for j in range(len(spec.tensors))]
    names += ["sink"] if p.sink is not None else []
    names += [f"mask.{i}.{j}" for i, leaf in enumerate(p.leaves) for j in range(len(leaf.tensors))]
    at = {name: i for i, name in enumerate(names)}
    at |= {
        name: -len(lengths) + i for i, name in enumerate(lengths)
    }  # the last of all: blocks, which none reads, may be between
    return {b.name: at[b.name] for b in cached_buffers(problem) if b.role == "input"}


def side_by_side(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, pages: Pages, batch: int, packed: bool, apart: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, and the pools as if every item's pages lay side by side, as operators have them: shapes alone, of q's dtype; keys
    with all their columns.
    """
    if apart or k_cache.dtype != q.dtype:
        one = q.new_zeros(1) if 0 in q.shape else q.detach()[(0,) * (q.dim() - 1)][:1]
        columns = q.shape[-1] if apart else k_cache.shape[-1]
        k_cache, v_cache = one.expand(*k_cache.shape[:-1], columns), one.expand(v_cache.shape)
    k, v = (t[:1, :1].expand(batch, pages.capacity, *t.shape[2:]) for t in (k_cache, v_cache))
    if packed:
        k, v = (t[:1, :1].expand(1, batch * pages.capacity, *t.shape[2:])[0] for t in (k_cache, v_cache))
    return q, k, v


def _fake_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale: Maybe, v_scale: Maybe, page_table: Maybe,
    first: Maybe, others: list[torch.Tensor], split: int, text: str, floats: list[float], ints: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    shape = (*q.shape[:-1], v_cache.shape[-1])
    lse = q.new_empty((*shape[:-3], shape[-2], shape[-3]), dtype=torch.float32)
    return q.new_empty_strided(shape, dense_strides(shape, q)), lse


CACHED = define(
    "attention_cached(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? k_scale, Tensor? v_scale, "
    "Tensor? page_table, Tensor? first_k, Tensor[] others, int split, str text, float[] floats, SymInt[] ints) -> "
    "(Tensor, Tensor)",
    _operated, _fake_attention,
)  # fmt: skip
