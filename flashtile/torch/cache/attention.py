"""attention_cached: the public PyTorch function over a key/value cache."""

from __future__ import annotations

from typing import Any

import torch

from flashtile import dispatch
from flashtile.errors import InvalidProblem, NotSupported, check_names, renamed
from flashtile.memory import Memory
from flashtile.plan.buffers import cached_buffers
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.cache import CachedProblem, Pages, default_split
from flashtile.problem.mask import Band, Joined
from flashtile.problem.number import plain
from flashtile.problem.options import Options
from flashtile.torch.cache.tensors import CALLED, check_pools, check_table, int32
from flashtile.torch.call.describe import capture, make_problem
from flashtile.torch.call.inputs import modifiers
from flashtile.torch.call.lengths import Given
from flashtile.torch.call.masks import call_mask, mask_of_call
from flashtile.torch.execute.bound import Bound, device_of
from flashtile.torch.execute.plain import is_traced

ARGUMENTS = (
    "q", "k_cache", "v_cache", "page_table", "seqused_k", "cu_seqlens_q", "first_k", "append", "rotary", "causal", "window",
    "mask", "score", "scale", "sink", "split", "return_lse", "options",
)  # fmt: skip


def attention_cached(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor | None = None, *,
    seqused_k: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None, first_k: torch.Tensor | None = None,
    append: tuple[torch.Tensor, torch.Tensor] | None = None, rotary: Any = None,
    causal: bool = False, window: tuple[int | None, int | None] | None = None, mask: Band | Joined | None = None,
    split: int | None = None, return_lse: bool = False, options: Options | None = None, **changes: Any,
) -> Any:  # fmt: skip
    """`attention` of new queries over a key/value cache, exact; lengths stay on the device.

    q: (batch, seqlen_q, heads_q, head_dim), or with cu_seqlens_q, int32 (batch + 1,), (total_q, heads_q, head_dim): items
        with one query stand beside items with many.
    k_cache: (pages, page_size, heads_kv, head_dim); v_cache: (pages, page_size, heads_kv, head_dim_v); any page_size from 1,
        any strides.
    page_table: int32 (batch, columns): row t of item i lies in page page_table[i, t // page_size]. Entries behind an item's
        length are never read. None: a contiguous cache (batch, rows, heads_kv, head_dim); item i's page is i.
    seqused_k: int32 (batch,): rows of each item that count, those before first_k included; with `append`, before it.
    first_k: int32 (batch,): the row of an item's first key, where it is padded on the left. Positions count keys.
    append: (k, v), laid out as q is: written behind each item's rows first, in place (`append_to_cache`); then they count.
    rotary: (cos, sin), or (cos, sin, interleaved): rotates q and the appended k by their rows in the cache.
    causal, window, mask; changes: score, scale, sink; as `attention` has them, on positions aligned bottom-right: the last
        query stands at the last key. Rows and keys are counted within their item.
    split: keys that are summed apart, a multiple of 128, at borders that depend on nothing else: an item's bits never
        depend on its batch. 0: one pass. None: by shapes. The CPU computes items one by one, and has no use for it.
    return_lse: also the natural log of each row's softmax denominator, float32 (batch, heads_q, seqlen_q), or
        (heads_q, total_q).

    Returns out, or (out, lse); out 0 and lse -inf (without a sink) where a query sees no key. What no query of an item sees,
    unused rows and pages among it, may hold NaN: it reaches nothing. Pages and lengths that point out of the pools raise
    InvalidProblem on the CPU; on a GPU they are clamped into them. No gradients: NotSupported where one is wanted.
    """
    if not changes.keys() <= {"score", "scale", "sink"}:
        check_names("attention_cached", changes, ARGUMENTS)
    changes = {"causal": causal, "window": window, "mask": mask, "score": (), "scale": None, "sink": None, **changes}
    packed = cu_seqlens_q is not None
    check_pools(q, k_cache, v_cache, packed)
    _refuse(q, k_cache, v_cache, append, changes["sink"])
    used = int32("seqused_k", seqused_k, q)
    cu_q = None if cu_seqlens_q is None else int32("cu_seqlens_q", cu_seqlens_q, q)
    first = None if first_k is None else int32("first_k", first_k, q)
    if append is None and rotary is not None:
        raise InvalidProblem("rotary is given without append; rotate q by flashtile.ops.rotary.")
    batch = len(cu_q) - 1 if cu_q is not None else q.shape[0]
    if batch < 0:
        raise InvalidProblem("cu_seqlens_q has 0 elements; it must have batch + 1.")
    for name, tensor in (("seqused_k", used), ("first_k", first)):
        if tensor is not None and len(tensor) != batch:
            raise InvalidProblem(f"{name} has {len(tensor)} elements and the batch {batch} items; it must have {batch}.")
    pages = check_table(k_cache, page_table, batch, first is not None)
    problem, options, captured = _describe((q, k_cache, v_cache), pages, used, cu_q, changes, options, return_lse)
    split = plain(split)
    wanted = CachedProblem(problem, pages, default_split(problem, pages) if split is None else split)
    place = device_of(q.device)
    plan = dispatch.plan_cached(wanted, place, options.backend)
    if append is not None:
        from flashtile.torch.cache.append import append_pair

        q, used = append_pair(q, append, k_cache, v_cache, page_table, used, cu_q, rotary, options.backend)
    wide = q[None] if packed else q
    tensors = {"q": wide, "k": k_cache, "v": v_cache, **captured, "seqused_k": used}
    for name, tensor in (("cu_seqlens_q", cu_q), ("page_table", page_table), ("first_k", first)):
        if tensor is not None:
            tensors[name] = tensor
    if q.device.type == "cpu":
        _check_values(wanted, tensors)
    inputs = {b.name: tensors[b.name] for b in cached_buffers(wanted) if b.role == "input"}
    key = (wanted, options.backend, q.device, *((t.stride(), t.data_ptr() & 15) for t in inputs.values()))
    bound = _BOUND.get(key)
    if bound is None:
        bound = _BOUND[key] = Bound(plan, inputs, q.device)
    made = bound.run(inputs)
    out, lse = (made["out"][0], made["lse"][0]) if packed else (made["out"], made["lse"])
    return (out, lse) if problem.returns_lse else out


