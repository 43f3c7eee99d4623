"""What callers hand over: numbers of any library, lists, 64 bits, few axes, moved windows, as jax.nn takes them; debugging."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashtile import Alibi, Document, InvalidProblem, Prefix
from flashtile.jax import (
    cross_entropy,
    dot_product_attention,
    dot_product_attention_varlen,
    layer_norm,
    mha,
    rms_norm,
    rotary,
    softmax,
)

Q, K, V = (jax.random.normal(jax.random.key(i), (2, 8, h, 16)) for i, h in enumerate((4, 2, 2)))
ITEMS = jnp.array([0, 3, 8], jnp.int32)
X, LABELS = jax.random.normal(jax.random.key(3), (4, 8)), jnp.array([1, 0, 7, 3], jnp.int32)
ANGLES = jnp.zeros((9, 8))
KINDS: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda n: np.asarray(n)[()], "0-d": np.asarray, "jax": jnp.asarray, "narrow": lambda n: jnp.asarray(n).astype(
        jnp.bfloat16 if isinstance(n, float) else jnp.asarray(n).dtype
    ),
}  # fmt: skip
CALLS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "scale": (lambda n: dot_product_attention(Q, K, V, scale=n), 0.5),
    "is_causal": (lambda n: dot_product_attention(Q, K, V, is_causal=n), True),
    "return_residual": (lambda n: dot_product_attention(Q, K, V, return_residual=n), True),
    "local_window_size": (lambda n: dot_product_attention(Q, K, V, local_window_size=n), 2),
    "left of local_window_size": (lambda n: dot_product_attention(Q, K, V, local_window_size=(n, None)), 2),
    "softcap": (lambda n: dot_product_attention(Q, K, V, softcap=n), 2.0),
    "deterministic": (lambda n: dot_product_attention(Q, K, V, deterministic=n), True),
    "sm_scale": (lambda n: mha(Q, K, V, n), 0.5),
    "max_seqlen_q": (lambda n: dot_product_attention_varlen(Q[0], K[0], V[0], ITEMS, max_seqlen_q=n), 5),
    "scale of varlen": (lambda n: dot_product_attention_varlen(Q[0], K[0], V[0], ITEMS, scale=n), 0.5),
    "eps": (lambda n: layer_norm(X, eps=n), 0.5),
    "prenorm": (lambda n: rms_norm(X, residual=X, prenorm=n), True),
    "label_smoothing": (lambda n: cross_entropy(X, LABELS, label_smoothing=n), 0.5),
    "z_loss": (lambda n: cross_entropy(X, LABELS, z_loss=n), 0.5),
    "logit_scale": (lambda n: cross_entropy(X, LABELS, logit_scale=n), 0.5),
    "softcap of logits": (lambda n: cross_entropy(X, LABELS, softcap=n), 0.5),
    "ignore_index": (lambda n: cross_entropy(X, LABELS, ignore_index=n), 7),
    "return_lse": (lambda n: cross_entropy(X, LABELS, return_lse=n), True),
    "offset": (lambda n: rotary(Q, K, ANGLES, ANGLES, offset=n), 1),
    "interleaved": (lambda n: rotary(Q, K, ANGLES, ANGLES, interleaved=n), True),
    "scale of softmax": (lambda n: softmax(X, scale=n), 0.5),
    "causal of softmax": (lambda n: softmax(X, causal=n), True),
    "masked_score": (lambda n: softmax(X, X > 0, masked_score=n), -8.0),
}
SCALES = {"scale", "sm_scale", "scale of varlen", "logit_scale", "scale of softmax"}  # which multiply an array


def same(got: Any, want: Any, atol: float = 0.0) -> None:
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=atol)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_a_number_is_taken_whoever_made_it(name: str, kind: str) -> None:
    call, value = CALLS[name]
    same(call(KINDS[kind](value)), call(value))


@pytest.mark.parametrize("name", CALLS)
def test_a_number_that_is_traced_works_or_says_what_to_do(name: str) -> None:
    call, value = CALLS[name]
    if name in SCALES:
        same(jax.jit(call)(value), call(value), 1e-6)
        return
    with pytest.raises(InvalidProblem, match=r"is traced, .*; it must be known when a program is made"):
        jax.jit(call)(value)


def test_what_is_traced_is_named() -> None:
    with pytest.raises(InvalidProblem, match=r"^softcap is traced, float32\[\]; .* Python number, or .* static_argnames"):
        jax.jit(CALLS["softcap"][0])(2.0)
    with pytest.raises(InvalidProblem, match=r"^label_smoothing is traced"):
        jax.grad(CALLS["label_smoothing"][0])(0.1)
    for call in (CALLS["scale"][0], jax.jit(CALLS["scale"][0])):
        with pytest.raises(InvalidProblem, match=r"^scale has shape \(4,\); it must be one number"):
            call(jnp.ones(4))


@pytest.mark.parametrize("name", sorted(SCALES))
def test_a_learned_scale_has_its_gradient(name: str) -> None:
    call, _ = CALLS[name]
    weigh = lambda n: (jnp.asarray(call(n)) ** 2).sum()  # noqa: E731
    step = 1e-2
    near = (float(weigh(0.5 + step)) - float(weigh(0.5 - step))) / (2 * step)
    assert abs(float(jax.grad(weigh)(0.5)) - near) < 2e-3 * max(1.0, abs(near))


@pytest.mark.parametrize(
    "lengths",
    [
        [2, 7], (2, 7), np.array([2, 7]), np.array([2, 7], np.uint8), jnp.array([2, 7], jnp.int16),
        jnp.array([2, 7], jnp.uint32), np.array([2, 2**32 + 7]),
    ],
    ids=lambda n: f"{type(n).__name__}-{getattr(n, 'dtype', '')}",
)  # fmt: skip
def test_lengths_of_any_kind(lengths: Any) -> None:
    want_k = jnp.array([2, 8 if np.asarray(lengths)[1] > 8 else 7], jnp.int32)
    got = dot_product_attention(Q, K, V, query_seq_lengths=lengths, key_value_seq_lengths=lengths, is_causal=True)
    want = dot_product_attention(Q, K, V, query_seq_lengths=want_k, key_value_seq_lengths=want_k, is_causal=True)
    same(got, want)
    with jax.enable_x64(True):
        got = dot_product_attention(Q, K, V, query_seq_lengths=lengths, key_value_seq_lengths=lengths, is_causal=True)
    same(got, want)


def test_lists_where_arrays_are_expected() -> None:
    lists()
    with jax.enable_x64(True):
        lists()


def lists() -> None:
    """Under jax_enable_x64 they become int64 and float64."""
    same(dot_product_attention(Q, K, V, sinks=[0.5] * 4), dot_product_attention(Q, K, V, sinks=jnp.full(4, 0.5)))
    same(
        dot_product_attention_varlen(Q[0], K[0], V[0], [0, 3, 8], np.array([0, 3, 8])),
        dot_product_attention_varlen(Q[0], K[0], V[0], ITEMS),
    )


def test_64_bits() -> None:
    """What jax_enable_x64 makes of Python's floats and of `arange`, beside float32 arrays."""
    slopes, sinks = np.linspace(0.1, 0.4, 4), np.linspace(-1, 1, 4)
    bias, ids, lengths = np.random.default_rng(0).standard_normal((1, 4, 8, 8)), np.arange(8) // 3, np.array([3, 8])

    def call(given: Callable[[Any], Any]) -> Any:
        def loss(bias: Any, slopes: Any, sinks: Any) -> Any:
            masks = Document(given(ids)) | Prefix(given(lengths))
            out = dot_product_attention(
                Q, K, V, bias, score=(Alibi(slopes),), sinks=sinks, attend_to=masks, key_value_seq_lengths=given(lengths)
            )
            return (out**2).sum()

        return jax.value_and_grad(loss, (0, 1, 2))(*map(given, (bias, slopes, sinks)))

    want = call(lambda x: jnp.asarray(x, jnp.float32 if x.dtype == np.float64 else jnp.int32))
    with jax.enable_x64(True):
        got = call(jnp.asarray)
        assert {x.dtype for x in got[1]} == {jnp.dtype(jnp.float64)}
        same(got, want, 1e-5)
        weight = jnp.asarray(np.linspace(0, 1, 8))
        same(layer_norm(X, weight, weight), layer_norm(X, weight.astype(jnp.float32), weight.astype(jnp.float32)))
        tables = jnp.asarray(np.cos(np.arange(72).reshape(9, 8))), jnp.asarray(np.sin(np.arange(72).reshape(9, 8)))
        positions = jnp.broadcast_to(jnp.arange(8), (2, 8))
        same(rotary(Q, K, *tables, positions=positions), rotary(Q, K, *(t.astype(jnp.float32) for t in tables)), 1e-6)
        same(cross_entropy(X, jnp.arange(4)), cross_entropy(X, jnp.arange(4, dtype=jnp.int32)))
        for name, given in (("query", (Q.astype(float), K, V)), ("query", (Q.astype(float), K.astype(float), V.astype(float)))):
            with pytest.raises(InvalidProblem, match=rf"{name} is float64; .*: {name}\.astype\(jnp\.float32\)"):
                dot_product_attention(*given)


