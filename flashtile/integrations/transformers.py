"""Hugging Face transformers: `register()`, then `attn_implementation="flashtile"`.

Two functions: one turns a model's mask into `Mask`, which says in O(seqlen) what sdpa's mask says in O(seqlen^2), the other
calls `flashtile.attention`. Masks that are made of anything but causality, windows of one and of two sides, padding and packed
sequences arrive as transformers' own boolean tensor, which is read where it lies.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from dis import get_instructions
from functools import partial, wraps
from importlib import import_module
from typing import Any

import torch

from flashtile.distributed import Context
from flashtile.errors import InvalidProblem, NotSupported
from flashtile.features.masks.document import Document
from flashtile.features.masks.key_padding import KeyPadding
from flashtile.features.masks.stored import Stored
from flashtile.features.scores.bias import Bias
from flashtile.features.scores.softcap import Softcap
from flashtile.integrations.transformers_cache import FEW, attend_pages, attend_whole, is_decoding, lengths_of, open_batching
from flashtile.integrations.transformers_shards import attend_shards, packed_starts
from flashtile.problem.dropout import Dropout
from flashtile.problem.mask import CAUSAL, FULL, Band
from flashtile.problem.options import Options
from flashtile.problem.score import Score
from flashtile.torch.api.attention import attention
from flashtile.torch.api.layouts import attention_varlen
from flashtile.torch.execute.plain import is_traced

NAME = "flashtile"
# What models hand through to every attention and its mask has already, or concerns others.
OTHERS = frozenset({
    "position_ids", "cache_position", "use_cache", "output_hidden_states", "return_dict", "num_items_in_batch",
    "position_embeddings", "logits_to_keep", "output_router_logits", "seq_idx", "interpolate_pos_encoding", "read_index",
    "write_index", "logits_indices", "logits_processor_args",
})  # fmt: skip
# Functions of transformers and its models that make a window of distances, an interval around the query.
WINDOWS = {
    "sliding_window_overlay", "sliding_window_bidirectional_overlay", "_bidirectional_window_overlay",
    "sliding_window_mask_function",
}  # fmt: skip

_names: set[str] = set()
_masks: Any = None  # transformers' masking_utils; the compiler of PyTorch 2.11 follows no import of it


def register(name: str = NAME, options: Options | None = None, context: Context | None = None) -> None:
    """Make `attn_implementation=name` mean flashtile with these options, in this process. Needs transformers 5.

    context: a `flashtile.distributed.Context` over whose ranks every sequence is sharded: input_ids, position_ids and
        attention_mask (batch, seqlen) are then this rank's shards, and every rank calls the model alike. None for whole
        sequences; DeepSpeed's Ulysses exchanges heads for positions itself, and wants None, too.

    transformers takes every implementation with "flash" in its name for a build of flash-attention: it looks for that on the
    hub, and for some models puts another in its place (5.23, `is_flash_attention_requested`). So it is told that this is none.
    """
    global _masks
    theirs, _masks = import_module("transformers"), import_module("transformers.masking_utils")
    theirs.AttentionInterface.register(
        name,
        attention_forward
        if options is None and context is None
        else partial(attention_forward, options=options, context=context),
    )
    theirs.AttentionMaskInterface.register(name, make_mask)
    if "flash" in name and name not in _names:
        if not _names:
            _correct_names()
            open_batching(_names)
        _names.add(name)


def _correct_names() -> None:
    original = import_module("transformers.utils.generic").is_flash_attention_requested

    @wraps(original)
    def corrected(config: Any = None, requested_attention_implementation: str | None = None, version: Any = None) -> bool:
        asked = requested_attention_implementation if config is None else config._attn_implementation
        return asked not in _names and original(config, requested_attention_implementation, version)

    for module in list(sys.modules.values()):  # those who have imported it, and the home from which others will
        if getattr(module, "__name__", "").startswith("transformers.") and vars(module).get(original.__name__) is original:
            setattr(module, original.__name__, corrected)


@dataclass(eq=False)
class Mask:
    """Which keys a query sees: those of a band, of its document, that are kept, among the first `used` of each item.

    keep: bool (batch, kv_length); documents: int32 (batch, length); used: int32 (batch,). shape is that of the boolean tensor
    in whose place it stands. For kernels over a cache, all int32 (batch,): first, the first key that is kept, where all behind
    it are, which they are told much sooner than a mask; whole, kv_length, where `used` is None: made once for all layers.
    """

    shape: tuple[int, int, int, int]
    band: Band
    keep: torch.Tensor | None = None
    documents: torch.Tensor | None = None
    used: torch.Tensor | None = None
    first: torch.Tensor | None = None
    whole: torch.Tensor | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def is_band(self) -> bool:
        """Whether its band says all."""
        return self.keep is self.documents is self.used is None

    def contiguous(self) -> Mask:
        """Itself: asked by transformers' generation."""
        return self

    def __add__(self, scores: Any) -> Any:
        """The scores, if it hides nothing. NotSupported otherwise: a model that adds masks computes attention itself."""
        if self.band.unbounded and self.is_band:
            return scores
        reason = "the model adds its mask to scores, and so has no use for another attention; take 'eager'"
        raise NotSupported(f"attn_implementation={NAME!r}", {NAME: [reason]})

    __radd__ = __add__

    def repeat(self, *sizes: int) -> torch.Tensor:
        """The boolean tensor, repeated, where padding is all it says: for SigLIP 2, which pools by torch's own attention."""
        if self.keep is None or not self.band.unbounded or self.documents is not None or self.used is not None:
            return self.__getattr__("repeat")
        return self.keep[:, None, None].expand(self.shape).repeat(*sizes)

    def __getattr__(self, name: str) -> Any:
        reason = f"the model asks its mask for {name!r}, and it is no tensor; take another implementation"
        raise _NoTensor(f"attn_implementation={NAME!r}", {NAME: [reason]})

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """What `attention` is told on a device, which differs between layers of a model that is spread over several."""
        keep, documents, used = (None if t is None else t.to(device) for t in (self.keep, self.documents, self.used))
        mask: Any = self.band
        if documents is not None:
            mask = Document(documents) & mask
        if keep is not None:
            mask = KeyPadding(keep) & mask
        return {"mask": mask, "seqused_k": used}

    def over_cache(self, k: torch.Tensor) -> dict[str, Any]:
        """What `attention_cached` is told over keys (batch, kv_length, heads, head_dim), without documents."""
        used = self.used
        if used is None and self.shape[0] == k.shape[0] and self.shape[3] == k.shape[1]:
            used = self.whole
        told: dict[str, Any] = {"mask": self.band, "seqused_k": lengths_of(k) if used is None else _on(used, k)}
        if self.first is not None:
            told["first_k"] = _on(self.first, k)
        elif self.keep is not None:
            told["mask"] = KeyPadding(_on(self.keep, k)) & self.band
        return told


