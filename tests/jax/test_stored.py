"""Keys and values of 8 bits, with scales, against the numbers that they stand for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flashtile
from flashtile.jax import dot_product_attention, dot_product_attention_varlen
from flashtile.jax.run import plan_p

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


def steps(function: Any, *given: Any) -> list[str]:
    """The problems of the steps of a program that kernels may run."""
    found: list[str] = []

    def walk(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            if equation.primitive is plan_p:
                found.append(equation.params["step"].problem.spell())
            for inner in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
            ):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    walk(getattr(inner, "jaxpr", inner))

    walk(jax.make_jaxpr(function)(*given).jaxpr)
    return found


def test_kernels_read_bytes_where_nothing_is_differentiated() -> None:
    q, k, v = draw(jnp.float8_e4m3fn)
    q, scale = q.astype(jnp.bfloat16), jnp.ones((2, 6, 2))
    attend = lambda q, **how: dot_product_attention(q, k, v, k_scale=2.0, v_scale=scale, **how)  # noqa: E731
    (forward,) = steps(attend, q)
    assert forward.endswith("stored=e4m3:head:token)")
    assert not any("stored" in step for step in steps(jax.grad(lambda q: attend(q).astype(jnp.float32).sum()), q))
    assert not any("stored" in step for step in steps(attend, q.astype(jnp.float32)))
    assert not any("stored" in step for step in steps(lambda q: attend(q, returns=("lse",)), q))
    cu = jnp.array([0, 5, 12], jnp.int32)
    packed = [x.reshape(12, *x.shape[2:]) for x in (q, k, v)]
    (of_items,) = steps(lambda q: dot_product_attention_varlen(q, *packed[1:], cu, v_scale=jnp.ones((2, 2))), packed[0])
    assert "stored=e4m3::head" in of_items


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", shapes())
def test_16_bit_queries(kind: str, how: str) -> None:
    """As with numbers in memory, also mapped and differentiated by q and by a scale."""
    q, k, v = draw(KINDS[kind])
    q = q.astype(jnp.bfloat16)
    scale = jax.random.uniform(jax.random.key(7), shapes()[how]) + 0.5

    def loss(q: Any, scale: Any, implementation: Any) -> Any:
        out, residual = dot_product_attention(
            q, k, v, is_causal=True, k_scale=scale, v_scale=2.0, return_residual=True, implementation=implementation
        )
        return (out.astype(jnp.float32) ** 2).sum() + residual.sum(), out

    for function in (loss, jax.grad(loss, (0, 1), has_aux=True)):
        found, exact = (jax.jit(function, static_argnums=2)(q, scale, name) for name in (None, "xla"))
        jax.tree.map(np.testing.assert_array_equal, found, exact)
    mapped = jax.vmap(lambda k: dot_product_attention(q, k, v, k_scale=scale))(jnp.stack([k, k[::-1]]))
    np.testing.assert_array_equal(mapped[0], dot_product_attention(q, k, v, k_scale=scale))
    np.testing.assert_array_equal(mapped[1], dot_product_attention(q, k[::-1], v, k_scale=scale))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scales_of_an_item_alone(dtype: Any) -> None:
    q, k, v = (x[:1] for x in draw(jnp.int8))
    q = q.astype(dtype)
    scale = jax.random.uniform(jax.random.key(7), (6, 2)) + 0.5
    found = dot_product_attention(q[0], k[0], v[0], k_scale=scale, v_scale=scale[0])
    np.testing.assert_array_equal(found, dot_product_attention(q, k, v, k_scale=scale[None], v_scale=scale[:1])[0])


@pytest.mark.parametrize("tokens", [False, True])
def test_scales_are_cut_as_their_keys_are(tokens: bool) -> None:
    q, k, v = draw(jnp.float8_e4m3fn)
    q, scale = q.astype(jnp.bfloat16), jax.random.uniform(jax.random.key(7), (2, 6, 2) if tokens else (2, 2)) + 0.5
    attend = jax.jit(lambda q, k, v: dot_product_attention(q, k, v, k_scale=scale, v_scale=scale))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("b", "h"))
    cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("b", None, "h"))
    parts = [jax.device_put(x, cut) for x in (q, k, v)]
    found = attend(*parts)
    assert found.sharding.is_equivalent_to(cut, 4)
    assert "all-gather" not in attend.lower(*parts).compile().as_text()
    np.testing.assert_array_equal(found, attend(q, k, v))
