"""attention_cached: the public PyTorch function over a key/value cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flashtile.errors import InvalidProblem, NotSupported, check_names, renamed
from flashtile.problem.attention import MAX_HEAD_DIM
from flashtile.problem.cache import CachedProblem, Pages, check_split
from flashtile.problem.mask import Band, Joined
from flashtile.problem.number import plain
from flashtile.problem.options import DEFAULT, Options
from flashtile.torch.cache.append import PAIR, check_pair, prepare
from flashtile.torch.cache.gradient import attend_gathered, check_gradients
from flashtile.torch.cache.known import recognize, remember
from flashtile.torch.cache.latent import check_latents
from flashtile.torch.cache.operator import attend, describe, layout_of, side_by_side, slots_of
from flashtile.torch.cache.shared import attend_shared, check_prefix, prefix_for_each
from flashtile.torch.cache.tensors import (
    CALLED,
    check_lengths,
    check_out,
    check_pools,
    check_starts,
    check_table,
    int32,
    refuse_out,
    refuse_transforms,
)
from flashtile.torch.call.arguments import Arguments
from flashtile.torch.call.inputs import check_tensors, modifiers
from flashtile.torch.call.lengths import Given
from flashtile.torch.call.masks import mask_of_call
from flashtile.torch.call.stored import Scales, check_scales
from flashtile.torch.execute.packing import APART
from flashtile.torch.execute.plain import is_watched, joined, uncast
from flashtile.torch.routes.request import write

ARGUMENTS = (
    "q", "k_cache", "v_cache", "page_table", "seqused_k", "cu_seqlens_q", "first_k", "append", "rotary", "causal", "window",
    "mask", "score", "scale", "sink", "k_scale", "v_scale", "split", "shared_prefix", "qv", "out", "return_lse", "options",
)  # fmt: skip

NAMES = frozenset(ARGUMENTS)
POOLS, SCALES = ("k_cache", "v_cache"), ("k_scale", "v_scale")


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
        any strides. Both of q's dtype, or of 8 bits: float8_e4m3fn, float8_e5m2 or int8, read as they are stored, and each
        number times its scale. v_cache may be k_cache[..., :head_dim_v], the values of absorbed MLA: they are read once, and
        head_dim may be 576.
    k_scale, v_scale, with the others in `changes`, of a cache of 8 bits: float32 () for all, or a number; (heads_kv,);
        (batch, heads_kv); or (pages, page_size, heads_kv), one of each row and head, which `append` writes. None is 1.
    page_table: int32 (batch, columns): row t of item i lies in page page_table[i, t // page_size]. Entries behind an item's
        length are never read. None: a contiguous cache (batch, rows, heads_kv, head_dim); item i's page is i.
    seqused_k: int32 (batch,): rows of each item that count, those before first_k included; with `append`, before it.
    first_k: int32 (batch,): the row of an item's first key, where it is padded on the left. Positions count keys.
    append: (k, v), laid out as q is: written behind each item's rows first, in place (`append_to_cache`); then they count.
    rotary: (cos, sin), or (cos, sin, interleaved): rotates q and the appended k by their rows in the cache.
    causal, window, mask; changes: score, scale, sink; as `attention` has them, on positions aligned bottom-right: the last
        query stands at the last key. Rows and keys are counted within their item.
    split: keys that are summed apart, a multiple of 128, at borders that depend on nothing else: an item's bits never
        depend on other items. 0: one pass. None: by an item's queries and the rows that the table has places for; with
        cu_seqlens_q one pass. The CPU computes items one by one, and has no use for it.
    qv, with the others in `changes`: queries of the values (absorbed MLA whose keys lie apart), as q but for v_cache's columns:
        scores are scale * (qv v^T + q k^T), the default scale of both widths; of 8 bits v is that times v_scale here, too. Rows
        of v_cache are read once. The caches may be views of one tensor, or of two. Not with append, which goes before, nor
        shared_prefix.
    shared_prefix, with the others in `changes`: so many first keys are the same for all items that have any, as where prompts
        begin alike: whole pages, which item 0's table names; without a table item 0's rows. All queries go over them
        together, so that they are read once and not once an item, and the parts are merged. Every query stands behind them.
        An item's bits do not depend on its batch. Not with predicates, first_k, windows that end on the left, nor modifiers
        but Softcap. Gradients go the ordinary way.
    out, with the others in `changes`: a tensor of the result's shape and q's dtype, apart from all others, that the result is
        written to; where it lies side by side, by the kernels themselves once a call of its kind has run. Not with gradients.
    return_lse: also the natural log of each row's softmax denominator, float32 (batch, heads_q, seqlen_q), or
        (heads_q, total_q).

    Returns out, or (out, lse); out 0 and lse -inf (without a sink) where a query sees no key. What no query of an item sees,
    unused rows and pages among it, may hold NaN: it reaches nothing. Pages and lengths that point out of the pools raise
    InvalidProblem on the CPU; on a GPU they are clamped into them. Nothing is cast, under autocast neither.

    Differentiable in q, the appended k and v, sink and what modifiers capture: where one of them requires a gradient, keys are
    gathered, (batch, columns * page_size) of them, and `attention` runs. The cache has no gradient: NotSupported.
    """
    packed, qv, into = cu_seqlens_q is not None, changes.pop("qv", None), changes.pop("out", None)
    if qv is not None:
        _check_latents(q, qv, k_cache, v_cache, packed, append, changes)
        q = joined([qv, q])
    given = (q, k_cache, v_cache, page_table, seqused_k, cu_seqlens_q, first_k)
    seen = recognize(
        given, append, (rotary is not None, qv is not None), (causal, return_lse, split, options, window, mask), changes
    )
    if seen is not None and seen.known is not None:
        check_out(into, q, v_cache)
        out, lse = seen.known.run(seen, append, rotary, None if options is None else options.backend, return_lse, into)
        out = out if into is None or out is into else into.copy_(out)
        return (out, lse) if return_lse else out
    check_pools(q, k_cache, v_cache, packed)
    check_out(into, q, v_cache)
    pair = None if append is None else check_pair(append, k_cache, v_cache, packed)
    if append is None and rotary is not None:
        raise InvalidProblem("rotary is given without append; rotate q by flashtile.ops.rotary.")
    asked = {"causal": causal, "window": window, "mask": mask, "return_lse": return_lse, "options": options, **changes}
    call = _read((q, k_cache, v_cache), page_table, seqused_k, cu_seqlens_q, first_k, split, asked, qv is not None)
    asked, cu_q, used, first, pages, scales, written, chosen = call
    text, floats, ints, captured, others = written
    counts = q.shape[1] if cu_q is None else cu_q.diff()
    added = 0 if append is None else counts
    prefix = check_prefix(changes.get("shared_prefix", 0), pages, used + added, counts, scales, asked)
    _refuse((q, k_cache, v_cache), scales, pair, captured)
    if into is not None and _wants_gradients(q, pair, captured):
        refuse_out()
    new = bound = None
    if pair is not None:
        if pair[0].dtype != q.dtype:
            raise InvalidProblem(f"append's k is {pair[0].dtype} and q is {q.dtype}; they must have one dtype.")
        if pair[0].shape[0] != q.shape[0]:
            raise InvalidProblem(
                f"append's k has shape {tuple(pair[0].shape)} and q {tuple(q.shape)}; they must have as many "
                f"{'tokens' if packed else 'items'}."
            )
        new = prepare(q, pair, (k_cache, v_cache), scales, page_table, used, cu_q, rotary, asked["options"].backend)
        if not is_watched(q, k_cache, v_cache):  # nothing is written for a call that fails
            _foresee((q, k_cache, v_cache), page_table, call, _wants_gradients(q, pair, captured))
            if q.device.type == "cpu":
                slots_of(new.k, k_cache, page_table, used, cu_q, new.rotary_rows)
                check_lengths(pages, new.used, first, page_table)
        bound = new.write(k_cache, v_cache)
        q, used = new.q, new.used
        others[-1] = used
    if _wants_gradients(q, pair, captured):
        pools = (k_cache.detach(), v_cache.detach())
        with uncast(q.device):
            if prefix:
                pools, scales, page_table = prefix_for_each(prefix, pools, scales, page_table)
            return attend_gathered(q, pools, scales, pages, page_table, used, first, cu_q, new, asked)
    if prefix:
        how = {**asked, "split": split, "return_lse": True, **dict(zip(SCALES, scales, strict=True))}
        out, lse = attend_shared(attention_cached, prefix, q, (k_cache, v_cache), page_table, used, cu_q, how)
    else:
        three, rest = (q, k_cache, v_cache), ([*captured, *others], chosen, text, floats, ints)
        out, lse = attend(*three, *scales, page_table, first, *rest)
        if seen is not None:
            scalars = [number for modifier in asked["score"] for number in modifier.scalars()]
            numbers = (causal, return_lse, split, asked["scale"], *(() if window is None else window), *scalars)
            remember(seen, numbers, layout_of(*three, scales, page_table, first, *rest)[0], bound)
    out = out if into is None else into.copy_(out)
    return (out, lse) if return_lse else out


