"""Keys and values of 8 bits, with scales, against the numbers that they stand for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flashtile
from flashtile.jax import dot_product_attention, dot_product_attention_varlen

KINDS = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2, "int8": jnp.int8}


def draw(kind: Any) -> list[Any]:
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 6, heads, 16)) for i, heads in enumerate((4, 2, 2)))
    return [q, *((x * 3.0).astype(kind) for x in (k, v))]


def shapes() -> dict[str, tuple[int, ...]]:
    return {"all": (), "heads": (2,), "items": (2, 2), "tokens": (2, 6, 2)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", shapes())
def test_numbers(kind: str, how: str) -> None:
    q, k, v = draw(KINDS[kind])
    scale = jax.random.uniform(jax.random.key(7), shapes()[how]) + 0.5
    rows = scale if how == "tokens" else jnp.broadcast_to(scale, (2, 2))[:, None]
    wide = k.astype(jnp.float32) * rows[..., None], v.astype(jnp.float32) * 0.5

    def loss(q: Any, k: Any, v: Any, **scales: Any) -> Any:
        return (dot_product_attention(q, k, v, is_causal=True, **scales) ** 2).sum()

    found = jax.jit(jax.value_and_grad(loss))(q, k, v, k_scale=scale, v_scale=jnp.float32(0.5))
    np.testing.assert_allclose(found[0], loss(q, *wide), rtol=1e-6)
    np.testing.assert_allclose(found[1], jax.grad(loss)(q, *wide), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["items", "tokens"])
def test_items_one_after_another(how: str) -> None:
    q, k, v = (x.reshape(12, *x.shape[2:]) for x in draw(jnp.float8_e4m3fn))
    cu = jnp.array([0, 5, 12], jnp.int32)
    scale = jax.random.uniform(jax.random.key(7), (2, 2) if how == "items" else (12, 2)) + 0.5
    rows = scale if how == "tokens" else jnp.repeat(scale, jnp.array([5, 7]), axis=0)
    wide = [x.astype(jnp.float32) * rows[..., None] for x in (k, v)]
    found = dot_product_attention_varlen(q, k, v, cu, k_scale=scale, v_scale=scale)
    np.testing.assert_allclose(found, dot_product_attention_varlen(q, *wide, cu), rtol=1e-6)


def test_scales_of_padding_are_nobodys() -> None:
    """As in torch; where every token counts NaN is refused."""
    q, k, v = draw(jnp.float8_e4m3fn)
    scale = jnp.full((2, 6, 2), 0.5).at[:, 4:].set(jnp.nan)
    lengths = jnp.array([4, 3], jnp.int32)
    attend = lambda scale: dot_product_attention(q, k, v, key_value_seq_lengths=lengths, k_scale=scale, v_scale=scale)  # noqa: E731
    np.testing.assert_array_equal(attend(scale), attend(jnp.float32(0.5)))
    starts, ends = jnp.array([0, 2, 3], jnp.int32), jnp.array([0, 3, 4], jnp.int32)
    packed = lambda scale: dot_product_attention_varlen(q[0], k[0], v[0], starts, ends, k_scale=scale, v_scale=scale)  # noqa: E731
    np.testing.assert_array_equal(packed(scale[0])[:3], packed(jnp.float32(0.5))[:3])
    with pytest.raises(flashtile.InvalidProblem, match="k_scale holds nan"):
        dot_product_attention(q, k, v, k_scale=scale)


def test_errors() -> None:
    q, k, v = draw(jnp.float8_e4m3fn)
    for scales, says in (
        ({"k_scale": 0.0}, "k_scale holds 0.0; it must be positive and finite"),
        ({"v_scale": jnp.array([1.0, jnp.nan])}, "v_scale holds nan; it must be positive and finite"),
        ({"k_scale": jnp.ones(3)}, r"k_scale has shape \(3,\); it must be \(\) for a scale of all"),
        ({"k_scale": jnp.ones(2, jnp.bfloat16)}, "k_scale is bfloat16; it must be float32"),
    ):
        with pytest.raises(flashtile.InvalidProblem, match=says):
            dot_product_attention(q, k, v, **scales)
    with pytest.raises(flashtile.InvalidProblem, match="k_scale is given and key is float32"):
        dot_product_attention(q, q[:, :, :2], q[:, :, :2], k_scale=2.0)
    with pytest.raises(flashtile.InvalidProblem, match="value is float32 and key is float8_e4m3fn"):
        dot_product_attention(q, k, v.astype(jnp.float32))
