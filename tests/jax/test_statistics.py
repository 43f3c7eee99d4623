"""Largest logits, entropies and masses in JAX, against their definitions in float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashtile import Alibi, Document, Dropout, InvalidProblem, Mass, NotSupported
from flashtile.jax import dot_product_attention, dot_product_attention_varlen

ALL = ("lse", "max_logit", "entropy", Mass(last=3))


def normal(*shape: int, seed: int = 0) -> Any:
    return jax.random.normal(jax.random.key(seed), shape)


def inputs() -> tuple[Any, Any, Any]:
    return 3 * normal(2, 37, 4, 16), normal(2, 150, 2, 16, seed=1), normal(2, 150, 2, 16, seed=2)


def scores_of(q: Any, k: Any, change: Any = None, keep: Any = True) -> Any:
    """(batch, heads, queries, keys), -inf where hidden."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, jnp.repeat(k, q.shape[2] // k.shape[2], 2), precision="highest")
    scores = scores / np.sqrt(q.shape[-1])
    return jnp.where(keep, scores if change is None else change(scores), -jnp.inf)


def defined(scores: Any, sinks: Any = None, last: int = 3) -> tuple[Any, ...]:
    whole = scores
    if sinks is not None:
        whole = jnp.concatenate((scores, jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))), -1)
    lse = jax.nn.logsumexp(whole, -1)
    p = jnp.exp(whole - jnp.where(lse == -jnp.inf, 0.0, lse)[..., None])
    entropy = -jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1.0)), 0.0).sum(-1)
    return lse, scores.max((-1, -2)), entropy, p[..., -last:, : scores.shape[-1]].sum(-2)


def close(found: Any, truth: Any, most: float = 2e-5) -> None:
    for one, exact in zip(found, truth, strict=True):
        assert one.shape == exact.shape
        np.testing.assert_allclose(one, exact, atol=most, rtol=most)


AHEAD = jnp.arange(150)[None] - jnp.arange(37)[:, None]  # keys ahead of queries, both counted from the first
IDS = tuple(jnp.arange(n)[None].repeat(2, 0) // 9 for n in (37, 150))
# arguments; what becomes of scores, which count
GIVEN: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "plain": ({}, None, True), "causal": (dict(is_causal=True), None, AHEAD <= 0),
    "bottom-right": (dict(is_causal=True, alignment="bottom-right"), None, AHEAD <= 113),
    "softcap": (dict(softcap=2.0), lambda s: 2.0 * jnp.tanh(s / 2.0), True),
    "alibi": (dict(score=(Alibi(jnp.array([0.1, 0.2, 0.5, 1.0])),)),
              lambda s: s - jnp.array([0.1, 0.2, 0.5, 1.0])[:, None, None] * jnp.abs(AHEAD - 113), True),
    "sinks": (dict(sinks=normal(4, seed=5)), None, True), "dropout": (dict(dropout=Dropout(0.4, 3)), None, True),
    "large sinks": (dict(sinks=jnp.array([30.0, -3.0, 12.0, 8.0])), None, True),
    "bias": (dict(bias=normal(1, 4, 37, 150, seed=6)), lambda s: s + normal(1, 4, 37, 150, seed=6), True),
    "document": (dict(attend_to=Document(*IDS)), None, (IDS[0][:, None, :, None] == IDS[1][:, None, None, :])),
    "blind": (dict(attend_to=Document(IDS[0] + 30, IDS[1])), None, False),
}  # fmt: skip


@pytest.mark.parametrize("name", GIVEN)
def test_as_defined(name: str) -> None:
    given, change, keep = GIVEN[name]
    sinks, (q, k, v) = given.get("sinks"), inputs()
    if name == "blind":  # documents that no key is of
        keep = IDS[0][:, None, :, None] + 30 == IDS[1][:, None, None, :]
    out, found = dot_product_attention(q, k, v, **given, returns=ALL)
    np.testing.assert_array_equal(out, dot_product_attention(q, k, v, **given))
    close(found, defined(scores_of(q, k, change, keep), sinks))
    weight = normal(2, 4, 37, seed=9)

    def ours(q: Any, k: Any, sinks: Any) -> Any:
        some = given if sinks is None else {**given, "sinks": sinks}
        return (dot_product_attention(q, k, v, **some, returns="entropy")[1].entropy * weight).sum()

    def theirs(q: Any, k: Any, sinks: Any) -> Any:
        return (defined(scores_of(q, k, change, keep), sinks)[2] * weight).sum()

    which = (0, 1) if sinks is None else (0, 1, 2)
    if name != "blind":  # whose truth is NaN, by the definition's logarithm
        close(jax.jit(jax.grad(ours, which))(q, k, sinks), jax.grad(theirs, which)(q, k, sinks), 1e-4)


def test_gradients_of_modifiers_tensors() -> None:
    q, k, v = inputs()
    bias, weight = normal(1, 4, 37, 150, seed=6), normal(2, 4, 37, seed=9)
    ours = lambda b: (dot_product_attention(q, k, v, b, returns="entropy")[1].entropy * weight).sum()  # noqa: E731
    theirs = lambda b: (defined(scores_of(q, k, lambda s: s + b))[2] * weight).sum()  # noqa: E731
    if jax.default_backend() != "cpu":  # kernels have none, and say so
        with pytest.raises(NotSupported, match="the entropy's gradient by bias's tensor is not implemented"):
            jax.grad(ours)(bias)
        return
    close([jax.grad(ours)(bias)], [jax.grad(theirs)(bias)], 1e-4)