def check_call(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor | None, *, seqused_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None, first_k: torch.Tensor | None, qv: torch.Tensor | None, **asked: Any,
) -> None:  # fmt: skip
    """Raise what `attention_cached` will of a call that says all that it asks for, before anybody writes the rows that
    seqused_k counts already.
    """
    packed = cu_seqlens_q is not None
    if qv is None:
        check_pools(q, k_cache, v_cache, packed)
    else:
        _check_latents(q, qv, k_cache, v_cache, packed, None, asked)
        learns = q.requires_grad or qv.requires_grad
        q = q.new_empty((*q.shape[:-1], qv.shape[-1] + q.shape[-1]))  # as kernels read the two
        q = q.requires_grad_() if learns else q
    three = (q, k_cache, v_cache)
    if is_watched(*three):
        return
    changes, given = dict(asked), (*three, page_table, seqused_k, cu_seqlens_q, first_k)
    named = tuple(changes.pop(name) for name in ("causal", "return_lse", "split", "options", "window", "mask"))
    seen = recognize(given, None, (False, qv is not None), named, changes)
    if seen is None or seen.known is None:
        split = asked.pop("split")
        call = _read(three, page_table, seqused_k, cu_seqlens_q, first_k, split, asked, qv is not None)
        captured = call.written[3]
        _refuse(three, call.scales, None, captured)
        _foresee(three, page_table, call, _wants_gradients(q, None, captured))
    if q.device.type == "cpu":
        used, first = int32("seqused_k", seqused_k, q), None if first_k is None else int32("first_k", first_k, q)
        if cu_seqlens_q is not None:
            check_starts("cu_seqlens_q", int32("cu_seqlens_q", cu_seqlens_q, q), q.shape[0])
        check_lengths(check_table(k_cache, page_table, used.shape[0], first is not None), used, first, page_table)