def _on(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor on the other's device, where it mostly is."""
    return tensor if tensor.device == like.device else tensor.to(like.device)


class _NoTensor(NotSupported, AttributeError):
    """A refusal that `hasattr` understands."""


def make_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0, mask_function: Any = None,
    attention_mask: Any = None, **rest: Any,
) -> Any:  # fmt: skip
    """`Mask`, or transformers' boolean (batch, 1, q_length, kv_length) where that cannot say it."""
    if isinstance(attention_mask, Mask):
        return attention_mask
    mask_function = _masks.causal_mask_function if mask_function is None else mask_function
    known = _known(mask_function)
    device = rest.get("device", "cpu")
    tail = None if known is None else _tail(known[0], batch_size, q_length, kv_length, q_offset, kv_offset, device)
    if known is None or tail is None:
        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        given = dict(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask,
        )  # fmt: skip
        return _masks.sdpa_mask(**given, **{**rest, **skips})
    band, documents = known
    keep, first, whole, length = None, None, None, q_offset + q_length
    decodes = q_length <= FEW and q_length < kv_length and not band.unbounded
    if not (decodes and _hides_nothing(attention_mask, length)):
        keep = _masks.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if keep is not None:
        keep = keep[:, kv_offset : kv_offset + kv_length]
        if decodes and isinstance(kv_offset, int) and kv_offset == 0 and _may_ask(attention_mask, length):
            first = _first_kept(attention_mask, length)
    if decodes and tail[0] is None and torch.device(device).type == "cuda":
        whole = torch.full((batch_size,), kv_length, dtype=torch.int32, device=device)
    return Mask((batch_size, 1, q_length, kv_length), band, keep, documents, *tail, first, whole)


