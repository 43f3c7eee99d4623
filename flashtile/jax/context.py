"""Attention of a sequence that the devices of a mesh axis share, within `jax.shard_map`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from flashtile.errors import InvalidProblem, NotSupported
from flashtile.features.masks.document import Document
from flashtile.features.masks.key_padding import KeyPadding
from flashtile.features.scores.alibi import Alibi
from flashtile.features.scores.bias import Bias
from flashtile.features.scores.softcap import Softcap
from flashtile.jax.arguments import check_operands, check_options, floating, make_band, numbers, operand
from flashtile.jax.arrays import promotes
from flashtile.jax.attention import Extras, attention_of_part
from flashtile.jax.dropout import DeviceOrigin
from flashtile.jax.exchange import (
    check_layout,
    gathered,
    heads_for_tokens,
    in_order,
    in_own_order,
    shard_order,
    tokens_for_heads,
    with_halo,
)
from flashtile.problem.dropout import GRAIN, Dropout, no_dropout
from flashtile.problem.mask import FULL, Band, Joined
from flashtile.problem.predicate import normal_form

METHODS = ("allgather", "ulysses")
TAKEN = {"bias", "softcap", "sinks", "score", "attend_to", "dropout", "backward", "deterministic", "precision"}
KNOWN = TAKEN | Extras.__optional_keys__ | {"mask", "query_seq_lengths", "key_value_seq_lengths", "dropout_rng"}


@promotes
def dot_product_attention_sharded(
    query: Any,
    key: Any,
    value: Any,
    *,
    axis_name: Any,
    method: str = "allgather",
    layout: str = "contiguous",
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    **extras: Any,
) -> Any:
    """`dot_product_attention` of shards of a sequence, within a `jax.shard_map` whose `axis_name` shares it out.

    query: (B, T / n, N, H), key: (B, S / n, K, H), value: (B, S / n, K, V), of n devices; out and residual likewise.
    method: "allgather" gathers keys and values, in their own dtype, and sums their gradients over devices in float32; of a
        window and contiguous shards it fetches the halo alone, where that is less than half of the others' keys. "ulysses"
        exchanges heads for positions, and back: N must be a multiple of n, and K a multiple or a divisor of it.
    layout: "contiguous" shards, or "zigzag": a device's chunk of the first half and its mirror of the second, so that causal
        order gives all equal work; `shard_order` brings a whole sequence there, `shard_positions` says which tokens are here.
        With "ulysses" also "striped", every n-th token.
    is_causal, local_window_size: aligned bottom-right, of the whole. By "allgather" no query may look ahead, but where all see
        all, or a window is small.
    extras: bias, softcap, sinks, score (`Softcap`, `Alibi`, `Bias`), attend_to, dropout, backward, deterministic, precision.
        attend_to: `Document` and `KeyPadding` of this device's tokens, and bands, joined by `&`. A bias has this device's
        queries and all keys, in their own order; by "ulysses" one row for all queries. dropout: `Dropout(p, seed)`, the same
        seed on every device: it drops what one device drops of the batch entries that are here.

    Raises InvalidProblem and NotSupported.
    """
    check_options("dot_product_attention_sharded", extras, KNOWN)
    given = numbers(scale=scale, is_causal=is_causal, return_residual=return_residual)
    query, key, value = (operand(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    check_operands(query, key, value)
    check_layout(layout)
    if method not in METHODS:
        raise InvalidProblem(f"method is {method!r}; it must be one of {', '.join(METHODS)}.")
    band, leaves = _mask(make_band(given["is_causal"], local_window_size), extras.pop("attend_to", None))
    devices, at = _axis(axis_name)
    for name, x in (("query", query), ("key", key)):
        if layout == "zigzag" and x.shape[1] % 2:
            raise InvalidProblem(f"{name} has {x.shape[1]} tokens a device; of layout 'zigzag' they must be even.")
    halo = _halo(band, query.shape[1], key.shape[1], devices) if (method, layout) == ("allgather", "contiguous") else None
    if extras.get("dropout") is not None or _biases(extras):  # which count all keys
        halo = None
    _refuse(method, layout, band, extras, (query.shape[2], key.shape[2], devices), halo)
    taken = {name: x for name, x in extras.items() if name in TAKEN}
    how = _shared({"scale": given["scale"], "implementation": implementation, **taken})
    if method == "ulysses":
        out, residual = _by_heads((query, key, value), (band, leaves), (axis_name, devices, at), layout, how)
    elif halo is not None:
        out, residual = _by_halo((query, key, value), (band, leaves), (axis_name, devices, at), halo, how)
    else:
        out, residual = _by_positions((query, key, value), (band, leaves), (axis_name, devices, at), layout, how)
    return (out, residual) if given["return_residual"] else out


Axis = tuple[Any, int, Any]  # its name, how many devices, this one's place
Mask = tuple[Band, tuple[Any, ...]]  # a band, and what must hold besides


def _by_positions(qkv: tuple[Any, Any, Any], mask: Mask, axis: Axis, layout: str, how: dict[str, Any]) -> tuple[Any, Any]:
    """(out, residual): a call for each chunk of queries, with all keys up to the last one that it sees."""
    (query, key, value), (band, leaves), (_, devices, at) = qkv, mask, axis
    chunks = 2 if layout == "zigzag" else 1
    both: list[Any] = [gathered(x, axis[0], devices, chunks) for x in (key, value)]
    keys, values = both
    known = [_with_keys(leaf, lambda x: in_order(x, axis[0], devices, chunks)) for leaf in leaves]
    size, shift = query.shape[1] // chunks, (key.shape[1] - query.shape[1]) * devices
    made: list[Any] = []
    dropout = how.get("dropout")
    for i in range(chunks):
        rows = slice(i * size, (i + 1) * size)
        chunk = at if i == 0 else 2 * devices - 1 - at
        if band != FULL:  # keys end where this chunk does, and its last query stands at the last of them
            end = jnp.clip((chunk + 1) * size + shift, 0, keys.shape[1]).astype(jnp.int32)
            how["used_k"] = jnp.broadcast_to(end, (query.shape[0],))
        if dropout is not None:
            origin = DeviceOrigin(heads=query.shape[2], query=chunk * size, aligned=size % GRAIN == 0)
            how["dropout"] = replace(dropout, origin=origin)
        there = _joined(band, [_of_rows(leaf, rows) for leaf in known])
        own = _changed(how, partial(_rows_of, rows=rows))
        made.append(attention_of_part(query[:, rows], keys, values, attend_to=there, **own))
    out, residual = (jnp.concatenate(parts, 1) for parts in zip(*made, strict=True))
    return out, residual


def _by_halo(qkv: tuple[Any, Any, Any], mask: Mask, axis: Axis, halo: tuple[int, int], how: dict[str, Any]) -> tuple[Any, Any]:
    """The same of contiguous shards, with the keys that a window reaches on both sides of this device's."""
    (query, key, value), (band, leaves), (name, devices, at) = qkv, mask, axis
    left, right = halo
    around = lambda x: with_halo(x, name, devices, left, right)  # noqa: E731
    k, v = (around(x.astype(jnp.float32)) for x in (key, value))  # so that gradients are summed in float32
    where = jnp.arange(k.shape[1]) - left + at * key.shape[1]
    there = (where >= 0) & (where < devices * key.shape[1])
    known = [*(_with_keys(leaf, around) for leaf in leaves), KeyPadding(there[None])]
    moved = Band(None if band.left is None else band.left + right, None if band.right is None else band.right - right)
    return attention_of_part(query, k, v, attend_to=_joined(moved, known), **how)


