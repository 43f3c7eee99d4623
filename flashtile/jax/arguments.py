"""What callers hand over, as the functions here take it: numbers, arrays, lengths and windows."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from flashtile.errors import InvalidProblem, check_names
from flashtile.jax.run import NAMES
from flashtile.problem.dtype import DType
from flashtile.problem.mask import Band, make_mask
from flashtile.problem.score import TensorSpec

FLOATS = tuple(d.value for d in DType)

FLAX = {"broadcast_dropout", "dropout_rate", "dropout_rng", "mask", "bias", "deterministic"}
FOR_FLAX = "the attention_fn of flax's modules must be flashtile.jax.flax.dot_product_attention"
# What flashtile.attention and other libraries call arguments, and how it is said here.
OTHERS = {
    "causal": "is_causal", "window": "local_window_size", "window_size": "local_window_size",
    "sliding_window": "local_window_size", "sink": "sinks", "return_lse": "return_residual",
    "seqused_q": "query_seq_lengths", "seqused_k": "key_value_seq_lengths", "cu_seqlens": "dot_product_attention_varlen",
    "cu_seqlens_q": "dot_product_attention_varlen", "segment_ids": "attend_to=Document(ids)",
    "attn_mask": "mask, True where a query sees a key, or bias, which is added", "bias": "score=(Bias(bias),)",
    "mask": "attend_to, of masks as objects", "score_mod": "score, a tuple of modifiers",
    "alibi_slopes": "score=(Alibi(slopes),)",
    "dropout_p": "dropout=Dropout(p, key)", "sm_scale": "scale", "softmax_scale": "scale", "logits_soft_cap": "softcap",
    "options": "precision, backward or deterministic",
}  # fmt: skip


def check_options(function: str, extras: Any, known: Collection[str]) -> None:
    """Raise TypeError for an option that the function does not take; of flax's it says where they are taken."""
    for name in extras:
        if name not in known and name in OTHERS:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}; did you mean {OTHERS[name]}?")
    try:
        check_names(function, extras, known)
    except TypeError as error:
        raise TypeError(f"{error}; {FOR_FLAX}" if FLAX & extras.keys() else str(error)) from None


def number(name: str, given: Any, remedy: str = "pass a Python number, or name the argument in static_argnames") -> Any:
    """A number that is known here as Python's own: also one of NumPy, or an array of JAX or NumPy without axes.

    Anything else as it is. Raises InvalidProblem for what a program is traced for, whose value nobody knows.
    """
    if isinstance(given, Tracer):
        raise InvalidProblem(f"{name} is traced, {given.aval.str_short()}; it must be known when a program is made: {remedy}.")
    if isinstance(given, (np.generic, np.ndarray, jax.Array)) and not given.shape:
        return given.item()
    return given


def numbers(**given: Any) -> dict[str, Any]:
    """Options by name, each as `number` takes it."""
    return {name: number(name, value) for name, value in given.items()}


def scaled(name: str, given: Any, x: Any) -> tuple[Any, Any]:
    """(scale, x): a scale whose value nobody knows yet, such as a learned one, multiplies the array, and is then 1."""
    if getattr(given, "shape", ()):
        raise InvalidProblem(f"{name} has shape {given.shape}; it must be one number: scale the array itself by several.")
    if not isinstance(given, Tracer):
        return number(name, given), x
    return 1.0, (x.astype(jnp.float32) * given.astype(jnp.float32)).astype(x.dtype)


def array(name: str, given: Any) -> Any:
    """An array of JAX; also of NumPy's, and of lists of numbers."""
    if not isinstance(given, (jax.Array, np.ndarray, list, tuple)):
        raise InvalidProblem(f"{name} is a {type(given).__name__}; it must be a JAX array.")
    return converted(name, given)


def converted(name: str, given: Any) -> Any:
    """An array of JAX, of whatever it makes one of. Raises InvalidProblem for the rest."""
    try:
        return jnp.asarray(given)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidProblem(f"{name} is {given!r}; it must be a JAX array.") from error


def floating(name: str, given: Any) -> Any:
    """An array of one of the dtypes that kernels read; float64, which jax_enable_x64 makes of Python's floats, as float32."""
    given = array(name, given)
    if given.dtype == jnp.float64:
        return given.astype(jnp.float32)
    if NAMES.get(given.dtype) not in FLOATS:
        raise InvalidProblem(f"{name} is {given.dtype}; it must be float16, bfloat16 or float32.")
    return given


def narrowed(given: Any) -> Any:
    """A predicate's tensor without the 64 bits that jax_enable_x64 gives integers and floats; of ids the lower half counts."""
    narrow = {jnp.dtype(jnp.int64): jnp.int32, jnp.dtype(jnp.float64): jnp.float32}
    return given.astype(narrow.get(given.dtype, given.dtype))