_BOUND = Memory[Any, Bound](1024, "calls over caches")


def _describe(
    three: tuple[torch.Tensor, torch.Tensor, torch.Tensor], pages: Pages, used: torch.Tensor, cu_q: torch.Tensor | None,
    changes: dict[str, Any], options: Any, return_lse: Any,
) -> tuple[AttentionProblem, Options, dict[str, torch.Tensor]]:  # fmt: skip
    """(the problem as if pages lay side by side, options, captured tensors by their buffers' names)."""
    causal, window, mask, score, scale, sink = changes.values()
    q, batch = three[0], len(used)
    wide = q if cu_q is None else q[None]
    rows = (batch, pages.capacity) if cu_q is None else (1, batch * pages.capacity)
    k, v = (t[:1, :1].expand(*rows, *t.shape[2:]) for t in three[1:])
    lengths = {"seqused_k": used} if cu_q is None else {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_q, "seqused_k": used}
    given = Given(lengths, None, pages.capacity)
    try:
        mask = mask_of_call(mask, wide, k, True)
        problem, options = make_problem(wide, k, v, causal, window, mask, score, scale, options, return_lse, given, sink=sink)
    except InvalidProblem as error:
        raise renamed(error, CALLED) from None
    tensors, _ = capture(modifiers(score), batch, q.shape[-2])
    tensors += () if sink is None else (sink,)
    if isinstance(mask, Joined):
        tensors += call_mask(causal, window, mask, batch, q.shape[-2]).flat
    names = [f"score.{i}.{j}" for i, spec in enumerate(problem.score) for j in range(len(spec.tensors))]
    names += [] if sink is None else ["sink"]
    names += [f"mask.{i}.{j}" for i, leaf in enumerate(problem.leaves) for j in range(len(leaf.tensors))]
    return problem, options, dict(zip(names, tensors, strict=True))


def _refuse(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, append: Any, sink: Any) -> None:
    """Raise NotSupported for who wants what a cached call has not."""
    pair = tuple(append) if isinstance(append, (tuple, list)) else ()
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, **dict(zip(("append's k", "append's v"), pair, strict=False))}
    if is_traced(*(t for t in tensors.values() if isinstance(t, torch.Tensor))):
        reason = "there is no operator of it for torch.compile, torch.func and dispatch modes yet; call it outside of them"
        raise NotSupported("attention_cached within a graph", {"torch": [reason]})
    if torch.is_grad_enabled():
        named = {**tensors, "sink": sink}
        wants = [name for name, t in named.items() if isinstance(t, torch.Tensor) and t.requires_grad]
        if wants:
            reason = (
                f"{wants[0]} requires a gradient, and a cached call has none; call it under torch.no_grad(), or attend to "
                "gathered keys: flashtile.attention(q, *cache.dense(), seqused_k=...)"
            )
            raise NotSupported("attention_cached", {"flashtile": [reason]})


def _check_values(problem: CachedProblem, tensors: dict[str, torch.Tensor]) -> None:
    """Raise InvalidProblem for numbers without meaning, asked on the CPU alone, where looking costs nothing."""
    p, pages = problem.attention, problem.pages
    if "cu_seqlens_q" in tensors:
        Given({"cu_seqlens_q": tensors["cu_seqlens_q"]}).check_values({"q": p.span_q})
    used = tensors["seqused_k"].tolist()
    firsts = tensors["first_k"].tolist() if pages.first else [0] * len(used)
    for i, (first, end) in enumerate(zip(firsts, used, strict=True)):
        if not 0 <= end <= pages.capacity:
            raise InvalidProblem(
                f"seqused_k[{i}] is {end}; it must be from 0 to {pages.capacity}, the rows of its {pages.columns} pages "
                f"of {pages.page_size}."
            )
        if first < 0 or (first > end and end > 0):
            raise InvalidProblem(f"first_k[{i}] is {first}; it must be from 0 to seqused_k[{i}], which is {end}.")
        if pages.table and first < end:
            entries = tensors["page_table"][i, first // pages.page_size : -(-end // pages.page_size)]
            if bool(((entries < 0) | (entries >= pages.pages)).any()):
                raise InvalidProblem(
                    f"page_table[{i}] names page {int(entries[(entries < 0) | (entries >= pages.pages)][0])} among those "
                    f"of its {end} rows; it must be from 0 to {pages.pages - 1}."
                )