def _by_heads(qkv: tuple[Any, Any, Any], mask: Mask, axis: Axis, layout: str, how: dict[str, Any]) -> tuple[Any, Any]:
    """(out, residual): this device's heads of the whole. Fewer heads of keys than devices go to all that need them."""
    (name, devices, at), (query, key, value) = axis, qkv
    heads, copies = query.shape[2] // devices, max(devices // key.shape[2], 1)
    if copies > 1:  # whose gradients are summed in float32
        key, value = (jnp.repeat(x.astype(jnp.float32), copies, 2) for x in (key, value))
    q, k, v = (heads_for_tokens(x, name, devices, layout) for x in (query, key, value))
    whole = lambda x: in_own_order(in_order(x, name, devices, 1), devices, layout)  # noqa: E731
    part = lambda x: jax.lax.dynamic_slice_in_dim(x, at * heads, heads, -1)  # noqa: E731
    if how.get("sinks") is not None:
        how["sinks"] = part(how["sinks"])
    how["score"] = tuple(Alibi(part(s.slopes)) if isinstance(s, Alibi) else s for s in how["score"])
    how = _changed(
        how, lambda x: jax.lax.dynamic_slice_in_dim(x, at * heads, heads, -3) if x.ndim > 2 and x.shape[-3] > 1 else x
    )
    if how.get("dropout") is not None:
        origin = DeviceOrigin(at * heads, heads, query.shape[2] - heads, aligned=True)
        how["dropout"] = replace(how["dropout"], origin=origin)
    there = _joined(mask[0], [_with_keys(leaf, whole, whole) for leaf in mask[1]])
    made = attention_of_part(q, k, v, attend_to=there, **how)
    out, residual = (tokens_for_heads(x, name, devices, layout) for x in made)
    return out, residual