def operand(name: str, given: Any) -> Any:
    """query, key or value, with axes of one element in front where jax.nn adds some."""
    if given is None:
        raise InvalidProblem(f"{name} is None; it must be an array.")
    given = converted(name, given)
    if not 1 <= given.ndim <= 4:
        raise InvalidProblem(f"{name} has shape {given.shape}; it must be (B, T, N, H), (T, N, H), (N, H) or (H,).")
    return given.reshape((1,) * (4 - given.ndim) + given.shape)


def check_operands(q: Any, k: Any, v: Any) -> None:
    """Raise InvalidProblem for arrays (B, T, N, H), (B, S, K, H) and (B, S, K, V) that do not go together."""
    for name, given in (("query", q), ("key", k), ("value", v)):
        if given.dtype == jnp.float64:
            raise InvalidProblem(f"{name} is float64; it must be float16, bfloat16 or float32: {name}.astype(jnp.float32).")
        if NAMES.get(given.dtype) not in FLOATS:
            raise InvalidProblem(f"{name} is {given.dtype}; it must be float16, bfloat16 or float32.")
        if given.dtype != q.dtype:
            raise InvalidProblem(f"{name} is {given.dtype} and query is {q.dtype}; query, key and value must have one dtype.")
        if given.shape[0] != q.shape[0]:
            raise InvalidProblem(f"{name} has batch {given.shape[0]} and query has {q.shape[0]}; they must be equal.")
    if k.shape[3] != q.shape[3]:
        raise InvalidProblem(f"key has head_dim {k.shape[3]} and query has {q.shape[3]}; they must be equal.")
    for axis, name in ((1, "seqlen"), (2, "heads")):
        if v.shape[axis] != k.shape[axis]:
            raise InvalidProblem(f"value has {name} {v.shape[axis]} and key has {k.shape[axis]}; they must be equal.")


def lengths_of(name: str, given: Any, size: int | None = None) -> Any:
    """int32 (size,), or of at least one number where the size is not known; from integers of any kind, also as a list."""
    if given is None:
        return None
    given = integers(name, given)
    fits = given.shape == (size,) if size is not None else given.ndim == 1 and given.shape[0] > 0
    if given.dtype != jnp.int32 or not fits:
        wanted = "of one axis, not empty" if size is None else f"of shape ({size},)"
        raise InvalidProblem(f"{name} is {given.dtype} of shape {given.shape}; it must be int32, {wanted}.")
    return given


def integers(name: str, given: Any) -> Any:
    """An array, of int32 where it has integers of any kind: jax_enable_x64 makes int64 of lists."""
    return within_32_bits(array(name, within_32_bits(given)))


def within_32_bits(given: Any) -> Any:
    """Integers of JAX or NumPy as int32, larger ones as the largest: JAX by itself cuts off upper bits. Others as they are."""
    if not isinstance(given, (np.ndarray, jax.Array)) or not jnp.issubdtype(given.dtype, jnp.integer):
        return given
    own, narrow = np.iinfo(given.dtype), np.iinfo(np.int32)
    return given.clip(max(int(own.min), int(narrow.min)), min(int(own.max), int(narrow.max))).astype(np.int32)


def described(given: Any) -> TensorSpec:
    return TensorSpec(tuple(given.shape), NAMES[given.dtype])


def wide(name: str, given: Any) -> Any:
    """The array with four axes."""
    if given.ndim > 4:
        raise InvalidProblem(f"{name} has shape {given.shape}; it must broadcast to (B, N, T, S).")
    return given.reshape((1,) * (4 - given.ndim) + given.shape)


def window_pair(window: Any) -> Any:
    """local_window_size as a pair, its numbers Python's; what is neither a number nor a pair as it is."""
    window = number("local_window_size", window)
    if isinstance(window, int) and not isinstance(window, bool):
        return window, window
    return tuple(number("local_window_size", n) for n in window) if isinstance(window, (tuple, list)) else window


def make_band(is_causal: Any, window: Any) -> Band:
    """What the two mean together. Raises InvalidProblem for negative distances."""
    is_causal = number("is_causal", is_causal)
    if not isinstance(is_causal, bool):
        raise InvalidProblem(f"is_causal is {is_causal!r}; it must be True or False.")
    return make_mask(is_causal, window_pair(window), None)


def shifted_band(is_causal: Any, window: Any) -> Band:
    """The same where a negative distance moves the window, as in jax.nn: (-1, 2) is the two keys behind the query's own."""
    pair = window_pair(window)
    if not (isinstance(pair, tuple) and len(pair) == 2 and any(isinstance(n, int) and n < 0 for n in pair)):
        return make_band(is_causal, pair)
    band = make_band(is_causal, None) & Band(*pair)
    if band.left is not None and band.right is not None and band.left + band.right < 0:
        raise InvalidProblem(
            f"local_window_size is {pair} and is_causal {is_causal}, which hide every key; -1 moves the window's end by a key, "
            "as in jax.nn: an end that is unbounded must be None."
        )
    return band