def problem_of(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor | None = None, *,
    seqused_k: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None, first_k: torch.Tensor | None = None,
    split: int | None = None, **asked: Any,
) -> CachedProblem:  # fmt: skip
    """The problem of such a call, as `explain` has it: nothing is computed, and no number in a tensor is looked at."""
    packed, qv = cu_seqlens_q is not None, asked.pop("qv", None)
    asked.pop("out", None)
    if qv is None:
        check_pools(q, k_cache, v_cache, packed)
    else:
        _check_latents(q, qv, k_cache, v_cache, packed, None, asked)
        q = q.new_empty((*q.shape[:-1], qv.shape[-1] + q.shape[-1]))  # as kernels read the two
    three = (q, k_cache, v_cache)
    call = _read(three, page_table, seqused_k, cu_seqlens_q, first_k, split, asked, qv is not None)
    text, floats, ints, captured, others = call.written
    tensors = [*captured, *others]
    return describe(three, call.scales, page_table, call.first is not None, tensors, call.split, text, floats, ints)[0]


def _check_latents(
    q: torch.Tensor, qv: Any, k_cache: torch.Tensor, v_cache: torch.Tensor, packed: bool, append: Any, changes: dict[str, Any]
) -> None:  # fmt: skip
    """`check_latents`, and NotSupported for what stands beside qv."""
    reasons = {
        "append is given beside qv; write new rows by append_to_cache first, q rotated": append is not None,
        "shared_prefix is given beside qv; leave it out": changes.get("shared_prefix", 0) != 0,
    }
    reason = next((reason for reason, asked in reasons.items() if asked), None)
    if reason is not None:
        raise NotSupported("attention_cached", {"flashtile": [reason]})
    check_latents(q, qv, k_cache, v_cache, packed)


class _Call(NamedTuple):
    """asked: what `Arguments` takes. written: as `routes/request.py` writes it. split: -1 for the default."""

    asked: dict[str, Any]
    cu_q: torch.Tensor | None
    used: torch.Tensor
    first: torch.Tensor | None
    pages: Pages
    scales: Scales
    written: Any
    split: int