def shard_positions(tokens: int, axis_name: Any, layout: str = "contiguous") -> jax.Array:
    """The positions in the whole, int32 (tokens,), of this device's tokens; within `jax.shard_map`, for rotary embeddings."""
    devices, at = _axis(axis_name)
    return jax.lax.dynamic_slice(shard_order(tokens * devices, devices, layout), (at * tokens,), (tokens,))


def _axis(axis_name: Any) -> tuple[int, Any]:
    """(how many devices, this one's place among them)."""
    try:
        return jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    except NameError as error:
        raise InvalidProblem(f"axis_name is {axis_name!r}; it must be an axis of the jax.shard_map around the call.") from error


def _mask(band: Band, attend_to: Any) -> Mask:
    """A call's mask in normal form. Raises NotSupported for what one device cannot know of the whole."""
    if attend_to is None:
        return band, ()
    if not isinstance(attend_to, (Band, Joined)):
        raise InvalidProblem(f"attend_to is a {type(attend_to).__name__}; it must be a Band or a predicate.")
    band, terms = normal_form(False, None, attend_to & band)
    reasons = ["predicates joined by |"] if len(terms) > 1 else []
    leaves = terms[0] if terms else ()
    for leaf in leaves:
        if not isinstance(leaf, (Document, KeyPadding)):
            reasons.append(f"predicate {getattr(leaf, 'name', leaf)}, which cannot be told a part of the keys")
    if reasons:
        raise NotSupported("dot_product_attention_sharded", {"jax": reasons})
    return band, leaves


def _biases(extras: dict[str, Any]) -> list[Any]:
    """What is added to scores."""
    found = [extras.get("bias"), *(s.bias for s in extras.get("score") or () if isinstance(s, Bias))]
    return [jnp.asarray(x) for x in found if x is not None]