def test_varlen_is_each_item() -> None:
    q, k, v = (x[0] for x in inputs())
    q = q.at[9].multiply(5.0)  # the largest scores are those of an item's first query
    cu_q, cu_k = jnp.array([0, 9, 9, 30]), jnp.array([0, 20, 21, 140])  # the second item has no queries, and tokens are left
    out, found = dot_product_attention_varlen(q, k, v, cu_q, cu_k, is_causal=True, returns=ALL)
    assert (out.shape, found.max_logit.shape, found.entropy.shape, found.mass.shape) == (q.shape, (3, 4), (4, 37), (4, 150))
    for i, ((a, c), (b, d)) in enumerate(pairwise(zip(cu_q.tolist(), cu_k.tolist(), strict=True))):
        if a == b:
            assert (found.max_logit[i] == -jnp.inf).all()
            assert not found.mass[:, c:d].any()
            continue
        some = q[a:b][None], k[c:d][None], v[c:d][None]
        _, alone = dot_product_attention(*some, is_causal=True, alignment="bottom-right", returns=ALL)
        close((found.max_logit[i], found.entropy[:, a:b], found.mass[:, c:d]),
              (alone.max_logit[0], alone.entropy[0], alone.mass[0]))  # fmt: skip
    assert not found.mass[:, 140:].any()
    assert not found.entropy[:, 30:].any()


@pytest.mark.parametrize("alignment", ["top-left", "bottom-right"])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_of_items(causal: bool, alignment: str) -> None:
    q, k, v = inputs()
    q = q.at[..., 0].set(-20.0)
    k = k.at[..., 0].set(20.0)  # no score of a row that counts is above 0
    lengths = dict(query_seq_lengths=jnp.array([30, 37]), key_value_seq_lengths=jnp.array([150, 11]))
    how = dict(is_causal=causal, alignment=alignment)
    asked = ("lse", "max_logit", "entropy") if causal and alignment == "top-left" else ALL
    _, found = dot_product_attention(q, k, v, **lengths, **how, returns=asked)
    for i, (n, m) in enumerate(((30, 150), (37, 11))):
        _, alone = dot_product_attention(q[i : i + 1, :n], k[i : i + 1, :m], v[i : i + 1, :m], **how, returns=asked)
        close((found.lse[i, :, :n], found.max_logit[i], found.entropy[i, :, :n]),
              (alone.lse[0], alone.max_logit[0], alone.entropy[0]))  # fmt: skip
        assert not found.entropy[i, :, n:].any()
        if alone.mass is not None:
            close([found.mass[i, :, :m]], [alone.mass[0]])
            assert not found.mass[i, :, m:].any()


def test_transforms() -> None:
    q, k, v = inputs()
    entropy = lambda q: dot_product_attention(q, k, v, is_causal=True, returns="entropy")[1].entropy  # noqa: E731
    whole = entropy(q)
    many = jnp.stack((q, 2 * q))
    close([jax.vmap(entropy)(many)[1]], [entropy(2 * q)])
    each = jax.vmap(jax.grad(lambda q: jnp.square(entropy(q)).sum()))(many)
    close([each[0]], [jax.grad(lambda q: jnp.square(entropy(q)).sum())(q)])
    alone = dot_product_attention(q[0], k[0], v[0], is_causal=True, returns=ALL)[1]  # without a batch
    close([alone.entropy], [whole[0]])
    assert (alone.max_logit.shape, alone.mass.shape) == ((4,), (4, 150))
    both = jax.grad(lambda q: dot_product_attention(q, k, v, returns=("lse", Mass()))[1].lse.sum())(q)
    close([both], [jax.grad(lambda q: dot_product_attention(q, k, v, return_residual=True)[1].sum())(q)])


def test_what_is_refused() -> None:
    q, k, v = inputs()
    entropy = lambda q: dot_product_attention(q, k, v, returns="entropy")[1].entropy.sum()  # noqa: E731
    with pytest.raises(NotSupported, match="forward mode of the entropy"):
        jax.jvp(entropy, (q,), (q,))
    with pytest.raises(NotSupported, match="second derivatives of the entropy"):
        jax.grad(lambda q: jax.grad(entropy)(q).sum())(q)
    with pytest.raises(NotSupported, match="forward mode of the entropy"):
        jax.jvp(jax.grad(entropy), (q,), (q,))
    with pytest.raises(NotSupported, match="alignment='bottom-right'"):
        dot_product_attention(q, k, v, is_causal=True, query_seq_lengths=jnp.array([3, 4]), returns=Mass())
    with pytest.raises(InvalidProblem, match="return_residual is True besides returns"):
        dot_product_attention(q, k, v, return_residual=True, returns="lse")
    with pytest.raises(InvalidProblem, match="returns has 'entropie'"):
        dot_product_attention(q, k, v, returns="entropie")