def _hides_nothing(padding: torch.Tensor | None, length: Any) -> bool:
    """Whether padding keeps all of `length` tokens, if it may be asked."""
    if padding is None or not _may_ask(padding, length):
        return False
    return bool(padding.all() & (padding.shape[-1] >= length))


def _first_kept(padding: torch.Tensor, length: Any) -> torch.Tensor | None:
    """The first token of each item that padding keeps, if that keeps all of `length` behind it; else None."""
    at = torch.arange(padding.shape[-1], device=padding.device)
    kept = (padding != 0) & (at < length)
    first = kept.int().argmax(-1)
    whole = (kept == (at >= first[:, None]) & (at < length)).all() & (padding.shape[-1] >= length)
    return first.int() if bool(whole) else None


def _may_ask(padding: torch.Tensor, length: Any) -> bool:
    """Whether no gradient, tracer or capture is at work: to ask padding what it hides is to wait for the device, as
    transformers' own masks do. Kernels over a cache are faster without it.
    """
    device, traced = padding.device.type, is_traced(padding, length) or torch._C._get_tracing_state() is not None
    if torch.is_grad_enabled() or traced or device not in ("cpu", "cuda"):
        return False
    return device == "cpu" or not torch.cuda.is_current_stream_capturing()


def _tail(
    band: Band, batch: int, q_length: int, kv_length: int, q_offset: Any, kv_offset: Any, device: Any
) -> tuple[Any] | None:
    """How many keys a band looks at, (batch,), or None for all of them; None instead if that is not the way in which they lie.

    A causal one's last query stands at the last of them: those beyond are not there yet.
    """
    if isinstance(kv_offset, torch.Tensor):
        return None
    if band.unbounded:  # of an encoder, say, whose keys have nothing to do with where the queries stand
        return (None,)
    causal_from_0 = band.right == 0 and kv_offset == 0
    if isinstance(q_offset, torch.Tensor):  # a static cache says so
        return ((q_offset + q_length).to(device, torch.int32).expand(batch).contiguous(),) if causal_from_0 else None
    if q_offset + q_length == kv_offset + kv_length:
        return (None,)
    if causal_from_0 and q_offset + q_length < kv_length:
        return (torch.full((batch,), q_offset + q_length, dtype=torch.int32, device=device),)
    return None


def _known(function: Any) -> tuple[Band, Any] | None:
    """(band, documents) of one of transformers' mask functions; None for any other."""
    if function is _masks.causal_mask_function:
        return CAUSAL, None
    if function is _masks.bidirectional_mask_function:
        return FULL, None
    if torch.compiler.is_compiling():  # which does not look into closures
        return None
    parts = _closure(function, _masks.and_masks())
    if parts is not None:
        band, documents = FULL, None
        for part in parts["mask_functions"]:
            found = _known(part)
            if found is None or (found[1] is not None and documents is not None):
                return None
            band, documents = band & found[0], found[1] if documents is None else documents
        return band, documents
    either = _closure(function, _masks.or_masks())
    if either is not None:
        bands = [found[0] for found in map(_known, either["mask_functions"]) if found is not None and found[1] is None]
        return _union(bands) if len(bands) == len(either["mask_functions"]) else None
    window = _window(function)
    if window is not None:
        return window, None
    if _sees_all(function):
        return FULL, None
    packed = _closure(function, _masks.packed_sequence_mask_function(torch.zeros(1, 1)))
    if packed is not None:
        return FULL, packed["packed_sequence_mask"].int()
    remap = getattr(_masks, "remap_positions_for_packed_sequence", None)  # since transformers 5.23
    remapped = remap and _closure(function, remap(_masks.causal_mask_function, torch.zeros(1, 1)))
    if remapped:  # within a document positions differ by as much as they did
        return _known(remapped["mask_function"])
    return None