def _changed(how: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The same with other biases."""
    score = tuple(Bias(change(jnp.asarray(s.bias))) if isinstance(s, Bias) else s for s in how.get("score") or ())
    return {**how, "score": score, "bias": None if how.get("bias") is None else change(jnp.asarray(how["bias"]))}


def _shared(how: dict[str, Any]) -> dict[str, Any]:
    """The same, with float32 in place of what serves all queries: its gradients are summed over chunks and devices."""
    wide = lambda name, x: floating(f"{name}'s tensor", x).astype(jnp.float32)  # noqa: E731
    how = _changed(how, lambda x: x if x.ndim > 1 and x.shape[-2] > 1 else wide("bias", x))
    how["score"] = tuple(Alibi(wide("alibi", s.slopes)) if isinstance(s, Alibi) else s for s in how["score"])
    return how if how.get("sinks") is None else {**how, "sinks": floating("sinks", how["sinks"]).astype(jnp.float32)}


def _rows_of(bias: Any, rows: slice) -> Any:
    return bias[..., rows, :] if bias.ndim > 1 and bias.shape[-2] > 1 else bias


def _with_keys(leaf: Any, keys: Callable[[Any], Any], queries: Callable[[Any], Any] = lambda x: x) -> Any:
    """A predicate of what `keys` and `queries` make of this device's tokens, (batch or 1, tokens)."""
    if isinstance(leaf, KeyPadding):
        return KeyPadding(keys(jnp.asarray(leaf.keep)))
    ids, others = (jnp.atleast_2d(jnp.asarray(x)) for x in (leaf.queries, leaf.keys))
    return Document(queries(ids), keys(others))


def _of_rows(leaf: Any, rows: slice) -> Any:
    return leaf if isinstance(leaf, KeyPadding) else Document(leaf.queries[:, rows], leaf.keys)


def _joined(band: Band, leaves: list[Any]) -> Any:
    found: Any = band
    for leaf in leaves:
        found = found & leaf
    return None if found == FULL else found


def _halo(band: Band, tokens_q: int, tokens_k: int, devices: int) -> tuple[int, int] | None:
    """How many keys a window reaches to the left and to the right of a device's; None where all are gathered."""
    if tokens_q != tokens_k or band.left is None or band.right is None or min(band.left, band.right) < 0:
        return None
    return (band.left, band.right) if 2 * (band.left + band.right) < (devices - 1) * tokens_k else None


def _refuse(
    method: str,
    layout: str,
    band: Band,
    extras: dict[str, Any],
    sizes: tuple[int, int, int],
    halo: Any,
) -> None:
    reasons: list[str] = []
    if method == "allgather":
        if layout == "striped":
            raise InvalidProblem("layout is 'striped' and method 'allgather'; it must be 'ulysses'.")
        if halo is None and band != FULL and (band.right is None or band.right > 0):
            reasons.append("a window in which queries look ahead; causal ones, small ones, none, or method 'ulysses'")
    else:
        heads_q, heads_kv, devices = sizes
        if heads_q % devices or (heads_kv % devices and devices % heads_kv):
            reasons.append(
                f"{heads_q} heads of query and {heads_kv} of key over {devices} devices; they must divide each other"
            )
    if method == "ulysses" and any(x.ndim > 1 and x.shape[-2] > 1 for x in _biases(extras)):
        reasons.append("a bias with an axis of queries, of which each device has its rows; method 'allgather' does it")
    dropout = extras.get("dropout")
    if not (dropout is None or isinstance(dropout, Dropout)):
        raise no_dropout(dropout)
    if dropout is not None and dropout.origin is not None:
        reasons.append("dropout with an origin, which devices give their calls themselves")
    for name in sorted(set(extras) - TAKEN):
        if extras[name] is not None:
            reasons.append(f"{name}, whose positions or tensors are the whole's")
    for modifier in extras.get("score") or ():
        if not isinstance(modifier, (Softcap, Alibi, Bias)):
            reasons.append(f"score modifier {getattr(modifier, 'name', modifier)}, whose use of positions is not known")
        elif isinstance(modifier, Alibi) and method == "allgather" and (band == FULL or (band.right or 0) > 0):
            reasons.append("alibi without causal order; method 'ulysses' does it")
    if reasons:
        raise NotSupported("dot_product_attention_sharded", {"jax": reasons})
