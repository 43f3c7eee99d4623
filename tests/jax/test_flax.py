"""`attention_fn` of flax's modules: linen's and nnx's, against flax's own attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flashtile.jax
from flashtile import InvalidProblem, NotSupported
from flashtile.jax.dropout import keep, seed_words
from flashtile.jax.flax import dot_product_attention
from flashtile.problem.dropout import Dropout
from tests.jax.quadratic import attention

RATE, KEY = 0.4, jax.random.key(3)
THEIRS = {"linen": nn.dot_product_attention, "nnx": nnx.dot_product_attention}


def normal(*shape: int, seed: int = 0) -> Any:
    return jax.random.normal(jax.random.key(seed), shape)


def close(got: Any, want: Any) -> None:
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5 * max(1.0, float(jnp.abs(theirs).max())))


def gradients(function: Callable[..., Any], *given: Any) -> Any:
    return jax.value_and_grad(lambda *x: (function(*x) ** 2).sum(), tuple(range(len(given))))(*given)


CAUSAL = nn.make_causal_mask(jnp.ones((2, 9)))  # float32, as flax makes masks
MASKS: dict[str, tuple[tuple[int, ...], Any]] = {
    "none": ((2,), None), "causal": ((2,), CAUSAL), "bool": ((2,), CAUSAL > 0), "no batch": ((), CAUSAL[0]),
    "two axes": ((2, 3), jnp.broadcast_to(CAUSAL[:, None], (2, 3, 1, 9, 9))), "one of two": ((2, 3), CAUSAL[:, None]),
    "rows": ((2, 3), CAUSAL[0, 0]), "heads": ((2,), jnp.broadcast_to(CAUSAL, (2, 4, 9, 9))),
}  # fmt: skip


@pytest.mark.parametrize("theirs", THEIRS)
@pytest.mark.parametrize("name", MASKS)
def test_masks_and_any_batch_axes(name: str, theirs: str) -> None:
    lead, mask = MASKS[name]
    if theirs == "nnx" and (len(lead) == 2 or name == "rows"):
        pytest.skip("nnx hands these to jax.nn, which wants four axes of one batch")
    given = [normal(*lead, 9, 4, 8, seed=i) for i in range(3)]
    close(
        gradients(lambda *x: dot_product_attention(*x, mask=mask), *given),
        gradients(lambda *x: THEIRS[theirs](*x, mask=mask), *given),
    )


@pytest.mark.parametrize("shape", [(2, 3, 4, 9, 9), (2, 1, 1, 9, 9), (1, 3, 4, 1, 9), (4, 9, 9), (9, 9)], ids=str)
def test_bias_and_its_gradient(shape: tuple[int, ...]) -> None:
    given = [*(normal(2, 3, 9, 4, 8, seed=i) for i in range(3)), normal(*shape, seed=3)]
    close(gradients(dot_product_attention, *given), gradients(nn.dot_product_attention, *given))


@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout_is_the_one_of_its_key(broadcast: bool) -> None:
    given = [normal(2, 3, 9, 4, 8, seed=i) for i in range(3)]
    index = (jnp.arange(n, dtype=jnp.int32).reshape(-1, *(1,) * (3 - a)) for a, n in enumerate((6, 4, 9, 9)))
    kept = keep(RATE, *index, 4, seed_words(Dropout(RATE, KEY)))
    assert abs(float(kept.mean()) - (1 - RATE)) < 0.03

    def plain(*x: Any) -> Any:
        return attention(*(a.reshape(6, 9, 4, 8) for a in x), keep=kept, p=RATE)[0].reshape(2, 3, 9, 4, 8)

    def ours(*x: Any) -> Any:
        return dot_product_attention(*x, dropout_rng=KEY, dropout_rate=RATE, broadcast_dropout=broadcast)

    close(gradients(ours, *given), gradients(plain, *given))
    close(
        dot_product_attention(*given, dropout_rng=KEY, dropout_rate=RATE, deterministic=True), nn.dot_product_attention(*given)
    )


def test_the_mean_over_keys_is_attention_without_dropout() -> None:
    given = [normal(1, 9, 2, 8, seed=i) for i in range(3)]
    keys = jax.random.split(KEY, 4000)
    made = jax.lax.map(lambda key: dot_product_attention(*given, dropout_rng=key, dropout_rate=RATE), keys)
    theirs = jax.lax.map(lambda key: nn.dot_product_attention(*given, dropout_rng=key, dropout_rate=RATE), keys)
    exact = nn.dot_product_attention(*given)
    spread = theirs.std(0)
    assert (jnp.abs(made.mean(0) - exact) < 5 * spread / 4000**0.5).all()
    np.testing.assert_allclose(made.std(0), spread, rtol=0.1)


@pytest.mark.parametrize("options", [{}, {"normalize_qk": True}, {"dtype": jnp.bfloat16}], ids=str)
def test_linen(options: dict[str, Any]) -> None:
    x, mask = normal(2, 9, 32), nn.make_causal_mask(jnp.ones((2, 9)))
    theirs = nn.MultiHeadDotProductAttention(4, dropout_rate=RATE, **options)
    ours = nn.MultiHeadDotProductAttention(4, dropout_rate=RATE, attention_fn=dot_product_attention, **options)
    weights = theirs.init(jax.random.key(0), x, deterministic=True)

    def run(module: Any, weights: Any, deterministic: bool) -> Any:
        made = module.apply(weights, x, mask=mask, deterministic=deterministic, rngs={"dropout": KEY})
        return (made.astype(jnp.float32) ** 2).sum(), made

    (_, mine), (_, exact) = run(ours, weights, True), run(theirs, weights, True)
    tolerance = 3e-2 if options.get("dtype") else 1e-5
    np.testing.assert_allclose(np.asarray(mine, np.float32), np.asarray(exact, np.float32), atol=tolerance)
    grads = [jax.grad(run, 1, has_aux=True)(module, weights, True)[0] for module in (ours, theirs)]
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(grads[1]))  # that of the keys' biases is 0, and noise
    for one, other in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance * largest)
    changed = np.asarray(run(ours, weights, False)[1] - mine, np.float32)
    like = np.asarray(run(theirs, weights, False)[1] - exact, np.float32)
    assert 0.5 < changed.std() / like.std() < 2


def test_linen_decodes() -> None:
    x = normal(2, 6, 32)
    modules = [
        nn.MultiHeadDotProductAttention(4, decode=True, **more) for more in ({}, {"attention_fn": dot_product_attention})
    ]
    made: list[list[Any]] = []
    for module in modules:
        variables = module.init(jax.random.key(0), x)
        params, cache, outs = variables["params"], variables["cache"], []
        for t in range(6):
            out, changed = module.apply({"params": params, "cache": cache}, x[:, t : t + 1], mutable=["cache"])
            cache = changed["cache"]
            outs.append(out)
        made.append(outs)
    close(made[1], made[0])


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2}], ids=str)
def test_nnx(options: dict[str, Any]) -> None:
    x = normal(2, 9, 32)
    ours, theirs = (
        nnx.MultiHeadAttention(4, 32, dropout_rate=RATE, decode=False, rngs=nnx.Rngs(0), attention_fn=function, **options)
        for function in (dot_product_attention, nnx.dot_product_attention)
    )

    def run(module: Any, deterministic: bool, **more: Any) -> Any:
        return module(x, deterministic=deterministic, rngs=nnx.Rngs(dropout=1), **more)

    for more in ({}, {"is_causal": True}, {"mask": nnx.make_causal_mask(jnp.ones((2, 9)))}):
        close(run(ours, True, **more), run(theirs, True, **more))
    close(*(nnx.grad(lambda m: (run(m, True) ** 2).sum())(module) for module in (ours, theirs)))
    changed, like = (run(m, False) - run(m, True) for m in (ours, theirs))
    assert 0.5 < float(changed.std() / like.std()) < 2
    close(run(ours, False), run(ours, False))


def test_options_of_ours_go_along() -> None:
    q, k, v = (normal(2, 9, 4, 8, seed=i) for i in range(3))
    options: dict[str, Any] = dict(is_causal=True, softcap=2.0, sinks=normal(4), scale=0.3)
    close(dot_product_attention(q, k, v, **options), flashtile.jax.dot_product_attention(q, k, v, **options))
    module = nn.MultiHeadDotProductAttention(4, attention_fn=partial(dot_product_attention, is_causal=True))
    x = normal(2, 9, 32)
    weights = module.init(jax.random.key(0), x)
    close(module.apply(weights, x), nn.MultiHeadDotProductAttention(4).apply(weights, x, mask=CAUSAL))


@pytest.mark.parametrize("precision", [None, "default", "high", "highest", jax.lax.Precision.HIGHEST, ("highest", "default")])
def test_precision(precision: Any) -> None:
    q, k, v = (normal(2, 9, 4, 8, seed=i) for i in range(3))
    close(dot_product_attention(q, k, v, precision=precision), nn.dot_product_attention(q, k, v))


def test_dtypes_are_promoted_as_flax_does() -> None:
    q, k, v = (normal(2, 9, 4, 8, seed=i) for i in range(3))
    assert dot_product_attention(q, k.astype(jnp.bfloat16), v).dtype == jnp.float32
    assert dot_product_attention(q, k, v, dtype=jnp.float16).dtype == jnp.float16


def test_refusals() -> None:
    q, k, v = (normal(2, 9, 4, 8, seed=i) for i in range(3))
    for options, message in (
        ({"dropout_rate": 0.1}, r"dropout_rng is None and dropout_rate 0\.1"),
        ({"dropout_rate": 1.5, "dropout_rng": KEY}, r"dropout p is 1\.5"),
        ({"deterministic": 2}, "deterministic is 2"),
        ({"mask": jnp.ones((3, 1, 9, 9))}, r"mask has shape \(3, 1, 9, 9\)"),
        ({"bias": jnp.ones((1, 1, 2, 1, 9, 9))}, r"bias has shape \(1, 1, 2, 1, 9, 9\)"),
        ({"precision": "exact"}, "precision is 'exact'"),
    ):
        with pytest.raises(InvalidProblem, match=message):
            dot_product_attention(q, k, v, **options)
    with pytest.raises(InvalidProblem, match="value is None"):
        dot_product_attention(q, k, None)
    with pytest.raises(InvalidProblem, match=r"key has shape \(1, 9, 4, 8\)"):
        dot_product_attention(q, k[:1], v)
    for name in ("module", "qk_attn_weights_einsum", "attn_weights_value_einsum", "einsum_dot_general"):
        with pytest.raises(NotSupported, match=f"{name} is given; attention weights are never formed"):
            dot_product_attention(q, k, v, **{name: jnp.einsum})
    with pytest.raises(TypeError, match="unexpected keyword argument 'promote_dtype'"):
        dot_product_attention(q, k, v, promote_dtype=None)


def test_the_function_of_jax_nns_name_loses_no_dropout() -> None:
    x = normal(2, 9, 32)
    module = nn.MultiHeadDotProductAttention(4, dropout_rate=RATE, attention_fn=flashtile.jax.dot_product_attention)
    weights = module.init(jax.random.key(0), x, deterministic=True)
    theirs = nn.MultiHeadDotProductAttention(4, dropout_rate=RATE)
    close(module.apply(weights, x, deterministic=True), theirs.apply(weights, x, deterministic=True))
    with pytest.raises(InvalidProblem, match=r"dropout_rng is given; .* must be flashtile\.jax\.flax\.dot_product_attention"):
        module.apply(weights, x, deterministic=False, rngs={"dropout": KEY})
    other = nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0), attention_fn=flashtile.jax.dot_product_attention)
    with pytest.raises(TypeError, match=r"must be flashtile\.jax\.flax\.dot_product_attention"):
        other(x)


def test_mha_is_no_attention_fn() -> None:
    """It would lose masks and dropout, whose names linen does not find in its signature, and scale by 1."""
    x, mask = normal(2, 9, 32), nn.make_causal_mask(jnp.ones((2, 9)))
    message = r"must be flashtile\.jax\.flax\.dot_product_attention"
    for options in ({}, {"dropout_rate": RATE}):
        module = nn.MultiHeadDotProductAttention(4, attention_fn=flashtile.jax.mha, **options)
        for given in ({}, {"mask": mask}):
            with pytest.raises(TypeError, match=message):
                module.init(jax.random.key(0), x, **given, deterministic=not options)
    other = nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0), attention_fn=flashtile.jax.mha)
    with pytest.raises(TypeError, match=message):
        other(x, mask=mask)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'sm_scales'$"):
        flashtile.jax.mha(*[normal(1, 3, 2, 8)] * 3, sm_scales=1.0)