def _union(bands: list[Band]) -> tuple[Band, None] | None:
    """(the band that any of these is, None); None where it may be none, since one of them does not see its own position."""
    sides = [[band.left for band in bands], [band.right for band in bands]]
    if any(distance is not None and distance < 0 for side in sides for distance in side):
        return None
    left, right = (None if None in side else max(d for d in side if d is not None) for side in sides)
    return Band(left, right), None


def _window(function: Any) -> Band | None:
    """The band of one of transformers' windows, which is asked where it ends; None for another function."""
    module, factory = getattr(function, "__module__", "") or "", getattr(function, "__qualname__", "").partition(".")[0]
    if not module.startswith("transformers.") or factory not in WINDOWS or not getattr(function, "__closure__", None):
        return None
    captured = [cell.cell_contents for cell in function.__closure__]
    sizes = [n for item in captured for n in (item if isinstance(item, (tuple, list)) else [item])]
    if not all(isinstance(n, int) for n in sizes) or not function(0, 0, 0, 0):
        return None
    beyond = range(1, max(sizes) + 3)
    ends = [bisect_left(beyond, True, key=lambda d, way=way: not function(0, 0, 0, way * d)) for way in (-1, 1)]
    left, right = (None if end == len(beyond) else end for end in ends)
    return Band(left, right)


def _sees_all(function: Any) -> bool:
    """Whether a function of transformers' models says True of every position, for it looks at none."""
    code = getattr(function, "__code__", None)
    if code is None or not (function.__module__ or "").startswith("transformers.") or code.co_freevars:
        return False
    return not any(step.opname.startswith("LOAD_FAST") for step in get_instructions(code)) and bool(function(0, 0, 0, 0))


def _closure(function: Any, like: Callable[..., Any]) -> dict[str, Any] | None:
    """What a function has captured, by name, if it is made by the same code as `like`."""
    if getattr(function, "__code__", None) is not like.__code__:
        return None
    return {name: cell.cell_contents for name, cell in zip(like.__code__.co_freevars, function.__closure__ or (), strict=True)}