def test_a_label_beyond_32_bits_is_no_class() -> None:
    """JAX by itself would cut off its upper half, and count it as class 0."""
    assert jnp.isnan(cross_entropy(X, np.array([0, 1, 2, 2**32])))
    assert jnp.isnan(rotary(Q, None, ANGLES, ANGLES, positions=np.full((2, 8), 2**32))).any()


WINDOWS: list[Any] = [(-1, 2), (2, -1), (-3, 5), (6, -4), (-1, 1), (3, 0), 0, np.int64(2), [1, 2]]


@pytest.mark.parametrize("seqlen_k", [8, 5, 12])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows_are_those_of_jax_nn(window: Any, seqlen_k: int) -> None:
    """Rows that see a key: jax.nn gives the others the mean of all values, and here they are 0."""
    k, v = (jnp.pad(x, [(0, 0), (0, 4), (0, 0), (0, 0)], mode="reflect")[:, :seqlen_k] for x in (K, V))
    left, right = (int(window),) * 2 if np.ndim(window) == 0 else window
    for causal in (False, True):
        if causal and left < 0:
            continue
        i, j = np.arange(8)[:, None], np.arange(seqlen_k)[None]
        seen = (j >= i - left) & (j <= i + right) & ((j <= i) | (not causal))
        got = dot_product_attention(Q, k, v, local_window_size=window, is_causal=causal)
        theirs = jax.nn.dot_product_attention(Q, k, v, local_window_size=(left, right), is_causal=causal)
        same(got, jnp.where(seen.any(1)[:, None, None], theirs, 0.0), 1e-5)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_few_axes_are_taken_as_in_jax_nn(axes: int) -> None:
    given = [jax.random.normal(jax.random.key(i), (5, 3, 8)[3 - axes :]) for i in range(3)]
    out, lse = dot_product_attention(*given, return_residual=True)
    theirs, residual = jax.nn.dot_product_attention(*given, return_residual=True)
    assert out.shape == theirs.shape
    assert lse.shape == residual.shape
    same((out, lse), (theirs, residual), 1e-5)
    narrow = dot_product_attention(*given[:2], given[2][..., :4])
    assert narrow.shape == (*out.shape[:-1], 4)


