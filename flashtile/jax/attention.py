"""dot_product_attention: the public JAX functions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

import jax
import jax.numpy as jnp

from flashtile.errors import InvalidProblem, NotSupported
from flashtile.features.masks.prefix import Prefix
from flashtile.features.masks.stored import Stored
from flashtile.features.masks.within import Within
from flashtile.features.scores.bias import Bias
from flashtile.features.scores.softcap import Softcap
from flashtile.jax import derivatives
from flashtile.jax.arguments import (
    FLAX,
    FOR_FLAX,
    array,
    check_operands,
    check_options,
    described,
    floating,
    lengths_of,
    make_band,
    narrowed,
    number,
    numbers,
    operand,
    scaled,
    shifted_band,
    wide,
)
from flashtile.jax.arrays import promotes
from flashtile.jax.derivatives import Call
from flashtile.jax.dropout import origin_kind, seed_words
from flashtile.jax.run import NAMES, varying_like
from flashtile.jax.statistics import statistics_of
from flashtile.jax.stored import StoredCall, attend_stored, described_stored, is_read, numbers_of
from flashtile.jax.symbolic import from_first_key, lengths_in, predicate_of, problem_of, shorter
from flashtile.plan.buffers import input_buffers
from flashtile.problem.attention import AttentionProblem, Precision
from flashtile.problem.describe import Wanted, describe
from flashtile.problem.dropout import Dropout, no_dropout
from flashtile.problem.dtype import DType
from flashtile.problem.lengths import ALIKE, Lengths
from flashtile.problem.mask import FULL, Band, Joined, no_mask
from flashtile.problem.options import VARIANTS, Delta, Options
from flashtile.problem.predicate import PredicateSpec, normal_form
from flashtile.problem.score import Score, ScoreSpec
from flashtile.problem.statistics import Statistics, Wish, wish_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

IMPLEMENTATIONS = (None, "triton", "hopper", "xla")
BACKWARDS = (*VARIANTS, "xla")
ALIGNMENTS = ("top-left", "bottom-right")


class Extras(TypedDict, total=False):
    """What the functions here take beyond `jax.nn.dot_product_attention`, by name.

    softcap: scores become softcap * tanh(scores / softcap). sinks: (N,), a logit per head that joins every row's softmax as
        one more key, whose value is zero; differentiable.
    score: further modifiers, such as (`flashtile.Alibi(slopes)`,), applied in order, after bias and then softcap.
    attend_to: a `flashtile.Band`, a predicate such as `flashtile.Document(ids)`, or several joined by `&` and `|`; its bands
        are aligned bottom-right.
    dropout: `flashtile.Dropout(p, seed)`, seed an int or a `jax.random` key; bits depend on (batch, head, query, key) alone.
    alignment: where `is_causal` and `local_window_size` put query 0: "top-left" at key 0, as jax.nn does, or "bottom-right"
        so that the last query stands at the last key, as FlashAttention does. Where they do at the top left, lengths hide
        queries and keys and move none: positions that modifiers see stay those of T and S.
    backward: which kernels, "split" (two, repeatable), "fused" (one, dq added atomically) or "auto"; "xla" for plain JAX.
    deterministic: ask for a bitwise repeatable backward. precision: of fp32 products, see `flashtile.Options`.
    delta: "exact" lets what cancels in a 16-bit row cancel, see `flashtile.Options`.
    returns: statistics of the softmax, among "lse", "max_logit", "entropy" and a `flashtile.Mass`: the call returns (out,
        `flashtile.Statistics`), whose shapes that says. Each takes a pass behind the call; the entropy is differentiable, once
        and in reverse mode.
    k_scale, v_scale: of key and value in float8_e4m3fn, float8_e5m2 or int8, float32 () for all, or a number; (K,); (B, K); or
        of each token, as key without its last axis. Kernels read the bytes of a forward with 16-bit queries; to differentiate,
        for statistics and in plain JAX they become numbers of query's dtype first, in memory.
    """

    softcap: float | None
    sinks: Any
    score: tuple[Score, ...]
    attend_to: Band | Joined | None
    dropout: Dropout | None
    alignment: str
    backward: str
    deterministic: bool
    precision: Precision
    delta: Delta
    returns: Any
    k_scale: Any
    v_scale: Any


@promotes
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    dropout_rng: None = None,
    **extras: Unpack[Extras],
) -> Any:
    """Attention with the arguments of `jax.nn.dot_product_attention`, exact, in O(seqlen) memory, and `Extras`.

    query: (B, T, N, H) or (T, N, H); key: (B, S, K, H), value: (B, S, K, V), likewise; fp16, bf16 or fp32, N a multiple of K.
    bias: added to the scaled scores; broadcasts to (B, N, T, S), and so does its gradient. mask: bool, likewise, True attends.
    scale: of the scores, 1 / sqrt(H) by default. is_causal, local_window_size: as jax.nn's, see `Extras` for `alignment`.
    query_seq_lengths, key_value_seq_lengths: int32 (B,): what lies beyond is never looked at, and gets out and gradient 0.
    implementation: "triton", "hopper" (kernels, NVIDIA GPUs), "xla" (plain JAX), or None: kernels where there is an NVIDIA
        GPU, plain JAX elsewhere.
    return_residual: also return the log of each row's softmax denominator, float32 (B, T, N), differentiable.
    dropout_rng: refused; dropout is `Extras`', and flax's `flashtile.jax.flax`'s.

    Returns out (B, T, N, V) in query's dtype, or (out, residual), or (out, statistics). A query that sees no key gives 0 and
    -inf (jax.nn gives it the mean of all values). Works under jit, grad, vmap, scan, checkpoint, shard_map, jax.export and
    automatic sharding over batch and heads. Raises InvalidProblem and NotSupported.
    """
    check_options("dot_product_attention", extras, Extras.__optional_keys__)
    if dropout_rng is not None:  # flax.linen hands over what it finds in the signature, and drops the rest, the rate too
        raise InvalidProblem(f"dropout_rng is given; dropout is taken as flashtile.Dropout(p, key): {FOR_FLAX}.")
    given = query
    query, key, value = (operand(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    if isinstance(mask, (Band, Joined)):
        raise InvalidProblem(f"mask is a {type(mask).__name__}; it must be booleans for every score: such a mask is attend_to.")
    bias, mask = (None if x is None else jnp.asarray(x) for x in (bias, mask))
    scales = _scales(extras)
    if jnp.ndim(given) == 3:  # a token's, as its key is
        scales = {n: x[None] if getattr(x, "shape", None) == key.shape[1:3] else x for n, x in scales.items()}
    rest = _Rest(**dict[str, Any](extras))
    band = shifted_band(is_causal, local_window_size)
    padded = key_value_seq_lengths is not None
    blanks = padded and band != FULL and rest.alignment == "top-left"  # keys that do not count are made 0 first
    read = not blanks and implementation != "xla" and rest.wish is None and is_read(query, key, value)
    if not read:
        key, value = numbers_of(query, key, value, scales, padded=padded)
    check_operands(query, *(_as_query(x, query) if read else x for x in (key, value)))
    if read:
        rest = replace(rest, stored=described_stored(key, value, scales, padded=padded))
    lengths = {
        "q": lengths_of("query_seq_lengths", query_seq_lengths, query.shape[0]),
        "k": lengths_of("key_value_seq_lengths", key_value_seq_lengths, query.shape[0]),
    }
    scale, query = scaled("scale", scale, query)
    attend_to = rest.attend_to
    pads = None
    if band != FULL and rest.alignment == "top-left":
        band, causal = from_first_key(band, query.shape[1], key.shape[1])
        attend_to = attend_to if causal is None else _both(attend_to, causal)
        if lengths["k"] is not None:
            attend_to = _both(attend_to, Prefix(lengths["k"]))
            key, value = (_counted(x, lengths["k"]) for x in (key, value))
        pads, lengths = lengths["q"], {"q": None, "k": None}
    if mask is not None:
        if mask.dtype != jnp.bool_:
            raise InvalidProblem(f"mask is {mask.dtype}; it must be bool, True where a score counts (bias adds numbers).")
        attend_to = _both(attend_to, Stored(wide("mask", mask)))
    score = rest.modifiers(None if bias is None else Bias(wide("bias", bias)))
    if pads is not None:
        query = _counted(query, pads)
        if score or rest.wish is not None:  # whatever modifiers and statistics make of rows that nobody has
            attend_to = _both(attend_to, Stored(_counts(query.shape[1], pads)[:, None, :, None]))
    used = {f"seqused_{side}": n for side, n in lengths.items() if n is not None}
    made = attend(query, key, value, band, attend_to, score, scale, implementation, return_residual, rest, used)
    if rest.wish is not None:
        return _with_statistics(rest.wish, made, pads, jnp.shape(given)[:-1])
    out, lse = made[0], jnp.swapaxes(made[1], 1, 2)
    if pads is not None:
        out, lse = _counted(out, pads), _counted(lse, pads, -jnp.inf)
    rows = jnp.shape(given)[:-1]
    out, lse = out.reshape(*rows, out.shape[-1]), lse.reshape(rows)
    return (out, lse) if return_residual else out


@promotes
def dot_product_attention_varlen(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    **extras: Unpack[Extras],
) -> Any:
    """Attention of items that lie one after another: item i has the tokens [cu_seqlens[i], cu_seqlens[i + 1]).

    query: (total_q, N, H); key: (total_k, K, H); value: (total_k, K, V). cu_seqlens_q, cu_seqlens_k: int32 (items + 1,),
    the latter cu_seqlens_q by default; they may be traced. Bands are aligned bottom-right in each item, and `alignment` must
    not say otherwise. max_seqlen_q, max_seqlen_k: no item is longer (spares launches). All else as in
    `dot_product_attention`. Returns out (total_q, N, V), or (out, residual float32 (total_q, N)).
    """
    check_options("dot_product_attention_varlen", extras, Extras.__optional_keys__)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x is not None and jnp.ndim(x) != 3:
            raise InvalidProblem(f"{name} has shape {jnp.shape(x)}; it must be (total, heads, head_dim).")
    query, key, value = (operand(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    scales = _scales(extras)
    if extras.get("alignment", "bottom-right") != "bottom-right":
        raise InvalidProblem("alignment is 'top-left'; items of a varlen call are aligned 'bottom-right'.")
    rest = _Rest(**{**extras, "alignment": "bottom-right"})
    if scales or key.dtype != query.dtype:
        starts = lengths_of("cu_seqlens_k", cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k)
        if implementation != "xla" and rest.wish is None and is_read(query, key, value):
            rest = replace(rest, stored=described_stored(key, value, scales, starts))
        else:
            key, value = numbers_of(query, key, value, scales, starts)
    check_operands(query, *(x if rest.stored is None else _as_query(x, query) for x in (key, value)))
    scale, query = scaled("scale", scale, query)
    band = make_band(is_causal, local_window_size)
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
        max_seqlen_k = max_seqlen_q if max_seqlen_k is None else max_seqlen_k
    cu_seqlens_q = lengths_of("cu_seqlens_q", cu_seqlens_q)
    given = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": lengths_of("cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape[0])}
    longest = number("max_seqlen_q", max_seqlen_q), number("max_seqlen_k", max_seqlen_k)
    for name, most in zip(("max_seqlen_q", "max_seqlen_k"), longest, strict=True):
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 0):
            raise InvalidProblem(f"{name} is {most!r}; it must be an int, at least 0, or None.")
    out, lse, found = attend(
        query, key, value, band, rest.attend_to, rest.modifiers(None), scale, implementation, return_residual, rest, given,
        longest,
    )  # fmt: skip
    if rest.wish is not None:
        return out[0], found._replace(
            **{n: getattr(found, n)[0] for n in ("lse", "entropy", "mass") if getattr(found, n) is not None}
        )
    return (out[0], jnp.swapaxes(lse[0], 0, 1)) if return_residual else out[0]


def attention_of_part(
    query: Any, key: Any, value: Any, scale: Any, implementation: str | None, bias: Any = None, used_k: Any = None,
    **extras: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """(out, residual) of a device's part, of operands that are checked, bands aligned bottom-right.

    key, value: of query's dtype, or its 16-bit numbers in float32, so that their gradients are summed before they are rounded.
    used_k: int32 (B,), how many keys there are of each item.
    """
    rest = _Rest(**extras)
    scale, query = scaled("scale", scale, query)
    score = rest.modifiers(None if bias is None else Bias(wide("bias", jnp.asarray(bias))))
    lengths = {} if used_k is None else {"seqused_k": used_k}
    out, lse, _ = attend(query, key, value, FULL, rest.attend_to, score, scale, implementation, True, rest, lengths)
    return out, jnp.swapaxes(lse, 1, 2)


@promotes
def mha(
    q: Any,
    k: Any,
    v: Any,
    sm_scale: float = 1.0,
    causal: bool = False,
    block_q: int | None = None,
    block_k: int | None = None,
    backward_pass_impl: str = "triton",
    num_warps: int | None = None,
    num_stages: int | None = None,
    grid: Any = None,
    interpret: bool = False,
    debug: bool = False,
    deterministic: bool | None = None,
    **others: Any,
) -> Any:
    """out (batch, seqlen_q, heads, head_dim), by the signature of jax-triton's and Pallas' example kernels.

    q: (batch, seqlen_q, heads, head_dim); k, v: (batch, seqlen_k, heads_kv, head_dim); fp16, bf16 or fp32. sm_scale is 1 by
    default, as theirs. causal is aligned top-left. backward_pass_impl: "triton" (one fused kernel),
    "triton_split" (dq apart from dk and dv) or "xla". Tiles, warps, stages and grid are this library's own choice: what
    says otherwise is refused, and so are interpret and debug, by InvalidProblem. So is deterministic, by which flax's modules
    say that they take this for an `attention_fn`, which would hide their mask and dropout: that is `flashtile.jax.flax`'s.
    """
    if others or deterministic is not None:  # flax.linen hands over what it finds in the signature, and drops the rest
        name = next(iter(others), "deterministic")
        remedy = f"; {FOR_FLAX}" if FLAX & {name, *others} else ""
        raise TypeError(f"mha() got an unexpected keyword argument {name!r}{remedy}")
    interpret, debug = number("interpret", interpret), number("debug", debug)
    ways = {"triton": "fused", "triton_split": "split", "xla": "xla"}
    if backward_pass_impl not in ways:
        raise InvalidProblem(f"backward_pass_impl is {backward_pass_impl!r}; it must be one of {', '.join(ways)}.")
    own = dict(block_q=block_q, block_k=block_k, num_warps=num_warps, num_stages=num_stages, grid=grid)
    for name, value in {**own, "interpret": interpret or None, "debug": debug or None}.items():
        if value is not None:
            raise InvalidProblem(f"{name} is {value!r}; it must be left out: tiles and launches are chosen here.")
    return dot_product_attention(q, k, v, scale=sm_scale, is_causal=causal, backward=ways[backward_pass_impl])


def _scales(extras: Any) -> dict[str, Any]:
    """k_scale and v_scale, taken out of the options."""
    return {name: extras.pop(name) for name in ("k_scale", "v_scale") if name in extras}


@dataclass(frozen=True)
class _Rest:
    """`Extras` with their defaults, checked."""

    softcap: float | None = None
    sinks: Any = None
    score: tuple[Score, ...] = ()
    attend_to: Band | Joined | None = None
    dropout: Dropout | None = None
    alignment: str = "top-left"
    backward: str = "auto"
    deterministic: bool = False
    precision: Precision = "tf32x3"
    delta: Delta = "rounded"
    returns: Any = None
    stored: Any = None  # how key and value are, whose 8 bits kernels read, and their scales
    options: Options = field(init=False)
    wish: Wish | None = field(init=False)

    def __post_init__(self) -> None:
        for name, value in numbers(softcap=self.softcap, deterministic=self.deterministic).items():
            object.__setattr__(self, name, value)
        if self.alignment not in ALIGNMENTS:
            raise InvalidProblem(f"alignment is {self.alignment!r}; it must be one of {', '.join(ALIGNMENTS)}.")
        if self.backward not in BACKWARDS:
            raise InvalidProblem(f"backward is {self.backward!r}; it must be one of {', '.join(BACKWARDS)}.")
        if not isinstance(self.score, (tuple, list)) or not all(isinstance(s, Score) for s in self.score):
            raise InvalidProblem(f"score is {self.score!r}; it must be a tuple of score modifiers, such as (Alibi(slopes),).")
        if not (self.dropout is None or isinstance(self.dropout, Dropout)):
            raise no_dropout(self.dropout)
        if not isinstance(self.deterministic, bool):
            raise InvalidProblem(f"deterministic is {self.deterministic!r}; it must be True or False.")
        object.__setattr__(self, "wish", None if self.returns is None else wish_of(self.returns))
        object.__setattr__(self, "options", Options(None, "auto", self.deterministic, self.precision, self.delta))
        if not (self.attend_to is None or isinstance(self.attend_to, (Band, Joined))):
            arrays = " Booleans for every score go in as mask, numbers that are added as bias."
            raise no_mask("attend_to", self.attend_to, arrays, " A function of positions becomes a Predicate.")

    def modifiers(self, bias: Bias | None) -> tuple[Score, ...]:
        first = () if bias is None else (bias,)
        return (*first, *(() if self.softcap is None else (Softcap(self.softcap),)), *self.score)


def attend(
    q: Any, k: Any, v: Any, band: Band, attend_to: Any, score: tuple[Score, ...], scale: float | None,
    implementation: str | None, returns_lse: bool, rest: _Rest, lengths: dict[str, Any],
    longest: tuple[Any, Any] = (None, None),
) -> tuple[Any, Any, Any]:  # fmt: skip
    """(out, lse, statistics or None) of 4-dimensional arrays; lse (slabs, heads_q, span_q).

    k, v: of q's dtype, or `rest.stored`, or q's 16-bit numbers in float32, and then so are their gradients.
    """
    if implementation not in IMPLEMENTATIONS:
        raise InvalidProblem(
            f"implementation is {implementation!r}; it must be one of {', '.join(map(repr, IMPLEMENTATIONS))}."
        )
    returns_lse = number("return_residual", returns_lse)
    if not isinstance(returns_lse, bool):
        raise InvalidProblem(f"return_residual is {returns_lse!r}; it must be True or False.")
    if rest.wish is not None and returns_lse:
        raise InvalidProblem("return_residual is True besides returns; ask for 'lse' among returns instead.")
    returns_lse = returns_lse or rest.wish is not None
    arrays, problem = _describe(q, k, v, band, attend_to, score, scale, returns_lse, rest, lengths, longest)
    if implementation == "xla" and rest.backward not in ("auto", "xla"):
        raise InvalidProblem(f"backward is {rest.backward!r} and implementation is 'xla', which has one backward of its own.")
    wide_keys = rest.stored is None and k.dtype != q.dtype
    call = Call(problem, implementation, rest.backward, jax.config.jax_debug_infs and not returns_lse, wide_keys)
    if rest.stored is not None:
        how, scales = rest.stored
        problem, arrays = replace(problem, stored=how), arrays | scales
        call = StoredCall(call, problem)
    names = [b.name for b in input_buffers(problem)]
    given = varying_like([arrays[name] for name in names], [arrays[name] for name in names])
    out, lse = _compiled(call, *given)
    if rest.wish is None:
        return out, lse, None
    assert isinstance(call, Call)
    return out, lse, statistics_of(call, rest.wish, dict(zip(names, given, strict=True)), lse)


def _with_statistics(wish: Wish, made: tuple[Any, Any, Statistics], pads: Any, rows: tuple[int, ...]) -> Any:
    """(out, statistics) of `attend` as a caller has them, who gave queries of these axes; pads: how many of each item count."""
    out, _, found = made
    if pads is not None:
        if wish.mass:
            reason = (
                "an item's last queries are not found where bands begin at the first key; alignment='bottom-right' finds them"
            )
            raise NotSupported("mass beside query_seq_lengths, a band and alignment='top-left'", {"jax": [reason]})
        out = _counted(out, pads)
    if len(rows) < 3:  # of one item, which has no axis
        found = Statistics(*(None if x is None else x[0] for x in found))
    return out.reshape(*rows, out.shape[-1]), found


def _describe(
    q: Any, k: Any, v: Any, band: Band, attend_to: Any, score: tuple[Score, ...], scale: Any, returns_lse: bool, rest: _Rest,
    lengths: dict[str, Any], longest: tuple[Any, Any],
) -> tuple[dict[str, Any], AttentionProblem]:  # fmt: skip
    """Arrays by the names of a plan's inputs, and the problem. Raises InvalidProblem."""
    varlen = "cu_seqlens_q" in lengths
    batch = lengths["cu_seqlens_q"].shape[0] - 1 if varlen else q.shape[0]
    arrays: dict[str, Any] = {"q": q, "k": k, "v": v, **lengths}
    band, terms = normal_form(False, None, band & attend_to if attend_to is not None else band)
    leaves = [Within(leaf) if isinstance(leaf, Band) else leaf for term in terms for leaf in term]
    specs: list[PredicateSpec] = []
    for i, leaf in enumerate(leaves):
        tensors = tuple(narrowed(array(f"{leaf.name}'s tensor", t)) for t in leaf.tensors(batch, q.shape[2]))
        arrays |= {f"mask.{i}.{j}": t for j, t in enumerate(tensors)}
        own = tuple((tuple(t.shape), NAMES.get(t.dtype, str(t.dtype))) for t in tensors)
        specs.append(predicate_of(type(leaf), leaf.scalars(), own))
    rest_of = iter(specs)
    where = tuple(tuple(next(rest_of) for _ in term) for term in terms)
    modifiers: list[ScoreSpec] = []
    for i, modifier in enumerate(score):
        tensors = tuple(floating(f"{modifier.name}'s tensor", t) for t in modifier.tensors(batch, q.shape[2]))
        arrays |= {f"score.{i}.{j}": t for j, t in enumerate(tensors)}
        modifiers.append(ScoreSpec(type(modifier), tuple(map(float, modifier.scalars())), tuple(map(described, tensors))))
    if rest.sinks is not None:
        arrays["sink"] = floating("sinks", rest.sinks)
    used = {f"used_{side}": f"seqused_{side}" in lengths for side in "qk"}
    known = lengths_in(q.shape[1], k.shape[1]) if varlen else Lengths(**used) if lengths else ALIKE
    wanted = Wanted(
        band, where, None, tuple(modifiers), scale, None if rest.sinks is None else described(arrays["sink"]),
        None if rest.dropout is None else rest.dropout.p, returns_lse, rest.options, origin_kind(rest.dropout),
    )  # fmt: skip
    problem = describe(
        (q.shape, k.shape, v.shape), DType(NAMES[q.dtype]), wanted, batch, known, longest, shorter=shorter,
        make=partial(problem_of, arrays.values()),
    )  # fmt: skip
    if problem.dropout is not None:
        assert rest.dropout is not None
        arrays["seed"] = seed_words(rest.dropout)
    return arrays, problem


def _counts(size: int, lengths: Any) -> Any:
    """bool (B, size): what counts of items of these lengths."""
    return jnp.arange(size) < lengths[:, None]


def _counted(x: Any, lengths: Any, beyond: float = 0) -> Any:
    """What counts of an array (B, T, ...), whose items have these lengths; `beyond` elsewhere."""
    counts = _counts(x.shape[1], lengths)
    return jnp.where(counts.reshape(*counts.shape, *(1,) * (x.ndim - 2)), x, beyond)


def _as_query(x: Any, query: Any) -> Any:
    """What has the array's shape and query's dtype."""
    return jax.ShapeDtypeStruct(x.shape, query.dtype)


def _both(mask: Any, other: Any) -> Any:
    return other if mask is None else mask & other


def _out_and_lse(call: Call | StoredCall, *given: Any) -> tuple[Any, Any]:
    made: Any = derivatives.attend(call, *given) if isinstance(call, Call) else attend_stored(call, *given)
    return made[:2]


_compiled = jax.jit(_out_and_lse, static_argnums=0)  # one program where a call stands outside of jit