def attention_forward(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
    options: Options | None = None, context: Context | None = None, **named: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """(out (batch, q_length, heads, head_dim_v), None) of query, key, value (batch, heads, length, head_dim).

    named: sliding_window, softcap, s_aux or sinks (a logit per head), position_bias, cu_seq_lens_q and _k (the starts of
    sequences packed in one row, beside any mask), block_table with k_cache and v_cache (of continuous batching),
    position_ids (batch, q_length), which say without a mask where packed sequences begin: where they do not rise.
    context: as `register` has it. Raises NotSupported for a name that it does not know and that is not None or False.
    """
    positions = named.get("position_ids")
    window, cap, bias = named.pop("sliding_window", None), named.pop("softcap", None), named.pop("position_bias", None)
    sink, sinks = named.pop("s_aux", None), named.pop("sinks", None)
    packed = named.pop("cu_seq_lens_q", None), named.pop("cu_seq_lens_k", None)
    longest = named.pop("max_length_q", None), named.pop("max_length_k", None)
    pages = named.pop("block_table", None), named.pop("k_cache", None), named.pop("v_cache", None)
    if not named.keys() <= OTHERS:
        _refuse_unknown(module, named)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    arguments: dict[str, Any] = {"scale": scaling, "options": options}
    if sink is not None or sinks is not None:
        arguments["sink"] = sinks if sink is None else sink
    score: list[Score] = [] if cap is None else [Softcap(cap)]
    if bias is not None:
        score.append(Bias(bias))
    ours = isinstance(attention_mask, Mask)
    alone = context is None and packed[0] is None and pages[0] is None
    decodes = alone and is_decoding(q, dropout, options) and (not ours or attention_mask.documents is None)
    if ours and decodes and bias is None:  # whose places are the cache's
        arguments |= attention_mask.over_cache(k)
    elif ours:
        whole = context is None or attention_mask.documents is None  # documents of shards are found by positions
        arguments |= (attention_mask if whole else replace(attention_mask, documents=None)).arguments(q.device)
    elif isinstance(attention_mask, torch.Tensor):
        if attention_mask.dim() != 4:
            raise InvalidProblem(
                f"attention_mask has shape {tuple(attention_mask.shape)}; it must be (batch, 1 or heads, q_length, kv_length)."
            )
        seen = attention_mask[..., : k.shape[1]]
        if seen.dtype is torch.bool:
            arguments["mask"] = Stored(seen)
        elif seen.is_floating_point():  # hidden by the least number of a dtype; its own numbers, which q's dtype may round
            score.append(Bias(seen))
        else:  # which added would hide nothing
            raise InvalidProblem(
                f"attention_mask is {seen.dtype}; it must be bool, True where a query sees a key, or numbers to be added."
            )
    elif attention_mask is not None:
        raise InvalidProblem(f"attention_mask is a {type(attention_mask).__name__}; it must be a tensor or None.")
    elif causal:
        if (
            packed[0] is None and 1 < q.shape[1] < k.shape[1]
        ):  # an empty static cache: what follows the queries is not there yet
            k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
            if bias is not None:
                score[-1] = Bias(bias[..., : q.shape[1]])
        arguments |= {"causal": True, "window": None if window is None else (window - 1, None)}
    elif window is not None:
        raise NotSupported(
            f"attn_implementation={NAME!r} of {type(module).__name__}", {NAME: ["sliding_window without a mask"]}
        )
    if score:
        arguments["score"] = tuple(score)
    if decodes:
        return attend_whole(q, k, v, arguments), None
    if dropout:
        arguments["dropout"] = Dropout(dropout)
    if context is not None:
        beside = {"cu_seq_lens_q": packed[0], "block_table": pages[0], "position_bias": bias}
        beside["attention_mask"] = None if ours else attention_mask
        beside["a static cache"] = arguments.pop("seqused_k", None)
        if positions is None and ours:
            beside["packed sequences without position_ids"] = attention_mask.documents
        return attend_shards(q, k, v, positions, context, arguments, beside), None
    if pages[0] is not None:
        return attend_pages(q, k, v, pages, packed[1], arguments), None
    if attention_mask is None and causal and packed[0] is None and bias is None:
        at = packed_starts(positions, q, k)
        if at is not None:
            out = attention_varlen(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), at, at, **arguments)
            return out.unflatten(0, q.shape[:2]), None
    if packed[0] is None or (ours and attention_mask.documents is not None):  # which are what is packed
        return attention(q, k, v, **arguments), None
    if q.shape[0] != 1:
        raise InvalidProblem(f"cu_seq_lens_q is given and the batch is {q.shape[0]}; packed sequences must be one row.")
    starts = [packed[0].int(), packed[0 if packed[1] is None else 1].int()]
    if attention_mask is not None and not (ours and attention_mask.is_band):
        ids = (_documents(at, tokens.shape[1]) for at, tokens in zip(starts, (q, k), strict=True))
        arguments["mask"] = Document(*ids) & arguments.get("mask", FULL)
        return attention(q, k, v, **arguments), None
    out = attention_varlen(q[0], k[0], v[0], *starts, max_seqlen_q=longest[0], max_seqlen_k=longest[1], **arguments)
    return out[None], None


def _refuse_unknown(module: torch.nn.Module, named: dict[str, Any]) -> None:
    unknown = sorted(n for n, value in named.items() if n not in OTHERS and value is not None and value is not False)
    if unknown:
        raise NotSupported(
            f"attn_implementation={NAME!r} of {type(module).__name__}", {NAME: [f"knows no {n}" for n in unknown]}
        )


def _documents(starts: torch.Tensor, tokens: int) -> torch.Tensor:
    """Which of the sequences that start there each token is of, int32 (tokens,)."""
    return torch.searchsorted(starts[1:], torch.arange(tokens, dtype=starts.dtype, device=starts.device), right=True).int()