def test_axes_may_be_missing_in_some() -> None:
    q, k, v = Q[:1], K[0], V[0]
    same(dot_product_attention(q, k, v), dot_product_attention(q, k[None], v[None]))
    assert dot_product_attention(Q[0], K[:1], V[:1]).shape == Q[0].shape


@pytest.mark.parametrize("check", [jax.debug_infs, jax.debug_nans])
def test_nothing_that_nobody_asked_for_is_searched_by_jaxs_checks(check: Any) -> None:
    none = jnp.array([0, 5], jnp.int32)
    hidden = X.at[1].set(-jnp.inf if check is jax.debug_infs else jnp.nan)
    ignored = jnp.array([0, -100, 2, 3], jnp.int32)
    want = dot_product_attention(Q, K, V, key_value_seq_lengths=none)
    gradient = jax.grad(lambda q: (dot_product_attention(q, K, V, key_value_seq_lengths=none) ** 2).sum())
    items = jnp.array([0, 0, 8], jnp.int32), jnp.array([0, 8, 8], jnp.int32)
    slopes, loss = gradient(Q), cross_entropy(hidden, ignored)
    with check(True):
        same(dot_product_attention(Q, K, V, key_value_seq_lengths=none), want)
        same(gradient(Q), slopes)
        same(
            dot_product_attention(Q, K[:, :3], V[:, :3], is_causal=True, alignment="bottom-right")[:, 0], jnp.zeros((2, 4, 16))
        )
        assert not dot_product_attention_varlen(Q[0], K[0], V[0], *items).any()
        same(cross_entropy(hidden, ignored), loss)
    assert (dot_product_attention(Q, K, V, key_value_seq_lengths=none, return_residual=True)[1][0] == -jnp.inf).all()


def test_a_bias_of_minus_infinity_over_a_row_gives_0_and_no_nan() -> None:
    """jax.nn gives NaN there, in out and in every gradient."""
    bias = jnp.zeros((1, 1, 8, 8)).at[..., 5, :].set(-jnp.inf)
    out, lse = dot_product_attention(Q, K, V, bias=bias, return_residual=True)
    assert (out[:, 5] == 0).all()
    assert (lse[:, 5] == -jnp.inf).all()
    gradients = jax.grad(lambda *given: (dot_product_attention(*given[:3], bias=given[3]) ** 2).sum(), (0, 1, 2, 3))(
        Q, K, V, bias
    )
    assert all(jnp.isfinite(gradient).all() for gradient in gradients)
    assert (gradients[0][:, 5] == 0).all()