def _read(
    three: tuple[torch.Tensor, torch.Tensor, torch.Tensor], page_table: torch.Tensor | None, seqused_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None, first_k: torch.Tensor | None, split: int | None, given: dict[str, Any], apart: bool,
) -> _Call:  # fmt: skip
    """What a call says, checked."""
    if not given.keys() <= NAMES:
        check_names("attention_cached", given, ARGUMENTS)
    q, k_cache, v_cache = three
    cu_q = None if cu_seqlens_q is None else int32("cu_seqlens_q", cu_seqlens_q, q)
    batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    if batch < 0:
        raise InvalidProblem("cu_seqlens_q has 0 elements; it must have batch + 1.")
    used = int32("seqused_k", seqused_k, q, batch)
    first = None if first_k is None else int32("first_k", first_k, q, batch)
    pages = check_table(k_cache, page_table, batch, first is not None)
    scales = check_scales(given.get("k_scale"), given.get("v_scale"), k_cache, v_cache, batch)
    asked = {name: given.get(name, False) for name in ("causal", "return_lse")}
    asked |= {name: given.get(name) for name in ("window", "mask", "scale", "sink")}
    options = given.get("options")
    asked |= {"score": modifiers(given.get("score", ())), "options": DEFAULT if options is None else options}
    written = _write(three, pages, used, cu_q, asked, apart)
    chosen = -1 if split is None else check_split(plain(split), pages)
    return _Call(asked, cu_q, used, first, pages, scales, written, chosen)


def _write(
    three: tuple[torch.Tensor, torch.Tensor, torch.Tensor], pages: Pages, used: torch.Tensor, cu_q: torch.Tensor | None,
    asked: dict[str, Any], apart: bool,
) -> Any:  # fmt: skip
    """What `routes/request.py` makes of the call, as if pages lay side by side. The last of the others is seqused_k."""
    packed, batch = cu_q is not None, used.shape[0]
    lengths = {"seqused_k": used} if cu_q is None else {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_q, "seqused_k": used}
    given = Given(lengths, None, pages.capacity)
    wide, k, v = (t[None] if packed else t for t in side_by_side(*three, pages, batch, packed, apart))
    try:
        check_tensors(wide, k, v, given)
        return write(APART, wide, given, Arguments(**{**asked, "mask": mask_of_call(asked["mask"], wide, k, True)}))
    except InvalidProblem as error:
        raise renamed(error, CALLED) from None


def _foresee(
    three: tuple[torch.Tensor, torch.Tensor, torch.Tensor], page_table: torch.Tensor | None, call: _Call, learns: bool
) -> None:
    """Raise what planning the call raises, and where a gradient is wanted planning its gradients."""
    text, floats, ints, captured, others = call.written
    rest = ([*captured, *others], call.split, text, floats, ints)
    layout = layout_of(*three, call.scales, page_table, call.first, *rest)[0]
    if learns:
        check_gradients(layout.problem.attention, call.asked["options"], three[0].device)


def _refuse(
    three: tuple[torch.Tensor, torch.Tensor, torch.Tensor], scales: Scales, pair: Any, captured: list[torch.Tensor]
) -> None:
    """Raise NotSupported for who wants what a cached call has not."""
    named = {**dict(zip(("q", *POOLS), three, strict=True)), **dict(zip(PAIR, pair or (), strict=False))}
    named |= {name: scale for name, scale in zip(SCALES, scales, strict=True) if scale is not None}
    refuse_transforms("attention_cached", {**named, **{f"captured tensor {i}": t for i, t in enumerate(captured)}})
    wants = [n for n in (*POOLS, *SCALES) if torch.is_grad_enabled() and n in named and named[n].requires_grad]
    if wants:
        reason = (
            f"{wants[0]} requires a gradient, and a cache has none; call it under torch.no_grad(), or attend to gathered keys: "
            "flashtile.attention(q, *cache.dense(), seqused_k=cache.seqused), less cache.first_k where there is one"
        )
        raise NotSupported("attention_cached", {"flashtile": [reason]})
    wide = three[0].shape[-1]
    if wide > MAX_HEAD_DIM and _wants_gradients(three[0], pair, captured):
        reason = f"head_dim is {wide}; gradients go up to {MAX_HEAD_DIM}, without them call it under torch.no_grad()"
        raise NotSupported("gradients of attention_cached", {"flashtile": [reason]})


def _wants_gradients(q: torch.Tensor, pair: Any, captured: list[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in (q, *(pair or ()), *captured))
